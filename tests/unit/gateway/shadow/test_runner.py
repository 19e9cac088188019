"""Shadow batches: only in idle time, short, cancelled for others, dropped first, never returned.

Workers are simulated on a virtual clock (`support/simulation.py`). Lane 0 is the served version,
lane 1 the candidate.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from support.lanes import MS, RecordingCaller, lane_of
from support.simulation import SimulatedWorker, Simulation

from iskander.config.shadow import ShadowConfig
from iskander.contract.column_types import ColumnType
from iskander.contract.processing.row_relation import RowRelation
from iskander.contract.tensors import Contract, TensorSpec
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.request import Request
from iskander.gateway.shadow import pair as pair_module
from iskander.gateway.shadow import runner as runner_module
from iskander.gateway.shadow.comparison import Body
from iskander.gateway.shadow.pair import COMPARE_NS, INTERNAL, WHOLE_WORK_MAX, ShadowPair
from iskander.gateway.shadow.queue import QUEUED_NS, REQUESTS_MAX
from iskander.gateway.shadow.runner import CANCEL_TIMEOUT_NS, ShadowRunner
from iskander.interprocess.control.messages import Failed

S = 1000 * MS


class Shadowed:
    """A simulation with a pair of lanes."""

    def __init__(self, simulation: Simulation, **settings: float) -> None:
        self.simulation = simulation
        self.lanes = simulation.lanes
        config = ShadowConfig(**{"time_percent": 100.0, **settings})
        self.runner = ShadowRunner(
            simulation.dispatcher, simulation.input_arena, simulation.lanes, config
        )
        self.share(1.0)

    @property
    def pair(self) -> ShadowPair:
        return self.runner.pairs[0]

    def share(self, share: float) -> None:
        self.runner.set_pairs({(self.lanes[0], self.lanes[1]): share})

    def serve(self, worker: SimulatedWorker, rows: int = 4) -> None:
        """Submit a request and complete it; its shadow batch is sent if that is allowed."""
        _, caller = self.simulation.submit_rows(0, rows)
        self.simulation.loop.turn()
        served = [each for each in worker.sent if each.model == 0][-1]
        self.simulation.done(worker, served)
        assert len(caller.results) == 1 and not caller.errors

    def shadow_batches(self, worker: SimulatedWorker) -> int:
        return sum(execute.model == 1 for execute in worker.sent)

    def rows(self) -> int:
        """Compared rows, after the time at which they are compared."""
        self.simulation.loop.run(COMPARE_NS + MS)
        return 0 if self.pair.comparison is None else self.pair.comparison.rows


@contextmanager
def simulated(*lanes: Lane) -> Iterator[Simulation]:
    """A simulation whose clock the shadow versions use too."""
    with (
        Simulation(*lanes) as simulation,
        mock.patch.object(runner_module, "now_ns", lambda: simulation.loop.now_ns),
        mock.patch.object(pair_module, "now_ns", lambda: simulation.loop.now_ns),
    ):
        yield simulation


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    with simulated(lane_of(0, rows_max=64), lane_of(1, rows_max=64)) as simulation:
        yield simulation


@pytest.fixture
def shadowed(simulation: Simulation) -> Shadowed:
    return Shadowed(simulation)


@pytest.fixture
def worker(simulation: Simulation) -> SimulatedWorker:
    return simulation.start()


def test_finished_request_runs_on_the_candidate(
    shadowed: Shadowed, worker: SimulatedWorker
) -> None:
    """It reads the inputs of the finished request, whose lease is released after the batch."""
    shadowed.serve(worker)

    served, shadow = worker.sent
    assert (served.model, shadow.model) == (0, 1)
    assert shadow.slices == served.slices
    assert len(shadowed.simulation.input_arena.arena) == 1
    shadowed.simulation.done(worker, shadow)
    assert shadowed.rows() == 4
    assert shadowed.pair.comparison is not None
    assert shadowed.pair.comparison.disagreeing == 0
    assert shadowed.simulation.is_clean()
    assert shadowed.lanes[1].counts["completed"] == shadowed.lanes[1].counts["requests"] == 0


def test_batch_keeps_the_hops_of_its_requests(shadowed: Shadowed, simulation: Simulation) -> None:
    """A remote candidate may be this server, and its limit of hops ends the loop."""
    served, candidate = simulation.start(0), simulation.start(1)
    simulation.submit_rows(0, 4, hops=3)
    simulation.loop.turn()
    simulation.done(served, served.sent[0])
    assert candidate.sent[0].hops == 3


def test_all_rows_of_a_large_request_run_in_small_batches(
    shadowed: Shadowed, worker: SimulatedWorker
) -> None:
    worker.play()
    shadowed.simulation.submit_rows(0, 200)
    shadowed.simulation.loop.run(S)

    shadows = [execute for execute in worker.sent if execute.model == 1]
    assert len(shadows) > 4 and max(execute.rows for execute in shadows) <= 64
    assert [execute.slices[0].first for execute in shadows][:3] == [0, 4, 12]
    assert shadowed.rows() == 200
    assert shadowed.simulation.is_clean()


def test_share_selects_requests(shadowed: Shadowed, worker: SimulatedWorker) -> None:
    """About half of 400 requests; the probability of fewer than 140 is below 1e-9."""
    worker.play()
    shadowed.share(0.5)
    for _ in range(400):
        shadowed.simulation.submit_rows(0, 1)
        shadowed.simulation.loop.run(5 * MS)
    assert 140 < shadowed.rows() < 260
    assert not shadowed.pair.dropped
    before = shadowed.rows()
    shadowed.share(0.0)
    for _ in range(20):
        shadowed.simulation.submit_rows(0, 1)
        shadowed.simulation.loop.run(5 * MS)
    assert shadowed.rows() == before
    assert shadowed.pair.state(shadowed.simulation.loop.now_ns)[0] == "paused"


def test_busy_worker_gets_no_shadow_batch(shadowed: Shadowed, worker: SimulatedWorker) -> None:
    """With another batch there or a request that waits, even if a credit is free."""
    shadowed.simulation.submit_rows(0, 64)
    shadowed.simulation.loop.turn()
    shadowed.simulation.submit_rows(0, 64)
    shadowed.simulation.loop.turn()
    assert len(worker.sent) == 2

    shadowed.simulation.done(worker, worker.sent[0])

    assert shadowed.shadow_batches(worker) == 0
    shadowed.simulation.done(worker, worker.sent[1])
    assert shadowed.shadow_batches(worker) == 1
    assert len(worker.in_flight) == 1, "one credit at most"


def test_worker_that_a_request_waits_for_gets_no_shadow_batch() -> None:
    """It waits for others to share its batch."""
    lanes = lane_of(0), lane_of(1), lane_of(2, linger_us=2000)
    with simulated(*lanes) as simulation:
        shadowed = Shadowed(simulation)
        worker = simulation.start()
        worker.play()
        simulation.submit_rows(0, 1)
        simulation.submit_rows(2, 1)
        simulation.loop.run(MS)
        assert [execute.model for execute in worker.sent] == [0]
        simulation.loop.run(3 * MS)
        assert [execute.model for execute in worker.sent] == [0, 2, 1]
        assert not worker.aborted and shadowed.pair.batches == 1


def test_shadow_batch_that_others_wait_for_is_cancelled_and_not_retried(
    shadowed: Shadowed, worker: SimulatedWorker
) -> None:
    shadowed.serve(worker)
    shadow = worker.sent[-1]
    shadowed.simulation.submit_rows(0, 1)
    shadowed.simulation.loop.turn()

    assert worker.aborted == [shadow.batch_id]
    failed = Failed(shadow.batch_id, "cancelled", "batch cancelled", None)
    shadowed.simulation.dispatcher.on_failed(worker, failed)
    assert shadowed.pair.dropped == {"cancelled": 4}
    shadowed.simulation.done(worker, worker.sent[-1])
    assert shadowed.shadow_batches(worker) == 2, "that of the next request"


def test_short_shadow_batch_is_not_cancelled(shadowed: Shadowed, worker: SimulatedWorker) -> None:
    worker.play()
    for _ in range(10):
        shadowed.simulation.submit_rows(0, 8)
        shadowed.simulation.loop.run(5 * MS)
    worker.is_playing = False
    count = shadowed.shadow_batches(worker)
    shadowed.simulation.submit_rows(0, 8)
    shadowed.simulation.loop.turn()
    shadowed.simulation.done(worker, worker.sent[-1])
    assert shadowed.shadow_batches(worker) == count + 1
    shadowed.simulation.submit_rows(0, 1)
    shadowed.simulation.loop.turn()
    assert not worker.aborted
    shadowed.simulation.loop.run(3 * MS)
    assert worker.aborted, "it takes longer than expected"


def test_worker_that_does_not_cancel_is_ended_for_those_that_wait(
    shadowed: Shadowed, worker: SimulatedWorker
) -> None:
    ended: list[object] = []
    shadowed.simulation.dispatcher.end_worker = ended.append
    shadowed.serve(worker)
    shadowed.simulation.loop.run(10 * CANCEL_TIMEOUT_NS)
    assert not worker.aborted and not ended, "nobody waits"
    shadowed.simulation.submit_rows(0, 1)
    shadowed.simulation.loop.run(CANCEL_TIMEOUT_NS + 5 * MS)
    assert worker.aborted and ended == [worker]


def test_full_arena_takes_the_leases_of_waiting_requests(
    shadowed: Shadowed, worker: SimulatedWorker
) -> None:
    """One that a batch reads keeps its lease."""
    simulation, arena = shadowed.simulation, shadowed.simulation.input_arena
    shadowed.serve(worker)
    _, caller = simulation.submit_rows(0, 4)
    simulation.loop.turn()
    simulation.done(worker, worker.sent[-1])
    assert len(caller.results) == 1
    assert len(arena.arena) == 2 and shadowed.runner.reclaim()
    assert len(arena.arena) == 1 and not shadowed.runner.reclaim()
    assert shadowed.pair.dropped == {"arena_full": 4}

    free = arena.arena.capacity_bytes - arena.arena.leased_bytes
    blocker = arena.arena.lease(free)
    assert blocker is not None
    arena.arena.give_back(blocker)


def test_lease_that_a_batch_reads_is_not_taken(shadowed: Shadowed, worker: SimulatedWorker) -> None:
    """Also of a request with further rows."""
    shadowed.serve(worker, 60)
    assert len(worker.in_flight) == len(shadowed.pair.queue) == 1
    assert not shadowed.runner.reclaim()
    assert len(shadowed.simulation.input_arena.arena) == 1


def test_new_request_takes_the_memory_of_a_waiting_one(simulation: Simulation) -> None:
    """The last free memory is not enough without the lease of the waiting one."""
    shadowed = Shadowed(simulation)
    worker = simulation.start()
    shadowed.serve(worker)
    simulation.submit_rows(0, 4)
    simulation.loop.turn()
    simulation.done(worker, worker.sent[-1])
    arena = simulation.input_arena.arena
    assert len(arena) == 2
    blocker = arena.lease(arena.capacity_bytes - arena.leased_bytes)
    assert blocker is not None
    simulation.submit_rows(0, 4)  # Asserts that it was admitted at once.
    assert shadowed.pair.dropped == {"arena_full": 4}
    arena.give_back(blocker)


def test_waiting_requests_are_bounded_and_expire(
    shadowed: Shadowed, simulation: Simulation
) -> None:
    served = simulation.start(0)
    candidate = simulation.start(1)
    for _ in range(REQUESTS_MAX + 5):
        shadowed.serve(served)
    assert len(candidate.sent) == 1
    assert len(simulation.input_arena.arena) == REQUESTS_MAX
    assert shadowed.pair.dropped == {"busy": 5 * 4}
    simulation.loop.run(QUEUED_NS + MS)
    assert shadowed.pair.dropped["expired"] == (REQUESTS_MAX - 1) * 4
    assert len(simulation.input_arena.arena) == 1


def test_bytes_are_bounded(simulation: Simulation) -> None:
    shadowed = Shadowed(simulation, bytes=100)
    worker = simulation.start()
    shadowed.serve(worker, 64)
    assert shadowed.pair.dropped == {"busy": 64}


def test_arenas_are_left_to_others(shadowed: Shadowed, worker: SimulatedWorker) -> None:
    """At most half of each is in use after a shadow batch is added."""
    input_arena = shadowed.simulation.input_arena.arena
    half = input_arena.lease(input_arena.capacity_bytes // 2)
    assert half is not None
    shadowed.serve(worker)
    assert shadowed.pair.dropped == {"arena_full": 4}
    input_arena.give_back(half)
    half = worker.output_arena.lease(worker.output_arena.capacity_bytes // 2)
    assert half is not None
    shadowed.serve(worker)
    assert shadowed.shadow_batches(worker) == 0 and len(shadowed.pair.queue) == 1
    worker.output_arena.give_back(half)
    shadowed.simulation.dispatcher.pump()
    assert shadowed.shadow_batches(worker) == 1


def test_comparison_of_a_batch_is_short() -> None:
    """A row has 1,024 labels, which is more than the work of one comparison."""
    x = (TensorSpec("x", "x", ColumnType("int64", (1024,)), (1024,)),)
    lanes = [lane_of(key, contract=Contract(x, x)) for key in (0, 1)]
    with simulated(*lanes) as simulation:
        shadowed = Shadowed(simulation)
        worker = simulation.start()
        values = np.arange(4 * 1024)
        tensors = [memoryview(values).cast("B")]
        caller = RecordingCaller()
        arrived_ns = simulation.loop.now_ns
        simulation.submit(Request(lanes[0], caller, 4, tensors, arrived_ns=arrived_ns))
        simulation.loop.turn()
        worker.play()
        simulation.loop.run(S)
        shadows = [execute.rows for execute in worker.sent if execute.model == 1]
        assert shadows == [1, 1, 1, 1] and shadowed.rows() == 4


def test_pairs_take_turns() -> None:
    """Two candidates have requests all the time."""
    with simulated(lane_of(0), lane_of(1), lane_of(2)) as simulation:
        shadowed = Shadowed(simulation)
        lanes = simulation.lanes
        shadowed.runner.set_pairs({(lanes[0], lanes[1]): 1.0, (lanes[0], lanes[2]): 1.0})
        worker = simulation.start()
        worker.play()
        for _ in range(3):
            simulation.submit_rows(0, 60)
        simulation.loop.run(S)
        ran = [execute.model for execute in worker.sent if execute.model]
        assert ran[:6] == [1, 2, 1, 2, 1, 2]
        assert [pair.comparison and pair.comparison.rows for pair in shadowed.runner.pairs] == [
            180,
            180,
        ]


def test_results_that_cannot_be_compared_suspend_the_pair(
    shadowed: Shadowed, worker: SimulatedWorker
) -> None:
    """Those of the next requests are delivered nevertheless."""
    shadowed.serve(worker)
    shadowed.simulation.done(worker, worker.sent[-1])
    comparison = shadowed.pair.comparison
    assert comparison is not None
    comparison.collect(4, Body(b"", 4, 0), Body(b"", 4, 0))
    shadowed.simulation.loop.run(COMPARE_NS + MS)
    assert shadowed.pair.state(shadowed.simulation.loop.now_ns) == ("suspended", INTERNAL)
    shadowed.simulation.loop.run(10 * S)
    with mock.patch.object(shadowed.pair, "_admit", side_effect=ValueError):
        shadowed.serve(worker)
    assert shadowed.pair.state(shadowed.simulation.loop.now_ns) == ("suspended", INTERNAL)


def test_processes_share_the_time_of_the_workers(simulation: Simulation) -> None:
    runner = ShadowRunner(
        simulation.dispatcher,
        simulation.input_arena,
        simulation.lanes,
        ShadowConfig(time_percent=8),
        processes=4,
    )
    assert runner._budget_of(simulation.start()).share == 0.02
    runner.configure(ShadowConfig(time_percent=40))
    assert runner._budget_of(simulation.workers[0]).share == 0.1


def test_time_is_bounded(simulation: Simulation) -> None:
    """At most a tenth of the worker's time, after the initial burst."""
    shadowed = Shadowed(simulation, time_percent=10)
    worker = simulation.start()
    worker.cost = lambda execute: MS
    worker.play()
    for _ in range(2000):
        simulation.submit_rows(0, 1)
        simulation.loop.run(4 * MS)
    assert 0.08 * 8000 < shadowed.shadow_batches(worker) < 0.1 * 8000 + 20
    assert shadowed.pair.dropped["busy"] > 1000


