"""HTTP request bodies: limits, compression, and the quota that all bodies share."""

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
from iskander.gateway.protocols.oip.http.body import (
    PIECE_BYTES,
    BodyQuota,
    ReceivedBody,
    compress,
    read_body,
    response_coding,
)
from iskander.gateway.transport.limits import receive_budget
from iskander.gateway.transport.limits.receive_budget import ReceiveBudget

MIB = 1 << 20
COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
MIXED = bytes(range(256)) * 4096


def receive_of(*pieces: bytes, is_whole: bool = True) -> Any:
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    if is_whole:
        messages.append({"type": "http.request", "body": b"", "more_body": False})
    messages.append({"type": "http.disconnect"})
    remaining = iter(messages)

    async def receive() -> Any:
        return next(remaining)

    return receive


T = TypeVar("T")
EVENTS: list[str] = []


def quota_of(
    bytes_max: int = 100 * MIB, budget: ReceiveBudget | None = None, message_s: float = 10.0
) -> BodyQuota:
    EVENTS.clear()
    return BodyQuota(bytes_max, budget or ReceiveBudget(1 << 30), message_s, EVENTS.append)


def run_with_timeout(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, 5.0))


def read(
    *pieces: bytes,
    bytes_max: int = 2 * MIB,
    quota: BodyQuota | None = None,
    receive: Any = None,
    **headers: str,
) -> bytes:
    quota = quota or quota_of()
    header_map = Headers({name.replace("_", "-"): value for name, value in headers.items()})

    async def run() -> bytes:
        with ReceivedBody(quota) as body_memory:
            return bytes(
                await read_body(receive or receive_of(*pieces), header_map, bytes_max, body_memory)
            )

    try:
        return run_with_timeout(run())
    finally:
        gc.collect()
        assert quota.held_bytes == 0 and not quota.budget.holders
        # A compression thread frees its memory only after it has returned the result.
        eventually(lambda: quota.budget.used_bytes == 0, 5)


def test_body_is_joined_from_its_pieces() -> None:
    assert read(b"ab", b"", b"c", content_length="3") == b"abc"
    assert read() == b""


@pytest.mark.parametrize("coding", COMPRESS)
@pytest.mark.parametrize("body", [b"", b"a", MIXED, bytes(PIECE_BYTES), bytes(PIECE_BYTES + 1)])
def test_compressed_body_is_decompressed(coding: str, body: bytes) -> None:
    compressed = COMPRESS[coding](body)

    assert read(compressed[:7], compressed[7:], content_encoding=coding.upper()) == body


@pytest.mark.parametrize("coding", COMPRESS)
def test_compressed_response_is_read_by_standard_libraries(coding: str) -> None:
    compressed = asyncio.run(compress([b"head", memoryview(MIXED)], coding))

    decompressed = gzip.decompress(compressed) if coding == "gzip" else zlib.decompress(compressed)
    assert decompressed == b"head" + MIXED


def test_body_with_a_large_content_length_is_not_read() -> None:
    async def receive() -> Any:
        raise AssertionError("the body was read")

    for length in (str(MIB + 1), "9" * 30):
        with pytest.raises(LimitExceeded):
            read(receive=receive, bytes_max=MIB, content_length=length)


def test_body_without_a_length_is_read_up_to_the_limit() -> None:
    with pytest.raises(LimitExceeded):
        read(b"1234", b"5", b"never read", bytes_max=4)
    assert read(b"1234", bytes_max=4) == b"1234"


