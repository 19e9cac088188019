"""Watchdog, recycling, timeout of lanes without workers, and readiness."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from support.lanes import lane_of
from support.loads import RecordingChannel
from support.simulation import Simulation

from iskander.config.models import LaneConfig
from iskander.config.schema import Config, WorkersConfig
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.gateway.scheduling.lanes.cost import HANG_SAMPLES, CostModel
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.supervision import recycling as recycling_module
from iskander.gateway.supervision.lifecycle import Event, State
from iskander.gateway.supervision.loading.file_freshness import FileFreshness
from iskander.gateway.supervision.loading.model_loader import ModelLoader
from iskander.gateway.supervision.no_worker_timeout import NoWorkerTimeout
from iskander.gateway.supervision.readiness import reason_of
from iskander.gateway.supervision.recycling import SERVICE_MIN_NS, Recycling
from iskander.gateway.supervision.supervisor import Supervisor
from iskander.gateway.supervision.watchdog import LIMIT_MIN_NS, Watchdog
from iskander.gateway.supervision.worker import NEVER, ProcessExit, SlotPlan, Worker
from iskander.interprocess.control.messages import ModelSpec, Unload
from iskander.interprocess.memory.heartbeat import Heartbeat

HANG_NS = 1000
"""Far below the monotonic clock, because the tests use artificial times."""


def spec() -> ModelSpec:
    return ModelSpec(0, "m", "1", "onnx", "", (), 0, 0, "level3", False, True, 64, 256, "")


def lane(quorum: int = 1) -> Lane:
    return Lane(spec(), LaneConfig(), quorum)


class ScriptedWorker(Worker):
    """A worker whose heartbeat and batches the test sets."""

    beat_now = Heartbeat(0, 0)

    def last_beat(self) -> Heartbeat:
        return self.beat_now

    def set_in_flight(self, *sent_at_ns: int) -> None:
        flights: Any = {n: SimpleNamespace(sent_ns=ns) for n, ns in enumerate(sent_at_ns, 1)}
        self.in_flight = flights


def workers(count: int = 2, state: State = State.READY) -> list[ScriptedWorker]:
    pool = [ScriptedWorker(SlotPlan(index, 0, (0,), None)) for index in range(count)]
    for worker in pool:
        worker.state = state
        worker.incarnation = worker.index + 1
    return pool


def set_serving(target: Lane, pool: list[ScriptedWorker]) -> None:
    target.workers = {worker.incarnation: worker for worker in pool}


class WatchdogHarness:
    """A watchdog that started at time 0, with the hangs that it reported."""

    def __init__(self, pool: list[ScriptedWorker]) -> None:
        self.hung: list[tuple[int, int]] = []
        self.watchdog = Watchdog(pool, HANG_NS, self._on_hung)
        self.watchdog._since_ns = 0

    def _on_hung(self, worker: Worker, silent_ns: int) -> None:
        self.hung.append((worker.index, silent_ns))


def test_hang_is_reported_at_its_limit_and_not_before() -> None:
    pool = workers()
    harness = WatchdogHarness(pool)
    pool[1].set_in_flight(100)
    assert harness.watchdog.check(100 + HANG_NS - 1) == 100 + HANG_NS
    assert harness.hung == []
    harness.watchdog.check(100 + HANG_NS)
    assert harness.hung == [(1, HANG_NS)]


def test_new_hang_limit_applies_to_a_running_batch() -> None:
    pool = workers()
    harness = WatchdogHarness(pool)
    pool[0].set_in_flight(100)
    harness.watchdog.configure(2 * HANG_NS, 0.0)
    harness.watchdog.check(100 + HANG_NS)
    assert harness.hung == []
    harness.watchdog.configure(HANG_NS // 2, 0.0)
    harness.watchdog.check(100 + HANG_NS)
    assert harness.hung == [(0, HANG_NS)]


def test_lower_hang_limit_does_not_wait_for_the_check_of_the_old_one() -> None:
    async def run() -> None:
        pool, reported = workers(1), asyncio.Event()
        watchdog = Watchdog(pool, 3600 * NS_PER_S, lambda *_: reported.set())
        watchdog.start()
        pool[0].set_in_flight(now_ns())
        watchdog.configure(NS_PER_S // 20, 0.0)
        async with asyncio.timeout(20.0):
            await reported.wait()
        watchdog.close()

    asyncio.run(run())


def test_hang_is_reported_once_for_each_process() -> None:
    pool = workers()
    harness = WatchdogHarness(pool)
    pool[0].set_in_flight(100)
    for at_ns in (5000, 5001, 9000):
        assert harness.watchdog.check(at_ns) == at_ns + HANG_NS
    assert harness.hung == [(0, 4900)]


def test_idle_worker_is_not_reported() -> None:
    harness = WatchdogHarness(workers())
    assert harness.watchdog.check(10**9) == 10**9 + HANG_NS
    assert harness.hung == []


@pytest.mark.parametrize(
    ("beat_ns", "sent_ns", "due_ns"),
    [(0, (500,), 1500), (700, (500,), 1700), (700, (900, 950), 1900), (700, (300, 999), 1700)],
)
def test_silence_begins_at_the_last_heartbeat_or_the_oldest_batch(
    beat_ns: int, sent_ns: tuple[int, ...], due_ns: int
) -> None:
    """Idle time before a batch does not count."""
    pool = workers(1)
    harness = WatchdogHarness(pool)
    pool[0].beat_now = Heartbeat(beat_ns, 1)
    pool[0].set_in_flight(*sent_ns)
    assert harness.watchdog.check(1000) == due_ns
    harness.watchdog.check(due_ns - 1)
    assert harness.hung == []
    harness.watchdog.check(due_ns)
    assert harness.hung == [(0, HANG_NS)]


def test_next_check_is_at_the_earliest_limit() -> None:
    pool = workers(3)
    harness = WatchdogHarness(pool)
    pool[0].set_in_flight(900)
    pool[2].set_in_flight(400)
    assert harness.watchdog.check(1000) == 1400


def test_paused_gateway_reports_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that is late by more than a second restarts all limits."""
    clock = [10**10]
    monkeypatch.setattr("iskander.gateway.supervision.watchdog.now_ns", lambda: clock[0])

    async def run() -> None:
        pool = workers(1)
        harness = WatchdogHarness(pool)
        pool[0].set_in_flight(clock[0])
        harness.watchdog.start()
        clock[0] += 60 * 10**9
        harness.watchdog._tick()
        assert harness.hung == []
        clock[0] += HANG_NS
        harness.watchdog._tick()
        assert harness.hung == [(0, HANG_NS)]
        harness.watchdog.close()

    asyncio.run(run())


