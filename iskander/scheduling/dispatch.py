"""Batches to workers, and what comes of them: who runs what next, results, failure, loss.

A worker with a credit gets the next batch of the lane that has had the least of the workers' time
for its weight. Every answer names the batch that it is about; one that names none in flight is
late, and is counted and dropped. What then becomes of its requests is in `ending`.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from iskander.clock import now_ns
from iskander.control.messages import Done, Execute, Failed, Slice, encode
from iskander.errors import IskanderError
from iskander.measurement.counters import Counters
from iskander.memory.arena import Lease
from iskander.scheduling.admission import doomed_error, expired_error
from iskander.scheduling.batcher import Formed
from iskander.scheduling.completion import RequestCompletion
from iskander.scheduling.fair_share import BriefRequests
from iskander.scheduling.input_arena import InputArena
from iskander.scheduling.lane import Lane
from iskander.scheduling.layout import Layout
from iskander.scheduling.request import NEVER_NS, Request
from iskander.scheduling.results import copy_results, copy_small_results
from iskander.scheduling.retry import after_failure, after_loss, results_error, undo_parts
from iskander.scheduling.wakeup import Alarm, BusyPolling
from iskander.scheduling.worker_slot import BatchPart, InFlightBatch, WorkerSlot

log: Final = logging.getLogger("iskander.dispatch")


class Dispatcher:
    """Moves requests between lanes and workers.

    Args:
        intake: Owner of the input leases.
        lanes: All of them, by the key of their model.
        polling: Is told of work.

    Attributes:
        alarm: When it looks again by itself.
        end_worker: Told of a worker that cannot be sent anything: its batches come back as lost.
    """

    def __init__(self, intake: InputArena, lanes: dict[int, Lane], polling: BusyPolling) -> None:
        self._ending = RequestCompletion(intake)
        self._polling = polling
        self._lanes = lanes
        self._open: dict[int, WorkerSlot] = {}
        # Of workers whose results are being taken in pieces.
        self._taking: deque[tuple[WorkerSlot, Iterator[None]]] = deque()
        self._brief = BriefRequests()
        self._batch_id = 0
        self._is_pump_due = False
        self._loop = asyncio.get_running_loop()
        self.alarm = Alarm(self.pump)
        self.end_worker: Callable[[WorkerSlot], None] = lambda worker: worker.kill()
        self.counts = Counters()

    @property
    def in_flight(self) -> int:
        """Batches that workers have, or whose results are being taken."""
        return sum(len(worker.in_flight) for worker in self._open.values()) + len(self._taking)

    def open(self, worker: WorkerSlot) -> None:
        """Let a worker have batches of the models that it has loaded."""
        self._open[worker.incarnation] = worker
        for key in worker.models:
            self._lanes[key].workers[worker.incarnation] = worker
        self.pump()

    def close(self, worker: WorkerSlot) -> None:
        """Send a worker nothing more; what it has it may finish."""
        for lane in self._lanes.values():
            lane.workers.pop(worker.incarnation, None)
        if not worker.in_flight:
            self._open.pop(worker.incarnation, None)

    def submit(self, request: Request) -> None:
        """Queue a request that is in the arena; what can be sent goes when this turn is over.

        Not at once: what other streams bring in the same turn of the loop goes with it, in one
        batch and one wake-up of the worker. Only where batches cost next to nothing by themselves
        does an idle worker begin with what there is, while the rest is still read.
        """
        lane = request.lane
        if not lane.queue.requests:
            lane.catch_up()
        now = now_ns()
        for victim, error in lane.put(request, now):
            self._ending.refuse(victim, error)
        if lane.is_brief(request):
            self._brief.note(request.terms.source, now)
        if self._is_pump_due:
            return
        if lane.has_idle_worker_for_brief_batches:
            self.pump()
        else:
            self._is_pump_due = True
            self._loop.call_soon(self.pump)

    def pump(self) -> None:
        """Send what can be sent, refuse what has expired, and come back when that changes."""
        # Step 5
        self._is_pump_due = False
        now = now_ns()
        wake_ns = NEVER_NS
        outgoing: dict[WorkerSlot, list[Execute]] = {}
        waiting = [lane for lane in self._lanes.values() if lane.queue.requests]
        for lane in waiting:
            if lane.queue.next_expiry_ns <= now:
                for request in lane.queue.expired(now):
                    lane.queue.remove(request)
                    self._ending.refuse(request, expired_error(request, now))
        kept: set[WorkerSlot] = set()
        while waiting:
            lane = min(waiting, key=_virtual_ns) if len(waiting) > 1 else waiting[0]
            again_ns = self._send_next(lane, now, kept, outgoing)
            if again_ns:
                again_ns = min(again_ns, lane.queue.next_expiry_ns)
                wake_ns = min(wake_ns, again_ns)
                waiting.remove(lane)
        for worker, messages in outgoing.items():
            self._send(worker, messages)
        self.alarm.set(wake_ns, now)
        self._polling.note(now)

    def withdraw(self, request: Request) -> None:
        """The caller has gone: forget its request, at once where no worker has it."""
        if request.is_over or not request.number:
            return
        lane = request.lane
        lane.counts["withdrawn"] += 1
        if request.is_waiting:
            lane.queue.remove(request)
        self._ending.forsake(request)
        if request.running:
            self._abort_unwanted(lane)

    def on_done(self, worker: WorkerSlot, done: Done) -> None:
        """A worker has computed a batch."""
        # Step 8
        now = now_ns()
        flight = self._land(worker, done.batch_id, now)
        if flight is None:
            return
        lane = flight.lane
        worker.batches += 1
        lane.on_ran(worker, flight.run_rows, done.run_ns, now)
        lane.virtual_ns += (done.run_ns - flight.expected_ns) / lane.config.weight
        taking = self._take(worker, flight, done.run_ns)
        if _goes_on(taking):
            # The results are large: the rest of them is taken in the coming turns.
            self._taking.append((worker, taking))
            if len(self._taking) == 1:
                self._loop.call_soon(self._take_on)

    def on_failed(self, worker: WorkerSlot, failed: Failed) -> None:
        """A worker could not compute a batch."""
        flight = self._land(worker, failed.batch_id, now_ns())
        if flight is None:
            return
        worker.output_arena.give_back(flight.output)
        error = IskanderError.from_wire({"code": failed.code, "message": failed.message})
        is_shared = len({part.request for part in flight.parts}) > 1
        for request in undo_parts(flight.parts):
            self._ending.settle(request, after_failure(request, error, is_shared=is_shared))

    def on_lost(self, worker: WorkerSlot) -> None:
        """A worker's process is gone, and what it ran with it; that runs again elsewhere.

        What it had finished is taken now: its arena goes.
        """
        for owner, taking in self._taking:
            if owner is worker:
                deque(taking, maxlen=0)
        self._open.pop(worker.incarnation, None)
        running_id = worker.last_beat().batch_id
        flights = dict(worker.in_flight)
        worker.in_flight.clear()
        for batch_id, flight in flights.items():
            for request in undo_parts(flight.parts):
                error = after_loss(request, was_running=batch_id == running_id)
                if error is not None and not request.is_over:
                    log.error("%r of client `%s`: %s", request, request.terms.client, error)
                self._ending.settle(request, error)
        self.pump()

    def refuse_queued(self, lane: Lane, error: IskanderError) -> None:
        """Answer everything that waits in a lane."""
        for request in list(lane.queue):
            lane.queue.remove(request)
            self._ending.refuse(request, error)

    def _send_next(
        self, lane: Lane, now: int, kept: set[WorkerSlot], outgoing: dict[WorkerSlot, list[Execute]]
    ) -> int:
        """Give a worker the lane's next batch.

        Args:
            lane: With requests that wait, or did.
            now: The time.
            kept: Workers whose next batch is held for a lane before this one; added to.
            outgoing: What is to be sent; added to.

        Returns:
            0 to look again at once, else when.
        """
        if not lane.queue.requests:
            return NEVER_NS
        for worker in _by_readiness(lane, kept):
            formed = lane.form(worker, now, self._brief)
            if formed.doomed:
                for request in formed.doomed:
                    lane.queue.remove(request)
                    self._ending.refuse(request, doomed_error(request, now))
                return 0
            if formed.hold_ns > now:
                if formed.is_kept:
                    kept.add(worker)
                return formed.hold_ns
            sizes = [_layout(request, rows).output_bytes for request, rows in formed.picks]
            output = self._room(worker, formed, sizes)
            if output is not None:
                execute = self._board(lane, worker, formed, (sizes, output), now)
                outgoing.setdefault(worker, []).append(execute)
                return 0
        return NEVER_NS

    @staticmethod
    def _room(worker: WorkerSlot, formed: Formed, sizes: list[int]) -> Lease | None:
        """A lease for all results; the batch gives up requests that could never fit together."""
        while len(sizes) > 1 and sum(sizes) > worker.output_arena.capacity_bytes:
            sizes.pop()
            formed.picks.pop()
        return worker.output_arena.lease(sum(sizes))

    def _board(
        self,
        lane: Lane,
        worker: WorkerSlot,
        formed: Formed,
        room: tuple[list[int], Lease],
        now: int,
    ) -> Execute:
        """Take a batch out of the queue and enter it as in flight."""
        sizes, output = room
        self._batch_id += 1
        parts: list[BatchPart] = []
        slices: list[Slice] = []
        waits_ns: list[int] = []
        rows, offset = 0, output.offset
        for index, (request, wanted) in enumerate(formed.picks):
            size = sizes[index]
            first, count = lane.take(request, wanted)
            request.running += 1
            request.sent_ns = now
            waits_ns.append(now - request.arrived_ns)
            parts.append(BatchPart(request, first, count, offset))
            slices.append(Slice(request.body_offset, request.rows, first, count, offset))
            rows += count
            offset += size
        run_rows = lane.rules.run_rows(rows)
        expected_ns = lane.cost_of(worker).predict_ns(run_rows)
        worker.credits -= 1
        worker.busy_until_ns = max(worker.busy_until_ns, now) + expected_ns
        worker.in_flight[self._batch_id] = InFlightBatch(
            lane, parts, output, run_rows, now, expected_ns
        )
        worker.virtual_ns = max(worker.virtual_ns, lane.virtual_ns)
        lane.virtual_ns += expected_ns / lane.config.weight
        lane.counts[formed.reason] += 1
        lane.on_sent(rows, waits_ns, now)
        bucket = parts[0].request.shape
        return Execute(self._batch_id, lane.model.key, run_rows, tuple(slices), bucket)

    def _send(self, worker: WorkerSlot, messages: list[Execute]) -> None:
        """Send a worker its batches; one that takes none is ended, and they run elsewhere."""
        assert worker.channel is not None
        try:
            worker.channel.send(encode(messages))
        except OSError:
            log.exception("worker %d takes no messages: it is ended", worker.index)
            self.end_worker(worker)

    def _land(self, worker: WorkerSlot, batch_id: int, now: int) -> InFlightBatch | None:
        flight = worker.in_flight.pop(batch_id, None)
        if flight is None:
            self.counts["late_messages"] += 1
            return None
        worker.credits += 1
        worker.busy_until_ns = now
        for other in worker.in_flight.values():
            worker.busy_until_ns += other.expected_ns
        return flight

    def _take(self, worker: WorkerSlot, flight: InFlightBatch, run_ns: int) -> Iterator[None]:
        """Take a batch's results out of their lease and hand them out.

        A request whose results cannot be taken is told so; the others of the batch get theirs.
        """
        # Step 9
        assert worker.output is not None
        arena, view = worker.output_arena, worker.output.view
        try:
            for part in flight.parts:
                request = part.request
                results: bytes | memoryview | None = None
                failure: IskanderError | None = None
                if not request.is_over:
                    try:
                        results = copy_small_results(part, view)
                        if results is None:
                            results = yield from copy_results(part, view)
                    except Exception as error:
                        failure = results_error(request, error)
                request.running -= 1
                if request.is_over:
                    self._ending.release(request)
                elif failure is not None:
                    self._ending.settle(request, failure)
                elif results is not None:
                    self._ending.complete(request, results, run_ns)
        finally:
            arena.give_back(flight.output)

    def _take_on(self) -> None:
        """Take the next piece of somebody's large results."""
        worker, taking = self._taking.popleft()
        try:
            if _goes_on(taking):
                self._taking.append((worker, taking))
            else:
                self.pump()  # There is room for more results.
        finally:
            if self._taking:
                self._loop.call_soon(self._take_on)

    def _abort_unwanted(self, lane: Lane) -> None:
        """Give up batches of which every request is over."""
        for worker in self._open.values():
            for batch_id, flight in worker.in_flight.items():
                if flight.lane is lane and all(part.request.is_over for part in flight.parts):
                    worker.abort(batch_id)


def _layout(request: Request, rows: int) -> Layout:
    """How rows of a request lie in the output arena: all of them, mostly."""
    return request.layout if rows == request.rows else request.lane.layout(rows)


def _goes_on(steps: Iterator[None]) -> bool:
    """Take a step; whether there are more."""
    return any(True for _ in steps)


def _virtual_ns(lane: Lane) -> float:
    return lane.virtual_ns


def _by_readiness(lane: Lane, kept: set[WorkerSlot]) -> list[WorkerSlot]:
    """The workers of a lane that have a credit, the one that will be free first before others."""
    workers = [w for w in lane.workers.values() if w.credits and w not in kept]
    if len(workers) > 1:
        workers.sort(key=lambda worker: (-worker.credits, worker.busy_until_ns))
    return workers
