"""Who is given up, so that fewer are late."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from support.batches import FAR, NOW, formed, queue_of, rows_of, span_ns, waiting
from support.lanes import MS, cost_of

from iskander.scheduling.batcher import GIVEN_UP_FOR, Reason, Rules, form
from iskander.scheduling.request import NEVER_NS, PRIORITY_MAX, Request

COST = cost_of(200_000, MS)
PRIORITY_WORTH = 8


def run_ns(rows: int) -> int:
    return COST.predict_ns(rows)


def urgent(priority: int = 1) -> Request:
    """One that is in time alone, and with nobody else."""
    return waiting(due_ns=NOW + span_ns(1, COST), priority=priority)


def behind(count: int, *, after_ns: int = -1, priority: int = 1) -> list[Request]:
    """So many that are in time together, and by so little not after another with one row."""
    due_ns = NOW + span_ns(1, COST) + run_ns(count) + after_ns
    assert due_ns >= NOW + span_ns(count, COST)
    return [waiting(due_ns=due_ns, priority=priority) for _ in range(count)]


@pytest.mark.parametrize(("others", "is_cancelled"), [(1, False), (2, True), (9, True)])
def test_one_is_given_up_where_more_would_be_late_after_it(others: int, is_cancelled: bool) -> None:
    """Both sides: nobody for one other."""
    first, rest = urgent(), behind(others)

    queue = queue_of(first, *rest)

    batch = formed(queue, cost=COST)

    assert (batch.reason, batch.hold_ns, rows_of(batch)) == (Reason.DEADLINE, 0, [1])
    assert batch.doomed == [first] * is_cancelled
    # Without it, all of the others go together.
    queue.remove(first)
    assert rows_of(formed(queue, cost=COST)) == [1] * others


@pytest.mark.parametrize(("after_ns", "is_cancelled"), [(0, False), (-1, True)])
def test_nobody_is_given_up_where_the_others_are_in_time_in_the_next_batch(
    after_ns: int, is_cancelled: bool
) -> None:
    """Both sides, by a nanosecond."""
    first = urgent()

    batch = formed(queue_of(first, *behind(5, after_ns=after_ns)), cost=COST)

    assert batch.doomed == [first] * is_cancelled


@pytest.mark.parametrize("priority", [0, 1, PRIORITY_MAX - 1])
@pytest.mark.parametrize(("others", "is_cancelled"), [(8, False), (9, True)])
def test_a_higher_priority_counts_for_eight(priority: int, others: int, is_cancelled: bool) -> None:
    """Both sides."""
    assert (others > PRIORITY_WORTH) is is_cancelled
    first, rest = urgent(priority), behind(others, priority=priority + 1)

    assert formed(queue_of(first, *rest), cost=COST).doomed == [first] * is_cancelled


def test_one_of_a_lower_priority_is_given_up_for_one_other() -> None:
    first = urgent(priority=2)

    assert formed(queue_of(first, *behind(1, priority=1)), cost=COST).doomed == [first]


@pytest.mark.parametrize("others", [2, 9])
def test_nobody_is_given_up_where_nobody_may_be_refused(others: int) -> None:
    batch = formed(queue_of(urgent(), *behind(others)), cost=COST, may_doom=False)

    assert (batch.doomed, batch.reason) == ([], Reason.DEADLINE)


def test_nobody_is_given_up_for_those_without_a_deadline() -> None:
    batch = formed(queue_of(urgent(), *[1] * 20), cost=COST)

    assert (batch.doomed, batch.reason) == ([], Reason.DEADLINE)


@pytest.mark.parametrize(
    ("others", "settings_"),
    [
        ([waiting(is_alone=True)], {}),
        ([], {"rows_max": 1}),
    ],
    ids=["alone", "full"],
)
def test_nobody_is_given_up_where_no_deadline_closes_a_batch(
    others: list[Request], settings_: dict[str, Any]
) -> None:
    batch = formed(queue_of(urgent(), *others, *behind(9)), cost=COST, **settings_)

    assert batch.doomed == [] and batch.reason is not Reason.DEADLINE


def test_who_is_late_anyway_goes_first_and_then_is_looked_again() -> None:
    """One that cannot be in time by itself is no reason to give up another."""
    late, first = waiting(due_ns=NOW + span_ns(1, COST) - 1), urgent()

    assert formed(queue_of(late, first, *behind(5)), cost=COST).doomed == [late]


def test_nobody_is_given_up_while_the_worker_is_busy() -> None:
    """What is due sooner, or takes less, may come until then; both sides of that moment."""
    free_ns = NOW + 10 * MS
    requests = [urgent(), *behind(5)]
    for request in requests:
        request.deadline_ns += 10 * MS
    held = formed(queue_of(*requests), cost=COST, free_ns=free_ns)
    assert held.doomed == [] and held.is_kept

    for now_ns, doomed in ((held.hold_ns - 1, 0), (held.hold_ns, 1)):
        anew = queue_of(*(waiting(due_ns=request.deadline_ns) for request in requests))
        assert len(formed(anew, cost=COST, free_ns=free_ns, now_ns=now_ns).doomed) == doomed


@pytest.mark.parametrize(("too_many", "is_cancelled"), [(0, True), (1, False)])
def test_only_so_many_are_looked_at(too_many: int, is_cancelled: bool) -> None:
    """Both sides: the second of those whom it would be given up for is seen, or it is not."""
    first = urgent()
    last = [waiting(due_ns=NOW + span_ns(1, COST) + run_ns(4) - 1) for _ in range(2)]
    many = [waiting(due_ns=FAR) for _ in range(GIVEN_UP_FOR - 3 + too_many)]

    batch = formed(queue_of(first, *many, *last), cost=COST, rows_max=4)

    assert (batch.reason, batch.doomed) == (Reason.DEADLINE, [first] * is_cancelled)


@pytest.mark.parametrize(("early_ns", "is_cancelled"), [(0, False), (1, True)])
def test_the_next_batch_has_no_more_rows_than_one_may_have(
    early_ns: int, is_cancelled: bool
) -> None:
    """Eight wait behind, and four of them run then; both sides."""
    first, due_ns = urgent(), NOW + span_ns(1, COST) + run_ns(4) - early_ns

    queue = queue_of(first, *(waiting(due_ns=due_ns) for _ in range(8)))

    assert formed(queue, cost=COST, rows_max=4).doomed == [first] * is_cancelled


@pytest.mark.parametrize(("rows_max", "is_cancelled"), [(8, False), (9, True)])
def test_one_is_given_up_for_those_only_who_find_a_place(rows_max: int, is_cancelled: bool) -> None:
    """It is worth eight of the twelve, who are all late behind it; both sides."""
    first, due_ns = urgent(0), NOW + span_ns(1, COST) + run_ns(rows_max) - 1

    queue = queue_of(first, *(waiting(due_ns=due_ns) for _ in range(12)))

    assert formed(queue, cost=COST, rows_max=rows_max).doomed == [first] * is_cancelled


def measure(ordered: list[Request], count: int, rows_max: int) -> int:
    """What is lost, in requests of the lowest priority, if so many are given up."""
    left = ordered[count:]

    def fits(taken: int) -> bool:
        rows = sum(request.rows for request in left[:taken])
        return rows <= rows_max and NOW + span_ns(rows, COST) <= left[0].deadline_ns

    taken = max(taken for taken in range(1, len(left) + 1) if all(map(fits, range(1, taken + 1))))
    batch, rest = left[:taken], left[taken:]
    next_rows = min(sum(request.rows for request in rest), rows_max)
    next_ns = NOW + span_ns(sum(request.rows for request in batch), COST) + run_ns(next_rows)
    late = [request for request in rest if request.deadline_ns < next_ns]
    return sum(
        PRIORITY_WORTH ** (PRIORITY_MAX - request.terms.priority)
        for request in ordered[:count] + late
    )


ASKED = st.tuples(
    st.integers(1, 4),
    st.none() | st.integers(0, 400).map(lambda tens: tens * 10_000),
    st.sampled_from([1, 1, 1, 0, 2, 9]),
)


@settings(deadline=None, max_examples=500)
@example([(1, 0, 1)] + [(1, 900_000, 1)] * 3, 8)
@example([(1, 0, 1), (2, 20_000, 1)] + [(1, 1_500_000, 1)] * 5, 8)
@given(st.lists(ASKED, min_size=2, max_size=9), st.sampled_from([6, 16, 32]))
def test_who_is_given_up_is_the_best_choice_by_what_is_lost(
    asked: list[tuple[int, int | None, int]], rows_max: int
) -> None:
    """Beside all choices, one after another; of equal ones, the fewest are given up.

    Each would be in time alone, by so much.
    """
    requests = [
        waiting(
            rows,
            due_ns=NEVER_NS if spare_ns is None else NOW + span_ns(rows, COST) + spare_ns,
            priority=priority,
        )
        for rows, spare_ns, priority in asked
    ]
    ordered = sorted(requests, key=lambda request: request.deadline_ns)
    choices = range(len(ordered))
    best = min(choices, key=lambda count: measure(ordered, count, rows_max))

    batch = form(queue_of(*requests), Rules(rows_max), COST, now_ns=NOW)

    event(f"{batch.reason}, {best} would be given up")
    assert batch.doomed == ordered[: best if batch.reason is Reason.DEADLINE else 0]
