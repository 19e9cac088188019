"""A stream whose client shares memory: a batch may say where its body is, instead of having one.

What is told of the batch came over the stream. Of the body, which the client can change at any
time, tensors of fixed width are read once, straight into the input arena; what has to be looked
into, or comes back, is read to memory of our own first.

Runs on: gateway loop; `read` of what is large on a thread.
"""

from __future__ import annotations

from builtins import memoryview  # Where mypyc looks for the types of fields.
from collections.abc import Callable

from iskander.config.schema import HEADER_ROOM_BYTES, LimitsConfig
from iskander.control.shared_regions import BodyLocation, read_body_location
from iskander.errors import LimitExceeded, MalformedInput
from iskander.memory.chunked_copy import WHOLE_BYTES
from iskander.memory.client_segment import ClientSegment, SegmentRange
from iskander.protocols.flight.codec import ParsedBatch, StreamCodec
from iskander.protocols.flight.data import read_flight_data
from iskander.protocols.flight.plan import Plan


class SharedCodec(StreamCodec):
    """The codec of such a stream.

    Args:
        plan: Of the stream.
        limits: Of the server.
        region: Finds the memory that the client shares; it raises where it is lent no more.
    """

    def __init__(
        self, plan: Plan, limits: LimitsConfig, region: Callable[[], ClientSegment]
    ) -> None:
        super().__init__(plan, limits)
        self._region = region
        self._latest: tuple[bytes | memoryview, BodyLocation | None] | None = None

    def is_quick(self, raw: bytes | memoryview) -> bool:
        """As of any codec; a body elsewhere counts as one that came."""
        located = self._find(raw)
        if located is None:
            return super().is_quick(raw)
        length = len(located.header) + located.body[1]
        is_kept = length > WHOLE_BYTES and bool(self.plan.forwarded)
        return not is_kept and self._is_quick(located.header, length)

    def work_bytes(self, raw: bytes | memoryview) -> int:
        """As of any codec; a body elsewhere is copied before it is looked into.

        Raises:
            IskanderError: It cannot be read.
        """
        located = self._find(raw)
        if located is None:
            return super().work_bytes(raw)
        return 2 * min(max(located.body[1], 0), self._limits.bytes)

    def read(self, raw: bytes | memoryview, *, is_at_once: bool = False) -> ParsedBatch | None:
        """As of any codec.

        Raises:
            IskanderError: As `decode`, or there is no such place in the region.
            LongMessage: As `decode`.
        """
        located = self._find(raw)
        self._latest = None
        if located is None:
            return super().read(raw, is_at_once=is_at_once)
        region, (start, length) = self._region(), located.body
        if start < 0 or length < 0 or start + length > len(region):
            raise MalformedInput(
                f"the batch is said to have {length} bytes at {start} of a region of {len(region)}"
            )
        body = SegmentRange(region, start, start + length)
        return self.decode(
            memoryview(located.header), body, located.app_metadata, is_at_once=is_at_once
        )

    def _find(self, raw: bytes | memoryview) -> BodyLocation | None:
        """Where a message says that its batch is; None where it has one."""
        if self._latest is None or self._latest[0] is not raw:
            self._latest = raw, _located(raw)
        return self._latest[1]


def _located(raw: bytes | memoryview) -> BodyLocation | None:
    data = read_flight_data(raw)
    if data.header or not data.app_metadata:
        return None
    if len(data.app_metadata) > 2 * HEADER_ROOM_BYTES:
        raise LimitExceeded(
            f"what says where a batch is may have {2 * HEADER_ROOM_BYTES} bytes, got "
            f"{len(data.app_metadata)}"
        )
    return read_body_location(data.app_metadata)
