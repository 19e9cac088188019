"""Sustained load: an open loop with a growing rate, until the system cannot keep up.

A rate is sustained if nearly all due batches are answered, and the 99th percentile stays below a
bound; growing queues exceed it soon.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.cases import OPEN_CLIENTS
from benchmarks.load import Load
from benchmarks.results import Results
from benchmarks.runner import Effort, Fleet, log_progress, measure, summarize
from benchmarks.systems import SYSTEMS
from benchmarks.tables import render_table
from benchmarks.workloads import TWO_TOWER

FIRST_PER_S, GROWTH, STEPS_MAX = 1000.0, 1.15, 30
ANSWERED_LEAST = 0.97
P99_MOST_US = 50_000.0
LOAD = Load(workload=TWO_TOWER, rows=128, clients=OPEN_CLIENTS, processes=4, arrivals_per_s=1.0)
RAMPED = ("echo", "iskander", "triton", "mosec", "mlserver")


def ramp(systems: tuple[str, ...], effort: Effort) -> Iterator[dict[str, Any]]:
    """Ramp every system in every round, from the first rate to the first that is not sustained.

    Returns:
        A probe for each system and round, with the greatest sustained rate.
    """
    with Fleet() as fleet:
        for index in range(effort.rounds):
            turn = index % len(systems)
            for name in (*systems[turn:], *systems[:turn]):
                with fleet.running(name, TWO_TOWER) as system:
                    if system is None:
                        continue
                    sustained = 0.0
                    for step in range(STEPS_MAX):
                        rate = round(FIRST_PER_S * GROWTH**step)
                        load = replace(LOAD, arrivals_per_s=rate)
                        log_progress(f"round {index + 1}: ramp: {name}: {rate:,} arrivals/s")
                        session = SYSTEMS[name].session
                        figures = measure(session, load, system, effort, effort.seconds)
                        log_progress(f"    {summarize(figures)}")
                        if not is_sustained(figures):
                            break
                        sustained = figures["requests_per_s"]
                yield {
                    "kind": "probe",
                    "name": "ramp",
                    "system": name,
                    "round": index + 1,
                    "sustained_per_s": sustained,
                }


def is_sustained(figures: dict[str, Any]) -> bool:
    """Whether the system keeps up in a measurement."""
    due = figures["requests"] + figures["drops"]
    p99_us = figures["p99_us"]
    is_answered = due > 0 and figures["requests"] >= ANSWERED_LEAST * due
    return is_answered and not figures["errors"] and p99_us is not None and p99_us <= P99_MOST_US


def render(results: Results) -> str:
    """A row for each system; empty without ramps."""
    probes = [each for each in results.probes if each["name"] == "ramp"]
    rows = []
    for name in dict.fromkeys(each["system"] for each in probes):
        rates = [each["sustained_per_s"] for each in probes if each["system"] == name]
        rounds = " ".join(f"{rate:,.0f}" for rate in rates)
        rows.append([name, f"{median(rates):,.0f}", rounds])
    return render_table(["system", "sustained/s", "rounds"], rows) if rows else ""
