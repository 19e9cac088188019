"""Worker hangs, crash loops, quorum and recycling, as seen by clients and operators.

Single worker deaths are in `test_failures`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support import models
from support.processes import Gateway, eventually, running, suspended

from iskander.errors import PoisonedRequest

ONE = {"groups": ["0"]}
TWO = {"groups": ["0", "1"]}
BATCH = pa.record_batch({"x": [1, 2]})


def served(folder: Path) -> list[dict[str, object]]:
    return [
        {"name": "ids", "path": str(models.row_ids(folder / "ids")), "intra_threads": 1},
        {"name": "slow", "path": str(models.slow(folder / "slow", 100)), "intra_threads": 1},
    ]


def health(gateway: Gateway) -> dict[str, Any]:
    with gateway.client() as client:
        return client.health()


def score(gateway: Gateway) -> list[int]:
    with gateway.client() as client:
        (result,) = client.stream("ids", [BATCH], timeout_s=20)
        values: list[int] = result["y"].to_pylist()
        return values


def state_of(gateway: Gateway, index: int = 0) -> str:
    state: str = gateway.stats()["workers"][index]["state"]
    return state


def kill_when_ready(gateway: Gateway, index: int = 0) -> None:
    """SIGKILL a slot's worker once it is ready; waits until the stats show the exit."""
    eventually(lambda: state_of(gateway, index) == "ready", what="a ready worker")
    pid = gateway.kill_worker(index)
    eventually(lambda: gateway.stats()["workers"][index]["pid"] != pid, what="the worker's end")


@pytest.mark.over_zmq
@pytest.mark.slow
def test_hanging_model_is_logged_with_a_stack(tmp_path: Path) -> None:
    """The worker is ended with a stack and the batch id; the batch is retried only once."""
    with running(tmp_path, served(tmp_path), workers=dict(ONE, hang_s=0.5)) as gateway:
        with gateway.client() as client, pytest.raises(PoisonedRequest):
            list(client.stream("slow", [pa.record_batch({"x": [10_000_000]})]))
        gateway.wait_ready()
        assert score(gateway) == [4, 7]
        log = gateway.text()
    assert "ms, with batch 1 of model `slow/1`" in log
    assert "Fatal Python error: Aborted" in log and "in run_with_iobinding" in log
    assert "ended by SIGABRT, which this gateway sent" in log


@pytest.mark.over_zmq
def test_requests_of_a_suspended_worker_run_on_another(tmp_path: Path) -> None:
    """A suspended process does not handle SIGABRT, so SIGKILL follows."""
    with running(tmp_path, served(tmp_path), workers=dict(TWO, hang_s=0.5)) as gateway:
        for index in (0, 1):
            eventually(lambda index=index: state_of(gateway, index) == "ready", what="both workers")
        first = gateway.worker_pids()[0]
        with suspended(first):
            assert [score(gateway) for _ in range(4)] == [[4, 7]] * 4
        eventually(lambda: len(set(gateway.worker_pids()) - {first}) == 2, what="a new worker")
        assert "ended by SIGKILL, which this gateway sent" in gateway.text()


def test_segmentation_fault_is_logged(tmp_path: Path) -> None:
    with running(tmp_path, served(tmp_path), workers=dict(ONE)) as gateway:
        os.kill(gateway.worker_pids()[0], signal.SIGSEGV)
        eventually(lambda: "ended by SIGSEGV" in gateway.text(), what="the log line")
        gateway.wait_ready()


@pytest.mark.slow
def test_crash_loop_is_reported_and_ends_with_steady_service(tmp_path: Path) -> None:
    with running(tmp_path, served(tmp_path), workers=dict(ONE, crash_loop=2)) as gateway:
        kill_when_ready(gateway)
        kill_when_ready(gateway)
        assert state_of(gateway) == "crash loop"
        reason = eventually(lambda: health(gateway)["models"]["ids"].get("reason"), what="a reason")
        assert reason == "worker 0 is in a crash loop: 2 deaths in a row, the last by SIGKILL"
        eventually(lambda: state_of(gateway) == "ready", what="the next start")
        assert not health(gateway)["ready"], "no steady service yet"
        assert score(gateway) == [4, 7], "serves while not ready"
        eventually(lambda: health(gateway)["ready"], what="a steady worker")


