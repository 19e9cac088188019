"""The last points: what is kept, what a question finds, and what is refused."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from iskander.clock import NS_PER_S
from iskander.errors import MalformedInput
from iskander.measurement import recent_values as recent
from iskander.measurement.recent_values import RecentValues, Summary

A1 = {"model": "a", "version": "1"}
A2 = {"model": "a", "version": "2"}
B1 = {"model": "b", "version": "1"}


class Clock:
    """Stands where it was put."""

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


def test_a_summary_says_what_the_points_come_to() -> None:
    points = RecentValues()
    for value in range(1, 102):
        points.record("wait_ms", value, A1)

    assert points.query("wait_ms") == Summary(
        count=101, avg=51.0, min=1, max=101, p50=51.0, p95=96.0, p99=100.0, latest=101
    )


def test_the_latest_point_is_the_last_recorded_and_not_the_greatest() -> None:
    points = RecentValues()
    for value in (3, 9, 5):
        points.record("wait_ms", value, A1)

    assert points.query("wait_ms").latest == 5


def test_a_percentile_between_two_points_is_in_proportion() -> None:
    points = RecentValues()
    for value in (0, 10):
        points.record("wait_ms", value, A1)

    summary = points.query("wait_ms")
    assert (summary.p50, summary.p95) == (5.0, 9.5)


def test_labels_are_a_filter_that_points_may_have_more_than() -> None:
    points = RecentValues()
    for labels, value in ((A1, 1), (A2, 2), (B1, 3)):
        points.record("wait_ms", value, labels)

    assert points.query("wait_ms", {"model": "a"}).count == 2
    assert points.query("wait_ms", A2).latest == 2
    assert points.query("wait_ms", {}).count == points.query("wait_ms").count == 3
    assert points.query("wait_ms", {"model": "c"}) == Summary()
    assert points.query("wait_ms", {"color": "a"}) == Summary()


def test_a_window_leaves_out_what_is_older(clock: Clock) -> None:
    points = RecentValues()
    points.record("wait_ms", 1, A1)
    clock.pass_s(10)
    points.record("wait_ms", 2, A1)
    clock.pass_s(5)

    assert points.query("wait_ms", window_s=5).count == 1
    assert points.query("wait_ms", window_s=4.9).count == 0
    assert points.query("wait_ms", window_s=15).count == 2
    assert points.query("wait_ms").count == 2


def test_a_new_point_takes_the_place_of_the_oldest() -> None:
    points = RecentValues(points_max=3)
    for value in range(10):
        points.record("wait_ms", value, A1)

    summary = points.query("wait_ms")
    assert (summary.count, summary.min, summary.max) == (3, 7, 9)


def test_each_measure_has_a_ring_of_its_own() -> None:
    points = RecentValues(points_max=2)
    for value in (1, 2, 3):
        points.record("wait_ms", value, A1)
        points.record("run_ms", value * 10, A1)

    assert points.query("wait_ms").avg == 2.5
    assert points.query("run_ms").avg == 25.0


def test_names_are_bounded_and_what_is_dropped_is_counted() -> None:
    points = RecentValues(names_max=2)
    for name in ("a", "b", "c", "c", "a"):
        points.record(name, 1, A1)

    assert (points.names(), points.dropped) == (["a", "b"], 2)
    assert points.query("c") == Summary()


def answer(points: RecentValues, body: bytes) -> dict[str, Summary]:
    return asyncio.run(points.answer(body))


def test_the_action_answers_for_every_measure_or_the_one_that_is_named() -> None:
    points = RecentValues()
    points.record("wait_ms", 1, A1)
    points.record("run_ms", 2, A1)

    assert list(answer(points, b"")) == list(answer(points, b"{}")) == ["run_ms", "wait_ms"]
    assert list(answer(points, b'{"name": "wait_ms"}')) == ["wait_ms"]
    assert answer(points, b'{"name": "nothing"}') == {"nothing": Summary()}


def test_the_action_filters_and_its_answer_is_json(clock: Clock) -> None:
    points = RecentValues()
    points.record("wait_ms", 1, A1)
    clock.pass_s(60)
    points.record("wait_ms", 2, A1)
    points.record("wait_ms", 3, B1)

    found = answer(points, b'{"labels": {"model": "a"}, "window_s": 30}')

    assert msgspec.json.decode(msgspec.json.encode(found)) == {
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
    ],
)
def test_what_is_no_question_is_refused_by_name(body: bytes) -> None:
    with pytest.raises(MalformedInput, match="action `metrics`: wanted"):
        answer(RecentValues(), body)


def test_labels_are_shared_and_not_copied() -> None:
    """A copy for each point would cost more than the point."""
    points = RecentValues()
    points.record("wait_ms", 1, A1)

    (point,) = points._rings["wait_ms"]
    assert point[2] is A1
