"""Models that come and go by calls, where the gateway is several processes."""

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


def everywhere(gateway: Gateway, name: str) -> set[int | None]:
    """What the processes answer; None where a model is not served."""
    found: set[int | None] = set()
    for number in range(PROCESSES):
        with client_of(gateway, number) as client:
            try:
                found.add(factor(client, name))
            except ModelNotFound:
                found.add(None)
    return found


def pids(gateway: Gateway) -> dict[int, int]:
    """Of all processes; empty while one of them does not listen."""
    with contextlib.suppress(AssertionError):
        return {number: each["pid"] for number, each in by_process(gateway, PROCESSES).items()}
    return {}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path / "models")
    for name, made in (("m", 3), ("n", 5), ("o", 7)):
        folder.put(name, 1, made)
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


def test_a_call_at_one_process_is_for_all(gateway: Gateway, folder: Folder) -> None:
    """And answered when all have made the change."""
    assert everywhere(gateway, "o") == {7} and everywhere(gateway, "m") == {None}
    with client_of(gateway, 1) as client:
        assert client.load("m") == ["1"]
    assert everywhere(gateway, "m") == {3}
    folder.put("m", 2, 13)
    with client_of(gateway, 2) as client:
        assert client.load("m") == ["2"]
    assert everywhere(gateway, "m") == {13}
    with client_of(gateway, 0) as client:
        assert client.unload("m") == ["2"]
    assert everywhere(gateway, "m") == {None} and everywhere(gateway, "o") == {7}


def test_what_does_not_load_here_is_loaded_nowhere(gateway: Gateway, folder: Folder) -> None:
    with client_of(gateway, 1) as client:
        client.load("m")
        (folder.root / "m" / "1" / "model.onnx").write_bytes(b"broken")
        with pytest.raises(IskanderError, match="is no ONNX model"):
            client.load("m")
        with pytest.raises(ModelNotFound):
            client.load("no-such-model")
    assert everywhere(gateway, "m") == {3}


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_that_is_started_again_serves_what_was_asked_for(
    gateway: Gateway, number: int
) -> None:
    with client_of(gateway, 2) as client:
        client.load("m")
        client.load("n")
        client.unload("n", version="1")
        client.unload("o")
    before = pids(gateway)
    os.kill(before[number], signal.SIGKILL)
    eventually(lambda: pids(gateway).get(number) not in (None, before[number]), 60.0, "another")
    for name, found in (("m", 3), ("n", None), ("o", None)):
        assert everywhere(gateway, name) == {found}


def test_processes_that_are_replaced_serve_what_was_asked_for(gateway: Gateway) -> None:
    with client_of(gateway, 1) as client:
        client.load("m")
    before = set(pids(gateway).values())
    gateway.signal(signal.SIGHUP)
    eventually(lambda: not before.intersection(pids(gateway).values() or before), 60.0, "new ones")
    assert everywhere(gateway, "m") == {3}


def test_a_gateway_that_is_started_anew_begins_with_its_settings(gateway: Gateway) -> None:
    with gateway.client() as client:
        client.load("m")
    assert gateway.stop() == 0
    gateway.start(is_ready=True)
    assert everywhere(gateway, "m") == {None} and everywhere(gateway, "o") == {7}


def test_calls_at_all_processes_at_once_have_one_order(gateway: Gateway) -> None:
    """Whatever it is, all processes come to the same."""
    clients = [client_of(gateway, number) for number in range(PROCESSES)]

    def change(client: Client, turn: int) -> None:
        for step in range(4):
            try:
                (client.load if (turn + step) % 2 else client.unload)("m")
            except ModelNotFound:
                continue  # It is not loaded now: an unload has nothing to do.

    threads = [
        threading.Thread(target=change, args=(client, turn)) for turn, client in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()
    assert len(everywhere(gateway, "m")) == 1


def test_a_process_that_does_not_answer_is_told(gateway: Gateway) -> None:
    """It has the change when it goes on: nothing of it is lost."""
    stopped = pids(gateway)[2]
    with client_of(gateway, 1) as client:
        loading = threading.Thread(target=client.load, args=("m",))
        with suspended(stopped):
            loading.start()
            loading.join(1.0)
            assert loading.is_alive()
        loading.join(30.0)
        assert not loading.is_alive()
    assert everywhere(gateway, "m") == {3}
