"""Hold of a batch: to linger, for an expected request, or until its worker is nearly free."""

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

from iskander.gateway.scheduling.lanes.batcher import (
    EXPECTED_LATE_NS,
    LATE_NS,
    LEAD_NS,
    LEAD_SHARE,
    Reason,
)
from iskander.gateway.scheduling.lanes.cost import LEARNED_SAMPLES, CostModel

AFTER = NOW + span_ns(1) + COST.predict_ns(1)
"""End of a run of one more row, after a batch of one row that is sent now."""
SOON = NOW + BASE // 2
LATE = (SOON, AFTER - 1)
"""An expected request that would be 1 ns late in a separate run."""
TIMELY = (SOON, AFTER)


def test_linger_counts_from_the_oldest_request() -> None:
    queue = queue_of(waiting(queued_ns=NOW - MS), waiting(queued_ns=NOW - 2 * MS))

    assert formed(queue, linger_ns=5 * MS).hold_ns == NOW + 3 * MS
    assert formed(queue, linger_ns=5 * MS, now_ns=NOW + 3 * MS - 1).hold_ns == NOW + 3 * MS
    assert formed(queue, linger_ns=5 * MS, now_ns=NOW + 3 * MS).hold_ns == 0
    assert formed(queue_of(64), linger_ns=5 * MS).hold_ns == 0
    assert formed(queue_of(waiting(is_alone=True)), linger_ns=5 * MS).hold_ns == 0


def test_linger_leaves_time_for_the_run_before_the_earliest_deadline() -> None:
    """Both sides, by 1 ns."""
    queue = queue_of(waiting(due_ns=NOW + 5 * MS), 1)
    latest_ns = NOW + 5 * MS - span_ns(2) - LATE_NS

    assert formed(queue, cost=COST, linger_ns=50 * MS).hold_ns == latest_ns
    for now_ns, hold_ns in ((latest_ns - 1, latest_ns), (latest_ns, 0)):
        batch = formed(queue, cost=COST, linger_ns=50 * MS, now_ns=now_ns)
        assert (batch.hold_ns, batch.doomed) == (hold_ns, [])


@pytest.mark.parametrize(
    ("options", "late_ns"),
    [({"linger_ns": 50 * MS}, LATE_NS), ({"expected": [LATE]}, EXPECTED_LATE_NS)],
    ids=["linger", "expected"],
)
def test_held_batch_is_in_time_with_a_late_timer(options: dict[str, Any], late_ns: int) -> None:
    """The timer is as late as possible, and the expected request has arrived."""
    request = waiting(due_ns=SOON + span_ns(2) + late_ns)
    held = formed(queue_of(request), cost=COST, **options)
    assert held.hold_ns >= SOON

    others = [waiting()] * ("expected" in options)
    batch = formed(
        queue_of(waiting(due_ns=request.deadline_ns), *others),
        cost=COST,
        **options,
        now_ns=held.hold_ns + late_ns,
    )

    assert (batch.doomed, batch.hold_ns, len(batch.picks)) == ([], 0, 1 + len(others))


def test_linger_ends_before_the_deadline_without_a_learned_cost() -> None:
    batch = formed(queue_of(waiting(due_ns=NOW + 5 * MS)), linger_ns=50 * MS)

    assert NOW < batch.hold_ns < NOW + 5 * MS


@pytest.mark.parametrize(("client", "hold_ns"), [(LATE, SOON), (TIMELY, 0)])
def test_batch_is_held_only_for_a_client_that_would_be_late_otherwise(
    client: tuple[int, int], hold_ns: int
) -> None:
    """Late: if it waited for this batch and then for a separate run; both sides."""
    batch = formed(queue_of(waiting(due_ns=FAR)), cost=COST, expected=[client])

    assert (batch.hold_ns, batch.reason, batch.reserves_worker) == (hold_ns, Reason.IDLE, False)


