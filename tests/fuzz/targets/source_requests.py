"""Requests of Flight clients for sources, and messages of the processes that read them.

Layout of an input: kind (1 byte: query, ticket, part, frame,
error), then the message. The references are `json`, the signed ticket itself, and `struct`.
"""

from __future__ import annotations

import json
import struct
import zlib
from random import Random
from typing import Any

import msgspec

from fuzz import mutation
from iskander.errors import IskanderError, MalformedInput, ProtocolError, TicketRejected
from iskander.gateway.sources.messages import HEAD, Kind, read_error, read_head
from iskander.gateway.sources.query import read_query
from iskander.gateway.sources.tickets import MAC_BYTES, MAGIC, Ticket, read_ticket, sign_ticket
from iskander.lake.filters import parse_filter
from iskander.lake.reader.parts import Part, decode_part, encode_part

ITERATIONS = 1500
KEY = bytes(range(32))
TICKET = Ticket("s", "m", "1", "grant", b"rules", 2e9, b"part")
SIGNED = sign_ticket(KEY, TICKET)
NOW_S = 1e9
FRAME_BYTES = 1 << 20
QUERY = {"source": "s", "model": "m", "columns": ["a", "b"], "keep": [], "filter": "a > 1"}
QUERY |= {"path": "2026/*/x.parquet", "unit_rows": 100}
WORDS = [
    *QUERY, "null", "true", "-1", "0", "1e400", "{", "}", "[", "]", '"', ":", ",", "\\ud800",
    "\\u0000", "..", "/", "**", "*", "x" * 129, "[" * 300, "\ufeff", "9" * 30,
]  # fmt: skip


def seeds() -> list[bytes]:
    part = Part("parquet", b"schema", [{"path": "a", "groups": [0, 1]}], 3, 9, ("a",), ("b",), "")
    frames = [HEAD.pack(Kind.BATCH, 3, 4, 5), HEAD.pack(Kind.END, 0, 0, 0), HEAD.pack(9, 0, 0, 0)]
    return [
        b"\0" + json.dumps(QUERY).encode(),
        b"\0" + b'{"source": "s"}',
        b"\0" + b'{"source": "s", "path": "a/../b"}',
        b"\1" + SIGNED,
        b"\1" + SIGNED[:-1],
        b"\2" + encode_part(part),
        b"\2" + zlib.compress(bytes(1 << 20)),
        *(b"\3" + each for each in frames),
        b"\4\x81\xa1x" + b"\x91" * 3000 + b"\xc0",
        b"\4" + msgspec.msgpack.encode(IskanderError("why", retry_after_ms=5).to_wire()),
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    if raw[:1] != b"\0" or not random.randrange(4):
        return raw[:1] + mutation.flip(raw[1:], other[1:], random)
    text = raw[1:].decode(errors="replace")
    at = random.randrange(len(text) + 1)
    end = min(at + random.choice((0, 0, 1, 2, 8)), len(text))
    return raw[:1] + (text[:at] + random.choice(WORDS) + text[end:]).encode(errors="replace")


def run(raw: bytes) -> None:
    kind, message = raw[:1], raw[1:]
    if kind == b"\1":
        check_ticket(message)
    elif kind == b"\2":
        check_part(message)
    elif kind == b"\3":
        check_head(message)
    elif kind == b"\4":
        assert read_error(memoryview(message)).to_wire()["code"]
    else:
        check_query(message)


def check_query(raw: bytes) -> None:
    try:
        query = read_query(raw)
    except MalformedInput:
        return
    expected: dict[str, Any] = json.loads(raw)
    for name, value in expected.items():
        read = getattr(query, name)
        assert read == (tuple(value) if isinstance(value, list) else value)
    assert expected.keys() <= set(query.__struct_fields__)
    if query.path is not None:
        assert ".." not in query.path.split("/") and not query.path.startswith("/")
    if query.filter is not None:
        try:
            parse_filter(query.filter)
        except IskanderError as error:
            assert str(error)


def check_ticket(raw: bytes) -> None:
    try:
        ticket = read_ticket(KEY, raw, NOW_S)
    except TicketRejected:
        assert raw != SIGNED
    else:
        assert raw == SIGNED and ticket == TICKET
    signed = MAGIC + bytes(MAC_BYTES) + raw
    try:
        read_ticket(KEY, signed, NOW_S)
    except TicketRejected:
        return
    raise AssertionError("a ticket without a signature was accepted")


def check_part(raw: bytes) -> None:
    try:
        part = decode_part(raw)
    except ProtocolError:
        return
    plain = msgspec.msgpack.decode(zlib.decompressobj().decompress(raw))
    assert plain[0] == part.format and plain[2] == part.files
    assert decode_part(encode_part(part)) == part


def check_head(raw: bytes) -> None:
    if len(raw) < HEAD.size:
        return
    kind, rows, metadata_bytes, body_bytes = struct.unpack_from("<BIIQ", raw)
    try:
        head = read_head(raw[: HEAD.size], FRAME_BYTES)
    except IskanderError:
        is_kind = kind in set(Kind)
        assert not is_kind or metadata_bytes > 16 << 20 or body_bytes > FRAME_BYTES
        return
    assert head == (Kind(kind), rows, metadata_bytes, body_bytes)
