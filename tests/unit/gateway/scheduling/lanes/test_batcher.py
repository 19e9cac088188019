"""Batch formation: selected requests, and the reason to close the batch."""

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
from support.random_examples import up_to

from iskander.config.models import LaneConfig
from iskander.contract.processing.row_relation import RowRelation
from iskander.gateway.auth.source import Source
from iskander.gateway.scheduling.lanes.batcher import (
    EXPECTED_LATE_NS,
    LATE_NS,
    Formed,
    Reason,
    Rules,
    form,
    make_rules,
)
from iskander.gateway.scheduling.lanes.cost import CostModel
from iskander.gateway.scheduling.lanes.fair_share import BriefRequests
from iskander.gateway.scheduling.request import NEVER_NS, Request

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
        largest := sizes[-1] if sizes else rows_max,
        sizes,
        tuple(size for size in preferred if size <= largest),
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


@settings(deadline=None, max_examples=up_to(400))
@given(
    st.lists(WAITING, min_size=1, max_size=12),
    RULES,
    st.sampled_from([UNKNOWN, COST, SLOW]),
    st.sampled_from([0, NOW - MS, NOW + 5 * MS]),
    EXPECTED,
)
def test_invariants_of_every_batch(
    requests: list[Request],
    rules: Rules,
    cost: CostModel,
    free_ns: int,
    expected: list[tuple[int, int]],
) -> None:
    queue = queue_of(*requests)
    begin_ns = max(NOW, free_ns)

    def run_limit_ns(rows: int) -> int:
        return surely_ns(cost.predict_ns(rules.run_rows(rows)))

    batch = form(queue, rules, cost, now_ns=NOW, free_ns=free_ns, expected=expected)

    queue.validate()
    taken = [request for request, _ in batch.picks]
    late = [
        request
        for request in batch.doomed
        if begin_ns + run_limit_ns(min(request.rows, rules.rows_max)) > request.deadline_ns
    ]
    assert rules.may_doom or not batch.doomed
    if late != batch.doomed or {*taken} & {*late}:
        require_valid_rejection(batch, requests)
        late = []
    # In queue order; only requests that are late even alone are left out.
    kept = [request for request in requests if request not in late]
    # Requests of other shapes than the first are skipped.
    matching = [request for request in kept if request.shape == kept[0].shape]
    assert taken == matching[: len(taken)] and (taken or not kept)
    if not taken:
        return
    # Only requests larger than the largest batch are split.
    assert sum(rows_of(batch)) == batch.rows <= rules.rows_max
    assert rows_of(batch) == [min(request.rows, rules.rows_max) for request in taken]
    assert len({request.shape for request in taken}) == 1
    assert len(taken) == 1 or not any(request.is_alone for request in taken)
    earliest_ns = min(request.deadline_ns for request in taken)
    if len(taken) > 1 and cost.samples:
        assert earliest_ns == NEVER_NS or begin_ns + run_limit_ns(batch.rows) <= earliest_ns
    # Only an open batch, or one of a busy worker, is held, and a late timer does not make it miss
    # its earliest deadline.
    assert batch.hold_ns == 0 or batch.hold_ns > NOW
    if batch.hold_ns and not batch.reserves_worker:
        assert batch.reason in (Reason.LINGER, Reason.IDLE) and taken == kept
        timer_ns = LATE_NS if rules.linger_ns else EXPECTED_LATE_NS
        late_ns = batch.hold_ns + run_limit_ns(batch.rows) * bool(cost.samples)
        assert earliest_ns == NEVER_NS or late_ns + timer_ns * bool(cost.samples) <= earliest_ns


def require_valid_rejection(batch: Formed, requests: list[Request]) -> None:
    """Only a batch that is sent now and closed by a deadline; the earliest deadlines only."""
    assert (batch.reason, batch.hold_ns) == (Reason.DEADLINE, 0)
    remaining = [request for request in requests if request not in batch.doomed]
    last_ns = max(request.deadline_ns for request in batch.doomed)
    assert remaining and last_ns <= min(request.deadline_ns for request in remaining)


