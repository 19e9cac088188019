"""Measures systems side by side: loads them in turn, samples their CPU, sums up, reports.

One round measures every system of every case once, one after the other, so that whatever else the
machine does falls on all of them. Ratios are taken within a round, and medians of the rounds are
reported. Every system has processes of its own, started before the first round and idle while
another is measured.

The load comes from one client process with a thread and a connection for each stream. Against the
echo server, four streams of 128 rows took 42 us of client CPU per request that way and 56 us from
four client processes of one stream each; on a small machine that CPU is the server's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
from load import NS_PER_S, Load, Span, Tally, run_client
from systems import Running, cpu_s, require_scores, start
from tables import render_results
from workloads import FOLDER, Workload

US_PER_S = 1_000_000
CLIENT_S = 60.0
"""How long a client may take to connect, and to finish once its time is over."""
PACKAGES = ("iskander", "pyarrow", "onnxruntime-gpu", "uvloop", "numpy", "msgspec")

Measurement = dict[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to load the systems.

    Attributes:
        load: What the client does; its address is filled in.
        systems: Names, in the order of the first round.
    """

    name: str
    load: Load
    systems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A ratio of Iskander to the echo server, and its bound.

    Attributes:
        is_minimum: Whether the bound is the least; otherwise it is the most.
    """

    case: str
    metric: str
    bound: float
    is_minimum: bool


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to measure."""

    rounds: int
    seconds: float
    warm_up_seconds: float


def make_parser(description: str, seconds: float) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=3, help="rounds; medians are reported")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="measured, of each case, system and round"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    parser.add_argument(
        "--quick", action="store_true", help="a moment each: shows that it runs, not how fast"
    )
    return parser


def read_effort(arguments: argparse.Namespace) -> Effort:
    """How long the command line asks to measure."""
    if arguments.quick:
        return Effort(rounds=1, seconds=0.5, warm_up_seconds=0.25)
    return Effort(rounds=arguments.rounds, seconds=arguments.seconds, warm_up_seconds=1.0)


def run_benchmark(
    title: str, workload: Workload, *, cases: list[Case], targets: list[Target], effort: Effort
) -> dict[str, Any]:
    """Measure every case, print the tables, and return the results for a JSON file."""
    rounds: dict[tuple[str, str], list[tuple[Measurement, str]]] = {}
    names = {name for case in cases for name in case.systems}
    with contextlib.ExitStack() as stack:
        systems = {name: stack.enter_context(start(name, workload)) for name in names}
        require_scores(systems["iskander"].address, workload, cases[0].load.rows)
        for index in range(effort.rounds):
            for case in cases:
                turn = index % len(case.systems)
                for name in (*case.systems[turn:], *case.systems[:turn]):
                    _say(f"round {index + 1} of {effort.rounds}: {case.name}: {name}")
                    measured = measure(case.load, systems[name], effort)
                    rounds.setdefault((case.name, name), []).append(measured)
    described = [_describe_case(case, rounds) for case in cases]
    results = {
        "title": title,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "effort": asdict(effort),
        "cases": described,
        "targets": [_judge(target, described) for target in targets],
    }
    print(render_results(results))
    return results


def measure(load: Load, system: Running, effort: Effort) -> tuple[Measurement, str]:
    """Load one system, warm-up first, and measure what falls inside the span.

    Returns:
        The figures, and the words of the first error if there was one.

    Raises:
        RuntimeError: The client process did not answer.
    """
    context = multiprocessing.get_context("spawn")
    driver, far_end = context.Pipe()
    client = context.Process(
        target=run_client, args=(replace(load, address=system.address), far_end)
    )
    client.start()
    far_end.close()
    try:
        _receive(driver)
        begin_ns = time.monotonic_ns() + int(effort.warm_up_seconds * NS_PER_S)
        span = Span(begin_ns, begin_ns + int(effort.seconds * NS_PER_S))
        driver.send(span)
        front = () if system.front is None else (system.front,)
        groups = (front, system.workers, (psutil.Process(client.pid),))
        _wait_until(span.begin_ns)
        begun_s = [cpu_s(group) for group in groups]
        _wait_until(span.end_ns)
        spent_s = [cpu_s(group) - at_begin for group, at_begin in zip(groups, begun_s, strict=True)]
        tally: Tally = _receive(driver)
        client.join(CLIENT_S)
    finally:
        client.kill()
    return _sum_up(tally, span, load, *spent_s), tally.words


