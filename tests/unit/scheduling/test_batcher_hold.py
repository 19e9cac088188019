"""Until when a batch is kept: to linger, for an expected client, until its worker is free."""

from __future__ import annotations

from typing import Any

import pytest
from support.batches import (
    BASE,
    COST,
    FAR,
    NOW,
    ROW,
    UNKNOWN,
    formed,
    queue_of,
    rows_of,
    span_ns,
    waiting,
)
from support.lanes import MS, cost_of

from iskander.scheduling.batcher import EXPECTED_LATE_NS, LATE_NS, LEAD_NS, LEAD_SHARE, Reason
from iskander.scheduling.cost import LEARNED_SAMPLES, CostModel

AFTER = NOW + span_ns(1) + COST.predict_ns(1)
"""When a run of one more row would end, after a batch of one that goes now."""
SOON = NOW + BASE // 2
LATE = (SOON, AFTER - 1)
"""A client that comes soon, and would be late by a nanosecond in a run of its own."""
TIMELY = (SOON, AFTER)


def test_linger_holds_until_the_oldest_has_waited_so_long() -> None:
    queue = queue_of(waiting(queued_ns=NOW - MS), waiting(queued_ns=NOW - 2 * MS))

    assert formed(queue, linger_ns=5 * MS).hold_ns == NOW + 3 * MS
    assert formed(queue, linger_ns=5 * MS, now_ns=NOW + 3 * MS - 1).hold_ns == NOW + 3 * MS
    assert formed(queue, linger_ns=5 * MS, now_ns=NOW + 3 * MS).hold_ns == 0
    assert formed(queue_of(64), linger_ns=5 * MS).hold_ns == 0
    assert formed(queue_of(waiting(is_alone=True)), linger_ns=5 * MS).hold_ns == 0


def test_linger_leaves_time_for_the_run_before_the_earliest_deadline() -> None:
    """Both sides: the next nanosecond it goes."""
    queue = queue_of(waiting(due_ns=NOW + 5 * MS), 1)
    latest_ns = NOW + 5 * MS - span_ns(2) - LATE_NS

    assert formed(queue, cost=COST, linger_ns=50 * MS).hold_ns == latest_ns
    for now_ns, hold_ns in ((latest_ns - 1, latest_ns), (latest_ns, 0)):
        batch = formed(queue, cost=COST, linger_ns=50 * MS, now_ns=now_ns)
        assert (batch.hold_ns, batch.doomed) == (hold_ns, [])


@pytest.mark.parametrize(
    ("more", "late_ns"),
    [({"linger_ns": 50 * MS}, LATE_NS), ({"expected": [LATE]}, EXPECTED_LATE_NS)],
    ids=["linger", "expected"],
)
def test_what_was_held_is_still_in_time_when_the_timer_fires(
    more: dict[str, Any], late_ns: int
) -> None:
    """As late as timers are, with the row of the client that came meanwhile."""
    request = waiting(due_ns=SOON + span_ns(2) + late_ns)
    held = formed(queue_of(request), cost=COST, **more)
    assert held.hold_ns >= SOON

    others = [waiting()] * ("expected" in more)
    batch = formed(
        queue_of(waiting(due_ns=request.deadline_ns), *others),
        cost=COST,
        **more,
        now_ns=held.hold_ns + late_ns,
    )

    assert (batch.doomed, batch.hold_ns, len(batch.picks)) == ([], 0, 1 + len(others))


def test_where_nothing_is_known_linger_does_not_last_until_the_deadline() -> None:
    batch = formed(queue_of(waiting(due_ns=NOW + 5 * MS)), linger_ns=50 * MS)

    assert NOW < batch.hold_ns < NOW + 5 * MS


@pytest.mark.parametrize(("client", "hold_ns"), [(LATE, SOON), (TIMELY, 0)])
def test_a_client_is_waited_for_only_where_it_would_be_late_otherwise(
    client: tuple[int, int], hold_ns: int
) -> None:
    """If it had to wait for this batch and then for a run of its own; both sides."""
    batch = formed(queue_of(waiting(due_ns=FAR)), cost=COST, expected=[client])

    assert (batch.hold_ns, batch.reason, batch.is_kept) == (hold_ns, Reason.IDLE, False)


