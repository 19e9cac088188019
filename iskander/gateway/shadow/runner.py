"""Runs shadow batches: finished requests on candidates, in idle time of the workers.

Rules keep them from delaying other requests:

- A batch is sent only to a worker without any other batch, and without a request that waits for it.
- It is short, and limited to a share of the worker's time and of this event loop (`admission`). If
  the rows of a version depend on each other, it is one whole request instead, of any duration.
- It is cancelled if it would run for a while longer when another batch arrives. A worker that runs
  it nevertheless is ended.
- Few requests are kept (`queue`), and they are dropped when memory is needed. None is retried.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from iskander.config.shadow import ShadowConfig
from iskander.errors import Cancelled
from iskander.foundation.clock import NS_PER_S, NS_PER_US, now_ns
from iskander.foundation.logs import models as log
from iskander.gateway.scheduling.input_arena import InputArena
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.request import NEVER_NS, Request
from iskander.gateway.scheduling.worker_slot import BatchPart, InFlightBatch, WorkerSlot
from iskander.gateway.shadow.admission import TimeBudget, rows_of_batch
from iskander.gateway.shadow.comparison import GROUP_WORK, Tolerance
from iskander.gateway.shadow.pair import ShadowPair
from iskander.gateway.shadow.queue import ShadowPart, ShadowQueue, Usage
from iskander.interprocess.control.messages import Execute, Failed, Slice

if TYPE_CHECKING:
    from iskander.gateway.scheduling.dispatch import Dispatcher

CANCEL_NS: Final = 200 * NS_PER_US
"""A batch that ends within this time is not cancelled, which takes as long."""
CANCEL_TIMEOUT_NS: Final = 2 * NS_PER_S
"""A worker that still runs a cancelled batch after this time is ended, if others wait for it."""

Pair = tuple[Lane, Lane]
"""Served version and candidate."""


class _Run:
    """A shadow batch at a worker; `cancelled_ns` is 0 until it is cancelled."""

    __slots__ = ("batch", "batch_id", "cancelled_ns", "offsets", "pair", "parts")

    def __init__(
        self, pair: ShadowPair, batch: InFlightBatch, parts: list[ShadowPart], offsets: list[int]
    ) -> None:
        self.pair, self.batch, self.parts, self.offsets = pair, batch, parts, offsets
        self.batch_id = self.cancelled_ns = 0

    def drop(self, reason: str) -> None:
        """Count its rows as dropped."""
        self.pair.dropped[reason] += sum(part.rows for part in self.parts)


class ShadowRunner:
    """Runs the shadow batches of all pairs of versions.

    Args:
        dispatcher: Sends the batches.
        arena: Holds the inputs.
        lanes: All lanes.
        config: Settings.
        processes: Gateway processes that share the workers.

    Attributes:
        pairs: The pairs; the next one to get a batch is first.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        arena: InputArena,
        lanes: Mapping[int, Lane],
        config: ShadowConfig,
        processes: int = 1,
    ) -> None:
        self.pairs: list[ShadowPair] = []
        self._by_served: dict[Lane, list[ShadowPair]] = {}
        self._dispatcher, self._arena, self._lanes = dispatcher, arena, lanes
        self._tolerance = Tolerance(config.absolute_tolerance, config.relative_tolerance)
        self._processes = processes
        self._usage = Usage()
        self._running: dict[WorkerSlot, _Run] = {}
        self._loop_budget = TimeBudget(config.time_percent / 100)
        self._worker_budgets: dict[int, TimeBudget] = {}
        self._is_draining = False
        self.configure(config)
        arena.reclaimers.insert(0, self.reclaim)

    def configure(self, config: ShadowConfig) -> None:
        """Apply the live settings."""
        self._bytes_max = config.bytes
        self._loop_budget.share = config.time_percent / 100
        self._worker_share = self._loop_budget.share / self._processes
        for budget in self._worker_budgets.values():
            budget.share = self._worker_share
        for pair in self.pairs:
            pair.busy_until_ns = 0

    def set_pairs(self, shares: Mapping[Pair, float]) -> None:
        """Set the pairs and their shares; a pair that exists keeps its statistics."""
        known = {(pair.served, pair.candidate): pair for pair in self.pairs}
        for key in known.keys() - shares.keys():
            known[key].share = 0.0
            known[key].drop_all("replaced")
        self.pairs, self._by_served = [], {}
        for (served, candidate), share in shares.items():
            pair = known.get((served, candidate))
            if pair is None:
                queue = ShadowQueue(self._arena, self._usage)
                pair = ShadowPair(served, candidate, queue, self._tolerance, self.admit)
            pair.share = share
            self.pairs.append(pair)
            self._by_served.setdefault(served, []).append(pair)
        if shares and self._dispatcher.shadow is None:
            self._dispatcher.shadow = self
            # First: the order of the consumers of a lease stays the same whenever pairs are set.
            self._dispatcher.hooks.on_results.insert(0, self.on_results)

    def drain(self) -> None:
        """Drop all requests, and cancel the running batches."""
        self._is_draining = True
        for pair in self.pairs:
            pair.drop_all("draining")
        for worker, run in self._running.items():
            worker.abort(run.batch_id)

    def reclaim(self) -> bool:
        """Give the lease of one request back; False if there is none."""
        for pair in self.pairs:
            rows = pair.queue.reclaim()
            if rows:
                pair.dropped["arena_full"] += rows
                return True
        return False

    def on_results(
        self,
        worker: WorkerSlot,
        batch: InFlightBatch,
        part: BatchPart,
        results: bytes | memoryview | None,
    ) -> None:
        """Offer a complete request to the pairs of its version."""
        if results is not None:
            for pair in self._by_served.get(part.request.lane, ()):
                pair.offer(part.request, results)

    def admit(self, pair: ShadowPair, request: Request, results: bytes | memoryview) -> None:
        """Keep a selected request for the next shadow batch, or count it as dropped."""
        now = now_ns()
        # Most offers end here: their cost is that of the served requests.
        is_busy = now < pair.busy_until_ns
        reason = "busy" if is_busy else self._refusal(pair, request, len(results), now)
        if reason:
            pair.dropped[reason] += request.rows
        else:
            pair.queue.put(request, results, now)

    def pump(self, now: int) -> int:
        """Cancel, compare and send; return the time of the next call without an event."""
        wake_ns = self._yield_workers(now) if self._running else NEVER_NS
        for pair in list(self.pairs):
            if now >= pair.compare_at_ns:
                begun_ns = now_ns()
                pair.compare(now)
                self._loop_budget.spend(now_ns() - begun_ns, now)
            wake_ns = min(wake_ns, pair.compare_at_ns)
            while pair.queue.expires_ns <= now:
                pair.dropped["expired"] += pair.queue.drop_first()
            if len(pair.queue):
                wake_ns = min(wake_ns, pair.queue.expires_ns, self._send_all(pair, now))
        return wake_ns

    def on_done(self, worker: WorkerSlot, run_ns: int, now: int) -> None:
        """Collect the results of a worker's shadow batch."""
        run = self._running.pop(worker)
        pair, lane = run.pair, run.pair.candidate
        self._budget_of(worker).spend(now - run.batch.sent_ns, now)
        lane.cost_of(worker)
        lane.costs[worker.index].observe(run.batch.run_rows, run_ns)
        pair.pauses.on_success()
        assert worker.output is not None
        for part, offset in zip(run.parts, run.offsets, strict=True):
            size = lane.layout(part.rows).output_bytes
            pair.collect(part, worker.output.view[offset : offset + size], now)
        pair.compare(now)
        self._finish(worker, run)
        self._loop_budget.spend(now_ns() - now, now)

    def on_failed(self, worker: WorkerSlot, failed: Failed, now: int) -> None:
        """Drop the rows of a worker's shadow batch that failed or was cancelled."""
        run = self._running.pop(worker)
        self._budget_of(worker).spend(now - run.batch.sent_ns, now)
        was_cancelled = failed.code == Cancelled.code
        run.drop("cancelled" if was_cancelled else "failed")
        if not was_cancelled:
            run.pair.pauses.on_failure(f"a shadow batch failed: {failed.message}", now)
        self._finish(worker, run)

    def on_lost(self, worker: WorkerSlot, *, was_running: bool, now: int) -> None:
        """Drop the rows of the shadow batch of an ended worker."""
        run = self._running.pop(worker)
        run.drop("worker_lost")
        if was_running:
            reason = f"worker {worker.index} ended during a shadow batch"
            run.pair.pauses.on_failure(reason, now, was_loss=True)
            log.shadow_ended_worker(model=run.pair.candidate.title, worker=worker.index)
        run.pair.queue.finish(run.parts)

    def _refusal(self, pair: ShadowPair, request: Request, result_bytes: int, now: int) -> str:
        """Return why a selected request is dropped; empty if it is kept."""
        if self._is_draining:
            return "draining"
        if not pair.match():
            return "not_comparable" if pair.problem else "not_ready"
        if not pair.is_runnable:
            return "not_ready"
        reason = pair.obstacle(request) if pair.is_apart else ""
        if reason or now < pair.pauses.until_ns:
            return reason or "suspended"
        arena = self._arena.arena
        if 2 * arena.leased_bytes > arena.capacity_bytes:
            return "arena_full"
        pair.busy_until_ns = self._ready_ns(pair, now)
        size = request.input_bytes + result_bytes
        is_free = pair.busy_until_ns <= now and self._usage.fits(size, self._bytes_max)
        return "" if is_free else "busy"

    def _send_all(self, pair: ShadowPair, now: int) -> int:
        """Send the next batches of a pair to idle workers; return the time of the next try."""
        if now < pair.busy_until_ns:
            return pair.busy_until_ns
        if not pair.is_runnable or now < pair.pauses.until_ns:
            pair.drop_all("suspended" if pair.is_runnable else "not_ready")
            return NEVER_NS
        if self._loop_budget.ready_ns(now) <= now:
            for worker in pair.candidate.workers.values():
                is_idle = not worker.in_flight and self._budget_of(worker).ready_ns(now) <= now
                if len(pair.queue) and is_idle and not self._is_awaited(worker):
                    self._send(pair, worker, now)
        pair.busy_until_ns = self._ready_ns(pair, now)
        return pair.busy_until_ns if pair.busy_until_ns > now else NEVER_NS

    def _ready_ns(self, pair: ShadowPair, now: int) -> int:
        """Return when the limits of time permit a batch; not later than now if they do."""
        workers = pair.candidate.workers.values()
        worker_ns = min(self._budget_of(worker).ready_ns(now) for worker in workers)
        return max(self._loop_budget.ready_ns(now), worker_ns)

    def _send(self, pair: ShadowPair, worker: WorkerSlot, now: int) -> None:
        """Send the next batch of a pair to a worker, if its output arena is not busy."""
        begun_ns = now_ns()
        lane, comparison = pair.candidate, pair.comparison
        assert comparison is not None
        cost = lane.cost_of(worker)
        if pair.is_apart:
            if pair.queue.is_first_cut:  # Before the dependence of the rows was known.
                pair.dropped["not_whole"] += pair.queue.drop_first()
                return
            parts = pair.queue.peek_whole()
        else:
            served = pair.served.cost_of(worker)
            first_rows, is_odd = pair.queue.first_rows, bool(pair.batches % 2)
            rows = rows_of_batch(cost, served, first_rows, is_odd=is_odd)
            work_rows = max(GROUP_WORK // comparison.row_work, 1)
            parts = pair.queue.peek(min(rows, work_rows, lane.rules.rows_max))
        sizes = [lane.layout(part.rows).output_bytes for part in parts]
        arena = worker.output_arena
        is_busy = 2 * (arena.leased_bytes + sum(sizes)) > arena.capacity_bytes
        output = None if is_busy else arena.lease(sum(sizes))
        if output is None:
            return
        pair.queue.take(parts)
        offsets = [output.offset + sum(sizes[:index]) for index in range(len(sizes))]
        slices = tuple(
            Slice(request.body_offset, request.rows, first, count, offset)
            for (request, first, count), offset in zip(parts, offsets, strict=True)
        )
        run_rows = lane.rules.run_rows(sum(part.rows for part in parts))
        batch = InFlightBatch(lane, [], output, run_rows, now, cost.predict_ns(run_rows))
        batch.is_shadow = True
        run = self._running[worker] = _Run(pair, batch, parts, offsets)
        run.batch_id = self._dispatcher.begin(worker, batch, now)
        pair.batches += 1
        self.pairs.remove(pair)
        self.pairs.append(pair)
        bucket, hops = parts[0].request.bucket, max(part.request.hops for part in parts)
        message = Execute(run.batch_id, lane.model.key, run_rows, slices, bucket, 0, hops)
        self._dispatcher.send(worker, [message])
        self._loop_budget.spend(now_ns() - begun_ns, now)

    def _yield_workers(self, now: int) -> int:
        """Cancel batches that others would wait for; return the time of the next check."""
        wake_ns = NEVER_NS
        for worker, run in list(self._running.items()):
            if len(worker.in_flight) == 1 and not self._is_awaited(worker):
                continue
            expected_ns = run.batch.expected_ns
            left_ns = run.batch.sent_ns + expected_ns - now
            if run.cancelled_ns:
                if now - run.cancelled_ns >= CANCEL_TIMEOUT_NS:
                    run.cancelled_ns = now
                    self._dispatcher.end_worker(worker)
                wake_ns = min(wake_ns, run.cancelled_ns + CANCEL_TIMEOUT_NS)
            elif expected_ns and abs(left_ns) < CANCEL_NS:
                wake_ns = min(wake_ns, now + left_ns + CANCEL_NS)
            else:
                run.cancelled_ns = now
                worker.abort(run.batch_id)
                wake_ns = min(wake_ns, now + CANCEL_TIMEOUT_NS)
        return wake_ns

    def _is_awaited(self, worker: WorkerSlot) -> bool:
        """Whether a request of any model waits for a worker."""
        incarnation = worker.incarnation
        lanes = self._lanes.values()
        return any(lane.queue.requests and incarnation in lane.workers for lane in lanes)

    def _budget_of(self, worker: WorkerSlot) -> TimeBudget:
        budget = self._worker_budgets.get(worker.index)
        if budget is None:
            budget = self._worker_budgets[worker.index] = TimeBudget(self._worker_share)
        return budget

    def _finish(self, worker: WorkerSlot, run: _Run) -> None:
        worker.output_arena.give_back(run.batch.output)
        run.pair.queue.finish(run.parts)