@pytest.mark.parametrize("coding", COMPRESS)
@pytest.mark.parametrize("bytes_max", [1000, MIB])
def test_bomb_is_rejected_at_the_limit(coding: str, bytes_max: int) -> None:
    """A bomb of 64 MiB, with its true size and with a forged gzip size."""
    bomb = COMPRESS[coding](bytes(64 * MIB))
    forged = bomb[:-4] + (bytes_max // 2).to_bytes(4, "little")
    for compressed in (bomb, forged) if coding == "gzip" else (bomb,):
        budget = PeakBudget(100 * MIB)
        with pytest.raises((LimitExceeded, MalformedInput), match=r"declares|too large"):
            read(
                compressed,
                quota=quota_of(budget=budget),
                bytes_max=bytes_max,
                content_encoding=coding,
            )
        assert budget.peak <= 2 * bytes_max


class PeakBudget(ReceiveBudget):
    peak = 0

    def charge(self, size: int) -> None:
        super().charge(size)
        self.peak = max(self.peak, self.used_bytes)


@pytest.mark.parametrize("coding", COMPRESS)
def test_decompressed_body_is_charged_to_both_limits(coding: str) -> None:
    compressed = COMPRESS[coding](bytes(MIB))
    with pytest.raises(Overloaded, match="receive_bytes"):
        read(compressed, quota=quota_of(budget=ReceiveBudget(MIB // 2)), content_encoding=coding)
    with pytest.raises(Overloaded, match="bodies_bytes"):
        read(compressed, quota=quota_of(MIB // 2), content_encoding=coding)


@pytest.mark.parametrize(
    ("compressed", "message"),
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
def test_invalid_compressed_body_is_malformed(compressed: bytes, message: str) -> None:
    with pytest.raises(MalformedInput, match=message):
        read(compressed, content_encoding="gzip")


def test_unknown_coding_is_rejected_by_name() -> None:
    with pytest.raises(Unsupported, match="br"):
        read(b"a", content_encoding="br")


def test_disconnect_within_a_body_cancels_the_call() -> None:
    with pytest.raises(Cancelled):
        read(receive=receive_of(b"a", is_whole=False))


def slow_receive(*pieces: bytes) -> Any:
    """Returns a receive function with pauses between the pieces and no end."""
    return slow_receive_of(iter(pieces))


def slow_receive_of(pieces: Iterator[bytes], pause_s: float = 0.02) -> Any:
    async def receive() -> Any:
        await asyncio.sleep(pause_s)
        piece = next(pieces, None)
        if piece is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": piece, "more_body": True}

    return receive


@pytest.mark.slow
def test_body_below_the_minimum_rate_times_out() -> None:
    """One body stalls, another one trickles."""
    quota = quota_of(message_s=0.1)
    steady, trickling = iter([bytes(100)] * 10), iter([b"a"] * 10_000)
    for pieces in (steady, trickling):
        with pytest.raises(DeadlineExceeded, match="behind 500 bytes/s"):
            read(receive=slow_receive_of(pieces), quota=quota)
    assert EVENTS == ["message_timeout"] * 2
    assert not list(steady) and list(trickling)
    assert read(*[b"a"] * 3, receive=None, quota=quota) == b"aaa"


def test_large_old_body_is_rejected_first_above_the_budget() -> None:
    async def run() -> None:
        budget = ReceiveBudget(4 * MIB)
        quota = quota_of(budget=budget, message_s=60.0)

        async def read_one(receive: Any) -> int:
            with ReceivedBody(quota) as body_memory:
                return len(await read_body(receive, Headers({}), 8 * MIB, body_memory))

        large = asyncio.create_task(read_one(slow_receive(bytes(3 * MIB))))
        await asyncio.sleep(0.1)
        small = [asyncio.create_task(read_one(slow_receive(bytes(MIB // 2)))) for _ in range(4)]
        with pytest.raises(Overloaded, match="receive_bytes") as rejected:
            await large
        assert rejected.value.retry_after_ms and budget.evictions == 1
        assert await read_one(receive_of(bytes(MIB))) == MIB
        assert budget.used_bytes == 2 * MIB
        for each in small:
            each.cancel()
        await asyncio.gather(*small, return_exceptions=True)
        assert budget.used_bytes == 0

    run_with_timeout(run())


def test_large_body_is_reserved_before_it_is_received() -> None:
    """A second body waits for memory, and is rejected after a timeout."""

    async def run() -> None:
        budget = ReceiveBudget(16 * MIB)
        size = 10 * MIB
        headers = Headers({"content-length": str(size)})

        async def read_one(receive: Any, quota: BodyQuota) -> int:
            with ReceivedBody(quota) as body_memory:
                return len(await read_body(receive, headers, size, body_memory))

        first = asyncio.create_task(read_one(slow_receive(bytes(MIB)), quota_of(budget=budget)))
        await asyncio.sleep(0.05)
        assert budget.used_bytes == size
        with pytest.raises(Overloaded, match="receive_bytes"):
            await read_one(receive_of(bytes(size)), quota_of(budget=budget, message_s=0.1))
        waiting = asyncio.create_task(read_one(receive_of(bytes(size)), quota_of(budget=budget)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert await waiting == size
        assert budget.used_bytes == 0 and not budget._reserved and not budget._waiting

    run_with_timeout(run())


def test_stalled_large_body_is_evicted_for_a_waiting_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receive_budget, "STALL_NS_UNDER_PRESSURE", 1)

    async def run() -> None:
        budget = ReceiveBudget(16 * MIB)
        quota = quota_of(budget=budget)
        headers = Headers({"content-length": str(10 * MIB)})

        async def read_one(receive: Any) -> int:
            with ReceivedBody(quota) as body_memory:
                return len(await read_body(receive, headers, 10 * MIB, body_memory))

        stalled = asyncio.create_task(read_one(slow_receive(bytes(MIB))))
        await asyncio.sleep(0.05)
        assert await read_one(receive_of(bytes(10 * MIB))) == 10 * MIB
        with pytest.raises(DeadlineExceeded):
            await stalled
        assert budget.used_bytes == 0 and EVENTS == ["message_timeout"]

    run_with_timeout(run())


def test_bodies_share_a_quota_and_release_it() -> None:
    quota = quota_of(10)
    with ReceivedBody(quota) as first, ReceivedBody(quota) as second:
        first.grow(6)
        with pytest.raises(Overloaded, match="6 bytes of bodies are held, limit 10 ") as rejected:
            second.grow(5)
        second.grow(4)
        second.add(100)
        assert rejected.value.retry_after_ms
        assert quota.held_bytes == 110
    assert quota.held_bytes == 0


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
def test_response_is_compressed_only_for_one_accepted_coding(
    accepted: str, coding: str | None
) -> None:
    assert response_coding(accepted) == coding
