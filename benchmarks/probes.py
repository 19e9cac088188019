"""What is no load: how long the quickstart takes to be ready, and what open streams cost.

start   from the command to READY=1, with the files in the page cache
idle    memory, threads and the latency of a few active streams, with 2,000 idle ones and without
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.load import Load
from benchmarks.results import Results
from benchmarks.runner import Effort, measure, say
from benchmarks.sessions import Flight, Target
from benchmarks.systems import gateway_command, listen, start, stop, wait_ready
from benchmarks.tables import render_table
from benchmarks.workloads import FOLDER, TWO_TOWER

QUICKSTART = FOLDER.parent / "configs" / "quickstart.toml"
STREAMS = 2000
SETTLE_S = 2.0
START_MOST_S, STREAM_MOST_BYTES = 1.5, 60_000
ACTIVE = Load(workload=TWO_TOWER, rows=128, clients=4, processes=4, arrivals_per_s=500.0)


def probe_start(rounds: int) -> Iterator[dict[str, Any]]:
    """Start the quickstart again and again; the first time only warms the page cache."""
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory(prefix="isk-bench-") as name:
            notices = listen(Path(name) / "notify")
            command = [
                str(gateway_command()),
                *("--config", str(QUICKSTART), "--set", "server.address=127.0.0.1:0"),
                *("--set", "admin.address=", "--set", f"server.runtime_directory={name}"),
            ]
            environment = {**os.environ, "NOTIFY_SOCKET": str(Path(name) / "notify")}
            begun_s = time.monotonic()
            process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
            failure = wait_ready(process, notices)
            took_s = time.monotonic() - begun_s
            stop(process, ())
        if failure:
            raise RuntimeError(f"the quickstart: {failure}")
        if number:
            say(f"start {number}: {took_s:.2f} s")
            yield {"kind": "probe", "name": "start", "seconds": took_s}


def probe_idle(effort: Effort) -> Iterator[dict[str, Any]]:
    """Measure active streams alone and beside idle ones, and what those take."""
    workload = replace(TWO_TOWER, config=FOLDER / "configs" / "idle.toml")
    load = replace(ACTIVE, workload=workload)
    for number in range(effort.rounds):
        say(f"idle: round {number + 1}")
        # A gateway of its own: memory that one had for streams before would be there already.
        with start("iskander", workload) as system, ExitStack() as held:
            assert system.front is not None
            alone = measure("flight", load, system, effort, effort.seconds)
            before = _footprint(system.front)
            for _ in range(STREAMS):
                session = held.enter_context(closing(Flight(Target(system.port, workload, 1))))
                session.call(0)
            time.sleep(SETTLE_S)
            after = _footprint(system.front)
            beside = measure("flight", load, system, effort, effort.seconds)
        yield {
            "kind": "probe",
            "name": "idle",
            "streams": STREAMS,
            "bytes_of_stream": (after["uss"] - before["uss"]) / STREAMS,
            "threads": after["threads"] - before["threads"],
            "p50_ratio": beside["p50_us"] / alone["p50_us"],
            "p99_ratio": beside["p99_us"] / alone["p99_us"],
        }


def render(results: Results) -> str:
    """A line a probe; empty where nothing was probed."""
    rows = []
    starts = [each["seconds"] for each in results.probes if each["name"] == "start"]
    if starts:
        rows.append(_row("quickstart: s to ready", starts, START_MOST_S))
    idle = [each for each in results.probes if each["name"] == "idle"]
    for key, what, most in (
        ("bytes_of_stream", "bytes of an idle stream", STREAM_MOST_BYTES),
        ("threads", "threads of 2,000 idle streams", 0),
        ("p50_ratio", "p50 of active streams beside them / alone", None),
        ("p99_ratio", "p99 of active streams beside them / alone", None),
    ):
        if idle:
            rows.append(_row(what, [each[key] for each in idle], most))
    headings = ["what", "goal", "median", "rounds", "verdict"]
    return render_table(headings, rows) if rows else ""


def _row(what: str, values: list[float], most: float | None) -> list[str]:
    value = median(values)
    goal = "-" if most is None else f"≤ {most:,g}"
    verdict = "-" if most is None else "met" if value <= most else "missed"
    return [what, goal, f"{value:,.2f}", " ".join(f"{each:,.2f}" for each in values), verdict]


def _footprint(process: psutil.Process) -> dict[str, int]:
    return {"uss": process.memory_full_info().uss, "threads": process.num_threads()}