@pytest.mark.parametrize(("early_ns", "hold_ns"), [(0, SOON), (1, 0)])
def test_no_hold_that_risks_the_deadline_of_a_request(early_ns: int, hold_ns: int) -> None:
    """With the expected row the run could end 1 ns after the deadline; both sides."""
    due_ns = SOON + EXPECTED_LATE_NS + span_ns(2) - early_ns
    batch = formed(queue_of(waiting(due_ns=due_ns)), cost=COST, expected=[LATE])
    assert (batch.hold_ns, len(batch.picks), batch.doomed) == (hold_ns, 1, [])


@pytest.mark.parametrize(("early_ns", "is_held"), [(0, True), (1, False)])
def test_earliest_deadline_in_the_batch_limits_the_hold(early_ns: int, is_held: bool) -> None:
    due_ns = SOON + EXPECTED_LATE_NS + span_ns(4) - early_ns
    queue = queue_of(waiting(due_ns=FAR), waiting(), waiting(due_ns=due_ns))

    assert bool(formed(queue, cost=COST, expected=[LATE]).hold_ns) is is_held


@pytest.mark.parametrize("earlier", [0, 1, 5])
@pytest.mark.parametrize(("early_ns", "hold_ns"), [(0, SOON), (1, 0)])
def test_hold_accounts_for_requests_that_are_expected_earlier(
    earlier: int, early_ns: int, hold_ns: int
) -> None:
    """They join the batch too, although it is not held for them."""
    due_ns = SOON + EXPECTED_LATE_NS + span_ns(2 + earlier) - early_ns
    expected = [(SOON - 10 + index, FAR) for index in range(earlier)]

    batch = formed(queue_of(waiting(due_ns=due_ns)), cost=COST, expected=[*expected, LATE])

    assert (batch.hold_ns, batch.doomed) == (hold_ns, [])


def test_hold_is_for_the_first_client_that_would_be_late() -> None:
    """After its arrival, or its expected time, the hold is for the next one."""
    queue = queue_of(waiting(due_ns=FAR))
    later = (SOON + 7, AFTER - 1)

    for expected in ([TIMELY, LATE, later], [LATE, TIMELY, later]):
        assert formed(queue, cost=COST, expected=expected).hold_ns == SOON
    assert formed(queue, cost=COST, expected=[TIMELY, later]).hold_ns == SOON + 7
    assert formed(queue, cost=COST, expected=[(NOW, NOW), later]).hold_ns == SOON + 7
    assert formed(queue, cost=COST, expected=[TIMELY]).hold_ns == 0


def test_no_hold_for_a_client_that_would_be_late_anyway() -> None:
    """Both sides: its deadline is the end of the batch with its row, or 1 ns earlier."""
    queue = queue_of(waiting(due_ns=FAR))
    due_ns = SOON + span_ns(2)

    for early_ns, hold_ns in ((0, SOON), (1, 0)):
        batch = formed(queue, cost=COST, expected=[(SOON, due_ns - early_ns)])
        assert batch.hold_ns == hold_ns


def test_no_hold_after_the_expected_time() -> None:
    """Both sides, and earlier."""
    queue = queue_of(waiting(due_ns=FAR))

    for now_ns, hold_ns in ((NOW + 1, SOON), (SOON - 1, SOON), (SOON, 0), (SOON + 1, 0)):
        batch = formed(queue, cost=COST, expected=[LATE], now_ns=now_ns)
        assert batch.hold_ns == hold_ns


@pytest.mark.parametrize(("rows_max", "is_held"), [(4, True), (3, False)])
def test_no_hold_if_the_expected_row_does_not_fit(rows_max: int, is_held: bool) -> None:
    """Together with a request that is expected earlier; both sides."""
    batch = formed(
        queue_of(waiting(2, due_ns=FAR)),
        cost=COST,
        rows_max=rows_max,
        expected=[(SOON - 1, FAR), LATE],
    )

    assert bool(batch.hold_ns) is is_held


@pytest.mark.parametrize("requests", [[1], [1, 1], [waiting(is_alone=True)]])
def test_no_hold_for_requests_without_a_deadline(requests: list[Any]) -> None:
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
    ids=["full", "shape", "alone second", "alone", "deadline"],
)
def test_closed_batch_is_not_held(requests: list[Any]) -> None:
    assert formed(queue_of(*requests), cost=COST, expected=[LATE]).hold_ns == 0


