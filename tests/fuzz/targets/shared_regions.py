"""Messages about shared memory, with the same batch over the stream as the reference.

Layout of an input: kind (1 byte: request, grant, location), then the message. A batch whose body is
in a region is read as the batch with its body in the message, and no byte outside the region is.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pyarrow as pa

from fuzz import mutation
from fuzz.targets.flight_codec import CONTRACTS, LIMITS, messages_of
from fuzz.targets.wire_messages import with_changed_value
from iskander.errors import IskanderError, MalformedInput
from iskander.foundation.decoders import DECODE_ERRORS
from iskander.gateway.protocols.flight.codec import ParsedBatch, StreamCodec
from iskander.gateway.protocols.flight.data import data_head
from iskander.gateway.protocols.flight.plan import Plan
from iskander.gateway.protocols.flight.shared_memory import SharedCodec
from iskander.interprocess.control.shared_regions import (
    BodyLocation,
    RegionGrant,
    RegionRequest,
    _decode_grant,
    encode,
    read_body_location,
    read_region_request,
)
from iskander.interprocess.memory.client_segment import ClientSegment

ITERATIONS = 1000
REGION_BYTES = 8192
START = 64


def _stream() -> list[tuple[bytes, bytes]]:
    batch = pa.record_batch({"x": pa.array(range(100), pa.int64()), "kept": pa.array(["a"] * 100)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return messages_of(sink.getvalue())


(SCHEMA, (HEADER, BODY)) = _stream()
PLAN = Plan(SCHEMA[0], CONTRACTS[0], LIMITS)
REGION = ClientSegment("isk-fuzz", REGION_BYTES)
CONTENT = bytes(START) + BODY + b"\xee" * (REGION_BYTES - START - len(BODY))


def seeds() -> list[bytes]:
    locations = [(START, len(BODY)), (REGION_BYTES - len(BODY), len(BODY)), (0, REGION_BYTES)]
    locations += [(REGION_BYTES, 0), (REGION_BYTES - 1, 2), (-1, 1), (1 << 63, 1 << 62)]
    return [
        b"\0" + encode(RegionRequest(1 << 20)),
        b"\1" + encode(RegionGrant("name", 1 << 20)),
        b"\1" + encode(RegionGrant(error=IskanderError("no", retry_after_ms=5).to_wire())),
        *(b"\2" + encode(BodyLocation(HEADER, place, b"said")) for place in locations),
        b"\2" + encode(BodyLocation(b"", (0, 0))),
        *(kind + b"\x81\xa5error\x81\xa1x" + b"\x91" * 3000 + b"\xc0" for kind in (b"\0", b"\1")),
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    try:
        document = msgspec.msgpack.decode(raw[1:])
    except DECODE_ERRORS:
        return raw[:1] + mutation.flip(raw[1:], other[1:], random)
    if not isinstance(document, dict) or not document or not random.randrange(4):
        return raw[:1] + mutation.flip(raw[1:], other[1:], random)
    key = random.choice(["body", "body", *document] if "body" in document else list(document))
    if key == "body":
        starts, lengths = (0, 8, START, 4096, REGION_BYTES - len(BODY)), (-8, 0, 0, 8, 64)
        start, length = random.choice(starts), len(BODY) + random.choice(lengths)
        if random.randrange(2):
            start, length = mutation.number(random, start), mutation.number(random, length)
        document[key] = [start, length]
    elif key == "header":
        document[key] = mutation.patch(HEADER, random, ("<i", "<q"))
    else:
        document[key] = with_changed_value(document[key], random)
    try:
        return raw[:1] + msgspec.msgpack.encode(document)
    except OverflowError:
        return raw


def run(raw: bytes) -> None:
    kind, message = raw[:1], raw[1:]
    if kind == b"\0":
        check_message(message, read_region_request, ("bytes",))
    elif kind == b"\1":
        check_grant(message)
    else:
        check_location(message)


def check_message(raw: bytes, read: Any, names: tuple[str, ...]) -> Any:
    """Checks that a message has the values of the generic decoder; None if it is rejected."""
    try:
        message = read(raw)
    except MalformedInput as error:
        assert str(error)
        return None
    plain = msgspec.msgpack.decode(raw)
    for name in names:
        value = getattr(message, name)
        assert (list(value) if isinstance(value, tuple) else value) == plain.get(name, value)
    return message


def check_grant(raw: bytes) -> None:
    """The grant is decoded as the client does."""
    try:
        grant = _decode_grant(raw)
    except DECODE_ERRORS:
        return
    if grant.error is not None:
        assert IskanderError.from_wire(grant.error).code


def check_location(raw: bytes) -> None:
    location = check_message(raw, read_body_location, ("header", "body", "app_metadata"))
    message = data_head(b"", raw, 0)
    REGION_FILE.seek(0)
    REGION_FILE.write(CONTENT)
    codec = SharedCodec(PLAN, LIMITS, lambda: REGION)
    try:
        located = codec.locate(message)
        codec.is_quick(located)
        assert codec.work_bytes(located) >= 0
        parsed = codec.decode(located)
    except IskanderError as error:
        assert str(error)
        if location is not None and is_inside(location):
            assert isinstance(in_band(location), IskanderError), f"accepted in-band\n{error}"
        return
    if location is None or parsed is None:
        return
    assert is_inside(location), "the body is outside the region"
    expected = in_band(location)
    assert isinstance(expected, ParsedBatch), f"rejected in-band\n{expected}"
    assert (parsed.rows, parsed.tensors) == (expected.rows, expected.tensors)


def is_inside(location: BodyLocation) -> bool:
    start, length = location.body
    return start >= 0 and length >= 0 and start + length <= REGION_BYTES


def in_band(location: BodyLocation) -> ParsedBatch | IskanderError | None:
    """The same batch in one message, or its error."""
    start, length = location.body
    body = CONTENT[start : start + length]
    message = data_head(location.header, location.app_metadata, len(body)) + body
    try:
        codec = StreamCodec(PLAN, LIMITS)
        return codec.decode(codec.locate(message))
    except IskanderError as error:
        return error


REGION_FILE = open(REGION.fd, "wb", buffering=0, closefd=False)  # noqa: SIM115