class LaneWithCost:
    """A lane whose batches of one row take a millisecond."""

    def __init__(self, runs: int = 100) -> None:
        self.cost = CostModel()
        for _ in range(runs):
            self.cost.observe(1, 10**6)

    def cost_of(self, worker: Worker) -> CostModel:
        return self.cost


def set_running(lane: object, worker: ScriptedWorker) -> None:
    flight: Any = SimpleNamespace(sent_ns=0, lane=lane, run_rows=1)
    worker.in_flight = {1: flight}


@pytest.mark.parametrize(
    ("factor", "runs", "is_loading", "limit_ns"),
    [
        (0.0, 100, False, 30 * 10**9),
        (20.0, 100, False, LIMIT_MIN_NS),
        (5000.0, 100, False, 5 * 10**9),
        (10**6, 100, False, 30 * 10**9),
        (20.0, HANG_SAMPLES - 1, False, 30 * 10**9),
        (20.0, 100, True, 30 * 10**9),
    ],
    ids=["off", "minimum", "factor", "maximum", "unknown", "loading"],
)
def test_hang_limit_follows_the_cost_model(
    factor: float, runs: int, is_loading: bool, limit_ns: int
) -> None:
    (worker,) = pool = workers(1)
    hung: list[int] = []
    watchdog = Watchdog(
        pool, 30 * 10**9, lambda worker, silent_ns: hung.append(silent_ns), factor=factor
    )
    watchdog._since_ns = 0
    set_running(LaneWithCost(runs), worker)
    worker.loading_key = 7 if is_loading else None
    slack_ns = limit_ns // 50  # The cost model is accurate to a few thousandths.
    watchdog.check(limit_ns - slack_ns)
    assert hung == []
    watchdog.check(limit_ns + slack_ns)
    assert len(hung) == 1


def test_hang_limit_before_the_first_run_follows_the_queued_batch() -> None:
    (worker,) = pool = workers(1)
    hung: list[int] = []
    watchdog = Watchdog(
        pool, 30 * 10**9, lambda worker, silent_ns: hung.append(silent_ns), factor=20.0
    )
    watchdog._since_ns = 0
    set_running(LaneWithCost(), worker)
    worker.beat_now = Heartbeat(1, 0)
    watchdog.check(LIMIT_MIN_NS + 1)
    assert len(hung) == 1


