"""Plots of the page: measures of each plot, its scale, and its newest values.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from iskander.gateway.telemetry.page.formats import UNKNOWN, format_number, plot_path
from iskander.gateway.telemetry.status.document import ModelStatus


@dataclass(frozen=True)
class Plot:
    """A plot with a line for each measure, by its label."""

    title: str
    lines: tuple[tuple[str, str], ...]


def _latency(title: str, kind: str) -> Plot:
    return Plot(title, tuple((f"p{n}", f"{kind}_p{n}_ms") for n in (50, 95, 99)))


PLOTS = (
    Plot("Requests/s", (("now", "requests_per_s"),)),
    Plot("Rows/s", (("now", "rows_per_s"),)),
    _latency("Total ms", "total"),
    _latency("Wait ms", "wait"),
    _latency("Run ms", "run"),
)


@dataclass(frozen=True)
class Drawn:
    """A drawn plot: its scale and newest values as text, and the path of each line."""

    text: str
    paths: tuple[tuple[str, str], ...]


def draw(plot: Plot, model: ModelStatus) -> Drawn:
    """Draw a plot of a model with series."""
    series = [model.series.get(measure, []) for _, measure in plot.lines]
    high = max((value for values in series for value in values if value is not None), default=0)
    newest = [
        f"{label} {UNKNOWN if not values or values[-1] is None else format_number(values[-1])}"
        for (label, _), values in zip(plot.lines, series, strict=True)
    ]
    paths = [
        (label, plot_path(values, high))
        for (label, _), values in zip(plot.lines, series, strict=True)
    ]
    return Drawn(f"{', '.join(newest)}, max {format_number(high)}", tuple(paths))
