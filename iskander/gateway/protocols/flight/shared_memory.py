"""Codec of a stream with a shared memory region, where a message may locate its body.

The header arrives over the stream. The client can change the body at any time: fixed-width tensors
are read once, into the input arena. Other bodies, which are validated or sent back, are first
copied to private memory.

Runs on: gateway loop; large bodies are decoded on a thread.
"""

from __future__ import annotations

from builtins import memoryview  # Where mypyc looks for the types of fields.
from collections.abc import Callable

from iskander.config.schema import HEADER_BYTES_MAX, LimitsConfig
from iskander.errors import IskanderError, LimitExceeded, MalformedInput, detach
from iskander.gateway.protocols.flight.batch_message import BatchMessage
from iskander.gateway.protocols.flight.codec import StreamCodec
from iskander.gateway.protocols.flight.data import read_flight_data
from iskander.gateway.protocols.flight.plan import Plan
from iskander.interprocess.control.shared_regions import BodyLocation, read_body_location
from iskander.interprocess.memory.client_segment import ClientSegment, SegmentRange


class SharedCodec(StreamCodec):
    """Stream codec with a region; `region` raises RegionNotFound once it is released."""

    def __init__(
        self, plan: Plan, limits: LimitsConfig, region: Callable[[], ClientSegment]
    ) -> None:
        super().__init__(plan, limits)
        self._region = region

    def locate(self, raw: bytes | memoryview) -> BatchMessage:
        """Find the parts of a message, whose body may be in the region."""
        location = _body_location(raw)
        if location is None:
            return super().locate(raw)
        message = BatchMessage(raw, location.header, memoryview(b""), location.app_metadata)
        try:
            message.body = self._body(location)
        except IskanderError as error:
            message.error = detach(error)
        return message

    def _body(self, location: BodyLocation) -> SegmentRange:
        region, (start, length) = self._region(), location.body
        if start < 0 or length < 0 or start + length > len(region):
            place = f"{length} bytes at {start} of a region of {len(region)} bytes"
            raise MalformedInput(f"the batch's body has {place}")
        return SegmentRange(region, start, start + length)


def _body_location(raw: bytes | memoryview) -> BodyLocation | None:
    data = read_flight_data(raw)
    if data.header or not data.app_metadata:
        return None
    if len(data.app_metadata) > 2 * HEADER_BYTES_MAX:
        size = f"{len(data.app_metadata)} bytes, limit {2 * HEADER_BYTES_MAX}"
        raise LimitExceeded(f"the batch's body location has {size}")
    return read_body_location(bytes(data.app_metadata))