@pytest.mark.parametrize("samples", range(LEARNED_SAMPLES + 1))
def test_no_hold_before_the_cost_is_learned(samples: int) -> None:
    """Both sides of the number of runs."""
    cost = CostModel()
    for rows in (1, 16, 1, 16)[:samples]:
        cost.observe(rows, ROW * rows + BASE)

    batch = formed(queue_of(waiting(due_ns=FAR)), cost=cost, expected=[LATE])

    assert bool(batch.hold_ns) is (samples == LEARNED_SAMPLES)


def test_batch_of_a_busy_worker_is_held_for_a_client_expected_later() -> None:
    """The batch is not sent ahead of time then; both sides."""
    queue = queue_of(waiting(due_ns=FAR))
    at_ns = NOW + 2 * MS

    for free_ns, is_held in ((at_ns - 1, True), (at_ns, False)):
        batch = formed(queue, cost=COST, free_ns=free_ns, expected=[(at_ns, at_ns + 2 * BASE)])
        assert (batch.hold_ns == at_ns) is is_held
        assert batch.reserves_worker is not is_held
    # Lateness counts from the time at which the worker is free.
    due_ns = NOW + MS + span_ns(1) + COST.predict_ns(1)
    at_ns = NOW + MS + BASE // 2
    for early_ns in (0, 1):
        expected = [(at_ns, due_ns - early_ns)]
        batch = formed(queue, cost=COST, free_ns=NOW + MS, expected=expected)
        assert (batch.hold_ns == at_ns) is bool(early_ns)


def test_growing_batch_is_kept_until_its_worker_is_nearly_free() -> None:
    free_ns = NOW + 10 * MS
    kept_ns = free_ns - LEAD_NS - int(LEAD_SHARE * COST.predict_ns(1))
    queue = queue_of(1)

    for now_ns, hold_ns in ((NOW, kept_ns), (kept_ns - 1, kept_ns), (kept_ns, 0)):
        batch = formed(queue, cost=COST, free_ns=free_ns, now_ns=now_ns)
        assert (batch.hold_ns, batch.reserves_worker) == (hold_ns, bool(hold_ns))


@pytest.mark.parametrize(
    ("requests", "cost"),
    [
        ([64], COST),
        ([1], UNKNOWN),
        ([2], cost_of(MS, MS)),
        ([waiting(is_alone=True)], COST),
        ([waiting(), waiting(shape=1)], COST),
    ],
    ids=["full", "unknown", "costly rows", "alone", "closed"],
)
def test_batch_that_gains_nothing_is_sent_ahead_of_time(
    requests: list[Any], cost: CostModel
) -> None:
    assert formed(queue_of(*requests), cost=cost, free_ns=NOW + 10 * MS).hold_ns == 0


def test_batch_with_a_deadline_is_kept_despite_costly_rows() -> None:
    """A request with an earlier deadline may arrive before the worker can begin."""
    cost, free_ns = cost_of(MS, MS), NOW + 10 * MS
    batch = formed(queue_of(waiting(2, due_ns=NOW + 50 * MS)), cost=cost, free_ns=free_ns)

    assert NOW < batch.hold_ns < free_ns and batch.reserves_worker


@pytest.mark.parametrize(
    "requests",
    [
        [waiting(64, due_ns=FAR)],
        [waiting(due_ns=FAR), waiting(shape=1)],
        [waiting(due_ns=NOW + 10 * MS + span_ns(1)), waiting()],
    ],
    ids=["full", "shape", "deadline"],
)
def test_batch_with_a_deadline_is_kept_although_it_is_closed(requests: list[Any]) -> None:
    """For the same reason; none of its requests is doomed before it must be sent."""
    batch = formed(queue_of(*requests), cost=COST, free_ns=NOW + 10 * MS)

    assert NOW < batch.hold_ns < NOW + 10 * MS and batch.reserves_worker
    assert (batch.doomed, rows_of(batch)) == ([], [requests[0].rows])
