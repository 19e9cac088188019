"""Gateway without processes, on a virtual clock that advances from event to event.

The dispatcher, the lanes, the input arena and the output arenas are real. A worker is simulated: it
gathers the rows of a batch from the input arena, returns them unchanged, and responds after the
time that the test sets.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np

from iskander.config.schema import LimitsConfig
from iskander.contract.processing.rows import RowCopier, Rows
from iskander.gateway.scheduling import completion, dispatch, entry
from iskander.gateway.scheduling.dispatch import Dispatcher
from iskander.gateway.scheduling.entry import Entry
from iskander.gateway.scheduling.input_arena import InputArena
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.request import NO_TERMS, Request, Terms
from iskander.gateway.scheduling.wakeup import BusyPolling
from iskander.gateway.supervision.worker import SlotPlan, Worker
from iskander.interprocess.control.messages import Done, Execute, Failed, decode_to_worker
from iskander.interprocess.memory.heartbeat import write_heartbeat
from iskander.interprocess.memory.segment import Segment
from support.lanes import CONTRACT, RecordingCaller, lane_of

MIB = 1 << 20
NS_PER_S = 1_000_000_000
START_NS = 1_000 * NS_PER_S
ROW_NS, BASE_NS = 1_000, 100_000


class Handle:
    """Result of `call_later`."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        self.call = None


class Loop:
    """The dispatcher's part of an event loop, with a clock that jumps to the next event."""

    def __init__(self) -> None:
        self.now_ns = START_NS
        self._numbers = itertools.count()
        self._events: list[tuple[int, int, Handle]] = []

    def call_soon(self, call: Callable[[], object]) -> Handle:
        return self.call_at(self.now_ns, call)

    def call_later(self, delay_s: float, call: Callable[[], object]) -> Handle:
        # As in a real loop: never early, and in whole ticks of its clock.
        return self.call_at(self.now_ns + int(delay_s * NS_PER_S) + 1000, call)

    def call_at(self, at_ns: int, call: Callable[[], object]) -> Handle:
        handle = Handle(call)
        heapq.heappush(self._events, (at_ns, next(self._numbers), handle))
        return handle

    def step(self, until_ns: int) -> bool:
        """Run the next event, if it is due by then."""
        if not self._events or self._events[0][0] > until_ns:
            self.now_ns = max(self.now_ns, until_ns)
            return False
        at_ns, _, handle = heapq.heappop(self._events)
        self.now_ns = max(self.now_ns, at_ns)
        if handle.call is not None:
            handle.call()
        return True

    def run(self, for_ns: int) -> None:
        """Run all events of that period."""
        until_ns = self.now_ns + for_ns
        while self.step(until_ns):
            pass

    def turn(self) -> None:
        """Run all events that are due now."""
        self.run(0)


class Wire:
    """The gateway's end of the socket to a worker; records sent messages."""

    def __init__(self) -> None:
        self.frames = 0
        self.sent: list[Execute] = []
        self.on_send: Callable[[], object] = lambda: None

    def send(self, frame: bytes) -> None:
        self.frames += 1
        for message in decode_to_worker(frame):
            assert isinstance(message, Execute)
            self.sent.append(message)
        self.on_send()

    def close(self) -> None:
        """There is no socket."""


class SimulatedWorker(Worker):
    """A worker with a simulated process; idle until `play` or `run` is called.

    Attributes:
        aborted: Cancelled batches.
        cancel_ns: Time in which it cancels its running batch; None: it does not.
        cost: Nanoseconds of a batch of a model.
        reference: Outcome of a batch with these values: None, an error's code, or `die`.
    """

    def __init__(self, simulation: Simulation, index: int) -> None:
        super().__init__(SlotPlan(index, 0, (0,), None))
        self.simulation = simulation
        self.aborted: list[int] = []
        self.ran: list[Execute] = []
        self.wire = Wire()
        self.is_playing = False
        self.cancel_ns: int | None = None
        self.cost: Callable[[Execute], int] = lambda execute: ROW_NS * execute.rows + BASE_NS
        self.reference: Callable[[np.ndarray[Any, Any]], str | None] = lambda values: None
        self._running: Execute | None = None

    @property
    def sent(self) -> list[Execute]:
        return self.wire.sent

    def abort(self, batch_id: int) -> None:
        self.aborted.append(batch_id)
        running, loop = self._running, self.simulation.loop
        if self.cancel_ns is not None and running is not None and running.batch_id == batch_id:
            loop.call_at(loop.now_ns + self.cancel_ns, lambda: self._cancel(running))

    def play(self) -> None:
        """Run all batches, one after the other."""
        self.is_playing = True
        self.wire.on_send = self._next
        self._next()

    def _next(self) -> None:
        if self._running is None and len(self.ran) < len(self.sent) and self.is_playing:
            self._running = execute = self.sent[len(self.ran)]
            self.ran.append(execute)
            self.begin(execute)
            run_ns, life = self.cost(execute), self.incarnation
            due_ns = self.simulation.loop.now_ns + run_ns
            self.simulation.loop.call_at(due_ns, lambda: self._end(execute, life, run_ns))

    def _cancel(self, execute: Execute) -> None:
        if self._running is execute:
            self._running = None
            failed = Failed(execute.batch_id, "cancelled", "batch cancelled")
            self.simulation.dispatcher.on_failed(self, failed)
            self._next()
            self.simulation.dispatcher.pump()

    def _end(self, execute: Execute, incarnation: int, run_ns: int) -> None:
        if incarnation != self.incarnation or self._running is not execute:
            return
        self._running = None
        self.run(execute, run_ns)
        if self.incarnation:
            self._next()
        self.simulation.dispatcher.pump()

    def begin(self, execute: Execute) -> None:
        """Write the batch to the heartbeat."""
        assert self.beat is not None
        write_heartbeat(self.beat.view, self.simulation.loop.now_ns, execute.batch_id)

    def run(self, execute: Execute, run_ns: int | None = None) -> None:
        """Compute a batch and respond, or act on the scripted outcome."""
        values = compute(self.simulation, self, execute)
        outcome = self.reference(values)
        if outcome == "die":
            self.begin(execute)
            self.simulation.lose(self)
        elif outcome is not None:
            failed = Failed(execute.batch_id, outcome, "scripted failure")
            self.simulation.dispatcher.on_failed(self, failed)
        else:
            done = Done(execute.batch_id, self.cost(execute) if run_ns is None else run_ns)
            self.simulation.dispatcher.on_done(self, done)