@pytest.mark.parametrize(("early_ns", "hold_ns"), [(0, SOON), (1, 0)])
def test_nothing_that_is_due_waits_for_one_that_is_expected(early_ns: int, hold_ns: int) -> None:
    """With the other's row in it the run could end after the deadline, by a nanosecond."""
    due_ns = SOON + EXPECTED_LATE_NS + span_ns(2) - early_ns
    batch = formed(queue_of(waiting(due_ns=due_ns)), cost=COST, expected=[LATE])
    assert (batch.hold_ns, len(batch.picks), batch.doomed) == (hold_ns, 1, [])


@pytest.mark.parametrize(("early_ns", "is_held"), [(0, True), (1, False)])
def test_the_earliest_deadline_of_all_in_a_batch_counts(early_ns: int, is_held: bool) -> None:
    due_ns = SOON + EXPECTED_LATE_NS + span_ns(4) - early_ns
    queue = queue_of(waiting(due_ns=FAR), waiting(), waiting(due_ns=due_ns))

    assert bool(formed(queue, cost=COST, expected=[LATE]).hold_ns) is is_held


@pytest.mark.parametrize("before", [0, 1, 5])
@pytest.mark.parametrize(("early_ns", "hold_ns"), [(0, SOON), (1, 0)])
def test_with_those_who_are_expected_before_everybody_is_in_time(
    before: int, early_ns: int, hold_ns: int
) -> None:
    """They will be in the batch too, though it is not held for them."""
    due_ns = SOON + EXPECTED_LATE_NS + span_ns(2 + before) - early_ns
    expected = [(SOON - 10 + index, FAR) for index in range(before)]

    batch = formed(queue_of(waiting(due_ns=due_ns)), cost=COST, expected=[*expected, LATE])

    assert (batch.hold_ns, batch.doomed) == (hold_ns, [])


def test_the_first_who_would_be_late_is_waited_for() -> None:
    """And when it has come, or is not to come any more, the next."""
    queue = queue_of(waiting(due_ns=FAR))
    later = (SOON + 7, AFTER - 1)

    for expected in ([TIMELY, LATE, later], [LATE, TIMELY, later]):
        assert formed(queue, cost=COST, expected=expected).hold_ns == SOON
    assert formed(queue, cost=COST, expected=[TIMELY, later]).hold_ns == SOON + 7
    assert formed(queue, cost=COST, expected=[(NOW, NOW), later]).hold_ns == SOON + 7
    assert formed(queue, cost=COST, expected=[TIMELY]).hold_ns == 0


def test_nobody_is_waited_for_who_would_be_late_all_the_same() -> None:
    """Both sides: it comes soon, and is due just when the batch with its row would end."""
    queue = queue_of(waiting(due_ns=FAR))
    due_ns = SOON + span_ns(2)

    for early_ns, hold_ns in ((0, SOON), (1, 0)):
        batch = formed(queue, cost=COST, expected=[(SOON, due_ns - early_ns)])
        assert batch.hold_ns == hold_ns


def test_nobody_is_waited_for_whose_moment_has_passed() -> None:
    """Both sides, and on the way to it."""
    queue = queue_of(waiting(due_ns=FAR))

    for now_ns, hold_ns in ((NOW + 1, SOON), (SOON - 1, SOON), (SOON, 0), (SOON + 1, 0)):
        batch = formed(queue, cost=COST, expected=[LATE], now_ns=now_ns)
        assert batch.hold_ns == hold_ns


@pytest.mark.parametrize(("rows_max", "is_held"), [(4, True), (3, False)])
def test_nobody_is_waited_for_whose_row_would_find_no_place(rows_max: int, is_held: bool) -> None:
    """With one who is expected before; both sides."""
    batch = formed(
        queue_of(waiting(2, due_ns=FAR)),
        cost=COST,
        rows_max=rows_max,
        expected=[(SOON - 1, FAR), LATE],
    )

    assert bool(batch.hold_ns) is is_held


@pytest.mark.parametrize("requests", [[1], [1, 1], [waiting(is_alone=True)]])
def test_only_requests_with_deadlines_wait_for_one_that_is_expected(requests: list[Any]) -> None:
    assert formed(queue_of(*requests), cost=COST, expected=[LATE]).hold_ns == 0


