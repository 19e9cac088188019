"""Dispatcher: sends batches to workers and handles results, failures and lost workers.

A worker with a credit gets the next batch of the lane with the least weighted worker time. An
answer for a batch that is not in flight is late; it is counted and dropped.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from iskander.errors import ExecutionFailed, IskanderError, RemoteUnavailable
from iskander.foundation.clock import now_ns
from iskander.foundation.logs import requests as log
from iskander.foundation.logs import workers as worker_log
from iskander.foundation.measurement.counters import Counters
from iskander.gateway.scheduling.completion import RequestCompletion
from iskander.gateway.scheduling.hooks import Hooks
from iskander.gateway.scheduling.input_arena import InputArena
from iskander.gateway.scheduling.lanes.admission import expired_error
from iskander.gateway.scheduling.lanes.batcher import Formed
from iskander.gateway.scheduling.lanes.fair_share import BriefRequests
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.observation import Observer
from iskander.gateway.scheduling.request import NEVER_NS, Request
from iskander.gateway.scheduling.results import copy_results, copy_small_results
from iskander.gateway.scheduling.retry import (
    KILLS_MAX,
    after_failure,
    after_loss,
    results_error,
    undo_parts,
)
from iskander.gateway.scheduling.shadow import ShadowBatches
from iskander.gateway.scheduling.tracing import LOST, Tracer
from iskander.gateway.scheduling.wakeup import Alarm, BusyPolling
from iskander.gateway.scheduling.worker_slot import BatchPart, InFlightBatch, WorkerSlot
from iskander.interprocess.control.messages import Done, Execute, Failed, Slice, ToWorker, encode


class Dispatcher:
    """Sends requests of lanes (by model key) to workers.

    Attributes:
        alarm: Timer that calls `pump` without an event.
        end_worker: Ends a worker after a failed send; `on_lost` follows.
        on_unreachable: Called when the remote server of a lane could not be reached.
        hooks: Functions that read batches and results.
        tracer: Records the requests of all protocols at their end; None without a reader.
        observer: Holds leases of sampled results; None if no consumer of samples is on.
        shadow: Sends shadow batches to idle workers; None without shadow versions.
    """

    def __init__(
        self, input_arena: InputArena, lanes: dict[int, Lane], polling: BusyPolling
    ) -> None:
        self._completion = RequestCompletion(input_arena)
        self._polling = polling
        self._lanes = lanes
        self._workers: dict[int, WorkerSlot] = {}
        # Copies of large results in progress.
        self._copies: deque[tuple[WorkerSlot, Iterator[None]]] = deque()
        self._brief = BriefRequests()
        self._batch_id = 0
        self._is_pump_due = False
        self._loop = asyncio.get_running_loop()
        self.alarm = Alarm(self.pump)
        self.end_worker: Callable[[WorkerSlot], None] = lambda worker: worker.kill()
        self.on_unreachable: Callable[[Lane, IskanderError], None] = lambda lane, error: None
        self.hooks = Hooks()
        self.tracer: Tracer | None = None
        self.observer: Observer | None = None
        self.shadow: ShadowBatches | None = None
        self.counts = Counters()

    @property
    def in_flight(self) -> int:
        """Number of batches at workers or with results being copied."""
        return sum(len(worker.in_flight) for worker in self._workers.values()) + len(self._copies)

    @property
    def uses_contexts(self) -> bool:
        """Whether the trace contexts of callers are read: for spans, or as ids of samples."""
        return self.tracer is not None or self.observer is not None

    def open(self, worker: WorkerSlot) -> None:
        """Start sending batches to a worker, for the models that it has loaded."""
        self._workers[worker.incarnation] = worker
        for key in worker.models:
            self._lanes[key].workers[worker.incarnation] = worker
        self.pump()

    def close(self, worker: WorkerSlot) -> None:
        """Stop sending batches to a worker; batches in flight may finish."""
        for lane in self._lanes.values():
            lane.workers.pop(worker.incarnation, None)
        if not worker.in_flight:
            self._workers.pop(worker.incarnation, None)

    def submit(self, request: Request, victims: list[Request]) -> None:
        """Queue a request that is in the arena; `pump` runs after this loop iteration.

        `victims` are queued requests that are evicted for it.

        Requests of the same iteration can then share one batch and one wake-up of the worker. With
        an idle worker and a negligible fixed cost of a batch, `pump` runs at once.
        """
        lane = request.lane
        if not lane.queue.requests:
            lane.catch_up()
        now = now_ns()
        request.queued_before = lane.queue.requests
        for victim, error in lane.put(request, now, victims):
            self._completion.reject(victim, error)
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
        """Send every batch that is due, reject expired requests, and set the alarm."""
        # Step 6
        self._is_pump_due = False
        now = now_ns()
        wake_ns = NEVER_NS
        outgoing: dict[WorkerSlot, list[Execute]] = {}
        waiting = [lane for lane in self._lanes.values() if lane.queue.requests]
        for lane in waiting:
            if lane.queue.next_expiry_ns <= now:
                for request in lane.queue.expired(now):
                    lane.queue.remove(request)
                    self._completion.reject(request, expired_error(request, now))
        reserved: set[WorkerSlot] = set()
        try:
            while waiting:
                lane = waiting[0] if len(waiting) == 1 else min(waiting, key=lambda e: e.virtual_ns)
                again_ns = self._add_next_batch(lane, now, reserved, outgoing)
                if again_ns:
                    again_ns = min(again_ns, lane.queue.next_expiry_ns)
                    wake_ns = min(wake_ns, again_ns)
                    waiting.remove(lane)
        finally:
            # Workers own these batches by now, also if the next one fails.
            for worker, messages in outgoing.items():
                self.send(worker, messages)
        if self.shadow is not None:
            wake_ns = min(wake_ns, self.shadow.pump(now))
        self.alarm.set(wake_ns, now)
        self._polling.note(now)

    def withdraw(self, request: Request) -> None:
        """Drop a request whose caller is gone, and cancel batches without any other caller."""
        if request.is_over or not request.number:
            return
        lane = request.lane
        lane.counts["withdrawn"] += 1
        if request.is_waiting:
            lane.queue.remove(request)
        self._completion.finish(request)
        if not request.running:
            return
        for worker in self._workers.values():
            for batch_id, batch in worker.in_flight.items():
                is_own = batch.lane is lane and not batch.is_shadow
                if is_own and all(part.request.is_over for part in batch.parts):
                    worker.abort(batch_id)

    def on_done(self, worker: WorkerSlot, done: Done) -> None:
        """Handle the results of a batch."""
        # Step 9
        now = now_ns()
        batch = self._pop_batch(worker, done.batch_id, now)
        if batch is None:
            return
        lane = batch.lane
        for on_batch in self.hooks.on_batch:
            on_batch(worker, batch, done.batch_id, now, done.run_ns, "")
        worker.batches += 1
        if batch.is_shadow:
            assert self.shadow is not None
            return self.shadow.on_done(worker, done.run_ns, now)
        lane.on_ran(worker, batch.run_rows, done.run_ns, now)
        lane.virtual_ns += (done.run_ns - batch.expected_ns) / lane.config.weight
        copy = self._copy_out(worker, batch, done.run_ns)
        if _step(copy):
            # Large results: the rest is copied in later loop iterations.
            self._copies.append((worker, copy))
            if len(self._copies) == 1:
                self._loop.call_soon(self._continue_copy)

    def on_failed(self, worker: WorkerSlot, failed: Failed) -> None:
        """Handle a batch that a worker could not compute."""
        now = now_ns()
        batch = self._pop_batch(worker, failed.batch_id, now)
        if batch is None:
            return
        if batch.is_shadow:
            assert self.shadow is not None
            return self.shadow.on_failed(worker, failed, now)
        for on_batch in self.hooks.on_batch:
            on_batch(worker, batch, failed.batch_id, now, 0, failed.code)
        worker.output_arena.give_back(batch.output)
        _refund(batch, now)
        error = IskanderError.from_wire(
            {
                "code": failed.code,
                "message": failed.message,
                "retry_after_ms": failed.retry_after_ms,
            }
        )
        if isinstance(error, ExecutionFailed):
            if failed.is_input:
                error.blame_input()
            if failed.row is not None or failed.column:
                error = error.located(failed.row, failed.column or None)
        if error.code == RemoteUnavailable.code:
            self.on_unreachable(batch.lane, error)
        else:
            batch.lane.unreachable = 0
        requests = undo_parts(batch.parts)
        hops = max(request.terms.hops for request in requests)
        for request in requests:
            failure = after_failure(request, error, is_shared=len(requests) > 1, hops=hops)
            self._completion.fail_or_retry(request, failure)

    def on_lost(self, worker: WorkerSlot) -> None:
        """Retry or reject an ended worker's requests."""
        for owner, copy in self._copies:
            if owner is worker:
                deque(copy, maxlen=0)  # Finish before the arena is unmapped.
        for on_worker_lost in self.hooks.on_worker_lost:
            on_worker_lost(worker)
        self._workers.pop(worker.incarnation, None)
        running_id = worker.last_beat().batch_id
        batches = dict(worker.in_flight)
        worker.in_flight.clear()
        poisoned: list[Request] = []
        for batch_id, batch in batches.items():
            if batch.is_shadow:
                assert self.shadow is not None
                self.shadow.on_lost(worker, was_running=batch_id == running_id, now=now_ns())
                continue
            for on_batch in self.hooks.on_batch:
                on_batch(worker, batch, batch_id, now_ns(), 0, LOST)
            _refund(batch, now_ns())
            was_running, offenders = batch_id == running_id, batch.lane.offenders
            requests = undo_parts(batch.parts)
            for request in requests:
                is_known = len(requests) == 1 and offenders.is_known(request.terms.source, now_ns())
                kills_max = 1 if is_known else KILLS_MAX
                error = after_loss(request, was_running=was_running, kills_max=kills_max)
                if error is not None and not request.is_over:
                    log.request_lost(
                        model=request.lane.title,
                        rows=request.rows,
                        client=request.terms.client,
                        reason=error.message,
                    )
                self._completion.fail_or_retry(request, error)
                # A caller that has left is not spared: its request is not run again.
                is_to_blame = error is not None or (request.is_over and len(requests) == 1)
                if was_running and is_to_blame:
                    poisoned.append(request)
        for request in poisoned:  # After the last batch is back in the queue.
            self._slow_down(request)
        self.pump()

    def _slow_down(self, poisoned: Request) -> None:
        """Reject the queued and the next requests of a source whose request has ended workers."""
        lane, source, now = poisoned.lane, poisoned.terms.source, now_ns()
        lane.offenders.note(source, now)
        for request in [each for each in lane.queue if each.terms.source == source]:
            error = lane.offenders.error(source, now, lane.title)
            assert error is not None
            lane.queue.remove(request)
            self._completion.reject(request, error)

    def reject_queued(self, lane: Lane, error: IskanderError) -> None:
        """Reject all queued requests of a lane."""
        for request in list(lane.queue):
            lane.queue.remove(request)
            self._completion.reject(request, error)

    def _add_next_batch(
        self,
        lane: Lane,
        now: int,
        reserved: set[WorkerSlot],
        outgoing: dict[WorkerSlot, list[Execute]],
    ) -> int:
        """Add a lane's next batch to `outgoing`, or its reserved worker to `reserved`.

        Returns:
            0 to call again at once, else the time of the next call.
        """
        if not lane.queue.requests or lane.is_held:
            return NEVER_NS
        full: list[WorkerSlot] = []
        for worker in _available_workers(lane, reserved):
            formed = lane.form(worker, now, self._brief)
            if formed.doomed:
                if max(lane.backlog(now).free_ns, now) < worker.busy_until_ns:
                    continue  # Another worker, without a credit now, is free earlier.
                for request in formed.doomed:
                    lane.queue.remove(request)
                    self._completion.reject(request, lane.doomed_error(request, now))
                return 0
            if formed.hold_ns > now:
                if formed.reserves_worker:
                    reserved.add(worker)
                return formed.hold_ns
            if worker.in_flight and _needs_whole_device(worker, formed.picks[0][0]):
                reserved.add(worker)
                return NEVER_NS  # Called again after the end of a batch.
            execute = self._assemble(lane, worker, formed, now)
            if execute is not None:
                outgoing.setdefault(worker, []).append(execute)
                return 0
            if worker.in_flight or any(owner is worker for owner, _ in self._copies):
                full.append(worker)
        # Otherwise batches of other lanes would take the space as it becomes free, without end.
        reserved.update(full)
        return NEVER_NS

    def _assemble(self, lane: Lane, worker: WorkerSlot, formed: Formed, now: int) -> Execute | None:
        """Move a batch from the queue to a worker; None while its output arena is full.

        If the results of all requests exceed the arena, the last requests stay in the queue.
        """
        picks, arena = formed.picks, worker.output_arena
        sizes = [(r.layout if n == r.rows else lane.layout(n)).output_bytes for r, n in picks]
        while len(sizes) > 1 and sum(sizes) > arena.capacity_bytes:
            sizes.pop()
            picks.pop()
        output = arena.lease(sum(sizes))
        while output is None and self.observer is not None and self.observer.reclaim_output(worker):
            output = arena.lease(sum(sizes))
        if output is None:
            return None
        parts: list[BatchPart] = []
        slices: list[Slice] = []
        waits_ns: list[int] = []
        rows, offset = 0, output.offset
        deadline_ns = hops = 0
        for index, (request, picked) in enumerate(picks):
            first, count = lane.take(request, picked)
            request.running += 1
            request.sent_ns = now
            deadline_ns = max(deadline_ns, request.deadline_ns)
            hops = max(hops, request.terms.hops)
            waits_ns.append(now - request.arrived_ns)
            parts.append(BatchPart(request, first, count, offset))
            slices.append(Slice(request.body_offset, request.rows, first, count, offset))
            rows += count
            offset += sizes[index]
        run_rows = lane.rules.run_rows(rows)
        expected_ns = lane.cost_of(worker).predict_ns(run_rows)
        batch = InFlightBatch(lane, parts, output, run_rows, now, expected_ns)
        if _needs_whole_device(worker, parts[0].request):
            batch.credits = worker.credits
        batch_id = self.begin(worker, batch, now)
        worker.virtual_ns = max(worker.virtual_ns, lane.virtual_ns)
        lane.virtual_ns += expected_ns / lane.config.weight
        lane.counts[formed.reason] += 1
        lane.on_sent(rows, waits_ns, now)
        bucket = parts[0].request.shape
        deadline_ns = deadline_ns if deadline_ns < NEVER_NS else 0
        key = lane.model.key
        return Execute(batch_id, key, run_rows, tuple(slices), bucket, deadline_ns, hops)

    def begin(self, worker: WorkerSlot, batch: InFlightBatch, now: int) -> int:
        """Count a batch as in flight, with its credits of the worker; return its id."""
        self._batch_id += 1
        worker.credits -= batch.credits
        worker.busy_until_ns = max(worker.busy_until_ns, now) + batch.expected_ns
        worker.in_flight[self._batch_id] = batch
        return self._batch_id

    def send(self, worker: WorkerSlot, messages: Sequence[ToWorker]) -> None:
        """Send messages to a worker, or end it so that its batches run elsewhere."""
        assert worker.channel is not None
        try:
            worker.channel.send(encode(messages))
        except OSError as error:
            worker_log.worker_send_failed(worker=worker.index, error=error)
            self.end_worker(worker)

    def _pop_batch(self, worker: WorkerSlot, batch_id: int, now: int) -> InFlightBatch | None:
        """Remove an answered batch and restore the credit; None for a late answer."""
        batch = worker.in_flight.pop(batch_id, None)
        if batch is None:
            self.counts["late_messages"] += 1
            return None
        worker.credits += batch.credits
        worker.busy_until_ns = now
        for other in worker.in_flight.values():
            worker.busy_until_ns += other.expected_ns
        return batch

    def _copy_out(self, worker: WorkerSlot, batch: InFlightBatch, run_ns: int) -> Iterator[None]:
        """Copy results out of the output arena and deliver them; yields during large copies."""
        # Step 10
        assert worker.output is not None
        arena, view = worker.output_arena, worker.output.view
        try:
            for part in batch.parts:
                request = part.request
                results: bytes | memoryview | None = None
                failure: IskanderError | None = None
                if not request.is_over:
                    try:
                        results = copy_small_results(part, view)
                        if results is None:
                            results = yield from copy_results(part, view)
                    except Exception as error:  # The other requests still get their results.
                        failure = results_error(request, error)
                request.running -= 1
                if request.is_over:
                    self._completion.release(request)
                elif failure is not None:
                    self._completion.fail_or_retry(request, failure)
                else:
                    self._accept(worker, batch, part, results, run_ns)
        finally:
            if self.observer is None or not self.observer.holds_output(batch.output):
                arena.give_back(batch.output)

    def _accept(
        self,
        worker: WorkerSlot,
        batch: InFlightBatch,
        part: BatchPart,
        results: bytes | memoryview | None,
        run_ns: int,
    ) -> None:
        """Pass the results of a part to the hooks, and deliver a request that is complete."""
        for on_results in self.hooks.on_results:
            on_results(worker, batch, part, results)
        if results is not None:
            self._completion.complete(part.request, results, run_ns)

    def _continue_copy(self) -> None:
        """Copy the next piece of large results, round-robin between the batches."""
        worker, copy = self._copies.popleft()
        try:
            if _step(copy):
                self._copies.append((worker, copy))
            else:
                self.pump()  # The output arena has free space again.
        finally:
            if self._copies:
                self._loop.call_soon(self._continue_copy)


def _refund(batch: InFlightBatch, now: int) -> None:
    """Charge a batch without results to its lane for no longer than since it was sent."""
    unused_ns = batch.expected_ns - (now - batch.sent_ns)
    if unused_ns > 0:
        batch.lane.virtual_ns -= unused_ns / batch.lane.config.weight


def _step(steps: Iterator[None]) -> bool:
    """Run an iterator to its next pause; False at its end."""
    return any(True for _ in steps)


def _needs_whole_device(worker: WorkerSlot, request: Request) -> bool:
    """Whether no batch may run beside a request: two run at once on a GPU.

    The one that is blamed for the end of a worker is the older one, whichever has the fault.
    """
    return request.kills > 0 and worker.device == "gpu"


def _available_workers(lane: Lane, reserved: set[WorkerSlot]) -> list[WorkerSlot]:
    """Workers with a credit: most credits first, then with a GPU, then earliest free."""
    workers = [w for w in lane.workers.values() if w.credits and w not in reserved]
    if len(workers) > 1:
        if lane.has_both_kinds:
            workers.sort(key=lambda w: (-w.credits, w.device != "gpu", w.busy_until_ns))
        else:
            workers.sort(key=lambda worker: (-worker.credits, worker.busy_until_ns))
    return workers
