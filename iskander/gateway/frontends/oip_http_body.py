"""Bodies over HTTP: read within their limits, decompressed in short turns, and compressed.

Runs on: gateway loop. Source: RFC 9110, section 8.4 (`gzip`, and `deflate` in zlib's form).
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import Receive

from iskander.errors import (
    Cancelled,
    DeadlineExceeded,
    LimitExceeded,
    MalformedInput,
    Overloaded,
    Unsupported,
)

BODY_S = 30.0
"""A body that is not there by then is not waited for."""
PIECE_BYTES = 1 << 18
"""Compressing as much takes a few milliseconds; then the batches have a turn."""
COMPRESS_LEVEL = 1
RETRY_MS = 1000
_DIGITS_MAX = 18
_WINDOWS = {"gzip": 31, "deflate": 15}


class Room:
    """What all bodies together may take, requests and answers.

    Args:
        bytes_max: Beyond them a request is refused. Answers are written all the same, since what
            they answer was accepted.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0


class Held:
    """The part of the room that one call takes; given back when the block ends."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._bytes = 0

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self._room.held_bytes -= self._bytes

    def grow(self, count: int) -> None:
        """Take more.

        Raises:
            Overloaded: Others have it.
        """
        if self._room.held_bytes + count > self._room.bytes_max:
            raise Overloaded(
                f"bodies of {self._room.held_bytes} bytes are held, and all may have "
                f"{self._room.bytes_max}",
                retry_after_ms=RETRY_MS,
            )
        self.add(count)

    def add(self, count: int) -> None:
        """Take more, whether there is room or not."""
        self._bytes += count
        self._room.held_bytes += count


async def read_body(receive: Receive, headers: Headers, bytes_max: int, held: Held) -> bytearray:
    """All of a request's body, decompressed.

    Args:
        receive: Gives its pieces.
        headers: Of the request.
        bytes_max: The most that it may have, compressed or not.
        held: Grows with it.

    Raises:
        LimitExceeded: It is larger; known before more than that was read.
        DeadlineExceeded: It did not come in time.
        MalformedInput: It is not compressed as its header says.
        Unsupported: It is compressed in another way.
        Cancelled: The client left.
        Overloaded: There is no room for it now.
    """
    announced = headers.get("content-length", "0")
    if len(announced) > _DIGITS_MAX or int(announced) > bytes_max:
        raise _too_large(bytes_max)
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in (*_WINDOWS, "identity"):
        raise Unsupported(f"bodies are taken as they are, gzip or deflate, not {coding[:20]}")
    try:
        async with asyncio.timeout(BODY_S):
            raw = await _read(receive, bytes_max, held)
    except TimeoutError:
        raise DeadlineExceeded(f"the request's body did not come in {BODY_S:g} s") from None
    return raw if coding == "identity" else await _decompress(raw, coding, bytes_max, held)


def chosen_coding(accepted: str) -> str | None:
    """How an answer is to be compressed, by the header `Accept-Encoding`; None for not at all.

    A list of codings is what HTTP libraries send unasked, and compressing costs everybody time: so
    only a client that names one, and that one, gets it.
    """
    name = accepted.strip().lower()
    return name if name in _WINDOWS else None


async def compress(parts: Iterable[bytes | memoryview], coding: str) -> bytes:
    """A body, compressed."""
    packer = zlib.compressobj(COMPRESS_LEVEL, zlib.DEFLATED, _WINDOWS[coding])
    packed = bytearray()
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), PIECE_BYTES):
            packed += packer.compress(view[start : start + PIECE_BYTES])
            await asyncio.sleep(0)
    return bytes(packed + packer.flush())


async def _read(receive: Receive, bytes_max: int, held: Held) -> bytearray:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the caller left before its request was there")
        piece = message.get("body", b"")
        if len(body) + len(piece) > bytes_max:
            raise _too_large(bytes_max)
        held.grow(len(piece))
        body += piece
        if not message.get("more_body", False):
            return body


async def _decompress(packed: bytearray, coding: str, bytes_max: int, held: Held) -> bytearray:
    unpacker = zlib.decompressobj(_WINDOWS[coding])
    body = bytearray()
    try:
        for start in range(0, len(packed), PIECE_BYTES):
            left = bytes(packed[start : start + PIECE_BYTES])
            while left:
                piece = unpacker.decompress(left, PIECE_BYTES)
                if len(body) + len(piece) > bytes_max:
                    raise _too_large(bytes_max)
                held.grow(len(piece))
                body += piece
                left = unpacker.unconsumed_tail
                await asyncio.sleep(0)
    except zlib.error as error:
        raise MalformedInput(f"the body is no {coding}: {error}") from None
    if not unpacker.eof:
        raise MalformedInput(f"the body's {coding} has no end")
    if unpacker.unused_data:
        raise MalformedInput(f"the body goes on behind its {coding}")
    return body


def _too_large(bytes_max: int) -> LimitExceeded:
    return LimitExceeded(f"the body of this request may have {bytes_max} bytes", wanted=bytes_max)