@pytest.mark.parametrize("rules", [{"has_shapes": True}, {"linger_ns": MS}])
def test_requests_of_other_shapes_are_skipped(rules: dict[str, Any]) -> None:
    batch = formed(queue_of(*(waiting(n + 1, shape=n % 2) for n in range(6))), **rules)
    assert (rows_of(batch), batch.reason, batch.hold_ns) == ([1, 3, 5], Reason.SHAPE, 0)


def test_batch_size_counts_rows() -> None:
    assert rows_of(formed(queue_of(30, 30, 4, 1))) == [30, 30, 4]
    assert rows_of(formed(queue_of(*[1] * 100))) == [1] * 64


@pytest.mark.parametrize(("rows", "taken"), [(64, [64]), (65, [64]), (200, [64]), (63, [63])])
def test_only_requests_larger_than_the_largest_batch_are_split(rows: int, taken: list[int]) -> None:
    assert rows_of(formed(queue_of(rows))) == taken
    # Behind another request it waits whole for a later batch.
    assert rows_of(formed(queue_of(2, rows, 1))) == [2]


def test_split_request_continues_with_its_next_rows() -> None:
    request = waiting(150)
    queue = queue_of(request, 10)
    batches = []
    while request.is_waiting:
        batch = formed(queue)
        batches.append([(each.rows, rows) for each, rows in batch.picks])
        for each, rows in batch.picks:
            queue.take(each, rows)

    assert batches == [[(150, 64)], [(150, 64)], [(150, 22), (10, 10)]]


