"""Differences between two results files that exceed the noise of both.

The machine's speed differs from run to run. Therefore each figure is first divided by the same
figure, in the same round, of a system that did not change (the yardstick: echo). Without a
yardstick the figure is compared as it is, and the table shows that. Noise is the spread of the
rounds: two medians differ if their distance exceeds a floor and the larger half range of the files.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Literal

from benchmarks.results import Results
from benchmarks.tables import render_table

METRICS = ("requests_per_s", "p50_us", "p99_us", "server_cpu_us")
YARDSTICKS = ("echo", "direct")
FLOOR = 0.05
"""A few rounds cannot distinguish changes below a twentieth from noise."""


@dataclass(frozen=True)
class Change:
    """One figure in both files, as a factor: 1.1 is a tenth more in the second.

    Attributes:
        noise: Distance from 1 that is not significant.
        yardstick: Divisor of the figures; empty for none.
    """

    case: str
    system: str
    metric: str
    factor: float
    noise: float
    yardstick: str

    @property
    def word(self) -> Literal["same", "better", "worse"]:
        """More requests are better, and less of anything else."""
        if abs(self.factor - 1) <= self.noise:
            return "same"
        is_more = self.factor > 1
        return "better" if is_more == self.metric.endswith("_per_s") else "worse"


def compare(before: Results, after: Results) -> list[Change]:
    """Compare every figure that both files have."""
    changes = []
    for case in before.cases:
        systems = [system for system in before.systems(case) if system in after.systems(case)]
        yardstick = next((each for each in YARDSTICKS if each in systems), "")
        for system in systems:
            for metric in METRICS:
                by = "" if system == yardstick else yardstick
                pairs = [_relative(each, case, system, metric, by) for each in (before, after)]
                if all(pairs):
                    old, new = map(median, pairs)
                    noise = max(FLOOR, *(_half_range(values) for values in pairs))
                    changes.append(Change(case, system, metric, new / old, noise, by))
    return changes


def render(changes: list[Change]) -> str:
    """The changes beyond noise as a table, and the number of the others."""
    significant = [change for change in changes if change.word != "same"]
    rows = [
        [
            change.case,
            change.system,
            f"{change.metric}{' / ' + change.yardstick if change.yardstick else ''}",
            f"{change.factor:.2f}",
            f"{change.noise:.2f}",
            change.word,
        ]
        for change in significant
    ]
    headings = ["case", "system", "figure", "factor", "noise ±", "verdict"]
    table = f"{render_table(headings, rows)}\n\n" if rows else ""
    same = len(changes) - len(significant)
    return f"{table}{same} of {len(changes)} figures are the same within noise."


def _relative(results: Results, case: str, system: str, metric: str, yardstick: str) -> list[float]:
    """A figure by round, over the yardstick's figure in that round; empty if any is missing."""
    ours = {each["round"]: each[metric] for each in results.select(case, system)}
    if not yardstick:
        return list(ours.values()) if all(ours.values()) else []
    scale = {each["round"]: each[metric] for each in results.select(case, yardstick)}
    both = [(ours[number], scale[number]) for number in ours if number in scale]
    return [mine / other for mine, other in both] if both and all(map(all, both)) else []


def _half_range(values: list[float]) -> float:
    return (max(values) - min(values)) / 2 / median(values)
