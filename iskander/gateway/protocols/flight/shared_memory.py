"""Codec of a stream with a shared memory region, where a message may locate its body.

The header arrives over the stream. The client can change the body at any time: fixed-width tensors
are read once, into the input arena. Other bodies, which are validated or sent back, are first
copied to private memory.

Runs on: gateway loop; `read` of large bodies on a thread.
"""

from __future__ import annotations

from builtins import memoryview  # Where mypyc looks for the types of fields.
from collections.abc import Callable

from iskander.config.schema import HEADER_BYTES_MAX, LimitsConfig
from iskander.errors import LimitExceeded, MalformedInput
from iskander.gateway.protocols.flight.codec import ParsedBatch, StreamCodec, require_app_metadata
from iskander.gateway.protocols.flight.data import read_flight_data
from iskander.gateway.protocols.flight.plan import Plan, require_limit
from iskander.interprocess.control.shared_regions import BodyLocation, read_body_location
from iskander.interprocess.memory.chunked_copy import WHOLE_BYTES
from iskander.interprocess.memory.client_segment import ClientSegment, SegmentRange


class SharedCodec(StreamCodec):
    """Stream codec with a region; `region` raises RegionNotFound once it is released."""

    def __init__(
        self, plan: Plan, limits: LimitsConfig, region: Callable[[], ClientSegment]
    ) -> None:
        super().__init__(plan, limits)
        self._region = region
        self._latest: tuple[bytes | memoryview, BodyLocation | None] | None = None

    def is_quick(self, raw: bytes | memoryview) -> bool:
        """Whether to read a message at once; counts a body in the region."""
        location = self._locate(raw)
        if location is None:
            return super().is_quick(raw)
        length = len(location.header) + location.body[1]
        is_copied = length > WHOLE_BYTES and bool(self.plan.forwarded)
        return not is_copied and self._is_quick(location.header, length)

    def work_bytes(self, raw: bytes | memoryview) -> int:
        """Temporary memory to read a message, including a private copy of the body."""
        location = self._locate(raw)
        if location is None:
            return super().work_bytes(raw)
        body = self._body(location)
        require_limit("bytes", len(body), self._limits.bytes)
        return len(body) + self._work_bytes(location.header, body)

    def read(self, raw: bytes | memoryview, *, is_on_loop: bool = False) -> ParsedBatch | None:
        """Parse one message; None for a dictionary. Raises as `decode`, or RegionNotFound."""
        location = self._locate(raw)
        self._latest = None
        if location is None:
            return super().read(raw, is_on_loop=is_on_loop)
        require_app_metadata(len(location.app_metadata), self._limits)
        header, body = memoryview(location.header), self._body(location)
        return self.decode(header, body, location.app_metadata, is_on_loop=is_on_loop)

    def _header(self, raw: bytes | memoryview) -> bytes | memoryview:
        location = _body_location(raw)
        return super()._header(raw) if location is None else location.header

    def _body(self, location: BodyLocation) -> SegmentRange:
        region, (start, length) = self._region(), location.body
        if start < 0 or length < 0 or start + length > len(region):
            place = f"{length} bytes at {start} of a region of {len(region)} bytes"
            raise MalformedInput(f"the batch's body has {place}")
        return SegmentRange(region, start, start + length)

    def _locate(self, raw: bytes | memoryview) -> BodyLocation | None:
        """The body location in a message; None for a message with a body."""
        if self._latest is None or self._latest[0] is not raw:
            self._latest = raw, _body_location(raw)
        return self._latest[1]


def _body_location(raw: bytes | memoryview) -> BodyLocation | None:
    data = read_flight_data(raw)
    if data.header or not data.app_metadata:
        return None
    if len(data.app_metadata) > 2 * HEADER_BYTES_MAX:
        size = f"{len(data.app_metadata)} bytes, limit {2 * HEADER_BYTES_MAX}"
        raise LimitExceeded(f"the batch's body location has {size}")
    return read_body_location(bytes(data.app_metadata))
