"""Sandboxed loads: isolation of model code, crashes, timeouts, cache limit, process exit."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from iskander_worker import session
from iskander_worker.loading.measurement import Measurement
from iskander_worker.sandbox import client as sandbox_client
from iskander_worker.sandbox.client import Verdict, load_in_sandbox, sandbox_server
from onnx import TensorProto, helper
from support import models, row_graphs
from support.processes import eventually
from support.scripted import model_spec

from iskander.errors import ManifestError
from iskander.gateway.supervision.loading import model_check
from iskander.interprocess.control.messages import LoadFailed, LoadingSpec, encode

MIB = 1 << 20


@pytest.fixture(autouse=True)
def end_sandbox_server() -> Iterator[None]:
    yield
    sandbox_server.end()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    script = models.ROOT / "scripts" / "make_hostile_models.py"
    subprocess.run([sys.executable, script, folder], check=True)
    return folder


def servers() -> list[psutil.Process]:
    """Returns the sandbox servers of this process."""
    return [each for each in psutil.Process().children() if "sandbox.server" in each.cmdline()[-1]]


def is_accepted(verdict: Verdict) -> bool:
    """Whether a load succeeded, whatever it measured."""
    return msgspec.structs.replace(verdict, measurement=None) == Verdict()


def timers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "isk-sandbox-end"]


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_build_of_engines_runs_in_the_sandbox_and_does_not_fall_back(tmp_path: Path) -> None:
    folder = tmp_path / "engines"
    folder.mkdir()
    spec = model_spec(models.row_ids(tmp_path / "m"), execution_providers=("tensorrt", "cuda"))
    verdict = load_in_sandbox(spec, 1, (), seconds=60.0, folder=folder)
    assert "TensorrtExecutionProvider cannot start on this machine" in verdict.error
    assert "the CPU is not used instead" in verdict.error
    assert servers() and not list(folder.iterdir())


def test_sandboxed_loads_use_forks_of_one_server(tmp_path: Path, hostile: Path) -> None:
    """A load that hangs or crashes does not affect the next ones."""
    good = model_spec(models.row_ids(tmp_path / "m"))
    for _ in range(3):
        assert is_accepted(load_in_sandbox(good, 1, (), seconds=60.0))
    (server,) = servers()
    eventually(lambda: len(timers()) == 1, what="one idle timer of the server")

    hanging = load_in_sandbox(model_spec(hostile / "endless_loop"), 1, (), seconds=1.0)
    assert hanging.is_late and "1 s (loading.sandbox_s)" in hanging.refusal
    crashed = load_in_sandbox(model_spec(hostile / "overflowing_division"), 1, (), seconds=60.0)
    assert "by SIGFPE" in crashed.refusal and not crashed.is_late
    assert is_accepted(load_in_sandbox(good, 1, (), seconds=60.0))

    assert servers() == [server] and server.children() == []
    assert server.num_threads() == 1


SERVER_SCRIPT = """
import ctypes, os, signal, time
from types import SimpleNamespace
from iskander_worker.loading.measurement import Measurement
from iskander_worker.sandbox import server as sandbox_server
def load(job):
    {}
    measured = SimpleNamespace(measurement=Measurement(), measure=measure)
    return "", measured
def measure(is_confined, seconds, on_risk):
    pass
sandbox_server._load = load
sandbox_server.main()
"""
MODEL_CODE = {
    "exit without a verdict": ("os._exit(0)", "with exit code 0"),
    "unnamed signal": ("os.kill(os.getpid(), 40)", "by signal 40"),
    "all descriptors closed": ("os.closerange(0, 200)", "with exit code 1"),
    "server killed": (
        "os.kill(os.getppid(), 9); time.sleep(60)",
        "exited during the load, twice",
    ),
}


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("os.kill(os.getpid(), signal.SIGFPE)", "ended by SIGFPE"),
        ("os._exit(0)", "ended with exit code 0"),
        ("time.sleep(60)", "did not end in time"),
    ],
    ids=["crash", "exit", "hang"],
)
def test_crash_of_the_measurement_rejects_no_model(
    code: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generated rows may be invalid for a model that is right: its rows are then undecided."""
    script = SERVER_SCRIPT.format("pass").replace(
        "seconds, on_risk):\n    pass", f"seconds, on_risk):\n    {code}"
    )
    monkeypatch.setattr(sandbox_client, "own_command", lambda _: [sys.executable, "-c", script])
    spec = model_spec(models.row_ids(tmp_path / "m"))
    verdict = load_in_sandbox(spec, 1, (), seconds=2.0)
    assert is_accepted(verdict)
    assert verdict.measurement is not None
    assert verdict.measurement.verdict == "undecided"
    assert cause in verdict.measurement.evidence


