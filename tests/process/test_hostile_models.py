"""One real worker loads hostile models and continues to serve a good one.

`scripts/make_hostile_models.py` writes the models and their expected error texts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from support import models
from support.processes import WorkerProcess, eventually
from support.scripted import ScriptedGateway, model_spec

from iskander.interprocess.control.messages import (
    Done,
    Execute,
    Load,
    Loaded,
    LoadFailed,
    LoadingSpec,
    Slice,
)

SCRIPT = models.ROOT / "scripts" / "make_hostile_models.py"
MIB = 1 << 20
SANDBOX_S = 4.0
LOAD_TIMEOUTS_S = {"overflowing_division": SANDBOX_S, "endless_loop": 1.0}
"""Models that crash or hang their sandboxed load, and the timeout of each load."""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    subprocess.run([sys.executable, SCRIPT, folder], check=True)
    return folder


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ScriptedGateway]:
    gateway = ScriptedGateway(tmp_path)
    yield gateway
    gateway.close()


@pytest.fixture
def worker(gateway: ScriptedGateway) -> Iterator[WorkerProcess]:
    worker = WorkerProcess(gateway.socket_path, gateway.folder, "--group", "0")
    try:
        gateway.accept()
        gateway.welcome()
        yield worker
    finally:
        worker.end()


def load(gateway: ScriptedGateway, folder: Path, key: int, loading: LoadingSpec) -> object:
    spec = model_spec(folder, key=key, loading=loading, fingerprint=f"{folder} {loading}")
    if not os.path.lexists(folder / "model.onnx"):
        spec = msgspec.structs.replace(spec, backend="pipeline", path=str(folder / "manifest.toml"))
    gateway.send(Load(spec))
    return gateway.receive(within_s=60)


def require_served(gateway: ScriptedGateway, batch_id: int) -> None:
    """Checks that the good model, with key 0, returns correct results."""
    raw = np.array([1, 2, batch_id], np.int64).tobytes()
    gateway.input.view[: len(raw)] = raw
    gateway.send(Execute(batch_id, 0, 3, (Slice(0, 3, 0, 3, 0),)))
    done = gateway.receive()
    assert isinstance(done, Done) and done.batch_id == batch_id
    results = np.frombuffer(gateway.output.view, np.int64, 3).tolist()
    assert results == [4, 7, 3 * batch_id + 1]


@pytest.mark.slow
def test_hostile_models_do_not_affect_the_worker(
    gateway: ScriptedGateway, worker: WorkerProcess, hostile: Path
) -> None:
    """Each load fails with its reason within its timeout; the worker's memory does not grow."""
    expected = json.loads((hostile / "expected.json").read_text())
    loading = LoadingSpec(
        is_sandboxed=True,
        is_shared=True,
        sandbox_s=SANDBOX_S,
        sandbox_bytes=1024 * MIB,
        model_bytes=512 * MIB,
        cache=str(gateway.folder / "cache"),
        cache_bytes=64 * MIB,
    )
    assert isinstance(load(gateway, models.row_ids(gateway.folder / "ids"), 0, loading), Loaded)
    require_served(gateway, 1)
    before = psutil.Process(worker.pid).memory_info().rss

    for number, (name, text) in enumerate(expected.items(), start=1):
        sandboxed = msgspec.structs.replace(loading, sandbox_s=LOAD_TIMEOUTS_S.get(name, SANDBOX_S))
        response = load(gateway, hostile / name, number, sandboxed)
        if text is None:
            assert isinstance(response, Loaded), (name, response)
        else:
            assert isinstance(response, LoadFailed), (name, response)
            assert response.code == "manifest"
            assert text in response.message, (name, response.message)
            assert str(gateway.folder) not in response.message
            assert "Traceback" not in response.message
        require_served(gateway, 1 + number)

    assert len(expected) > 30
    assert psutil.Process(worker.pid).memory_info().rss - before < 64 * MIB
    assert not any(server.children() for server in psutil.Process(worker.pid).children())


def test_model_that_crashed_or_hung_is_not_loaded_again_for_a_time(
    gateway: ScriptedGateway, worker: WorkerProcess, hostile: Path
) -> None:
    """The next load fails at once; a changed file is another model."""
    loading = LoadingSpec(
        is_sandboxed=True, sandbox_s=SANDBOX_S, cache=str(gateway.folder / "cache")
    )
    for number, (name, sandbox_s) in enumerate(LOAD_TIMEOUTS_S.items()):
        bad = gateway.folder / name
        shutil.copytree(hostile / name, bad)
        sandboxed = msgspec.structs.replace(loading, sandbox_s=sandbox_s)
        first = load(gateway, bad, 10 + number, sandboxed)
        second = load(gateway, bad, 20 + number, sandboxed)

        assert isinstance(first, LoadFailed) and isinstance(second, LoadFailed)
        assert "not loaded again for ten minutes" in second.message
        good = models.row_ids(gateway.folder / "good")
        (good / "model.onnx").rename(bad / "model.onnx")
        assert isinstance(load(gateway, bad, 30 + number, loading), Loaded)


def test_sandboxed_load_ends_with_its_worker(
    gateway: ScriptedGateway, worker: WorkerProcess, hostile: Path
) -> None:
    """No process of the sandbox remains after the worker is killed."""
    loading = LoadingSpec(is_sandboxed=True, sandbox_s=600.0, cache=str(gateway.folder / "cache"))
    gateway.send(Load(model_spec(hostile / "endless_loop", loading=loading)))

    def children() -> list[psutil.Process]:
        return psutil.Process(worker.pid).children(recursive=True)

    eventually(lambda: len(children()) == 2, what="a sandbox server and its fork")
    server, fork = children()
    eventually(lambda: fork.cpu_times().user > 0.2, what="a running loop")
    worker.process.kill()
    worker.process.wait()

    exited_states = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

    def has_exited(process: psutil.Process) -> bool:
        return not process.is_running() or process.status() in exited_states

    eventually(lambda: has_exited(server) and has_exited(fork), what="the exit of both")
