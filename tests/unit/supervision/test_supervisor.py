"""What the supervisor's parts decide: who hangs, who is replaced, what waits, what is ready."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from iskander.config.models import LaneConfig
from iskander.config.schema import WorkersConfig
from iskander.control.messages import ModelSpec
from iskander.memory.heartbeat import Heartbeat
from iskander.scheduling.cost import HANG_SAMPLES, CostModel
from iskander.scheduling.lane import Lane
from iskander.supervision import recycling as recycling_module
from iskander.supervision.lifecycle import Event, State
from iskander.supervision.no_worker_timeout import NoWorkerTimeout
from iskander.supervision.readiness import reason_of
from iskander.supervision.recycling import SERVICE_MIN_NS, Recycling
from iskander.supervision.supervisor import Supervisor
from iskander.supervision.watchdog import LIMIT_MIN_NS, Watchdog
from iskander.supervision.worker import NEVER, ProcessExit, SlotPlan, Worker

HANG_NS = 1000
"""Far below what the clock has passed since the machine was started; times below are made up."""


def spec() -> ModelSpec:
    return ModelSpec(0, "m", "1", "onnx", "", (), 0, 0, "level3", False, True, 64, 256, "")


def lane(quorum: int = 1) -> Lane:
    return Lane(spec(), LaneConfig(), quorum)


class Silent(Worker):
    """A worker whose beat the test writes."""

    beat_now = Heartbeat(0, 0)

    def last_beat(self) -> Heartbeat:
        return self.beat_now

    def sent(self, *moments_ns: int) -> None:
        flights: Any = {n: SimpleNamespace(sent_ns=ns) for n, ns in enumerate(moments_ns, 1)}
        self.in_flight = flights


def workers(count: int = 2, state: State = State.READY) -> list[Silent]:
    made = [Silent(SlotPlan(index, 0, (0,), None)) for index in range(count)]
    for worker in made:
        worker.state = state
        worker.incarnation = worker.index + 1
    return made


def serving(target: Lane, made: list[Silent]) -> None:
    target.workers = {worker.incarnation: worker for worker in made}


class Watched:
    """A watch that began at 0, and whom it has told of."""

    def __init__(self, made: list[Silent]) -> None:
        self.hung: list[tuple[int, int]] = []
        self.watch = Watchdog(made, HANG_NS, self._on_hung)
        self.watch._since_ns = 0

    def _on_hung(self, worker: Worker, silent_ns: int) -> None:
        self.hung.append((worker.index, silent_ns))


def test_a_silence_is_told_at_its_limit_and_not_before() -> None:
    made = workers()
    watched = Watched(made)
    made[1].sent(100)
    assert watched.watch.check(100 + HANG_NS - 1) == 100 + HANG_NS
    assert watched.hung == []
    watched.watch.check(100 + HANG_NS)
    assert watched.hung == [(1, HANG_NS)]


def test_a_process_is_told_of_once() -> None:
    made = workers()
    watched = Watched(made)
    made[0].sent(100)
    for at_ns in (5000, 5001, 9000):
        assert watched.watch.check(at_ns) == at_ns + HANG_NS
    assert watched.hung == [(0, 4900)]


def test_who_has_nothing_is_not_silent() -> None:
    watched = Watched(workers())
    assert watched.watch.check(10**9) == 10**9 + HANG_NS
    assert watched.hung == []


@pytest.mark.parametrize(
    ("beat_ns", "sent_ns", "due_ns"),
    [(0, (500,), 1500), (700, (500,), 1700), (700, (900, 950), 1900), (700, (300, 999), 1700)],
)
def test_silence_begins_with_the_last_beat_or_the_oldest_batch(
    beat_ns: int, sent_ns: tuple[int, ...], due_ns: int
) -> None:
    """A worker that idled before its batch came is not blamed for that."""
    made = workers(1)
    watched = Watched(made)
    made[0].beat_now = Heartbeat(beat_ns, 1)
    made[0].sent(*sent_ns)
    assert watched.watch.check(1000) == due_ns
    watched.watch.check(due_ns - 1)
    assert watched.hung == []
    watched.watch.check(due_ns)
    assert watched.hung == [(0, HANG_NS)]


def test_the_next_look_is_for_the_first_that_could_be_silent() -> None:
    made = workers(3)
    watched = Watched(made)
    made[0].sent(900)
    made[2].sent(400)
    assert watched.watch.check(1000) == 1400


def test_a_gateway_that_did_not_run_calls_nobody_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that is late by more than a second gives every worker its time anew."""
    clock = [10**10]
    monkeypatch.setattr("iskander.supervision.watchdog.now_ns", lambda: clock[0])

    async def run() -> None:
        made = workers(1)
        watched = Watched(made)
        made[0].sent(clock[0])
        watched.watch.start()
        clock[0] += 60 * 10**9
        watched.watch._tick()
        assert watched.hung == []
        clock[0] += HANG_NS
        watched.watch._tick()
        assert watched.hung == [(0, HANG_NS)]
        watched.watch.close()

    asyncio.run(run())


