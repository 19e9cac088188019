"""How many arrivals a second a system sustains: an open loop whose rate grows until it does not.

A rate is sustained when nearly all that is due is answered, and the 99th percentile stays below a
bound; queues that only grow break it soon.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.cases import OPEN_CLIENTS
from benchmarks.load import Load
from benchmarks.results import Results
from benchmarks.runner import Effort, Fleet, brief, measure, say
from benchmarks.systems import SYSTEMS
from benchmarks.tables import render_table
from benchmarks.workloads import TWO_TOWER

FIRST_PER_S, GROWTH, STEPS_MAX = 1000.0, 1.15, 30
ANSWERED_LEAST = 0.97
P99_MOST_US = 50_000.0
LOAD = Load(workload=TWO_TOWER, rows=128, clients=OPEN_CLIENTS, processes=4, arrivals_per_s=1.0)
RAMPED = ("echo", "iskander", "triton", "mosec", "mlserver")


def ramp(systems: tuple[str, ...], effort: Effort) -> Iterator[dict[str, Any]]:
    """Every system in every round, from the first rate to the first that is too much.

    Returns:
        Measurements, and for each system and round a probe with the greatest rate that it bore.
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
                        say(f"round {index + 1}: ramp: {name}: {rate:,} arrivals/s")
                        session = SYSTEMS[name].session
                        figures = measure(session, load, system, effort, effort.seconds)
                        say(f"    {brief(figures)}")
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
    """Whether a measurement shows a system that keeps up."""
    due = figures["requests"] + figures["drops"]
    p99_us = figures["p99_us"]
    is_answered = due > 0 and figures["requests"] >= ANSWERED_LEAST * due
    return is_answered and not figures["errors"] and p99_us is not None and p99_us <= P99_MOST_US


def render(results: Results) -> str:
    """A line a system; empty where nothing was ramped."""
    probes = [each for each in results.probes if each["name"] == "ramp"]
    rows = []
    for name in dict.fromkeys(each["system"] for each in probes):
        found = [each["sustained_per_s"] for each in probes if each["system"] == name]
        told = " ".join(f"{value:,.0f}" for value in found)
        rows.append([name, f"{median(found):,.0f}", told])
    return render_table(["system", "sustained/s", "rounds"], rows) if rows else ""
