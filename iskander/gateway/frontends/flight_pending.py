"""What stands in a stream's window: a batch from its admission until its response is written.

One of several requests is in `flight_divided`.

Runs on: gateway loop.
"""

from __future__ import annotations

from typing import Any

from iskander.clock import now_ns
from iskander.errors import IskanderError
from iskander.gateway.frontends.flight_codec import Arrived
from iskander.gateway.frontends.stream_terms import StreamTerms
from iskander.gateway.lanes.lane import Lane
from iskander.gateway.lanes.request import Caller, Request


class Pending(Request):
    """A batch of a stream, from admission until its response is written.

    Attributes:
        taken: What the response is made of; None until the results are there.
        error: Why there will be none.
        held_bytes: What it keeps of private memory at most: its body, expanded, and its results.
    """

    __slots__ = ("arrived", "error", "held_bytes", "taken")

    def __init__(
        self, lane: Lane, caller: Caller, arrived: Arrived, raw_bytes: int, terms: StreamTerms
    ) -> None:
        super().__init__(
            lane,
            caller,
            arrived.rows,
            arrived.portions[0].tensors
            if arrived.portions
            else [arrived.body[start:stop] for start, stop in arrived.tensors],
            terms=terms.of(arrived.app_metadata),
            arrived_ns=now_ns(),
            call_deadline_ns=terms.deadline_ns,
            bucket=arrived.portions[0].bucket if arrived.portions else 0,
        )
        self.arrived = arrived.without_inputs()
        self.taken: Any = None
        self.error: IskanderError | None = None
        self.held_bytes = max(raw_bytes, len(arrived.body)) + self.layout.output_bytes


class Refused:
    """Stands in the window for a batch that was not taken."""

    __slots__ = ("error", "held_bytes", "taken")

    def __init__(self, error: IskanderError) -> None:
        self.error = error
        self.taken = None
        self.held_bytes = 0
