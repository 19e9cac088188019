"""Failures of workers and gateways: exits, hangs, drains and restarts."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from pyarrow import flight
from support import models, raw
from support.processes import (
    BIN,
    Gateway,
    WorkerProcess,
    eventually,
    processes_of,
    running,
    suspended,
)

from iskander.errors import DeadlineExceeded, Draining, IskanderError, NotReady, PoisonedRequest

CHECK = "/grpc.health.v1.Health/Check"


def served(folder: Path) -> list[dict[str, object]]:
    return [
        {"name": "ids", "path": str(models.row_ids(folder / "ids")), "intra_threads": 1},
        {"name": "slow", "path": str(models.slow(folder / "slow", 100)), "intra_threads": 1},
    ]


ONE = {"groups": ["0"], "reattach_s": 10.0}
TWO = {"groups": ["0", "1"], "reattach_s": 10.0}
BATCH = pa.record_batch({"x": [1, 2]})


def score_is_right(gateway: Gateway) -> bool:
    with gateway.client() as client:
        try:
            return client.score("ids", BATCH)["y"].to_pylist() == [4, 7]
        except NotReady:
            return False


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    with running(tmp_path, served(tmp_path), workers=dict(ONE)) as ready:
        yield ready


class Scoring(threading.Thread):
    """Scores one batch of `slow` in another thread."""

    def __init__(self, gateway: Gateway, turns: int) -> None:
        super().__init__()
        self._gateway = gateway
        self._batch = pa.record_batch({"x": [turns]})
        self.result: list[int] | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        with self._gateway.client() as client:
            try:
                self.result = client.score("slow", self._batch)["y"].to_pylist()
            except Exception as error:
                self.error = error


def is_batch_running(gateway: Gateway) -> bool:
    return any(worker["in_flight"] for worker in gateway.stats()["workers"])


@pytest.mark.slow
def test_batch_of_a_killed_worker_is_retried_without_an_error(gateway: Gateway) -> None:
    """The replacement returns the result; the lane is not ready before the replacement is."""
    down, up = [b"\x08\x02"], [b"\x08\x01"]
    with raw.RawClient(gateway.address) as client:
        # The client is a process that takes time to start.
        assert client.call(CHECK, [b""])["frames"] == up
        scoring = Scoring(gateway, 3000)
        eventually(lambda: is_batch_running(gateway), what="a running batch")
        pid = gateway.kill_worker()
        eventually(lambda: client.call(CHECK, [b""])["frames"] == down, what="NOT_SERVING")
        eventually(lambda: client.call(CHECK, [b""])["frames"] == up, what="SERVING")
    scoring.join()
    assert (scoring.result, scoring.error) == ([3000], None)
    assert score_is_right(gateway)
    assert gateway.worker_pids() != [pid]
    stats = gateway.wait_idle()
    assert stats["workers"][0]["starts"] == 2
    assert stats["lanes"]["slow/1"]["retried"] == 1


@pytest.mark.over_zmq(is_slow=False)
def test_batches_of_a_killed_worker_run_on_another_at_once(tmp_path: Path) -> None:
    """The other worker gets the batch before the killed worker is replaced."""
    with running(tmp_path, served(tmp_path), workers=dict(TWO)) as gateway:
        scoring = Scoring(gateway, 3000)
        eventually(lambda: is_batch_running(gateway), what="a running batch")
        busy = [bool(w["in_flight"]) for w in gateway.stats()["workers"]].index(True)
        gateway.kill_worker(busy)

        def is_moved() -> bool:
            workers = gateway.stats()["workers"]
            return workers[1 - busy]["in_flight"] == 1 and workers[busy]["state"] != "ready"

        eventually(is_moved, what="the batch on the other worker")
        scoring.join()
        assert (scoring.result, scoring.error) == ([3000], None)


@pytest.mark.over_zmq
def test_request_that_ended_two_workers_is_poisoned(gateway: Gateway) -> None:
    """The caller and the log get the error, and the third worker does not run the request."""
    scoring = Scoring(gateway, 1_000_000)

    def losses() -> int:
        lane = gateway.stats()["lanes"]["slow/1"]
        return int(lane["retried"] + lane["failed"].get("poisoned", 0))

    for count in (1, 2):
        eventually(lambda: is_batch_running(gateway), what="a running batch")
        gateway.kill_worker()
        # A new worker may run it before the next poll.
        eventually(lambda count=count: losses() == count, what="the loss of the batch")
    scoring.join()
    assert isinstance(scoring.error, PoisonedRequest) and not scoring.error.retryable
    eventually(lambda: score_is_right(gateway), what="a new worker")
    assert gateway.wait_idle()["lanes"]["slow/1"]["failed"] == {"poisoned": 1}
    assert "2 workers died while they ran" in gateway.text()


@pytest.mark.over_zmq
def test_run_is_cancelled_after_its_caller_timed_out(gateway: Gateway) -> None:
    """ONNX Runtime stops between two nodes, so the worker keeps running."""
    pids = gateway.worker_pids()
    with gateway.client() as client:
        with pytest.raises(DeadlineExceeded):
            batch = pa.record_batch({"x": [10_000_000]})
            list(client.stream("slow", [batch], timeout_s=0.5))
        gateway.wait_idle()
        assert score_is_right(gateway)
    assert gateway.worker_pids() == pids


def test_stream_without_workers_fails_as_unavailable(tmp_path: Path) -> None:
    """With `spawn = false` no replacement is expected, so the request does not wait."""
    with running(tmp_path, served(tmp_path), workers=dict(ONE, spawn=False)) as gateway:
        worker = WorkerProcess(gateway.attach_socket, tmp_path)
        eventually(lambda: gateway.stats()["ready"], what="ready")
        client = flight.connect(f"grpc://{gateway.address}")
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_path("ids"))
        writer.begin(BATCH.schema)
        writer.write_batch(BATCH)
        assert reader.read_chunk().data["y"].to_pylist() == [4, 7]
        worker.end()
        eventually(lambda: not gateway.stats()["ready"], what="not ready")
        with pytest.raises(flight.FlightUnavailableError, match="no ready worker"):
            writer.write_batch(BATCH)
            reader.read_chunk()
        with pytest.raises(flight.FlightUnavailableError):
            writer.close()
        client.close()


@pytest.mark.slow
def test_requests_wait_while_a_killed_worker_is_replaced(gateway: Gateway) -> None:
    with gateway.client() as client:
        for _ in range(3):
            gateway.kill_worker()
            eventually(lambda: not gateway.stats()["ready"], what="not ready")
            assert client.score("ids", BATCH)["y"].to_pylist() == [4, 7]
    eventually(lambda: score_is_right(gateway), what="a new worker")


@pytest.mark.slow
def test_streams_continue_while_one_of_two_workers_is_killed(tmp_path: Path) -> None:
    """Each batch of eight streams gets the correct result during four kills."""
    with running(tmp_path, served(tmp_path), workers=dict(TWO)) as gateway:
        outcomes: list[str] = []
        is_over = threading.Event()

        def stream(number: int) -> None:
            random = np.random.default_rng(number)
            with gateway.client() as client:
                while not is_over.is_set():
                    sent = [random.integers(0, 1 << 40, random.integers(1, 500)) for _ in range(8)]
                    batches = [pa.record_batch({"x": values}) for values in sent]
                    count = 0
                    try:
                        for values, scored in zip(
                            sent, client.stream("ids", batches), strict=False
                        ):
                            right = scored["y"].to_numpy().tolist() == (3 * values + 1).tolist()
                            outcomes.append("right" if right else "WRONG")
                            count += 1
                    except IskanderError as error:
                        outcomes.append(f"{error.code}: {error.message}")
                    else:
                        outcomes.append("whole" if count == len(sent) else "SHORT")
                    is_over.wait(0.01)

        threads = [threading.Thread(target=stream, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for turn in range(4):
            index = turn % 2
            killed = gateway.kill_worker(index)

            def is_replaced(index: int = index, killed: int = killed) -> bool:
                worker = gateway.stats()["workers"][index]
                return worker["state"] == "ready" and worker["pid"] != killed

            eventually(is_replaced, what="a replacement")
        is_over.set()
        for thread in threads:
            thread.join()
        gateway.wait_idle()
    assert set(outcomes) == {"right", "whole"}
    assert outcomes.count("whole") > 8


@pytest.mark.over_zmq
@pytest.mark.slow
def test_worker_without_heartbeats_is_killed_and_replaced(tmp_path: Path) -> None:
    workers = dict(ONE, hang_s=1.0)
    with running(tmp_path, served(tmp_path), workers=workers) as gateway:
        (pid,) = gateway.worker_pids()
        with suspended(pid), gateway.client() as client:
            assert client.score("ids", BATCH)["y"].to_pylist() == [4, 7]
            assert not psutil.pid_exists(pid)
        assert score_is_right(gateway)
        assert "no heartbeat for 10" in gateway.text(), "not detected within 100 ms of the limit"


@pytest.mark.over_zmq(is_slow=False)
def test_sigterm_completes_accepted_requests(tmp_path: Path) -> None:
    """An open stream gets the results of its accepted batches, then the error `draining`."""
    with running(tmp_path, served(tmp_path), workers=dict(ONE)) as gateway:
        client = flight.connect(f"grpc://{gateway.address}")
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_path("slow"))
        batch = pa.record_batch({"x": [100]})
        writer.begin(batch.schema)
        for _ in range(5):
            writer.write_batch(batch)
        accepted = eventually(
            lambda: gateway.stats()["lanes"]["slow/1"].get("requests") == 5,
            what="five accepted batches",
        )
        assert accepted
        gateway.signal(signal.SIGTERM)
        result_count = 0
        with pytest.raises(flight.FlightUnavailableError, match="stopping"):
            while True:
                assert reader.read_chunk().data["y"].to_pylist() == [100]
                result_count += 1
        assert result_count == 5
        with pytest.raises(flight.FlightUnavailableError):
            writer.close()
        client.close()
        assert gateway.wait() == 0
    assert "stopped" in gateway.text()


@pytest.mark.slow
def test_new_streams_are_rejected_during_a_drain(tmp_path: Path) -> None:
    with running(tmp_path, served(tmp_path), workers=dict(ONE)) as gateway:
        health = raw.RawClient(gateway.address)
        with health, gateway.client() as client, gateway.client() as late:
            assert health.call(CHECK, [b""])["frames"] == [b"\x08\x01"]
            late.health()
            go_on = threading.Event()

            def batches() -> Iterator[pa.RecordBatch]:
                yield pa.record_batch({"x": [1]})
                go_on.wait(10)
                yield pa.record_batch({"x": [3000]})
                yield pa.record_batch({"x": [3000]})

            results = client.stream("slow", batches())
            assert next(results).num_rows == 1
            go_on.set()
            eventually(
                lambda: gateway.stats()["input_arena"]["leases"] == 2, what="two accepted batches"
            )
            gateway.signal(signal.SIGTERM)
            eventually(lambda: "draining" in gateway.text(), what="draining")
            with pytest.raises(Draining):
                late.score("ids", BATCH)
            assert health.call(CHECK, [b""])["frames"] == [b"\x08\x02"]
            assert [batch.num_rows for batch in results] == [1, 1]
        assert gateway.wait() == 0


@pytest.mark.slow
def test_health_watch_receives_not_serving_during_a_drain(tmp_path: Path) -> None:
    with running(tmp_path, served(tmp_path), workers=dict(ONE)) as gateway:
        health = "/grpc.health.v1.Health/"
        with raw.RawClient(gateway.address) as client:
            # Connects the client before the watch.
            client.call(health + "Check", [b""], deadline_s=30)
            watched: list[dict[str, object]] = []

            def watch() -> None:
                watched.append(client.call(health + "Watch", [b""], deadline_s=30))

            thread = threading.Thread(target=watch)
            thread.start()
            with gateway.client() as other:
                results = other.stream("slow", [pa.record_batch({"x": [3000]})])
                drainer = threading.Timer(0.5, gateway.signal, (signal.SIGTERM,))
                drainer.start()
                assert [batch.num_rows for batch in results] == [1]
                drainer.join()
            thread.join()
        assert watched[0]["frames"] == [b"\x08\x01", b"\x08\x02"]
        assert gateway.wait() == 0


@pytest.mark.over_zmq
def test_second_sigterm_stops_the_gateway_immediately(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, served(tmp_path), workers=dict(ONE)).start()
    try:
        with gateway.client() as client:
            results = client.stream("slow", [pa.record_batch({"x": [50_000]})])

            def read() -> None:
                with pytest.raises(IskanderError):
                    next(results)

            thread = threading.Thread(target=read)
            thread.start()
            eventually(
                lambda: gateway.stats()["workers"][0]["in_flight"] == 1, what="a running batch"
            )
            gateway.signal(signal.SIGTERM)
            eventually(lambda: "draining" in gateway.text(), what="draining")
            gateway.signal(signal.SIGTERM)
            assert gateway.wait(5) == 130
            thread.join()
        eventually(lambda: processes_of(gateway.runtime) == [], what="the exit of the workers")
    finally:
        gateway.end()


@pytest.mark.over_zmq(is_slow=False)
def test_killed_gateway_leaves_nothing_and_the_next_one_adopts_its_workers(
    tmp_path: Path,
) -> None:
    """With the same address and runtime directory, the worker keeps its process and its models."""
    first = Gateway(tmp_path, served(tmp_path), workers=dict(ONE)).start()
    try:
        (pid,) = first.worker_pids()
        shm = sorted(Path("/dev/shm").iterdir())
        first.signal(signal.SIGKILL)
        first.wait()
        assert [process.pid for process in processes_of(first.runtime)] == [pid]
        server = {"address": first.address, "runtime_directory": str(first.runtime)}
        second = Gateway(tmp_path, served(tmp_path), workers=dict(ONE), server=server).start()
        try:
            assert second.address == first.address
            assert second.worker_pids() == [pid]
            assert score_is_right(second)
            assert second.stats()["workers"][0]["starts"] == 0
            assert sorted(Path("/dev/shm").iterdir()) == shm
            assert second.stop() == 0
        finally:
            second.end()
        remaining = sorted(path.name for path in first.runtime.iterdir())
        assert remaining == ["gateway.lock", "worker-0.lock"]
    finally:
        first.end()


@pytest.mark.over_zmq
def test_late_results_for_a_killed_gateway_are_discarded(tmp_path: Path) -> None:
    """One of two workers is busy when the gateway is killed.

    The next gateway attaches both, and its first batches get their own rows.
    """
    # Longer than the batch takes on a slow machine, so that the worker reattaches.
    two = TWO | {"reattach_s": 60.0}
    first = Gateway(tmp_path, served(tmp_path), workers=two).start()
    try:
        # One worker suffices for readiness; the other may still attach.
        pids = eventually(
            lambda: len(attached := set(first.worker_pids())) == 2 and attached, what="both workers"
        )
        with first.client() as client:
            results = client.stream("slow", [pa.record_batch({"x": [4000]})])

            def read() -> None:
                with pytest.raises(IskanderError):
                    next(results)

            thread = threading.Thread(target=read)
            thread.start()
            eventually(
                lambda: any(w["in_flight"] for w in first.stats()["workers"]), what="a busy worker"
            )
            first.signal(signal.SIGKILL)
            first.wait()
            thread.join()
        server = {"address": first.address, "runtime_directory": str(first.runtime)}
        second = Gateway(tmp_path, served(tmp_path), workers=two, server=server)
        second.start()
        try:
            assert all(score_is_right(second) for _ in range(20))
            eventually(lambda: set(second.worker_pids()) == pids, 60.0, what="the same workers")
            assert all(score_is_right(second) for _ in range(20))
            assert second.stats()["late_messages"] == 0
            assert second.stop() == 0
        finally:
            second.end()
    finally:
        first.end()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_workers_of_a_service_manager_keep_their_models_at_a_restart(
    tmp_path: Path, processes: int
) -> None:
    """A stopped gateway leaves them running, and the next one loads nothing again."""
    workers = ONE | {"spawn": False}
    first = Gateway(tmp_path, served(tmp_path), workers=workers, server={"processes": processes})
    first.start()
    worker = WorkerProcess(first.attach_socket, tmp_path, "--group", "0")
    try:
        first.wait_ready()
        eventually(lambda: score_is_right(first), what="a result")
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
        assert worker.process.poll() is None
        server = {"processes": processes, "runtime_directory": str(first.runtime)}
        second = Gateway(tmp_path, served(tmp_path), workers=workers, server=server)
        second.start()
        try:
            second.wait_ready()
            eventually(lambda: score_is_right(second), what="a result")
            assert second.worker_pids() == [worker.pid]
            second.signal(signal.SIGTERM)
            assert second.wait() == 0
            worker.process.terminate()
            assert worker.process.wait(20) == 0
        finally:
            second.end()
    finally:
        worker.end()
        first.end()


@pytest.mark.over_zmq
def test_worker_without_a_gateway_exits_on_sigterm(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, served(tmp_path), workers=dict(ONE)).start()
    try:
        (pid,) = gateway.worker_pids()
        gateway.signal(signal.SIGKILL)
        gateway.wait()
        process = psutil.Process(pid)
        process.terminate()
        eventually(lambda: processes_of(gateway.runtime) == [], what="the exit of the worker")
    finally:
        gateway.end()


@pytest.mark.over_zmq
def test_workers_exit_if_no_gateway_starts_within_reattach_s(tmp_path: Path) -> None:
    workers = dict(ONE, reattach_s=0.5)
    gateway = Gateway(tmp_path, served(tmp_path), workers=workers).start()
    try:
        gateway.signal(signal.SIGKILL)
        gateway.wait()
        eventually(lambda: processes_of(gateway.runtime) == [], what="the exit of the workers")
    finally:
        gateway.end()


def pyarrow_error_detail(address: str) -> dict[str, Any]:
    """Returns the error detail of a rejected batch, read with pyarrow only."""
    with flight.connect(f"grpc://{address}") as client:
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_path("ids"))
        with pytest.raises(flight.FlightUnavailableError) as error:
            writer.begin(BATCH.schema)
            writer.write_batch(BATCH)
            reader.read_chunk()
        detail: dict[str, Any] = json.loads(error.value.extra_info)
        return detail


@pytest.mark.slow
@pytest.mark.over_zmq
def test_gateway_accepts_manually_started_workers(tmp_path: Path) -> None:
    """With `spawn = false`, the gateway is not ready until workers attach."""
    workers = dict(TWO, spawn=False)
    with running(tmp_path, served(tmp_path), workers=workers) as gateway:
        assert gateway.stats()["ready"] is False
        with gateway.client() as client, pytest.raises(NotReady):
            client.score("ids", BATCH)
        assert pyarrow_error_detail(gateway.address)["code"] == "not_ready"
        attached = [
            WorkerProcess(gateway.attach_socket, tmp_path, "--group", str(group))
            for group in (1, 0)
        ]
        third = None
        try:
            gateway.wait_ready()
            gateway.wait_full()
            stats = gateway.stats()["workers"]
            assert [w["pid"] for w in stats] == [attached[1].pid, attached[0].pid]
            assert psutil.Process(attached[0].pid).cpu_affinity() == [1]
            third = WorkerProcess(gateway.attach_socket, tmp_path, "--group", "0")
            assert third.process.wait(20) == 76
            assert "no worker slot is free" in third.log.read_text()
            # A terminated worker drains, exits with code 0, and frees its slot.
            attached[0].process.terminate()
            assert attached[0].process.wait(20) == 0
            assert score_is_right(gateway)
            attached.append(WorkerProcess(gateway.attach_socket, tmp_path, "--group", "1"))
            eventually(
                lambda: gateway.stats()["workers"][1]["pid"] == attached[2].pid,
                what="the new worker",
            )
            gateway.wait_full()
        finally:
            if third is not None:
                third.end()
            gateway.stop()
            for worker in attached:
                worker.process.wait(20)
                worker.end()
        assert [worker.process.returncode for worker in attached] == [0, 0, 0]


@pytest.mark.slow
def test_second_gateway_is_rejected(gateway: Gateway, tmp_path: Path) -> None:
    """A running gateway keeps its address and its runtime directory."""
    folder = tmp_path / "second"
    folder.mkdir()
    for server, words in (
        ({"runtime_directory": str(gateway.runtime)}, "locked by another gateway"),
        ({"address": gateway.address}, "cannot listen there"),
    ):
        second = Gateway(folder, served(folder), server=server, workers=dict(ONE))
        try:
            second.start(is_ready=False)
            assert second.wait() == 78
            assert words in second.text()
        finally:
            assert second.process is not None and second.process.poll() is not None
    assert score_is_right(gateway)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"path": "nowhere"}, "no model file"),
        ({"path": "broken"}, "is no ONNX model"),
        ({"execution_providers": ["cuda"]}, "the CPU is not used instead"),
        ({"intra_threads": 9}, "make 9 compute threads"),
        ({"path": "scalar"}, "is a scalar"),
        ({"max_batch_rows": 5_000_000}, "more than limits.rows"),
    ],
)
def test_invalid_model_entry_is_a_start_error(
    tmp_path: Path, model: dict[str, object], words: str
) -> None:
    """The gateway and `iskander check` print the same error."""
    import subprocess

    if Path("/dev/nvidia0").exists() and "execution_providers" in model:
        pytest.skip("this machine has a GPU")
    ids = models.row_ids(tmp_path / "ids")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.onnx").write_bytes(b"not a model")
    models.identity(tmp_path / "scalar", 1, [])
    entry = {"name": "m", "path": str(ids), "intra_threads": 1} | model
    gateway = Gateway(tmp_path, [entry], workers=dict(ONE))
    gateway.start(is_ready=False)
    try:
        assert gateway.wait() == 78
        assert words in gateway.text()
        assert "Traceback" not in gateway.text()
        eventually(lambda: processes_of(gateway.runtime) == [], what="the exit of the workers")
    finally:
        gateway.end()
    check = subprocess.run(
        [BIN / "iskander", "check", gateway.config], capture_output=True, text=True, check=False
    )
    assert check.returncode == 78 and words in check.stderr, check.stderr


@pytest.mark.slow
@pytest.mark.over_zmq
def test_gateway_leaks_no_descriptors_or_threads(gateway: Gateway) -> None:
    process = psutil.Process(gateway.pid)

    def run_load() -> None:
        for _ in range(10):
            with gateway.client() as client:
                client.score("ids", BATCH)
                results = client.stream("slow", [pa.record_batch({"x": [50]})] * 20)
                next(results)
                results.close()
        gateway.wait_idle()

    def connections() -> int:
        return len([c for c in process.net_connections() if c.status == "ESTABLISHED"])

    run_load()
    eventually(lambda: connections() <= 1, what="closed connections")
    before = (process.num_fds() - connections(), process.num_threads())
    run_load()
    eventually(lambda: connections() <= 1, what="closed connections")
    eventually(
        lambda: (process.num_fds() - connections(), process.num_threads()) <= before,
        what=f"the counts before the load, {before}",
    )
