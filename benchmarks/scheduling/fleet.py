"""Traces of clients with fixed rates, such as robots; equal seeds give equal traces.

Pure.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from benchmarks.scheduling.simulation import Arrival
from iskander.foundation.clock import NS_PER_MS, NS_PER_S
from iskander.gateway.auth.source import Source
from iskander.gateway.scheduling.request import Terms

HERTZ = 50.0
JITTER_MS = 0.5
JITTER_MOST_MS = 2.0
T = TypeVar("T")

DRIFT = 1e-4
"""Relative difference of the robots' clocks, so that their phases drift."""
BUDGETS_MS = (10.0, 12.0, 15.0, 20.0, 25.0, 30.0)
PRIORITIES = (0, 1, 1, 2)
BULK_ROWS = 64
BULK_HERTZ = 4.0


def fleet(
    robots: int, seconds: float, seed: int, *, hertz: float = HERTZ, model: int = 0
) -> list[Arrival]:
    """Robots that send one row at a fixed rate, with jitter and random phases.

    Each has its own budget, priority and urgency.
    """
    generator = random.Random(f"fleet {seed} {model}")
    budgets = _shuffled(generator, BUDGETS_MS, robots)
    priorities = _shuffled(generator, PRIORITIES, robots)
    trace = []
    for robot in range(robots):
        terms = Terms(
            client=f"robot-{robot}",
            is_named=True,
            priority=priorities[robot],
            urgency=round(generator.random(), 2),
            budget_ms=budgets[robot],
            source=Source(connection=robot),
        )
        period_s = (1.0 + generator.uniform(-DRIFT, DRIFT)) / hertz
        phase_s = generator.random() / hertz
        for turn in range(int((seconds - phase_s) / period_s)):
            jitter_ms = generator.gauss(0.0, JITTER_MS)
            jitter_ms = min(max(jitter_ms, -JITTER_MOST_MS), JITTER_MOST_MS)
            at_ns = int((phase_s + turn * period_s) * NS_PER_S + jitter_ms * NS_PER_MS)
            trace.append(Arrival(max(at_ns, 0), model, 1, terms))
    return sorted(trace, key=_at_ns)


def with_bulk(trace: Sequence[Arrival], seconds: float, seed: int) -> list[Arrival]:
    """The trace, and a client that sends large batches at random times, without deadlines."""
    generator = random.Random(f"bulk {seed}")
    source = Source(connection="bulk")
    terms = Terms(client="bulk", is_named=True, priority=5, source=source)
    mixed, at_s = list(trace), 0.0
    while (at_s := at_s + generator.expovariate(BULK_HERTZ)) < seconds:
        mixed.append(Arrival(int(at_s * NS_PER_S), 0, BULK_ROWS, terms))
    return sorted(mixed, key=_at_ns)


def merged(*traces: Sequence[Arrival]) -> list[Arrival]:
    """Several traces as one."""
    return sorted((arrival for trace in traces for arrival in trace), key=_at_ns)


def _shuffled(generator: random.Random, choices: Sequence[T], count: int) -> list[T]:
    """`count` choices in random order, each equally often."""
    choices_of_all = [choices[index % len(choices)] for index in range(count)]
    generator.shuffle(choices_of_all)
    return choices_of_all


def _at_ns(arrival: Arrival) -> int:
    return arrival.at_ns
