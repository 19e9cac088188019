"""Framing and compression of gRPC messages in DATA frames, without a socket.

Layout of an input: the call's encoding (1 byte), then the bytes of its stream. The reference splits
the stream by message prefixes and decompresses messages with `gzip` and `zlib`. The stream is cut
into DATA frames and reads at random positions; the outcome must not depend on them.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import io
import zlib
from random import Random
from typing import Any

from support.http2 import (
    END_HEADERS,
    END_STREAM,
    Peer,
    data,
    headers,
    message,
    request_fields,
)

from fuzz import mutation
from fuzz.serving import LOOP, Recorder, in_loop
from iskander.gateway.transport.http2.decompression import INLINE_BYTES_MAX
from iskander.gateway.transport.http2.status import Status

ITERATIONS = 250
ENCODINGS = ("gzip", "deflate", "identity", "", "snappy")
MESSAGE_BYTES_MAX = 100_000
READ_BYTES_MAX = 16_384
TURNS_MAX = 100
PAUSE_S = 0.0001
"""Between two looks at a call, which another thread may decompress."""


def seeds() -> list[bytes]:
    zeros = bytes(40_000)
    return [
        b"\0" + message(b"one") + message(b"") + message(b"two" * 50),
        b"\0" + message(gzip.compress(b"a" * 300, mtime=0), 1) + message(b"plain"),
        b"\1" + message(zlib.compress(b"b" * 300), 1) + message(zlib.compress(b""), 1),
        b"\0" + message(gzip.compress(zeros, mtime=0), 1) + message(b"behind"),
        b"\0" + message(gzip.compress(bytes(200_000), mtime=0), 1),
        b"\1" + message(zlib.compress(bytes(99_999)), 1),
        b"\2" + message(b"x", 1),
        b"\0\0\0\1\x86\xa1" + b"too large",
        b"\0\0\0\0\x10\0" + b"cut",
        b"\0" + message(b"") * 40,
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    first = bytes((random.randrange(256),)) if not random.randrange(10) else raw[:1]

    def change(each: tuple[int, bytes]) -> tuple[int, bytes]:
        flag, payload = each
        kind = random.randrange(5)
        if kind == 0:
            return mutation.number(random) & 0xFF, payload
        if kind == 1:
            size = random.choice((0, 100, 32_767, 32_768, 33_000, 65_536, 100_000, 100_001))
            packer = gzip.compress if random.randrange(2) else zlib.compress
            return 1, packer(bytes(size), random.choice((1, 9)))
        return flag, mutation.flip(payload, other, random)

    items = mutation.shuffle(split(raw[1:])[0], split(other[1:])[0], random, change)
    stream = b"".join(message(payload, flag) for flag, payload in items)
    if not random.randrange(8) and stream:
        stream = mutation.flip(stream, other, random)
    return first + stream


def run(raw: bytes) -> None:
    encoding = ENCODINGS[raw[0] % len(ENCODINGS)] if raw else ""
    stream = raw[1:]
    random = Random(zlib.crc32(raw))
    expected_outcome = expected(stream, encoding)
    for cuts in (0, random.choice((1, 2, 5, 20))):
        actual = LOOP.run_until_complete(served(stream, encoding, random, cuts))
        assert actual == expected_outcome, (
            f"different outcome\n{brief(actual)}, expected {brief(expected_outcome)}, "
            f"cut {cuts} times"
        )


@in_loop
async def served(
    stream: bytes, encoding: str, random: Random, cuts: int
) -> tuple[list[bytes], int]:
    """The messages that a handler reads, and its final status."""
    recorder = Recorder()
    peer = Peer(message_bytes=MESSAGE_BYTES_MAX)
    peer.host.serve_inline = recorder.serve
    extra = [("grpc-encoding", encoding)] if encoding else []
    positions = sorted(random.randint(0, len(stream)) for _ in range(cuts))
    pieces = [stream[a:b] for a, b in zip([0, *positions], [*positions, len(stream)], strict=True)]
    sent = [headers(1, request_fields(extra=extra), END_HEADERS)]
    sent += [
        data(
            1,
            piece,
            END_STREAM if index == len(positions) else 0,
            random.choice((None, None, 0, 9)),
        )
        for index, piece in enumerate(pieces)
    ]
    peer.feed(*sent, cut=random.randint(1, READ_BYTES_MAX) if cuts else READ_BYTES_MAX)
    (call,) = recorder.calls
    while not call.is_over:
        await asyncio.sleep(PAUSE_S)
    assert peer.host.budget._peak <= 2 * MESSAGE_BYTES_MAX + len(stream) + 256 * len(stream)
    messages, status = recorder.messages[1], recorder.statuses[1]
    recorder.calls.clear()
    del call
    await close(peer)
    return messages, status


async def close(peer: Peer) -> None:
    """End the connection, and check that nothing stays charged."""
    peer.transport.abort()
    await asyncio.sleep(0)
    for _ in range(TURNS_MAX):  # Each turn of the loop ends some calls.
        await asyncio.sleep(0)
        if not peer.calls:
            break
    assert not peer.calls and not peer.host.connections and not peer.host.budget.holders
    for _ in range(TURNS_MAX):  # Decompression threads release messages later.
        if not peer.host.budget.used_bytes:
            return
        gc.collect()
        await asyncio.sleep(0.001)
    raise AssertionError(f"{peer.host.budget.used_bytes} bytes stay charged after the end")


def expected(stream: bytes, encoding: str) -> tuple[list[bytes], int]:
    """The expected messages, and the final status."""
    messages = []
    whole, status = split(stream)
    for flag, payload in whole:
        if flag:
            expanded = decompressed(payload, encoding)
            if not isinstance(expanded, bytes):
                return messages, expanded
            payload = expanded
        messages.append(payload)
    return messages, status


def split(stream: bytes) -> tuple[list[tuple[int, bytes]], int]:
    """The complete messages, and the status after them."""
    messages, at = [], 0
    while at + 5 <= len(stream):
        length = int.from_bytes(stream[at + 1 : at + 5])
        if length > MESSAGE_BYTES_MAX:
            return messages, int(Status.RESOURCE_EXHAUSTED)
        if at + 5 + length > len(stream):
            break
        messages.append((stream[at], stream[at + 5 : at + 5 + length]))
        at += 5 + length
    return messages, int(Status.INTERNAL if at < len(stream) else Status.OK)


def decompressed(payload: bytes, encoding: str) -> bytes | int:
    """A decompressed message, or its error status."""
    if encoding in ("", "identity"):
        return int(Status.INTERNAL)
    if encoding not in ("gzip", "deflate"):
        return int(Status.UNIMPLEMENTED)
    decompressor: Any = zlib.decompressobj(31 if encoding == "gzip" else 15)
    try:
        limit = MESSAGE_BYTES_MAX
        if encoding == "gzip" and len(payload) >= 18:
            declared = int.from_bytes(payload[-4:], "little")
            limit = min(declared, limit)
            inline: Any = zlib.decompressobj(31)
            is_long = len(inline.decompress(payload, INLINE_BYTES_MAX)) == INLINE_BYTES_MAX
            if declared > MESSAGE_BYTES_MAX and is_long and not inline.eof:
                return int(Status.RESOURCE_EXHAUSTED)
        raw = decompressor.decompress(payload, limit + 1)
        if limit < len(raw) and limit < MESSAGE_BYTES_MAX:
            return int(Status.INTERNAL)
        if len(raw) > MESSAGE_BYTES_MAX:
            return int(Status.RESOURCE_EXHAUSTED)
        if not decompressor.eof or decompressor.unused_data:
            return int(Status.INTERNAL)
    except zlib.error:
        return int(Status.INTERNAL)
    if encoding == "gzip":
        assert gzip.GzipFile(fileobj=io.BytesIO(payload)).read() == raw
    return bytes(raw)


def brief(outcome: tuple[list[bytes], int]) -> str:
    messages, status = outcome
    return f"{len(messages)} messages of {[len(each) for each in messages]} bytes, status {status}"