class Priced:
    """A lane whose batches of one row take a millisecond."""

    def __init__(self, runs: int = 100) -> None:
        self.cost = CostModel()
        for _ in range(runs):
            self.cost.observe(1, 10**6)

    def cost_of(self, worker: Worker) -> CostModel:
        return self.cost


def running_a(lane: object, worker: Silent) -> None:
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
    ids=["off", "least", "factor", "ceiling", "unknown", "loading"],
)
def test_the_limit_of_a_silence_follows_the_cost(
    factor: float, runs: int, is_loading: bool, limit_ns: int
) -> None:
    (worker,) = made = workers(1)
    hung: list[int] = []
    watch = Watchdog(
        made, 30 * 10**9, lambda worker, silent_ns: hung.append(silent_ns), factor=factor
    )
    watch._since_ns = 0
    running_a(Priced(runs), worker)
    worker.loading_key = 7 if is_loading else None
    slack_ns = limit_ns // 50  # What was learned is right to within a few thousandths.
    watch.check(limit_ns - slack_ns)
    assert hung == []
    watch.check(limit_ns + slack_ns)
    assert len(hung) == 1


def test_a_worker_that_has_just_begun_nothing_is_judged_by_what_it_has() -> None:
    (worker,) = made = workers(1)
    hung: list[int] = []
    watch = Watchdog(
        made, 30 * 10**9, lambda worker, silent_ns: hung.append(silent_ns), factor=20.0
    )
    watch._since_ns = 0
    running_a(Priced(), worker)
    worker.beat_now = Heartbeat(1, 0)
    watch.check(LIMIT_MIN_NS + 1)
    assert len(hung) == 1


class Recycled:
    """A recycling with limits, and who was due."""

    def __init__(self, made: list[Silent], **limits: int) -> None:
        self.due: list[int] = []
        self.recycling = Recycling(made, WorkersConfig(**limits), self._on_due)
        for worker in made:
            self.recycling.on_open(worker)

    def _on_due(self, worker: Worker) -> None:
        self.due.append(worker.index)


def test_a_worker_is_replaced_after_its_batches() -> None:
    """Counted from when its process was opened, not from the place's first."""
    made = workers(1)
    made[0].batches = 1000
    recycled = Recycled(made, recycle_batches=10)
    for made[0].batches in (1009, 1010):
        assert recycled.due == []
        recycled.recycling.check(made[0])
    assert recycled.due == [0]


def test_a_worker_is_replaced_above_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = {7: 100, 8: 101}
    monkeypatch.setattr(recycling_module, "resident_bytes", resident.__getitem__)
    made = workers(2)
    made[0].pid, made[1].pid = 7, 8
    recycled = Recycled(made, recycle_rss_bytes=100)
    for worker in made:
        recycled.recycling.check(worker)
    assert recycled.due == [], "not before it has served"
    for worker in made:
        worker.opened_ns -= SERVICE_MIN_NS
        recycled.recycling.check(worker)
    assert recycled.due == [1]


