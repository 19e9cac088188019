"""Figures of a point, from answers with known times."""

from __future__ import annotations

from iskander.cli.load_generator.figures import Answer, Figures, figures_of
from iskander.cli.load_generator.schedule import Load
from iskander.foundation.clock import NS_PER_MS, NS_PER_S

OPEN, CLOSED = Load(8, 100.0), Load(1)


def answer(due_ms: float, latency_ms: float, *, late_ms: float = 0.0, code: str = "") -> Answer:
    """An answer `latency_ms` after its due time, sent `late_ms` after it."""
    due = int(due_ms * NS_PER_MS)
    return Answer(
        due, due + int(late_ms * NS_PER_MS), due + int(latency_ms * NS_PER_MS), code, late_ms > 100
    )


def evenly(latency_ms: float, **more: float) -> list[Answer]:
    """A hundred answers in a second."""
    return [answer(10 * index, latency_ms, **more) for index in range(100)]


def test_percentiles_are_nearest_ranks() -> None:
    answers = [answer(0, float(index)) for index in range(1, 101)]
    found = figures_of(CLOSED, 5, answers, 2.0)
    assert (found.p50, found.p90, found.p95, found.p99, found.max) == (50, 90, 95, 99, 100)
    assert (found.offered, found.completed, found.rows_per_s) == (50.0, 50.0, 250.0)


def test_latencies_count_from_the_due_time() -> None:
    """A stall of one second delays the requests that were due meanwhile, not only one of them."""
    stalled = [
        answer(10 * index, 1000 - 10 * index, late_ms=999 - 10 * index) for index in range(90)
    ]
    found = figures_of(OPEN, 1, stalled, 1.0)
    assert found.p50 > 500 and found.busy > 0.8


def test_errors_are_counted_by_code_and_have_no_latency() -> None:
    answers = [*evenly(2.0), answer(5, 900.0, code="queue_full"), answer(6, 1.0, code="queue_full")]
    found = figures_of(OPEN, 1, answers, 1.0, unanswered=3)
    assert found.errors == {"queue_full": 2} and found.max == 2.0
    assert (found.requests, found.unanswered, found.offered) == (105, 3, 105.0)


def test_results_after_the_end_do_not_count_for_the_rate() -> None:
    answers = [answer(10, 5.0), answer(990, 500.0)]
    found = figures_of(OPEN, 1, answers, 1.0)
    assert found.completed == 1.0 and found.max == 500.0


def test_late_generator_is_marked() -> None:
    assert not figures_of(OPEN, 1, evenly(20.0, late_ms=0.5), 1.0).is_late
    assert figures_of(OPEN, 1, evenly(20.0, late_ms=3.0), 1.0).is_late
    # A closed loop has no due times.
    assert not figures_of(CLOSED, 1, evenly(20.0, late_ms=3.0), 1.0).is_late
    # Small beside the latency.
    assert not figures_of(OPEN, 1, evenly(200.0, late_ms=3.0), 1.0).is_late


def test_changing_rates_are_marked() -> None:
    assert figures_of(OPEN, 1, evenly(2.0), 1.0).is_stable
    half = [each for each in evenly(2.0) if each.due_ns < NS_PER_S // 2]
    assert not figures_of(OPEN, 1, half, 1.0).is_stable


def test_point_without_answers() -> None:
    found: Figures = figures_of(OPEN, 1, [], 1.0, unanswered=4)
    assert (found.p99, found.completed, found.unanswered) == (0.0, 0.0, 4)