@pytest.mark.parametrize(
    "requests",
    [
        [waiting(64, due_ns=FAR)],
        [waiting(due_ns=FAR), waiting(shape=1)],
        [waiting(due_ns=FAR), waiting(is_alone=True)],
        [waiting(due_ns=FAR, is_alone=True)],
        [waiting(due_ns=FAR), waiting(due_ns=NOW + span_ns(1))],
    ],
    ids=["full", "shape", "alone behind", "alone", "deadline"],
)
def test_what_is_closed_waits_for_nobody(requests: list[Any]) -> None:
    assert formed(queue_of(*requests), cost=COST, expected=[LATE]).hold_ns == 0


@pytest.mark.parametrize("samples", range(LEARNED_SAMPLES + 1))
def test_nobody_is_waited_for_by_a_cost_that_is_not_learned(samples: int) -> None:
    """Both sides of the number of runs."""
    cost = CostModel()
    for rows in (1, 16, 1, 16)[:samples]:
        cost.observe(rows, ROW * rows + BASE)

    batch = formed(queue_of(waiting(due_ns=FAR)), cost=cost, expected=[LATE])

    assert bool(batch.hold_ns) is (samples == LEARNED_SAMPLES)


def test_a_worker_that_is_free_before_the_client_comes_waits_for_it_too() -> None:
    """No batch goes to it ahead of time then; both sides."""
    queue = queue_of(waiting(due_ns=FAR))
    at_ns = NOW + 2 * MS

    for free_ns, is_held in ((at_ns - 1, True), (at_ns, False)):
        batch = formed(queue, cost=COST, free_ns=free_ns, expected=[(at_ns, at_ns + 2 * BASE)])
        assert (batch.hold_ns == at_ns) is is_held
        assert batch.is_kept is not is_held
    # Whether it would be late is reckoned from when the worker is free.
    due_ns = NOW + MS + span_ns(1) + COST.predict_ns(1)
    at_ns = NOW + MS + BASE // 2
    for early_ns in (0, 1):
        expected = [(at_ns, due_ns - early_ns)]
        batch = formed(queue, cost=COST, free_ns=NOW + MS, expected=expected)
        assert (batch.hold_ns == at_ns) is bool(early_ns)


def test_a_batch_that_gains_by_growing_is_kept_until_its_worker_is_nearly_free() -> None:
    free_ns = NOW + 10 * MS
    kept_ns = free_ns - LEAD_NS - int(LEAD_SHARE * COST.predict_ns(1))
    queue = queue_of(1)

    for now_ns, hold_ns in ((NOW, kept_ns), (kept_ns - 1, kept_ns), (kept_ns, 0)):
        batch = formed(queue, cost=COST, free_ns=free_ns, now_ns=now_ns)
        assert (batch.hold_ns, batch.is_kept) == (hold_ns, bool(hold_ns))


@pytest.mark.parametrize(
    ("requests", "cost"),
    [
        ([64], COST),
        ([1], UNKNOWN),
        ([2], cost_of(MS, MS)),
        ([waiting(is_alone=True)], COST),
        ([waiting(), waiting(shape=1)], COST),
    ],
    ids=["full", "unknown", "dear rows", "alone", "closed"],
)
def test_a_batch_that_gains_nothing_goes_ahead_of_time(
    requests: list[Any], cost: CostModel
) -> None:
    assert formed(queue_of(*requests), cost=cost, free_ns=NOW + 10 * MS).hold_ns == 0


def test_one_with_a_deadline_is_kept_though_its_rows_are_dear() -> None:
    """One that is due sooner may come, and the worker could not begin before."""
    cost, free_ns = cost_of(MS, MS), NOW + 10 * MS
    batch = formed(queue_of(waiting(2, due_ns=NOW + 50 * MS)), cost=cost, free_ns=free_ns)

    assert NOW < batch.hold_ns < free_ns and batch.is_kept


@pytest.mark.parametrize(
    "requests",
    [
        [waiting(64, due_ns=FAR)],
        [waiting(due_ns=FAR), waiting(shape=1)],
        [waiting(due_ns=NOW + 10 * MS + span_ns(1)), waiting()],
    ],
    ids=["full", "shape", "deadline"],
)
def test_one_with_a_deadline_is_kept_though_it_is_closed(requests: list[Any]) -> None:
    """For the same reason; and nobody in it is given up before it has to go."""
    batch = formed(queue_of(*requests), cost=COST, free_ns=NOW + 10 * MS)

    assert NOW < batch.hold_ns < NOW + 10 * MS and batch.is_kept
    assert (batch.doomed, rows_of(batch)) == ([], [requests[0].rows])
