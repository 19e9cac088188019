"""The rate of worker deaths that isolates a model, and which deaths count."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.lanes import lane_of
from support.simulation import Simulation

from iskander.config.schema import WorkersConfig
from iskander.foundation.machine_memory import oom_kills
from iskander.gateway.scheduling.worker_slot import InFlightBatch
from iskander.gateway.supervision.lifecycle import Event, State
from iskander.gateway.supervision.loading.quarantine import (
    ISOLATED_MAX,
    QUARANTINE_MAX_S,
    DeathRate,
    Quarantines,
)
from iskander.gateway.supervision.worker import ProcessExit, SlotPlan, Worker
from iskander.interprocess.control.messages import PROTOCOL_VERSION, Hello
from iskander.interprocess.memory.arena import Lease
from iskander.interprocess.memory.heartbeat import Heartbeat

WINDOW_NS = 100


def test_deaths_within_a_window_reach_the_limit_and_count_once() -> None:
    rate = DeathRate(3, WINDOW_NS)
    assert [rate.note(at_ns) for at_ns in (0, 50, 100, 110, 120, 130)] == [
        False, False, True, False, False, True,
    ]  # fmt: skip


def test_deaths_far_apart_never_reach_the_limit() -> None:
    rate = DeathRate(3, WINDOW_NS)
    assert not any(rate.note(51 * n) for n in range(100))


def test_one_death_is_enough_within_a_window_after_a_quarantine() -> None:
    rate = DeathRate(3, WINDOW_NS)
    assert [rate.note(at_ns) for at_ns in (0, 1, 2)] == [False, False, True]
    rate.begin_quarantine(60.0)
    rate.released_ns = 200
    assert rate.note(250)
    rate.begin_quarantine(60.0)
    rate.released_ns = 300
    assert not rate.note(300 + WINDOW_NS + 1)


def test_deaths_by_requests_of_one_party_count_once() -> None:
    """That party is slowed; deaths of unknown parties count one by one."""
    rate = DeathRate(3, WINDOW_NS)
    assert not any(rate.note(at_ns, "a") for at_ns in range(10))
    assert not rate.note(10, "b")
    assert not rate.note(11, "a")
    assert rate.note(12, "c")
    assert [rate.note(at_ns) for at_ns in (20, 21, 22)] == [False, False, True]


def test_new_limit_counts_earlier_deaths() -> None:
    rate = DeathRate(3, WINDOW_NS)
    assert not rate.note(0)
    rate.set_limit(2, WINDOW_NS)
    assert rate.note(1)
    rate.set_limit(4, 10 * WINDOW_NS)
    assert [rate.note(at_ns) for at_ns in (2, 5 * WINDOW_NS, 6 * WINDOW_NS, 9 * WINDOW_NS)] == [
        False, False, False, True,
    ]  # fmt: skip


def test_quarantine_doubles_up_to_an_hour() -> None:
    rate = DeathRate(3, WINDOW_NS)
    assert [rate.begin_quarantine(60.0) for _ in range(3)] == [60.0, 120.0, 240.0]
    for _ in range(100):
        longest = rate.begin_quarantine(60.0)
    assert longest == QUARANTINE_MAX_S


def test_isolated_model_returns_after_a_quiet_time_that_doubles() -> None:
    """A model that leaves the shared workers again and again stays away for longer."""
    rate = DeathRate(3, WINDOW_NS)
    rate.last_ns = 1000
    for isolations, quiet_ns in ((1, WINDOW_NS), (2, 2 * WINDOW_NS), (3, 4 * WINDOW_NS)):
        rate.isolations = isolations
        assert not rate.may_return(1000 + quiet_ns)
        assert rate.may_return(1001 + quiet_ns)


@pytest.mark.parametrize(
    ("code", "was_killed", "was_hung", "was_out_of_memory", "is_fault"),
    [
        (-signal.SIGSEGV, False, False, False, True),
        (1, False, False, False, True),
        (0, False, False, False, True),
        (None, False, False, False, True),
        (-signal.SIGKILL, False, False, False, False),
        (-signal.SIGKILL, False, False, True, True),
        (-signal.SIGKILL, True, False, True, False),
        (-signal.SIGKILL, True, True, False, True),
        (-signal.SIGTERM, False, False, False, False),
        (-signal.SIGINT, False, False, False, False),
    ],
)
def test_exit_is_a_model_fault_or_not(
    code: int | None, was_killed: bool, was_hung: bool, was_out_of_memory: bool, is_fault: bool
) -> None:
    process_exit = ProcessExit(code, was_killed)
    assert (
        process_exit.is_model_fault(was_hung=was_hung, was_out_of_memory=was_out_of_memory)
        == is_fault
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [("nr_free_pages 1\noom_kill 7\n", 7), ("oom_kill", 0), ("oom_kill x", 0), ("", 0)],
)
def test_oom_kills_are_read_from_vmstat(tmp_path: Path, text: str, count: int) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text(text)
    assert oom_kills(counters) == count
    assert oom_kills(tmp_path / "missing") == 0


def test_request_whose_run_begins_a_quarantine_is_not_retried() -> None:
    """Without `workers.spawn`, the death counts before the requests of the worker come back."""
    with Simulation(lane_of(0, rows_max=8)) as gateway:
        lost, other = gateway.start(), gateway.start()
        _, caller = gateway.submit_rows(0, 8)
        gateway.loop.turn()
        lost.begin(lost.sent[0])

        async def lose() -> None:
            settings = WorkersConfig(spawn=False, model_deaths=1)
            workers: list[Worker] = [lost, other]
            reject, unused = gateway.dispatcher.reject_queued, Mock()
            quarantines = Quarantines(
                gateway.lanes, workers, settings, True, unused, reject, unused, unused, unused
            )
            quarantines.record_running_model(lost)
            gateway.lose(lost)
            quarantines.close()

        asyncio.run(lose())

        assert caller.codes == ["model_quarantined"]
        assert other.sent == [] and gateway.is_clean()


class Isolation:
    """Quarantines of one lane over real worker slots, with a worker that runs a batch of it."""

    def __init__(self, gateway: Simulation, *, is_first: bool = True, spawn: bool = True) -> None:
        self.gateway = gateway
        self.lane = gateway.lanes[0]
        self.workers: list[Worker] = []
        self.events: list[tuple[Worker, Event]] = []
        self.released = Mock()
        self.loader = Mock()
        self.quarantines = Quarantines(
            gateway.lanes,
            self.workers,
            WorkersConfig(spawn=spawn),
            is_first,
            self.loader,
            gateway.dispatcher.reject_queued,
            lambda worker, event: self.events.append((worker, event)),
            Mock(),
            self.released,
        )

    def worker(self, index: int) -> Worker:
        """A shared worker that runs a batch of the lane."""
        worker = Worker(SlotPlan(index, 0, (index,), None))
        worker.child = Mock()
        running = InFlightBatch(self.lane, [], Lease(0, 0, 0), 1, 0, 0)
        worker.in_flight[7] = running
        worker.last_beat = lambda: Heartbeat(0, 7)  # type: ignore[method-assign]
        self.workers.append(worker)
        return worker


CRASH = ProcessExit(-signal.SIGFPE, was_killed=False)
KILLED = ProcessExit(-signal.SIGKILL, was_killed=False)


def isolation_of(function: Callable[[Isolation], None], **options: bool) -> None:
    """Run a test's function in an event loop."""

    async def run() -> None:
        isolation = Isolation(gateway, **options)
        try:
            function(isolation)
        finally:
            isolation.quarantines.close()

    with Simulation(lane_of(0, rows_max=8)) as gateway:
        asyncio.run(run())


