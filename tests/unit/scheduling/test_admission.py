"""Who may join a lane's queue: every refusal with its code, and both sides of every limit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from support.lanes import MS, cost_of, lane_of, put, request_of

from iskander.errors import IskanderError, NotReady
from iskander.scheduling.admission import (
    RETRY_UNKNOWN_MS,
    Backlog,
    doomed_error,
    expired_error,
    late_error,
    select_victims,
    share_error,
)
from iskander.scheduling.batcher import Rules
from iskander.scheduling.cost import CostModel
from iskander.scheduling.lane import PROBE_NS, RETRY_MOST_MS, Lane
from iskander.supervision.worker import SlotPlan, Worker

NOW = 1_000 * MS
RUN_MS = 10


def open_lane(*, workers: int = 1, is_learned: bool = False, **settings: Any) -> Lane:
    """A lane with workers; where it has learned its cost, a full batch of 8 takes 10 ms."""
    lane = lane_of(rows_max=8, **settings)
    for index in range(workers):
        lane.workers[index + 1] = Worker(SlotPlan(index, 0, (0,), None))
    if is_learned:
        learn(lane, 1 * MS, 2 * MS)
    return lane


def learn(lane: Lane, row_ns: int, base_ns: int) -> None:
    """Let the lane's first worker have run some batches, just now."""
    worker = lane.workers[1]
    lane.cost_of(worker)
    for rows in (8, 1, 8, 1, 8):
        lane.on_ran(worker, rows, row_ns * rows + base_ns, NOW)


def refusal_of(lane: Lane, rows: int = 1, **terms: Any) -> IskanderError | None:
    """Why a request that comes now is refused; None: it is not. It does not join."""
    try:
        lane.require_open(request_of(lane, rows, arrived_ns=NOW, **terms), NOW)
    except IskanderError as error:
        if not isinstance(error, NotReady):
            assert lane.counts[f"refused.{error.code}"] == 1
        lane.counts.clear()
        return error
    assert not lane.counts or not any(name.startswith("refused") for name in lane.counts)
    return None


def code_of(lane: Lane, rows: int = 1, **terms: Any) -> str | None:
    error = refusal_of(lane, rows, **terms)
    return error and error.code


def test_without_a_worker_nobody_is_admitted() -> None:
    """But where one is being replaced in order, another comes soon."""
    lane = open_lane(workers=0)
    error = refusal_of(lane)
    assert error is not None and (error.code, error.retryable) == ("not_ready", True)
    assert error.retry_after_ms

    lane.is_awaiting_worker = True
    assert code_of(lane) is None


@pytest.mark.parametrize(
    ("settings", "more", "text"),
    [
        ({"queue_requests": 4}, 1, "4 requests queued"),
        ({"queue_rows": 8}, 2, "8 rows queued"),
        ({"queue_bytes": 64}, 2, "64 bytes queued"),
    ],
)
def test_a_full_queue_is_refused(settings: dict[str, int], more: int, text: str) -> None:
    """By requests, rows or bytes, and one less finds a place."""
    lane = open_lane(policy="fifo", **settings)
    for _ in range(3):
        put(lane, 2, now_ns=NOW)
    assert code_of(lane, 2) is None
    put(lane, 2, now_ns=NOW)

    error = refusal_of(lane, more)

    assert error is not None
    assert (error.code, error.retryable) == ("queue_full", True)
    assert text in error.message and "`m0/1`" in error.message


@pytest.mark.parametrize(
    ("settings", "fits", "too_large"), [({"queue_rows": 9}, 3, 4), ({"queue_bytes": 72}, 3, 4)]
)
def test_rows_and_bytes_of_the_newcomer_count(
    settings: dict[str, int], fits: int, too_large: int
) -> None:
    lane = open_lane(policy="fifo", **settings)
    put(lane, 6, now_ns=NOW)

    assert code_of(lane, fits) is None
    assert code_of(lane, too_large) == "queue_full"


def test_a_client_may_have_only_so_many_outstanding() -> None:
    """Also while they run; others are not affected; and with an answer there is a place again."""
    lane = open_lane(client_requests=2)
    first = put(lane, client="a", now_ns=NOW)
    assert code_of(lane, client="a") is None
    put(lane, client="a", now_ns=NOW)
    lane.take(first, 1)

    error = refusal_of(lane, client="a")
    assert error is not None
    assert (error.code, error.retry_after_ms) == ("client_over_share", RETRY_UNKNOWN_MS)
    assert "`a` has 2 requests" in error.message
    assert code_of(lane, client="b") is None

    lane.retire(first)
    assert code_of(lane, client="a") is None


def test_the_name_of_a_client_does_not_make_an_error_long() -> None:
    lane = open_lane(client_requests=1)
    put(lane, client="x" * 128, now_ns=NOW)
    error = refusal_of(lane, client="x" * 128)

    assert error is not None and "x" * 65 not in error.message