def test_one_is_replaced_at_a_time() -> None:
    """The next one has its turn when the process after the first is open."""
    made = workers(2)
    recycled = Recycled(made, recycle_batches=10)
    for worker in made:
        worker.batches = 10
        recycled.recycling.check(worker)
    assert recycled.due == [0] and made[0].is_recycling
    made[0].state = State.LOADING
    recycled.recycling.check(made[1])
    assert recycled.due == [0]
    made[0].state = State.READY
    recycled.recycling.on_open(made[0])
    recycled.recycling.check(made[1])
    assert recycled.due == [0, 1]
    assert made[0].recycle_at == 20


@pytest.mark.parametrize("state", sorted(set(State) - {State.READY}))
def test_only_one_that_serves_is_replaced(state: State) -> None:
    made = workers(1, state)
    recycled = Recycled(made, recycle_batches=10)
    made[0].batches = 10
    recycled.recycling.check(made[0])
    assert recycled.due == []


def test_nobody_is_replaced_in_the_midst_of_a_load() -> None:
    """What is loaded would be given up with the process."""
    made = workers(1)
    recycled = Recycled(made, recycle_batches=10)
    made[0].batches, made[0].loading_key = 10, 7
    recycled.recycling.check(made[0])
    assert recycled.due == []
    made[0].loading_key = None
    recycled.recycling.check(made[0])
    assert recycled.due == [0]


def test_nobody_is_replaced_without_limits_or_after_the_end() -> None:
    made = workers(1)
    without = Recycled(made)
    assert made[0].recycle_at == NEVER
    made[0].batches = 10**12
    without.recycling.check(made[0])
    closed = Recycled(made, recycle_batches=10)
    made[0].batches += 10
    closed.recycling.close()
    closed.recycling.check(made[0])
    assert without.due == closed.due == []


def waiting(made: list[Silent], wait_s: float = 0.01) -> tuple[NoWorkerTimeout, Lane, list[Lane]]:
    target = lane()
    refused: list[Lane] = []
    vacancy = NoWorkerTimeout(
        {0: target}, made, wait_s=wait_s, refuse=lambda lane, _: refused.append(lane)
    )
    return vacancy, target, refused


async def turns(seconds: float = 0.05) -> None:
    """Let the timers of the loop run; a test must not depend on what has not happened by then."""
    until = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < until:
        await asyncio.sleep(0)


def test_requests_of_a_lane_without_workers_are_refused_in_the_end() -> None:
    async def run() -> None:
        made = workers(1, State.ABSENT)
        vacancy, target, refused = waiting(made)
        vacancy.update()
        vacancy.update()
        await turns()
        assert refused == [target]
        vacancy.close()

    asyncio.run(run())


def test_a_worker_that_comes_back_ends_the_time() -> None:
    async def run() -> None:
        made = workers(1, State.ABSENT)
        vacancy, target, refused = waiting(made)
        vacancy.update()
        serving(target, made)
        vacancy.update()
        await turns()
        assert refused == []
        vacancy.close()

    asyncio.run(run())


def test_the_time_begins_when_the_last_worker_has_left() -> None:
    """One that finishes what it has may take longer than one takes to come."""

    async def run() -> None:
        made = workers(1, State.LEAVING)
        made[0].is_replacement_pending = True
        vacancy, target, refused = waiting(made)
        vacancy.update()
        await turns()
        assert refused == [] and target.is_awaiting_worker and target.is_open
        made[0].state = State.ABSENT
        vacancy.update()
        await turns()
        assert refused == [target]
        assert not target.is_awaiting_worker and not target.is_open
        vacancy.update()
        assert not target.is_awaiting_worker
        vacancy.close()

    asyncio.run(run())


def failing(worker: Worker, count: int, *, is_loaded: bool, code: int = -11) -> None:
    worker.failures, worker.was_loaded, worker.state = count, is_loaded, State.ABSENT
    worker.last_exit = ProcessExit(code, was_killed=False)