@pytest.mark.parametrize(
    ("requests", "options", "reason"),
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
def test_reason_to_close_a_batch(
    requests: list[Any], options: dict[str, Any], reason: Reason
) -> None:
    batch = formed(queue_of(*requests), **options)

    assert (batch.reason, batch.hold_ns, batch.doomed) == (reason, 0, [])


def test_every_reason_has_a_case() -> None:
    (cases,) = (mark.args[1] for mark in test_reason_to_close_a_batch.pytestmark)

    assert {reason for _, _, reason in cases} == set(Reason)


@pytest.mark.parametrize(("late_by_ns", "taken"), [(0, 2), (1, 1)])
def test_earliest_deadline_closes_the_batch(late_by_ns: int, taken: int) -> None:
    """Both sides: two rows are just in time for the deadline of either request."""
    due = NOW + span_ns(2) - late_by_ns

    assert len(formed(queue_of(waiting(due_ns=due), 1), cost=COST).picks) == taken
    assert len(formed(queue_of(1, waiting(due_ns=due)), cost=COST).picks) == taken


def test_deadlines_close_no_batch_without_a_learned_cost() -> None:
    batch = formed(queue_of(waiting(due_ns=NOW + 1), waiting(due_ns=NOW + 1)))

    assert (len(batch.picks), batch.doomed) == (2, [])


@pytest.mark.parametrize(("late_by_ns", "is_doomed"), [(1, True), (0, False)])
def test_request_that_is_late_even_alone_is_doomed(late_by_ns: int, is_doomed: bool) -> None:
    due_ns = NOW + span_ns(1) - late_by_ns
    doomed, timely = waiting(due_ns=due_ns), waiting()

    batch = formed(queue_of(timely, doomed), cost=COST)
    assert (batch.doomed == [doomed]) is is_doomed
    assert formed(queue_of(waiting(due_ns=due_ns)), cost=COST, may_doom=False).doomed == []
    # The time until the worker is free counts.
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
def test_batch_is_closed_at_the_largest_preferred_size(rows: list[int], taken: list[int]) -> None:
    batch = formed(queue_of(*rows), preferred=(8, 16))

    assert rows_of(batch) == taken
    assert batch.reason == (Reason.IDLE if rows == [1] * 7 else Reason.FULL)


def test_batch_is_full_when_its_rows_cost_much_more_than_its_base() -> None:
    """Eight times its base, transport included; with fixed sizes there is nothing to save."""
    costly = cost_of(100_000, 101_000)

    assert rows_of(formed(queue_of(*[1] * 40), cost=costly)) == [1] * 20
    assert rows_of(formed(queue_of(*[1] * 40), cost=costly, sizes=(64,))) == [1] * 40


@pytest.mark.parametrize(
    ("rows", "run_rows"), [(1, 4), (4, 4), (5, 16), (16, 16), (17, 64), (64, 64)]
)
def test_batch_is_padded_to_the_next_size(rows: int, run_rows: int) -> None:
    assert Rules(64, sizes=(4, 16, 64)).run_rows(rows) == run_rows
    assert Rules(64).run_rows(rows) == rows


@pytest.mark.parametrize(("late_by_ns", "doomed"), [(1, 1), (0, 0)])
def test_deadline_is_compared_with_the_padded_run(late_by_ns: int, doomed: int) -> None:
    """Five rows are padded to 64."""
    request = waiting(5, due_ns=NOW + span_ns(64) - late_by_ns)

    assert len(formed(queue_of(request), cost=COST, sizes=(4, 64)).doomed) == doomed


@pytest.mark.parametrize("is_whole", [True, False])
def test_requests_kept_apart_share_no_batch(is_whole: bool) -> None:
    """Neither at once, nor by a linger, nor for an expected request, nor for a busy worker."""
    queue = queue_of(3, 2, 1)
    due = waiting(1, due_ns=NOW + 20 * MS)
    for requests, more in (
        (queue, {}),
        (queue, {"free_ns": NOW + 5 * MS}),
        (queue_of(due, 1), {"expected": [(NOW + MS, NOW + 8 * MS)]}),
    ):
        batch = formed(requests, cost=COST, is_apart=True, is_whole=is_whole, **more)
        assert len(batch.picks) == 1 and batch.hold_ns == 0 and not batch.doomed
        assert batch.reason is Reason.ALONE


def test_request_kept_apart_is_not_sliced_for_others() -> None:
    """A brief request of another source waits; a request of more rows than a batch is cut."""
    brief = BriefRequests()
    other, own = Source("a", ""), Source("b", "")
    brief.note(other, NOW)
    for is_apart, rows in ((False, 1), (True, 40)):
        queue = queue_of(waiting(100, source=own))
        slow = cost_of(2 * MS, BASE)
        batch = form(queue, Rules(40, is_apart=is_apart), slow, now_ns=NOW, brief=brief)
        assert rows_of(batch) == [rows]


FIXED = RowRelation("dependent", "")


@pytest.mark.parametrize(
    ("relation", "rows_fixed", "expected"),
    [
        (FIXED, None, Rules(64, is_apart=True, is_whole=True)),
        (FIXED, 3, Rules(3, is_apart=True, is_whole=True)),
        (RowRelation("undecided", ""), None, Rules(64, is_apart=True, is_whole=True)),
        (RowRelation("approximate", ""), None, Rules(16, (4, 16), is_apart=True)),
        (RowRelation("approximate", "", True), None, Rules(16, (4, 16), (8,), 5000)),
        (RowRelation("dependent", "", True), None, Rules(16, (4, 16), (8,), 5000)),
        (RowRelation("independent", "", False), 3, Rules(3, is_apart=True, is_whole=True)),
        (RowRelation("independent", ""), 3, Rules(3, (3,), (), 5000)),
    ],
)
def test_rules_of_a_relation(
    relation: RowRelation, rows_fixed: int | None, expected: Rules
) -> None:
    config = LaneConfig(pad_to=(16, 4), preferred_batch_rows=(8,), linger_us=5)
    assert make_rules(config, 64, rows_fixed, 0, relation) == expected
