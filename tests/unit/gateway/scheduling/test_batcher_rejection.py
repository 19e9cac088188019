"""Batch formation: rejection of a request that keeps more others in time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from support.batches import FAR, NOW, formed, queue_of, rows_of, span_ns, waiting
from support.lanes import MS, cost_of
from support.random_examples import up_to

from iskander.gateway.scheduling.lanes.batcher import EXAMINED_MAX, Reason, Rules, form
from iskander.gateway.scheduling.request import NEVER_NS, PRIORITY_MAX, Request

COST = cost_of(200_000, MS)
PRIORITY_WEIGHT = 8


def run_ns(rows: int) -> int:
    return COST.predict_ns(rows)


def urgent(priority: int = 1) -> Request:
    """A request that is in time alone, but not in a batch with another."""
    return waiting(due_ns=NOW + span_ns(1, COST), priority=priority)


def competing(count: int, *, after_ns: int = -1, priority: int = 1) -> list[Request]:
    """Requests that are in time in one batch, but 1 ns late after another batch of one row."""
    due_ns = NOW + span_ns(1, COST) + run_ns(count) + after_ns
    assert due_ns >= NOW + span_ns(count, COST)
    return [waiting(due_ns=due_ns, priority=priority) for _ in range(count)]


@pytest.mark.parametrize(("others", "is_doomed"), [(1, False), (2, True), (9, True)])
def test_request_is_doomed_if_more_others_would_be_late_after_it(
    others: int, is_doomed: bool
) -> None:
    """Both sides: not for a single other request."""
    first, competitors = urgent(), competing(others)

    queue = queue_of(first, *competitors)

    batch = formed(queue, cost=COST)

    assert (batch.reason, batch.hold_ns, rows_of(batch)) == (Reason.DEADLINE, 0, [1])
    assert batch.doomed == [first] * is_doomed
    # Without it, all others share a batch.
    queue.remove(first)
    assert rows_of(formed(queue, cost=COST)) == [1] * others


@pytest.mark.parametrize(("after_ns", "is_doomed"), [(0, False), (-1, True)])
def test_no_rejection_if_the_others_are_in_time_in_the_next_batch(
    after_ns: int, is_doomed: bool
) -> None:
    """Both sides, by 1 ns."""
    first = urgent()

    batch = formed(queue_of(first, *competing(5, after_ns=after_ns)), cost=COST)

    assert batch.doomed == [first] * is_doomed


@pytest.mark.parametrize("priority", [0, 1, PRIORITY_MAX - 1])
@pytest.mark.parametrize(("others", "is_doomed"), [(8, False), (9, True)])
def test_priority_level_counts_for_eight_requests(
    priority: int, others: int, is_doomed: bool
) -> None:
    assert (others > PRIORITY_WEIGHT) is is_doomed
    first, competitors = urgent(priority), competing(others, priority=priority + 1)

    assert formed(queue_of(first, *competitors), cost=COST).doomed == [first] * is_doomed


def test_request_of_lower_priority_is_doomed_for_one_other() -> None:
    first = urgent(priority=2)

    assert formed(queue_of(first, *competing(1, priority=1)), cost=COST).doomed == [first]


@pytest.mark.parametrize("others", [2, 9])
def test_no_rejection_without_may_doom(others: int) -> None:
    batch = formed(queue_of(urgent(), *competing(others)), cost=COST, may_doom=False)

    assert (batch.doomed, batch.reason) == ([], Reason.DEADLINE)


def test_no_rejection_for_requests_without_a_deadline() -> None:
    batch = formed(queue_of(urgent(), *[1] * 20), cost=COST)

    assert (batch.doomed, batch.reason) == ([], Reason.DEADLINE)


@pytest.mark.parametrize(
    ("others", "rules"),
    [
        ([waiting(is_alone=True)], {}),
        ([], {"rows_max": 1}),
    ],
    ids=["alone", "full"],
)
def test_no_rejection_unless_a_deadline_closes_the_batch(
    others: list[Request], rules: dict[str, Any]
) -> None:
    batch = formed(queue_of(urgent(), *others, *competing(9)), cost=COST, **rules)

    assert batch.doomed == [] and batch.reason is not Reason.DEADLINE


def test_request_that_is_late_even_alone_is_doomed_first() -> None:
    """A request that is late even alone is no reason to reject another."""
    late, first = waiting(due_ns=NOW + span_ns(1, COST) - 1), urgent()

    assert formed(queue_of(late, first, *competing(5)), cost=COST).doomed == [late]


def test_no_rejection_while_the_worker_is_busy() -> None:
    """A request with an earlier deadline or fewer rows may still arrive; both sides."""
    free_ns = NOW + 10 * MS
    requests = [urgent(), *competing(5)]
    for request in requests:
        request.deadline_ns += 10 * MS
    held = formed(queue_of(*requests), cost=COST, free_ns=free_ns)
    assert held.doomed == [] and held.reserves_worker

    for now_ns, doomed in ((held.hold_ns - 1, 0), (held.hold_ns, 1)):
        queue = queue_of(*(waiting(due_ns=request.deadline_ns) for request in requests))
        assert len(formed(queue, cost=COST, free_ns=free_ns, now_ns=now_ns).doomed) == doomed


@pytest.mark.parametrize(("excess", "is_doomed"), [(0, True), (1, False)])
def test_number_of_examined_requests_is_bounded(excess: int, is_doomed: bool) -> None:
    """Both sides: the second of the two late requests is examined, or it is not."""
    first = urgent()
    late = [waiting(due_ns=NOW + span_ns(1, COST) + run_ns(4) - 1) for _ in range(2)]
    timely = [waiting(due_ns=FAR) for _ in range(EXAMINED_MAX - 3 + excess)]

    batch = formed(queue_of(first, *timely, *late), cost=COST, rows_max=4)

    assert (batch.reason, batch.doomed) == (Reason.DEADLINE, [first] * is_doomed)


@pytest.mark.parametrize(("early_ns", "is_doomed"), [(0, False), (1, True)])
def test_rows_max_limits_the_next_batch_too(early_ns: int, is_doomed: bool) -> None:
    """Four of the eight other requests fit the next batch; both sides."""
    first, due_ns = urgent(), NOW + span_ns(1, COST) + run_ns(4) - early_ns

    queue = queue_of(first, *(waiting(due_ns=due_ns) for _ in range(8)))

    assert formed(queue, cost=COST, rows_max=4).doomed == [first] * is_doomed


@pytest.mark.parametrize(("rows_max", "is_doomed"), [(8, False), (9, True)])
def test_only_requests_that_fit_the_batch_count(rows_max: int, is_doomed: bool) -> None:
    """Twelve requests are late after it, and it counts for eight; both sides."""
    first, due_ns = urgent(0), NOW + span_ns(1, COST) + run_ns(rows_max) - 1

    queue = queue_of(first, *(waiting(due_ns=due_ns) for _ in range(12)))

    assert formed(queue, cost=COST, rows_max=rows_max).doomed == [first] * is_doomed


def loss(ordered: list[Request], count: int, rows_max: int) -> int:
    """Returns the loss in requests of the lowest priority if the first `count` are rejected."""
    remaining = ordered[count:]

    def fits(taken: int) -> bool:
        rows = sum(request.rows for request in remaining[:taken])
        return rows <= rows_max and NOW + span_ns(rows, COST) <= remaining[0].deadline_ns

    taken = max(
        taken for taken in range(1, len(remaining) + 1) if all(map(fits, range(1, taken + 1)))
    )
    batch, others = remaining[:taken], remaining[taken:]
    next_rows = min(sum(request.rows for request in others), rows_max)
    next_ns = NOW + span_ns(sum(request.rows for request in batch), COST) + run_ns(next_rows)
    late = [request for request in others if request.deadline_ns < next_ns]
    return sum(
        PRIORITY_WEIGHT ** (PRIORITY_MAX - request.terms.priority)
        for request in ordered[:count] + late
    )


REQUEST = st.tuples(
    st.integers(1, 4),
    st.none() | st.integers(0, 400).map(lambda tens: tens * 10_000),
    st.sampled_from([1, 1, 1, 0, 2, 9]),
)


@settings(deadline=None, max_examples=up_to(500))
@example([(1, 0, 1)] + [(1, 900_000, 1)] * 3, 8)
@example([(1, 0, 1), (2, 20_000, 1)] + [(1, 1_500_000, 1)] * 5, 8)
@given(st.lists(REQUEST, min_size=2, max_size=9), st.sampled_from([6, 16, 32]))
def test_rejection_minimizes_the_loss(
    drawn: list[tuple[int, int | None, int]], rows_max: int
) -> None:
    """Compared with every choice; of equal choices, the one with the fewest rejections.

    Each request is in time alone, with `spare_ns` to spare.
    """
    requests = [
        waiting(
            rows,
            due_ns=NEVER_NS if spare_ns is None else NOW + span_ns(rows, COST) + spare_ns,
            priority=priority,
        )
        for rows, spare_ns, priority in drawn
    ]
    ordered = sorted(requests, key=lambda request: request.deadline_ns)
    choices = range(len(ordered))
    best = min(choices, key=lambda count: loss(ordered, count, rows_max))

    batch = form(queue_of(*requests), Rules(rows_max), COST, now_ns=NOW)

    event(f"{batch.reason}, {best} would be rejected")
    assert batch.doomed == ordered[: best if batch.reason is Reason.DEADLINE else 0]
