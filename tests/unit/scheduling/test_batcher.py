"""Which requests make the next batch, and why it is closed there."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import (
    BASE,
    COST,
    NOW,
    UNKNOWN,
    formed,
    queue_of,
    rows_of,
    span_ns,
    surely_ns,
    waiting,
)
from support.lanes import MS, cost_of

from iskander.scheduling.batcher import EXPECTED_LATE_NS, LATE_NS, Formed, Reason, Rules, form
from iskander.scheduling.cost import CostModel
from iskander.scheduling.request import NEVER_NS, Request

SLOW = cost_of(200_000, BASE)

WAITING = st.builds(
    waiting,
    st.integers(1, 40),
    due_ns=st.just(NEVER_NS) | st.integers(NOW, NOW + 30 * MS),
    shape=st.sampled_from([0, 0, 0, 1]),
    is_alone=st.sampled_from([False] * 5 + [True]),
    queued_ns=st.integers(NOW - 20 * MS, NOW),
)
RULES = st.builds(
    lambda sizes, rows_max, preferred, *rest: Rules(
        most := sizes[-1] if sizes else rows_max,
        sizes,
        tuple(size for size in preferred if size <= most),
        *rest,
    ),
    st.sampled_from([(), (), (4, 32)]),
    st.integers(1, 64),
    st.sampled_from([(), (), (8, 16)]),
    st.sampled_from([0, 0, 5 * MS]),
    st.booleans(),
)


EXPECTED = st.lists(
    st.tuples(st.integers(NOW - MS, NOW + 10 * MS), st.integers(NOW, NOW + 10 * MS)), max_size=3
)


@settings(deadline=None, max_examples=400)
@given(
    st.lists(WAITING, min_size=1, max_size=12),
    RULES,
    st.sampled_from([UNKNOWN, COST, SLOW]),
    st.sampled_from([0, NOW - MS, NOW + 5 * MS]),
    EXPECTED,
)
def test_what_holds_for_every_batch(
    requests: list[Request],
    rules: Rules,
    cost: CostModel,
    free_ns: int,
    expected: list[tuple[int, int]],
) -> None:
    queue = queue_of(*requests)
    begin_ns = max(NOW, free_ns)

    def surely(rows: int) -> int:
        return surely_ns(cost.predict_ns(rules.run_rows(rows)))

    batch = form(queue, rules, cost, now_ns=NOW, free_ns=free_ns, expected=expected)

    queue.validate()
    taken = [request for request, _ in batch.picks]
    hopeless = [
        request
        for request in batch.doomed
        if begin_ns + surely(min(request.rows, rules.rows_max)) > request.deadline_ns
    ]
    assert rules.may_doom or not batch.doomed
    if hopeless != batch.doomed or {*taken} & {*hopeless}:
        require_given_up(batch, requests)
        hopeless = []
    # In the queue's order, with nobody left out but those who would be late even alone.
    kept = [request for request in requests if request not in hopeless]
    # Those of other shapes than the first are passed over.
    fitting = [request for request in kept if request.shape == kept[0].shape]
    assert taken == fitting[: len(taken)] and (taken or not kept)
    if not taken:
        return
    # Rows are counted, and only what is larger than any batch is split.
    assert sum(rows_of(batch)) == batch.rows <= rules.rows_max
    assert rows_of(batch) == [min(request.rows, rules.rows_max) for request in taken]
    assert len({request.shape for request in taken}) == 1
    assert len(taken) == 1 or not any(request.is_alone for request in taken)
    earliest_ns = min(request.deadline_ns for request in taken)
    if len(taken) > 1 and cost.samples:
        assert earliest_ns == NEVER_NS or begin_ns + surely(batch.rows) <= earliest_ns
    # Kept only where it is not closed or its worker is busy, and never so long that a deadline
    # would be missed, however late the timer is.
    assert batch.hold_ns == 0 or batch.hold_ns > NOW
    if batch.hold_ns and not batch.is_kept:
        assert batch.reason in (Reason.LINGER, Reason.IDLE) and taken == kept
        timer_ns = LATE_NS if rules.linger_ns else EXPECTED_LATE_NS
        late_ns = batch.hold_ns + surely(batch.rows) * bool(cost.samples)
        assert earliest_ns == NEVER_NS or late_ns + timer_ns * bool(cost.samples) <= earliest_ns


def require_given_up(batch: Formed, requests: list[Request]) -> None:
    """Only from a batch that goes now and was closed by a deadline; those that are due first."""
    assert (batch.reason, batch.hold_ns) == (Reason.DEADLINE, 0)
    left = [request for request in requests if request not in batch.doomed]
    last_ns = max(request.deadline_ns for request in batch.doomed)
    assert left and last_ns <= min(request.deadline_ns for request in left)


@pytest.mark.parametrize("rules", [{"has_shapes": True}, {"linger_ns": MS}])
def test_requests_of_other_shapes_are_passed_over(rules: dict[str, Any]) -> None:
    batch = formed(queue_of(*(waiting(n + 1, shape=n % 2) for n in range(6))), **rules)
    assert (rows_of(batch), batch.reason, batch.hold_ns) == ([1, 3, 5], Reason.SHAPE, 0)


def test_rows_are_counted_and_not_requests() -> None:
    assert rows_of(formed(queue_of(30, 30, 4, 1))) == [30, 30, 4]
    assert rows_of(formed(queue_of(*[1] * 100))) == [1] * 64


@pytest.mark.parametrize(("rows", "taken"), [(64, [64]), (65, [64]), (200, [64]), (63, [63])])
def test_only_what_is_larger_than_any_batch_is_split(rows: int, taken: list[int]) -> None:
    assert rows_of(formed(queue_of(rows))) == taken
    # Behind another it waits for a batch of its own, whole.
    assert rows_of(formed(queue_of(2, rows, 1))) == [2]


def test_of_a_split_request_the_next_piece_is_taken() -> None:
    request = waiting(150)
    queue = queue_of(request, 10)
    pieces = []
    while request.is_waiting:
        batch = formed(queue)
        pieces.append([(each.rows, rows) for each, rows in batch.picks])
        for each, rows in batch.picks:
            queue.take(each, rows)

    assert pieces == [[(150, 64)], [(150, 64)], [(150, 22), (10, 10)]]


@pytest.mark.parametrize(
    ("requests", "more", "reason"),
    [
        ([64], {}, Reason.FULL),
        ([60, 5], {}, Reason.FULL),
        ([60, 3], {}, Reason.IDLE),
        ([60, 3], {"linger_ns": MS, "now_ns": NOW + MS}, Reason.LINGER),
        ([waiting(shape=1), waiting(shape=2)], {"has_shapes": True}, Reason.SHAPE),
        ([waiting(), waiting(is_alone=True)], {}, Reason.ALONE),
        ([waiting(is_alone=True), waiting()], {}, Reason.ALONE),
        ([waiting(due_ns=NOW + span_ns(1)), 1], {"cost": COST}, Reason.DEADLINE),
        ([1, waiting(due_ns=NOW + span_ns(1))], {"cost": COST}, Reason.DEADLINE),
    ],
)
def test_why_a_batch_was_closed(requests: list[Any], more: dict[str, Any], reason: Reason) -> None:
    batch = formed(queue_of(*requests), **more)

    assert (batch.reason, batch.hold_ns, batch.doomed) == (reason, 0, [])


def test_every_reason_has_a_case() -> None:
    (cases,) = (mark.args[1] for mark in test_why_a_batch_was_closed.pytestmark)

    assert {reason for _, _, reason in cases} == set(Reason)


@pytest.mark.parametrize(("early_ns", "taken"), [(0, 2), (1, 1)])
def test_the_earliest_deadline_is_kept(early_ns: int, taken: int) -> None:
    """Both sides: two rows are just in time; the first request's own deadline, or the second's."""
    due = NOW + span_ns(2) - early_ns

    assert len(formed(queue_of(waiting(due_ns=due), 1), cost=COST).picks) == taken
    assert len(formed(queue_of(1, waiting(due_ns=due)), cost=COST).picks) == taken


def test_where_nothing_is_known_deadlines_close_nothing() -> None:
    batch = formed(queue_of(waiting(due_ns=NOW + 1), waiting(due_ns=NOW + 1)))

    assert (len(batch.picks), batch.doomed) == (2, [])


@pytest.mark.parametrize(("early_ns", "is_doomed"), [(1, True), (0, False)])
def test_what_would_be_late_in_a_batch_of_its_own_is_left_out(
    early_ns: int, is_doomed: bool
) -> None:
    due_ns = NOW + span_ns(1) - early_ns
    doomed, fine = waiting(due_ns=due_ns), waiting()

    batch = formed(queue_of(fine, doomed), cost=COST)
    assert (batch.doomed == [doomed]) is is_doomed
    assert formed(queue_of(waiting(due_ns=due_ns)), cost=COST, may_doom=False).doomed == []
    # When the worker is free is part of it.
    request = waiting(due_ns=due_ns + 10 * MS)
    later = formed(queue_of(request), cost=COST, free_ns=NOW + 10 * MS)
    assert (later.doomed == [request]) is is_doomed


@pytest.mark.parametrize(
    ("rows", "taken"),
    [
        ([1] * 7, [1] * 7),
        ([1] * 8, [1] * 8),
        ([1] * 15, [1] * 8),
        ([1] * 16, [1] * 16),
        ([1] * 40, [1] * 16),
        ([5, 5], [5]),
        ([12, 5], [12]),
        ([40, 1], [40]),
    ],
)
def test_a_batch_is_closed_at_the_largest_preferred_size_that_waits(
    rows: list[int], taken: list[int]
) -> None:
    batch = formed(queue_of(*rows), preferred=(8, 16))

    assert rows_of(batch) == taken
    assert batch.reason == (Reason.IDLE if rows == [1] * 7 else Reason.FULL)


def test_a_batch_whose_rows_cost_much_more_than_itself_is_full() -> None:
    """Eight times its base and trip; with sizes to fill up to there is nothing to save."""
    dear = cost_of(100_000, 101_000)

    assert rows_of(formed(queue_of(*[1] * 40), cost=dear)) == [1] * 20
    assert rows_of(formed(queue_of(*[1] * 40), cost=dear, sizes=(64,))) == [1] * 40


@pytest.mark.parametrize(
    ("rows", "run_rows"), [(1, 4), (4, 4), (5, 16), (16, 16), (17, 64), (64, 64)]
)
def test_a_batch_is_filled_up_to_the_next_size(rows: int, run_rows: int) -> None:
    assert Rules(64, sizes=(4, 16, 64)).run_rows(rows) == run_rows
    assert Rules(64).run_rows(rows) == rows


@pytest.mark.parametrize(("early_ns", "doomed"), [(1, 1), (0, 0)])
def test_a_deadline_is_held_against_what_is_run_and_not_what_was_asked_for(
    early_ns: int, doomed: int
) -> None:
    """Five rows are run as sixty-four."""
    request = waiting(5, due_ns=NOW + span_ns(64) - early_ns)

    assert len(formed(queue_of(request), cost=COST, sizes=(4, 64)).doomed) == doomed