def test_time_of_a_worker_is_that_from_the_batch_to_its_answer(simulation: Simulation) -> None:
    """Messages and copies take time too: the run time that the worker reports is a part of it."""
    shadowed = Shadowed(simulation, time_percent=10)
    worker = simulation.start()
    shadowed.serve(worker)
    shadow = worker.sent[-1]
    simulation.loop.run(50 * MS)
    worker.run(shadow, 1000)

    now = simulation.loop.now_ns
    assert shadowed.runner._budget_of(worker).ready_ns(now) - now >= 300 * MS
    assert shadowed.lanes[1].costs[worker.index].predict_ns(4) == 1000


def test_time_of_a_late_comparison_is_that_of_the_loop(
    shadowed: Shadowed, worker: SimulatedWorker
) -> None:
    """The results are few, so that `pump` compares them once they are old."""
    shadowed.serve(worker)
    shadowed.simulation.done(worker, worker.sent[-1])
    comparison, loop = shadowed.pair.comparison, shadowed.simulation.loop
    assert comparison is not None

    def compare() -> None:
        loop.now_ns += 30 * MS

    with mock.patch.object(comparison, "compare", compare):
        loop.run(COMPARE_NS + MS)
    due_ns = loop.now_ns - 30 * MS
    assert shadowed.runner._loop_budget.ready_ns(due_ns) - due_ns >= 15 * MS


