"""Verdict, table and plots of an endurance run's records."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.endurance.latencies import Latencies
from benchmarks.endurance.processes import UNJUDGED
from benchmarks.endurance.verdict import (
    MIB,
    Finding,
    Point,
    Quarters,
    judge_count,
    judge_growth,
    judge_latency,
)
from benchmarks.tables import render_table

Records = Sequence[dict[str, Any]]
PROCESS_METRICS = ("private_bytes", "descriptors", "sockets", "memfds", "threads")
LEASES = ("leases", "leased_bytes", "output_leased_bytes")
"""Of a gateway process; 0 at every quiet point."""
UNTIMED = ("deadline", "cancelled", "stranger", "fragile", "left", "slow", "victim", "leaking")
"""Words of the kinds whose latencies are those of faults, deadlines or pauses."""
SERVER = "server"


def judge(records: Records) -> list[Finding]:
    """All findings of a run."""
    quiet = [each for each in records if each["kind"] == "sample" and each["is_quiet"]]
    windows = [each for each in records if each["kind"] == "window"]
    run_s = max((each["at_s"] for each in quiet), default=0.0)
    quarters = Quarters.of(run_s)
    findings = _correctness(records, quiet, windows)
    for (subject, metric), points in _series(quiet).items():
        findings.append(judge_growth(subject, metric, points, quarters))
    for kind, latencies in _latencies(windows).items():
        findings.append(judge_latency(kind, latencies, quarters))
    return findings


def totals(records: Records) -> dict[str, Counter[str]]:
    """Counts of the outcomes by kind of client."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        if record["kind"] == "window":
            for name, count in record["counts"].items():
                kind, _, outcome = name.partition(": ")
                found[kind][outcome] += count
    return found


def render(records: Records, findings: Sequence[Finding]) -> str:
    """Outcomes and findings as two tables."""
    counts = [
        [kind, f"{outcomes['sent']:,}", f"{outcomes['right']:,}", _others(outcomes)]
        for kind, outcomes in totals(records).items()
    ]
    rows = [
        [f"{each.subject}: {each.metric}", *(_figure(each.metric, value) for value in
         (each.first, each.last, each.most, each.slope_per_h)), each.word]
        for each in findings
    ]  # fmt: skip
    headings = ["subject", "first quarter", "last quarter", "limit", "an hour", "verdict"]
    return "\n\n".join((
        render_table(["requests", "sent", "right", "other"], counts),
        render_table(headings, rows),
    ))  # fmt: skip


def draw(records: Records, folder: Path) -> list[Path]:
    """Write plots of memory, descriptors and latencies."""
    from matplotlib import pyplot as plt

    quiet = [each for each in records if each["kind"] == "sample" and each["is_quiet"]]
    series = _series(quiet)
    paths = []
    for metric, scale, label in (
        ("private_bytes", MIB, "private MiB"),
        ("descriptors", 1, "descriptors"),
    ):
        figure, axes = plt.subplots(figsize=(9, 5))
        for (subject, name), points in series.items():
            if name == metric:
                axes.plot([point.at_s / 60 for point in points],
                          [point.value / scale for point in points], ".-", label=subject,
                          linewidth=0.8, markersize=3)  # fmt: skip
        axes.set_ylabel(f"{label}, at quiet points")
        paths.append(_save(plt, figure, axes, folder / f"{metric}.png"))
    figure, axes = plt.subplots(figsize=(9, 5))
    windows = [each for each in records if each["kind"] == "window"]
    for kind, latencies in _latencies(windows).items():
        by_minute = {
            minute: each.percentile_us(99) or 0.0 for minute, each in _by_minute(latencies).items()
        }
        axes.plot([*by_minute], [us / 1000 for us in by_minute.values()], label=kind, linewidth=0.8)
    axes.set_yscale("log")
    axes.set_ylabel("p99 of a minute in ms")
    paths.append(_save(plt, figure, axes, folder / "p99.png"))
    return paths


def _by_minute(latencies: Sequence[tuple[float, Latencies]]) -> dict[int, Latencies]:
    found: dict[int, Latencies] = defaultdict(Latencies)
    for at_s, each in latencies:
        found[int(at_s // 60)].add(each)
    return found


def _save(plt: Any, figure: Any, axes: Any, path: Path) -> Path:  # noqa: ANN401
    axes.set_xlabel("minutes")
    axes.set_ylim(bottom=0 if axes.get_yscale() == "linear" else None)
    axes.grid(visible=True, alpha=0.25)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)
    return path


def _correctness(records: Records, quiet: Records, windows: Records) -> list[Finding]:
    outcomes: Counter[str] = sum(totals(records).values(), Counter())
    gateways = [gateway for each in quiet for gateway in each["gateways"]]
    not_ended = [each["requests"] - each["ended"] - each["rejected"] for each in gateways]
    by_clients = {
        "wrong answers": outcomes["wrong"],
        "unexpected errors": sum(
            count for name, count in outcomes.items() if name.startswith("unexpected")
        ),
        "requests without an answer": sum(sum(each["unanswered"].values()) for each in windows),
    }
    at_quiet_points = {
        "no idle server, or not all workers": sum(not each["is_idle"] for each in quiet),
        "accepted requests not ended": max(not_ended, default=0),
        # Requests that were rejected in the queue are in both counts.
        "requests ended twice": max(
            (each["ended"] - each["requests"] for each in gateways), default=0
        ),
        **{name: max((each[name] for each in gateways), default=0) for name in LEASES},
    }
    tracebacks = sum(each["tracebacks"] for each in records if each["kind"] == "log")
    return [
        *(judge_count("clients", name, count) for name, count in by_clients.items()),
        *(
            judge_count("quiet points", name, max(count, 0))
            for name, count in at_quiet_points.items()
        ),
        judge_count(SERVER, "tracebacks in the log", tracebacks),
    ]


def _series(quiet: Records) -> dict[tuple[str, str], list[Point]]:
    """Values at quiet points by subject and metric."""
    found: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for sample in quiet:
        at_s = sample["at_s"]
        judged = [each for each in sample["processes"] if each["name"] not in UNJUDGED]
        for process in judged:
            incarnation = f"{process['pid']} {process['started_s']}"
            for metric in PROCESS_METRICS:
                point = Point(at_s, process["age_s"], incarnation, process[metric])
                found[process["name"], metric].append(point)
        total = sum(each["pss_bytes"] for each in judged)
        found[SERVER, "pss_bytes"].append(Point(at_s, at_s, SERVER, total))
        for gateway in sample["gateways"]:
            point = Point(at_s, gateway["uptime_s"], str(gateway["pid"]), gateway["regions"])
            found[f"gateway {gateway['process']}", "regions"].append(point)
    return found


def _latencies(windows: Records) -> dict[str, list[tuple[float, Latencies]]]:
    found: dict[str, list[tuple[float, Latencies]]] = defaultdict(list)
    for window in windows:
        for kind, counts in window["latencies"].items():
            if not any(word in kind for word in UNTIMED):
                found[kind].append((window["at_s"], Latencies(counts)))
    return found


def _others(outcomes: Counter[str]) -> str:
    parts = [
        f"{outcome.removeprefix('error ')} {count:,}"
        for outcome, count in sorted(outcomes.items())
        if outcome not in ("sent", "right")
    ]
    return ", ".join(parts) or "-"


def _figure(metric: str, value: float | None) -> str:
    if value is None:
        return "-"
    if metric.endswith("_bytes"):
        return f"{value / MIB:,.2f} MiB"
    return f"{value:,.2f}" if metric == "p99_ms" else f"{value:,.1f}"
