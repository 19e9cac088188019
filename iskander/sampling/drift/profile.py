"""Summaries of all columns of some samples.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from iskander.sampling.drift.summary import Summary, Values


class ColumnKey(NamedTuple):
    """Identity of a summarized column: `input` or `output`, and its name."""

    side: str
    name: str


Summaries = dict[ColumnKey, Summary]


class Profile:
    """Summaries of the columns of some samples.

    Args:
        columns_max: Columns to summarize; the first ones count.

    Attributes:
        rows: Rows of the samples.
        left_out: Columns above the limit, in the sample with the most.
    """

    def __init__(self, columns_max: int, summaries: Summaries | None = None, rows: int = 0) -> None:
        self.summaries: Summaries = {} if summaries is None else summaries
        self.rows = rows
        self.left_out = 0
        self._columns_max = columns_max

    def add(self, rows: int, columns: Iterable[tuple[ColumnKey, Values]]) -> None:
        """Add the columns of a sample."""
        self.rows += rows
        left_out = 0
        for key, values in columns:
            summary = self._summary(key)
            if summary is None:
                left_out += 1
            else:
                summary.add(values)
        self.left_out = max(self.left_out, left_out)

    def merge(self, other: Profile) -> None:
        """Add the samples of another profile."""
        self.rows += other.rows
        self.left_out = max(self.left_out, other.left_out)
        for key, summary in other.summaries.items():
            own = self._summary(key)
            if own is not None:
                own.merge(summary)

    def _summary(self, key: ColumnKey) -> Summary | None:
        summary = self.summaries.get(key)
        if summary is None and len(self.summaries) < self._columns_max:
            summary = self.summaries[key] = Summary()
        return summary