def test_request_above_the_limit_of_time_is_dropped_before_anything_else(
    simulation: Simulation,
) -> None:
    """Nothing but the clock is read for each: at a share of 1, these are most requests."""
    shadowed = Shadowed(simulation, time_percent=1)
    worker = simulation.start()
    worker.cost = lambda execute: 20 * MS
    worker.play()
    for _ in range(2):
        simulation.submit_rows(0, 4)
        simulation.loop.run(50 * MS)
    assert shadowed.shadow_batches(worker) == 1
    assert shadowed.pair.dropped == {"busy": 4}
    with mock.patch.object(ShadowPair, "match", side_effect=AssertionError):
        simulation.submit_rows(0, 4)
        simulation.loop.run(50 * MS)
    assert shadowed.pair.dropped == {"busy": 8} and not shadowed.pair.pauses.reason

    shadowed.runner.configure(ShadowConfig(time_percent=100))
    simulation.submit_rows(0, 4)
    simulation.loop.run(50 * MS)
    assert shadowed.shadow_batches(worker) == 2, "a changed limit applies at once"


def test_failure_suspends_the_pair(shadowed: Shadowed, worker: SimulatedWorker) -> None:
    shadowed.serve(worker)
    failed = Failed(worker.sent[-1].batch_id, "execution_failed", "no such index", None)
    shadowed.simulation.dispatcher.on_failed(worker, failed)

    shadowed.serve(worker)
    state, reason = shadowed.pair.state(shadowed.simulation.loop.now_ns)
    assert (state, shadowed.shadow_batches(worker)) == ("suspended", 1)
    assert "no such index" in reason
    assert shadowed.pair.dropped == {"failed": 4, "suspended": 4}
    assert not shadowed.lanes[1].counts, "no error of the candidate's own clients"
    shadowed.simulation.loop.run(3 * S)
    shadowed.serve(worker)
    assert shadowed.shadow_batches(worker) == 2