def test_a_lane_with_its_quorum_is_ready() -> None:
    made = workers(2)
    target = lane(quorum=2)
    serving(target, made[:1])
    made[1].state = State.LOADING
    assert reason_of(target, made) == "1 of 2 workers are ready; its workers are loading"
    serving(target, made)
    assert reason_of(target, made) == ""
    target.quorum = 3
    assert reason_of(target, made) == "2 of 3 workers are ready"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (State.ABSENT, "its workers have not come yet"),
        (State.STARTING, "its workers are loading"),
        (State.LOADING, "its workers are loading"),
        (State.HUNG, "a worker hung and is being replaced"),
        (State.LEAVING, "its workers are leaving"),
        (State.STOPPED, "its workers are leaving"),
    ],
)
def test_a_lane_without_workers_says_where_they_are(state: State, words: str) -> None:
    assert reason_of(lane(), workers(1, state)) == words


def test_a_lane_says_that_requests_wait() -> None:
    made = workers(1, State.STARTING)
    made[0].is_replacement_pending = True
    words = "a worker is being replaced in order, and requests are queued"
    assert reason_of(lane(), made) == words


def test_failures_are_named_with_their_cause() -> None:
    made = workers(2, State.LOADING)
    failing(made[0], 1, is_loaded=True)
    assert reason_of(lane(), made) == "worker 0 died by SIGSEGV and is restarted"
    failing(made[0], 2, is_loaded=False, code=70)
    assert reason_of(lane(), made) == (
        "worker 0 ended before it had loaded its models, 2 times in a row, the last with exit "
        "code 70"
    )
    made[0].load_error = "model `m/1`: no such file"
    assert reason_of(lane(), made).endswith("in a row; last error: model `m/1`: no such file")


def test_a_worker_in_a_crash_loop_counts_for_nothing_until_it_is_steady() -> None:
    """Even while it serves: it is expected to die again."""
    made = workers(1)
    target = lane()
    failing(made[0], 5, is_loaded=True)
    made[0].is_looping, made[0].state = True, State.READY
    serving(target, made)
    assert reason_of(target, made) == (
        "worker 0 is in a crash loop: 5 deaths in a row, the last by SIGSEGV"
    )
    made[0].is_looping = False
    assert reason_of(target, made) == ""


@pytest.mark.parametrize(
    ("code", "was_killed", "words", "more"),
    [
        (-11, False, "by SIGSEGV", ""),
        (-9, True, "by SIGKILL", "which this gateway sent"),
        (-9, False, "by SIGKILL", "an operator or the OOM killer"),
        (-250, False, "by signal 250", ""),
        (70, True, "with exit code 70", ""),
        (None, False, "with an unknown exit code (no child of this process)", ""),
    ],
)
def test_an_end_in_words(code: int | None, was_killed: bool, words: str, more: str) -> None:
    end = ProcessExit(code, was_killed)
    assert str(end) == words
    assert more in end.explanation and bool(more) == bool(end.explanation)


def test_who_cannot_be_talked_to_is_given_up_unless_another_has_its_place() -> None:
    happened: list[tuple[int, Event]] = []

    class Played(Supervisor):
        def __init__(self) -> None:
            self._loop = asyncio.get_running_loop()

        def _on_event(self, worker: Worker, event: Event) -> None:
            happened.append((worker.index, event))

    async def run() -> None:
        supervisor = Played()
        made = supervisor.workers = workers(4)
        made[1].state = State.LOADING
        for worker in made:
            supervisor._on_unresponsive(worker)
        made[2].incarnation += 10
        assert happened == []
        await asyncio.sleep(0)
        assert happened == [(0, Event.HUNG), (1, Event.LOAD_FAILED), (3, Event.HUNG)]
        happened.clear()
        supervisor._on_released(made[0], made[0].incarnation)
        supervisor._on_released(made[2], made[2].incarnation - 10)
        assert happened == [(0, Event.LOST)]

    asyncio.run(run())
