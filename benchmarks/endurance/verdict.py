"""Limits of an endurance run: growth of resources and latencies, and correctness of answers.

A resource is compared at quiet points, where no request is open: the median of the last quarter
after the warm-up with the median of the first. Processes that replace each other, such as recycled
workers, form one series, and are compared at equal ages: a young process has less memory than an
old one. Pure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import NamedTuple

from benchmarks.endurance.latencies import Latencies

MIB = 1 << 20
WARM_UP_SHARE, WARM_UP_LEAST_S, WARM_UP_SHARE_MAX = 0.1, 120.0, 1 / 3
P99_RATIO_MAX = 1.2
LATENCIES_LEAST = 500
"""Requests of a kind in a quarter for a p99 of at least five samples above it."""
QUARTER_LEAST = 3
"""Values of a quarter for a median that ignores an outlier."""


class Point(NamedTuple):
    """A value of a process at a quiet point.

    Attributes:
        at_s: Time since the start of the run.
        age_s: Age of the process.
        incarnation: Identity of the process.
    """

    at_s: float
    age_s: float
    incarnation: str
    value: float


@dataclass(frozen=True)
class Limit:
    """Permitted growth of a metric: the larger of a share and an amount."""

    share: float = 0.02
    amount: float = 0.0


LIMITS = {
    "private_bytes": Limit(amount=MIB),
    "pss_bytes": Limit(amount=MIB),
    "descriptors": Limit(amount=2),
    "sockets": Limit(amount=1),
    "memfds": Limit(amount=1),
    "threads": Limit(amount=1),
    "regions": Limit(share=0.0),
}
"""Every judged metric of a process, and amounts that are more than 2 % of a small one.

A worker with a sandbox server has two descriptors and a thread more.
"""


@dataclass(frozen=True)
class Finding:
    """A limit and what was measured; without a value, it was not measured.

    Attributes:
        subject: Process, or kind of client.
        first: Of the first quarter.
        last: Of the last quarter.
        most: Limit of `last`.
        slope_per_h: Median growth within one process, for information.
    """

    subject: str
    metric: str
    first: float | None
    last: float | None
    most: float | None
    slope_per_h: float | None = None

    @property
    def word(self) -> str:
        """Met, broken, or not measured."""
        if self.last is None or self.most is None:
            return "not measured"
        return "met" if self.last <= self.most else "broken"


class Quarters(NamedTuple):
    """The first and the last quarter of the time after the warm-up, in seconds of the run."""

    first: tuple[float, float]
    last: tuple[float, float]

    @classmethod
    def of(cls, run_s: float) -> Quarters:
        """The quarters of a run; its warm-up is a tenth, or two minutes, at most a third."""
        begin_s = min(max(WARM_UP_SHARE * run_s, WARM_UP_LEAST_S), WARM_UP_SHARE_MAX * run_s)
        quarter_s = (run_s - begin_s) / 4
        return cls((begin_s, begin_s + quarter_s), (run_s - quarter_s, math.inf))


def judge_growth(subject: str, metric: str, points: Sequence[Point], quarters: Quarters) -> Finding:
    """Judge a metric of one process, or of processes that replaced each other."""
    early = [point for point in points if quarters.first[0] <= point.at_s < quarters.first[1]]
    late = [point for point in points if quarters.last[0] <= point.at_s]
    is_one = len({point.incarnation for point in points}) == 1
    pair = _medians(early, late) if is_one else _medians_by_age(early, late)
    if pair is None:
        return Finding(subject, metric, None, None, None)
    first, last = pair
    limit = LIMITS[metric]
    most = first + max(limit.share * first, limit.amount)
    after = [point for point in points if point.at_s >= quarters.first[0]]
    return Finding(subject, metric, first, last, most, slope_per_h(after))


def judge_latency(
    kind: str, windows: Sequence[tuple[float, Latencies]], quarters: Quarters
) -> Finding:
    """Judge the p99 of a kind of client, in milliseconds; a window has the time of its end."""
    p99_ms = []
    for begin_s, end_s in quarters:
        merged = Latencies()
        for at_s, latencies in windows:
            if begin_s <= at_s < end_s:
                merged.add(latencies)
        p99_us = merged.percentile_us(99)
        if p99_us is None or len(merged) < LATENCIES_LEAST:
            return Finding(kind, "p99_ms", None, None, None)
        p99_ms.append(p99_us / 1000)
    return Finding(kind, "p99_ms", *p99_ms, P99_RATIO_MAX * p99_ms[0])


def judge_count(subject: str, metric: str, count: float) -> Finding:
    """Judge a count that must be 0, such as wrong answers."""
    return Finding(subject, metric, 0.0, count, 0.0)


def slope_per_h(points: Iterable[Point]) -> float | None:
    """Theil-Sen slope: the median slope of all pairs of values of the same process, for an hour."""
    by_incarnation = defaultdict(list)
    for point in points:
        by_incarnation[point.incarnation].append(point)
    slopes = [
        (other.value - one.value) / (other.at_s - one.at_s)
        for values in by_incarnation.values()
        for one, other in combinations(values, 2)
        if other.at_s > one.at_s
    ]
    return 3600 * median(slopes) if slopes else None


def _medians(early: Sequence[Point], late: Sequence[Point]) -> tuple[float, float] | None:
    if min(len(early), len(late)) < QUARTER_LEAST:
        return None
    return median(point.value for point in early), median(point.value for point in late)


def _medians_by_age(early: Sequence[Point], late: Sequence[Point]) -> tuple[float, float] | None:
    """Weighted means of the medians at the ages that both quarters have; ages within a factor 2."""
    ages = [defaultdict(list), defaultdict(list)]
    for by_age, points in zip(ages, (early, late), strict=True):
        for point in points:
            by_age[int(math.log2(max(point.age_s, 1.0)))].append(point.value)
    weights = {age: min(len(ages[0][age]), len(ages[1][age])) for age in ages[0].keys() & ages[1]}
    total = sum(weights.values())
    if total < QUARTER_LEAST:
        return None
    first, last = (
        sum(weight * median(by_age[age]) for age, weight in weights.items()) / total
        for by_age in ages
    )
    return first, last