def test_death_counts_against_the_candidate_only(
    shadowed: Shadowed, worker: SimulatedWorker
) -> None:
    """A request that waited behind the shadow batch runs on another worker."""
    other = shadowed.simulation.start()
    shadowed.lanes[1].workers.pop(other.incarnation)
    shadowed.serve(worker)
    other_batch = [shadowed.simulation.submit_rows(0, 64) for _ in range(2)]
    shadowed.simulation.loop.turn()
    behind = [b for b in worker.in_flight.values() if b.lane is shadowed.lanes[0]]
    assert behind and other_batch
    worker.begin(next(each for each in worker.sent if each.model == 1))
    shadowed.simulation.lose(worker)

    other.play()
    shadowed.simulation.loop.run(S)
    assert all(len(caller.results) == 1 for _, caller in other_batch)
    assert shadowed.pair.dropped["worker_lost"] == 4
    now = shadowed.simulation.loop.now_ns
    assert shadowed.pair.pauses.until_ns - now > 30 * S
    assert not any(request.kills for request, _ in other_batch)


def test_lost_worker_with_a_waiting_shadow_batch_does_not_suspend(
    shadowed: Shadowed, worker: SimulatedWorker
) -> None:
    shadowed.serve(worker)
    shadowed.simulation.lose(worker)
    assert shadowed.pair.state(shadowed.simulation.loop.now_ns)[0] == "waiting"
    assert not shadowed.pair.pauses.reason
    assert shadowed.simulation.is_clean()


