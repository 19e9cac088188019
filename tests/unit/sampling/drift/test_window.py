"""Windows and profiles: steps, limits of columns, changes of the clock."""

from __future__ import annotations

import numpy as np

from iskander.sampling.drift.profile import ColumnKey, Profile
from iskander.sampling.drift.summary import NumberValues
from iskander.sampling.drift.window import STEPS, Window

X = ColumnKey("input", "x")


def column(value: float, name: str = "x") -> tuple[ColumnKey, NumberValues]:
    return ColumnKey("input", name), NumberValues(np.array([value]))


def mean(window: Window) -> float:
    return window.total().summaries[X].mean


def test_old_steps_are_dropped() -> None:
    window = Window(10, 5)
    for step in range(3 * STEPS):
        window.add(step * 10 + 3, 1, [column(float(step))])
        total = window.total()
        assert total.rows == total.summaries[X].numbers == min(step + 1, STEPS)
    assert mean(window) == 2.5 * STEPS - 0.5
    window.expire(3 * STEPS * 10)
    assert window.total().rows == STEPS - 1
    window.expire(10**9)
    assert window.total().rows == 0 and not window.total().summaries


def test_steps_after_the_present_are_dropped() -> None:
    """The clock was set back."""
    window = Window(10, 5)
    window.add(1_000_000, 1, [column(1.0)])
    window.add(500, 1, [column(2.0)])
    assert mean(window) == 2.0


def test_columns_above_the_limit_are_left_out() -> None:
    profile = Profile(2)
    profile.add(4, [column(1.0, name) for name in "abc"])
    profile.add(4, [column(1.0, name) for name in "abcd"])
    assert [key.name for key in profile.summaries] == ["a", "b"]
    assert (profile.rows, profile.left_out) == (8, 2)
    other = Profile(2)
    other.add(1, [column(3.0, name) for name in "bc"])
    profile.merge(other)
    assert [key.name for key in profile.summaries] == ["a", "b"]
    assert (profile.rows, profile.left_out) == (9, 2)
    assert profile.summaries[ColumnKey("input", "b")].numbers == 3
    assert other.summaries[ColumnKey("input", "b")].numbers == 1


def test_total_of_a_window_is_a_copy() -> None:
    window = Window(10, 5)
    window.add(5, 1, [column(1.0)])
    window.total().add(1, [column(2.0)])
    assert window.total().rows == 1 and window.columns == 1
