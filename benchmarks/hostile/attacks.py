"""Attacks: the first bytes of each connection, and the bytes that it repeats.

Pure: the sockets are in `attacker`.
"""

from __future__ import annotations

import contextlib
import ssl
import struct
import zlib
from collections.abc import Callable
from functools import cache

import msgspec
import numpy as np
import pyarrow as pa

from benchmarks.hostile import call_attacks, wire
from benchmarks.hostile.attack import Attack, Chunk
from benchmarks.hostile.wire import (
    CHECK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    EXCHANGE,
    HEADERS,
    LIST,
    PADDED,
    PING,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
)

MIB = 1 << 20
CHUNK_BYTES = 1 << 18
"""Approximate size of the repeated bytes that are built in one piece."""
MODEL = "movielens-two-tower"


def _repeated(raw: bytes) -> Chunk:
    whole = raw * max(CHUNK_BYTES // len(raw), 1)
    return lambda _: whole


def _streams(make: Callable[[int], bytes], streams: int) -> Chunk:
    """A chunk of `streams` new streams."""

    def chunk(number: int) -> bytes:
        first = 2 * number * streams + 1
        return b"".join(make(first + 2 * index) for index in range(streams))

    return chunk


def _call(body: bytes = b"", *, extra: wire.Fields = ()) -> Callable[[], bytes]:
    """A connection with one DoExchange call that stays open."""
    return lambda: wire.opening() + wire.request(1, EXCHANGE, extra) + body


@cache
def _huffman_block(size: int) -> bytes:
    return wire.request_block(CHECK, [("k", "a" * (size * 8 // 5))], is_huffman=True)


@cache
def _indexed_block(fields: int) -> bytes:
    return b"\x40\x01k\x01v" + b"\xbe" * fields


def _bin_block() -> bytes:
    return wire.request_block(CHECK, [("k-bin", "," * 15_000)])


def _updates_block() -> bytes:
    return b"\x20" * 60_000 + wire.request_block(CHECK)


def _headers(block: bytes, streams: int) -> Chunk:
    def one(stream_id: int) -> bytes:
        first, rest = block[:16_384], block[16_384:]
        raw = wire.frame(HEADERS, stream_id, first, END_STREAM | (0 if rest else END_HEADERS))
        while rest:
            piece, rest = rest[:16_384], rest[16_384:]
            raw += wire.frame(CONTINUATION, stream_id, piece, 0 if rest else END_HEADERS)
        return raw

    return _streams(one, streams)


def _batch(rows: int) -> pa.RecordBatch:
    ids = pa.array(np.arange(rows) % 600 + 1)
    return pa.RecordBatch.from_pydict({"user_id": ids, "item_id": ids})


@cache
def _requests_unread() -> bytes:
    """400 requests of 65,536 rows over 50 calls; the client opens no window for the responses."""
    schema, batch = wire.flight_messages(MODEL, [_batch(65_536)])
    body = wire.message(schema) + wire.message(batch) * 8
    calls = (
        wire.request(stream_id, EXCHANGE) + wire.data(stream_id, body)
        for stream_id in range(1, 101, 2)
    )
    return wire.opening() + b"".join(calls)


@cache
def _half_received(messages: int, size: int) -> bytes:
    body = wire.message(bytes(size))[:-1]
    calls = (
        wire.request(stream_id, EXCHANGE) + wire.data(stream_id, body)
        for stream_id in range(1, 2 * messages, 2)
    )
    return wire.opening() + b"".join(calls)


@cache
def _bomb(encoding: str) -> bytes:
    """Ten messages of 1 GiB; gzip declares its size, deflate does not."""
    packer = zlib.compressobj(9, wbits=31 if encoding == "gzip" else 15)
    bomb = b"".join(packer.compress(bytes(16 * MIB)) for _ in range(64)) + packer.flush()
    calls = (
        wire.request(stream_id, EXCHANGE, [("grpc-encoding", encoding)])
        + wire.data(stream_id, wire.message(bomb, 1))
        for stream_id in range(1, 21, 2)
    )
    return wire.opening() + b"".join(calls)


@cache
def _dictionary() -> tuple[bytes, bytes]:
    """A stream with a dictionary of 60 MiB, and one small batch that uses it."""
    values = pa.array(np.arange(60 * MIB // 8) % 600 + 1)
    ids = pa.DictionaryArray.from_arrays(pa.array([1, 2, 3], pa.int32()), values)
    batch = pa.RecordBatch.from_pydict({"user_id": ids, "item_id": ids})
    *first, last = wire.flight_messages(MODEL, [batch])
    body = b"".join(map(wire.message, first))
    opening = wire.opening() + wire.request(1, EXCHANGE) + wire.data(1, body)
    return opening, wire.data(1, wire.message(last))


def _zmtp(body: bytes) -> Callable[[], bytes]:
    return lambda: wire.zmtp_opening() + body


def _http(head: str) -> Callable[[], bytes]:
    raw = f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nhost: localhost\r\n{head}\r\n\r\n"
    return raw.encode


@cache
def _gzip(body: bytes) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    return packer.compress(body) + packer.flush()


@cache
def _gzip_messages(count: int, size: int) -> bytes:
    """Messages of zeros, one a call."""
    packed = wire.message(_gzip(bytes(size)), 1)
    calls = (
        wire.request(stream_id, EXCHANGE, [("grpc-encoding", "gzip")])
        + wire.data(stream_id, packed)
        for stream_id in range(1, 2 * count, 2)
    )
    return wire.opening() + b"".join(calls)


@cache
def _json_bombs() -> bytes:
    """Requests whose JSON is expensive to parse: as it is, and compressed."""
    size = _JSON_BYTES - 200
    numbers = b"1," * (size // 2 - 1) + b"1"
    nested = b"[1]," * (size // 4 - 1) + b"[1]"
    escaped = b'"' + b"\\u00e9" * (size // 6 - 1) + b'"'
    large = b"1e308," * (size // 6 - 1) + b"1"
    words = b'"a",' * (size // 4 - 1) + b'"a"'
    requests = b""
    for data in (numbers, nested, escaped, large, words):
        count = data.count(b",") + 1
        head = b'{"inputs":[{"name":"user_id","datatype":"INT64","shape":[%d],"data":[' % count
        for body, encoding in (
            (head + data + b"]}]}", b""),
            (_gzip(head + data + b"]}]}"), b"gzip"),
        ):
            line = f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nhost: localhost\r\n".encode()
            line += b"content-encoding: gzip\r\n" if encoding else b""
            requests += line + b"content-length: %d\r\n\r\n" % len(body) + body
    return requests


def _observations() -> bytes:
    """Requests of Inferential for models that do not exist."""
    found = b""
    for number in range(1000):
        envelope = wire.field(1, wire.field(1, b"robot")) + wire.field(6, b"model %d" % number)
        found += b"\x01\x00" + bytes((1, len(envelope))) + envelope + b"\x00\x04abcd"
    return found


def _client_hello() -> bytes:
    """The first bytes of a TLS client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(received, sent, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


_RESET = struct.pack("!I", 8)
_JSON_BYTES = 1_000_000

ATTACKS: tuple[Attack, ...] = (
    Attack("PING flood", wire.opening, _repeated(wire.frame(PING, 0, bytes(8)))),
    Attack("SETTINGS flood", wire.opening, _repeated(wire.frame(SETTINGS))),
    Attack(
        "WINDOW_UPDATE flood",
        _call(),
        _repeated(wire.frame(WINDOW_UPDATE, 1, b"\0\0\0\1")),
    ),
    Attack("PRIORITY flood", wire.opening, _repeated(wire.frame(PRIORITY, 1, b"\0\0\0\3\0"))),
    Attack(
        "CONTINUATION flood",
        lambda: wire.opening() + wire.frame(HEADERS, 1, b"", 0),
        _repeated(wire.frame(CONTINUATION, 1, b"\0\1a\1b")),
    ),
    Attack(
        "rapid reset",
        wire.opening,
        _streams(lambda n: wire.request(n, CHECK) + wire.frame(RST_STREAM, n, _RESET), 500),
    ),
    Attack(
        "made-you-reset",
        wire.opening,
        _streams(lambda n: wire.request(n, CHECK) + wire.frame(WINDOW_UPDATE, n, bytes(4)), 500),
    ),
    Attack(
        "DATA of 1 byte",
        _call(wire.data(1, wire.message(bytes(4 * MIB))[:5])),
        _repeated(wire.frame(DATA, 1, b"x")),
    ),
    Attack(
        "DATA of 1 byte, padded",
        _call(wire.data(1, wire.message(bytes(4 * MIB))[:5])),
        _repeated(wire.frame(DATA, 1, b"\xffx" + bytes(255), PADDED)),
    ),
    Attack("DATA of padding alone", _call(), _repeated(wire.frame(DATA, 1, b"\0", PADDED))),
    Attack("empty messages", _call(), _repeated(wire.data(1, wire.message(b"") * 3000))),
    Attack("1,800 indexed fields", wire.opening, _headers(_indexed_block(1800), 50)),
    Attack("900 indexed fields", wire.opening, _headers(_indexed_block(900), 100)),
    Attack("15 kB of Huffman codes", wire.opening, _headers(_huffman_block(15_000), 10)),
    Attack("40 kB of Huffman codes", wire.opening, _headers(_huffman_block(40_000), 5)),
    Attack("-bin headers of commas", wire.opening, _headers(_bin_block(), 10)),
    Attack("60,000 table size updates", wire.opening, _headers(_updates_block(), 4)),
    Attack("400 requests of 65,536 rows, not read", _requests_unread, reads=False),
    Attack("300 messages one byte short", lambda: _half_received(300, 39 * MIB // 10)),
    Attack(
        "300 messages one byte short, 3 connections",
        lambda: _half_received(300, 39 * MIB // 10),
        connections=3,
    ),
    Attack("gzip messages of 1 GiB", lambda: _bomb("gzip"), is_flight=False),
    Attack("deflate messages of 1 GiB", lambda: _bomb("deflate"), is_flight=False),
    Attack(
        "60 MiB of dictionary, small batches",
        lambda: _dictionary()[0],
        lambda _: _dictionary()[1],
        repeats=750,
        is_flight=False,
    ),
    Attack(
        "ListFlights calls without pause",
        wire.opening,
        _streams(
            lambda n: wire.request(n, LIST) + wire.data(n, wire.message(b""), END_STREAM), 100
        ),
    ),
    Attack(
        "headers in slow fragments",
        lambda: wire.opening() + wire.frame(HEADERS, 1, b"", 0),
        lambda _: wire.frame(CONTINUATION, 1, b"\0\1a\1b"),
        connections=200,
        pause_s=0.5,
    ),
    Attack("2,000 idle connections", wire.opening, connections=2000),
    Attack(
        "HTTP/1 chunks of 1 byte",
        _http("content-type: application/json\r\ntransfer-encoding: chunked"),
        _repeated(b"1\r\nx\r\n"),
        listener="http",
        is_flight=False,
    ),
    Attack(
        "JSON of brackets",
        _http(f"content-type: application/json\r\ncontent-length: {_JSON_BYTES}"),
        lambda number: b"[" * _JSON_BYTES if number == 0 else b"",
        listener="http",
        repeats=1,
        is_flight=False,
    ),
    Attack(
        "ZMTP frames of 1 byte",
        _zmtp(b""),
        _repeated(b"\x00\x01x"),
        listener="zmtp",
        is_flight=False,
    ),
    Attack(
        "ZMTP parts without end",
        _zmtp(b""),
        _repeated(b"\x01\x00"),
        listener="zmtp",
        is_flight=False,
    ),
    Attack(
        "ZMTP frames one byte short",
        _zmtp(b"\x02" + struct.pack("!Q", 60 * MIB) + bytes(60 * MIB - 1)),
        listener="zmtp",
        connections=10,
        is_flight=False,
    ),
    Attack(
        "empty CONTINUATION frames",
        lambda: wire.opening() + wire.frame(HEADERS, 1, b"", 0),
        _repeated(wire.frame(CONTINUATION, 1, b"", 0)),
    ),
    Attack("300 gzip messages of 6 MiB", lambda: _gzip_messages(300, 6 * MIB), is_flight=False),
    Attack("JSON bombs", bytes, lambda _: _json_bombs(), listener="http", is_flight=False),
    Attack(
        "ZMTP requests for unknown models",
        _zmtp(b""),
        _repeated(_observations()),
        listener="zmtp",
        is_flight=False,
    ),
    Attack(
        "TLS ClientHello flood, RSA",
        _client_hello,
        connections=50,
        is_flight=False,
        ends_answered=True,
        has_tls=True,
    ),
    Attack(
        "64 regions of 1 byte",
        lambda: msgspec.msgpack.encode({"bytes": 1}),
        listener="memory",
        connections=64,
        is_flight=False,
        probe="region",
    ),
    *call_attacks.ATTACKS,
)

MIXES: dict[str, tuple[str, ...]] = {
    "ten attackers": (
        "PING flood",
        "SETTINGS flood",
        "DATA of 1 byte",
        "DATA of 1 byte, padded",
        "empty messages",
        "900 indexed fields",
        "15 kB of Huffman codes",
        "-bin headers of commas",
        "rapid reset",
        "60,000 table size updates",
    ),
    "all listeners": (
        "DATA of 1 byte, padded",
        "15 kB of Huffman codes",
        "HTTP/1 chunks of 1 byte",
        "JSON of brackets",
        "ZMTP frames of 1 byte",
        "ZMTP frames one byte short",
    ),
}
"""Rows with several concurrent attackers."""


def attacks_of(row: str) -> list[Attack]:
    """The attacks of a row of the table."""
    names = MIXES.get(row, (row,))
    return [attack for attack in ATTACKS if attack.name in names]


def rows() -> list[str]:
    """The names of all rows."""
    return [*(attack.name for attack in ATTACKS), *MIXES]
