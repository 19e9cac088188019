"""Overload: results within the deadline, and rejections, above the sustainable load.

Eight streams send at seeded Poisson times, independent of responses, with a latency budget; a
latency counts from the due time. A batch costs the model a few milliseconds, and some more for each
row. Each round first finds the sustainable load: the peak of responses in time, over a few loads
around the maximum throughput of the worker. Then it measures 0.8, 1, 1.5 and 2 times that load.
Figures are medians of the rounds.

Goals at twice the sustainable load: the 99th percentile of accepted requests is at most twice that
at 0.8 of the load, and 0.95 of the peak is answered in time.

    python -m benchmarks.scheduling.overload --json build/overload.json
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import psutil
import pyarrow as pa

from benchmarks.arrivals import NS_PER_S
from benchmarks.machine import describe_machine, describe_versions
from benchmarks.scheduling.effort import make_parser, read_effort, write_results
from benchmarks.systems import Running, cpu_s, start
from benchmarks.tables import render_table
from benchmarks.workloads import FOLDER, Workload
from iskander.client import Client
from iskander.errors import IskanderError

STREAMS = 8
ROWS = 8
"""Equal for all requests: small requests would be admitted where large ones do not fit."""
ROWS_MAX = 64
BATCH_TURNS, ROW_TURNS = 500, 3000
"""About 7 ms for a batch and 0.1 ms for each row."""
DEADLINE_MS, USEFUL_MS = 50, 70
"""Deadline for the server, and for the client: the difference is the transmission time."""
SEARCH = (0.8, 0.9, 1.0)
UNBOUNDED = 1e5
LOADS = (0.8, 1.0, 1.5, 2.0)
LEAST, MOST = LOADS[0], LOADS[-1]
P99_RATIO_MOST, GOODPUT_LEAST = 2.0, 0.95
OVERLOAD_LEAST = 1.7
"""Lower bound for the greatest load, relative to the round's peak. A search while the machine was
busy finds too low a load, and its double is no overload; such a round is void."""
GRACE_S = 20.0
PR_SET_TIMERSLACK = 29

CONFIG = """
[server]
address = "127.0.0.1:0"
[admin]
address = ""
[limits]
window_batches = 1024
[workers]
groups = ["{cpu}"]
[[models]]
name = "priced"
path = "{path}"
intra_threads = 1
max_batch_rows = {rows_max}
"""

Figures = dict[str, Any]


class Span(NamedTuple):
    """A run: requests per second over all streams, and the measured period."""

    seed: int
    rate: float
    begin_ns: int
    end_ns: int
    has_deadline: bool = True


DEPTH = 16
"""Limit of a stream's unanswered batches without a deadline."""


@dataclass
class Tally:
    """Results of the requests that were due inside the span.

    Attributes:
        latencies_ms: Of requests with results.
        codes: Of requests with errors.
    """

    offered: int = 0
    latencies_ms: list[float] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)
    hints: int = 0
    late_ms: list[float] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add the counts of another tally."""
        self.offered += other.offered
        self.latencies_ms += other.latencies_ms
        self.codes += other.codes
        self.hints += other.hints
        self.late_ms += other.late_ms


def main() -> None:
    """Measure and report."""
    parser = make_parser("Measure results within the deadline under overload.", seconds=6.0)
    parser.add_argument("--deadline-ms", type=float, default=DEADLINE_MS)
    arguments = parser.parse_args()
    results = run(arguments)
    print(render(results))
    write_results(results, arguments.json)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All runs of one gateway."""
    effort = read_effort(arguments)
    with serving() as system, client(system.address, arguments.deadline_ms) as ask:

        def measure(rate: float, seed: int, *, has_deadline: bool = True) -> Figures:
            begin_ns = time.monotonic_ns() + int(effort.warm_up_seconds * NS_PER_S)
            end_ns = begin_ns + int(effort.seconds * NS_PER_S)
            return _measure(system, ask, Span(seed, rate, begin_ns, end_ns, has_deadline))

        rounds = [measure_round(measure, number) for number in range(effort.rounds)]
    return {
        "title": "Overload",
        "machine": describe_machine(),
        "versions": describe_versions(),
        "rounds": rounds,
        "loads": [
            {"load": load, "rounds": [each["loads"][load] for each in rounds]} for load in LOADS
        ],
        "verdicts": check_goals(rounds),
    }


