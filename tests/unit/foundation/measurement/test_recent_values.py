"""Recent values: rings, queries, limits, and the `metrics` action."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from iskander.errors import MalformedInput
from iskander.foundation.clock import NS_PER_S
from iskander.foundation.measurement import recent_values as recent
from iskander.foundation.measurement.recent_values import RecentValues, Summary

A1 = {"model": "a", "version": "1"}
A2 = {"model": "a", "version": "2"}
B1 = {"model": "b", "version": "1"}


class Clock:
    """Fake clock."""

    def __init__(self) -> None:
        self.now_ns = 1000 * NS_PER_S

    def __call__(self) -> int:
        return self.now_ns

    def pass_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * NS_PER_S)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(recent, "now_ns", clock)
    return clock


def test_summary_of_points() -> None:
    points = RecentValues()
    for value in range(1, 102):
        points.record("wait_ms", value, A1)

    assert points.query("wait_ms") == Summary(
        count=101, avg=51.0, min=1, max=101, p50=51.0, p95=96.0, p99=100.0, latest=101
    )


def test_latest_point_is_the_last_recorded() -> None:
    points = RecentValues()
    for value in (3, 9, 5):
        points.record("wait_ms", value, A1)

    assert points.query("wait_ms").latest == 5


def test_percentile_interpolates_between_two_points() -> None:
    points = RecentValues()
    for value in (0, 10):
        points.record("wait_ms", value, A1)

    summary = points.query("wait_ms")
    assert (summary.p50, summary.p95) == (5.0, 9.5)


def test_query_filters_by_a_subset_of_labels() -> None:
    points = RecentValues()
    for labels, value in ((A1, 1), (A2, 2), (B1, 3)):
        points.record("wait_ms", value, labels)

    assert points.query("wait_ms", {"model": "a"}).count == 2
    assert points.query("wait_ms", A2).latest == 2
    assert points.query("wait_ms", {}).count == points.query("wait_ms").count == 3
    assert points.query("wait_ms", {"model": "c"}) == Summary()
    assert points.query("wait_ms", {"color": "a"}) == Summary()


def test_window_excludes_older_points(clock: Clock) -> None:
    points = RecentValues()
    points.record("wait_ms", 1, A1)
    clock.pass_s(10)
    points.record("wait_ms", 2, A1)
    clock.pass_s(5)

    assert points.query("wait_ms", window_s=5).count == 1
    assert points.query("wait_ms", window_s=4.9).count == 0
    assert points.query("wait_ms", window_s=15).count == 2
    assert points.query("wait_ms").count == 2


def test_new_point_replaces_the_oldest() -> None:
    points = RecentValues(points_max=3)
    for value in range(10):
        points.record("wait_ms", value, A1)

    summary = points.query("wait_ms")
    assert (summary.count, summary.min, summary.max) == (3, 7, 9)


def test_each_name_has_its_own_ring() -> None:
    points = RecentValues(points_max=2)
    for value in (1, 2, 3):
        points.record("wait_ms", value, A1)
        points.record("run_ms", value * 10, A1)

    assert points.query("wait_ms").avg == 2.5
    assert points.query("run_ms").avg == 25.0


def test_names_are_limited_and_dropped_points_are_counted() -> None:
    points = RecentValues(names_max=2)
    for name in ("a", "b", "c", "c", "a"):
        points.record(name, 1, A1)

    assert (points.names(), points.dropped) == (["a", "b"], 2)
    assert points.query("c") == Summary()


def run_action(points: RecentValues, body: bytes) -> dict[str, Summary]:
    return asyncio.run(points.answer(body))


def test_action_returns_every_name_or_the_requested_one() -> None:
    points = RecentValues()
    points.record("wait_ms", 1, A1)
    points.record("run_ms", 2, A1)

    assert list(run_action(points, b"")) == list(run_action(points, b"{}")) == ["run_ms", "wait_ms"]
    assert list(run_action(points, b'{"name": "wait_ms"}')) == ["wait_ms"]
    assert run_action(points, b'{"name": "nothing"}') == {"nothing": Summary()}


def test_action_filters_and_returns_json(clock: Clock) -> None:
    points = RecentValues()
    points.record("wait_ms", 1, A1)
    clock.pass_s(60)
    points.record("wait_ms", 2, A1)
    points.record("wait_ms", 3, B1)

    result = run_action(points, b'{"labels": {"model": "a"}, "window_s": 30}')

    assert msgspec.json.decode(msgspec.json.encode(result)) == {
        "wait_ms": {"count": 1, "avg": 2, "min": 2, "max": 2}
        | {"p50": 2, "p95": 2, "p99": 2, "latest": 2}
    }


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"\xff",
        b'{"name": 1}',
        b'{"labels": ["model"]}',
        b'{"labels": {"model": 1}}',
        b'{"window_s": -1}',
        b'{"window_s": 1e300}',
        b'{"window_s": "60"}',
        b'{"nmae": "wait_ms"}',
        b'{"name": "\xff"}',
        b'{"labels": ' + b"[" * 5000,
    ],
)
def test_malformed_query_is_rejected(body: bytes) -> None:
    with pytest.raises(MalformedInput, match="action `metrics`: expected"):
        run_action(RecentValues(), body)


def test_labels_are_shared_and_not_copied() -> None:
    """A copy would be larger than the point."""
    points = RecentValues()
    points.record("wait_ms", 1, A1)

    (point,) = points._rings["wait_ms"]
    assert point[2] is A1
