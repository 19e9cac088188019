"""Bodies: their limits, their compression, and the room that all of them share."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from starlette.datastructures import Headers

from iskander.errors import (
    Cancelled,
    DeadlineExceeded,
    LimitExceeded,
    MalformedInput,
    Overloaded,
    Unsupported,
)
from iskander.gateway.frontends import oip_http_body
from iskander.gateway.frontends.oip_http_body import (
    PIECE_BYTES,
    Held,
    Room,
    chosen_coding,
    compress,
    read_body,
)

MIB = 1 << 20
PACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
MIXED = bytes(range(256)) * 4096


def receive_of(*pieces: bytes, is_whole: bool = True) -> Any:
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    if is_whole:
        messages.append({"type": "http.request", "body": b"", "more_body": False})
    messages.append({"type": "http.disconnect"})
    waiting = iter(messages)

    async def receive() -> Any:
        return next(waiting)

    return receive


def read(
    *pieces: bytes,
    bytes_max: int = 2 * MIB,
    room: Room | None = None,
    receive: Any = None,
    **headers: str,
) -> bytes:
    room = room or Room(100 * MIB)
    named = Headers({name.replace("_", "-"): value for name, value in headers.items()})

    async def run() -> bytes:
        with Held(room) as held:
            return bytes(await read_body(receive or receive_of(*pieces), named, bytes_max, held))

    try:
        return asyncio.run(run())
    finally:
        assert room.held_bytes == 0


def test_a_body_is_its_pieces() -> None:
    assert read(b"ab", b"", b"c", content_length="3") == b"abc"
    assert read() == b""


@pytest.mark.parametrize("coding", PACK)
@pytest.mark.parametrize("body", [b"", b"a", MIXED, bytes(PIECE_BYTES), bytes(PIECE_BYTES + 1)])
def test_a_compressed_body_is_read_as_it_was(coding: str, body: bytes) -> None:
    packed = PACK[coding](body)

    assert read(packed[:7], packed[7:], content_encoding=coding.upper()) == body


@pytest.mark.parametrize("coding", PACK)
def test_an_answer_is_compressed_as_others_read_it(coding: str) -> None:
    packed = asyncio.run(compress([b"head", memoryview(MIXED)], coding))

    unpacked = gzip.decompress(packed) if coding == "gzip" else zlib.decompress(packed)
    assert unpacked == b"head" + MIXED


def test_a_body_that_is_too_large_by_its_header_is_not_read() -> None:
    async def receive() -> Any:
        raise AssertionError("it was read")

    for announced in (str(MIB + 1), "9" * 30):
        with pytest.raises(LimitExceeded):
            read(receive=receive, bytes_max=MIB, content_length=announced)


def test_a_body_that_says_no_length_is_read_as_far_as_it_may_go() -> None:
    with pytest.raises(LimitExceeded):
        read(b"1234", b"5", b"never read", bytes_max=4)
    assert read(b"1234", bytes_max=4) == b"1234"


@pytest.mark.parametrize("coding", PACK)
def test_what_grows_beyond_the_limit_is_refused_before_it_has_grown(coding: str) -> None:
    room = Room(100 * MIB)
    most = 0

    class Seen(Held):
        def grow(self, count: int) -> None:
            nonlocal most
            super().grow(count)
            most = max(most, room.held_bytes)

    bomb = PACK[coding](bytes(64 * MIB))

    async def run() -> None:
        with Seen(room) as held:
            headers = Headers({"content-encoding": coding})
            await read_body(receive_of(bomb), headers, MIB, held)

    with pytest.raises(LimitExceeded):
        asyncio.run(run())
    assert most < 2 * MIB


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (b"no gzip", "no gzip"),
        (gzip.compress(MIXED, mtime=0)[:-9], "no end"),
        (b"", "no end"),
        (gzip.compress(b"a", mtime=0) + b"b", "goes on"),
        (gzip.compress(MIXED, mtime=0)[:-8] + bytes(8), "no gzip"),
    ],
)
def test_a_body_that_is_not_compressed_as_it_says_is_malformed(packed: bytes, why: str) -> None:
    with pytest.raises(MalformedInput, match=why):
        read(packed, content_encoding="gzip")


def test_another_coding_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="br"):
        read(b"a", content_encoding="br")


def test_a_client_that_leaves_within_its_body_is_gone() -> None:
    with pytest.raises(Cancelled):
        read(receive=receive_of(b"a", is_whole=False))


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oip_http_body, "BODY_S", 0.01)

    async def receive() -> Any:
        await asyncio.Event().wait()

    with pytest.raises(DeadlineExceeded, match="did not come"):
        read(receive=receive)


def test_bodies_share_a_room_and_leave_it() -> None:
    room = Room(10)
    with Held(room) as first, Held(room) as second:
        first.grow(6)
        with pytest.raises(Overloaded, match="6 bytes are held") as refused:
            second.grow(5)
        second.grow(4)
        second.add(100)
        assert refused.value.retry_after_ms
        assert room.held_bytes == 110
    assert room.held_bytes == 0


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("gzip", "gzip"),
        (" Deflate ", "deflate"),
        ("", None),
        ("gzip, deflate", None),
        ("br", None),
        ("identity", None),
    ],
)
def test_an_answer_is_compressed_for_who_names_one_coding(
    accepted: str, coding: str | None
) -> None:
    assert chosen_coding(accepted) == coding
