"""Fair queue: a backlog of one source delays other sources only briefly."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lanes import MS, cost_of, lane_of, put, queue, request_of

from iskander.errors import QueueFull
from iskander.gateway.auth.source import Source
from iskander.gateway.scheduling.lanes.batcher import Reason
from iskander.gateway.scheduling.lanes.cost import CostModel
from iskander.gateway.scheduling.lanes.fair_share import (
    QUANTUM_ROWS,
    RECENT_NS,
    SLICE_NS,
    SOURCES_MAX,
    SOURCES_UNCHECKED,
    BriefRequests,
    FairShare,
    is_brief,
    slice_rows,
)
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.lanes.queue import WaitingQueue
from iskander.gateway.scheduling.request import NEVER_NS, Request
from iskander.gateway.supervision.worker import SlotPlan, Worker

LANE = lane_of()
ATTACKER, INNOCENT = Source(connection=1), Source(connection=2)


class Queue:
    """A fair queue with given ranks, by default in order of arrival."""

    def __init__(self, quantum_rows: int = 1) -> None:
        self.queue = WaitingQueue(is_fair=True)
        self.queue.shares.quantum_rows = quantum_rows
        self.number = 0

    def put(self, source: Source, rows: int = 1, rank: float | None = None) -> Request:
        self.number += 1
        request = self.new_request(source, rows, self.number if rank is None else rank)
        request.number = self.number
        self.queue.put(request)
        self.queue.validate()
        return request

    def new_request(self, source: Source, rows: int = 1, rank: float = 0) -> Request:
        request = request_of(LANE, rows, source=source)
        request.rank, request.expires_ns = rank, NEVER_NS
        return request

    def serve(self, rows: int = 1 << 30) -> Request:
        request = next(iter(self.queue))
        self.queue.take(request, rows)
        self.queue.validate()
        return request

    def rows_until(self, target: Request, rows: int = 1 << 30) -> int:
        """Rows that are served before the first row of a request."""
        before = 0
        while next(iter(self.queue)) is not target:
            before += min(next(iter(self.queue)).waiting_rows, rows)
            self.serve(rows)
        return before


def test_backlog_delays_only_its_own_source() -> None:
    queue = Queue()
    for _ in range(100):
        queue.put(ATTACKER, 64)
    queue.serve()
    late = queue.put(INNOCENT)

    assert queue.rows_until(late) == 0


@pytest.mark.long
def test_single_request_waits_for_little_of_many_backlogs() -> None:
    """Ten sources have a hundred large requests each; it does not wait for one of each."""
    queue = Queue(quantum_rows=64)
    for number in range(1000):
        queue.put(Source(connection=100 + number % 10), 64)
    for _ in range(200):
        queue.serve()
    late = queue.put(INNOCENT)

    assert queue.rows_until(late) <= 2 * 64


def test_rank_decides_within_the_share() -> None:
    """Sources that are not ahead of their share are served by deadline."""
    queue = Queue(quantum_rows=100)
    second = queue.put(ATTACKER, rank=20)
    third = queue.put(Source(connection=3), rank=30)
    first = queue.put(INNOCENT, rank=10)

    assert [queue.serve() for _ in range(3)] == [first, second, third]


def test_requests_of_one_source_are_served_by_rank() -> None:
    queue = Queue()
    later, sooner = queue.put(ATTACKER, rank=2), queue.put(ATTACKER, rank=1)

    assert [queue.serve(), queue.serve()] == [sooner, later]


def test_urgency_gains_at_most_one_round() -> None:
    """A source whose requests are always the most urgent gets its share plus one round."""
    queue, served = Queue(quantum_rows=8), {ATTACKER: 0, INNOCENT: 0}
    for _ in range(200):
        queue.put(ATTACKER, rank=0)
        queue.put(INNOCENT, rank=1)
    for _ in range(200):
        served[queue.serve().terms.source] += 1

    assert abs(served[ATTACKER] - served[INNOCENT]) <= 2 * 8 + 1


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=3), min_size=2, max_size=5))
def test_backlogged_sources_get_equal_rows(sizes: list[list[int]]) -> None:
    queue, served = Queue(), dict.fromkeys((Source(connection=n) for n in range(len(sizes))), 0)
    for source, each in zip(served, sizes, strict=True):
        for number in range(60):
            queue.put(source, each[number % len(each)])
    for _ in range(50):
        request = queue.serve()
        served[request.terms.source] += request.rows

        assert max(served.values()) - min(served.values()) <= max(map(max, sizes)) + 1


def test_tenant_has_one_share_for_all_its_connections() -> None:
    """Nine connections of one token get as much as one connection of another."""
    queue, served = Queue(), {"many": 0, "one": 0}
    for number in range(9 * 60):
        queue.put(Source("many", number % 9))
    for _ in range(60):
        queue.put(Source("one", 99))
    for _ in range(80):
        served[queue.serve().terms.source.tenant] += 1

    assert abs(served["many"] - served["one"]) <= 10


def test_idle_source_saves_up_no_share() -> None:
    queue = Queue()
    for _ in range(60):
        queue.put(ATTACKER)
    queue.put(INNOCENT)
    for _ in range(40):
        queue.serve()
    for _ in range(20):
        queue.put(INNOCENT)
    order = [queue.serve().terms.source for _ in range(10)]

    assert 4 <= order.count(INNOCENT) <= 6


def test_source_stays_charged_after_its_queue_is_empty() -> None:
    """A source with one queued request at a time does not count as new each time."""
    queue, served = Queue(), {ATTACKER: 0, INNOCENT: 0}
    for _ in range(40):
        queue.put(INNOCENT)
    queue.put(ATTACKER, 8)
    for _ in range(36):
        request = queue.serve()
        served[request.terms.source] += request.rows
        if request.terms.source is ATTACKER:
            queue.put(ATTACKER, 8)

    assert served[ATTACKER] <= served[INNOCENT] + 2 * 8


def test_new_sources_do_not_starve_a_backlog() -> None:
    queue, served = Queue(), 0
    for _ in range(50):
        queue.put(ATTACKER)
    for number in range(100, 300):
        queue.put(Source(connection=number))
        served += queue.serve().terms.source is ATTACKER

    assert served >= 10


def test_number_of_remembered_idle_sources_is_bounded() -> None:
    shares = FairShare()
    shares.quantum_rows = 1 << 30  # The round stays, so that the state of every source matters.
    busy = shares.enter(INNOCENT)
    for number in range(2 * SOURCES_MAX):
        flow = shares.enter(Source(connection=1000 + number))
        shares.serve(flow, 1)
        shares.leave(flow)
        assert len(shares._away) <= SOURCES_MAX
    shares.leave(busy)
    assert shares._shares == 0


def test_outdated_state_of_closed_connections_is_dropped() -> None:
    shares, quantum = FairShare(), QUANTUM_ROWS
    for number in range(20 * SOURCES_UNCHECKED):
        flow = shares.enter(Source(connection=number))
        shares.serve(flow, quantum // 10)  # The state of about ten sources matters.
        shares.leave(flow)
        assert len(shares._away) <= SOURCES_UNCHECKED


def test_state_that_matters_is_kept() -> None:
    shares = FairShare()
    served = []
    for number in range(4 * SOURCES_UNCHECKED):
        flow = shares.enter(Source(connection=number))
        shares.serve(flow, 1)  # All together less than a quantum: the round stays.
        shares.leave(flow)
        served.append((flow.source, flow.round, flow.credit))

    for source, round_number, credit in served:
        assert shares.entry_of(source) == (round_number, credit)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=40), st.integers(0, 4))
def test_rows_before_is_low_by_at_most_one_request_per_source(
    waiting: list[tuple[int, int]], served: int
) -> None:
    """Compares the estimate for late rejections with the rows that are served."""
    queue = Queue(quantum_rows=5)
    for connection, rows in waiting:
        queue.put(Source(connection=connection), rows)
    for _ in range(min(served, len(waiting))):
        queue.serve()
    new_request = queue.new_request(INNOCENT, rank=queue.number + 1)
    expected = queue.queue.rows_before(new_request)
    new_request.number = queue.number + 1
    queue.queue.put(new_request)

    before = queue.rows_until(new_request)

    assert before <= expected + 5 * 9


def test_one_source_cannot_fill_a_fair_queue() -> None:
    """The rest is reserved for others, a part for each of them."""
    lane = lane_of(queue_requests=900, client_requests=10_000)
    lane.workers[1] = Worker(SlotPlan(0, 0, (0,), None))
    admitted = dict.fromkeys(range(20), 0)
    for connection in admitted:
        while True:
            request = request_of(lane, source=Source(connection=connection))
            try:
                victims = lane.check(request, 0)
            except QueueFull:
                break
            lane.put(request, 0, victims)
            admitted[connection] += 1

    assert admitted[0] == 800
    assert all(admitted[connection] for connection in admitted if connection < 3)
    assert sum(admitted.values()) < 900
    with pytest.raises(QueueFull, match="are reserved for other clients"):
        lane.check(request_of(lane, source=Source(connection=0)), 0)


def test_source_that_holds_more_evicts_only_its_own_requests() -> None:
    lane = lane_of(queue_requests=128, client_requests=10_000, overflow="drop_oldest")
    innocent = put(lane, source=INNOCENT)
    for _ in range(200):
        removed = queue(lane, request_of(lane, source=ATTACKER), 0)
        assert all(victim.terms.source == ATTACKER for victim, _ in removed)

    assert innocent.is_waiting


def learned(row_ns: int, base_ns: int) -> CostModel:
    return cost_of(row_ns, base_ns)


def test_slice_rows_follow_from_the_learned_cost() -> None:
    assert slice_rows(CostModel()) == 0
    assert slice_rows(learned(1000, 1)) == pytest.approx(SLICE_NS / 1000, rel=0.01)
    assert slice_rows(learned(1000, 10 * MS)) == pytest.approx(10 * MS / 1000, rel=0.01)
    assert slice_rows(learned(60 * MS, 1)) == 1
    assert is_brief(learned(1000, 1), 1000) and not is_brief(learned(1000, 1), 4000)
    assert not is_brief(CostModel(), 1)


def test_sources_of_brief_requests_are_remembered_for_a_limited_time() -> None:
    brief = BriefRequests()
    assert not brief.has_other(ATTACKER, 0)
    brief.note(ATTACKER, 0)
    assert not brief.has_other(ATTACKER, 1) and brief.has_other(INNOCENT, 1)
    brief.note(INNOCENT, 10)
    brief.note(INNOCENT, 20)
    assert brief.has_other(ATTACKER, RECENT_NS) and brief.has_other(INNOCENT, RECENT_NS - 1)
    assert not brief.has_other(INNOCENT, RECENT_NS)
    assert not brief.is_recent(20 + RECENT_NS)


def sliced_lane() -> tuple[Lane, Worker]:
    lane = lane_of(rows_max=65_536)
    worker = Worker(SlotPlan(0, 0, (0,), None))
    lane.workers[1] = worker
    lane.cost_of(worker)
    for rows in (128, 1024, 128, 1024, 128):
        lane.on_ran(worker, rows, 1000 * rows + 10_000, 0)
    return lane, worker


def test_large_request_runs_in_slices_while_other_sources_send_brief_ones() -> None:
    """It runs in one batch if no other source does."""
    lane, worker = sliced_lane()
    large = put(lane, 60_000, source=ATTACKER)
    brief = BriefRequests()
    assert lane.form(worker, 0, brief).rows == 60_000
    brief.note(ATTACKER, 0)
    assert lane.form(worker, 0, brief).rows == 60_000

    brief.note(INNOCENT, 0)
    formed = lane.form(worker, 0, brief)

    assert formed.picks == [(large, formed.rows)] and formed.reason is Reason.FULL
    assert formed.rows == pytest.approx(SLICE_NS / 1000, rel=0.01)


def test_next_slice_is_kept_until_the_worker_is_nearly_free() -> None:
    lane, worker = sliced_lane()
    put(lane, 60_000, source=ATTACKER)
    brief = BriefRequests()
    brief.note(INNOCENT, 0)
    worker.in_flight[1] = None  # type: ignore[assignment]
    worker.busy_until_ns = 4 * MS

    formed = lane.form(worker, 0, brief)

    assert 3 * MS < formed.hold_ns < 4 * MS and formed.reserves_worker


def test_brief_request_does_not_wait_for_the_rest_of_a_large_one() -> None:
    lane, worker = sliced_lane()
    brief = BriefRequests()
    put(lane, 60_000, source=ATTACKER)
    brief.note(INNOCENT, 0)
    for request, rows in lane.form(worker, 0, brief).picks:
        lane.take(request, rows)
    new_request = put(lane, 128, source=INNOCENT)

    assert lane.form(worker, 0, brief).picks == [(new_request, 128)]


@pytest.mark.parametrize("is_retry", [False, True])
def test_request_that_must_run_alone_is_sliced_only_in_a_retry(is_retry: bool) -> None:
    """Else the sizes of its batches, and so the bits of its results, depend on other traffic."""
    lane, worker = sliced_lane()
    request = request_of(lane, 60_000, source=ATTACKER, is_alone=not is_retry)
    request.is_alone = True
    queue(lane, request, 0)
    brief = BriefRequests()
    brief.note(INNOCENT, 0)

    assert (lane.form(worker, 0, brief).rows == 60_000) != is_retry