class RecyclingHarness:
    """Recycling with limits, and the workers that were due."""

    def __init__(self, pool: list[ScriptedWorker], **limits: int) -> None:
        self.due: list[int] = []
        self.recycling = Recycling(pool, WorkersConfig(**limits), self._on_due)
        for worker in pool:
            self.recycling.on_open(worker)

    def _on_due(self, worker: Worker) -> None:
        self.due.append(worker.index)


def test_worker_is_recycled_after_its_batch_limit() -> None:
    """Batches count from the start of the process, not of the slot."""
    pool = workers(1)
    pool[0].batches = 1000
    harness = RecyclingHarness(pool, recycle_batches=10)
    for pool[0].batches in (1009, 1010):
        assert harness.due == []
        harness.recycling.check(pool[0])
    assert harness.due == [0]


def test_new_batch_limit_counts_from_the_start_of_the_process() -> None:
    pool = workers(1)
    pool[0].batches = 1000
    harness = RecyclingHarness(pool)
    pool[0].batches = 1010

    async def run() -> None:
        harness.recycling.configure(WorkersConfig(recycle_batches=11))
        assert harness.due == [] and pool[0].recycle_at == 1011
        harness.recycling.configure(WorkersConfig(recycle_batches=10))
        assert harness.due == [0]
        harness.recycling.configure(WorkersConfig())
        assert pool[0].recycle_at == NEVER
        harness.recycling.close()

    asyncio.run(run())


def test_new_memory_limit_starts_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycling_module, "resident_bytes", lambda pid: 101)
    pool = workers(1)
    harness = RecyclingHarness(pool)
    pool[0].opened_ns -= SERVICE_MIN_NS

    async def run() -> None:
        for limit in (101, 100):
            assert harness.due == []
            harness.recycling.configure(WorkersConfig(recycle_rss_bytes=limit))
        assert harness.due == [0]
        harness.recycling.close()

    asyncio.run(run())


def test_worker_is_recycled_above_its_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = {7: 100, 8: 101}
    monkeypatch.setattr(recycling_module, "resident_bytes", resident.__getitem__)
    pool = workers(2)
    pool[0].pid, pool[1].pid = 7, 8
    harness = RecyclingHarness(pool, recycle_rss_bytes=100)
    for worker in pool:
        harness.recycling.check(worker)
    assert harness.due == [], "before the minimum service time"
    for worker in pool:
        worker.opened_ns -= SERVICE_MIN_NS
        harness.recycling.check(worker)
    assert harness.due == [1]


def test_one_worker_is_recycled_at_a_time() -> None:
    """The next worker is due when the replacement of the first is ready."""
    pool = workers(2)
    harness = RecyclingHarness(pool, recycle_batches=10)
    for worker in pool:
        worker.batches = 10
        harness.recycling.check(worker)
    assert harness.due == [0] and pool[0].is_recycling
    pool[0].state = State.LOADING
    harness.recycling.check(pool[1])
    assert harness.due == [0]
    pool[0].state = State.READY
    harness.recycling.on_open(pool[0])
    harness.recycling.check(pool[1])
    assert harness.due == [0, 1]
    assert pool[0].recycle_at == 20


@pytest.mark.parametrize("state", sorted(set(State) - {State.READY}))
def test_only_a_ready_worker_is_recycled(state: State) -> None:
    pool = workers(1, state)
    harness = RecyclingHarness(pool, recycle_batches=10)
    pool[0].batches = 10
    harness.recycling.check(pool[0])
    assert harness.due == []


def test_worker_is_not_recycled_during_a_load() -> None:
    """The load would be lost with the process."""
    pool = workers(1)
    harness = RecyclingHarness(pool, recycle_batches=10)
    pool[0].batches, pool[0].loading_key = 10, 7
    harness.recycling.check(pool[0])
    assert harness.due == []
    pool[0].loading_key = None
    harness.recycling.check(pool[0])
    assert harness.due == [0]


def test_no_recycling_without_limits_or_after_close() -> None:
    pool = workers(1)
    disabled = RecyclingHarness(pool)
    assert pool[0].recycle_at == NEVER
    pool[0].batches = 10**12
    disabled.recycling.check(pool[0])
    closed = RecyclingHarness(pool, recycle_batches=10)
    pool[0].batches += 10
    closed.recycling.close()
    closed.recycling.check(pool[0])
    assert disabled.due == closed.due == []


