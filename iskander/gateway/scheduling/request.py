"""Requests: rows to compute for a caller, with scheduling terms.

Runs on: gateway loop.
"""

from __future__ import annotations

from builtins import memoryview  # mypyc needs this for the types of fields.
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from iskander.errors import IskanderError
from iskander.foundation.clock import NS_PER_MS
from iskander.gateway.auth.quota import Quota
from iskander.gateway.auth.source import UNKNOWN_SOURCE, Source
from iskander.gateway.scheduling.tracing import BatchRun, TraceContext
from iskander.interprocess.memory.arena import Lease
from iskander.interprocess.memory.client_segment import SegmentRange

if TYPE_CHECKING:
    from iskander.gateway.scheduling.lanes.lane import Lane

NEVER_NS: Final = 1 << 61
"""Seventy years after boot; this plus the current time still fits a machine word."""
PRIORITY_DEFAULT: Final = 1
PRIORITY_MAX: Final = 9


class Terms(msgspec.Struct, frozen=True):
    """Scheduling terms that a client sends with a request.

    Attributes:
        client: Name of the client; key of its arrival rhythm and request limit.
        is_named: The client sent the name itself, so it is stable across calls.
        priority: 0 is the highest.
        urgency: 0 to 1.
        budget_ms: Maximum useful latency; None if not sent.
        ttl_ms: Maximum time in the queue, if less than that of the lane.
        steps_remaining: Actions that the client has left before it needs a new result.
        age_ms: Age of the observation at its arrival.
        is_newest_wins: A newer request of the client replaces this one while it is queued.
        is_alone: The rows are not combined with those of other requests in one batch.
        source: Source whose share of the queue the request uses.
        hops: Gateways that it passed before, each with a remote model.
        trace: Span of the caller; None without one, and if tracing is off.
    """

    client: str = ""
    is_named: bool = False
    priority: int = PRIORITY_DEFAULT
    urgency: float = 0.0
    budget_ms: float | None = None
    ttl_ms: float | None = None
    steps_remaining: int | None = None
    age_ms: float = 0.0
    is_newest_wins: bool = False
    is_alone: bool = False
    source: Source = UNKNOWN_SOURCE
    hops: int = 0
    trace: TraceContext | None = None


NO_TERMS: Final = Terms()


class Caller(Protocol):
    """Receives the outcome of a request exactly once, on the gateway loop."""

    def deliver(self, request: Request, results: bytes | memoryview) -> None:
        """Receive the results, which the caller owns."""

    def fail(self, request: Request, error: IskanderError) -> None:
        """Receive an error instead of results."""