def measure_round(measure: Callable[..., Figures], number: int) -> dict[str, Any]:
    """Find the sustainable load, then measure its multiples: other work shares the machine."""
    most = measure(UNBOUNDED, number, has_deadline=False)["per_s"]
    search = [measure(share * most, 100 * number + n) for n, share in enumerate(SEARCH)]
    sustainable = max(figures["good_per_s"] for figures in search)
    turn = number % len(LOADS)
    loads = {
        load: measure(load * sustainable, 1000 + 10 * number + int(load * 4))
        for load in LOADS[turn:] + LOADS[:turn]
    }
    peak = max(sustainable, *(figures["good_per_s"] for figures in loads.values()))
    over = loads[MOST]["offered_per_s"] / peak
    _log_progress(
        f"round {number + 1}: {most:.0f}/s without a budget, {sustainable:.0f}/s sustainable, "
        f"at most {over:.2f} times the peak: {json.dumps(loads)}"
    )
    return {
        "most_per_s": most,
        "sustainable_per_s": sustainable,
        "search": search,
        "loads": loads,
        "peak_per_s": peak,
        "overload": over,
        "is_valid": over >= OVERLOAD_LEAST,
    }


def check_goals(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Judge the goals over the valid rounds."""
    valid = [each for each in rounds if each["is_valid"]]
    slower = [each["loads"][MOST]["p99_ms"] / each["loads"][LEAST]["p99_ms"] for each in valid]
    goodputs = [each["loads"][MOST]["good_per_s"] / each["peak_per_s"] for each in valid]
    return [
        _verdict("p99 of the accepted at 2 / at 0.8", slower, P99_RATIO_MOST, is_most=True),
        _verdict("goodput at 2 / peak", goodputs, GOODPUT_LEAST, is_most=False),
    ]


def _verdict(goal: str, ratios: list[float], bound: float, *, is_most: bool) -> dict[str, Any]:
    ratio = median(ratios) if ratios else None
    is_met = ratio is not None and (ratio <= bound if is_most else ratio >= bound)
    return {"what": goal, "rounds": ratios, "ratio": ratio, "bound": bound, "is_met": is_met}


def render(results: dict[str, Any]) -> str:
    """The tables."""
    headings = [
        "load", "offered/s", "accepted/s", "in time/s", "p50 ms", "p99 ms", "sent late p99 ms",
        "gateway CPU", "worker CPU", "rejected/s by code",
    ]  # fmt: skip
    rows = []
    for entry in results["loads"]:
        figures = _medians(entry["rounds"])
        codes: Counter[str] = Counter()
        for each in entry["rounds"]:
            codes.update(each["refused_per_s"])
        rejections = ", ".join(
            f"{code} {n / len(entry['rounds']):.0f}" for code, n in codes.items()
        )
        rows.append(
            [
                f"{entry['load']:.1f}",
                *(f"{figures[key]:.0f}" for key in ("offered_per_s", "per_s", "good_per_s")),
                *(f"{figures[key]:.1f}" for key in ("p50_ms", "p99_ms", "late_p99_ms")),
                *(f"{figures[key]:.0%}" for key in ("gateway_cpu", "worker_cpu")),
                rejections or "-",
            ]
        )
    verdicts = []
    for each in results["verdicts"]:
        ratio = "-" if each["ratio"] is None else f"{each['ratio']:.2f}"
        ratios = " ".join(f"{value:.2f}" for value in each["rounds"])
        verdict = "void" if each["ratio"] is None else "met" if each["is_met"] else "missed"
        verdicts.append([each["what"], f"{each['bound']:.2f}", ratio, ratios, verdict])
    void = sum(not each["is_valid"] for each in results["rounds"])
    sustainable = " ".join(f"{each['sustainable_per_s']:.0f}" for each in results["rounds"])
    return "\n\n".join(
        [
            f"## Overload: {sustainable} requests/s are sustainable, by round",
            render_table(headings, rows),
            render_table(["target", "bound", "median", "rounds", "verdict"], verdicts),
            f"{void} of {len(results['rounds'])} rounds are void: their greatest load was less "
            f"than {OVERLOAD_LEAST:g} times the peak.",
        ]
    )


@contextlib.contextmanager
def serving() -> Iterator[Running]:
    """A gateway with one worker and the priced model."""
    sys.path.append(str(FOLDER.parent / "tests"))
    from support import models

    with tempfile.TemporaryDirectory(prefix="isk-overload-") as name:
        folder = Path(name)
        model = models.priced(folder / "priced", BATCH_TURNS, ROW_TURNS)
        cpu = max(os.sched_getaffinity(0))
        config = folder / "overload.toml"
        config.write_text(CONFIG.format(cpu=cpu, path=model, rows_max=ROWS_MAX))
        workload = Workload(
            "priced", config, model, lambda _, rows: {"x": pa.array(np.arange(rows))}, "y"
        )
        with start("iskander", workload) as system:
            yield system


@contextlib.contextmanager
def client(address: str, deadline_ms: float) -> Iterator[Connection]:
    """A client process that runs spans and sends their tallies, until the connection closes."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=run_client, args=(address, deadline_ms, far))
    process.start()
    far.close()
    try:
        yield near
    finally:
        near.close()
        process.join(GRACE_S)
        process.kill()


def run_client(address: str, deadline_ms: float, driver: Connection) -> None:
    """Main function of the client process."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # Exact sleeps.
    clients = [Client(address) for _ in range(STREAMS)]
    with contextlib.suppress(EOFError):
        while True:
            span: Span = driver.recv()
            tallies = [Tally() for _ in range(STREAMS)]
            threads = [
                threading.Thread(target=_stream, args=(*each, span, deadline_ms))
                for each in zip(clients, range(STREAMS), tallies, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            total = Tally()
            for tally in tallies:
                total.add(tally)
            driver.send(total)


def _stream(client: Client, number: int, tally: Tally, span: Span, deadline_ms: float) -> None:
    """Run one stream: send batches at their due times, and record each outcome."""
    due_ns: list[int] = []
    permits = threading.Semaphore(1 << 30 if span.has_deadline else DEPTH)

    def batches() -> Iterator[pa.RecordBatch]:
        generator = np.random.default_rng([span.seed, number])
        at_ns = float(time.monotonic_ns())
        while max(at_ns, 0 if span.has_deadline else time.monotonic_ns()) < span.end_ns:
            permits.acquire()
            wait_ns = at_ns - time.monotonic_ns()
            if wait_ns > 0:
                time.sleep(wait_ns / NS_PER_S)
            due_ns.append(int(at_ns))
            if span.begin_ns <= at_ns:
                tally.late_ms.append(max(-wait_ns, 0) / 1e6)
            yield pa.record_batch({"x": generator.integers(0, 1 << 40, ROWS)})
            at_ns += generator.exponential(NS_PER_S * STREAMS / span.rate)

    terms = {"deadline_ms": deadline_ms} if span.has_deadline else {}
    timeout_s = (span.end_ns - time.monotonic_ns()) / NS_PER_S + GRACE_S
    for index, outcome in enumerate(
        client.outcomes("priced", batches(), terms=terms, timeout_s=timeout_s)
    ):
        now_ns = time.monotonic_ns()
        permits.release()
        if not span.has_deadline and span.begin_ns <= now_ns < span.end_ns:
            tally.latencies_ms.append((now_ns - due_ns[index]) / 1e6)
        if not span.has_deadline or not span.begin_ns <= due_ns[index] < span.end_ns:
            continue
        tally.offered += 1
        if isinstance(outcome, IskanderError):
            tally.codes[outcome.code] += 1
            tally.hints += outcome.retry_after_ms is not None
        else:
            tally.latencies_ms.append((now_ns - due_ns[index]) / 1e6)


def _measure(system: Running, ask: Connection, span: Span) -> Figures:
    assert system.front is not None
    groups = ((system.front,), system.workers)
    before_run = _batches(system)
    ask.send(span)
    time.sleep(max(span.begin_ns - time.monotonic_ns(), 0) / NS_PER_S)
    before_s = [cpu_s(group) for group in groups]
    begun_ns = time.monotonic_ns()
    time.sleep(max(span.end_ns - time.monotonic_ns(), 0) / NS_PER_S)
    seconds = (time.monotonic_ns() - begun_ns) / NS_PER_S
    gateway, worker = (
        (cpu_s(group) - before) / seconds for group, before in zip(groups, before_s, strict=True)
    )
    if not ask.poll(3 * GRACE_S):
        raise RuntimeError(f"the client did not respond within {3 * GRACE_S:g} s")
    tally: Tally = ask.recv()
    ran = _batches(system) - before_run
    span_s = (span.end_ns - span.begin_ns) / NS_PER_S
    latencies = np.array(tally.latencies_ms or [0.0])
    p50, p99 = np.percentile(latencies, (50, 99))
    return {
        "offered_per_s": tally.offered / span_s,
        "per_s": len(tally.latencies_ms) / span_s,
        "good_per_s": int(np.count_nonzero(latencies <= USEFUL_MS)) / span_s,
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "refused_per_s": {code: n / span_s for code, n in tally.codes.items()},
        "hints": tally.hints,
        "batch_rows": ran["rows"] / max(ran["batches"], 1),
        "closed": {key: n for key, n in ran.items() if key.startswith("closed.")},
        "late_p99_ms": float(np.percentile(tally.late_ms or [0.0], 99)),
        "gateway_cpu": gateway,
        "worker_cpu": worker,
        "machine_cpu": psutil.cpu_percent(),
    }


def _batches(system: Running) -> Counter[str]:
    """Completed batches so far, their rows, and the reasons of their closing."""
    with Client(system.address) as client:
        lane = client.stats()["lanes"]["priced/1"]
    rows = lane["batch_rows"]
    closed = {f"closed.{key}": n for key, n in lane["closed"].items()}
    return Counter({"batches": rows["count"], "rows": rows["count"] * rows["mean"], **closed})


def _medians(rounds: list[Figures]) -> Figures:
    keys = [key for key, value in rounds[0].items() if isinstance(value, int | float)]
    return {key: median(figures[key] for figures in rounds) for key in keys}


def _log_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