def make_timeout(
    pool: list[ScriptedWorker], wait_s: float = 0.01
) -> tuple[NoWorkerTimeout, Lane, list[Lane]]:
    target = lane()
    rejected: list[Lane] = []
    timeout = NoWorkerTimeout(
        {0: target}, pool, wait_s=wait_s, reject_queued=lambda lane, _: rejected.append(lane)
    )
    return timeout, target, rejected


async def turns(seconds: float = 0.05) -> None:
    """Runs the timers of the loop; no test may depend on one that has not expired by then."""
    until = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < until:
        await asyncio.sleep(0)


def test_requests_without_workers_are_rejected_after_the_timeout() -> None:
    async def run() -> None:
        pool = workers(1, State.ABSENT)
        timeout, target, rejected = make_timeout(pool)
        timeout.update()
        timeout.update()
        await turns()
        assert rejected == [target]
        timeout.close()

    asyncio.run(run())


def test_returning_worker_cancels_the_timeout() -> None:
    async def run() -> None:
        pool = workers(1, State.ABSENT)
        timeout, target, rejected = make_timeout(pool)
        timeout.update()
        set_serving(target, pool)
        timeout.update()
        await turns()
        assert rejected == []
        timeout.close()

    asyncio.run(run())


def test_timeout_starts_when_the_last_worker_has_exited() -> None:
    """A drain may take longer than the start of a worker."""

    async def run() -> None:
        pool = workers(1, State.LEAVING)
        pool[0].is_replacement_pending = True
        timeout, target, rejected = make_timeout(pool)
        timeout.update()
        await turns()
        assert rejected == [] and target.is_awaiting_worker and target.is_open
        pool[0].state = State.ABSENT
        timeout.update()
        await turns()
        assert rejected == [target]
        assert not target.is_awaiting_worker and not target.is_open
        timeout.update()
        assert not target.is_awaiting_worker
        timeout.close()

    asyncio.run(run())


def set_failures(worker: Worker, count: int, *, is_loaded: bool, code: int = -11) -> None:
    worker.failures, worker.was_loaded, worker.state = count, is_loaded, State.ABSENT
    worker.last_exit = ProcessExit(code, was_killed=False)


def test_lane_with_its_quorum_is_ready() -> None:
    pool = workers(2)
    target = lane(quorum=2)
    set_serving(target, pool[:1])
    pool[1].state = State.LOADING
    assert reason_of(target, pool) == "1 of 2 workers are ready; its workers are loading"
    set_serving(target, pool)
    assert reason_of(target, pool) == ""
    target.quorum = 3
    assert reason_of(target, pool) == "2 of 3 workers are ready"


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (State.ABSENT, "its workers have not attached yet"),
        (State.STARTING, "its workers are loading"),
        (State.LOADING, "its workers are loading"),
        (State.HUNG, "a worker hung and is being replaced"),
        (State.LEAVING, "its workers are draining or stopped"),
        (State.STOPPED, "its workers are draining or stopped"),
    ],
)
def test_reason_without_workers_names_their_state(state: State, text: str) -> None:
    assert reason_of(lane(), workers(1, state)) == text


def test_reason_names_a_pending_replacement() -> None:
    pool = workers(1, State.STARTING)
    pool[0].is_replacement_pending = True
    text = "a worker is being replaced; requests are queued"
    assert reason_of(lane(), pool) == text


def test_reason_names_failures_with_their_cause() -> None:
    pool = workers(2, State.LOADING)
    set_failures(pool[0], 1, is_loaded=True)
    assert reason_of(lane(), pool) == "worker 0 died by SIGSEGV and is restarted"
    set_failures(pool[0], 2, is_loaded=False, code=70)
    assert reason_of(lane(), pool) == (
        "worker 0 ended before it had loaded its models, 2 times in a row, the last with exit "
        "code 70"
    )
    pool[0].load_error = "model `m/1`: no such file"
    assert reason_of(lane(), pool).endswith("in a row; last error: model `m/1`: no such file")


def test_worker_in_crash_loop_does_not_count_until_it_is_steady() -> None:
    """It does not count even while it serves."""
    pool = workers(1)
    target = lane()
    set_failures(pool[0], 5, is_loaded=True)
    pool[0].is_looping, pool[0].state = True, State.READY
    set_serving(target, pool)
    assert reason_of(target, pool) == (
        "worker 0 is in a crash loop: 5 deaths in a row, the last by SIGSEGV"
    )
    pool[0].is_looping = False
    assert reason_of(target, pool) == ""


