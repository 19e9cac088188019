"""HTTP/2 connections and their calls, against a client that sends arbitrary frames."""

from __future__ import annotations

import asyncio
import gc
import gzip
import tracemalloc
import zlib
from collections.abc import Callable

import h2.config
import h2.connection
import h2.events
import h2.settings
import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import http2 as client
from support.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_MAX,
    WINDOW_UPDATE,
    Peer,
    block,
    data,
    frame,
    message,
    ping,
    request_fields,
    rst_stream,
    until,
    window_update,
)
from support.input_arena import in_loop, turns

from iskander.config.schema import TimeoutsConfig
from iskander.errors import Cancelled, DeadlineExceeded
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.gateway.protocols import grpc_errors, grpc_server
from iskander.gateway.transport.connection_listener import SCRATCH_BYTES
from iskander.gateway.transport.http2 import connection, frames, response_headers
from iskander.gateway.transport.http2.call import Call, Message
from iskander.gateway.transport.http2.call_receiver import WINDOW_BYTES
from iskander.gateway.transport.http2.rate_limit import BURST
from iskander.gateway.transport.http2.status import RpcError, Status
from iskander.gateway.transport.http2.streams import BYTE_CPU_NS, MESSAGE_CPU_NS
from iskander.gateway.transport.limits import turn_scheduler

TIMEOUTS = TimeoutsConfig()
PREFACE_NS = int(TIMEOUTS.preface_s * NS_PER_S)
HEADERS_NS = int(TIMEOUTS.headers_s * NS_PER_S)
IDLE_NS = int(TIMEOUTS.idle_s * NS_PER_S)
KEEPALIVE_NS = int(TIMEOUTS.keepalive_s * NS_PER_S)
WINDOW_DEFAULT = 65_535
ODD = range(1, 1601, 2)
FRAME_DEFAULT = 16_384
MIB = 1 << 20


async def echo(call: Call) -> None:
    while (raw := await call.read()) is not None:
        await call.write(raw)


class Reader:
    """Handler that records the messages of its call, and their end.

    Attributes:
        messages: Messages read.
        has_ended: Whether the end of the input was read.
        error: Error of the last read.
    """

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.has_ended = False
        self.error: RpcError | None = None

    async def __call__(self, call: Call) -> None:
        try:
            while (raw := await call.read()) is not None:
                self.messages.append(bytes(raw))
        except RpcError as error:
            self.error = error
            raise
        self.has_ended = True


def writer(*messages: bytes) -> Callable[[Call], asyncio.Future[None]]:
    """Returns a handler that writes messages without reading."""

    async def write(call: Call) -> None:
        for each in messages:
            await call.write(each)

    return write  # type: ignore[return-value]


def compressed(raw: bytes, encoding: str) -> bytes:
    return gzip.compress(raw) if encoding == "gzip" else zlib.compress(raw)


def calls_in_memory(peer: Peer) -> list[Call]:
    """Returns the calls of a connection that are not garbage-collected."""
    gc.collect()
    calls = [each for each in gc.get_objects() if type(each) is Call]
    return [call for call in calls if call._streams is peer.connection.streams]


def blocked_calls(peer: Peer) -> int:
    """Returns the number of calls with bytes to send and no window."""
    return len(peer.connection.output._blocked)


INVALID_PREFACE = frames.goaway(0, frames.ErrorCode.PROTOCOL_ERROR, "invalid connection preface")


@in_loop
async def test_server_sends_settings_after_the_preface() -> None:
    peer = Peer(sends_preface=False, calls_max=7)
    assert peer.frames_of() == []
    peer.feed(PREFACE)
    sent = peer.frames_of()

    assert [each.kind for each in sent] == [SETTINGS, WINDOW_UPDATE]
    pairs = [sent[0].payload[at : at + 6] for at in range(0, len(sent[0].payload), 6)]
    values = {int.from_bytes(pair[:2]): int.from_bytes(pair[2:]) for pair in pairs}
    assert values == {3: 7, 4: WINDOW_BYTES, 5: MIB, 6: 16_384}
    assert sent[1].number == WINDOW_MAX - WINDOW_DEFAULT


@pytest.mark.parametrize("cut", [1, 2, 23, 24, 25])
def test_preface_in_several_reads(cut: int) -> None:
    async def run() -> None:
        peer = Peer(echo, sends_preface=False)
        call = client.headers(1) + data(1, message(b"hello"), END_STREAM)
        peer.feed(PREFACE, client.settings(), call, cut=cut)
        await turns()
        assert peer.answer() == ([{**peer.answer().blocks[0]}, {"grpc-status": "0"}], [b"hello"],
                                 None, True)  # fmt: skip

    asyncio.run(run())


@pytest.mark.parametrize(
    ("received", "response"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 505 "),
        (b"\x16\x03\x01\x02\x00\x01", INVALID_PREFACE),
        (b"PRI * HTTP/2.1\r\n", INVALID_PREFACE),
    ],
)
def test_invalid_preface_is_answered_and_closes_the_connection(
    received: bytes, response: bytes
) -> None:
    async def run() -> None:
        peer = Peer(sends_preface=False)
        start = len(peer.transport.written)
        peer.feed(received)
        assert bytes(peer.transport.written[start:]).startswith(response)
        assert peer.transport.is_closed
        await turns()
        assert not peer.host.connections

    asyncio.run(run())


@in_loop
async def test_connection_without_a_preface_is_aborted_after_a_timeout() -> None:
    peer = Peer(sends_preface=False)
    peer.feed(PREFACE[:5])
    peer.connection.enforce_timeouts(now_ns() + PREFACE_NS // 2)
    assert not peer.transport.is_aborted
    peer.connection.enforce_timeouts(now_ns() + PREFACE_NS + NS_PER_S)
    assert peer.transport.is_aborted


@in_loop
async def test_idle_connection_is_pinged_and_aborted_without_a_pong() -> None:
    peer = Peer()
    later = now_ns() + IDLE_NS + NS_PER_S
    peer.connection.enforce_timeouts(later)
    assert len(peer.frames_of(PING)) == 1
    peer.connection.enforce_timeouts(later + KEEPALIVE_NS)
    assert not peer.transport.is_aborted
    peer.connection.enforce_timeouts(later + KEEPALIVE_NS + 1)
    assert peer.transport.is_aborted


@in_loop
async def test_idle_connection_that_answers_the_ping_stays_open() -> None:
    peer = Peer()
    later = now_ns() + IDLE_NS + NS_PER_S
    peer.connection.enforce_timeouts(later)
    peer.feed(ping(peer.frames_of(PING)[0].payload, client.ACK))
    peer.connection.enforce_timeouts(later + KEEPALIVE_NS + 1)
    assert not peer.transport.is_aborted


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 1000])
def test_call_in_reads_of_any_size(cut: int) -> None:
    sent = [b"", b"a", b"bc" * 700, b""]

    async def run() -> None:
        reader = Reader()
        peer = Peer(reader)
        raw = b"".join(map(message, sent))
        peer.feed(client.headers(1), data(1, raw, END_STREAM, padding=9), cut=cut)
        await turns()
        assert reader.messages == sent and reader.has_ended

    asyncio.run(run())


def test_messages_cut_at_every_boundary() -> None:
    sent = [b"first", b"", b"x"]
    raw = b"".join(map(message, sent))

    async def run(at: int) -> None:
        reader = Reader()
        peer = Peer(reader)
        peer.open()
        peer.feed(data(1, raw[:at]), data(1), data(1, raw[at:], END_STREAM))
        await turns()
        assert reader.messages == sent and reader.has_ended

    for at in range(len(raw) + 1):
        asyncio.run(run(at))