def write_results(results: dict[str, Any], path: Path | None) -> None:
    """Write a results file, where one is asked for."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


def describe_machine() -> dict[str, Any]:
    """What was measured on; nothing that names it."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30)),
        "system": f"{platform.system()} {platform.release()}",
    }


def describe_versions() -> dict[str, str]:
    """Of Python, of what the figures depend on, and the commit."""
    versions = {"python": platform.python_version()}
    versions |= {package: version(package) for package in PACKAGES}
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
    )
    return versions | {"commit": described.stdout.strip() or "unknown"}


def _sum_up(
    tally: Tally, span: Span, load: Load, front_s: float, workers_s: float, client_s: float
) -> Measurement:
    count = len(tally.latencies_ns)

    def per_request_us(spent_s: float) -> float | None:
        return spent_s * US_PER_S / count if count else None

    measured: Measurement = {
        f"p{percent}_us": _percentile_us(tally.latencies_ns, percent) for percent in (50, 95, 99)
    }
    measured["requests_per_s"] = count / span.seconds
    measured["rows_per_s"] = count * load.rows / span.seconds
    measured["front_cpu_us"] = per_request_us(front_s) if front_s else None
    measured["workers_cpu_us"] = per_request_us(workers_s) if workers_s else None
    measured["client_cpu_us"] = per_request_us(client_s)
    measured["errors"] = tally.errors
    if load.arrivals_per_s:
        measured["late_p99_us"] = _percentile_us(tally.late_ns, 99)
        measured["drops"] = tally.drops
    return measured


def _percentile_us(samples_ns: npt.NDArray[np.int64], percent: int) -> float | None:
    return float(np.percentile(samples_ns, percent)) / 1000 if len(samples_ns) else None


def _describe_case(
    case: Case, rounds: dict[tuple[str, str], list[tuple[Measurement, str]]]
) -> dict[str, Any]:
    systems = {}
    for name in case.systems:
        measured = [figures for figures, _ in rounds[case.name, name]]
        systems[name] = {
            "median": {key: _median([figures[key] for figures in measured]) for key in measured[0]},
            "rounds": measured,
            "error_words": [words for _, words in rounds[case.name, name] if words],
        }
    load = case.load
    return {
        "name": case.name,
        "rows": load.rows,
        "streams": load.streams,
        "window": load.window,
        "arrivals_per_s": load.arrivals_per_s * load.streams,
        "systems": systems,
    }


def _judge(target: Target, cases: list[dict[str, Any]]) -> dict[str, Any]:
    systems = next(case["systems"] for case in cases if case["name"] == target.case)
    pairs = zip(systems["iskander"]["rounds"], systems["echo"]["rounds"], strict=True)
    ratios = [_ratio(ours[target.metric], echo[target.metric]) for ours, echo in pairs]
    ratio = _median(ratios)
    is_met = ratio is not None and (
        ratio >= target.bound if target.is_minimum else ratio <= target.bound
    )
    return {**asdict(target), "rounds": ratios, "ratio": ratio, "is_met": is_met}


def _ratio(ours: float | None, echo: float | None) -> float | None:
    return ours / echo if ours is not None and echo else None


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _receive(driver: Connection) -> Any:  # noqa: ANN401
    if not driver.poll(CLIENT_S):
        raise RuntimeError(f"the client process was silent for {CLIENT_S:g} s")
    try:
        return driver.recv()
    except EOFError:
        raise RuntimeError("the client process ended early; its output says why") from None


def _wait_until(at_ns: int) -> None:
    time.sleep(max(0, at_ns - time.monotonic_ns()) / NS_PER_S)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
