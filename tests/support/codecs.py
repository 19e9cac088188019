"""Messages for the codec of a Flight stream."""

from __future__ import annotations

from iskander.gateway.protocols.flight.batch_message import BatchMessage
from iskander.gateway.protocols.flight.codec import ParsedBatch, StreamCodec


def read_message(
    codec: StreamCodec, raw: bytes | memoryview, *, is_on_loop: bool = False
) -> ParsedBatch | None:
    """Reads a message as a stream does."""
    parsed = codec.repeated(raw)
    if parsed is None:
        parsed = codec.decode(codec.locate(raw), is_on_loop=is_on_loop)
    return parsed


def decode(
    codec: StreamCodec,
    header: bytes | memoryview,
    body: bytes | memoryview,
    app_metadata: bytes = b"",
    *,
    is_on_loop: bool = False,
) -> ParsedBatch | None:
    """Decodes a message of these parts."""
    message = BatchMessage(b"", memoryview(header), memoryview(body), app_metadata)
    return codec.decode(message, is_on_loop=is_on_loop)


def is_quick(codec: StreamCodec, raw: bytes | memoryview) -> bool:
    """Whether the event loop would decode a message."""
    return codec.is_quick(codec.locate(raw))


def work_bytes(codec: StreamCodec, raw: bytes | memoryview) -> int:
    """Memory that a stream charges to decode a message on a thread."""
    return codec.work_bytes(codec.locate(raw))
