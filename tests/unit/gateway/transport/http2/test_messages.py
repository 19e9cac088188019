"""gRPC messages on HTTP/2 streams: compression, size limits and incomplete messages."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
import zlib

import pytest
from support import http2 as client
from support.http2 import (
    END_HEADERS,
    END_STREAM,
    Peer,
    data,
    message,
    rst_stream,
    until,
)
from support.http2_calls import (
    MIB,
    Reader,
    echo,
)
from support.input_arena import in_loop, turns

from iskander.errors import Cancelled
from iskander.gateway.transport.http2.status import Status


def compressed(raw: bytes, encoding: str) -> bytes:
    return gzip.compress(raw) if encoding == "gzip" else zlib.compress(raw)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_messages(encoding: str) -> None:
    async def run() -> None:
        reader = Reader()
        peer = Peer(reader)
        peer.open(1, ("grpc-encoding", encoding))
        raw = message(compressed(b"text" * 5000, encoding), 1) + message(b"as it is")
        peer.feed(data(1, raw[:20]), data(1, raw[20:], END_STREAM))
        await turns()
        assert reader.messages == [b"text" * 5000, b"as it is"]

    asyncio.run(run())


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize(
    ("expanded", "status"), [(999, None), (1000, None), (1001, 8), (1002, 8), (500_000, 8)]
)
def test_compressed_message_above_the_size_limit_is_rejected(
    encoding: str, expanded: int, status: int | None
) -> None:
    async def run() -> None:
        reader = Reader()
        peer = Peer(reader, message_bytes=1000)
        peer.open(1, ("grpc-encoding", encoding))
        # The message is cut, because even the compressed bytes exceed the limit.
        raw = compressed(bytes(expanded), encoding)
        if len(raw) > 1000:
            raw = raw[:1000]
        peer.feed(data(1, message(raw, 1), END_STREAM))
        await turns()
        assert (reader.error and reader.error.status) == status
        assert [len(each) for each in reader.messages] == ([expanded] if status is None else [])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("raw", "encoding", "status"),
    [
        (gzip.compress(b"text" * 99, mtime=0)[:-3], "gzip", Status.INTERNAL),
        (b"not at all", "gzip", Status.INTERNAL),
        (b"", "gzip", Status.INTERNAL),
        (zlib.compress(b"text"), "gzip", Status.INTERNAL),
        (zlib.compress(b"text"), "snappy", Status.UNIMPLEMENTED),
        (zlib.compress(b"text"), "", Status.INTERNAL),
        (zlib.compress(b"text"), "identity", Status.INTERNAL),
    ],
)
def test_malformed_compressed_messages_fail_the_call(
    raw: bytes, encoding: str, status: Status
) -> None:
    async def run() -> None:
        reader = Reader()
        peer = Peer(reader)
        peer.open(1, ("grpc-encoding", encoding))
        peer.feed(data(1, message(b"before") + message(raw, 1) + message(b"after"), END_STREAM))
        await turns()
        assert reader.messages == [b"before"]
        assert peer.answer().status == status and not peer.calls

    asyncio.run(run())


@in_loop
async def test_message_that_declares_too_many_bytes_is_not_decompressed() -> None:
    reader = Reader()
    peer = Peer(reader, message_bytes=MIB)
    peer.open(1, ("grpc-encoding", "gzip"))
    peer.feed(data(1, message(gzip.compress(bytes(8 * MIB)), 1), END_STREAM))
    await asyncio.sleep(0)
    assert reader.error is not None and reader.error.status == Status.RESOURCE_EXHAUSTED
    assert f"declares {8 * MIB:,} bytes" in reader.error.message


@in_loop
async def test_second_gzip_member_is_decompressed_or_rejected() -> None:
    reader = Reader()
    peer = Peer(reader)
    peer.open(1, ("grpc-encoding", "gzip"))
    two = gzip.compress(b"one") + gzip.compress(b"two")
    peer.feed(data(1, message(two, 1), END_STREAM))
    await turns()
    assert reader.messages == [b"onetwo"] or reader.error is not None


@in_loop
async def test_compressed_messages_are_decompressed_when_they_are_read() -> None:
    """Decompressed at arrival, one window could use thousands of windows of memory."""
    peer = Peer(message_bytes=2 * MIB)
    peer.open(1, ("grpc-encoding", "gzip"))
    await turns()
    bomb = message(gzip.compress(bytes(MIB)), 1)
    tracemalloc.start()
    try:
        for _ in range(50):
            peer.feed(data(1, bomb))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 4 * MIB


@pytest.mark.parametrize("cuts", [(1,), (4,), (5,), (6,), (50,), (2, 5)])
def test_message_above_the_limit_fails_the_call_after_earlier_messages(cuts: list[int]) -> None:
    async def run() -> None:
        reader = Reader()
        peer = Peer(reader, message_bytes=100)
        peer.open()
        peer.feed(data(1, message(bytes(100))))
        raw, start = message(bytes(101)), 0
        for cut in (*cuts, len(raw)):
            peer.feed(data(1, raw[start:cut]))
            start = cut
        await turns()
        assert [len(each) for each in reader.messages] == [100]
        answer = peer.answer()
        assert answer.status == Status.RESOURCE_EXHAUSTED
        assert "101 bytes, limit 100" in answer.blocks[-1]["grpc-message"]
        assert answer.reset == client.NO_ERROR
        peer.feed(data(1, bytes(1000), END_STREAM))
        assert peer.goaway_code is None and not peer.calls

    asyncio.run(run())


@pytest.mark.parametrize("end", [1, 4, 5, 6, 14])
def test_truncated_last_message_fails_the_call(end: int) -> None:
    async def run() -> None:
        reader = Reader()
        peer = Peer(reader)
        peer.open()
        peer.feed(data(1, message(b"whole") + message(b"cut short.")[:end], END_STREAM))
        await turns()
        assert reader.messages == [b"whole"]
        answer = peer.answer()
        assert answer.status == Status.INTERNAL and "truncated" in answer.blocks[-1]["grpc-message"]

    asyncio.run(run())


@in_loop
async def test_input_ends_by_an_empty_frame_or_by_trailers() -> None:
    reader = Reader()
    peer = Peer(reader)
    peer.open(1)
    peer.feed(data(1, message(b"a")), data(1, b"", END_STREAM))
    peer.open(3)
    peer.feed(data(3, message(b"b")), client.headers(3, [("t", "x")], END_HEADERS | END_STREAM))
    peer.open(5, flags=END_STREAM)
    await turns()
    assert [peer.answer(each).status for each in (1, 3, 5)] == [0, 0, 0]
    assert reader.messages == [b"a", b"b"] and not peer.calls


@pytest.mark.parametrize("length", [4, 6, 10])
@pytest.mark.parametrize("cut", [1, 1 << 18])
def test_data_that_differs_from_content_length_resets_the_call(length: int, cut: int) -> None:
    async def run() -> None:
        peer = Peer(echo)
        peer.open(1, ("content-length", str(length)))
        peer.feed(data(1, message(b"")), data(1, b"", END_STREAM), cut=cut)
        await turns()
        assert peer.answer(1).reset == client.PROTOCOL_ERROR
        peer.open(3, ("content-length", "6"))
        peer.feed(data(3, message(b"x"), END_STREAM, padding=3), cut=cut)
        await turns()
        assert peer.answer(3).messages == [b"x"] and peer.goaway_code is None

    asyncio.run(run())


@in_loop
async def test_charge_after_the_end_of_a_call_is_rejected() -> None:
    """A task that the end of the call cancels may still run a step."""
    peer = Peer()
    peer.open()
    await until(lambda: peer.served)
    (call,) = peer.served
    call.charge_memory(1000)
    peer.feed(rst_stream(1))
    assert call.is_over
    with pytest.raises(Cancelled):
        call.charge_memory(1000)
    assert peer.host.budget.used_bytes == 0