@pytest.mark.slow
def test_missing_model_file_is_reported(tmp_path: Path) -> None:
    """The model file is missing when the worker restarts, and is restored later."""
    with running(tmp_path, served(tmp_path), workers=dict(ONE)) as gateway:
        file = tmp_path / "ids" / "model.onnx"
        file.rename(tmp_path / "away")
        gateway.kill_worker()

        def is_reported() -> bool:
            return "worker 0: model file" in str(health(gateway))

        eventually(is_reported, what="the reason")
        assert not health(gateway)["ready"]
        (tmp_path / "away").rename(file)
        gateway.wait_ready()


def test_server_without_quorum_is_not_ready_but_serves(tmp_path: Path) -> None:
    with running(tmp_path, served(tmp_path), workers=dict(TWO, quorum=2, hang_s=30)) as gateway:
        assert [health(gateway)["ready"], score(gateway)] == [True, [4, 7]]
        with suspended(gateway.worker_pids()[0]):
            gateway.kill_worker(1)
            eventually(lambda: not health(gateway)["ready"], what="not ready")
            assert "1 of 2 workers are ready" in health(gateway)["models"]["ids"]["reason"]
        assert score(gateway) == [4, 7]
        gateway.wait_ready()


def test_impossible_quorum_is_rejected(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, served(tmp_path), workers=dict(ONE, quorum=2))
    try:
        gateway.start(is_ready=False)
        assert gateway.wait() == 78
        assert "workers.quorum = 2 can never be met" in gateway.text()
    finally:
        gateway.end()


@pytest.mark.over_zmq
def test_only_worker_is_recycled_without_rejections(tmp_path: Path) -> None:
    with running(tmp_path, served(tmp_path), workers=dict(ONE, recycle_batches=40)) as gateway:
        outcomes: Counter[str] = Counter()

        def call() -> None:
            with gateway.client() as client:
                for _ in range(50):
                    try:
                        is_correct = client.score("ids", BATCH)["y"].to_pylist() == [4, 7]
                        outcomes["right" if is_correct else "WRONG"] += 1
                    except Exception as error:
                        outcomes[repr(error)] += 1

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes == {"right": 200}
        assert gateway.stats()["workers"][0]["starts"] > 2
        assert "boot failure" not in gateway.text() and "crash" not in gateway.text()


@pytest.mark.slow
def test_workers_are_recycled_one_at_a_time(tmp_path: Path) -> None:
    """Both are due at once; one of them always serves."""
    with running(tmp_path, served(tmp_path), workers=dict(TWO, recycle_batches=20)) as gateway:
        with gateway.client() as client:
            results = client.stream("ids", [BATCH] * 400)
            assert [batch["y"].to_pylist() for batch in results] == [[4, 7]] * 400
        eventually(
            lambda: all(w["starts"] > 1 for w in gateway.stats()["workers"]), what="two new workers"
        )
        gateway.wait_ready()
        log = gateway.text()
    is_recycling = False
    for line in log.splitlines():
        if "recycle due" in line:
            assert not is_recycling, "two workers were recycled at once"
            is_recycling = True
        elif "is ready" in line:
            is_recycling = False


def test_lame_duck_is_not_ready_but_serves(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, served(tmp_path), workers=dict(ONE), server={"lame_duck_s": 3.0})
    try:
        gateway.start()
        with gateway.client() as client:
            gateway.signal(signal.SIGTERM)
            eventually(lambda: not client.health()["ready"], what="not ready")
            assert client.health()["reason"] == "the server is stopping"
            assert client.score("ids", BATCH)["y"].to_pylist() == [4, 7]
            results = client.stream("slow", [pa.record_batch({"x": [6000]})] * 2)
            assert [batch.num_rows for batch in results] == [1, 1]
        assert gateway.wait() == 0
        assert "requests in queues" in gateway.text()
    finally:
        gateway.end()


def test_no_module_is_imported_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise files there with the name of a module would run in the child processes."""
    directory = tmp_path / "here"
    directory.mkdir()
    for name in ("iskander", "iskander_worker", "numpy", "msgspec"):
        (directory / f"{name}.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(directory)
    served = [{"name": "m", "path": str(models.row_ids(tmp_path / "m")), "intra_threads": 1}]

    with running(tmp_path, served, server={"processes": 2}) as gateway, gateway.client() as client:
        scored = client.score("m", pa.record_batch({"x": [1, 2]}))

    assert scored["y"].to_pylist() == [4, 7]