def test_first_death_isolates_the_model_and_is_no_crash_of_the_worker() -> None:
    """Requests are held until the exit is known; then the model has a worker of its own."""

    def check(isolation: Isolation) -> None:
        worker = isolation.worker(0)
        isolation.quarantines.record_running_model(worker)
        assert isolation.lane.is_held
        assert worker.ended_in_batch
        assert not isolation.events
        isolation.quarantines.on_exit(worker, CRASH)
        assert isolation.lane.is_isolated
        assert not isolation.lane.is_held
        isolation.released.assert_called_once()
        ((isolated, event),) = isolation.events
        assert (event, isolated.plan.pool) == (Event.SPAWN_DUE, isolation.lane.title)
        isolation.loader.unload.assert_called_once_with(isolation.lane)

    isolation_of(check)


def test_kill_by_an_operator_ends_the_hold_and_isolates_nothing() -> None:
    """It counts for a crash loop of the worker, which the batch does not explain."""

    def check(isolation: Isolation) -> None:
        worker = isolation.worker(0)
        isolation.quarantines.record_running_model(worker)
        isolation.quarantines.on_exit(worker, KILLED)
        assert not isolation.lane.is_isolated
        assert not isolation.lane.is_held
        assert worker.failures == 1
        isolation.released.assert_called_once()

    isolation_of(check)