@pytest.mark.parametrize(
    ("code", "was_killed", "text", "explanation"),
    [
        (-11, False, "by SIGSEGV", ""),
        (-9, True, "by SIGKILL", "which this gateway sent"),
        (-9, False, "by SIGKILL", "an operator or the OOM killer"),
        (-250, False, "by signal 250", ""),
        (70, True, "with exit code 70", ""),
        (None, False, "with an unknown exit code (no child of this process)", ""),
    ],
)
def test_text_of_a_process_exit(
    code: int | None, was_killed: bool, text: str, explanation: str
) -> None:
    process_exit = ProcessExit(code, was_killed)
    assert str(process_exit) == text
    assert explanation in process_exit.explanation and bool(explanation) == bool(
        process_exit.explanation
    )


@pytest.mark.parametrize("is_first", [True, False])
def test_new_settings_reach_all_parts(is_first: bool) -> None:
    """Only the first gateway process recycles workers."""
    received: list[Any] = []
    supervisor: Any = object.__new__(Supervisor)
    supervisor.member = SimpleNamespace(is_first=is_first)
    supervisor._spawner = SimpleNamespace(settings=None)
    for name in ("_watchdog", "_quarantines", "recycling"):
        part = SimpleNamespace(configure=lambda *values: received.append(values))
        setattr(supervisor, name, part)
    config = Config(workers=WorkersConfig(hang_s=2.0, hang_factor=3.0, crash_loop=7))
    supervisor.configure(config)
    settings = config.workers
    recycling = [(settings,)] if is_first else []
    assert received == [(2 * NS_PER_S, 3.0), (settings,), *recycling]
    assert supervisor._spawner.settings is supervisor._settings is settings
    assert supervisor.config is config


def test_unresponsive_worker_is_lost_unless_its_slot_was_reassigned() -> None:
    events: list[tuple[int, Event]] = []

    class ScriptedSupervisor(Supervisor):
        def __init__(self) -> None:
            self._loop = asyncio.get_running_loop()

        def _on_event(self, worker: Worker, event: Event) -> None:
            events.append((worker.index, event))

    async def run() -> None:
        supervisor = ScriptedSupervisor()
        pool = supervisor.workers = workers(5)
        del pool[0]  # As the slot of an isolated worker: an index is no position.
        pool[1].state = State.LOADING
        for worker in pool:
            supervisor._on_unresponsive(worker)
        pool[2].incarnation += 10
        assert events == []
        await asyncio.sleep(0)
        assert events == [(1, Event.HUNG), (2, Event.LOAD_FAILED), (4, Event.HUNG)]
        events.clear()
        supervisor._on_released(pool[0], pool[0].incarnation)
        supervisor._on_released(pool[2], pool[2].incarnation - 10)
        assert events == [(1, Event.LOST)]

    asyncio.run(run())


class FullChannel:
    """A channel to a worker that does not read."""

    def send(self, frame: bytes) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    def close(self) -> None:
        """There is no socket."""


def test_worker_that_does_not_read_its_messages_is_ended() -> None:
    """The other workers are unaffected."""
    with Simulation(lane_of()) as simulation:
        ended: list[Any] = []
        simulation.dispatcher.end_worker = ended.append
        full, other = simulation.start(), simulation.start()
        full_channel, other_channel = FullChannel(), RecordingChannel()
        full.channel, other.channel = full_channel, other_channel  # type: ignore[assignment]
        supervisor: Any = object.__new__(Supervisor)
        supervisor.dispatcher, supervisor.config = simulation.dispatcher, Config()
        supervisor._is_stopping, supervisor._set_timer = True, lambda *_: None
        loading = supervisor.loading = ModelLoader(
            simulation.lanes,
            simulation.workers,
            1 << 20,
            FileFreshness(),
            on_event=lambda worker, event: None,
            on_load_error=lambda worker, error: None,
            send=simulation.dispatcher.send,
        )
        loading.unload(simulation.lanes[0])
        assert ended == [full] and other_channel.messages == [Unload(0)]
        assert not full.models and not simulation.lanes[0].workers
        loading.load_next(full)
        assert ended == [full, full] and full.loading_key == 0
        supervisor._drain(full)
        assert ended == [full, full, full]