SIZES = st.one_of(st.integers(0, 20), st.integers(0, 3000), st.sampled_from([65_536, 300_000]))


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(SIZES, max_size=6),
    frame_sizes=st.lists(st.integers(0, 70_000) | st.integers(0, 12), min_size=1, max_size=8),
    paddings=st.lists(st.none() | st.integers(0, 255), min_size=1, max_size=4),
    cut=st.integers(50, 5000),
    windows=st.tuples(st.integers(1, 70_000), st.sampled_from([16_384, 40_000])),
)
def test_messages_round_trip_with_the_h2_library(
    sizes: list[int],
    frame_sizes: list[int],
    paddings: list[int | None],
    cut: int,
    windows: tuple[int, int],
) -> None:
    sent = [bytes([index + 1]) * size for index, size in enumerate(sizes)]
    raw = b"".join(map(message, sent))

    async def run() -> None:
        reader = Reader()

        async def serve(call: Call) -> None:
            await reader(call)
            for each in reader.messages:
                await call.write(each[:3], each[3:])

        peer = Peer(serve, sends_preface=False)
        window = max(windows[0], len(raw) // 30)
        reference = ReferenceClient(peer, window=window, frame_bytes=windows[1])
        await reference.exchange(cut)
        reference.h2.send_headers(1, request_fields())
        at, turn = 0, 0
        while at < len(raw):
            padding = paddings[turn % len(paddings)]
            size = frame_sizes[turn % len(frame_sizes)] if turn < 30 else 70_000
            count = min(size, reference.h2.local_flow_control_window(1) - 256, len(raw) - at)
            reference.h2.send_data(1, raw[at : at + count], pad_length=padding)
            at, turn = at + count, turn + 1
            await reference.exchange(cut)
        reference.h2.send_data(1, b"", end_stream=True)
        await reference.until_ended(cut)

        assert reader.messages == sent and reader.has_ended
        assert client.split_messages(bytes(reference.body)) == sent
        assert reference.trailers["grpc-status"] == "0"
        assert not peer.calls and not blocked_calls(peer)

    asyncio.run(run())


class ReferenceClient:
    """Client of the `h2` library, which raises an error if the server violates the protocol."""

    def __init__(self, peer: Peer, *, window: int, frame_bytes: int) -> None:
        self.peer = peer
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.h2.initiate_connection()
        codes = h2.settings.SettingCodes
        self.h2.update_settings(
            {codes.INITIAL_WINDOW_SIZE: window, codes.MAX_FRAME_SIZE: frame_bytes}
        )
        self.body = bytearray()
        self.trailers: dict[str, str] = {}
        self.is_over = False
        self._seen = 0

    async def exchange(self, cut: int) -> None:
        """Transfers the pending bytes in both directions."""
        self.peer.feed(self.h2.data_to_send(), cut=cut)
        await turns()
        written = self.peer.transport.written
        received, self._seen = bytes(written[self._seen :]), len(written)
        for event in self.h2.receive_data(received):
            match event:
                case h2.events.DataReceived():
                    self.body += event.data
                    self.h2.acknowledge_received_data(event.flow_controlled_length, 1)
                case h2.events.TrailersReceived() | h2.events.ResponseReceived():
                    self.trailers = dict(event.headers)
                case h2.events.StreamEnded():
                    self.is_over = True
                case h2.events.ConnectionTerminated() | h2.events.StreamReset():
                    raise AssertionError(event)
        self.peer.feed(self.h2.data_to_send(), cut=cut)

    async def until_ended(self, cut: int) -> None:
        for _ in range(1000):
            if self.is_over:
                return
            await self.exchange(cut)
        raise AssertionError("the call did not end")


@in_loop
async def test_message_of_several_windows() -> None:
    reader = Reader()
    peer = Peer(reader, message_bytes=16 * MIB)
    sent = bytes(range(256)) * (10 * MIB // 256) + b"end"
    raw = message(sent)
    peer.open()
    for at in range(0, len(raw), MIB):
        part = raw[at : at + MIB]
        peer.feed(data(1, part, END_STREAM if at + MIB >= len(raw) else 0))
        granted = sum(each.number for each in peer.frames_of(WINDOW_UPDATE) if each.stream_id == 1)
        assert WINDOW_BYTES + granted >= min(at + 2 * MIB, len(raw))
    await turns()
    assert reader.messages == [sent]


@in_loop
async def test_window_grows_only_by_bytes_that_the_handler_read() -> None:
    peer = Peer()
    peer.open()
    await turns()
    for _ in range(4):
        peer.feed(data(1, message(bytes(MIB - 5))))
    call = peer.calls[1]
    assert [each.stream_id for each in peer.frames_of(WINDOW_UPDATE)] == [0]
    for _ in range(4):
        call.receive()
    updates = [each for each in peer.frames_of(WINDOW_UPDATE) if each.stream_id == 1]
    assert sum(each.number for each in updates) == 4 * MIB
    peer.feed(data(1, message(bytes(MIB - 5))))
    assert peer.goaway_code is None and call.has_input


@in_loop
async def test_data_above_the_window_closes_the_connection() -> None:
    peer = Peer()
    peer.open()
    await turns()
    for _ in range(4):
        peer.feed(data(1, message(bytes(MIB - 5))))
    assert peer.goaway_code is None
    peer.feed(data(1, b"\0"))
    assert peer.goaway_code == client.FLOW_CONTROL_ERROR
    assert not peer.calls


@in_loop
async def test_padding_counts_against_the_window_and_is_returned() -> None:
    reader = Reader()
    peer = Peer(reader)
    peer.open()
    await turns()
    frame_bytes = len(message(b"x")) + 256
    count = WINDOW_BYTES // 2 // frame_bytes + 1
    for _ in range(count):
        peer.feed(data(1, message(b"x"), padding=255))
    await turns()
    updates = [each.number for each in peer.frames_of(WINDOW_UPDATE) if each.stream_id == 1]
    assert updates == [count * frame_bytes]
    assert peer.connection.streams._received == count * frame_bytes
    assert peer.goaway_code is None


@in_loop
async def test_padding_counts_against_the_window_of_an_unread_call() -> None:
    peer = Peer()
    peer.open()
    peer.feed(data(1, message(b"not read")))
    for _ in range(WINDOW_BYTES // 256 + 1):
        peer.feed(data(1, message(bytes(300)), padding=255))
    assert peer.goaway_code == client.FLOW_CONTROL_ERROR


@in_loop
async def test_connection_window_is_returned_for_an_ended_call() -> None:
    """The data exceeds one gibibyte."""

    async def reject(call: Call) -> None:
        raise RpcError(Status.NOT_FOUND, "not here")

    peer = Peer(reject)
    peer.open()
    await turns()
    received = data(1, bytes(MIB))
    for _ in range(1025):
        peer.feed(received)
    updates = [each.number for each in peer.frames_of(WINDOW_UPDATE)]
    assert len(updates) == 2 and updates[1] >= 1024 * MIB


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


def opened(*parts: bytes, is_ended: bool = False) -> bytes:
    """Returns the opening of call 1 and the frames after it."""
    flags = END_HEADERS | (END_STREAM if is_ended else 0)
    return client.headers(1, flags=flags) + b"".join(parts)


FIELDS = block(request_fields())
CONNECTION_ERRORS: dict[str, tuple[bytes, int]] = {
    "data of stream 0": (data(0, b"x"), client.PROTOCOL_ERROR),
    "data of an idle stream": (data(1, b"x"), client.PROTOCOL_ERROR),
    "padded data of an idle stream": (data(1, b"x", padding=1), client.PROTOCOL_ERROR),
    "data after END_STREAM": (opened(data(1, b"x"), is_ended=True), client.STREAM_CLOSED),
    "padding longer than payload": (
        opened(frame(DATA, 1, b"\5abcd", client.PADDED)),
        client.PROTOCOL_ERROR,
    ),
    "data with a padding length only": (
        opened(frame(DATA, 1, b"\1", client.PADDED)),
        client.PROTOCOL_ERROR,
    ),
    "padded data without a padding length": (
        opened(frame(DATA, 1, b"", client.PADDED)),
        client.PROTOCOL_ERROR,
    ),
    "padding longer than header block": (
        frame(HEADERS, 1, b"\xff" + FIELDS, END_HEADERS | client.PADDED),
        client.PROTOCOL_ERROR,
    ),
    "padded headers without a padding length": (
        frame(HEADERS, 1, b"", END_HEADERS | client.PADDED),
        client.PROTOCOL_ERROR,
    ),
    "headers shorter than their priority": (
        frame(HEADERS, 1, b"\0\0\0", END_HEADERS | client.HAS_PRIORITY),
        client.PROTOCOL_ERROR,
    ),
    "even stream id": (client.headers(2), client.PROTOCOL_ERROR),
    "headers of stream 0": (client.headers(0), client.PROTOCOL_ERROR),
    "stream that depends on itself": (
        frame(HEADERS, 1, b"\0\0\0\1\x10" + FIELDS, END_HEADERS | client.HAS_PRIORITY),
        client.PROTOCOL_ERROR,
    ),
    "stream id lower than the last": (
        client.headers(5) + client.headers(3),
        client.STREAM_CLOSED,
    ),
    "data of a call that the client reset": (
        opened(rst_stream(1), data(1, b"x")),
        client.STREAM_CLOSED,
    ),
    "headers of a call that the client reset": (
        opened(rst_stream(1), client.headers(1)),
        client.STREAM_CLOSED,
    ),
    "priority of stream 0": (frame(client.PRIORITY, 0, b"12345"), client.PROTOCOL_ERROR),
    "short priority": (frame(client.PRIORITY, 1, b"1234"), client.FRAME_SIZE_ERROR),
    "priority on itself": (frame(client.PRIORITY, 1, b"\0\0\0\1\0"), client.PROTOCOL_ERROR),
    "reset of stream 0": (opened(rst_stream(0)), client.PROTOCOL_ERROR),
    "long reset": (opened(frame(RST_STREAM, 1, b"12345")), client.FRAME_SIZE_ERROR),
    "settings of a stream": (frame(SETTINGS, 1), client.PROTOCOL_ERROR),
    "settings ack with payload": (
        frame(SETTINGS, 0, b"\0\4\0\0\0\1", client.ACK),
        client.FRAME_SIZE_ERROR,
    ),
    "push setting of 2": (frame(SETTINGS, 0, b"\0\2\0\0\0\2"), client.PROTOCOL_ERROR),
    "ping of a stream": (frame(PING, 1, b"12345678"), client.PROTOCOL_ERROR),
    "GOAWAY of a stream": (opened(frame(GOAWAY, 1, bytes(8))), client.PROTOCOL_ERROR),
    "window update of an idle stream": (window_update(1, 5), client.PROTOCOL_ERROR),
    "window update of a server stream": (
        client.headers(3) + window_update(2, 5),
        client.PROTOCOL_ERROR,
    ),
    "reset of a server stream": (
        client.headers(3) + rst_stream(2),
        client.PROTOCOL_ERROR,
    ),
    "data of a server stream": (client.headers(3) + data(2), client.PROTOCOL_ERROR),
    "long window update": (frame(WINDOW_UPDATE, 0, b"12345"), client.FRAME_SIZE_ERROR),
    "continuation without headers": (
        frame(client.CONTINUATION, 1, FIELDS, END_HEADERS),
        client.PROTOCOL_ERROR,
    ),
    "continuation of another stream": (
        client.headers(1, flags=0) + frame(client.CONTINUATION, 3, FIELDS, END_HEADERS),
        client.PROTOCOL_ERROR,
    ),
    "headers between continuations": (
        client.headers(1, flags=0) + client.headers(3),
        client.PROTOCOL_ERROR,
    ),
    "ping between continuations": (client.headers(1, flags=0) + ping(), client.PROTOCOL_ERROR),
    "data between continuations": (
        opened(client.headers(3, flags=0), data(1)),
        client.PROTOCOL_ERROR,
    ),
    "unknown frame between continuations": (
        client.headers(1, flags=0) + frame(99),
        client.PROTOCOL_ERROR,
    ),
    "header index without an entry": (frame(HEADERS, 1, b"\xff\xff", END_HEADERS),
                                client.COMPRESSION_ERROR),
    "huge data": (opened(frame(DATA, 1, bytes(MIB + 1))), client.FRAME_SIZE_ERROR),
    "huge headers": (frame(HEADERS, 1, bytes(65_537)), client.FRAME_SIZE_ERROR),
    "reset of an idle stream": (rst_stream(1), client.PROTOCOL_ERROR),
    "short reset": (opened(frame(RST_STREAM, 1, b"abc")), client.FRAME_SIZE_ERROR),
    "settings of an invalid length": (frame(SETTINGS, 0, b"1234567"), client.FRAME_SIZE_ERROR),
    "window setting too large": (client.settings(window=1 << 31), client.FLOW_CONTROL_ERROR),
    "frame size setting too small": (client.settings(frame_bytes=16_383), client.PROTOCOL_ERROR),
    "frame size setting too large": (client.settings(frame_bytes=1 << 24), client.PROTOCOL_ERROR),
    "push promise": (frame(client.PUSH_PROMISE, 1, b"1234"), client.PROTOCOL_ERROR),
    "short ping": (ping(b"1234567"), client.FRAME_SIZE_ERROR),
    "short GOAWAY": (frame(GOAWAY, 0, b"123"), client.FRAME_SIZE_ERROR),
    "short window update": (frame(WINDOW_UPDATE, 0, b"123"), client.FRAME_SIZE_ERROR),
    "window overflow": (window_update(0, WINDOW_MAX), client.FLOW_CONTROL_ERROR),
    "window update of 0": (window_update(0, 0), client.PROTOCOL_ERROR),
    "setting that overflows a window": (
        opened(window_update(1, WINDOW_MAX - WINDOW_DEFAULT), client.settings(window=65_536)),
        client.FLOW_CONTROL_ERROR,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONNECTION_ERRORS)
@pytest.mark.parametrize("cut", [1, 1 << 18])
def test_connection_errors(case: str, cut: int) -> None:
    raw, code = CONNECTION_ERRORS[case]
    if cut == 1 and len(raw) > 10_000:
        cut = 1000

    async def run() -> None:
        peer = Peer()
        peer.open(1) if raw.startswith(opened()) else None
        peer.feed(raw.removeprefix(opened()), cut=cut)
        assert peer.goaway_code == code
        assert not peer.calls
        await turns()
        assert not peer.host.connections and peer.transport.is_closed

    asyncio.run(run())


STREAM_ERRORS: dict[str, tuple[bytes, int]] = {
    "trailers without END_STREAM": (client.headers(1, [("a", "b")]), client.PROTOCOL_ERROR),
    "trailers with a path": (
        client.headers(1, [(":path", "b")], END_HEADERS | END_STREAM),
        client.PROTOCOL_ERROR,
    ),
    "trailers in upper case": (
        client.headers(1, [("A", "b")], END_HEADERS | END_STREAM),
        client.PROTOCOL_ERROR,
    ),
    "headers after END_STREAM": (
        data(1, b"", END_STREAM) + client.headers(1, [("a", "b")], END_HEADERS | END_STREAM),
        client.STREAM_CLOSED,
    ),
    "window overflow": (window_update(1, WINDOW_MAX), client.FLOW_CONTROL_ERROR),
    "window update of 0": (window_update(1, 0), client.PROTOCOL_ERROR),
}


@pytest.mark.parametrize("case", STREAM_ERRORS)
@pytest.mark.parametrize("cut", [1, 1 << 18])
def test_stream_errors_keep_the_connection_open(case: str, cut: int) -> None:
    raw, code = STREAM_ERRORS[case]

    async def run() -> None:
        peer = Peer()
        peer.open(1)
        peer.feed(raw, cut=cut)
        await turns()
        assert peer.answer(1).reset == code
        assert peer.goaway_code is None and not peer.calls
        peer.feed(ping())
        assert len(peer.frames_of(PING)) == 1

    asyncio.run(run())


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
async def test_streams_reset_after_client_errors_are_rate_limited() -> None:
    """The server does the work and drops the result, as with rapid reset (CVE-2025-8671)."""
    peer = Peer(calls_max=5)
    for stream_id in range(1, 2 * BURST * 2, 2):
        if peer.transport.is_closed:
            break
        peer.feed(client.headers(stream_id), window_update(stream_id, 0))
    assert peer.goaway_code == client.ENHANCE_YOUR_CALM


IGNORED = {
    "unknown frame": frame(99, 1, b"whatever", 255),
    "priority": frame(client.PRIORITY, 7, b"12345"),
    "unknown settings": frame(SETTINGS, 0, b"\x99\x99\0\0\0\1"),
    "window update of an ended call": window_update(1, 5),
    "data of an ended call": data(1, b"x" * 99) + data(1, b"x", padding=7),
    "reset of an ended call": rst_stream(1) + rst_stream(1),
    "trailers of an ended call": client.headers(1, [("a", "b")], END_HEADERS | END_STREAM),
    "GOAWAY": frame(GOAWAY, 0, bytes(8) + b"bye"),
    "unexpected ping ack": ping(b"whatever", client.ACK),
    "unexpected settings ack": frame(SETTINGS, 0, b"", client.ACK),
    "reserved bit of data": data(1 | 1 << 31, b"x"),
    "reserved bit of a window update": window_update(3 | 1 << 31, 1),
}


@pytest.mark.parametrize("case", IGNORED)
def test_ignored_frames_keep_calls_open(case: str) -> None:
    """The client may send frames of call 1 before it receives the end of the call."""

    async def run() -> None:
        async def serve(call: Call) -> None:
            if call.stream_id == 1:
                raise RpcError(Status.NOT_FOUND, "not here")
            await echo(call)

        peer = Peer(serve)
        peer.open(1)
        await turns()
        assert peer.answer(1).status == Status.NOT_FOUND
        peer.open(3)
        peer.feed(IGNORED[case], data(3, message(b"still"), END_STREAM))
        await turns()
        assert peer.goaway_code is None
        assert peer.answer(3).messages == [b"still"] and peer.answer(3).status == 0

    asyncio.run(run())


@in_loop
async def test_pings_and_settings_are_acknowledged() -> None:
    peer = Peer()
    peer.feed(ping(b"abcdefgh"), client.settings(window=5))
    acks = [each for each in peer.frames_of(PING, SETTINGS) if each.flags & client.ACK]
    assert [(each.kind, each.payload) for each in acks] == [
        (SETTINGS, b""),
        (PING, b"abcdefgh"),
        (SETTINGS, b""),
    ]


FLOODS: dict[str, Callable[[int], bytes]] = {
    "pings": lambda _: ping(),
    "settings": lambda _: client.settings(),
    "priorities": lambda _: frame(client.PRIORITY, 1, b"12345"),
    "unknown frames": lambda _: frame(99),
    "empty data": lambda _: data(1),
    "padding only": lambda _: data(1, b"", padding=9),
    "empty messages": lambda _: data(1, message(b"")),
    "empty messages, many per frame": lambda _: data(1, message(b"") * 100),
    "resets of an ended call": lambda _: rst_stream(1),
    "rapid resets": lambda n: client.headers(2 * n + 3) + rst_stream(2 * n + 3),
    "malformed requests": lambda n: client.headers(2 * n + 3, [("a", "b")]),
    "calls above the limit": lambda n: client.headers(2 * n + 3),
    "settings acks": lambda _: frame(SETTINGS, 0, b"", client.ACK),
    "ping acks": lambda _: ping(b"whatever", client.ACK),
    "GOAWAY frames": lambda _: frame(GOAWAY, 0, bytes(8)),
    "headers of ended calls": lambda _: client.headers(3, [("a", "b")], END_HEADERS | END_STREAM),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_floods_close_the_connection(flood: str) -> None:
    async def run() -> None:
        peer = Peer(calls_max=5)
        peer.open(1)
        if flood.startswith("headers"):
            peer.feed(client.headers(3, request_fields(without=["content-type"])))
        for count in range(BURST * 3):
            if peer.transport.is_closed:
                break
            peer.feed(FLOODS[flood](count))
        assert peer.goaway_code == client.ENHANCE_YOUR_CALM
        assert count > BURST // 2 or "many" in flood
        await turns()
        assert not peer.host.connections and not peer.calls

    asyncio.run(run())


@in_loop
async def test_headers_are_charged_by_decoding_cost() -> None:
    """One kilobyte of table indexes is a thousand headers, and costs 5 ms."""
    peer = Peer()
    raw = b"\x40\0\0" + b"\xbe" * 1000
    count = 0
    while not peer.transport.is_closed and count < 200:
        count += 1
        peer.feed(frame(HEADERS, 2 * count + 1, raw, END_HEADERS | END_STREAM))
    assert peer.goaway_code == client.ENHANCE_YOUR_CALM


@in_loop
async def test_huffman_codes_are_charged_by_decoding_cost() -> None:
    peer = Peer()
    raw = hpack.Encoder().encode(request_fields(extra=[("k", "a" * 20_000)]))
    count = 0
    while not peer.transport.is_closed and count < 200:
        count += 1
        peer.feed(frame(HEADERS, 2 * count + 1, raw, END_HEADERS | END_STREAM))
    assert peer.goaway_code == client.ENHANCE_YOUR_CALM


@in_loop
async def test_many_fragments_of_a_message_close_the_connection() -> None:
    peer = Peer()
    peer.open()
    peer.feed(data(1, message(bytes(100_000))[:10]))
    count = 0
    while not peer.transport.is_closed and count < 20 * BURST:
        count += 1
        peer.feed(data(1, b"x"))
    assert peer.goaway_code == client.ENHANCE_YOUR_CALM


@in_loop
async def test_incomplete_frame_closes_the_connection_after_a_timeout() -> None:
    for raw in (client.headers(1, flags=0), client.headers(1)[:20], ping()[:3]):
        peer = Peer()
        peer.feed(raw)
        now = now_ns()
        peer.connection.enforce_timeouts(now + HEADERS_NS // 2)
        assert peer.goaway_code is None
        peer.connection.enforce_timeouts(now + HEADERS_NS + NS_PER_S)
        assert peer.goaway_code == client.ENHANCE_YOUR_CALM
        assert peer.host.ended == ["headers_timeout"]


@in_loop
async def test_timeout_of_an_incomplete_frame_begins_with_the_frame() -> None:
    """Each read ends inside a frame, and completes the one before."""
    peer = Peer()
    first, rest = ping()[:3], ping()[3:] + ping()[:3]
    peer.feed(first)
    peer.connection._incomplete_ns -= HEADERS_NS
    peer.feed(rest)
    peer.connection.enforce_timeouts(now_ns() + NS_PER_S)
    assert peer.goaway_code is None
    peer.connection.enforce_timeouts(now_ns() + HEADERS_NS + NS_PER_S)
    assert peer.goaway_code == client.ENHANCE_YOUR_CALM


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


@in_loop
async def test_exception_in_a_turn_ends_only_its_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken, healthy = Peer(calls_max=1000), Peer(calls_max=1000)
    turns = broken.host.turns
    raw = b"".join(client.headers(n) for n in ODD)
    for peer in (broken, healthy):
        peer.host.turns = turns
        peer.connection.get_buffer(-1)[: len(raw)] = raw
        peer.connection.buffer_updated(len(raw))
        assert peer.transport.is_paused

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(broken.connection.streams, "on_headers", fail)
    await until(lambda: not healthy.transport.is_paused)
    assert broken.transport.is_closed and not healthy.transport.is_closed
    assert "gRPC connection failed" in caplog.text


@in_loop
async def test_large_read_is_processed_in_turns_without_loss() -> None:
    reader = Reader()
    peer = Peer(reader, calls_max=1000)
    raw = b"".join(client.headers(n) + data(n, message(b"%d" % n), END_STREAM) for n in ODD)
    peer.connection.get_buffer(-1)[: len(raw)] = raw
    peer.connection.buffer_updated(len(raw))
    assert peer.transport.is_paused and 0 < len(peer.calls) < len(ODD)
    peer.host.scratch[: len(raw)] = b"\xaa" * len(raw)
    await until(lambda: len(reader.messages) == len(ODD))
    assert sorted(map(int, reader.messages)) == list(ODD)
    assert not peer.transport.is_paused and not peer.connection._rest


@in_loop
async def test_frame_of_many_messages_is_processed_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = Reader()
    peer = Peer(reader)
    peer.open()
    sent = [b"%d" % n for n in range(5000)]
    raw = data(1, b"".join(map(message, sent)), END_STREAM)
    monkeypatch.setattr(connection, "QUANTUM_NS", 0)
    monkeypatch.setattr(turn_scheduler, "QUANTUM_NS", 2)
    peer.connection.get_buffer(-1)[: len(raw)] = raw
    peer.connection.buffer_updated(len(raw))
    assert peer.transport.is_paused and peer.connection.streams.has_data_left
    await until(lambda: reader.has_ended)
    assert reader.messages == sent and peer.goaway_code is None


@in_loop
async def test_unread_responses_of_a_connection_are_limited() -> None:
    """Indexed headers cost the client a few bytes per call; each response is larger."""

    async def reject(call: Call) -> None:
        raise RpcError(Status.NOT_FOUND, "x" * 500)

    peer = Peer(reject)
    encoder = hpack.Encoder()
    peer.transport.fill()
    for count in range(30_000):
        if peer.transport.is_closed:
            break
        raw = encoder.encode(request_fields())
        peer.feed(frame(HEADERS, 2 * count + 1, raw, END_HEADERS | END_STREAM))
        if count % 50 == 0:
            await turns()
    assert len(peer.transport.written) < 12 * MIB


@in_loop
async def test_fragmented_header_block_opens_a_call() -> None:
    peer = Peer(echo)
    raw = block(request_fields(extra=[("k", "v" * 99)]))
    peer.feed(frame(HEADERS, 1, raw[:1], END_STREAM))
    for at in range(1, len(raw)):
        peer.feed(frame(client.CONTINUATION, 1, raw[at : at + 1]))
    assert not peer.calls
    peer.feed(frame(client.CONTINUATION, 1, b"", END_HEADERS))
    assert peer.calls[1].metadata == (("k", "v" * 99),)
    await turns()
    assert peer.answer().status == 0


@pytest.mark.parametrize("calls", [False, True])
def test_empty_continuations_close_the_connection(calls: bool) -> None:
    """No client sends them; a few are tolerated."""

    async def run() -> None:
        peer = Peer()
        for number in range(1, 51, 2):
            peer.feed(frame(HEADERS, number, FIELDS if calls else b""))
            for _ in range(1 if calls else 100):
                peer.feed(frame(client.CONTINUATION, number, b"", END_HEADERS if calls else 0))
            if number == 1 and calls:
                assert peer.calls
        assert peer.goaway_code == client.ENHANCE_YOUR_CALM

    asyncio.run(run())


@pytest.mark.parametrize("size", [1, MIB // 100])
def test_endless_continuations_close_the_connection(size: int) -> None:
    async def run() -> None:
        peer = Peer()
        peer.feed(frame(HEADERS, 1, b""))
        for _ in range(2000):
            peer.feed(frame(client.CONTINUATION, 1, bytes(size)))
        assert peer.goaway_code == client.ENHANCE_YOUR_CALM

    asyncio.run(run())


@pytest.mark.parametrize("size", [16_384, 40_000, 60_000])
def test_header_list_above_the_limit_fails_only_its_call(size: int) -> None:
    async def run() -> None:
        peer = Peer(echo)
        peer.open(1, ("k", "v" * size))
        answer = peer.answer(1)
        assert answer.status == Status.RESOURCE_EXHAUSTED and not peer.calls
        assert answer.reset == client.NO_ERROR
        peer.open(3, flags=END_STREAM)
        await turns()
        assert peer.answer(3).status == 0 and peer.goaway_code is None
        assert len(peer.served) == 1

    asyncio.run(run())


@in_loop
async def test_header_block_above_the_hard_limit_closes_the_connection() -> None:
    peer = Peer()
    raw = block(request_fields(extra=[("k", "v" * 70_000)]))
    peer.feed(frame(HEADERS, 1, raw[:60_000]))
    peer.feed(frame(client.CONTINUATION, 1, raw[60_000:], END_HEADERS))
    assert peer.goaway_code in (client.ENHANCE_YOUR_CALM, client.COMPRESSION_ERROR)


@pytest.mark.parametrize(
    "fields",
    [
        request_fields(extra=[("grpc-timeout", "soon")]),
        request_fields(extra=[("k-bin", "***")]),
    ],
)
@pytest.mark.parametrize("flags", [0, END_STREAM])
def test_invalid_headers_are_answered_by_trailers_only(fields: client.Fields, flags: int) -> None:
    async def run() -> None:
        peer = Peer(echo)
        peer.feed(client.headers(1, fields, END_HEADERS | flags))
        answer = peer.answer()
        assert len(answer.blocks) == 1 and answer.blocks[0][":status"] == "200"
        assert answer.status == Status.INTERNAL and answer.blocks[0]["grpc-message"]
        assert answer.blocks[0]["why"] == "/t/M"
        assert answer.reset == (None if flags else client.NO_ERROR)
        await turns()
        assert not peer.served and not peer.calls and peer.goaway_code is None

    asyncio.run(run())


@pytest.mark.parametrize(
    "fields",
    [
        request_fields(without=["content-type"]),
        [(":method", "GET"), *request_fields(without=[":method"])],
    ],
    ids=["no content type", "GET"],
)
@pytest.mark.parametrize("flags", [0, END_STREAM])
def test_request_other_than_grpc_gets_an_http_response(fields: client.Fields, flags: int) -> None:
    """Status 415 and a text within the client's window, then the gRPC status in trailers."""

    async def run() -> None:
        peer = Peer(echo)
        peer.feed(client.settings(window=10), client.headers(1, fields, END_HEADERS | flags))
        text = b"not a gRPC call: expected POST of application/grpc\n"
        assert peer.frames_of(DATA) == [(DATA, 0, 1, text[:10])]
        peer.feed(data(1, b"more")) if not flags else None
        peer.feed(window_update(1, 1000))
        assert b"".join(each.payload for each in peer.frames_of(DATA)) == text
        first, last = (hpack.Decoder().decode(each.payload) for each in peer.frames_of(HEADERS))
        assert dict(first) == {":status": "415", "content-type": "text/plain"}
        assert dict(last)["grpc-status"] == "13" and dict(last)["why"] == "/t/M"
        resets = [each.code for each in peer.frames_of(RST_STREAM)]
        assert len(resets) == (0 if flags else 1)
        assert not peer.served and not peer.calls and peer.goaway_code is None
        assert peer.host.budget.used_bytes == 0

    asyncio.run(run())


@in_loop
async def test_window_update_of_0_for_an_ended_call_closes_the_connection() -> None:
    peer = Peer()
    peer.open()
    peer.calls[1].end()
    peer.feed(window_update(1, 0))
    assert peer.goaway_code == client.PROTOCOL_ERROR


@in_loop
async def test_calls_above_the_limit_are_rejected() -> None:
    peer = Peer(calls_max=2)
    for stream_id in (1, 3, 5):
        peer.open(stream_id)
    assert peer.answer(5).reset == client.REFUSED_STREAM
    peer.feed(rst_stream(1))
    peer.open(7)
    assert sorted(peer.calls) == [3, 7]


@in_loop
async def test_connection_keeps_the_limit_of_calls_that_it_has_announced() -> None:
    peer = Peer(calls_max=2)
    peer.host.calls_max = 1
    for stream_id in (1, 3, 5):
        peer.open(stream_id)
    assert sorted(peer.calls) == [1, 3] and peer.answer(5).reset == client.REFUSED_STREAM


@pytest.mark.parametrize("sizes", [(4096,), (65_536,), (0,), (100, 0), (0, 4096)])
@in_loop
async def test_smaller_header_table_is_announced_in_the_next_block(
    sizes: tuple[int, ...],
) -> None:
    """A strict decoder closes the connection without the announcement."""
    peer = Peer(echo)
    strict = hpack.Decoder()
    strict.max_allowed_table_size = min(4096, *sizes)
    for size in sizes:
        peer.feed(client.settings(table=size))
    for stream_id in (1, 3):
        peer.open(stream_id, flags=END_STREAM)
    await turns()

    blocks = [each.payload for each in peer.frames_of(HEADERS)]
    assert len(blocks) == 2
    decoded = [dict(strict.decode(each)) for each in blocks]
    assert decoded[0] == decoded[1] and decoded[0]["grpc-status"] == "0"
    updates = [each.startswith(b"\x20") for each in blocks]
    assert updates == [min(sizes) < 4096, False]


@in_loop
async def test_response_has_headers_messages_and_trailers() -> None:
    peer = Peer(writer(b"one", b""))
    peer.open(flags=END_STREAM)
    await turns()
    assert [(each.kind, each.flags) for each in peer.frames_of() if each.stream_id] == [
        (HEADERS, END_HEADERS),
        (DATA, 0),
        (DATA, 0),
        (HEADERS, END_HEADERS | END_STREAM),
    ]
    assert peer.answer().messages == [b"one", b""]


@in_loop
async def test_single_message_and_status_are_sent_in_one_write() -> None:
    async def serve(call: Call) -> None:
        await call.answer(b"on", b"ly")

    peer = Peer(serve)
    writes: list[bytes] = []
    write = peer.connection.output._transport.write
    peer.connection.output._transport.write = lambda raw: (writes.append(raw), write(raw))  # type: ignore[method-assign]
    peer.open(flags=END_STREAM)
    await turns()

    assert [(each.kind, each.flags) for each in peer.frames_of() if each.stream_id] == [
        (HEADERS, END_HEADERS),
        (DATA, 0),
        (HEADERS, END_HEADERS | END_STREAM),
    ]
    assert len(writes) == 1 and not peer.connection.calls
    assert (peer.answer().messages, peer.answer().status) == ([b"only"], 0)


@pytest.mark.parametrize("is_open", [True, False])
@in_loop
async def test_single_message_waits_for_a_window(is_open: bool) -> None:
    async def serve(call: Call) -> None:
        await call.answer(b"x" * 95)

    peer = Peer(serve)
    peer.feed(client.settings(window=0 if not is_open else WINDOW_DEFAULT))
    peer.open(flags=0 if is_open else END_STREAM)
    await turns()
    assert peer.answer().blocks
    if not is_open:
        assert peer.sent_bytes() == 0 and peer.answer().status is None
        peer.feed(window_update(1, 100))
        await turns()
    assert (peer.answer().messages, peer.answer().status) == ([b"x" * 95], 0)


@pytest.mark.parametrize("has_message", [True, False])
@in_loop
async def test_metadata_is_sent_before_the_first_message(has_message: bool) -> None:
    async def serve(call: Call) -> None:
        call.begin((("said", "first"), ("raw-bin", b"\0\xff")))
        call.begin((("said", "again"),))
        if has_message:
            await call.answer(b"message")

    peer = Peer(serve)
    peer.open(flags=END_STREAM)
    await turns()
    first, last = peer.answer().blocks
    assert (first[":status"], first["said"], first["raw-bin"]) == ("200", "first", "AP8")
    assert last == {"grpc-status": "0"}
    assert peer.answer().messages == [b"message"] * has_message


@in_loop
async def test_call_without_messages_sends_trailers_only() -> None:
    peer = Peer(writer())
    peer.open(flags=END_STREAM)
    await turns()
    (trailers,) = peer.answer().blocks
    assert (trailers[":status"], trailers["content-type"], trailers["grpc-status"]) == (
        "200", "application/grpc", "0",
    )  # fmt: skip


@in_loop
async def test_call_that_ends_before_its_input_is_reset_with_no_error() -> None:
    peer = Peer(writer(b"enough"))
    peer.open()
    await turns()
    assert peer.answer().status == 0 and peer.answer().reset == client.NO_ERROR
    peer.feed(data(1, message(b"more")), data(1, b"", END_STREAM))
    assert peer.goaway_code is None


@in_loop
async def test_error_is_sent_with_its_trailers() -> None:
    async def fail(call: Call) -> None:
        await call.write(b"before")
        raise RpcError(
            Status.NOT_FOUND, "100% n\xf6\n", (("code", "x"), ("detail-bin", b"\0\1\2\3"))
        )

    peer = Peer(fail)
    peer.open(flags=END_STREAM)
    await turns()
    assert peer.answer().messages == [b"before"]
    assert peer.answer().blocks[-1] == {
        "grpc-status": "5",
        "grpc-message": "100%25 n%C3%B6%0A",
        "code": "x",
        "detail-bin": "AAECAw",
    }


@in_loop
async def test_unexpected_exception_of_a_handler_fails_the_call() -> None:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

    async def fail(call: Call) -> None:
        raise ValueError("a bug")

    peer = Peer(fail)
    peer.open(flags=END_STREAM)
    await turns()
    assert peer.answer().status not in (None, Status.OK)


@in_loop
async def test_long_status_is_split_into_several_frames() -> None:
    async def fail(call: Call) -> None:
        raise RpcError(Status.INTERNAL, "\xf6" * 5000)

    peer = Peer(fail)
    peer.open(flags=END_STREAM)
    await turns()
    assert peer.answer().status == Status.INTERNAL
    assert max(len(each.payload) for each in peer.frames_of()) <= FRAME_DEFAULT


@in_loop
async def test_deadline_ends_the_call_and_cancels_its_handler() -> None:
    cancelled: list[bool] = []

    async def wait(call: Call) -> None:
        try:
            await call.read()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    peer = Peer(wait)
    peer.open(1, ("grpc-timeout", "5m"))
    await until(lambda: peer.answer().is_over)
    assert peer.answer().status == Status.DEADLINE_EXCEEDED
    assert peer.answer().blocks[-1]["why"] == "/t/M"
    await turns()
    assert cancelled == [True] and not peer.calls


@in_loop
async def test_call_without_a_request_message_fails_after_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def answer(request: bytes, call: Call) -> None:
        raise AssertionError

    async def serve(call: Call) -> None:
        try:
            await grpc_server._with_request(answer)(call)
        except DeadlineExceeded as error:
            raise grpc_errors.rpc_error(error) from None

    monkeypatch.setattr(grpc_server, "REQUEST_S", 0.01)
    peer = Peer(serve)
    peer.open(1)
    await until(lambda: peer.answer().is_over)
    assert peer.answer().status == Status.DEADLINE_EXCEEDED


@in_loop
async def test_ended_calls_are_counted_once_with_their_status() -> None:
    async def serve(call: Call) -> None:
        if call.stream_id == 1:
            raise RpcError(Status.NOT_FOUND, "no such model")
        if call.stream_id == 3:
            await call.answer(b"x")
        elif call.stream_id == 5:
            call.send(b"x")
        else:
            await call.read()

    peer = Peer(serve)
    for stream_id in (1, 3, 5):
        peer.open(stream_id, flags=END_STREAM)
        await until(lambda at=stream_id: peer.answer(at).is_over)
    peer.open(7)
    peer.feed(rst_stream(7, frames.ErrorCode.CANCEL))
    peer.open(9, ("grpc-timeout", "never"))

    statuses = [status for path, status in peer.host.calls_ended if path == "/t/M"]
    assert statuses == [
        Status.NOT_FOUND, Status.OK, Status.OK, Status.CANCELLED, peer.answer(9).status
    ]  # fmt: skip


@in_loop
async def test_expired_and_very_long_deadlines() -> None:
    peer = Peer()
    for stream_id, timeout in ((1, "0n"), (3, "1n"), (5, "99999999H")):
        peer.open(stream_id, ("grpc-timeout", timeout))
    await until(lambda: peer.answer(1).is_over and peer.answer(3).is_over)
    assert peer.answer(1).status == peer.answer(3).status == Status.DEADLINE_EXCEEDED
    assert list(peer.calls) == [5]


@in_loop
async def test_deadline_is_reported_while_an_unsent_message_waits() -> None:
    peer = Peer(writer(b"x" * 100))
    peer.feed(client.settings(window=0))
    peer.open(1, ("grpc-timeout", "5m"))
    await until(lambda: peer.answer().is_over or peer.answer().reset is not None)
    assert peer.answer().status == Status.DEADLINE_EXCEEDED


@in_loop
async def test_call_with_an_unsent_message_does_not_end_with_ok() -> None:
    async def serve(call: Call) -> None:
        call.send(b"x" * 100)

    peer = Peer(serve)
    peer.feed(client.settings(window=0))
    peer.open(1, flags=END_STREAM)
    await turns()
    assert peer.answer().status != Status.OK


@in_loop
async def test_call_that_ends_during_a_message_is_reset() -> None:
    peer = Peer(writer(b"x" * 100))
    peer.feed(client.settings(window=50))
    peer.open(1, ("grpc-timeout", "5m"))
    await until(lambda: peer.answer().is_over or peer.answer().reset is not None)
    assert peer.answer().status is None and peer.answer().reset == client.CANCEL
    assert not peer.calls and not blocked_calls(peer)


@in_loop
async def test_reset_cancels_the_handler_and_frees_the_call() -> None:
    errors: list[type[BaseException]] = []

    async def serve(call: Call) -> None:
        try:
            await (call.read() if call.stream_id == 1 else call.write(bytes(100_000)))
        except BaseException as error:
            errors.append(type(error))
            raise

    peer = Peer(serve)
    peer.open(1, ("grpc-timeout", "1H"))
    peer.feed(data(1, message(bytes(1000))[:500]))
    peer.open(3)
    await turns()
    frames_sent = len(peer.frames_of())
    peer.feed(rst_stream(1), rst_stream(3))
    assert not peer.calls and not blocked_calls(peer)
    peer.feed(window_update(0, 100_000))
    await turns()
    assert errors == [asyncio.CancelledError] * 2
    assert len(peer.frames_of()) == frames_sent
    peer.served.clear()
    assert not calls_in_memory(peer)


@in_loop
async def test_messages_after_the_end_are_dropped() -> None:
    """A handler is cancelled one loop iteration after a reset."""
    peer = Peer()
    peer.open(1)
    peer.open(3)
    await turns()
    first, second = peer.calls[1], peer.calls[3]
    peer.feed(rst_stream(1))
    second.end(Status.OK)
    frames_sent = len(peer.frames_of())
    for call in (first, second):
        call.send(b"late")
        call.send(bytes(100_000))
    assert len(peer.frames_of()) == frames_sent
    assert not blocked_calls(peer)


@in_loop
async def test_reads_after_the_end_send_no_window_updates() -> None:
    peer = Peer()
    peer.open(1)
    await turns()
    call = peer.calls[1]
    for _ in range(3):
        peer.feed(data(1, message(bytes(MIB - 5))))
    peer.feed(rst_stream(1))
    frames_sent = len(peer.frames_of())
    for _ in range(3):
        assert call.receive() is None and await call.read() is None
    assert len(peer.frames_of()) == frames_sent


@in_loop
async def test_only_the_largest_call_is_rejected_above_the_receive_budget() -> None:
    """This also applies if the bytes of that call exceeded the limit."""
    peer = Peer(receive_bytes=MIB)
    for stream_id in (1, 3, 5):
        peer.open(stream_id)
    await turns()
    for stream_id, size in ((1, 100_000), (3, 100_000), (5, 4 * MIB)):
        peer.feed(data(stream_id, message(bytes(2 * size))[:5] + bytes(size // 8)))
    while not peer.calls[5]._is_discarding:
        peer.feed(data(5, bytes(65_536)))
    assert peer.host.budget.evictions == 1
    assert [peer.calls[each]._is_discarding for each in (1, 3)] == [False, False]
    assert peer.host.budget.used_bytes == 2 * 12_500


@in_loop
async def test_received_messages_are_freed_when_the_connection_ends() -> None:
    """A call in a reference cycle exists until a garbage collection; its bytes must not."""
    peer = Peer()
    peer.open(1)
    peer.open(3)
    await turns()
    complete, partial = peer.calls[1], peer.calls[3]
    peer.feed(data(1, message(bytes(MIB - 5))))
    peer.feed(data(3, message(bytes(4 * MIB))[:MIB]))
    assert complete.has_input
    peer.transport.abort()
    await turns()
    for call in (complete, partial):
        assert not call.has_input and call._partial is None


@in_loop
async def test_lost_connection_cancels_its_calls() -> None:
    peer = Peer()
    for stream_id in (1, 3, 5):
        peer.open(stream_id)
    await turns()
    tasks = [call.task for call in peer.served]
    peer.transport.abort()
    await turns()
    assert all(task is not None and task.cancelled() for task in tasks)
    assert not peer.calls and not peer.host.connections


@in_loop
async def test_nothing_is_sent_without_a_window() -> None:
    written: list[int] = []

    async def serve(call: Call) -> None:
        await call.write(b"x" * 95)
        written.append(1)

    peer = Peer(serve)
    peer.feed(client.settings(window=0))
    peer.open(flags=END_STREAM)
    await turns()
    assert peer.sent_bytes() == 0 and peer.answer().blocks
    for count in range(1, 100):
        peer.feed(window_update(1, 1))
        assert peer.sent_bytes() == count
    await turns()
    assert not written and peer.answer().status is None
    peer.feed(window_update(1, 1))
    await turns()
    assert written and peer.answer().messages == [b"x" * 95] and peer.answer().status == 0


@in_loop
async def test_settings_change_the_windows_of_open_calls() -> None:
    peer = Peer(writer(b"x" * 995))
    peer.feed(client.settings(window=100))
    peer.open(flags=END_STREAM)
    await turns()
    assert peer.sent_bytes() == 100
    peer.feed(client.settings(window=300))
    assert peer.sent_bytes() == 300
    peer.feed(client.settings(window=50))
    peer.feed(window_update(1, 250))
    assert peer.sent_bytes() == 300
    peer.feed(window_update(1, 1))
    assert peer.sent_bytes() == 301
    peer.feed(client.settings(window=0), client.settings(window=749))
    await turns()
    assert peer.sent_bytes() == 1000 and peer.answer().status == 0


@in_loop
async def test_new_call_has_the_window_of_the_last_settings() -> None:
    peer = Peer(writer(b"x" * 100))
    peer.feed(client.settings(window=10))
    peer.open(1)
    await turns()
    peer.feed(client.settings(window=20))
    peer.open(3)
    await turns()
    assert (peer.sent_bytes(1), peer.sent_bytes(3)) == (20, 20)


@in_loop
async def test_frame_size_follows_the_client_setting() -> None:
    peer = Peer(writer(bytes(50_000 - 5)))
    peer.open(1)
    await turns()
    assert [len(each.payload) for each in peer.frames_of(DATA)] == [16_384, 16_384, 16_384, 848]
    peer.feed(client.settings(frame_bytes=20_000), window_update(0, WINDOW_DEFAULT))
    peer.open(3)
    await turns()
    sizes = [len(each.payload) for each in peer.frames_of(DATA) if each.stream_id == 3]
    assert sizes == [20_000, 20_000, 10_000]


@in_loop
async def test_calls_share_the_connection_window() -> None:
    peer = Peer(writer(bytes(400_000)))
    peer.feed(client.settings(window=WINDOW_MAX))
    for stream_id in (1, 3, 5):
        peer.open(stream_id)
    await turns()
    assert peer.sent_bytes() == WINDOW_DEFAULT and peer.sent_bytes(1) == WINDOW_DEFAULT
    peer.feed(window_update(0, 12 * FRAME_DEFAULT))
    sent = [peer.sent_bytes(each) for each in (1, 3, 5)]
    assert sum(sent) == WINDOW_DEFAULT + 12 * FRAME_DEFAULT
    assert [each // FRAME_DEFAULT for each in sent] == [7, 4, 4]
    for _ in range(500):
        peer.feed(window_update(0, 1000))
    sent = [peer.sent_bytes(each) for each in (1, 3, 5)]
    assert max(sent) - min(sent) <= 5 * FRAME_DEFAULT


@in_loop
async def test_call_without_a_window_does_not_block_others() -> None:
    peer = Peer(writer(bytes(1000)))
    peer.feed(client.settings(window=0))
    for stream_id in (1, 3):
        peer.open(stream_id, flags=END_STREAM)
    await turns()
    peer.feed(window_update(3, 2000))
    await turns()
    assert peer.answer(3).status == 0 and peer.sent_bytes(1) == 0


@in_loop
async def test_full_socket_blocks_messages_until_it_is_empty() -> None:
    count = 0

    async def serve(call: Call) -> None:
        nonlocal count
        for _ in range(50):
            await call.write(bytes(1000))
            count += 1

    peer = Peer(serve)
    peer.transport.free_bytes = 10_000
    peer.open(flags=END_STREAM)
    for turn in range(1, 5):
        await turns()
        assert 9 * turn <= count <= 11 * turn
        peer.transport.empty()
    await turns()
    peer.transport.empty()
    await until(lambda: peer.answer().is_over)
    assert peer.answer().messages == [bytes(1000)] * 50


@in_loop
async def test_large_message_is_sent_at_the_rate_of_the_socket() -> None:
    sent = bytes(range(256)) * 2000
    peer = Peer(writer(sent))
    peer.transport.free_bytes = 100_000
    peer.feed(client.settings(window=WINDOW_MAX), window_update(0, MIB))
    peer.open(flags=END_STREAM)
    while not peer.answer().is_over:
        before = peer.sent_bytes()
        await turns()
        assert peer.sent_bytes() - before <= 100_000 + FRAME_DEFAULT
        peer.transport.empty()
    assert peer.answer().messages == [sent]


@in_loop
async def test_connection_lost_while_messages_wait_cancels_the_handlers() -> None:
    peer = Peer(writer(bytes(400_000)))
    for stream_id in (1, 3):
        peer.open(stream_id)
    await turns()
    assert blocked_calls(peer) == 2
    tasks = [call.task for call in peer.served]
    peer.transport.abort()
    await turns()
    assert not blocked_calls(peer) and not peer.calls
    assert all(task is not None and task.cancelled() for task in tasks)
    assert all(call.task is None for call in peer.served)


def acknowledge_goaway(peer: Peer) -> None:
    """Acknowledges the ping after GOAWAY: the client has received both."""
    peer.feed(ping(peer.frames_of(PING)[-1].payload, client.ACK))


@in_loop
async def test_graceful_close_completes_open_calls() -> None:
    peer = Peer(echo)
    peer.open(1)
    peer.connection.close_gracefully()
    peer.connection.close_gracefully()
    (goaway,) = peer.frames_of(GOAWAY)
    assert goaway.payload[:8] == WINDOW_MAX.to_bytes(4) + bytes(4)

    peer.open(3)
    acknowledge_goaway(peer)
    acknowledge_goaway(peer)
    final = peer.frames_of(GOAWAY)[1:]
    assert [each.payload[:8] for each in final] == [(3).to_bytes(4) + bytes(4)]

    peer.open(5)
    assert peer.answer(5).reset == client.REFUSED_STREAM
    for stream_id in (1, 3):
        assert peer.goaway_code is None
        peer.feed(data(stream_id, message(b"on"), END_STREAM))
        await turns()
        assert peer.answer(stream_id).messages == [b"on"] and peer.answer(stream_id).status == 0
    assert peer.goaway_code == client.NO_ERROR
    assert len(peer.served) == 2


@in_loop
async def test_graceful_close_without_calls_ends_after_the_ping_ack() -> None:
    peer = Peer()
    peer.connection.close_gracefully()
    assert peer.goaway_code is None
    peer.feed(ping(b"whatever", client.ACK))
    assert peer.goaway_code is None
    acknowledge_goaway(peer)
    assert peer.goaway_code == client.NO_ERROR


@in_loop
async def test_expired_connection_ends_its_calls_with_a_retryable_status() -> None:
    """The first call has sent nothing yet, the second a message."""
    peer = Peer(echo)
    peer.open(1)
    peer.open(3)
    peer.feed(data(3, message(b"on")))
    await turns()
    peer.connection.close_gracefully()
    acknowledge_goaway(peer)
    peer.connection.close_expired()
    await turns()

    assert peer.answer(3).messages == [b"on"]
    for stream_id in (1, 3):
        answer = peer.answer(stream_id)
        assert answer.status == Status.UNAVAILABLE
        assert "server.max_connection_age_s" in answer.blocks[-1]["grpc-message"]
    assert peer.goaway_code == client.NO_ERROR
    assert not peer.calls and not peer.host.connections


@in_loop
async def test_expired_connection_without_an_answer_to_the_ping_is_closed() -> None:
    peer = Peer(echo)
    peer.connection.close_gracefully()
    peer.connection.close_expired()
    await turns()
    assert peer.goaway_code == client.NO_ERROR and not peer.host.connections


@pytest.mark.parametrize("is_whole", [True, False])
@in_loop
async def test_trailers_end_with_the_load_report(is_whole: bool) -> None:
    """As one write with the message, or in a frame of their own."""

    async def answer(call: Call) -> None:
        raw = await call.read()
        assert raw is not None
        await (call.answer(raw) if is_whole else call.write(raw))

    peer = Peer(answer)
    report = response_headers.block([("endpoint-load-metrics-bin", b"\1\2\3")])
    for stream_id, trailer in ((1, b""), (3, report), (5, b"")):
        peer.host.load_trailer = trailer
        peer.open(stream_id)
        peer.feed(data(stream_id, message(b"on"), END_STREAM))
        await turns()
        assert peer.answer(stream_id).messages == [b"on"]
        fields = {"endpoint-load-metrics-bin": "AQID"} if trailer else {}
        assert peer.answer(stream_id).blocks[-1] == {"grpc-status": "0"} | fields


@in_loop
async def test_ack_of_an_unsent_ping_is_ignored() -> None:
    peer = Peer()
    peer.feed(ping(b"iskleave", client.ACK))
    assert peer.goaway_code is None
    peer.open(1)
    assert 1 in peer.calls


@in_loop
async def test_graceful_close_without_a_preface_closes_at_once() -> None:
    peer = Peer(sends_preface=False)
    peer.connection.close_gracefully()
    await turns()
    assert not peer.host.connections


@in_loop
async def test_memory_of_an_idle_connection_with_an_idle_call_is_small() -> None:
    peers: list[Peer] = []
    scratch = memoryview(bytearray(SCRATCH_BYTES))

    async def connect(count: int) -> None:
        for _ in range(count):
            peers.append(Peer(wait))
            peers[-1].host.scratch = scratch
            peers[-1].open(1, ("user-agent", "grpc-python/1.0"), ("client", "robot-7"))
        await turns()

    await connect(1)  # Allocates what all connections share.
    tracemalloc.start()
    try:
        await connect(20)
        cost = tracemalloc.get_traced_memory()[0] / 20
    finally:
        tracemalloc.stop()
    assert cost < 20_000
    assert all(len(peer.calls) == 1 for peer in peers)


async def wait(call: Call) -> None:
    await call.read()


@in_loop
async def test_ended_calls_are_freed() -> None:
    peer = Peer(echo)
    for stream_id in range(1, 401, 2):
        peer.open(stream_id, ("grpc-timeout", "1H"))
        peer.feed(data(stream_id, message(b"x" * stream_id), END_STREAM))
        await turns()
        assert peer.answer(stream_id).status == 0 if stream_id < 20 else True
    output = peer.connection.output
    assert not peer.calls and not output._blocked and peer.connection.streams._data_call is None
    peer.served.clear()
    assert not calls_in_memory(peer)


@in_loop
async def test_unsent_bytes_of_window_and_socket_are_reported() -> None:
    """An open call without messages has no unsent bytes."""

    async def answer(call: Call) -> None:
        if call.has_all_input:
            await call.answer(bytes(WINDOW_DEFAULT + 5))

    peer = Peer(answer)
    peer.open(1)
    await turns()
    assert not peer.connection.has_unsent
    peer.open(3, flags=END_STREAM)
    await turns()
    assert peer.connection.has_unsent
    peer.transport.free_bytes = 0
    peer.feed(window_update(0, MIB), window_update(3, MIB))
    await turns()
    assert peer.transport.is_full and peer.connection.has_unsent
    peer.transport.empty()
    await turns()
    assert not peer.connection.has_unsent


def complete_calls(count: int) -> bytes:
    """Returns calls with headers, a message, and END_STREAM."""
    return b"".join(
        client.headers(stream_id) + data(stream_id, message(b"x"), END_STREAM)
        for stream_id in range(1, 2 * count, 2)
    )


@in_loop
async def test_inline_calls_of_one_read_are_served_in_one_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "now_ns", lambda: 0)  # Turns are not limited by time.
    peer = Peer()
    messages: list[Message | None] = []
    peer.host.serve_inline = lambda call: messages.append(call.whole) is None
    peer.connection._process(memoryview(complete_calls(30)), 1 << 62)
    assert messages == [b"x"] * 30 and not peer.connection.streams.is_interrupted


@in_loop
async def test_calls_of_one_read_with_tasks_need_several_turns() -> None:
    """The time of tasks is not measured by the connection."""
    peer = Peer()
    opened_calls = []
    peer.connection._process(memoryview(complete_calls(10)), 1 << 62)
    while peer.connection.streams.is_interrupted:
        opened_calls.append(len(peer.calls))
        rest, peer.connection._rest = peer.connection._rest, memoryview(b"")
        peer.connection._process(rest, 1 << 62)
    await turns()
    assert opened_calls == [4, 8] and len(peer.served) == 10
    assert [call.receive() for call in peer.served] == [b"x"] * 10


@in_loop
async def test_calls_of_a_lost_connection_are_cancelled_in_small_groups() -> None:
    """Cancelling hundreds of tasks in one iteration would block the event loop."""
    ended: list[Call] = []

    async def serve(call: Call) -> None:
        try:
            await call.read()
        finally:
            ended.append(call)

    peer = Peer(serve)
    for stream_id in range(1, 101, 2):
        peer.open(stream_id)
        await turns()
    peer.transport.abort()
    counts = []
    while len(ended) < 50:
        before = len(ended)
        await asyncio.sleep(0)
        counts.append(len(ended) - before)
    assert max(counts) == 8 and not peer.calls


@in_loop
async def test_calls_that_wait_for_a_window_continue_in_small_groups() -> None:
    """A larger window unblocks all calls, and each sent message wakes a task."""
    finished: list[Call] = []

    async def serve(call: Call) -> None:
        await call.write(bytes(100))
        finished.append(call)

    peer = Peer(serve, calls_max=400)
    peer.feed(client.settings(window=0))
    for stream_id in range(1, 401, 2):
        peer.open(stream_id)
        await turns()
    assert not finished
    peer.feed(client.settings(window=1000))
    counts = []
    while len(finished) < 200:
        before = len(finished)
        await asyncio.sleep(0)
        counts.append(len(finished) - before)
    assert max(counts) == 64
    assert all(peer.answer(stream_id).messages == [bytes(100)] for stream_id in range(1, 401, 2))


@in_loop
async def test_wasted_cpu_time_excludes_the_allowance_of_messages() -> None:
    peer = Peer()
    peer.feed(client.headers(1), data(1, message(bytes(995))))
    assert peer.connection.note_cpu(NS_PER_S // 100)
    assert peer.connection.wasted_ns == NS_PER_S // 100 - MESSAGE_CPU_NS - BYTE_CPU_NS * 1000
    assert peer.connection.note_cpu(NS_PER_S // 100)
    assert peer.connection.wasted_ns == NS_PER_S // 100
