"""The processes that load a model for a look: what they may write, and that they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from iskander_worker.tryout import Job, Verdict, try_out
from onnx import TensorProto, helper
from support import models
from support.processes import eventually
from support.scripted import model_spec

from iskander.errors import ManifestError
from iskander.gateway.supervision import trial
from iskander.wire.messages import LoadFailed, LoadingSpec, encode

MIB = 1 << 20


def job(folder: Path, **changes: Any) -> bytes:
    values: dict[str, Any] = {
        "spec": model_spec(folder),
        "cores": 1,
        "libraries": (),
        "folder": None,
        "private_bytes": 1 << 32,
        "file_bytes": 64 * MIB,
        "parent": os.getpid(),
        "seconds": 60.0,
    }
    return msgspec.json.encode(Job(**(values | changes)))


def run(said: bytes) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "iskander_worker.tryout"]
    return subprocess.run(command, input=said, capture_output=True, timeout=120, check=False)


def test_a_trial_is_nobodys_where_its_worker_has_ended(tmp_path: Path) -> None:
    """It sees that its parent is another one, and does nothing."""
    folder = models.row_ids(tmp_path / "m")

    assert run(job(folder)).stdout == msgspec.json.encode(Verdict())
    assert run(job(folder, parent=1)).stdout == b""


def test_a_trial_ends_by_itself_where_nobody_ends_it(tmp_path: Path) -> None:
    script = models.ROOT / "scripts" / "make_hostile_models.py"
    subprocess.run([sys.executable, script, tmp_path / "hostile"], check=True)

    assert (
        run(job(tmp_path / "hostile" / "endless_loop", seconds=2.0)).returncode == -signal.SIGALRM
    )


def test_a_trial_writes_no_more_than_the_cache_may_have(tmp_path: Path) -> None:
    """A hundred bytes that are 64 MiB when they are folded and saved."""
    models.save(
        tmp_path / "m",
        [
            helper.make_node("ConstantOfShape", ["s"], ["c"]),
            helper.make_node("ReduceMax", ["c"], ["m"], keepdims=0),
            helper.make_node("Add", ["x", "c"], ["y"]),
        ],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 1 << 24])],
        [helper.make_tensor("s", TensorProto.INT64, [1], [1 << 24])],
    )
    copy = tmp_path / "copy"
    copy.mkdir()
    spec = model_spec(tmp_path / "m", rows_max=1, loading=LoadingSpec(cache_bytes=MIB))
    verdict = try_out(spec, 1, (), seconds=60.0, folder=copy)

    assert max((file.stat().st_size for file in copy.iterdir()), default=0) <= MIB
    assert verdict.note or verdict.error or verdict.refusal


FORKS = """
import os, sys
if not os.fork():
    open(sys.argv[1], "w").write(str(os.getpid()))
    os.kill(os.getpid(), 19)
while not (os.path.exists(sys.argv[1]) and open(sys.argv[1]).read()):
    pass
os.write(1, bytes.fromhex(sys.argv[2]))
"""


def test_a_look_is_over_with_the_process_that_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a class has forked holds up no answer, and is not left behind."""
    answer = encode([LoadFailed(1, "manifest", "said by the class")]).hex()
    pid_file = tmp_path / "pid"
    command = [sys.executable, "-c", FORKS, str(pid_file), answer]
    monkeypatch.setattr(trial, "worker_command", lambda python: command)

    with pytest.raises(ManifestError, match="said by the class"):
        trial.try_model(model_spec(tmp_path), "", 1, wait_s=30.0)
    eventually(lambda: not psutil.pid_exists(int(pid_file.read_text())), what="the fork's end")
