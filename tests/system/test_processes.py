"""Several gateway processes on one port: results, deaths, replacement, restart, readiness."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from support import models
from support.dealt import by_process, client_of
from support.processes import Gateway, WorkerProcess, eventually, processes_of, running

from iskander.client import Client
from iskander.errors import ConnectionFailed, Draining, IskanderError, NotReady


def served(folder: Path) -> list[dict[str, object]]:
    return [
        {"name": "ids", "path": str(models.row_ids(folder / "ids")), "intra_threads": 1},
        {"name": "slow", "path": str(models.slow(folder / "slow", 100)), "intra_threads": 1},
    ]


@contextlib.contextmanager
def gateways(
    folder: Path, count: int, *, server: dict[str, Any] | None = None, **sections: Any
) -> Iterator[Gateway]:
    workers = {"groups": ["0"], "reattach_s": 10.0} | sections.pop("workers", {})
    admin = {"address": f"127.0.0.1:{free_port()}"}
    with running(
        folder,
        served(folder),
        server={"processes": count} | (server or {}),
        workers=workers,
        admin=admin,
        **sections,
    ) as gateway:
        gateway.admin = admin["address"]  # type: ignore[attr-defined]
        yield gateway


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Gateway]:
    with gateways(tmp_path, 2) as gateway:
        yield gateway


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pid_of(gateway: Gateway, number: int) -> int:
    """Pid of a gateway process."""

    def find() -> int:
        for process in processes_of(gateway.runtime):
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[-2:] == ["--process", str(number)]:
                    return process.pid
        return 0

    pid: int = eventually(find, what=f"process {number}")
    return pid


def worker_pid(gateway: Gateway) -> int:
    """Pid of the only worker, once both processes report the same one."""

    def find() -> int:
        pids = {stats["workers"][0]["pid"] for stats in by_process(gateway, 2).values()}
        return pids.pop() if len(pids) == 1 else 0

    pid: int = eventually(find, what="one worker for both")
    return pid


def is_correct(client: Client, value: int = 5) -> bool:
    batch = pa.record_batch({"x": [value, value + 1]})
    return bool(client.score("ids", batch)["y"].to_pylist() == [3 * value + 1, 3 * value + 4])


def is_served(client: Client) -> bool:
    """Whether a request succeeds; `NotReady` if the worker's start outlasts the queue timeout."""
    try:
        return is_correct(client)
    except NotReady:
        return False


