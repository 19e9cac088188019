"""Counts: what was never counted is 0, and is not there for having been asked for."""

from __future__ import annotations

from iskander.measurement.counters import Counters


def test_what_was_never_counted_is_nothing() -> None:
    counts = Counters()
    assert counts["requests"] == 0 and not counts
    counts["requests"] += 3
    counts["requests"] += 1
    assert dict(counts) == {"requests": 4}
