"""Profiles of the recent samples of a model version, in steps of a window of time.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from iskander.sampling.drift.profile import ColumnKey, Profile
from iskander.sampling.drift.summary import Values

STEPS: Final = 6
"""Steps of a window; the oldest is dropped at once."""


class Window:
    """Profiles of the last `STEPS` steps of time."""

    def __init__(self, step_ns: int, columns_max: int) -> None:
        self._step_ns = step_ns
        self._columns_max = columns_max
        self._steps: dict[int, Profile] = {}

    def add(self, now_ns: int, rows: int, columns: Iterable[tuple[ColumnKey, Values]]) -> None:
        """Add the columns of a sample to the present step."""
        step = now_ns // self._step_ns
        profile = self._steps.get(step)
        if profile is None:
            profile = self._steps[step] = Profile(self._columns_max)
            self.expire(now_ns)
        profile.add(rows, columns)

    def expire(self, now_ns: int) -> None:
        """Drop the steps that are older than the window, and those of a later clock."""
        step = now_ns // self._step_ns
        for each in [each for each in self._steps if not step - STEPS < each <= step]:
            del self._steps[each]

    @property
    def columns(self) -> int:
        """Number of summarized columns in the step with the most."""
        return max((len(each.summaries) for each in self._steps.values()), default=0)

    def total(self) -> Profile:
        """Return the profile of the whole window."""
        total = Profile(self._columns_max)
        for profile in self._steps.values():
            total.merge(profile)
        return total
