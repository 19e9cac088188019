"""The processes that load a model for a look: what they may write, and that they end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from iskander_worker.sandbox import client as tryout
from iskander_worker.sandbox.client import Verdict, load_in_sandbox, sandbox_server
from onnx import TensorProto, helper
from support import models
from support.processes import eventually
from support.scripted import model_spec

from iskander.control.messages import LoadFailed, LoadingSpec, encode
from iskander.errors import ManifestError
from iskander.supervision import model_check as trial

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_server_is_left() -> Iterator[None]:
    yield
    sandbox_server.end()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    script = models.ROOT / "scripts" / "make_hostile_models.py"
    subprocess.run([sys.executable, script, folder], check=True)
    return folder


def servers() -> list[psutil.Process]:
    """Of this process."""
    return [each for each in psutil.Process().children() if "sandbox.server" in each.cmdline()[-1]]


def timers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "isk-sandbox-end"]


def test_models_are_tried_out_by_forks_of_one_server(tmp_path: Path, hostile: Path) -> None:
    """One that hangs and one that ends its process cost the next ones nothing."""
    good = model_spec(models.row_ids(tmp_path / "m"))
    for _ in range(3):
        assert load_in_sandbox(good, 1, (), seconds=60.0) == Verdict()
    (server,) = servers()
    eventually(lambda: len(timers()) == 1, what="one timer that is to end it")

    late = load_in_sandbox(model_spec(hostile / "endless_loop"), 1, (), seconds=1.0)
    assert late.is_late and "1 s (loading.sandbox_s)" in late.refusal
    ended = load_in_sandbox(model_spec(hostile / "overflowing_division"), 1, (), seconds=60.0)
    assert "by SIGFPE" in ended.refusal and not ended.is_late
    assert load_in_sandbox(good, 1, (), seconds=60.0) == Verdict()

    assert servers() == [server] and server.children() == []
    assert server.num_threads() == 1


PLAYED = """
import ctypes, os, signal, time
from iskander_worker.sandbox import server as trial_server
def reference(job):
    {}
trial_server._load = reference
trial_server.main()
"""
ENDS = {
    "in order, without a word": ("os._exit(0)", "with exit code 0"),
    "by a signal without a name": ("os.kill(os.getpid(), 40)", "by signal 40"),
    "with all descriptors closed": ("os.closerange(0, 200)", "with exit code 1"),
    "with its server": (
        "os.kill(os.getppid(), 9); time.sleep(60)",
        "exited during the load, twice",
    ),
}


@pytest.mark.parametrize(("code", "words"), ENDS.values(), ids=ENDS)
def test_whatever_code_a_model_brings_does_its_verdict_is_a_refusal(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next model's is its own."""
    good = model_spec(models.row_ids(tmp_path / "m"))
    played = [sys.executable, "-c", PLAYED.format(code)]
    with monkeypatch.context() as patch:
        patch.setattr(tryout, "own_command", lambda _: played)
        found = load_in_sandbox(good, 1, (), seconds=60.0)
    assert found.refusal.endswith(words) and not found.is_late

    sandbox_server.end()
    assert load_in_sandbox(good, 1, (), seconds=60.0) == Verdict()


def test_a_stop_of_the_whole_service_is_no_verdict_on_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reaches forks too, and a refusal would be remembered beyond the next start."""
    played = PLAYED.format('[os.kill(os.getpid(), each) for each in (15, 2, 1)]; return ""')
    monkeypatch.setattr(tryout, "own_command", lambda _: [sys.executable, "-c", played])
    spec = model_spec(models.row_ids(tmp_path / "m"))
    assert load_in_sandbox(spec, 1, (), seconds=60.0) == Verdict()


FORGES = """
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if int(name) > 2 and os.path.lexists(path) and "pipe" in os.readlink(path):
            os.write(int(name), b'{"number": 1, "verdict": {}}' + bytes([10]))
"""


def test_a_fork_has_no_way_to_the_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all descriptors that it finds, only its own verdict's takes what it writes."""
    played = PLAYED.replace("{}", FORGES, 1)
    monkeypatch.setattr(tryout, "own_command", lambda _: [sys.executable, "-c", played])
    found = load_in_sandbox(model_spec(models.row_ids(tmp_path / "m")), 1, (), seconds=60.0)
    assert found != Verdict() and "exit code 0" in found.refusal


def test_a_server_that_is_gone_is_started_anew(tmp_path: Path) -> None:
    good = model_spec(models.row_ids(tmp_path / "m"))
    assert load_in_sandbox(good, 1, (), seconds=60.0) == Verdict()
    (server,) = servers()
    server.kill()
    eventually(lambda: server.status() == psutil.STATUS_ZOMBIE, what="its end")

    assert load_in_sandbox(good, 1, (), seconds=60.0) == Verdict()
    assert servers() != [server]


def test_a_server_that_is_asked_nothing_more_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves no zombie."""
    monkeypatch.setattr(tryout, "IDLE_S", 0.1)
    assert (
        load_in_sandbox(model_spec(models.row_ids(tmp_path / "m")), 1, (), seconds=60.0)
        == Verdict()
    )

    eventually(lambda: psutil.Process().children() == [], what="its end")


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
    verdict = load_in_sandbox(spec, 1, (), seconds=60.0, folder=copy)

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
        trial.check_model(model_spec(tmp_path), "", 1, wait_s=30.0)
    eventually(lambda: not psutil.pid_exists(int(pid_file.read_text())), what="the fork's end")


@pytest.mark.parametrize("server", [None, "import time; time.sleep(60)"])
def test_an_order_may_be_longer_than_a_pipe_holds(
    server: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that nobody reads is given up when the model's time is over."""
    good = model_spec(models.row_ids(tmp_path / "m"))
    options = {"CPUExecutionProvider": {"note": "x" * (1 << 18)}}
    spec = msgspec.structs.replace(good, provider_options=options)
    if server is None:
        assert load_in_sandbox(spec, 1, (), seconds=60.0).refusal == ""
        return
    monkeypatch.setattr(tryout, "own_command", lambda _: [sys.executable, "-c", server])
    monkeypatch.setattr(tryout, "ANSWER_S", 0.1)
    assert load_in_sandbox(spec, 1, (), seconds=0.5).is_late
