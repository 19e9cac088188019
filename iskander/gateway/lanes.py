"""A lane: one model version's queue, contract and workers.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Protocol

from iskander.contract.tensors import Contract, body_layout
from iskander.errors import IskanderError, NotReady, Overloaded
from iskander.gateway import ipc
from iskander.gateway.arrow_types import columns_without_nulls, input_schema
from iskander.memory.arena import Lease
from iskander.wire.messages import ModelSpec

LAYOUTS_MAX = 64
"""Layouts kept by number of rows; clients send few different numbers."""


class Caller(Protocol):
    """Whoever asked: told exactly once, on the gateway loop."""

    def deliver(self, request: Request, output: memoryview) -> None:
        """Take the results; `output` is only valid during the call."""

    def fail(self, request: Request, error: IskanderError) -> None:
        """Learn that there will be none."""


class Request:
    """A batch of rows that a caller wants computed.

    Attributes:
        tensors: Bytes of each of the contract's inputs, in its order.
        lease: Where they were written, from admission until the worker is done with them.
        body_offset: Where the tensors begin in the input arena.
        is_abandoned: The caller has gone; nobody is told.
    """

    __slots__ = (
        "body_offset",
        "caller",
        "is_abandoned",
        "lane",
        "lease",
        "queued_ns",
        "rows",
        "tensors",
    )

    def __init__(self, lane: Lane, caller: Caller, rows: int, tensors: list[memoryview]) -> None:
        self.lane = lane
        self.caller = caller
        self.rows = rows
        self.tensors = tensors
        self.lease: Lease | None = None
        self.body_offset = 0
        self.queued_ns = 0
        self.is_abandoned = False


class Layout:
    """How a batch of some number of rows lies in the arenas.

    Attributes:
        header: Framing and metadata of the input's IPC message, up to its body.
        offsets: Of each input, from the body's start.
        input_bytes: Of the whole message.
        output_bytes: Of the results' body.
    """

    __slots__ = ("header", "input_bytes", "offsets", "output_bytes")

    def __init__(self, contract: Contract, template: ipc.BatchTemplate, rows: int) -> None:
        self.offsets, body_bytes = body_layout(contract.inputs, rows)
        nodes, buffers = columns_without_nulls(contract.inputs, rows, self.offsets)
        self.header = ipc.encapsulate(template.render(rows, nodes, buffers, body_bytes))
        self.input_bytes = len(self.header) + body_bytes
        self.output_bytes = body_layout(contract.outputs, rows)[1]


class Lane:
    """One model version.

    Attributes:
        contract: None until the first worker has loaded the model.
        ready: Incarnations of the workers that have it loaded and take work.
        counts: What came in and went out, by name.
    """

    def __init__(self, model: ModelSpec, queue_requests: int) -> None:
        self.model = model
        self.contract: Contract | None = None
        self.ready: set[int] = set()
        self.queue: deque[Request] = deque()
        self.counts: Counter[str] = Counter()
        self.run_ns = 0
        self._queue_requests = queue_requests
        self._layouts: dict[int, Layout] = {}
        self._template: ipc.BatchTemplate | None = None

    def __repr__(self) -> str:
        return (
            f"<Lane {self.title} {len(self.queue)} queued, {len(self.ready)} workers, "
            f"{self.counts['requests']} requests>"
        )

    @property
    def title(self) -> str:
        """Name and version, for people."""
        return f"{self.model.name}/{self.model.version}"

    @property
    def is_ready(self) -> bool:
        """Whether a warmed worker takes this model's batches now."""
        return bool(self.ready)

    def set_contract(self, contract: Contract) -> None:
        """Take the contract that the first worker compiled."""
        self.contract = contract
        self._template = ipc.BatchTemplate(input_schema(contract))

    def layout(self, rows: int) -> Layout:
        """How a batch of `rows` rows lies in the arenas."""
        layout = self._layouts.get(rows)
        if layout is None:
            assert self.contract is not None and self._template is not None
            if len(self._layouts) >= LAYOUTS_MAX:
                self._layouts.clear()
            layout = self._layouts[rows] = Layout(self.contract, self._template, rows)
        return layout

    def require_open(self) -> None:
        """Refuse a new request that would find no worker or no place.

        Raises:
            NotReady: No worker has the model now.
            Overloaded: The queue is at its limit.
        """
        # Step 3
        if not self.ready:
            raise NotReady(
                f"model `{self.title}` has no ready worker",
                model=self.model.name,
                retry_after_ms=500,
            )
        if len(self.queue) >= self._queue_requests:
            raise Overloaded(
                f"{len(self.queue)} requests wait for model `{self.title}`, the limit of its queue",
                model=self.model.name,
                retry_after_ms=100,
            )

    def put(self, request: Request) -> None:
        """Queue an admitted request."""
        # Step 4
        self.counts["requests"] += 1
        self.counts["rows"] += request.rows
        self.queue.append(request)

    def drop(self, request: Request) -> bool:
        """Take a request whose caller has gone out of the queue; False where it is not in it."""
        try:
            self.queue.remove(request)
        except ValueError:
            return False
        return True
