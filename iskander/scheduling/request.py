"""A request: rows that a caller wants computed, and on which terms.

Runs on: gateway loop.
"""

from __future__ import annotations

from builtins import memoryview  # Where mypyc looks for the types of fields.
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from iskander.auth.source import UNKNOWN_SOURCE, Source
from iskander.clock import NS_PER_MS
from iskander.errors import IskanderError
from iskander.memory.arena import Lease
from iskander.memory.client_segment import SegmentRange

if TYPE_CHECKING:
    from iskander.scheduling.lane import Lane

NEVER_NS: Final = 1 << 61
"""Seventy years after the machine's start; with now added to it, it still is one machine word."""
PRIORITY_DEFAULT: Final = 1
PRIORITY_MAX: Final = 9


class Terms(msgspec.Struct, frozen=True):
    """What a client says about the urgency of a request.

    Attributes:
        source: Whose share of the queue the request takes.
        client: Who it says it is; its rhythm, and its limit of requests, are counted by it.
        is_named: The client gave the name itself, so that it means the same from call to call.
        priority: 0 is the highest.
        urgency: 0 to 1.
        budget_ms: Latency that is still useful; None where nothing was said.
        ttl_ms: How long it may wait, where that is less than the lane's.
        steps_remaining: How many actions the client still has to take before it needs another.
        age_ms: How old the observation was when it came.
        is_newest_wins: A newer request of the client replaces this one while it waits.
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
    source: Source = UNKNOWN_SOURCE


NO_TERMS: Final = Terms()


class Caller(Protocol):
    """Whoever asked: told exactly once, on the gateway loop."""

    def deliver(self, request: Request, results: bytes | memoryview) -> None:
        """Take the results, which are the caller's own."""

    def fail(self, request: Request, error: IskanderError) -> None:
        """Learn that there will be none."""


class Request:
    """Rows that a caller wants computed.

    Args:
        lane: Of the model version.
        caller: Is told what came of it.
        rows: At least 1.
        tensors: Buffers of the contract's inputs, in its order: values, or the offsets of strings;
            then the bytes of each input that is strings.
        terms: What the client said.
        arrived_ns: When it came.
        call_deadline_ns: When the call that it came with ends.
        bucket: Number of the bucket that its rows are in, where the model has some.

    Attributes:
        layout: How its rows lie in the arenas.
        shape: Requests of one batch have the same; it is the number of their bucket.
        deadline_ns: The soonest of the call's, the client's and the model's.
        expires_ns: When it leaves the queue: the deadline, or when it has waited or aged enough.
        lease: Where the tensors were written, until no worker reads them any more.
        body_offset: Where they begin in the input arena.
        input_bytes: What they take there.
        rank: Its place in the queue's order; lower is sooner.
        number: Order of admission.
        queued_ns: When it was admitted.
        sent_ns: When its last rows were sent to a worker.
        run_ns: How long the batch ran that gave the last of its results.
        todo: Ranges of rows (first, count) that no worker has.
        running: Batches that have rows of it.
        results: Of a request that runs in pieces, while they come in: where they belong, or, with
            strings, from which row on and how many.
        is_alone: It is not put together with others: a batch with it failed, or killed a worker.
        kills: Workers that died while they ran it.
        losses: Workers that died while they had it.
        is_part: Others of its batch came before it, and the batch was let in with the first.
        is_waiting: It is in its lane's queue.
        is_over: The caller was told, or has gone.
    """

    __slots__ = (
        "arrived_ns",
        "body_offset",
        "caller",
        "deadline_ns",
        "expires_ns",
        "input_bytes",
        "is_alone",
        "is_over",
        "is_part",
        "is_waiting",
        "kills",
        "lane",
        "layout",
        "lease",
        "losses",
        "number",
        "queued_ns",
        "rank",
        "results",
        "rows",
        "run_ns",
        "running",
        "sent_ns",
        "shape",
        "tensors",
        "terms",
        "todo",
    )

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
        layouts = lane.layouts_of[bucket]
        self.layout = layouts.around(rows, tensors) if layouts.has_strings else layouts.of(rows)
        self.shape = bucket
        self.arrived_ns = arrived_ns
        self.deadline_ns = call_deadline_ns
        self.expires_ns = min(call_deadline_ns, arrived_ns + lane.ttl_ns)
        if lane.has_limits or terms.budget_ms is not None or terms.ttl_ms is not None:
            self._limit()
        self.lease: Lease | None = None
        self.body_offset = self.input_bytes = 0
        self.rank = 0.0
        self.number = self.queued_ns = self.sent_ns = self.run_ns = 0
        self.todo = [(0, rows)]
        self.running = 0
        self.results: memoryview | list[tuple[int, int, memoryview]] | None = None
        self.is_alone = self.is_part = self.is_waiting = self.is_over = False
        self.kills = self.losses = 0

    @property
    def waiting_rows(self) -> int:
        """Rows that no worker has."""
        todo = self.todo
        return todo[0][1] if len(todo) == 1 else sum(count for _, count in todo)

    def wait_anew(self, now_ns: int) -> None:
        """Its rows came back: it may wait as long as at first, and not beyond deadline and age."""
        config, terms = self.lane.config, self.terms
        limits = [self.deadline_ns, now_ns + self.lane.ttl_ns]
        if terms.ttl_ms is not None:
            limits.append(now_ns + int(terms.ttl_ms * NS_PER_MS))
        if config.staleness_ms:
            left_ms = config.staleness_ms - terms.age_ms
            limits.append(self.arrived_ns + int(left_ms * NS_PER_MS))
        self.expires_ns = min(limits)

    def _limit(self) -> None:
        """Take what the client and the lane say into account."""
        budget_ms = self.terms.budget_ms
        if budget_ms is None and self.lane.config.deadline_ms:
            budget_ms = self.lane.config.deadline_ms
        if budget_ms is not None:
            self.deadline_ns = min(self.deadline_ns, self.arrived_ns + int(budget_ms * NS_PER_MS))
        self.wait_anew(self.arrived_ns)

    def __repr__(self) -> str:
        return (
            f"<Request {self.number} for {self.lane.title}: {self.rows} rows, todo {self.todo}, "
            f"{self.running} running{', over' if self.is_over else ''}>"
        )