def test_other_contract_is_refused(simulation: Simulation) -> None:
    x = (TensorSpec("x", "x", ColumnType("int64"), ()),)
    other = Contract(x, (TensorSpec("y", "y", ColumnType("int32"), ()),))
    simulation.lanes[1].set_contract(other)
    shadowed = Shadowed(simulation)
    worker = simulation.start()
    shadowed.serve(worker)
    assert shadowed.shadow_batches(worker) == 0
    state, reason = shadowed.pair.state(simulation.loop.now_ns)
    assert state == "not comparable" and reason == "output `y` is int64, and int32 of the candidate"


def test_removed_pair_keeps_nothing(shadowed: Shadowed, worker: SimulatedWorker) -> None:
    """The batch that runs may finish."""
    shadowed.serve(worker)
    shadow = worker.sent[-1]
    shadowed.serve(worker)
    shadowed.runner.set_pairs({})
    assert len(shadowed.simulation.input_arena.arena) == 1
    shadowed.simulation.done(worker, shadow)
    assert shadowed.simulation.is_clean()
    shadowed.serve(worker)
    assert shadowed.shadow_batches(worker) == 1


def test_drain_cancels_and_drops(shadowed: Shadowed, worker: SimulatedWorker) -> None:
    shadowed.serve(worker)
    shadow = worker.sent[-1]
    shadowed.serve(worker)
    worker.aborted.clear()
    shadowed.runner.drain()
    assert worker.aborted == [shadow.batch_id]
    assert shadowed.pair.dropped == {"draining": 4}
    shadowed.serve(worker)
    assert shadowed.pair.dropped == {"draining": 8}


