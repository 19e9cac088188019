"""Bytes of HTTP/2, gRPC, Flight and ZMTP that client libraries do not send.

Pure. Source: RFC 9113, RFC 7541, gRPC over HTTP/2, Arrow Flight RPC, RFC 37/ZMTP 3.1.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import hpack
import pyarrow as pa

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY = range(8)
WINDOW_UPDATE, CONTINUATION = 8, 9
END_STREAM, END_HEADERS, PADDED = 1, 4, 8
DATA_BYTES = 16_384
"""Size of a frame of a large message."""
EXCHANGE = "/arrow.flight.protocol.FlightService/DoExchange"
LIST = "/arrow.flight.protocol.FlightService/ListFlights"
ACTION = "/arrow.flight.protocol.FlightService/DoAction"
GET = "/arrow.flight.protocol.FlightService/DoGet"
CHECK = "/grpc.health.v1.Health/Check"

Fields = Iterable[tuple[str, str]]


def frame(kind: int, stream_id: int = 0, payload: bytes = b"", flags: int = 0) -> bytes:
    """A frame."""
    head = struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream_id)
    return head + payload


def opening() -> bytes:
    """The first bytes of a client."""
    return PREFACE + frame(SETTINGS)


def request_block(path: str, extra: Fields = (), *, is_huffman: bool = False) -> bytes:
    """The header block of a gRPC request, without entries for the dynamic table."""
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    return encoder.encode([*request_fields(path), *extra], huffman=is_huffman)


def request_fields(path: str) -> list[tuple[str, str]]:
    """The header fields of a gRPC request."""
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]


def request(stream_id: int, path: str, extra: Fields = (), flags: int = END_HEADERS) -> bytes:
    """A HEADERS frame that opens a call."""
    return frame(HEADERS, stream_id, request_block(path, extra), flags)


def message(payload: bytes, compressed: int = 0) -> bytes:
    """A gRPC message with its prefix."""
    return struct.pack("!BI", compressed, len(payload)) + payload


def data(stream_id: int, body: bytes, flags: int = 0) -> bytes:
    """DATA frames with a body; the flags are those of the last."""
    pieces = [body[at : at + DATA_BYTES] for at in range(0, len(body), DATA_BYTES)] or [b""]
    last = len(pieces) - 1
    return b"".join(
        frame(DATA, stream_id, piece, flags if index == last else 0)
        for index, piece in enumerate(pieces)
    )


def varint(value: int) -> bytes:
    """A protobuf varint."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def flight_messages(
    model: str, batches: list[pa.RecordBatch], *, has_deltas: bool = False
) -> list[bytes]:
    """FlightData of a DoExchange: descriptor and schema, dictionaries, batches."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=has_deltas)
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    descriptor = field(1, path_descriptor(model))
    found = []
    for each in pa.ipc.MessageReader.open_stream(sink.getvalue()):
        header, body = each.metadata.to_pybytes(), each.body
        is_schema = each.type == "schema"
        raw = (descriptor if is_schema else b"") + field(2, header)
        found.append(raw + (b"" if body is None else field(1000, body.to_pybytes())))
    return found


def path_descriptor(*path: str) -> bytes:
    """A FlightDescriptor with a path."""
    return b"\x08\x01" + b"".join(field(3, part.encode()) for part in path)


def schema_message(model: str, schema: pa.Schema) -> bytes:
    """FlightData with descriptor and schema."""
    raw = schema.serialize().to_pybytes()
    size = int.from_bytes(raw[4:8], "little")
    return field(1, path_descriptor(model)) + field(2, raw[8 : 8 + size])


def zmtp_opening() -> bytes:
    """Greeting and READY of a DEALER."""
    greeting = b"\xff" + bytes(8) + b"\x7f" + bytes((3, 0)) + b"NULL".ljust(20, b"\0") + bytes(32)
    kind = b"\x0bSocket-Type" + struct.pack("!I", 6) + b"DEALER"
    body = b"\x05READY" + kind + b"\x08Identity" + struct.pack("!I", 0)
    return greeting + bytes((4, len(body))) + body