def test_crash_at_a_risk_leaves_the_verdict_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a zero in a graph that divides integers."""
    code = "on_risk(Measurement((), 'independent', 'rows')); os.kill(os.getpid(), signal.SIGFPE)"
    script = SERVER_SCRIPT.format("pass").replace("on_risk):\n    pass", f"on_risk):\n    {code}")
    with monkeypatch.context() as patch:
        patch.setattr(sandbox_client, "own_command", lambda _: [sys.executable, "-c", script])
        verdict = load_in_sandbox(model_spec(models.row_ids(tmp_path / "m")), 1, (), seconds=20.0)
    assert is_accepted(verdict)
    assert verdict.measurement == Measurement((), "independent", "rows")


def test_padding_is_found_in_a_sandbox(tmp_path: Path) -> None:
    """The measurement after the risk counts."""
    spec = model_spec(row_graphs.trimmed_tokens(tmp_path / "t"))
    verdict = load_in_sandbox(spec, 1, (), seconds=60.0)
    assert verdict.measurement is not None and verdict.measurement.verdict == "dependent"


@pytest.mark.parametrize(("code", "reason"), MODEL_CODE.values(), ids=MODEL_CODE)
def test_model_code_that_ends_its_process_is_rejected(
    code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next load succeeds."""
    good = model_spec(models.row_ids(tmp_path / "m"))
    command = [sys.executable, "-c", SERVER_SCRIPT.format(code)]
    with monkeypatch.context() as patch:
        patch.setattr(sandbox_client, "own_command", lambda _: command)
        verdict = load_in_sandbox(good, 1, (), seconds=60.0)
    assert verdict.refusal.endswith(reason) and not verdict.is_late

    sandbox_server.end()
    assert is_accepted(load_in_sandbox(good, 1, (), seconds=60.0))


def test_measurement_is_cached_with_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first load measures in its sandbox; no worker measures again, also after a restart."""

    def measured_again(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(session, "measure_rows", measured_again)
    monkeypatch.setattr(session, "unbound_outputs", measured_again)
    loading = LoadingSpec(is_sandboxed=True, cache=str(tmp_path / "cache"))
    graphs = {"dependent": row_graphs.cumulative_sum, "independent": row_graphs.linear}
    for expected, graph in graphs.items():
        spec = model_spec(graph(tmp_path / expected), loading=loading)
        for _ in range(2):
            opened = session.Session(spec, 1)
            opened.warm_up(spec.rows_max)
            opened.measure(is_confined=False)
            assert opened.relation.verdict == expected
            opened.close()


def test_report_of_many_long_names_fits_its_pipe(tmp_path: Path) -> None:
    """The pipe is read after the end of the fork: a full one would hold it until its deadline."""
    names = [f"{number:04}{'x' * 200}" for number in range(400)]
    tensors = [helper.make_tensor_value_info(each, TensorProto.FLOAT, ["rows"]) for each in names]
    total = helper.make_tensor_value_info("total", TensorProto.FLOAT, ["rows"])
    node = helper.make_node("Sum", names, ["total"])
    folder = models.save(tmp_path / "m", [node], tensors, [total, *tensors])
    verdict = load_in_sandbox(model_spec(folder), 1, (), seconds=20.0)
    assert not verdict.refusal, verdict.refusal
    assert verdict.measurement is not None
    assert verdict.measurement.unbound == tuple(range(1, 401))


def test_filter_of_rows_is_rejected_by_its_cached_measurement(tmp_path: Path) -> None:
    """Every load has the error, not only the one that measured."""
    loading = LoadingSpec(is_sandboxed=True, cache=str(tmp_path / "cache"))
    spec = model_spec(row_graphs.positive_rows(tmp_path / "m"), loading=loading)
    for _ in range(2):
        with pytest.raises(ManifestError, match="cannot be assigned to rows"):
            session.Session(spec, 1)


def test_service_stop_signals_do_not_reject_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forks receive them too, and a rejection would be cached beyond the next start."""
    script = SERVER_SCRIPT.format("[os.kill(os.getpid(), each) for each in (15, 2, 1)]")
    monkeypatch.setattr(sandbox_client, "own_command", lambda _: [sys.executable, "-c", script])
    spec = model_spec(models.row_ids(tmp_path / "m"))
    assert is_accepted(load_in_sandbox(spec, 1, (), seconds=60.0))


