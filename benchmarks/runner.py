"""Measures systems side by side: loads them in turn and samples their CPU.

One round measures every system of every case once, one after the other, so that other work on the
machine affects all of them; each round starts with another system. Ratios are taken within a round.
Every system has its own processes. They start before the first round and are idle while another
system is measured. Systems that use CPU when idle are started for each measurement.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil

from benchmarks.arrivals import NS_PER_S
from benchmarks.cases import Case
from benchmarks.load import GRACE_S, Load, Span, Tally, merge, run_client
from benchmarks.systems import SYSTEMS, NotInstalledError, Running, cpu_s, start
from benchmarks.workloads import Workload

US_PER_S = 1_000_000
CLIENT_S = 60.0
"""Limit for a client to connect, and to finish after its span."""
BUSY_WHEN_IDLE = frozenset({"inferential"})
QUANTILES = (
    *(round(tenth / 10, 1) for tenth in range(10)),
    0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9998, 0.9999, 1.0,
)  # fmt: skip
"""The recorded quantiles of a latency distribution."""

Measurement = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Rounds and durations of a run."""

    rounds: int
    seconds: float
    warm_up_seconds: float = 1.0


class Fleet:
    """The running systems, by name and workload; variants of a system share its server."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._up: dict[tuple[str, str], Running] = {}
        self._missing: set[str] = set()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def running(self, name: str, workload: Workload) -> Iterator[Running | None]:
        """A running system; None, logged once, if it is not installed."""
        server = SYSTEMS[name].server
        if server in self._missing:
            yield None
        elif server in BUSY_WHEN_IDLE:
            with contextlib.ExitStack() as stack:
                yield self._start(server, workload, stack)
        else:
            key = (server, workload.model)
            if key not in self._up:
                started = self._start(server, workload, self._stack)
                if started is not None:
                    self._up[key] = started
            yield self._up.get(key)

    def _start(
        self, server: str, workload: Workload, stack: contextlib.ExitStack
    ) -> Running | None:
        try:
            return stack.enter_context(start(server, workload))
        except NotInstalledError as error:
            self._missing.add(server)
            log_progress(f"skipped: {error}")
            return None


def run(cases: list[Case], effort: Effort) -> Iterator[Measurement]:
    """Measure every system of every case in every round; yields each measurement."""
    for case in cases:
        case.load.workload.prepare()
    total = effort.rounds * sum(len(case.systems) for case in cases)
    number = 0
    with Fleet() as fleet:
        for index in range(effort.rounds):
            for case in cases:
                turn = index % len(case.systems)
                for name in (*case.systems[turn:], *case.systems[:turn]):
                    number += 1
                    seconds = effort.seconds if case.seconds is None else case.seconds
                    log_progress(f"{number}/{total}: round {index + 1}: {case.name}: {name}")
                    with fleet.running(name, case.load.workload) as system:
                        if system is None:
                            continue
                        figures = measure(SYSTEMS[name].session, case.load, system, effort, seconds)
                    log_progress(f"    {summarize(figures)}")
                    yield {
                        "kind": "measurement",
                        "case": case.name,
                        "system": name,
                        "round": index + 1,
                        **figures,
                    }


def measure(
    session: str, load: Load, system: Running, effort: Effort, seconds: float
) -> Measurement:
    """Load one system, warm-up first, and measure inside the span.

    Raises:
        RuntimeError: A client process did not respond.
    """
    context = multiprocessing.get_context("spawn")
    clients: list[tuple[Any, Connection]] = []
    try:
        for number in range(load.processes):
            driver, client_end = context.Pipe()
            client = context.Process(
                target=run_client, args=(session, system.port, load, number, client_end)
            )
            client.start()
            client_end.close()
            clients.append((client, driver))
        for _, driver in clients:
            _receive(driver, CLIENT_S)
        begin_ns = time.monotonic_ns() + int(effort.warm_up_seconds * NS_PER_S)
        span = Span(begin_ns, begin_ns + int(seconds * NS_PER_S))
        for _, driver in clients:
            driver.send(span)
        client_processes = tuple(psutil.Process(client.pid) for client, _ in clients)
        groups = {**system.processes, "client": client_processes}
        _wait_until(span.begin_ns)
        start_s = {name: cpu_s(group) for name, group in groups.items()}
        front_s = cpu_s((system.front,)) if system.front else 0.0
        _wait_until(span.end_ns)
        spent_s = {name: cpu_s(group) - start_s[name] for name, group in groups.items()}
        front_s = cpu_s((system.front,)) - front_s if system.front else 0.0
        tally = merge([_receive(driver, CLIENT_S) for _, driver in clients])
    finally:
        for client, _ in clients:
            client.join(GRACE_S)
            client.kill()
    return _sum_up(tally, span, load, spent_s, front_s)


def summarize(figures: Measurement) -> str:
    """A measurement in one line."""
    if figures["p50_us"] is None:
        return f"no responses: {figures['error_words']}"
    line = (
        f"{figures['requests_per_s']:,.0f} requests/s, p50 {figures['p50_us']:,.0f} us, "
        f"p99 {figures['p99_us']:,.0f} us"
    )
    if figures["server_cpu_us"]:
        line += f", server CPU {figures['server_cpu_us']:,.0f} us"
    line += f", client CPU {figures['client_cpu_us']:,.0f} us"
    if figures["drops"] or figures["errors"]:
        line += f", {figures['drops']} dropped, {figures['errors']} failed"
        line += f" ({figures['error_words']})"
    return line


def log_progress(text: str) -> None:
    """Print a line to stderr."""
    print(text, file=sys.stderr, flush=True)


def _sum_up(
    tally: Tally, span: Span, load: Load, spent_s: dict[str, float], front_s: float
) -> Measurement:
    count = len(tally.latencies_ns)

    def per_request_us(seconds: float) -> float | None:
        return seconds * US_PER_S / count if count else None

    quantiles = np.quantile(tally.latencies_ns, QUANTILES) / 1000 if count else []
    by_quantile = dict(zip(QUANTILES, map(float, quantiles), strict=False))
    processes = {name: per_request_us(each) for name, each in spent_s.items() if name != "client"}
    return {
        "rows": load.rows,
        "clients": load.clients,
        "client_processes": load.processes,
        "arrivals_per_s": load.arrivals_per_s,
        "pattern": load.pattern if load.arrivals_per_s else None,
        "seconds": span.seconds,
        "requests": count,
        "requests_per_s": count / span.seconds,
        "rows_per_s": count * load.rows / span.seconds,
        "p50_us": by_quantile.get(0.5),
        "p95_us": by_quantile.get(0.95),
        "p99_us": by_quantile.get(0.99),
        "p999_us": by_quantile.get(0.999),
        "quantiles": QUANTILES,
        "latencies_us": list(by_quantile.values()),
        "server_cpu_us": per_request_us(sum(spent_s.values()) - spent_s["client"]),
        "front_cpu_us": per_request_us(front_s),
        "processes_cpu_us": processes,
        "client_cpu_us": per_request_us(spent_s["client"]),
        "late_p99_us": float(np.quantile(tally.late_ns, 0.99)) / 1000
        if len(tally.late_ns)
        else None,
        "drops": tally.drops,
        "errors": tally.errors,
        "error_words": tally.error,
    }


def _receive(driver: Connection, timeout_s: float) -> Any:  # noqa: ANN401
    if not driver.poll(timeout_s):
        raise RuntimeError(f"a client process did not respond within {timeout_s:g} s")
    return driver.recv()


def _wait_until(moment_ns: int) -> None:
    time.sleep(max(moment_ns - time.monotonic_ns(), 0) / NS_PER_S)
