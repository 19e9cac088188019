"""Tables for a terminal: aligned columns, and what `iskander stats` prints, in 100 columns.

Pure: plain values in, lines out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS_MAX = 100
NAME_MAX = 20
MIB = 1 << 20

Row = tuple[str, ...]


def render_table(head: Row, rows: Sequence[Row], *, numbers_from: int | None = None) -> list[str]:
    """Lines with aligned columns; what is no letter, such as an escape, is a question mark.

    Args:
        head: Names of the columns.
        rows: Cells, as many in each row as there are columns.
        numbers_from: The first column that is aligned to the right; None: none is.
    """
    table = [tuple(map(_printable, row)) for row in (head, *rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    first = len(head) if numbers_from is None else numbers_from
    lines = []
    for row in table:
        cells = [
            cell.ljust(width) if column < first else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in " ".join(text.splitlines()))


def render_stats(stats: Mapping[str, Any]) -> list[str]:
    """What the action `stats` answered, for people."""
    lanes: dict[str, Any] = stats["lanes"]
    arena = stats["input_arena"]
    lines = [
        f"iskander {stats['version']}, pid {stats['pid']}, up {_duration(stats['uptime_s'])}, "
        f"{_count(stats['streams'])} streams, {_count(stats['calls'])} calls, input arena "
        f"{arena['leased_bytes'] / MIB:.1f} of {arena['capacity_bytes'] / MIB:.0f} MiB",
        *(f"not ready: {reason}" for reason in stats["reasons"]),
        *([] if stats["reasons"] else ["ready"]),
        "",
        *_lane_table(lanes),
        "",
        *_latency_table(lanes),
        "",
        *_worker_table(stats["workers"], lanes),
    ]
    notes = [f"input arena: {notice}" for notice in arena["notices"]]
    notes += [
        f"worker {worker['index']}: {notice}"
        for worker in stats["workers"]
        for notice in worker["notices"]
    ]
    notes += [line for title, lane in lanes.items() for line in _notes(title, lane)]
    return [*lines, "", *notes] if notes else lines


def _lane_table(lanes: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            _name(title),
            "yes" if lane["ready"] else "no",
            *map(
                _count,
                (
                    lane["workers"],
                    lane["queue"]["requests"],
                    lane["queue"]["rows"],
                    lane.get("requests", 0),
                    sum(lane["refused"].values()),
                    sum(lane["failed"].values()),
                    lane["deadlines"]["hit"],
                    lane["deadlines"]["missed"],
                ),
            ),
        )
        for title, lane in lanes.items()
    ]
    head = ("model", "ready", "workers", "queued", "rows", "requests")
    return render_table((*head, "refused", "failed", "in time", "late"), rows, numbers_from=2)


def _latency_table(lanes: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            _name(title),
            _count(lane["batch_rows"]["count"]),
            _count(round(lane["batch_rows"]["mean"])),
            *(
                f"{_number(times['p50'])}/{_number(times['p99'])}" if times["count"] else "-"
                for times in (lane["latency_ms"][kind] for kind in ("wait", "run", "total"))
            ),
            _cost(lane["cost"], "base_us", 1000),
            _cost(lane["cost"], "row_us", 1),
        )
        for title, lane in lanes.items()
    ]
    head = ("p50/p99 since start", "batches", "rows", "wait ms", "run ms", "total ms")
    return render_table((*head, "base ms", "row us"), rows, numbers_from=1)


def _worker_table(workers: Sequence[Mapping[str, Any]], lanes: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            str(worker["index"]),
            worker["state"],
            *map(
                str,
                (
                    worker["pid"] or "-",
                    worker["incarnation"] or "-",
                    _count(worker["starts"]),
                    _count(worker["batches"]),
                    worker["in_flight"],
                    f"{worker['output_leased_bytes'] / MIB:.1f}",
                    f"{worker['resident_bytes'] / MIB:.0f}",
                ),
            ),
            worker["story"][-1] if worker["story"] else "",
        )
        for worker in workers
    ]
    head = ("worker", "state", "pid", "life", "starts", "batches", "running")
    return [
        line if len(line) <= COLUMNS_MAX else f"{line[: COLUMNS_MAX - 3]}..."
        for line in render_table((*head, "out MiB", "RSS MiB", "last"), rows)
    ]


def _notes(title: str, lane: Mapping[str, Any]) -> list[str]:
    """What there is only sometimes: refusals and failures by code, why batches were closed."""
    kinds = (("refused", "refused"), ("failed", "failed"), ("closed", "batches closed"))
    return [
        f"{title}: {words}: "
        + ", ".join(f"{name} {_count(count)}" for name, count in sorted(lane[key].items()))
        for key, words in kinds
        if lane[key]
    ]


def _cost(costs: Mapping[str, Mapping[str, float]], key: str, divisor: int) -> str:
    """Of the dearest worker."""
    known = [cost[key] / divisor for cost in costs.values() if cost["samples"]]
    return _number(max(known)) if known else "-"


def _name(title: str) -> str:
    """Cut in the middle: a version is at the end."""
    return title if len(title) <= NAME_MAX else f"{title[: NAME_MAX - 10]}..{title[-8:]}"


def _number(value: float) -> str:
    """At most two decimals, and six characters up to a day in milliseconds."""
    if value >= 1_000_000:
        return f"{value / 1000:.0f}k"
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _count(value: int) -> str:
    """In full up to five digits, then with a letter for each three."""
    for unit in ("", "k", "M", "G"):
        if value < 100_000:
            return f"{value}{unit}"
        value //= 1000
    return f"{value}T"


def _duration(seconds: float) -> str:
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"
