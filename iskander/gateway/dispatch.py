"""Requests to workers, and results back: the in-flight tables, completion, failure, loss.

A worker with a credit gets the request that has waited longest among the lanes that it serves.
Every answer names the incarnation and the batch that it is about; one that names none in flight
is late, and is counted and dropped.

Runs on: gateway loop.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from iskander.clock import now_ns
from iskander.errors import IskanderError, NotReady, WorkerLost
from iskander.gateway.intake import Intake
from iskander.gateway.lanes import Lane, Request
from iskander.gateway.workers import Flight, Worker
from iskander.memory.arena import Lease
from iskander.wire.messages import Done, Execute, Failed, encode

log = logging.getLogger("iskander.dispatch")


class Dispatcher:
    """Moves requests between lanes and workers.

    Args:
        intake: Owner of the input leases.
        lanes: All of them, by the key of their model.
    """

    def __init__(self, intake: Intake, lanes: dict[int, Lane]) -> None:
        self._intake = intake
        self._lanes = lanes
        self._open: dict[int, Worker] = {}
        self._batch_id = 0
        self.counts: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        """Batches that workers have."""
        return sum(len(worker.in_flight) for worker in self._open.values())

    def open(self, worker: Worker) -> None:
        """Let a worker have batches of the models that it has loaded."""
        self._open[worker.incarnation] = worker
        for key in worker.models:
            self._lanes[key].ready.add(worker.incarnation)
        self.pump()

    def close(self, worker: Worker) -> None:
        """Send a worker nothing more; what it has it may finish."""
        for lane in self._lanes.values():
            lane.ready.discard(worker.incarnation)
        if not worker.in_flight:
            self._open.pop(worker.incarnation, None)

    def submit(self, request: Request) -> None:
        """Take on a request that is in its lane's queue."""
        request.queued_ns = now_ns()
        self.pump()

    def pump(self) -> None:
        """Send what can be sent."""
        # Step 5
        outgoing: dict[Worker, list[Execute]] = {}
        lanes = self._lanes.values()
        while True:
            waiting = [lane for lane in lanes if lane.queue]
            if len(waiting) > 1:
                waiting.sort(key=lambda lane: lane.queue[0].queued_ns)
            if not any(self._take_first(lane, outgoing) for lane in waiting):
                break
        for worker, messages in outgoing.items():
            assert worker.sender is not None
            worker.sender.send(encode(messages))

    def withdraw(self, request: Request) -> None:
        """The caller has gone: forget its request, at once where no worker has it."""
        request.is_abandoned = True
        if request.lease is not None and request.lane.drop(request):
            request.lane.counts["withdrawn"] += 1
            self._intake.give_back(request)

    def on_done(self, done: Done) -> None:
        """A worker has computed a batch."""
        # Step 8
        flight, worker = self._land(done.incarnation, done.batch_id)
        if flight is None or worker is None:
            return
        request = flight.request
        lane = request.lane
        lane.run_ns += done.run_ns
        worker.batches += 1
        self._intake.give_back(request)
        if request.is_abandoned:
            lane.counts["abandoned"] += 1
        else:
            lane.counts["completed"] += 1
            self._deliver(request, worker, flight)
        worker.output_arena.give_back(flight.output)

    def on_failed(self, failed: Failed) -> None:
        """A worker could not compute a batch."""
        flight, worker = self._land(failed.incarnation, failed.batch_id)
        if flight is None or worker is None:
            return
        worker.output_arena.give_back(flight.output)
        self._intake.give_back(flight.request)
        error = IskanderError.from_wire({"code": failed.code, "message": failed.message})
        self._fail(flight.request, error)

    def on_lost(self, worker: Worker) -> None:
        """A worker's process is gone, and what it ran with it."""
        self._open.pop(worker.incarnation, None)
        flights = list(worker.in_flight.values())
        worker.in_flight.clear()
        for flight in flights:
            self._intake.give_back(flight.request)
            self._fail(
                flight.request,
                WorkerLost(
                    f"the worker died while it had this batch for model "
                    f"`{flight.request.lane.title}`; nothing was computed",
                    retry_after_ms=100,
                ),
            )

    def refuse_queued(self, lanes: Iterable[Lane]) -> None:
        """Answer everything that waits in lanes that no worker will come back to."""
        for lane in lanes:
            while lane.queue:
                request = lane.queue.popleft()
                self._intake.give_back(request)
                self._fail(
                    request,
                    NotReady(f"model `{lane.title}` lost its workers", retry_after_ms=1000),
                )

    def _take_first(self, lane: Lane, outgoing: dict[Worker, list[Execute]]) -> bool:
        """Give the lane's first request to a worker; False where none can have it."""
        request = lane.queue[0]
        output_bytes = lane.layout(request.rows).output_bytes
        worker, output = self._choose(lane, output_bytes)
        if worker is None or output is None:
            return False
        lane.queue.popleft()
        self._batch_id += 1
        worker.credits -= 1
        worker.in_flight[self._batch_id] = Flight(request, output, output_bytes, now_ns())
        execute = Execute(
            self._batch_id, lane.model.key, request.rows, request.body_offset, output.offset
        )
        outgoing.setdefault(worker, []).append(execute)
        return True

    def _choose(self, lane: Lane, output_bytes: int) -> tuple[Worker | None, Lease | None]:
        """The worker of the lane with the most credits left and room for the results."""
        workers = [self._open[incarnation] for incarnation in lane.ready]
        if len(workers) > 1:
            workers.sort(key=lambda worker: -worker.credits)
        for worker in workers:
            if worker.credits:
                output = worker.output_arena.lease(output_bytes)
                if output is not None:
                    return worker, output
        return None, None

    def _land(self, incarnation: int, batch_id: int) -> tuple[Flight | None, Worker | None]:
        worker = self._open.get(incarnation)
        flight = worker.in_flight.pop(batch_id, None) if worker is not None else None
        if worker is None or flight is None:
            self.counts["late_messages"] += 1
            log.warning("a late message about batch %d was dropped", batch_id)
            return None, None
        worker.credits += 1
        return flight, worker

    @staticmethod
    def _deliver(request: Request, worker: Worker, flight: Flight) -> None:
        assert worker.output is not None
        start = flight.output.offset
        try:
            request.caller.deliver(request, worker.output.view[start : start + flight.output_bytes])
        except Exception:
            # One caller's results must not keep those of the others in the same wake-up.
            log.exception("results of batch for %s could not be delivered", request.lane.title)
            request.caller.fail(request, IskanderError("the server failed to take the results"))

    @staticmethod
    def _fail(request: Request, error: IskanderError) -> None:
        request.lane.counts[f"failed.{error.code}"] += 1
        if not request.is_abandoned:
            request.caller.fail(request, error)
