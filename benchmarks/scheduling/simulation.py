"""Simulation of a gateway and its workers in virtual time, with the server's own decisions.

The decisions are the server's own code: `Entry`, `InputArena`, `Lane` (queue, policy, batcher,
admission, arrivals, cost) and `Dispatcher`. Simulated are the clock, asyncio's loop (with the
resolution of its timers), the worker processes (a run costs a fixed time, with some noise) and the
latency between them. The gateway's own work costs no time. Equal seeds give equal results.

Runs on: the benchmark's only thread.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, cast
from unittest import mock

from msgspec.structs import replace

from iskander.config.models import LaneConfig
from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import ColumnType
from iskander.contract.tensors import STRING_BYTES, Contract, TensorSpec
from iskander.errors import IskanderError
from iskander.foundation.clock import NS_PER_MS, NS_PER_S, NS_PER_US
from iskander.gateway.scheduling import completion, dispatch, entry
from iskander.gateway.scheduling.dispatch import Dispatcher
from iskander.gateway.scheduling.entry import Entry
from iskander.gateway.scheduling.input_arena import InputArena
from iskander.gateway.scheduling.lanes.batcher import Formed
from iskander.gateway.scheduling.lanes.fair_share import BriefRequests
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.request import NEVER_NS, NO_TERMS, Request, Terms
from iskander.gateway.scheduling.wakeup import BusyPolling
from iskander.gateway.supervision.worker import SlotPlan, Worker
from iskander.interprocess.control.channel import Channel
from iskander.interprocess.control.messages import Done, Execute, ModelSpec, decode_to_worker
from iskander.interprocess.memory.segment import Segment

TIMER_STEP_NS = NS_PER_MS
"""epoll waits for whole milliseconds, so asyncio's timers are late by up to one."""
TRIP_NS = 75 * NS_PER_US
"""Latency from one process to the other, including its event loop."""
NOISE = 0.03
"""Standard deviation of a run's time, relative to it."""
HICCUP, HICCUP_SHARE = 2.0, 0.002
"""One run in five hundred takes twice as long."""
ARENA_BYTES = 16 << 20
CONTRACT = Contract(
    inputs=(TensorSpec("x", "x", ColumnType("float32"), ()),),
    outputs=(TensorSpec("y", "y", ColumnType("float32"), ()),),
)


class Arrival(NamedTuple):
    """A request of a trace.

    Attributes:
        at_ns: Arrival at the gateway.
        model: Key of the model.
    """

    at_ns: int
    model: int
    rows: int
    terms: Terms


class Model(NamedTuple):
    """Cost and settings of a model.

    Attributes:
        base_ns: Cost of a batch of any size.
        row_ns: Cost of each row.
        lane: Settings of its lane.
    """

    base_ns: int
    row_ns: int
    rows_max: int
    lane: LaneConfig

    def run_ns(self, rows: int) -> int:
        """Run time without noise."""
        return self.base_ns + self.row_ns * rows


class Outcome:
    """The result of one request; also its caller.

    Attributes:
        ended_ns: Time of the response; 0 without one.
        error: Code of the error; empty for results.
        was_held: A batch with it was held while a worker was idle.
        answers: Number of responses.
    """

    __slots__ = (
        "answers",
        "arrival",
        "deadline_ns",
        "ended_ns",
        "error",
        "sent_ns",
        "was_held",
        "world",
    )

    def __init__(self, arrival: Arrival, world: World) -> None:
        self.arrival = arrival
        self.world = world
        self.deadline_ns = NEVER_NS
        self.ended_ns = self.sent_ns = self.answers = 0
        self.error = ""
        self.was_held = False

    @property
    def is_due(self) -> bool:
        """Whether it had a deadline."""
        return self.deadline_ns < NEVER_NS

    @property
    def is_missed(self) -> bool:
        """Whether it had a deadline and was rejected, late or never answered."""
        return self.is_due and not (
            self.ended_ns and not self.error and self.ended_ns <= self.deadline_ns
        )

    @property
    def latency_ns(self) -> int:
        """From arrival to response."""
        return self.ended_ns - self.arrival.at_ns

    @property
    def wait_ns(self) -> int:
        """From arrival to the send to a worker, or to the rejection."""
        return (self.sent_ns or self.ended_ns) - self.arrival.at_ns

    def deliver(self, request: Request, output: memoryview) -> None:
        """Record results."""
        del output
        self.answers += 1
        self.ended_ns, self.sent_ns = self.world.loop.now_ns, request.sent_ns

    def fail(self, request: Request, error: IskanderError) -> None:
        """Record an error."""
        del request
        self.answers += 1
        self.ended_ns, self.error = self.world.loop.now_ns, error.code