FORGED_VERDICT = """
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if int(name) > 2 and os.path.lexists(path) and "pipe" in os.readlink(path):
            os.write(int(name), b'{"number": 1, "verdict": {}}' + bytes([10]))
"""


def test_fork_cannot_write_to_the_response_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork writes a forged verdict to all pipes that it finds."""
    script = SERVER_SCRIPT.replace("{}", FORGED_VERDICT, 1)
    monkeypatch.setattr(sandbox_client, "own_command", lambda _: [sys.executable, "-c", script])
    verdict = load_in_sandbox(model_spec(models.row_ids(tmp_path / "m")), 1, (), seconds=60.0)
    assert not is_accepted(verdict) and "exit code 0" in verdict.refusal


def test_killed_server_is_restarted(tmp_path: Path) -> None:
    good = model_spec(models.row_ids(tmp_path / "m"))
    assert is_accepted(load_in_sandbox(good, 1, (), seconds=60.0))
    (server,) = servers()
    server.kill()
    eventually(lambda: server.status() == psutil.STATUS_ZOMBIE, what="the exit of the server")

    assert is_accepted(load_in_sandbox(good, 1, (), seconds=60.0))
    assert servers() != [server]


def test_idle_server_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not remain as a zombie."""
    monkeypatch.setattr(sandbox_client, "IDLE_S", 0.1)
    assert is_accepted(
        load_in_sandbox(model_spec(models.row_ids(tmp_path / "m")), 1, (), seconds=60.0)
    )

    eventually(lambda: psutil.Process().children() == [], what="the exit of the server")


def test_sandboxed_load_writes_at_most_the_cache_limit(tmp_path: Path) -> None:
    """A model of a hundred bytes is 64 MiB after constant folding."""
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


FORKING_WORKER = """
import os, sys
if not os.fork():
    open(sys.argv[1], "w").write(str(os.getpid()))
    os.kill(os.getpid(), 19)
while not (os.path.exists(sys.argv[1]) and open(sys.argv[1]).read()):
    pass
os.write(1, bytes.fromhex(sys.argv[2]))
"""


@pytest.mark.slow
def test_model_check_ends_with_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of a Python model does not delay the result, and is killed."""
    response = encode([LoadFailed(1, "manifest", "error of the class")]).hex()
    pid_file = tmp_path / "pid"
    command = [sys.executable, "-c", FORKING_WORKER, str(pid_file), response]
    monkeypatch.setattr(model_check, "worker_command", lambda python: command)

    with pytest.raises(ManifestError, match="error of the class"):
        model_check.check_model(model_spec(tmp_path), "", 1, wait_s=30.0)
    eventually(
        lambda: not psutil.pid_exists(int(pid_file.read_text())), what="the exit of the fork"
    )


@pytest.mark.parametrize("server", [None, "import time; time.sleep(60)"])
def test_load_job_may_be_larger_than_a_pipe_buffer(
    server: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that the server does not read fails after the load timeout."""
    good = model_spec(models.row_ids(tmp_path / "m"))
    options = {"CPUExecutionProvider": {"note": "x" * (1 << 18)}}
    spec = msgspec.structs.replace(good, provider_options=options)
    if server is None:
        assert load_in_sandbox(spec, 1, (), seconds=60.0).refusal == ""
        return
    monkeypatch.setattr(sandbox_client, "own_command", lambda _: [sys.executable, "-c", server])
    monkeypatch.setattr(sandbox_client, "ANSWER_S", 0.1)
    assert load_in_sandbox(spec, 1, (), seconds=0.5).is_late