def test_withdrawn_request_of_the_candidate_does_not_cancel_a_shadow_batch(
    shadowed: Shadowed, worker: SimulatedWorker
) -> None:
    shadowed.serve(worker)
    request, _ = shadowed.simulation.submit_rows(1, 1)
    shadowed.simulation.loop.turn()
    worker.aborted.clear()
    shadowed.simulation.dispatcher.withdraw(request)
    assert worker.sent[-2].batch_id not in worker.aborted


# -- The delay of the served version, in virtual time


def latencies(share: float, run_ns: int, requests: int = 2000) -> list[int]:
    """Latency of each request at half load with random arrivals; the candidate costs as much."""
    with simulated(lane_of(0), lane_of(1)) as simulation:
        shadowed = Shadowed(simulation, time_percent=5.0)
        shadowed.share(share)
        worker = simulation.start()
        worker.cost = lambda execute: run_ns // 2 + execute.rows * run_ns // 16
        worker.cancel_ns = MS // 5
        worker.play()
        gaps, found = random.Random(7), []
        arrived: list[tuple[int, RecordingCaller]] = []
        for _ in range(requests):
            arrived.append((simulation.loop.now_ns, simulation.submit_rows(0, 8)[1]))
            until_ns = simulation.loop.now_ns + int(gaps.expovariate(0.5 / run_ns))
            while simulation.loop.step(until_ns):
                found += [simulation.loop.now_ns - at for at, each in arrived if each.results]
                arrived = [(at, each) for at, each in arrived if not each.results]
        assert not share or (shadowed.rows() > 8 * 100 and shadowed.shadow_batches(worker))
        return found