def compute(simulation: Simulation, worker: Worker, execute: Execute) -> np.ndarray[Any, Any]:
    """Gather, run the identity, scatter, as `iskander_worker.executor` does. Returns the values."""
    contract = simulation.dispatcher_lane(execute.model).contract
    assert contract is not None and worker.output is not None
    inputs, outputs = RowCopier(contract.inputs), RowCopier(contract.outputs)
    stage = memoryview(bytearray(inputs.layout(execute.rows)[1]))
    source, at = simulation.input_arena.segment.view, 0
    for each in execute.slices:
        body = source[each.input_offset :]
        inputs.copy(
            each.rows, Rows(body, each.request_rows, each.first), Rows(stage, execute.rows, at)
        )
        at += each.rows
    inputs.repeat_last(stage, at, execute.rows)
    at = 0
    for each in execute.slices:
        target = Rows(worker.output.view[each.output_offset :], each.rows, 0)
        outputs.copy(each.rows, Rows(stage, execute.rows, at), target)
        at += each.rows
    return np.frombuffer(stage, np.int64, at)


class Simulation:
    """Lanes, an input arena, a dispatcher and simulated workers; a context manager."""

    def __init__(self, *lanes: Lane, input_bytes: int = 16 * MIB) -> None:
        self.loop = Loop()
        self.lanes = {lane.model.key: lane for lane in lanes or (lane_of(0), lane_of(1))}
        self.workers: list[SimulatedWorker] = []
        self._incarnation = 0
        self._patches = ExitStack()
        self.input_arena = InputArena(input_bytes)
        with mock.patch.object(asyncio, "get_running_loop", lambda: self.loop):
            self.dispatcher = Dispatcher(self.input_arena, self.lanes, BusyPolling(0))
            limits = LimitsConfig(arena_wait_ms=0)
            self.entry = Entry(self.input_arena, self.dispatcher.submit, limits)

    def __enter__(self) -> Simulation:
        for module in (dispatch, completion, entry):
            patch = mock.patch.object(module, "now_ns", lambda: self.loop.now_ns)
            self._patches.enter_context(patch)
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()
        for worker in self.workers:
            worker.detach()
        self.input_arena.close()

    def dispatcher_lane(self, key: int) -> Lane:
        return self.lanes[key]

    def start(self, *models: int, output_bytes: int = 4 * MIB) -> SimulatedWorker:
        """A ready worker with these models, or all."""
        worker = SimulatedWorker(self, len(self.workers))
        self.workers.append(worker)
        self.revive(worker, *models, output_bytes=output_bytes)
        return worker

    def revive(self, worker: SimulatedWorker, *models: int, output_bytes: int = 4 * MIB) -> None:
        """Start another process in a worker's slot."""
        self._incarnation += 1
        output = Segment.create("iskander-output", output_bytes)
        worker.attach(self._incarnation, os.getpid(), output, output_bytes)
        worker.wire = Wire()
        worker.channel = worker.wire  # type: ignore[assignment]
        worker.ran, worker._running = [], None
        worker.models = set(models or self.lanes)
        if worker.is_playing:
            worker.play()
        self.dispatcher.open(worker)

    def lose(self, worker: SimulatedWorker) -> None:
        """Handle a process's death, as the supervisor does."""
        self.dispatcher.close(worker)
        self.dispatcher.on_lost(worker)
        worker.detach()

    def submit_rows(
        self, lane: int = 0, rows: int = 1, *, first: int = 0, **terms: Any
    ) -> tuple[Request, RecordingCaller]:
        """Submit a request of ascending rows from `first`; it is sent after this iteration."""
        caller = RecordingCaller()
        values = np.arange(first, first + rows, dtype=np.int64)
        tensors = [memoryview(values).cast("B")]
        request = Request(
            self.lanes[lane],
            caller,
            rows,
            tensors,
            terms=Terms(**terms) if terms else NO_TERMS,
            arrived_ns=self.loop.now_ns,
        )
        self.submit(request)
        return request, caller

    def submit(self, request: Request) -> None:
        """Submit a request, as a stream does."""
        assert self.entry.enter(request), "the arena is large enough"

    def done(self, worker: SimulatedWorker, execute: Execute) -> None:
        """Complete a batch, and send the next ones."""
        worker.run(execute)
        self.dispatcher.pump()

    def is_clean(self) -> bool:
        """Whether nothing is queued, running or leased."""
        arenas = [self.input_arena.arena, *(worker.output_arena for worker in self.workers)]
        return (
            not any(len(lane.queue) or lane.outstanding for lane in self.lanes.values())
            and not self.dispatcher.in_flight
            and not any(arena.leased_bytes for arena in arenas)
        )


__all__ = ["CONTRACT", "Simulation"]
