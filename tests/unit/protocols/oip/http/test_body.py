"""Bodies: their limits, their compression, and the room that all of them share."""

from __future__ import annotations

import asyncio
import gc
import gzip
import zlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest
from starlette.datastructures import Headers
from support.processes import eventually

from iskander.errors import (
    Cancelled,
    DeadlineExceeded,
    LimitExceeded,
    MalformedInput,
    Overloaded,
    Unsupported,
)
from iskander.protocols.oip.http.body import (
    PIECE_BYTES,
    BodyQuota,
    ReceivedBody,
    compress,
    read_body,
    response_coding,
)
from iskander.transport import receive_budget
from iskander.transport.receive_budget import ReceiveBudget

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


T = TypeVar("T")
ENDED: list[str] = []


def room_of(
    bytes_max: int = 100 * MIB, budget: ReceiveBudget | None = None, message_s: float = 10.0
) -> BodyQuota:
    ENDED.clear()
    return BodyQuota(bytes_max, budget or ReceiveBudget(1 << 30), message_s, ENDED.append)


def within(play: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(play, 5.0))


def read(
    *pieces: bytes,
    bytes_max: int = 2 * MIB,
    room: BodyQuota | None = None,
    receive: Any = None,
    **headers: str,
) -> bytes:
    room = room or room_of()
    named = Headers({name.replace("_", "-"): value for name, value in headers.items()})

    async def run() -> bytes:
        with ReceivedBody(room) as held:
            return bytes(await read_body(receive or receive_of(*pieces), named, bytes_max, held))

    try:
        return within(run())
    finally:
        gc.collect()
        assert room.held_bytes == 0 and not room.budget.holders
        # A thread lets go of what it worked on after it has told the result.
        eventually(lambda: room.budget.used_bytes == 0, 5)


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
@pytest.mark.parametrize("bytes_max", [1000, MIB])
def test_a_bomb_is_refused_when_it_has_expanded_to_the_limit(coding: str, bytes_max: int) -> None:
    """Of 64 MiB, which gzip declares, and which it hides."""
    bomb = PACK[coding](bytes(64 * MIB))
    hidden = bomb[:-4] + (bytes_max // 2).to_bytes(4, "little")
    for packed in (bomb, hidden) if coding == "gzip" else (bomb,):
        budget = Seen(100 * MIB)
        with pytest.raises((LimitExceeded, MalformedInput), match=r"declares|too large"):
            read(packed, room=room_of(budget=budget), bytes_max=bytes_max, content_encoding=coding)
        assert budget.peak <= 2 * bytes_max


class Seen(ReceiveBudget):
    peak = 0

    def charge(self, size: int) -> None:
        super().charge(size)
        self.peak = max(self.peak, self.used_bytes)


@pytest.mark.parametrize("coding", PACK)
def test_a_body_expands_into_memory_that_was_there_before(coding: str) -> None:
    packed = PACK[coding](bytes(MIB))
    with pytest.raises(Overloaded, match="receive_bytes"):
        read(packed, room=room_of(budget=ReceiveBudget(MIB // 2)), content_encoding=coding)
    with pytest.raises(Overloaded, match="bodies_bytes"):
        read(packed, room=room_of(MIB // 2), content_encoding=coding)


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (b"no gzip", "not valid gzip"),
        (gzip.compress(MIXED, mtime=0)[:-9], "truncated"),
        (b"", "truncated"),
        (gzip.compress(b"a", mtime=0) + b"b", "follow after"),
        (
            gzip.compress(MIXED, mtime=0)[:-8] + bytes(4) + len(MIXED).to_bytes(4, "little"),
            "not valid gzip",
        ),
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


def slowly(*pieces: bytes) -> Any:
    """Pieces, and pauses between them; no end."""
    return from_iterator(iter(pieces))


def from_iterator(waiting: Iterator[bytes], pause_s: float = 0.02) -> Any:

    async def receive() -> Any:
        await asyncio.sleep(pause_s)
        piece = next(waiting, None)
        if piece is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": piece, "more_body": True}

    return receive


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    """Nor is one that trickles. As long as 500 bytes/s come it is."""
    room = room_of(message_s=0.1)
    steady, trickling = iter([bytes(100)] * 10), iter([b"a"] * 10_000)
    for pieces in (steady, trickling):
        with pytest.raises(DeadlineExceeded, match="behind 500 bytes/s"):
            read(receive=from_iterator(pieces), room=room)
    assert ENDED == ["message_timeout"] * 2
    assert not list(steady) and list(trickling)
    assert read(*[b"a"] * 3, receive=None, room=room) == b"aaa"


def test_bodies_are_refused_where_memory_is_out_and_the_oldest_large_one_first() -> None:
    async def run() -> None:
        budget = ReceiveBudget(4 * MIB)
        room = room_of(budget=budget, message_s=60.0)

        async def one(receive: Any) -> int:
            with ReceivedBody(room) as held:
                return len(await read_body(receive, Headers({}), 8 * MIB, held))

        large = asyncio.create_task(one(slowly(bytes(3 * MIB))))
        await asyncio.sleep(0.1)
        small = [asyncio.create_task(one(slowly(bytes(MIB // 2)))) for _ in range(4)]
        with pytest.raises(Overloaded, match="receive_bytes") as refused:
            await large
        assert refused.value.retry_after_ms and budget.refused == 1
        assert await one(receive_of(bytes(MIB))) == MIB
        assert budget.used_bytes == 2 * MIB
        for each in small:
            each.cancel()
        await asyncio.gather(*small, return_exceptions=True)
        assert budget.used_bytes == 0

    within(run())


def test_a_large_body_has_its_memory_before_it_comes() -> None:
    """A second one waits for it, and is refused where it waits too long."""

    async def run() -> None:
        budget = ReceiveBudget(16 * MIB)
        size = 10 * MIB
        headers = Headers({"content-length": str(size)})

        async def one(receive: Any, room: BodyQuota) -> int:
            with ReceivedBody(room) as held:
                return len(await read_body(receive, headers, size, held))

        first = asyncio.create_task(one(slowly(bytes(MIB)), room_of(budget=budget)))
        await asyncio.sleep(0.05)
        assert budget.used_bytes == size
        with pytest.raises(Overloaded, match="receive_bytes"):
            await one(receive_of(bytes(size)), room_of(budget=budget, message_s=0.1))
        waiting = asyncio.create_task(one(receive_of(bytes(size)), room_of(budget=budget)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert await waiting == size
        assert budget.used_bytes == 0 and not budget._reserved and not budget._waiting

    within(run())


def test_a_large_body_that_stalls_makes_room_for_one_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receive_budget, "STALL_NS_UNDER_PRESSURE", 1)

    async def run() -> None:
        budget = ReceiveBudget(16 * MIB)
        room = room_of(budget=budget)
        headers = Headers({"content-length": str(10 * MIB)})

        async def one(receive: Any) -> int:
            with ReceivedBody(room) as held:
                return len(await read_body(receive, headers, 10 * MIB, held))

        stalled = asyncio.create_task(one(slowly(bytes(MIB))))
        await asyncio.sleep(0.05)
        assert await one(receive_of(bytes(10 * MIB))) == 10 * MIB
        with pytest.raises(DeadlineExceeded):
            await stalled
        assert budget.used_bytes == 0 and ENDED == ["message_timeout"]

    within(run())


def test_bodies_share_a_room_and_leave_it() -> None:
    room = room_of(10)
    with ReceivedBody(room) as first, ReceivedBody(room) as second:
        first.grow(6)
        with pytest.raises(Overloaded, match="6 bytes of bodies are held, limit 10 ") as refused:
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
    assert response_coding(accepted) == coding