@pytest.mark.long
@pytest.mark.parametrize("run_ns", [MS // 10, MS, 20 * MS])
def test_99th_percentile_of_the_served_version_hardly_moves(run_ns: int) -> None:
    """At half load, with a share of 1; without the rules, it is 1.4 times as high."""
    with_shadow, without = (latencies(share, run_ns) for share in (1.0, 0.0))
    ratio = np.percentile(with_shadow, 99) / np.percentile(without, 99)
    assert ratio < 1.05


DEPENDENT, APPROXIMATE = RowRelation("dependent", ""), RowRelation("approximate", "")


@pytest.mark.parametrize("relation", [DEPENDENT, APPROXIMATE])
@pytest.mark.parametrize("which", [0, 1])
def test_requests_of_models_with_related_rows_run_as_they_were_served(
    relation: RowRelation, which: int
) -> None:
    """Each of both versions may be the one; otherwise batches begin with 4 rows."""
    lanes = [lane_of(key, rows_max=64, pad_to=(64,)) for key in (0, 1)]
    lanes[which] = lane_of(which, rows_max=64, relation=relation)
    with simulated(*lanes) as simulation:
        shadowed, worker = Shadowed(simulation), simulation.start()
        for rows in (40, 7):
            shadowed.serve(worker, rows)
            simulation.loop.run(MS)
            (part,) = worker.sent[-1].slices
            assert (worker.sent[-1].model, part.rows, part.request_rows) == (1, rows, rows)
            simulation.done(worker, worker.sent[-1])
        assert shadowed.rows() == 47 and not shadowed.pair.dropped
        assert simulation.is_clean()


def test_requests_that_a_candidate_cannot_run_as_a_whole_are_dropped() -> None:
    with simulated(lane_of(0), lane_of(1, rows_max=8, relation=DEPENDENT)) as simulation:
        shadowed, worker = Shadowed(simulation), simulation.start()
        shadowed.serve(worker, 9)
        request, _ = simulation.submit_rows(0, 3)
        request.is_part = True
        simulation.loop.turn()
        simulation.done(worker, worker.sent[-1])
        assert shadowed.shadow_batches(worker) == 0
        assert shadowed.pair.dropped == {"not_whole": 12}
        assert simulation.is_clean()


def test_requests_too_large_to_compare_at_once_are_dropped() -> None:
    """Their comparison would delay the event loop."""
    with simulated(lane_of(0, rows_max=1 << 20), lane_of(1, rows_max=1 << 20)) as simulation:
        simulation.lanes[1].weaken_relation(DEPENDENT)
        shadowed, worker = Shadowed(simulation), simulation.start()
        shadowed.serve(worker, WHOLE_WORK_MAX + 1)
        assert shadowed.pair.dropped == {"too_large": WHOLE_WORK_MAX + 1}


def test_request_that_was_cut_before_the_rows_were_measured_is_dropped(
    shadowed: Shadowed, worker: SimulatedWorker
) -> None:
    shadowed.serve(worker, 40)
    shadowed.lanes[1].weaken_relation(DEPENDENT)
    shadowed.simulation.done(worker, worker.sent[-1])
    shadowed.simulation.loop.run(S)
    assert shadowed.pair.dropped == {"not_whole": 36}
    assert shadowed.simulation.is_clean()
