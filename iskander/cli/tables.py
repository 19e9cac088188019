"""Tables for a terminal of 100 columns: alignment, and the output of `iskander stats`.

Pure: plain values in, lines out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from iskander.gateway.telemetry.status.stats import (
        LaneStats,
        LatencyStats,
        Stats,
        WorkerStats,
    )

COLUMNS_MAX = 100
NAME_MAX = 20
MIB = 1 << 20

Row = tuple[str, ...]


def render_table(head: Row, rows: Sequence[Row], *, numbers_from: int | None = None) -> list[str]:
    """Lines with aligned columns; `?` replaces unprintable characters such as escapes.

    Columns from the index `numbers_from` on are right-aligned.
    """
    table = [tuple(map(printable, row)) for row in (head, *rows)]
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


def printable(text: str) -> str:
    """Return a text on one line, with `?` for unprintable characters such as escapes."""
    return "".join(each if each.isprintable() else "?" for each in " ".join(text.splitlines()))


def render_stats(stats: Stats) -> list[str]:
    """The response of the action `stats`, as lines of text."""
    lanes, arena = stats.lanes, stats.input_arena
    lines = [
        f"iskander {stats.version} ({stats.build}), pid {stats.pid}, "
        f"up {format_duration(stats.uptime_s)}, "
        f"{format_count(stats.streams)} streams, {format_count(stats.calls)} calls, "
        f"input arena {arena.leased_bytes / MIB:.1f} of {arena.capacity_bytes / MIB:.0f} MiB",
        *([f"not ready: {reason}" for reason in stats.reasons] or ["ready"]),
        "",
        *_lane_table(lanes),
        "",
        *_latency_table(lanes),
        "",
        *_worker_table(stats.workers),
    ]
    notes = [f"input arena: {notice}" for notice in arena.notices]
    for worker in stats.workers:
        notes += [f"worker {worker.index}: {notice}" for notice in worker.notices]
    notes += [line for title, lane in lanes.items() for line in _notes(title, lane)]
    return [*lines, "", *notes] if notes else lines


def _lane_table(lanes: Mapping[str, LaneStats]) -> list[str]:
    rows = []
    for title, lane in lanes.items():
        counts = (
            lane.workers,
            lane.queue.requests,
            lane.queue.rows,
            lane.requests,
            sum(lane.refused.values()),
            sum(lane.failed.values()),
            lane.deadlines["hit"],
            lane.deadlines["missed"],
        )
        rows.append((_name(title), "yes" if lane.ready else "no", *map(format_count, counts)))
    head = ["model", "ready", "workers", "queued", "rows", "requests", "rejected", "failed"]
    return render_table((*head, "in time", "late"), rows, numbers_from=2)


def _latency_table(lanes: Mapping[str, LaneStats]) -> list[str]:
    rows = []
    for title, lane in lanes.items():
        times = (_percentiles(lane.latency_ms[kind]) for kind in ("wait", "run", "total"))
        counts = lane.batch_rows.count, round(lane.batch_rows.mean)
        known = [cost for cost in lane.cost.values() if cost.samples]
        costs = (
            _highest([cost.base_us / 1000 for cost in known]),
            _highest([cost.row_us for cost in known]),
        )
        rows.append((_name(title), *map(format_count, counts), *times, *costs))
    head = ("p50/p99 since start", "batches", "rows", "wait ms", "run ms", "total ms")
    return render_table((*head, "base ms", "row us"), rows, numbers_from=1)


def _worker_table(workers: Sequence[WorkerStats]) -> list[str]:
    rows = [
        (
            str(worker.index),
            worker.state,
            str(worker.pid or "-"),
            str(worker.incarnation or "-"),
            format_count(worker.starts),
            format_count(worker.batches),
            str(worker.in_flight),
            f"{worker.output_leased_bytes / MIB:.1f}",
            f"{worker.resident_bytes / MIB:.0f}",
            worker.history[-1] if worker.history else "",
        )
        for worker in workers
    ]
    head = ("worker", "state", "pid", "life", "starts", "batches", "running")
    return [
        line if len(line) <= COLUMNS_MAX else f"{line[: COLUMNS_MAX - 3]}..."
        for line in render_table((*head, "out MiB", "RSS MiB", "last"), rows)
    ]


def _notes(title: str, lane: LaneStats) -> list[str]:
    """Why requests are not combined, and counts by error code and closing reason."""
    kinds = ((lane.refused, "rejected"), (lane.failed, "failed"), (lane.closed, "batches closed"))
    relation = lane.row_relation
    notes = []
    if relation and not relation.is_combinable:
        notes.append(f"{title}: requests are not combined: {relation.reason}")
    return notes + [
        f"{title}: {words}: "
        + ", ".join(f"{name} {format_count(count)}" for name, count in sorted(counts.items()))
        for counts, words in kinds
        if counts
    ]


def _percentiles(times: LatencyStats) -> str:
    return f"{format_number(times.p50)}/{format_number(times.p99)}" if times.count else "-"


def _highest(costs: Sequence[float]) -> str:
    return format_number(max(costs)) if costs else "-"


def _name(title: str) -> str:
    """A title, shortened in the middle to keep the version at the end."""
    return title if len(title) <= NAME_MAX else f"{title[: NAME_MAX - 10]}..{title[-8:]}"


def format_number(value: float) -> str:
    """Format with at most two decimals; a value below 1,000,000 has at most six characters."""
    if value >= 1_000_000:
        return f"{value / 1000:.0f}k"
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def format_count(value: int) -> str:
    """Format a count in full up to five digits, then with a unit letter."""
    for unit in ("", "k", "M", "G"):
        if value < 100_000:
            return f"{value}{unit}"
        value //= 1000
    return f"{value}T"


def format_duration(seconds: float) -> str:
    """Format with the two largest units."""
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"