def page(gateway: Gateway, path: str) -> tuple[int, str]:
    address = gateway.admin  # type: ignore[attr-defined]
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_connections_are_distributed_and_each_client_gets_its_own_results(
    tmp_path: Path, count: int
) -> None:
    with gateways(tmp_path, count) as gateway:
        assert len({s["workers"][0]["pid"] for s in by_process(gateway, count).values()}) == 1
        wrong: list[object] = []

        def send(seed: int) -> None:
            with gateway.client() as client:
                batches = [pa.record_batch({"x": [seed, seed * n]}) for n in range(50)]
                for n, result in enumerate(client.stream("ids", batches)):
                    if result["y"].to_pylist() != [3 * seed + 1, 3 * seed * n + 1]:
                        wrong.append((seed, n, result))

        threads = [threading.Thread(target=send, args=(seed,)) for seed in range(1, 17)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        completed = {
            number: stats["lanes"]["ids/1"].get("completed", 0)  # Absent without requests.
            for number, stats in by_process(gateway, count).items()
        }
        assert sum(completed.values()) == 16 * 50
        assert sum(n > 0 for n in completed.values()) > 1


@pytest.mark.over_zmq
@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_killed_process_affects_only_its_own_clients(pair: Gateway, number: int) -> None:
    worker, before = worker_pid(pair), pid_of(pair, number)
    with client_of(pair, 1 - number) as other, client_of(pair, number) as own:
        assert is_correct(other) and is_correct(own)
        os.kill(before, signal.SIGKILL)
        for _ in range(20):
            assert is_correct(other)
    eventually(lambda: pid_of(pair, number) != before, what="the new process")
    with client_of_restarted(pair, number) as reconnected:
        assert is_correct(reconnected)
    assert worker_pid(pair) == worker
    text = page(pair, "/metrics")[1]
    assert f'iskander_process_starts_total{{process="{number}"}} 2.0' in text


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.slow
def test_process_that_receives_sigterm_is_replaced_and_the_worker_stays(
    tmp_path: Path, number: int
) -> None:
    with gateways(tmp_path, 2, server={"drain_s": 0.5}) as pair:
        worker, before = worker_pid(pair), pid_of(pair, number)
        with client_of(pair, 1 - number) as other:
            os.kill(before, signal.SIGTERM)
            eventually(
                lambda: f"process {number} ended with 0" in pair.text(),
                what="the exit of the process",
            )
            for _ in range(20):
                assert is_correct(other)
        with client_of_restarted(pair, number) as reconnected:
            assert is_correct(reconnected)
        assert worker_pid(pair) == worker


def is_worker(process: psutil.Process) -> bool:
    """Whether a process that may end now is a worker."""
    with contextlib.suppress(psutil.Error):
        return "iskander_worker" in process.cmdline()
    return False


def client_of_restarted(gateway: Gateway, number: int) -> Client:
    """Waits for the process, then returns a client connected to it."""

    def find() -> Client | None:
        try:
            return client_of(gateway, number)
        except (AssertionError, IskanderError):
            return None

    client: Client = eventually(find, what=f"process {number}")
    return client


@pytest.mark.over_zmq(is_slow=False)
def test_killed_worker_is_replaced_for_all_processes(pair: Gateway) -> None:
    with client_of(pair, 0) as first, client_of(pair, 1) as second:
        before = worker_pid(pair)
        os.kill(before, signal.SIGKILL)
        # Both processes queue requests while process 0 starts a new worker.
        eventually(lambda: is_served(second) and is_served(first), what="the new worker at both")
        assert worker_pid(pair) != before


@pytest.mark.over_zmq
@pytest.mark.slow
def test_rolling_restart_loses_no_request_and_keeps_the_worker(pair: Gateway) -> None:
    worker = worker_pid(pair)
    before = {pid_of(pair, number) for number in range(2)}
    stop = threading.Event()
    answered, failed = [0], []

    def send() -> None:
        while not stop.is_set():
            try:
                with pair.client() as client:
                    assert is_correct(client)
                answered[0] += 1
            except Exception as error:
                failed.append(error)
            stop.wait(0.01)

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    pair.signal(signal.SIGHUP)
    eventually(
        lambda: "process 0 is replaced" in pair.text(), within_s=60, what="the rolling restart"
    )
    stop.set()
    for thread in threads:
        thread.join()
    # A new connection can reach a process that has just closed its listener. The error is
    # retryable, and no request was accepted.
    assert all(isinstance(each, ConnectionFailed | Draining) for each in failed), failed
    assert answered[0] > 20
    assert len(failed) <= answered[0] // 10
    assert not before & {pid_of(pair, number) for number in range(2)}
    assert worker_pid(pair) == worker


class SlowRequest(threading.Thread):
    """A request to one process that runs for a second or more."""

    def __init__(self, gateway: Gateway, number: int) -> None:
        super().__init__()
        self._client = client_of(gateway, number)
        self._batch = pa.record_batch({"x": [2500 + number]})
        self.result: object = None
        self.start()

    def run(self) -> None:
        with self._client as client:
            self.result = client.score("slow", self._batch)["y"].to_pylist()


def has_work(gateway: Gateway) -> bool:
    """Whether every process has a queued or running batch."""
    return all(
        stats["lanes"]["slow/1"]["queue"]["requests"]
        or any(worker["in_flight"] for worker in stats["workers"])
        for stats in by_process(gateway, 2).values()
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["parent", "all processes", "during a restart"])
def test_stop_waits_for_the_batches_of_every_process(tmp_path: Path, how: str) -> None:
    with gateways(tmp_path, 2) as gateway:
        requests = [SlowRequest(gateway, number) for number in (0, 1)]
        eventually(lambda: has_work(gateway), what="a batch of each process")
        if how == "during a restart":
            gateway.signal(signal.SIGHUP)
            eventually(
                lambda: "draining 1 streams" in gateway.text(),
                what="the drain of the first process",
            )
        pids = [pid_of(gateway, number) for number in (0, 1)] if how == "all processes" else []
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        gateway.signal(signal.SIGTERM)
        assert gateway.wait() == 0
        for each in requests:
            each.join()
            assert each.result is not None
        assert not processes_of(gateway.runtime)


@pytest.mark.over_zmq
@pytest.mark.slow
def test_worker_that_hangs_in_a_batch_of_another_process_is_replaced(tmp_path: Path) -> None:
    """Process 0 ends the worker, although it has no batch there."""
    with gateways(tmp_path, 2, workers={"hang_s": 1.0}) as gateway:
        before = worker_pid(gateway)
        with client_of(gateway, 1) as client:
            os.kill(before, signal.SIGSTOP)
            assert is_correct(client)
        assert worker_pid(gateway) != before


@pytest.mark.over_zmq
@pytest.mark.slow
def test_resumed_worker_is_ended_if_its_slot_is_taken(tmp_path: Path) -> None:
    """It was suspended for longer than a new process 0 waits for it."""
    with gateways(tmp_path, 2, workers={"start_s": 5.0, "hang_s": 60.0}) as gateway:
        suspended, first = worker_pid(gateway), pid_of(gateway, 0)
        os.kill(suspended, signal.SIGSTOP)
        os.kill(first, signal.SIGKILL)
        eventually(
            lambda: any(
                each.pid != suspended and is_worker(each) for each in processes_of(gateway.runtime)
            ),
            what="the new worker",
        )
        os.kill(suspended, signal.SIGCONT)
        with client_of_restarted(gateway, 0) as client:
            assert is_correct(client)
        assert worker_pid(gateway) != suspended
        eventually(
            lambda: suspended not in {each.pid for each in processes_of(gateway.runtime)},
            what="the end of the suspended worker",
        )
        for number in (0, 1):
            with client_of_restarted(gateway, number) as client:
                assert is_correct(client)


@pytest.mark.slow
def test_failed_restart_of_one_process_does_not_affect_the_others(pair: Gateway) -> None:
    worker = worker_pid(pair)
    model = pair.folder / "ids" / "model.onnx"
    whole = model.read_bytes()
    with client_of(pair, 1) as client:
        assert is_correct(client)
        model.write_bytes(b"half of a model")
        os.kill(pid_of(pair, 0), signal.SIGKILL)
        eventually(lambda: "process 0 ended with 78" in pair.text(), what="the failed restart")
        assert is_correct(client)
        model.write_bytes(whole)
        with client_of_restarted(pair, 0) as reconnected:
            assert is_correct(reconnected)
        assert is_correct(client)
    assert worker_pid(pair) == worker


@pytest.mark.slow
def test_rolling_restart_is_rejected_if_the_file_needs_a_full_restart(pair: Gateway) -> None:
    before = pid_of(pair, 1)
    text = pair.config.read_text()
    pair.config.write_text(text.replace("processes = 2", "processes = 3"))
    pair.signal(signal.SIGHUP)
    eventually(lambda: "server.processes changed" in pair.text(), what="the log line")
    pair.config.write_text("nonsense")
    pair.signal(signal.SIGHUP)
    eventually(lambda: "reload rejected" in pair.text(), what="the log line")
    pair.config.write_text(text)
    assert pid_of(pair, 1) == before


@pytest.mark.slow
def test_replaced_process_keeps_the_original_configuration(pair: Gateway) -> None:
    worker, before = worker_pid(pair), pid_of(pair, 0)
    text = pair.config.read_text()
    assert 'groups = ["0"]' in text
    pair.config.write_text(text.replace('groups = ["0"]', 'groups = ["1"]'))
    os.kill(before, signal.SIGKILL)
    eventually(lambda: pid_of(pair, 0) != before, what="the new process")
    with client_of_restarted(pair, 0) as reconnected:
        assert is_correct(reconnected)
    assert worker_pid(pair) == worker
    assert page(pair, "/readyz")[0] == 200


def test_single_process_reloads_and_keeps_serving_after_sighup(tmp_path: Path) -> None:
    with (
        running(tmp_path, served(tmp_path), workers={"groups": ["0"]}) as gateway,
        gateway.client() as client,
    ):
        gateway.signal(signal.SIGHUP)
        words = "reloaded: no setting changed"
        eventually(lambda: words in gateway.text(), what="the log line")
        assert is_correct(client)


def test_readiness_and_metrics_cover_all_processes(pair: Gateway) -> None:
    assert page(pair, "/readyz") == (200, "ready\n")
    assert page(pair, "/livez") == (200, "ok\n")
    with client_of(pair, 0) as first, client_of(pair, 1) as second:
        assert is_correct(first) and is_correct(second) and is_correct(second)
    text = page(pair, "/metrics")[1]
    for number in (0, 1):
        assert f'iskander_process_up{{process="{number}"}} 1.0' in text
    lines = [line for line in text.splitlines() if line.startswith("iskander_requests_total{")]
    answered = {}
    for line in lines:
        if 'model="ids"' in line:
            number = int(line.partition('process="')[2][0])
            answered[number] = float(line.split()[-1])
    assert answered == {0: 1.0, 1: 2.0}, lines
    os.kill(pid_of(pair, 1), signal.SIGKILL)
    assert page(pair, "/readyz")[0] == 200


@pytest.mark.over_zmq
@pytest.mark.slow
def test_recycled_worker_leaves_both_processes(tmp_path: Path) -> None:
    with gateways(tmp_path, 2, workers={"recycle_batches": 20}) as gateway:
        before = worker_pid(gateway)
        with client_of(gateway, 0) as first, client_of(gateway, 1) as second:
            for value in range(60):
                assert is_correct(first, value) and is_correct(second, value)
        assert worker_pid(gateway) != before
        assert all(
            stats["lanes"]["ids/1"]["completed"] == 60 for stats in by_process(gateway, 2).values()
        )


@pytest.mark.slow
def test_worker_of_a_service_manager_serves_all_processes(tmp_path: Path) -> None:
    with gateways(tmp_path, 2, workers={"spawn": False}) as gateway:
        assert page(gateway, "/readyz")[0] == 503
        worker = WorkerProcess(gateway.attach_socket, tmp_path)
        try:
            assert worker_pid(gateway) == worker.pid
            eventually(lambda: page(gateway, "/readyz")[0] == 200, what="readiness of all")
            with client_of(gateway, 1) as client:
                eventually(lambda: client.stats()["ready"], what="readiness")
                assert is_correct(client)
        finally:
            worker.process.terminate()
            assert worker.process.wait(20) == 0
            worker.end()


@pytest.mark.slow
def test_processes_exit_with_their_parent(tmp_path: Path) -> None:
    gateway = Gateway(
        tmp_path, served(tmp_path), server={"processes": 2}, workers={"groups": ["0"]}
    )
    gateway.admin = ""  # type: ignore[attr-defined]
    try:
        gateway.start()
        os.kill(gateway.pid, signal.SIGKILL)
        gateway.wait()
        eventually(lambda: not processes_of(gateway.runtime), what="the end of all processes")
    finally:
        gateway.end()


@pytest.mark.parametrize(
    ("server", "words", "code"),
    [
        (
            {"address": "unix:/tmp/iskander-shared.sock"},
            "unix socket not allowed with server.processes > 1",
            78,
        ),
        ({"address": "192.0.2.1:50051"}, "is open to the network without TLS", 78),
        ({"processes": 0}, "processes", 78),
    ],
)
def test_settings_that_processes_cannot_share_are_rejected(
    tmp_path: Path, server: dict[str, Any], words: str, code: int
) -> None:
    gateway = Gateway(tmp_path, served(tmp_path), server={"processes": 2} | server)
    try:
        gateway.start(is_ready=False)
        assert gateway.wait() == code
        assert words in gateway.text()
    finally:
        gateway.end()


@pytest.mark.parametrize("section", ["server", "http", "inferential"])
def test_port_in_use_is_rejected_despite_so_reuseport(tmp_path: Path, section: str) -> None:
    with socket.socket() as occupied:
        occupied.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        address = f"127.0.0.1:{occupied.getsockname()[1]}"
        where = f"tcp://{address}" if section == "inferential" else address
        sections = {"server": {"processes": 2}}
        sections.setdefault(section, {})["address"] = where  # type: ignore[assignment]
        gateway = Gateway(tmp_path, served(tmp_path), **sections)
        try:
            gateway.start(is_ready=False)
            assert gateway.wait() == 78
            assert f"{section}.address {address}: cannot listen: " in gateway.text()
        finally:
            gateway.end()


def test_unloadable_model_ends_all_processes(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.onnx").write_bytes(b"no model")
    broken = {"name": "broken", "path": str(tmp_path / "broken"), "intra_threads": 1}
    gateway = Gateway(tmp_path, [broken], server={"processes": 2}, workers={"groups": ["0"]})
    try:
        gateway.start(is_ready=False)
        assert gateway.wait() == 78
        assert "broken" in gateway.text()
        assert not processes_of(gateway.runtime)
    finally:
        gateway.end()
