"""Worker slot as the dispatcher sees it: credits, batches in flight, output arena, channel.

Runs on: gateway loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from iskander.interprocess.control.channel import Channel
from iskander.interprocess.memory.arena import Arena, Lease
from iskander.interprocess.memory.heartbeat import Heartbeat, read_heartbeat
from iskander.interprocess.memory.segment import Segment

if TYPE_CHECKING:
    from iskander.gateway.scheduling.lanes.lane import Lane
    from iskander.gateway.scheduling.request import Request

CREDITS: Final = 2
"""One batch running and one waiting, so that a worker never idles between two."""


class BatchPart:
    """The rows of one request in a batch; their results are at `output_offset` in the arena."""

    __slots__ = ("first", "output_offset", "request", "rows")

    def __init__(self, request: Request, first: int, rows: int, output_offset: int) -> None:
        self.request = request
        self.first = first
        self.rows = rows
        self.output_offset = output_offset


class InFlightBatch:
    """A batch that was sent to a worker and has no answer yet.

    Args:
        lane: Lane of its model version.
        parts: Its parts, in the order of the rows.
        output: Lease for all results.
        run_rows: Number of rows that the model runs with, padding included.
        sent_ns: Send time.
        expected_ns: Predicted run time; 0 while the cost model has no data.

    Attributes:
        credits: Batches of the worker that it counts as: all, if no other may run beside it.
        is_shadow: It is a shadow batch, without parts.
    """

    __slots__ = (
        "credits", "expected_ns", "is_shadow", "lane", "output", "parts", "run_rows", "sent_ns",
    )  # fmt: skip

    def __init__(
        self,
        lane: Lane,
        parts: list[BatchPart],
        output: Lease,
        run_rows: int,
        sent_ns: int,
        expected_ns: int,
    ) -> None:
        self.lane = lane
        self.parts = parts
        self.output = output
        self.run_rows = run_rows
        self.sent_ns = sent_ns
        self.expected_ns = expected_ns
        self.credits = 1
        self.is_shadow = False


class WorkerSlot:
    """One worker slot; the supervisor starts its process and replaces it.

    Args:
        index: Number of the slot in the placement plan.
        pool: The only model that the slot serves, as `NAME/VERSION`; empty for the shared pool.
        device: Kind of the worker: `gpu` if it has one, else `cpu`.

    Attributes:
        group: Core group.
        incarnation: Number of the attached process; 0 while there is none.
        pid: Its process id.
        credits: Number of batches that may still be sent to the process.
        in_flight: Batches of the process by batch id, in send order.
        busy_until_ns: Predicted end of all batches in flight.
        virtual_ns: Virtual time of the fair share between the lanes that the slot serves.
        models: Keys of the models that the process has loaded.
        batches: Number of batches that the slot has computed.
        is_looping: The slot is in a crash loop and does not count for readiness.
        channel: Channel to the process; None while there is none.
        output: Memory of the output arena.
        output_arena: Leases in `output`.
        beat: Memory in which the worker writes its heartbeat.
    """

    def __init__(self, index: int, pool: str = "", device: str = "cpu") -> None:
        self.index = index
        self.pool = pool
        self.device = device
        self.incarnation = self.pid = self.group = 0
        self.credits = 0
        self.in_flight: dict[int, InFlightBatch] = {}
        self.busy_until_ns = 0
        self.virtual_ns = 0.0
        self.models: set[int] = set()
        self.batches = 0
        self.is_looping = False
        self.channel: Channel | None = None
        self.output: Segment | None = None
        self.output_arena = Arena(0)
        self.beat: Segment | None = None

    def last_beat(self) -> Heartbeat:
        """Read the last heartbeat of the worker."""
        return read_heartbeat(self.beat.view) if self.beat is not None else Heartbeat(0, 0)

    def abort(self, batch_id: int) -> None:
        """Ask the worker to cancel a running batch; the worker answers as for any batch."""
        raise NotImplementedError

    def kill(self) -> None:
        """End the process now."""
        raise NotImplementedError