class Loop:
    """The dispatcher's part of asyncio's event loop, in virtual time."""

    def __init__(self) -> None:
        self.now_ns = NS_PER_S
        self._numbers = itertools.count()
        self._ready: list[Callable[[], object]] = []
        self._events: list[tuple[int, int, Callable[[], object]]] = []
        self._timers: list[tuple[int, int, Timer]] = []

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run the callback in the next iteration."""
        self._ready.append(callback)

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        """Run the callback after the delay, up to `TIMER_STEP_NS` late, as asyncio does."""
        timer = Timer(callback)
        due_ns = self.now_ns + int(delay_s * NS_PER_S)
        heapq.heappush(self._timers, (due_ns, next(self._numbers), timer))
        return timer

    def at(self, moment_ns: int, callback: Callable[[], object]) -> None:
        """Schedule an external event."""
        heapq.heappush(self._events, (moment_ns, next(self._numbers), callback))

    def run(self) -> None:
        """Iterate until nothing is scheduled."""
        while self._ready or self._events or self._timers:
            if not self._ready:
                self.now_ns = min(self._events[0][0] if self._events else NEVER_NS, self._wake_ns())
                if self.now_ns == NEVER_NS:
                    return
            due, self._ready = self._ready, []
            events: list[Callable[[], object]] = []
            while self._events and self._events[0][0] <= self.now_ns:
                events.append(heapq.heappop(self._events)[2])
            while self._timers and self._timers[0][0] <= self.now_ns:
                events.append(heapq.heappop(self._timers)[2].fire)
            for callback in itertools.chain(due, events):
                callback()

    def _wake_ns(self) -> int:
        while self._timers and self._timers[0][2].is_cancelled:
            heapq.heappop(self._timers)
        if not self._timers:
            return NEVER_NS
        steps = -(-max(self._timers[0][0] - self.now_ns, 0) // TIMER_STEP_NS)
        return self.now_ns + steps * TIMER_STEP_NS


class Timer:
    """A scheduled callback."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        """Drop the callback."""
        self.is_cancelled = True

    def fire(self) -> None:
        """Run the callback, unless cancelled."""
        if not self.is_cancelled:
            self._callback()


class Process:
    """A worker's process from the gateway's view: it runs one batch after another."""

    def __init__(self, world: World, seed: int, noise: float) -> None:
        self.batches: list[tuple[int, int, int]] = []
        self.busy_ns = 0
        self.worker = Worker(SlotPlan(0, 0, (0,), None))
        output = Segment.create("iskander-output", ARENA_BYTES)
        self.worker.attach(1, os.getpid(), output, ARENA_BYTES)
        self.worker.channel = cast(Channel, self)
        self.worker.models = set(world.models)
        self._world = world
        self._random = random.Random(seed)
        self._noise = noise
        self._free_ns = 0

    def send(self, frame: bytes) -> None:
        """Receive a frame from the gateway."""
        world, loop = self._world, self._world.loop
        for message in decode_to_worker(frame):
            assert isinstance(message, Execute)
            run_ns = world.models[message.model].run_ns(message.rows)
            if self._noise:
                run_ns = int(run_ns * max(self._random.gauss(1.0, self._noise), 0.5))
                if self._random.random() < HICCUP_SHARE:
                    run_ns = int(run_ns * HICCUP)
            begin_ns = max(loop.now_ns + TRIP_NS, self._free_ns)
            self._free_ns = begin_ns + run_ns
            self.busy_ns += run_ns
            self.batches.append((begin_ns, message.model, message.rows))
            done = Done(message.batch_id, run_ns)
            loop.at(self._free_ns + TRIP_NS, partial(self._answer, done))

    def close(self) -> None:
        """Nothing to close."""

    def _answer(self, done: Done) -> None:
        self._world.dispatcher.on_done(self.worker, done)
        self._world.dispatcher.pump()


class WatchedLane(Lane):
    """A lane that records held batches of idle workers."""

    holds = 0

    def form(self, worker: Worker, now_ns: int, brief: BriefRequests | None = None) -> Formed:
        """Form a batch, and record a hold."""
        formed = super().form(worker, now_ns, brief)
        if formed.hold_ns > now_ns and not worker.in_flight:
            first = cast(Outcome, formed.picks[0][0].caller)
            self.holds += not first.was_held
            for request, _ in formed.picks:
                cast(Outcome, request.caller).was_held = True
        return formed


class World:
    """A simulated server and its trace.

    Attributes:
        outcomes: One for each arrival, in order.
        began_ns: The trace's zero on the simulated clock.
    """

    def __init__(self, models: Sequence[Model], trace: Sequence[Arrival], *, seed: int) -> None:
        self.models = dict(enumerate(models))
        self.loop = Loop()
        self.lanes: dict[int, WatchedLane] = {}
        self.began_ns = self.loop.now_ns
        self.outcomes = [Outcome(arrival, self) for arrival in trace]
        self._seed = seed

    def run(self, noise: float = NOISE) -> World:
        """Run the trace to its end."""
        with _simulated_loop(self.loop):
            for key, model in self.models.items():
                self.lanes[key] = _make_lane(key, model)
            self.input_arena = InputArena(ARENA_BYTES)
            lanes: dict[int, Lane] = {**self.lanes}
            self.dispatcher = Dispatcher(self.input_arena, lanes, BusyPolling(0))
            limits = LimitsConfig(arena_wait_ms=0)
            self.entry = Entry(self.input_arena, self.dispatcher.submit, limits)
            self.process = Process(self, self._seed, noise)
            try:
                self.dispatcher.open(self.process.worker)
                for outcome in self.outcomes:
                    shifted = outcome.arrival._replace(at_ns=self.began_ns + outcome.arrival.at_ns)
                    outcome.arrival = shifted
                    self.loop.at(shifted.at_ns, partial(self._arrive, outcome))
                self.loop.run()
            finally:
                self.process.worker.channel = None
                self.process.worker.detach()
                self.input_arena.close()
        for lane in self.lanes.values():
            lane.queue.validate()
            assert not len(lane.queue) and not lane.outstanding, "a request got no response"
        return self

    def _arrive(self, outcome: Outcome) -> None:
        arrival = outcome.arrival
        request = Request(
            self.lanes[arrival.model],
            outcome,
            arrival.rows,
            [memoryview(bytes(4 * arrival.rows))],
            terms=arrival.terms,
            arrived_ns=self.loop.now_ns,
        )
        outcome.deadline_ns = request.deadline_ns
        try:
            assert self.entry.enter(request), "the input arena is too small for this trace"
        except IskanderError as error:
            outcome.fail(request, error)


def unnamed(trace: Sequence[Arrival]) -> list[Arrival]:
    """The same trace without client names, so that no rhythm is learned."""
    return [
        arrival._replace(terms=replace(arrival.terms, is_named=False))
        if arrival.terms is not NO_TERMS
        else arrival
        for arrival in trace
    ]


def _make_lane(key: int, model: Model) -> WatchedLane:
    spec = ModelSpec(
        key,
        f"m{key}",
        "1",
        "onnx",
        "f",
        ("cpu",),
        1,
        1,
        "all",
        False,
        True,
        model.rows_max,
        STRING_BYTES,
        "",
    )
    lane = WatchedLane(spec, model.lane)
    lane.set_contract(CONTRACT)
    return lane


@contextmanager
def _simulated_loop(loop: Loop) -> Iterator[None]:
    """Replace the running loop and the clock with simulated ones."""
    outer = asyncio._get_running_loop()
    with ExitStack() as stack:
        for module in (dispatch, completion, entry):
            stack.enter_context(mock.patch.object(module, "now_ns", lambda: loop.now_ns))
        asyncio._set_running_loop(cast(Any, loop))
        try:
            yield
        finally:
            asyncio._set_running_loop(outer)
