"""Probes without load: startup time of the quickstart, and the cost of open streams.

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
from benchmarks.runner import Effort, log_progress, measure
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
    """Start the quickstart repeatedly; the first start only warms the page cache."""
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory(prefix="isk-bench-") as name:
            notices = listen(Path(name) / "notify")
            command = [
                str(gateway_command()),
                *("--config", str(QUICKSTART), "--set", "server.address=127.0.0.1:0"),
                *("--set", "admin.address=", "--set", f"server.runtime_directory={name}"),
            ]
            environment = {**os.environ, "NOTIFY_SOCKET": str(Path(name) / "notify")}
            started_s = time.monotonic()
            process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
            failure = wait_ready(process, notices)
            ready_s = time.monotonic() - started_s
            stop(process, ())
        if failure:
            raise RuntimeError(f"the quickstart did not become ready: {failure}")
        if number:
            log_progress(f"start {number}: {ready_s:.2f} s")
            yield {"kind": "probe", "name": "start", "seconds": ready_s}


def probe_idle(effort: Effort) -> Iterator[dict[str, Any]]:
    """Measure active streams with and without idle ones, and the cost of the idle ones."""
    workload = replace(TWO_TOWER, config=FOLDER / "configs" / "idle.toml")
    load = replace(ACTIVE, workload=workload)
    for number in range(effort.rounds):
        log_progress(f"idle: round {number + 1}")
        # A fresh gateway: an old one already has memory for the streams.
        with start("iskander", workload) as system, ExitStack() as streams:
            assert system.front is not None
            alone = measure("flight", load, system, effort, effort.seconds)
            before = _footprint(system.front)
            for _ in range(STREAMS):
                session = streams.enter_context(closing(Flight(Target(system.port, workload, 1))))
                session.call(0)
            time.sleep(SETTLE_S)
            after = _footprint(system.front)
            with_idle = measure("flight", load, system, effort, effort.seconds)
        yield {
            "kind": "probe",
            "name": "idle",
            "streams": STREAMS,
            "bytes_of_stream": (after["uss"] - before["uss"]) / STREAMS,
            "threads": after["threads"] - before["threads"],
            "p50_ratio": with_idle["p50_us"] / alone["p50_us"],
            "p99_ratio": with_idle["p99_us"] / alone["p99_us"],
        }


def render(results: Results) -> str:
    """A row for each probe; empty without probes."""
    rows = []
    starts = [each["seconds"] for each in results.probes if each["name"] == "start"]
    if starts:
        rows.append(_row("quickstart: s to ready", starts, START_MOST_S))
    idle = [each for each in results.probes if each["name"] == "idle"]
    for key, what, bound in (
        ("bytes_of_stream", "bytes of an idle stream", STREAM_MOST_BYTES),
        ("threads", "threads of 2,000 idle streams", 0),
        ("p50_ratio", "p50 of active streams, with / without idle ones", None),
        ("p99_ratio", "p99 of active streams, with / without idle ones", None),
    ):
        if idle:
            rows.append(_row(what, [each[key] for each in idle], bound))
    headings = ["what", "goal", "median", "rounds", "verdict"]
    return render_table(headings, rows) if rows else ""


def _row(what: str, values: list[float], bound: float | None) -> list[str]:
    value = median(values)
    goal = "-" if bound is None else f"≤ {bound:,g}"
    verdict = "-" if bound is None else "met" if value <= bound else "missed"
    return [what, goal, f"{value:,.2f}", " ".join(f"{each:,.2f}" for each in values), verdict]


def _footprint(process: psutil.Process) -> dict[str, int]:
    return {"uss": process.memory_full_info().uss, "threads": process.num_threads()}