def test_other_gateway_processes_hold_until_the_isolated_worker_attaches() -> None:
    """Only the first process starts it."""

    def check(isolation: Isolation) -> None:
        worker = isolation.worker(0)
        isolation.quarantines.record_running_model(worker)
        isolation.quarantines.on_exit(worker, CRASH)
        assert isolation.lane.is_held
        assert not isolation.events
        hello = Hello(PROTOCOL_VERSION, "", 0, 5, (0,), isolation.lane.title)
        isolation.quarantines.follow_isolation(hello)
        assert isolation.lane.is_isolated
        assert not isolation.lane.is_held

    isolation_of(check, is_first=False)


def test_nothing_is_held_without_a_worker_to_isolate_in() -> None:
    """A service manager starts the workers: the deaths count for a quarantine."""

    def check(isolation: Isolation) -> None:
        for _ in range(WorkersConfig().model_deaths):
            assert isolation.lane.quarantine is None
            worker = isolation.worker(0)
            isolation.quarantines.record_running_model(worker)
            assert not isolation.lane.is_held
            isolation.quarantines.on_exit(worker, CRASH)
        assert isolation.lane.quarantine is not None

    isolation_of(check, spawn=False)


def test_model_beyond_the_limit_of_isolated_ones_is_rejected_at_its_first_death() -> None:
    """It would end the worker of other models again."""

    def check(isolation: Isolation) -> None:
        isolation.quarantines._isolated.update({-n: Mock() for n in range(1, ISOLATED_MAX + 1)})
        worker = isolation.worker(0)
        isolation.quarantines.record_running_model(worker)
        isolation.quarantines.on_exit(worker, CRASH)
        assert not isolation.lane.is_isolated
        assert isolation.lane.quarantine is not None

    isolation_of(check)


def isolated_worker(isolation: Isolation) -> Worker:
    """Isolates the lane, and returns its ready worker."""
    isolation.lane.quorum = 2
    worker = isolation.worker(0)
    isolation.quarantines.record_running_model(worker)
    isolation.quarantines.on_exit(worker, CRASH)
    isolated = isolation.workers[-1]
    isolated.state = State.READY
    assert (isolation.lane.model.pool, isolation.lane.quorum) == (isolation.lane.title, 1)
    return isolated


def test_model_that_its_own_worker_cannot_load_returns_at_once() -> None:
    """Such as a GPU without memory for it; it is not isolated again."""

    def check(isolation: Isolation) -> None:
        isolated = isolated_worker(isolation)
        isolated.load_errors[isolation.lane.model.key] = "no memory"
        isolation.quarantines._tick()
        assert not isolation.lane.is_isolated
        assert (isolation.lane.model.pool, isolation.lane.quorum) == ("", 2)
        again = isolation.worker(1)
        isolation.quarantines.record_running_model(again)
        isolation.quarantines.on_exit(again, CRASH)
        assert not isolation.lane.is_isolated
        assert isolation.lane.quarantine is not None

    isolation_of(check)


def test_model_that_ends_a_shared_worker_while_its_own_stops_gets_another() -> None:
    def check(isolation: Isolation) -> None:
        isolated = isolated_worker(isolation)
        isolation.quarantines._return_to_shared(isolation.lane)
        isolated.state = State.STOPPING
        again = isolation.worker(1)
        isolation.quarantines.record_running_model(again)
        isolation.quarantines.on_exit(again, CRASH)
        assert isolation.lane.is_isolated
        isolated.state = State.STOPPED
        isolation.quarantines._tick()
        assert isolation.lane.is_isolated
        another, event = isolation.events[-1]
        assert another is not isolated
        assert (event, another.plan.pool) == (Event.SPAWN_DUE, isolation.lane.title)
        assert isolated not in isolation.workers

    isolation_of(check)
