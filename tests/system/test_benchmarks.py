"""Benchmark commands with real servers: results file, table and comparison."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.results import read

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 120
SYSTEMS = ("echo", "iskander", "iskander-oip", "iskander-default")


def benchmarks(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_systems_are_measured_and_compared(tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    done = benchmarks(
        "run",
        "small",
        "--quick",
        "--case",
        "4 clients|500 arr",
        "--systems",
        *SYSTEMS,
        "--out",
        out,
    )
    assert done.returncode == 0, done.stderr
    assert "round 1: two-tower, 128 rows, 4 clients: echo" in done.stderr
    results = read([out])
    assert [results.systems(case) for case in results.cases] == [
        [*SYSTEMS],
        ["echo", "iskander"],
    ]
    for each in results.measurements:
        assert each["requests"] > 0
        assert not each["errors"], each["error_words"]
    measured = results.select(results.cases[0], "iskander")[0]
    assert set(measured["processes_cpu_us"]) == {"isk-gateway", "isk-worker-0"}
    assert measured["client_processes"] == 4
    same = benchmarks("compare", out, out)
    assert same.stdout.strip().endswith("figures are the same within noise.")


def test_windows_with_and_without_reloads_alternate(tmp_path: Path) -> None:
    out = tmp_path / "reload.jsonl"
    done = benchmarks("reload", "--quick", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "p99 with reloads is" in done.stdout
    without, reloading = read([out]).probes
    assert (without["reloads"], without["errors"], reloading["errors"]) == (0, 0, 0)
    assert reloading["reloads"] > 0 and without["requests"] > 0


def test_missing_peer_system_is_skipped_with_a_message(tmp_path: Path) -> None:
    arguments = ("run", "goals", "--quick", "--case", "1 row", "--systems", "echo", "mosec")
    code = (
        "import sys; from pathlib import Path; from benchmarks import systems, __main__ as main;"
        f"systems.PEERS = Path({str(tmp_path)!r}); sys.exit(main.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--out", str(tmp_path / "run.jsonl")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = "skipped: mosec is not installed: run `python -m benchmarks install mosec`"
    assert line in done.stderr
    assert read([tmp_path / "run.jsonl"]).systems("two-tower, 1 row, 4 clients") == ["echo"]


def test_terminated_run_stops_its_servers(tmp_path: Path) -> None:
    command = ["run", "small", "--case", "4 clients", "--systems", "echo", "iskander"]
    options = ["--rounds", "2", "--seconds", "0.5", "--out", str(tmp_path / "run.jsonl")]
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks", *command, *options],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stderr is not None
        assert any("round 2" in line for line in run.stderr)
        started = psutil.Process(run.pid).children(recursive=True)
        assert "isk-gateway" in {process.name() for process in started}
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=LIMIT_S)
    assert run.returncode
    assert psutil.wait_procs(started, timeout=10)[1] == []


def test_gpu_benchmark_runs_on_a_machine_without_one(tmp_path: Path) -> None:
    """The same servers and clients, with the CPU provider; Triton only where it is installed."""
    out = tmp_path / "gpu.jsonl"
    words = ("--provider", "cpu", "--models", "two-tower", "--seconds", "0.5", "--rounds", "1")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *words, "--out", out],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (record,) = map(json.loads, out.read_text().splitlines())
    ways = ["direct, 1 thread", "direct, 4 threads", "iskander"]
    assert [*record["runs"]][:3] == ways
    assert all(record["runs"][way][0]["rate"] > 0 for way in ways)
    assert {"isk-gateway", "isk-worker-0", "clients"} <= set(record["runs"]["iskander"][0]["cores"])
    assert "| two-tower | iskander | " in done.stdout


PROFILER = """
import json

class ProfilerActivity:
    CUDA = "cuda"

class profile:
    def __init__(self, activities):
        assert activities == ["cuda"]
    def start(self):
        self.calls = ["start"]
    def stop(self):
        self.calls.append("stop")
    def export_chrome_trace(self, path):
        assert self.calls == ["start", "stop"]
        copy = {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 1, "dur": 2}
        with open(path, "w") as file:
            json.dump({"traceEvents": [copy | {"args": {"bytes": 2048}}] * 3}, file)
"""


def test_worker_of_the_gpu_trace_serves_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for PyTorch's profiler, and the CPU provider."""
    from benchmarks.gpu import clients, models, trace

    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "profiler.py").write_text(PROFILER)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setattr(clients, "CLIENTS", 1)
    summary, batches = trace.record("two-tower", models.TWO_TOWER, 0.5, provider="cpu")
    assert summary.copies == [trace.Copies("HtoD (Pinned -> Device)", 2048, 3)]
    assert batches > 0
