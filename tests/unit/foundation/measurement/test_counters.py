"""Counters: missing names are 0, and reading them creates no entry."""

from __future__ import annotations

from iskander.foundation.measurement.counters import Counters


def test_missing_counter_is_zero_and_creates_no_entry() -> None:
    counts = Counters()
    assert counts["requests"] == 0 and not counts
    counts["requests"] += 3
    counts["requests"] += 1
    assert dict(counts) == {"requests": 4}
