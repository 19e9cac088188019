"""Adds the lines of a log of `run.py` to the table of runs in `README.md`.

A row has the columns target, modules, reference, executions, seconds, edges, and fixed bugs. Counts
are sums over all runs; edges are the most of one run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

README: Final = Path(__file__).resolve().parent / "README.md"
_ROW: Final = re.compile(r"\| `(\w+)` \|")
_TOTAL: Final = re.compile(r"^[\d,]+ executions in [\d,]+ s \(.*?\)", re.M)
_EXECUTIONS, _SECONDS, _EDGES = 4, 5, 6


def add(log: Path) -> str:
    """Add a log to the record; the log is renamed, so that it is added once. Returns the totals."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    text, total = added(README.read_text(), lines)
    README.write_text(text)
    with log.with_suffix(".recorded.jsonl").open("a") as recorded:
        recorded.write(log.read_text())
    log.unlink()
    return total


def added(text: str, runs: Iterable[dict[str, Any]]) -> tuple[str, str]:
    """The text of the record with further runs, and its line of totals.

    Raises:
        ValueError: A target has no row, which has its modules and its reference.
    """
    lines = text.split("\n")
    rows = {match[1]: at for at, line in enumerate(lines) if (match := _ROW.match(line))}
    for run in runs:
        if run["target"] not in rows:
            raise ValueError(f"the record has no row for the target {run['target']}")
        at = rows[run["target"]]
        cells = lines[at].split("|")
        for column, count in ((_EXECUTIONS, run["executions"]), (_SECONDS, run["seconds"])):
            cells[column] = f" {_number(cells[column]) + count:,} "
        if run["coverage"]:
            cells[_EDGES] = f" {max(_number(cells[_EDGES]), run['coverage']):,} "
        lines[at] = "|".join(cells)
    cells_of_rows = [lines[at].split("|") for at in rows.values()]
    executions, seconds = (
        sum(_number(cells[column]) for cells in cells_of_rows) for column in (_EXECUTIONS, _SECONDS)
    )
    total = f"{executions:,} executions in {seconds:,} s ({seconds // 60} minutes)"
    return _TOTAL.sub(total, "\n".join(lines)), total


def _number(cell: str) -> int:
    return int(cell.strip().replace(",", "") or 0)