class Request:
    """Rows to compute for a caller.

    Attributes:
        tensors: Buffers of the contract's inputs, in its order: values, or the offsets of strings;
            then the bytes of each string input.
        shape: Index of the bucket; requests of one batch have the same.
        deadline_ns: Earliest of the deadlines of the call, the client and the model.
        expires_ns: Time at which it leaves the queue: its deadline, maximum wait or maximum age.
        lease: Lease of its tensors, until no worker reads them any more.
        body_offset: Offset of the tensors in the input arena.
        input_bytes: Size of its IPC message in the input arena.
        rank: Position in the order of the queue; lower runs first.
        number: Sequence number in the queue, new with each retry; 0 before admission.
        queued_ns: Time of its admission.
        sent_ns: Time at which its last rows were sent to a worker.
        run_ns: Run time of the batch that completed it.
        todo: Ranges of rows (first, count) that no worker has.
        running: Number of batches in flight with rows of it.
        results: Partial results of a request in several batches: the result body, or, with string
            outputs, (first row, count, body) of each part.
        is_alone: It must run alone: its terms say so, or a batch with it failed.
        kills: Workers that died while running it.
        losses: Workers that died while holding it.
        is_part: A later part of a client's batch that was admitted with the first part.
        whole: Rows and input bytes of the batch, if this is the first of several parts.
        quota: Quota of its grant that counts its rows, from its lease to its end.
        is_waiting: It is in the queue.
        is_over: It was answered, or its caller is gone.
        queued_before: Number of queued requests at its admission.
        runs: With tracing, the batches with rows of it that have left their worker.
    """

    __slots__ = (
        "arrived_ns", "body_offset", "caller", "deadline_ns", "expires_ns", "input_bytes",
        "is_alone", "is_over", "is_part", "is_waiting", "kills", "lane", "layout", "lease",
        "losses", "number", "queued_before", "queued_ns", "quota", "rank", "results", "rows",
        "run_ns", "running", "runs", "sent_ns", "shape", "tensors", "terms", "todo", "whole",
    )  # fmt: skip

    def __init__(
        self,
        lane: Lane,
        caller: Caller,
        rows: int,
        tensors: Sequence[memoryview | SegmentRange],
        *,
        terms: Terms = NO_TERMS,
        arrived_ns: int = 0,
        call_deadline_ns: int = NEVER_NS,
        bucket: int = 0,
    ) -> None:
        self.lane = lane
        self.caller = caller
        self.rows = rows
        self.tensors = tensors
        self.terms = terms
        cache = lane.layouts_by_bucket[bucket]
        self.layout = (
            cache.for_strings(rows, tensors) if cache.has_strings else cache.for_rows(rows)
        )
        self.shape = bucket
        self.arrived_ns = arrived_ns
        self.deadline_ns = call_deadline_ns
        self.expires_ns = min(call_deadline_ns, arrived_ns + lane.ttl_ns)
        if lane.has_limits or terms.budget_ms is not None or terms.ttl_ms is not None:
            budget_ms = terms.budget_ms
            if budget_ms is None and lane.config.deadline_ms:
                budget_ms = lane.config.deadline_ms
            if budget_ms is not None:
                self.deadline_ns = min(call_deadline_ns, arrived_ns + int(budget_ms * NS_PER_MS))
            self.restart_wait(arrived_ns)
        self.lease: Lease | None = None
        self.body_offset = self.input_bytes = 0
        self.rank = 0.0
        self.number = self.queued_ns = self.sent_ns = self.run_ns = 0
        self.todo = [(0, rows)]
        self.running = 0
        self.results: memoryview | list[tuple[int, int, memoryview]] | None = None
        self.is_alone = terms.is_alone
        self.is_part = self.is_waiting = self.is_over = False
        self.kills = self.losses = self.queued_before = 0
        self.runs: tuple[BatchRun, ...] = ()
        self.whole: tuple[int, int] | None = None
        self.quota: Quota | None = None

    @property
    def waiting_rows(self) -> int:
        """Number of rows that no worker has."""
        todo = self.todo
        return todo[0][1] if len(todo) == 1 else sum(count for _, count in todo)

    @property
    def is_cut(self) -> bool:
        """Whether it is not all rows of its batch, or a worker has had some of them only."""
        return self.is_part or self.whole is not None or self.todo != [(0, self.rows)]

    def leave_quota(self) -> None:
        """Stop to count the rows as outstanding; its grant may have no limits any more."""
        quota, self.quota = self.quota, None
        if quota is not None:
            quota.outstanding_rows -= self.rows

    def restart_wait(self, now_ns: int) -> None:
        """Restart the maximum wait; the deadline and the maximum age stay."""
        config, terms = self.lane.config, self.terms
        limits = [self.deadline_ns, now_ns + self.lane.ttl_ns]
        if terms.ttl_ms is not None:
            limits.append(now_ns + int(terms.ttl_ms * NS_PER_MS))
        if config.staleness_ms:
            left_ms = config.staleness_ms - terms.age_ms
            limits.append(self.arrived_ns + int(left_ms * NS_PER_MS))
        self.expires_ns = min(limits)

    def __repr__(self) -> str:
        return (
            f"<Request {self.number} for {self.lane.title}: {self.rows} rows, todo {self.todo}, "
            f"{self.running} running{', over' if self.is_over else ''}>"
        )