@pytest.mark.parametrize(
    ("settings", "terms", "what"),
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
def test_whose_time_has_passed_is_refused(
    settings: dict[str, float], terms: dict[str, float], what: str
) -> None:
    error = refusal_of(open_lane(**settings), **terms)

    assert error is not None and error.code == "deadline_exceeded"
    assert what in error.message
    assert code_of(open_lane(**settings), **{name: 4.9 for name in terms}) is None


@pytest.mark.parametrize(("budget_ms", "code"), [(3.1, None), (2.9, "deadline_unreachable")])
def test_a_deadline_that_one_run_alone_would_miss_is_unreachable(
    budget_ms: float, code: str | None
) -> None:
    """One row takes 3 ms. Only what has a deadline, and only where the cost is known."""
    assert code_of(open_lane(is_learned=True), budget_ms=budget_ms) == code
    assert code_of(open_lane(), budget_ms=budget_ms) is None
    assert code_of(open_lane(is_learned=True)) is None
    assert code_of(open_lane(is_learned=True, refuse_late=False), budget_ms=budget_ms) is None


def test_when_the_worker_is_free_is_part_of_it() -> None:
    lane = open_lane(is_learned=True)
    lane.workers[1].busy_until_ns = NOW + 50 * MS

    assert code_of(lane, budget_ms=53.1) is None
    error = refusal_of(lane, budget_ms=43.0)
    assert error is not None and error.code == "deadline_unreachable"
    # It says by how much it would be late, and by when a retry may find it otherwise.
    assert error.retry_after_ms == pytest.approx(10, abs=1)


def test_a_deadline_behind_those_that_run_before_it_is_unreachable() -> None:
    """Five full batches wait and take 50 ms; by arrival this one would be the sixth.

    What is expected behind others is taken for an eighth more.
    """
    lane = open_lane(is_learned=True, policy="fifo")
    for _ in range(5):
        put(lane, 8, now_ns=NOW)

    assert code_of(lane, 8, budget_ms=68.5) is None
    assert code_of(lane, 8, budget_ms=66.5) == "deadline_unreachable"


def test_while_more_comes_than_can_be_done_the_queue_is_kept_shorter() -> None:
    """After many refusals the same request is one too many; when they end, it is let in again."""
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


def test_what_runs_after_it_makes_no_deadline_unreachable() -> None:
    """By deadline this one is the first of all, though five full batches wait."""
    lane = open_lane(is_learned=True)
    for _ in range(5):
        put(lane, 8, now_ns=NOW)

    assert code_of(lane, 8, budget_ms=10.5) is None


def test_a_cost_that_is_old_refuses_nothing() -> None:
    """Where everything is refused nothing runs, and what was learned wrongly would stay."""
    lane = open_lane(is_learned=True)

    for later_ns, code in ((PROBE_NS - 1, "deadline_unreachable"), (PROBE_NS, None)):
        request = request_of(lane, arrived_ns=NOW + later_ns, budget_ms=2.0)
        with pytest.raises(IskanderError) if code else nullcontext() as caught:
            lane.require_open(request, NOW + later_ns)
        assert code is None or caught.value.code == code


@pytest.mark.parametrize(
    ("workers", "rows", "turns"),
    [(1, 0, 0), (1, 8, 1), (1, 9, 2), (2, 16, 1), (2, 17, 2), (0, 8, 1)],
)
def test_a_backlog_drains_in_turns_of_full_batches(workers: int, rows: int, turns: int) -> None:
    backlog = Backlog(cost_of(1 * MS, 2 * MS), workers, 0)

    assert backlog.drain_ns(Rules(8), rows) == pytest.approx(turns * RUN_MS * MS, rel=1e-6)


def test_a_small_backlog_takes_what_it_is_run_with() -> None:
    backlog = Backlog(cost_of(1 * MS, 2 * MS), 1, 0)

    assert backlog.drain_ns(Rules(8), 3) == pytest.approx(5 * MS, rel=1e-6)
    assert backlog.drain_ns(Rules(8, sizes=(8,)), 3) == pytest.approx(10 * MS, rel=1e-6)


def test_when_to_come_back_grows_with_the_backlog() -> None:
    """Half of it, by the learned cost; where nothing is known, a moment; never a long time."""
    waits = []
    for requests in (1, 20, 200, 2000):
        limits = {"queue_requests": requests, "client_requests": 10**6}
        lane = open_lane(is_learned=True, policy="fifo", **limits)
        for _ in range(requests):
            put(lane, 2, now_ns=NOW)
        error = refusal_of(lane)
        assert error is not None
        waits.append(error.retry_after_ms)

    assert waits == sorted(set(waits))
    assert waits[2] == pytest.approx(400 / 2 / 8 * RUN_MS, rel=0.05)


def test_when_to_come_back_is_bounded_and_a_guess_where_nothing_is_known() -> None:
    slow, unknown = open_lane(queue_requests=1), open_lane(queue_requests=1)
    learn(slow, 3_600_000 * MS, MS)
    for lane in (slow, unknown):
        put(lane, now_ns=NOW)

    waits = [error.retry_after_ms for lane in (slow, unknown) if (error := refusal_of(lane))]

    assert waits == [RETRY_MOST_MS, RETRY_UNKNOWN_MS]


def test_each_decision_by_itself() -> None:
    """The functions that a lane asks, with the plainest of arguments."""
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
def test_a_deadline_that_is_refused_for_time_is_counted_as_missed(
    settings: dict[str, Any], terms: dict[str, float], missed: int
) -> None:
    """And none where there was none, or where only the place was missing."""
    lane = open_lane(is_learned=True, **settings)
    with pytest.raises(IskanderError):
        lane.require_open(request_of(lane, arrived_ns=NOW, **terms), NOW)

    assert lane.counts["deadline.missed"] == missed
