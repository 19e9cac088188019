"""Texts of table cells and paths of plots; `page.js` has the same functions.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from iskander.gateway.supervision.placement.topology import render_cpu_list
from iskander.gateway.telemetry.page.tables import Kind

UNKNOWN = "-"
HEIGHT = 40
"""Units of a plot's height; its width has one for each sample."""


def format_cell(kind: Kind, value: Any) -> str:  # noqa: ANN401
    """Format a value of the status document."""
    return UNKNOWN if value is None else _FORMATS.get(kind, str)(value) or UNKNOWN


def format_number(value: float) -> str:
    """Format with at most two digits after the point, and fewer for large numbers."""
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _format_bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{format_number(value)} {unit}"
        value /= 1024
    return f"{format_number(value)} TiB"


def _format_seconds(value: float) -> str:
    if value < 60:
        return f"{format_number(value)} s"
    minutes = int(value) // 60
    if minutes < 60:
        return f"{minutes} min {int(value) % 60} s"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _format_codes(value: Mapping[str, int]) -> str:
    return ", ".join(f"{code} {format_number(count)}" for code, count in value.items())


def _format_time(value: float) -> str:
    return datetime.fromtimestamp(int(value), UTC).strftime("%Y-%m-%d %H:%M:%S")


_FORMATS: dict[str, Callable[[Any], str]] = {
    "number": format_number,
    "percent": lambda value: format_number(round(100 * value, 1)),
    "ranges": render_cpu_list,
    "texts": "; ".join,
    "bytes": _format_bytes,
    "seconds": _format_seconds,
    "flag": lambda value: "yes" if value else "no",
    "codes": _format_codes,
    "time": _format_time,
}


def plot_path(values: Sequence[float | None], high: float) -> str:
    """Return the `d` of an SVG path; an unknown value interrupts the line."""
    parts = []
    is_open = False
    for x, value in enumerate(values):
        if value is not None:
            y = HEIGHT - 1 - int(value / (high or 1) * (HEIGHT - 2) + 0.5)
            # The dash of length 0 shows a point without neighbors.
            parts.append(f"L{x} {y}" if is_open else f"M{x} {y}h0")
        is_open = value is not None
    return "".join(parts)
