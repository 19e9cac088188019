"""Workers that serve one model: planned, replaced, kept over a restart, started by hand."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support import models
from support.processes import BIN, Gateway, WorkerProcess, eventually, running
from support.python_models import entry

from iskander.errors import IskanderError

PLAIN = "class Model(Base): pass\n"
BATCH = pa.record_batch({"x": [1, 2, 3]})
SEVERAL = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one cpu")


def served(folder: Path, source: str = PLAIN, **settings: Any) -> list[dict[str, Any]]:
    ids = {"name": "ids", "path": str(models.row_ids(folder / "ids")), "intra_threads": 1}
    return [ids, entry(folder / "own", source, **settings)]


def answers(gateway: Gateway) -> bool:
    """Whether both models compute."""
    try:
        with gateway.client() as client:
            return all(
                client.score(name, BATCH)["y"].to_pylist() == [4, 7, 10] for name in ("ids", "own")
            )
    except (IskanderError, pa.ArrowException):
        return False


def pids(gateway: Gateway) -> dict[str, int]:
    return {worker["pool"]: worker["pid"] for worker in gateway.stats()["workers"]}


def check(gateway: Gateway) -> subprocess.CompletedProcess[str]:
    command = [BIN / "iskander", "check", gateway.config]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@SEVERAL
def test_the_plan_is_printed_and_kept_to(tmp_path: Path) -> None:
    with running(tmp_path, served(tmp_path)) as gateway:
        planned = check(gateway)
        assert planned.returncode == 0, planned.stderr
        rows = re.findall(r"^(worker \d+(?: of \S+)?) +\d+ +(\S+)", planned.stdout, re.MULTILINE)
        assert [name for name, _ in rows] == ["worker 0", "worker 1 of own/1"]
        for (_, cpus), worker in zip(rows, gateway.stats()["workers"], strict=True):
            at = os.sched_getaffinity(worker["pid"])
            assert at == set(worker["cpus"])
            assert min(at) == int(re.split("[-,]", cpus)[0])
        first, second = (set(worker["cpus"]) for worker in gateway.stats()["workers"])
        assert not first & second


def test_what_a_model_prints_while_it_is_checked_does_not_disturb(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, served(tmp_path, PLAIN + "print('hello')\n"))
    checked = check(gateway)
    assert checked.returncode == 0, checked.stderr
    assert "hello" not in checked.stdout
    assert re.search(r"^own/1 +Python ", checked.stdout, re.MULTILINE)


def test_a_check_says_what_the_start_would(tmp_path: Path) -> None:
    checked = check(Gateway(tmp_path, served(tmp_path, "class Other(Base): pass\n")))
    assert checked.returncode == 1
    assert "model `own/1`: no class `Model` in `model.py`" in checked.stderr


def test_a_killed_one_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    with running(tmp_path, served(tmp_path)) as gateway:
        before = pids(gateway)
        gateway.kill_worker(1)
        eventually(lambda: pids(gateway)["own/1"] not in (0, before["own/1"]), what="another")
        eventually(lambda: answers(gateway), what="answers")
        assert pids(gateway)[""] == before[""]


def test_one_that_has_computed_enough_is_replaced_in_order(tmp_path: Path) -> None:
    with running(tmp_path, served(tmp_path), workers={"recycle_batches": 10}) as gateway:
        before = pids(gateway)["own/1"]
        with gateway.client() as client:
            for _ in range(12):
                assert client.score("own", BATCH)["y"].to_pylist() == [4, 7, 10]
        eventually(lambda: pids(gateway)["own/1"] not in (0, before), what="another")


def test_workers_outlive_their_gateway_and_come_back_to_their_places(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, served(tmp_path), workers={"reattach_s": 20.0})
    try:
        gateway.start()
        gateway.wait_full()
        before = pids(gateway)
        assert gateway.process is not None
        gateway.process.kill()
        gateway.process.wait()
        gateway.start()
        gateway.wait_full()
        assert pids(gateway) == before
        assert answers(gateway)
        assert gateway.stop() == 0
    finally:
        gateway.end()


def test_several_gateway_processes_share_them(tmp_path: Path) -> None:
    with running(tmp_path, served(tmp_path), server={"processes": 2}) as gateway:
        seen = {}
        deadline = iter(range(200))
        while len(seen) < 2 and next(deadline, None) is not None:
            stats = gateway.stats()
            seen[stats["process"]] = stats["workers"][1]["pid"]
        assert len(set(seen.values())) == 1
        for _ in range(10):
            assert answers(gateway)


def test_one_that_a_service_manager_starts_says_whose_it_is(tmp_path: Path) -> None:
    """One that serves all models does not take a place of one that serves only one."""
    with running(tmp_path, served(tmp_path), workers={"spawn": False}) as gateway:
        shared = WorkerProcess(gateway.attach_socket, tmp_path)
        other = WorkerProcess(gateway.attach_socket, tmp_path, "--wait-s", "5")
        own = WorkerProcess(gateway.attach_socket, tmp_path, "--pool", "own/1")
        try:
            eventually(lambda: answers(gateway), what="answers")
            ended = eventually(
                lambda: [each for each in (shared, other) if each.process.poll() is not None],
                what="the refusal of one",
            )
            assert [each.process.returncode for each in ended] == [76]
            assert pids(gateway)["own/1"] == own.pid
        finally:
            for worker in (shared, other, own):
                worker.end()
