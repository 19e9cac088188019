"""Loading and unloading by calls, with several gateway processes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from support.dealt import by_process, client_of
from support.processes import Gateway, eventually, running, suspended
from support.repositories import Folder

from iskander.client import Client
from iskander.errors import IskanderError, ModelNotFound

pytestmark = pytest.mark.slow

PROCESSES = 3
X = pa.record_batch({"x": pa.array([1], pa.int64())})


def factor(client: Client, name: str = "m") -> int:
    return int(client.score(name, X)["y"][0].as_py())


def factors_everywhere(gateway: Gateway, name: str) -> set[int | None]:
    """Factors of a model at all processes; None if it is not served."""
    factors: set[int | None] = set()
    for number in range(PROCESSES):
        with client_of(gateway, number) as client:
            try:
                factors.add(factor(client, name))
            except ModelNotFound:
                factors.add(None)
    return factors


def pids(gateway: Gateway) -> dict[int, int]:
    """Pids of all processes; empty while one of them does not listen."""
    with contextlib.suppress(AssertionError):
        return {number: each["pid"] for number, each in by_process(gateway, PROCESSES).items()}
    return {}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path / "models")
    for name, value in (("m", 3), ("n", 5), ("o", 7)):
        folder.put(name, 1, value)
    return folder


@pytest.fixture
def gateway(tmp_path: Path, folder: Folder) -> Iterator[Gateway]:
    settings = {"path": str(folder.root), "control": "explicit", "load": ["o"]}
    with running(
        tmp_path,
        [],
        repository=settings,
        server={"processes": PROCESSES},
        workers={"groups": ["0"], "count": 1, "reattach_s": 10.0},
    ) as gateway:
        yield gateway


def test_call_at_one_process_changes_all_processes(gateway: Gateway, folder: Folder) -> None:
    """The response is sent when all processes have made the change."""
    assert factors_everywhere(gateway, "o") == {7} and factors_everywhere(gateway, "m") == {None}
    with client_of(gateway, 1) as client:
        assert client.load("m") == ["1"]
    assert factors_everywhere(gateway, "m") == {3}
    folder.put("m", 2, 13)
    with client_of(gateway, 2) as client:
        assert client.load("m") == ["2"]
    assert factors_everywhere(gateway, "m") == {13}
    with client_of(gateway, 0) as client:
        assert client.unload("m") == ["2"]
    assert factors_everywhere(gateway, "m") == {None} and factors_everywhere(gateway, "o") == {7}


def test_failed_load_changes_no_process(gateway: Gateway, folder: Folder) -> None:
    with client_of(gateway, 1) as client:
        client.load("m")
        (folder.root / "m" / "1" / "model.onnx").write_bytes(b"broken")
        with pytest.raises(IskanderError, match="is no ONNX model"):
            client.load("m")
        with pytest.raises(ModelNotFound):
            client.load("no-such-model")
    assert factors_everywhere(gateway, "m") == {3}


@pytest.mark.parametrize("number", [0, 1])
def test_restarted_process_serves_the_loaded_models(gateway: Gateway, number: int) -> None:
    with client_of(gateway, 2) as client:
        client.load("m")
        client.load("n")
        client.unload("n", version="1")
        client.unload("o")
    before = pids(gateway)
    os.kill(before[number], signal.SIGKILL)
    eventually(
        lambda: pids(gateway).get(number) not in (None, before[number]), 60.0, "the new process"
    )
    for name, expected in (("m", 3), ("n", None), ("o", None)):
        assert factors_everywhere(gateway, name) == {expected}


def test_replaced_processes_serve_the_loaded_models(gateway: Gateway) -> None:
    with client_of(gateway, 1) as client:
        client.load("m")
    before = set(pids(gateway).values())
    gateway.signal(signal.SIGHUP)
    eventually(
        lambda: not before.intersection(pids(gateway).values() or before), 60.0, "the new processes"
    )
    assert factors_everywhere(gateway, "m") == {3}


def test_restarted_gateway_serves_the_configured_models(gateway: Gateway) -> None:
    with gateway.client() as client:
        client.load("m")
    assert gateway.stop() == 0
    gateway.start(is_ready=True)
    assert factors_everywhere(gateway, "m") == {None} and factors_everywhere(gateway, "o") == {7}


def test_concurrent_calls_at_all_processes_have_one_order(gateway: Gateway) -> None:
    """All processes end in the same state."""
    clients = [client_of(gateway, number) for number in range(PROCESSES)]

    def change(client: Client, turn: int) -> None:
        for step in range(4):
            try:
                (client.load if (turn + step) % 2 else client.unload)("m")
            except ModelNotFound:
                continue  # Another call has unloaded it.

    threads = [
        threading.Thread(target=change, args=(client, turn)) for turn, client in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()
    assert len(factors_everywhere(gateway, "m")) == 1


def test_suspended_process_makes_the_change_when_it_resumes(gateway: Gateway) -> None:
    """The call waits for it."""
    stopped = pids(gateway)[2]
    with client_of(gateway, 1) as client:
        loading = threading.Thread(target=client.load, args=("m",))
        with suspended(stopped):
            loading.start()
            loading.join(1.0)
            assert loading.is_alive()
        loading.join(30.0)
        assert not loading.is_alive()
    assert factors_everywhere(gateway, "m") == {3}
