"""One real worker is asked for every model of a hostile folder, and goes on serving its good one.

The models and the words of their refusals are `scripts/make_hostile_models.py`'s.
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

from iskander.control.messages import Done, Execute, Load, Loaded, LoadFailed, LoadingSpec, Slice

SCRIPT = models.ROOT / "scripts" / "make_hostile_models.py"
MIB = 1 << 20
SANDBOX_S = 4.0
ENDS = {"overflowing_division": SANDBOX_S, "endless_loop": 1.0}
"""What ends or hangs its trial, and how long that may take; for ever needs no more than a while."""


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


def ask(gateway: ScriptedGateway, folder: Path, key: int, loading: LoadingSpec) -> object:
    spec = model_spec(folder, key=key, loading=loading, fingerprint=f"{folder} {loading}")
    if not os.path.lexists(folder / "model.onnx"):
        spec = msgspec.structs.replace(spec, backend="pipeline", path=str(folder / "manifest.toml"))
    gateway.send(Load(spec))
    return gateway.receive(within_s=60)


def require_served(gateway: ScriptedGateway, batch_id: int) -> None:
    """The good model, whose key is 0, computes right."""
    raw = np.array([1, 2, batch_id], np.int64).tobytes()
    gateway.input.view[: len(raw)] = raw
    gateway.send(Execute(batch_id, 0, 3, (Slice(0, 3, 0, 3, 0),)))
    done = gateway.receive()
    assert isinstance(done, Done) and done.batch_id == batch_id
    found = np.frombuffer(gateway.output.view, np.int64, 3).tolist()
    assert found == [4, 7, 3 * batch_id + 1]


@pytest.mark.slow
def test_no_model_of_a_hostile_folder_harms_a_worker(
    gateway: ScriptedGateway, worker: WorkerProcess, hostile: Path
) -> None:
    """Each is refused by name, in its time; the worker is the same process, with its own memory."""
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
    assert isinstance(ask(gateway, models.row_ids(gateway.folder / "ids"), 0, loading), Loaded)
    require_served(gateway, 1)
    before = psutil.Process(worker.pid).memory_info().rss

    for number, (name, words) in enumerate(expected.items(), start=1):
        given = msgspec.structs.replace(loading, sandbox_s=ENDS.get(name, SANDBOX_S))
        answer = ask(gateway, hostile / name, number, given)
        if words is None:
            assert isinstance(answer, Loaded), (name, answer)
        else:
            assert isinstance(answer, LoadFailed), (name, answer)
            assert answer.code == "manifest" and words in answer.message, (name, answer.message)
            assert str(gateway.folder) not in answer.message and "Traceback" not in answer.message
        require_served(gateway, 1 + number)

    assert len(expected) > 30
    assert psutil.Process(worker.pid).memory_info().rss - before < 64 * MIB
    assert not any(server.children() for server in psutil.Process(worker.pid).children())


def test_what_ended_or_hung_its_trial_is_not_tried_again_at_once(
    gateway: ScriptedGateway, worker: WorkerProcess, hostile: Path
) -> None:
    """The next one that asks is told so; a changed file is another model."""
    loading = LoadingSpec(
        is_sandboxed=True, sandbox_s=SANDBOX_S, cache=str(gateway.folder / "cache")
    )
    for number, (name, sandbox_s) in enumerate(ENDS.items()):
        bad = gateway.folder / name
        shutil.copytree(hostile / name, bad)
        given = msgspec.structs.replace(loading, sandbox_s=sandbox_s)
        first = ask(gateway, bad, 10 + number, given)
        second = ask(gateway, bad, 20 + number, given)

        assert isinstance(first, LoadFailed) and isinstance(second, LoadFailed)
        assert "not loaded again for ten minutes" in second.message
        good = models.row_ids(gateway.folder / "good")
        (good / "model.onnx").rename(bad / "model.onnx")
        assert isinstance(ask(gateway, bad, 30 + number, loading), Loaded)


def test_a_trial_ends_with_the_worker_that_waits_for_it(
    gateway: ScriptedGateway, worker: WorkerProcess, hostile: Path
) -> None:
    """A worker that is killed meanwhile leaves no process that goes on looping."""
    loading = LoadingSpec(is_sandboxed=True, sandbox_s=600.0, cache=str(gateway.folder / "cache"))
    gateway.send(Load(model_spec(hostile / "endless_loop", loading=loading)))

    def started() -> list[psutil.Process]:
        return psutil.Process(worker.pid).children(recursive=True)

    eventually(lambda: len(started()) == 2, what="a server and the trial that it forked")
    server, trial = started()
    eventually(lambda: trial.cpu_times().user > 0.2, what="a loop that runs")
    worker.process.kill()
    worker.process.wait()

    gone = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

    def is_gone(process: psutil.Process) -> bool:
        return not process.is_running() or process.status() in gone

    eventually(lambda: is_gone(server) and is_gone(trial), what="their end")
