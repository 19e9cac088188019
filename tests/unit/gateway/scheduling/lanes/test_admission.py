"""Admission to a lane's queue: every rejection with its code, both sides of every limit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from support.lanes import MS, cost_of, lane_of, put, request_of

from iskander.errors import IskanderError, NotReady
from iskander.gateway.scheduling.lanes.admission import (
    RETRY_UNKNOWN_MS,
    Backlog,
    doomed_error,
    expired_error,
    late_error,
    select_victims,
    share_error,
)
from iskander.gateway.scheduling.lanes.batcher import Rules
from iskander.gateway.scheduling.lanes.cost import CostModel
from iskander.gateway.scheduling.lanes.lane import PROBE_NS, RETRY_MOST_MS, Lane
from iskander.gateway.supervision.worker import SlotPlan, Worker

NOW = 1_000 * MS
RUN_MS = 10


def open_lane(*, workers: int = 1, is_learned: bool = False, **settings: Any) -> Lane:
    """A lane with workers; with `is_learned`, a full batch of 8 rows takes 10 ms."""
    lane = lane_of(rows_max=8, **settings)
    for index in range(workers):
        lane.workers[index + 1] = Worker(SlotPlan(index, 0, (0,), None))
    if is_learned:
        learn(lane, 1 * MS, 2 * MS)
    return lane


def learn(lane: Lane, row_ns: int, base_ns: int) -> None:
    """Records recent runs of the first worker of a lane."""
    worker = lane.workers[1]
    lane.cost_of(worker)
    for rows in (8, 1, 8, 1, 8):
        lane.on_ran(worker, rows, row_ns * rows + base_ns, NOW)


def rejection_of(lane: Lane, rows: int = 1, **terms: Any) -> IskanderError | None:
    """The rejection of a request that arrives now, or None; it is not queued."""
    try:
        lane.check(request_of(lane, rows, arrived_ns=NOW, **terms), NOW)
    except IskanderError as error:
        if not isinstance(error, NotReady):
            assert lane.counts[f"refused.{error.code}"] == 1
        lane.counts.clear()
        return error
    assert not lane.counts or not any(name.startswith("refused") for name in lane.counts)
    return None


def code_of(lane: Lane, rows: int = 1, **terms: Any) -> str | None:
    error = rejection_of(lane, rows, **terms)
    return error and error.code


def test_no_admission_without_a_worker() -> None:
    """Except while a worker is being replaced."""
    lane = open_lane(workers=0)
    error = rejection_of(lane)
    assert error is not None and (error.code, error.retryable) == ("not_ready", True)
    assert error.retry_after_ms

    lane.is_awaiting_worker = True
    assert code_of(lane) is None


@pytest.mark.parametrize(
    ("settings", "extra_rows", "text"),
    [
        ({"queue_requests": 4}, 1, "4 requests queued"),
        ({"queue_rows": 8}, 2, "8 rows queued"),
        ({"queue_bytes": 64}, 2, "64 bytes queued"),
    ],
)
def test_request_to_a_full_queue_is_rejected(
    settings: dict[str, int], extra_rows: int, text: str
) -> None:
    """By requests, rows or bytes; below the limit it is admitted."""
    lane = open_lane(policy="fifo", **settings)
    for _ in range(3):
        put(lane, 2, now_ns=NOW)
    assert code_of(lane, 2) is None
    put(lane, 2, now_ns=NOW)

    error = rejection_of(lane, extra_rows)

    assert error is not None
    assert (error.code, error.retryable) == ("queue_full", True)
    assert text in error.message and "`m0/1`" in error.message


@pytest.mark.parametrize(
    ("settings", "fits", "too_many"), [({"queue_rows": 9}, 3, 4), ({"queue_bytes": 72}, 3, 4)]
)
def test_rows_and_bytes_of_the_new_request_count(
    settings: dict[str, int], fits: int, too_many: int
) -> None:
    lane = open_lane(policy="fifo", **settings)
    put(lane, 6, now_ns=NOW)

    assert code_of(lane, fits) is None
    assert code_of(lane, too_many) == "queue_full"


def test_outstanding_requests_of_a_client_are_bounded() -> None:
    """Running requests count, other clients are unaffected, and finished requests do not count."""
    lane = open_lane(client_requests=2)
    first = put(lane, client="a", now_ns=NOW)
    assert code_of(lane, client="a") is None
    put(lane, client="a", now_ns=NOW)
    lane.take(first, 1)

    error = rejection_of(lane, client="a")
    assert error is not None
    assert (error.code, error.retry_after_ms) == ("client_over_share", RETRY_UNKNOWN_MS)
    assert "`a` has 2 requests" in error.message
    assert code_of(lane, client="b") is None

    lane.retire(first)
    assert code_of(lane, client="a") is None


def test_client_name_is_shortened_in_errors() -> None:
    lane = open_lane(client_requests=1)
    put(lane, client="x" * 128, now_ns=NOW)
    error = rejection_of(lane, client="x" * 128)

    assert error is not None and "x" * 65 not in error.message


@pytest.mark.parametrize(
    ("settings", "terms", "text"),
    [
        ({}, {"budget_ms": 0.0}, "deadline passed after 0.0 ms"),
        ({}, {"ttl_ms": 0.0}, "queue time limit passed"),
        (
            {"staleness_ms": 5.0},
            {"age_ms": 5.0},
            "by the client's clock: 5.0 ms, limit 5.0 ms",
        ),
        (
            {"staleness_ms": 5.0},
            {"age_ms": 50.0},
            "by the client's clock: 50.0 ms, limit 5.0 ms",
        ),
    ],
)
def test_expired_request_is_rejected(
    settings: dict[str, float], terms: dict[str, float], text: str
) -> None:
    error = rejection_of(open_lane(**settings), **terms)

    assert error is not None and error.code == "deadline_exceeded"
    assert text in error.message
    assert code_of(open_lane(**settings), **{name: 4.9 for name in terms}) is None


@pytest.mark.parametrize(("budget_ms", "code"), [(3.1, None), (2.9, "deadline_unreachable")])
def test_deadline_shorter_than_one_run_is_unreachable(budget_ms: float, code: str | None) -> None:
    """One row takes 3 ms. Applies only with a deadline, a learned cost and `refuse_late`."""
    assert code_of(open_lane(is_learned=True), budget_ms=budget_ms) == code
    assert code_of(open_lane(), budget_ms=budget_ms) is None
    assert code_of(open_lane(is_learned=True)) is None
    assert code_of(open_lane(is_learned=True, refuse_late=False), budget_ms=budget_ms) is None


def test_deadline_is_unreachable_if_the_worker_is_busy_too_long() -> None:
    lane = open_lane(is_learned=True)
    lane.workers[1].busy_until_ns = NOW + 50 * MS

    assert code_of(lane, budget_ms=53.1) is None
    error = rejection_of(lane, budget_ms=43.0)
    assert error is not None and error.code == "deadline_unreachable"
    # The hint is the expected lateness.
    assert error.retry_after_ms == pytest.approx(10, abs=1)


def test_deadline_is_unreachable_behind_too_many_queued_rows() -> None:
    """Five full batches are queued and take 50 ms; in order of arrival this is the sixth.

    The estimate behind other requests has a margin of one eighth.
    """
    lane = open_lane(is_learned=True, policy="fifo")
    for _ in range(5):
        put(lane, 8, now_ns=NOW)

    assert code_of(lane, 8, budget_ms=68.5) is None
    assert code_of(lane, 8, budget_ms=66.5) == "deadline_unreachable"


def test_margin_grows_under_overload_and_shrinks_afterwards() -> None:
    """After many late requests the same request is rejected; after many timely ones, admitted."""
    lane = open_lane(is_learned=True, policy="fifo")
    for _ in range(5):
        put(lane, 8, now_ns=NOW)
    assert code_of(lane, 8, budget_ms=70.0) is None

    for _ in range(100):
        assert code_of(lane, 8, budget_ms=50.0) == "deadline_unreachable"
    assert code_of(lane, 8, budget_ms=70.0) == "deadline_unreachable"
    for _ in range(300):
        assert code_of(lane, 8, budget_ms=1000.0) is None
    assert code_of(lane, 8, budget_ms=70.0) is None


def test_requests_with_later_deadlines_do_not_delay() -> None:
    """In order of deadlines this request is the first, although five full batches are queued."""
    lane = open_lane(is_learned=True)
    for _ in range(5):
        put(lane, 8, now_ns=NOW)

    assert code_of(lane, 8, budget_ms=10.5) is None


def test_outdated_cost_rejects_no_request() -> None:
    """If all requests are rejected, nothing runs, and a wrong cost is never corrected."""
    lane = open_lane(is_learned=True)

    for later_ns, code in ((PROBE_NS - 1, "deadline_unreachable"), (PROBE_NS, None)):
        request = request_of(lane, arrived_ns=NOW + later_ns, budget_ms=2.0)
        with pytest.raises(IskanderError) if code else nullcontext() as caught:
            lane.check(request, NOW + later_ns)
        assert code is None or caught.value.code == code


@pytest.mark.parametrize(
    ("workers", "rows", "rounds"),
    [(1, 0, 0), (1, 8, 1), (1, 9, 2), (2, 16, 1), (2, 17, 2), (0, 8, 1)],
)
def test_backlog_drains_in_full_batches(workers: int, rows: int, rounds: int) -> None:
    backlog = Backlog(cost_of(1 * MS, 2 * MS), workers, 0)

    assert backlog.drain_ns(Rules(8), rows) == pytest.approx(rounds * RUN_MS * MS, rel=1e-6)


def test_small_backlog_costs_its_padded_size() -> None:
    backlog = Backlog(cost_of(1 * MS, 2 * MS), 1, 0)

    assert backlog.drain_ns(Rules(8), 3) == pytest.approx(5 * MS, rel=1e-6)
    assert backlog.drain_ns(Rules(8, sizes=(8,)), 3) == pytest.approx(10 * MS, rel=1e-6)


def test_retry_hint_grows_with_the_backlog() -> None:
    """The predicted time to drain half of it."""
    hints = []
    for requests in (1, 20, 200, 2000):
        limits = {"queue_requests": requests, "client_requests": 10**6}
        lane = open_lane(is_learned=True, policy="fifo", **limits)
        for _ in range(requests):
            put(lane, 2, now_ns=NOW)
        error = rejection_of(lane)
        assert error is not None
        hints.append(error.retry_after_ms)

    assert hints == sorted(set(hints))
    assert hints[2] == pytest.approx(400 / 2 / 8 * RUN_MS, rel=0.05)


def test_retry_hint_is_bounded_and_has_a_default_without_a_cost() -> None:
    slow, unknown = open_lane(queue_requests=1), open_lane(queue_requests=1)
    learn(slow, 3_600_000 * MS, MS)
    for lane in (slow, unknown):
        put(lane, now_ns=NOW)

    hints = [error.retry_after_ms for lane in (slow, unknown) if (error := rejection_of(lane))]

    assert hints == [RETRY_MOST_MS, RETRY_UNKNOWN_MS]


def test_decision_functions_with_minimal_arguments() -> None:
    lane = open_lane()
    request = request_of(lane, budget_ms=5.0)

    assert select_victims(lane.queue, lane.config, request, None, "m") == []
    assert share_error(lane.config.client_requests - 1, lane.config, request) is None
    unknown = Backlog(CostModel(), 1, 0)
    assert late_error(lane.queue, lane.rules, request, unknown, now_ns=0, margin=1.0) is None
    assert "deadline passed after 7.0 ms" in expired_error(request, 7 * MS).message
    assert "2.0 ms left after 3.0 ms" in doomed_error(request, 3 * MS).message
    assert ": 0.0 ms left" in doomed_error(request, 9 * MS).message


@pytest.mark.parametrize(
    ("settings", "terms", "missed"),
    [
        ({}, {"budget_ms": 0.0}, 1),
        ({"deadline_ms": 1.0}, {"age_ms": 0.0}, 1),
        ({}, {"ttl_ms": 0.0}, 0),
        ({"queue_requests": 0}, {"budget_ms": 1000.0}, 0),
    ],
)
def test_deadline_of_a_request_rejected_as_late_counts_as_missed(
    settings: dict[str, Any], terms: dict[str, float], missed: int
) -> None:
    """Not without a deadline, and not if the queue was full."""
    lane = open_lane(is_learned=True, **settings)
    with pytest.raises(IskanderError):
        lane.check(request_of(lane, arrived_ns=NOW, **terms), NOW)

    assert lane.counts["deadline.missed"] == missed
