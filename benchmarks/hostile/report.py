"""Table of the rows, and the goals of each.

Goals for the innocent client during an attack: a p99 of at most three times its p99 before and
5 ms, not above that of gRPC's C core, no wait above 100 ms, no error. For a new stream, a read of a
source and a shared-memory region: at most three times the longest before and 100 ms. For the
server's memory: at most its budget and 64 MiB at the peak, and 32 MiB more than before 10 s after
the attack.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from benchmarks.hostile.measure import CORE, MIB

P99_FACTOR, P99_MS = 3, 5
LONGEST_MS = 100
PEAK_BYTES = 64 * MIB
LEFT_BYTES = 32 * MIB
CORE_SLACK = 1.1
"""Tolerance for the difference between rounds of the same system."""

Record = dict[str, Any]


def render(records: Iterable[Record]) -> str:
    """A table of all rows, with the medians of their rounds."""
    found = [each for each in records if each.get("kind") == "hostile"]
    systems = list(dict.fromkeys(each["system"] for each in found if each["system"] != CORE))
    lines = [
        "| one peer sends | system | p99 before | p50 / p99 / longest during | C core p99 "
        "| memory: peak, left | CPU | attackers | missed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in dict.fromkeys(each["row"] for each in found):
        core = _select(found, row, CORE)
        for system in systems:
            rounds = _select(found, row, system)
            if rounds:
                lines.append(_line(row, system, rounds, core))
    return "\n".join(lines)


def missed(rounds: list[Record], core: list[Record]) -> list[str]:
    """The missed goals of a row."""
    before, during = _median(rounds, "before", "p99"), _median(rounds, "during", "p99")
    goals = {
        "p99": during <= P99_FACTOR * before + P99_MS,
        "C core": not core or during <= max(CORE_SLACK * _median(core, "during", "p99"), before),
        "longest": _median(rounds, "during", "longest") <= LONGEST_MS,
        "new streams": _is_prompt(rounds, "opened"),
        "probes": _is_prompt(rounds, "probes"),
        "errors": not any(each["during"]["errors"] for each in rounds),
        "peak": all(e["peak_bytes"] <= e["budget_bytes"] + PEAK_BYTES for e in rounds),
        "left": median(each["left_bytes"] for each in rounds) <= LEFT_BYTES,
    }
    return [name for name, is_met in goals.items() if not is_met]


def _is_prompt(rounds: list[Record], key: str) -> bool:
    before, during = _median(rounds, "before", key), _median(rounds, "during", key)
    return during <= P99_FACTOR * before + LONGEST_MS


def _line(row: str, system: str, rounds: list[Record], core: list[Record]) -> str:
    during = (f"{_median(rounds, 'during', key):,.1f}" for key in ("p50", "p99", "longest"))
    core_p99 = f"{_median(core, 'during', 'p99'):,.1f}" if core else "-"
    memory = (median(each[key] for each in rounds) // MIB for key in ("peak_bytes", "left_bytes"))
    ends: dict[str, int] = {}
    for report in rounds[0]["attackers"]:
        for cause, count in report["ends"].items():
            ends[cause] = ends.get(cause, 0) + count
        for status, count in report["statuses"].items():
            ends[f"calls with status {status}"] = count
    cells = (
        row,
        system,
        f"{_median(rounds, 'before', 'p99'):.1f}",
        " / ".join(during),
        core_p99,
        ", ".join(f"{each:,.0f} MiB" for each in memory),
        f"{median(each['cpu_share'] for each in rounds):.0%}",
        ", ".join(f"{count} {cause}" for cause, count in ends.items()),
        ", ".join(missed(rounds, core)) or "-",
    )
    return f"| {' | '.join(cells)} |"


def _select(found: list[Record], row: str, system: str) -> list[Record]:
    return [each for each in found if each["row"] == row and each["system"] == system]


def _median(rounds: list[Record], phase: str, key: str) -> float:
    return float(median(each[phase][key] for each in rounds))
