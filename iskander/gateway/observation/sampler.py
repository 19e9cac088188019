"""Selects finished requests, holds their leases, and hands them to the observer process.

A sampled request costs one record. It never waits, and memory that a new request needs is taken
from the oldest sample, whose copy in the observer process is invalid by `Verdicts`.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from secrets import randbits
from typing import Any, Final, NamedTuple

from iskander.config.models import ModelConfig
from iskander.config.observation import ObservationConfig
from iskander.contract.processing.buckets import contracts_of_buckets
from iskander.foundation.clock import NS_PER_S, now_ns, wall_ns
from iskander.foundation.measurement.counters import Counters
from iskander.gateway.observation.holds import Holds
from iskander.gateway.observation.link import Link
from iskander.gateway.observation.messages import (
    INPUT_ARENA,
    SAMPLES_MAX,
    Copied,
    Model,
    OutputPart,
    SampleRef,
    Samples,
    Verdicts,
)
from iskander.gateway.observation.sampling import BITS, is_within, request_id, threshold_of
from iskander.gateway.scheduling.input_arena import InputArena
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.request import Request
from iskander.gateway.scheduling.worker_slot import BatchPart, InFlightBatch, WorkerSlot
from iskander.interprocess.memory.arena import Lease

ID_BYTES: Final = 16
LANES_MAX: Final = 4096
"""Lanes with a known share; with one more, all are looked up again."""

HANDED, PRESSURE, LIMIT = "handed_over", "pressure", "held_limit"
EXPIRED, FULL, DOWN, BUSY, LOST = "expired", "queue_full", "not_running", "busy", "process_lost"
WORKER_LOST = "worker_lost"
DROPS: Final = (PRESSURE, LIMIT, EXPIRED, FULL, DOWN, BUSY, LOST, WORKER_LOST)
"""Reasons for a sampled request that no consumer receives."""


class Outgoing(NamedTuple):
    """A sample to send, with the lane and the settings of its model, which may be unloaded then."""

    ref: SampleRef
    lane: Lane
    settings: ModelConfig


class Sampler:
    """`scheduling.observation.Observer` of a gateway process.

    Attributes:
        counts: Sampled requests: `HANDED`, or dropped by reason.
        holds: Held leases.
        on_report: Receives the values of each `Report`.

    Args:
        config: Limits.
        input_arena: Input arena of the gateway.
        settings_of: Settings of a model version by name and version; None if it is unknown.
    """

    def __init__(
        self,
        config: ObservationConfig,
        input_arena: InputArena,
        settings_of: Callable[[str, str], ModelConfig | None],
    ) -> None:
        self.counts = Counters()
        self.holds = Holds(input_arena.arena, config.held_requests, config.held_bytes)
        self.on_report: Callable[[dict[str, dict[str, Any]]], None] = lambda values: None
        self._held_ns = int(config.held_s * NS_PER_S)
        self._input_arena = input_arena
        self._settings_of = settings_of
        self._salt = randbits(BITS)
        self._thresholds: dict[int, int] = {}
        self._settings: dict[int, ModelConfig] = {}  # Of the models with a threshold.
        self._workers: dict[int, WorkerSlot] = {}
        self._outgoing: list[Outgoing] = []
        self._verdicts = Verdicts([], [])
        self._link: Link | None = None
        self._is_flush_due = False
        self._loop = asyncio.get_running_loop()
        input_arena.reclaimers.append(self._reclaim_input)

    def configure(self, config: ObservationConfig) -> None:
        """Apply the live settings, the time to held requests too."""
        self.holds.configure(config.held_requests, config.held_bytes)
        self._held_ns = int(config.held_s * NS_PER_S)

    def connect(self, link: Link) -> None:
        """Hand samples to a new process."""
        self._link = link
        self._loop.add_reader(link.fileno(), self._on_readable)

    def disconnect(self) -> None:
        """Release everything: the process has ended, or is to end."""
        if self._link is None:
            return
        self._loop.remove_reader(self._link.fileno())
        self._receive(self._link)
        self._link = None
        self.counts[LOST] += len(self.holds.release_all())
        self._outgoing.clear()
        self._verdicts = Verdicts([], [])
        self._input_arena.grant_waiting()

    def flush(self) -> bool:
        """Send what waits; False if the socket is full."""
        self._is_flush_due = False
        link, outgoing = self._link, self._outgoing
        self._outgoing = []
        if link is None or not self._send_verdicts(link):
            self._drop([each.ref.ticket for each in outgoing], FULL)
            return False
        ready: list[SampleRef] = []
        for each in outgoing:
            if not self.holds.has(each.ref.ticket):
                continue  # Its memory was needed meanwhile.
            if self._introduce(link, each):
                ready.append(each.ref)
            else:
                self._drop([each.ref.ticket], FULL)
        for start in range(0, len(ready), SAMPLES_MAX):
            refs = tuple(ready[start : start + SAMPLES_MAX])
            if not link.send(Samples(refs)):
                self._drop([ref.ticket for ref in refs], FULL)
        self._input_arena.grant_waiting()
        return True

    def tick(self) -> None:
        """Release what is held for too long; call it every second."""
        self._drop(self.holds.expired(now_ns() - self._held_ns), EXPIRED)
        for request in self.holds.ended():
            self.holds.discard(request)
        if self._link is not None:
            self._send_verdicts(self._link)
        self._input_arena.grant_waiting()

    def on_results(
        self,
        worker: WorkerSlot,
        batch: InFlightBatch,
        part: BatchPart,
        results: bytes | memoryview | None,
    ) -> None:
        """See `Hooks`."""
        request = part.request
        threshold = self._thresholds.get(request.lane.model.key)
        if threshold is None:
            threshold = self._find_threshold(request.lane)
        if not threshold:
            return
        trace = request.terms.trace
        if trace is not None:
            number = int.from_bytes(trace.trace_id, "big")
        else:
            number = request_id(self._salt, request.arrived_ns, id(request))
        if not is_within(number, threshold):
            return
        reason = self._hold_part(worker, batch, part)
        if results is None:
            return
        reason = reason or self._hold_request(request, number)
        if reason:
            self.holds.discard(request)
            self.counts[reason] += 1

    def holds_output(self, output: Lease) -> bool:
        """See `Observer`."""
        return self.holds.keep_output(output)

    def reclaim_output(self, worker: WorkerSlot) -> bool:
        """See `Observer`."""
        if self._link is not None and self._receive(self._link):
            return True
        oldest = self.holds.oldest_output(worker.incarnation)
        if isinstance(oldest, int):
            self._drop([oldest], PRESSURE)
        elif oldest is not None:
            self.holds.abandon(oldest)
        return oldest is not None

    def on_worker_lost(self, worker: WorkerSlot) -> None:
        """See `Hooks`."""
        self._workers.pop(worker.incarnation, None)
        self._drop(self.holds.tickets_in(worker.incarnation), WORKER_LOST)
        for request in self.holds.pending_in(worker.incarnation):
            self.holds.abandon(request)
        if self._link is not None:
            self._link.close_arena(worker.incarnation)

    def _find_threshold(self, lane: Lane) -> int:
        if len(self._thresholds) >= LANES_MAX:
            self._thresholds.clear()
            self._settings.clear()
        key, threshold = lane.model.key, 0
        settings = self._settings_of(lane.model.name, lane.model.version)
        if settings is not None:
            self._settings[key] = settings
            threshold = threshold_of(settings.observed_share)
        self._thresholds[key] = threshold
        return threshold

    def _hold_part(self, worker: WorkerSlot, batch: InFlightBatch, part: BatchPart) -> str:
        """Hold the results of some rows; return why not, or an empty text."""
        if self._link is None:
            return DOWN
        assert worker.output is not None
        lane, rows, offset = part.request.lane, part.rows, part.output_offset
        size = lane.layout(rows).output_bytes
        outputs = lane.layouts.outputs
        if outputs.has_strings:
            size = outputs.string_ranges(worker.output.view[offset : offset + size], rows)[1]
        self._workers[worker.incarnation] = worker
        results = OutputPart(worker.incarnation, offset, size, part.first, rows)
        is_held = self.holds.add_part(part.request, worker, batch, results, now_ns())
        return "" if is_held else LIMIT

    def _hold_request(self, request: Request, number: int) -> str:
        """Hold the inputs too, and send the sample; return why not, or an empty text."""
        if self._input_arena.has_waiting:
            return PRESSURE
        if not self.holds.can_complete(request):
            return LIMIT
        lease = self._input_arena.hold(request)
        ticket, outputs = self.holds.complete(request, lease)
        key = request.lane.model.key
        ref = SampleRef(
            ticket,
            key,
            request.shape,
            request.rows,
            number.to_bytes(ID_BYTES, "big"),
            wall_ns(),
            lease.offset,
            request.input_bytes,
            outputs,
        )
        self._outgoing.append(Outgoing(ref, request.lane, self._settings[key]))
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self.flush)
        return ""

    def _introduce(self, link: Link, outgoing: Outgoing) -> bool:
        """Pass the arenas and the model of a sample, if the process does not know them."""
        ref = outgoing.ref
        if not link.introduce_arena(INPUT_ARENA, self._input_arena.segment):
            return False
        for part in ref.outputs:
            output = self._workers[part.arena].output
            assert output is not None
            if not link.introduce_arena(part.arena, output):
                return False
        return link.introduce_model(ref.key, ref.bucket, lambda: _describe(outgoing))

    def _reclaim_input(self) -> bool:
        """Give back a held lease of the input arena; False if there is none."""
        if self._link is not None and self._receive(self._link):
            return True
        ticket = self.holds.oldest_input()
        if ticket:
            self._drop([ticket], PRESSURE)
        return bool(ticket)

    def _drop(self, tickets: list[int], reason: str) -> None:
        for ticket in tickets:
            self.counts[reason] += self.holds.release(ticket)

    def _on_readable(self) -> None:
        link = self._link
        assert link is not None
        self._receive(link)
        if link.has_ended:
            self._loop.remove_reader(link.fileno())  # The exit follows.
        else:
            self._send_verdicts(link)
        self._input_arena.grant_waiting()

    def _receive(self, link: Link) -> int:
        """Release what the process has copied; return the number of released requests."""
        released = 0
        for message in link.receive():
            if not isinstance(message, Copied):
                self.on_report(message.values)
                continue
            for ticket in message.tickets:
                is_valid = self.holds.release(ticket)
                (self._verdicts.valid if is_valid else self._verdicts.invalid).append(ticket)
                self.counts[HANDED] += is_valid
                released += is_valid
            for ticket in message.refused:
                is_held = self.holds.release(ticket)
                self.counts[BUSY] += is_held
                released += is_held
        return released

    def _send_verdicts(self, link: Link) -> bool:
        verdicts = self._verdicts
        if verdicts.valid or verdicts.invalid:
            if not link.send(verdicts):
                return False
            self._verdicts = Verdicts([], [])
        return True


def _describe(outgoing: Outgoing) -> Model:
    ref, lane, settings = outgoing
    model, contract = lane.model, lane.contract
    assert contract is not None
    one = contracts_of_buckets(contract)[ref.bucket]
    return Model(ref.key, ref.bucket, model.name, model.version, one, settings)
