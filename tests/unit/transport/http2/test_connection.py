"""A connection and its calls, against a client that says whatever it likes."""

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

from iskander.clock import NS_PER_S, now_ns
from iskander.config.schema import TimeoutsConfig
from iskander.errors import DeadlineExceeded
from iskander.protocols import grpc_errors, grpc_server
from iskander.transport import turn_scheduler as turns_of_loop
from iskander.transport.connection_listener import SCRATCH_BYTES
from iskander.transport.http2 import connection, frames
from iskander.transport.http2.call import Call, Message
from iskander.transport.http2.call_receiver import WINDOW_BYTES
from iskander.transport.http2.rate_limit import BURST
from iskander.transport.http2.status import RpcError, Status
from iskander.transport.http2.streams import BYTE_CPU_NS, MESSAGE_CPU_NS

TIMEOUTS = TimeoutsConfig()
GREETING_NS = int(TIMEOUTS.preface_s * NS_PER_S)
HEADERS_NS = int(TIMEOUTS.headers_s * NS_PER_S)
IDLE_NS = int(TIMEOUTS.idle_s * NS_PER_S)
PING_NS = int(TIMEOUTS.keepalive_s * NS_PER_S)
WINDOW_DEFAULT = 65_535
ODD = range(1, 1601, 2)
FRAME_DEFAULT = 16_384
MIB = 1 << 20


async def echo(call: Call) -> None:
    while (raw := await call.read()) is not None:
        await call.write(raw)


class Reader:
    """A handler that keeps what it reads, and what reading came to.

    Attributes:
        messages: Read so far.
        has_ended: After the last message.
        error: Instead of a next one.
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
    """A handler that writes without being asked."""

    async def write(call: Call) -> None:
        for each in messages:
            await call.write(each)

    return write  # type: ignore[return-value]


def compressed(raw: bytes, encoding: str) -> bytes:
    return gzip.compress(raw) if encoding == "gzip" else zlib.compress(raw)


def calls_kept(peer: Peer) -> list[Call]:
    """Wherever they are."""
    gc.collect()
    found = [each for each in gc.get_objects() if type(each) is Call]
    return [call for call in found if call._streams is peer.connection.streams]


def waiting(peer: Peer) -> int:
    """Calls that have something to send and no room for it."""
    return len(peer.connection.output._blocked)


# The beginning.

INVALID_PREFACE = frames.goaway(0, frames.ErrorCode.PROTOCOL_ERROR, "invalid connection preface")


@in_loop
async def test_the_server_says_what_it_takes_to_who_has_greeted() -> None:
    peer = Peer(greets=False, calls_max=7)
    assert peer.heard() == []
    peer.say(PREFACE)
    found = peer.heard()

    assert [each.kind for each in found] == [SETTINGS, WINDOW_UPDATE]
    pairs = [found[0].payload[at : at + 6] for at in range(0, len(found[0].payload), 6)]
    said = {int.from_bytes(pair[:2]): int.from_bytes(pair[2:]) for pair in pairs}
    assert said == {3: 7, 4: WINDOW_BYTES, 5: MIB, 6: 16_384}
    assert found[1].number == WINDOW_MAX - WINDOW_DEFAULT


@pytest.mark.parametrize("cut", [1, 2, 23, 24, 25])
def test_a_preface_that_comes_in_pieces(cut: int) -> None:
    async def play() -> None:
        peer = Peer(echo, greets=False)
        call = client.headers(1) + data(1, message(b"hello"), END_STREAM)
        peer.say(PREFACE, client.settings(), call, cut=cut)
        await turns()
        assert peer.answer() == ([{**peer.answer().blocks[0]}, {"grpc-status": "0"}], [b"hello"],
                                 None, True)  # fmt: skip

    asyncio.run(play())


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 505 "),
        (b"\x16\x03\x01\x02\x00\x01", INVALID_PREFACE),
        (b"PRI * HTTP/2.1\r\n", INVALID_PREFACE),
    ],
)
def test_what_is_not_http2_is_told_so_and_goes(said: bytes, answer: bytes) -> None:
    async def play() -> None:
        peer = Peer(greets=False)
        start = len(peer.transport.written)
        peer.say(said)
        assert bytes(peer.transport.written[start:]).startswith(answer)
        assert peer.transport.is_closed
        await turns()
        assert not peer.host.connections

    asyncio.run(play())


@in_loop
async def test_a_client_that_never_says_what_it_speaks_goes() -> None:
    peer = Peer(greets=False)
    peer.say(PREFACE[:5])
    peer.connection.enforce_timeouts(now_ns() + GREETING_NS // 2)
    assert not peer.transport.is_aborted
    peer.connection.enforce_timeouts(now_ns() + GREETING_NS + NS_PER_S)
    assert peer.transport.is_aborted


@in_loop
async def test_a_silent_client_is_asked_and_goes_where_it_does_not_answer() -> None:
    peer = Peer()
    later = now_ns() + IDLE_NS + NS_PER_S
    peer.connection.enforce_timeouts(later)
    assert len(peer.heard(PING)) == 1
    peer.connection.enforce_timeouts(later + PING_NS)
    assert not peer.transport.is_aborted
    peer.connection.enforce_timeouts(later + PING_NS + 1)
    assert peer.transport.is_aborted


@in_loop
async def test_a_silent_client_that_answers_stays() -> None:
    peer = Peer()
    later = now_ns() + IDLE_NS + NS_PER_S
    peer.connection.enforce_timeouts(later)
    peer.say(ping(peer.heard(PING)[0].payload, client.ACK))
    peer.connection.enforce_timeouts(later + PING_NS + 1)
    assert not peer.transport.is_aborted


# Messages in.


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 1000])
def test_a_call_in_reads_of_any_size(cut: int) -> None:
    sent = [b"", b"a", b"bc" * 700, b""]

    async def play() -> None:
        reader = Reader()
        peer = Peer(reader)
        raw = b"".join(map(message, sent))
        peer.say(client.headers(1), data(1, raw, END_STREAM, padding=9), cut=cut)
        await turns()
        assert reader.messages == sent and reader.has_ended

    asyncio.run(play())


def test_messages_cut_at_every_boundary() -> None:
    sent = [b"first", b"", b"x"]
    raw = b"".join(map(message, sent))

    async def play(at: int) -> None:
        reader = Reader()
        peer = Peer(reader)
        peer.open()
        peer.say(data(1, raw[:at]), data(1), data(1, raw[at:], END_STREAM))
        await turns()
        assert reader.messages == sent and reader.has_ended

    for at in range(len(raw) + 1):
        asyncio.run(play(at))


SIZES = st.one_of(st.integers(0, 20), st.integers(0, 3000), st.sampled_from([65_536, 300_000]))


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(SIZES, max_size=6),
    frame_sizes=st.lists(st.integers(0, 70_000) | st.integers(0, 12), min_size=1, max_size=8),
    paddings=st.lists(st.none() | st.integers(0, 255), min_size=1, max_size=4),
    cut=st.integers(50, 5000),
    windows=st.tuples(st.integers(1, 70_000), st.sampled_from([16_384, 40_000])),
)
def test_what_is_read_is_what_was_sent_and_comes_back_by_another_librarys_rules(
    sizes: list[int],
    frame_sizes: list[int],
    paddings: list[int | None],
    cut: int,
    windows: tuple[int, int],
) -> None:
    sent = [bytes([index + 1]) * size for index, size in enumerate(sizes)]
    raw = b"".join(map(message, sent))

    async def play() -> None:
        reader = Reader()

        async def serve(call: Call) -> None:
            await reader(call)
            for each in reader.messages:
                await call.write(each[:3], each[3:])

        peer = Peer(serve, greets=False)
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
        await reference.until_over(cut)

        assert reader.messages == sent and reader.has_ended
        assert client.split_messages(bytes(reference.body)) == sent
        assert reference.trailers["grpc-status"] == "0"
        assert not peer.calls and not waiting(peer)

    asyncio.run(play())


class ReferenceClient:
    """The client of another library, which raises where the server breaks a rule."""

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
        """Bring what each has to say to the other."""
        self.peer.say(self.h2.data_to_send(), cut=cut)
        await turns()
        written = self.peer.transport.written
        fresh, self._seen = bytes(written[self._seen :]), len(written)
        for event in self.h2.receive_data(fresh):
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
        self.peer.say(self.h2.data_to_send(), cut=cut)

    async def until_over(self, cut: int) -> None:
        for _ in range(1000):
            if self.is_over:
                return
            await self.exchange(cut)
        raise AssertionError("the call does not end")


@in_loop
async def test_a_message_of_several_windows() -> None:
    reader = Reader()
    peer = Peer(reader, message_bytes=16 * MIB)
    sent = bytes(range(256)) * (10 * MIB // 256) + b"end"
    raw = message(sent)
    peer.open()
    for at in range(0, len(raw), MIB):
        piece = raw[at : at + MIB]
        peer.say(data(1, piece, END_STREAM if at + MIB >= len(raw) else 0))
        granted = sum(each.number for each in peer.heard(WINDOW_UPDATE) if each.stream_id == 1)
        assert WINDOW_BYTES + granted >= min(at + 2 * MIB, len(raw))
    await turns()
    assert reader.messages == [sent]


@in_loop
async def test_what_a_handler_has_not_read_is_not_asked_for_again() -> None:
    peer = Peer()
    peer.open()
    await turns()
    for _ in range(4):
        peer.say(data(1, message(bytes(MIB - 5))))
    call = peer.calls[1]
    assert [each.stream_id for each in peer.heard(WINDOW_UPDATE)] == [0]
    for _ in range(4):
        call.receive()
    updates = [each for each in peer.heard(WINDOW_UPDATE) if each.stream_id == 1]
    assert sum(each.number for each in updates) == 4 * MIB
    peer.say(data(1, message(bytes(MIB - 5))))
    assert peer.goodbye is None and call.has_input


@in_loop
async def test_a_client_that_exceeds_the_window_goes() -> None:
    peer = Peer()
    peer.open()
    await turns()
    for _ in range(4):
        peer.say(data(1, message(bytes(MIB - 5))))
    assert peer.goodbye is None
    peer.say(data(1, b"\0"))
    assert peer.goodbye == client.FLOW_CONTROL_ERROR
    assert not peer.calls


@in_loop
async def test_padding_counts_in_the_windows_and_is_given_back() -> None:
    reader = Reader()
    peer = Peer(reader)
    peer.open()
    await turns()
    frame_bytes = len(message(b"x")) + 256
    count = WINDOW_BYTES // 2 // frame_bytes + 1
    for _ in range(count):
        peer.say(data(1, message(b"x"), padding=255))
    await turns()
    updates = [each.number for each in peer.heard(WINDOW_UPDATE) if each.stream_id == 1]
    assert updates == [count * frame_bytes]
    assert peer.connection.streams._received == count * frame_bytes
    assert peer.goodbye is None


@in_loop
async def test_padding_without_payload_fills_the_window_as_well() -> None:
    peer = Peer()
    peer.open()
    peer.say(data(1, message(b"not read")))
    for _ in range(WINDOW_BYTES // 256 + 1):
        peer.say(data(1, message(bytes(300)), padding=255))
    assert peer.goodbye == client.FLOW_CONTROL_ERROR


@in_loop
async def test_all_bytes_of_a_connection_are_given_back() -> None:
    """A gibibyte and more, of a call that is over."""

    async def refuse(call: Call) -> None:
        raise RpcError(Status.NOT_FOUND, "not here")

    peer = Peer(refuse)
    peer.open()
    await turns()
    piece = data(1, bytes(MIB))
    for _ in range(1025):
        peer.say(piece)
    updates = [each.number for each in peer.heard(WINDOW_UPDATE)]
    assert len(updates) == 2 and updates[1] >= 1024 * MIB


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_messages(encoding: str) -> None:
    async def play() -> None:
        reader = Reader()
        peer = Peer(reader)
        peer.open(1, ("grpc-encoding", encoding))
        raw = message(compressed(b"text" * 5000, encoding), 1) + message(b"as it is")
        peer.say(data(1, raw[:20]), data(1, raw[20:], END_STREAM))
        await turns()
        assert reader.messages == [b"text" * 5000, b"as it is"]

    asyncio.run(play())


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize(
    ("expanded", "status"), [(999, None), (1000, None), (1001, 8), (1002, 8), (500_000, 8)]
)
def test_a_compressed_message_may_be_as_large_as_any_other(
    encoding: str, expanded: int, status: int | None
) -> None:
    async def play() -> None:
        reader = Reader()
        peer = Peer(reader, message_bytes=1000)
        peer.open(1, ("grpc-encoding", encoding))
        # Pieces of it, since even the compressed bomb is larger than a message may be.
        raw = compressed(bytes(expanded), encoding)
        if len(raw) > 1000:
            raw = raw[:1000]
        peer.say(data(1, message(raw, 1), END_STREAM))
        await turns()
        assert (reader.error and reader.error.status) == status
        assert [len(each) for each in reader.messages] == ([expanded] if status is None else [])

    asyncio.run(play())


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
def test_compressed_messages_that_cannot_be_read(raw: bytes, encoding: str, status: Status) -> None:
    async def play() -> None:
        reader = Reader()
        peer = Peer(reader)
        peer.open(1, ("grpc-encoding", encoding))
        peer.say(data(1, message(b"before") + message(raw, 1) + message(b"after"), END_STREAM))
        await turns()
        assert reader.messages == [b"before"]
        assert peer.answer().status == status and not peer.calls

    asyncio.run(play())


@in_loop
async def test_a_message_that_declares_too_much_is_expanded_by_no_thread() -> None:
    reader = Reader()
    peer = Peer(reader, message_bytes=MIB)
    peer.open(1, ("grpc-encoding", "gzip"))
    peer.say(data(1, message(gzip.compress(bytes(8 * MIB)), 1), END_STREAM))
    await asyncio.sleep(0)
    assert reader.error is not None and reader.error.status == Status.RESOURCE_EXHAUSTED
    assert f"declares {8 * MIB:,} bytes" in reader.error.message


@in_loop
async def test_nothing_of_a_compressed_message_is_dropped_in_silence() -> None:
    reader = Reader()
    peer = Peer(reader)
    peer.open(1, ("grpc-encoding", "gzip"))
    two = gzip.compress(b"one") + gzip.compress(b"two")
    peer.say(data(1, message(two, 1), END_STREAM))
    await turns()
    assert reader.messages == [b"onetwo"] or reader.error is not None


@in_loop
async def test_compressed_messages_are_expanded_when_they_are_read() -> None:
    """Else one window of them is thousands of windows of memory."""
    peer = Peer(message_bytes=2 * MIB)
    peer.open(1, ("grpc-encoding", "gzip"))
    await turns()
    bomb = message(gzip.compress(bytes(MIB)), 1)
    tracemalloc.start()
    try:
        for _ in range(50):
            peer.say(data(1, bomb))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 4 * MIB


@pytest.mark.parametrize("cuts", [(1,), (4,), (5,), (6,), (50,), (2, 5)])
def test_a_message_that_is_too_large_ends_the_call_behind_those_before(cuts: list[int]) -> None:
    async def play() -> None:
        reader = Reader()
        peer = Peer(reader, message_bytes=100)
        peer.open()
        peer.say(data(1, message(bytes(100))))
        raw, start = message(bytes(101)), 0
        for cut in (*cuts, len(raw)):
            peer.say(data(1, raw[start:cut]))
            start = cut
        await turns()
        assert [len(each) for each in reader.messages] == [100]
        answer = peer.answer()
        assert answer.status == Status.RESOURCE_EXHAUSTED
        assert "101 bytes, limit 100" in answer.blocks[-1]["grpc-message"]
        assert answer.reset == client.NO_ERROR
        peer.say(data(1, bytes(1000), END_STREAM))
        assert peer.goodbye is None and not peer.calls

    asyncio.run(play())


@pytest.mark.parametrize("end", [1, 4, 5, 6, 14])
def test_a_last_message_that_is_cut_short_ends_the_call(end: int) -> None:
    async def play() -> None:
        reader = Reader()
        peer = Peer(reader)
        peer.open()
        peer.say(data(1, message(b"whole") + message(b"cut short.")[:end], END_STREAM))
        await turns()
        assert reader.messages == [b"whole"]
        answer = peer.answer()
        assert answer.status == Status.INTERNAL and "truncated" in answer.blocks[-1]["grpc-message"]

    asyncio.run(play())


@in_loop
async def test_input_ends_by_an_empty_frame_or_by_trailers() -> None:
    reader = Reader()
    peer = Peer(reader)
    peer.open(1)
    peer.say(data(1, message(b"a")), data(1, b"", END_STREAM))
    peer.open(3)
    peer.say(data(3, message(b"b")), client.headers(3, [("t", "x")], END_HEADERS | END_STREAM))
    peer.open(5, flags=END_STREAM)
    await turns()
    assert [peer.answer(each).status for each in (1, 3, 5)] == [0, 0, 0]
    assert reader.messages == [b"a", b"b"] and not peer.calls


# Frames that break the connection, or do not.


def opened(*parts: bytes, is_ended: bool = False) -> bytes:
    """Frames behind the opening of the call 1."""
    flags = END_HEADERS | (END_STREAM if is_ended else 0)
    return client.headers(1, flags=flags) + b"".join(parts)


FIELDS = block(request_fields())
BROKEN: dict[str, tuple[bytes, int]] = {
    "data of stream 0": (data(0, b"x"), client.PROTOCOL_ERROR),
    "data of an idle stream": (data(1, b"x"), client.PROTOCOL_ERROR),
    "padded data of an idle stream": (data(1, b"x", padding=1), client.PROTOCOL_ERROR),
    "data behind the end": (opened(data(1, b"x"), is_ended=True), client.STREAM_CLOSED),
    "more padding than payload": (
        opened(frame(DATA, 1, b"\5abcd", client.PADDED)),
        client.PROTOCOL_ERROR,
    ),
    "data that is only the length of its padding": (
        opened(frame(DATA, 1, b"\1", client.PADDED)),
        client.PROTOCOL_ERROR,
    ),
    "padded data without a length": (
        opened(frame(DATA, 1, b"", client.PADDED)),
        client.PROTOCOL_ERROR,
    ),
    "more padding than header block": (
        frame(HEADERS, 1, b"\xff" + FIELDS, END_HEADERS | client.PADDED),
        client.PROTOCOL_ERROR,
    ),
    "padded headers without a length": (
        frame(HEADERS, 1, b"", END_HEADERS | client.PADDED),
        client.PROTOCOL_ERROR,
    ),
    "headers too short for their priority": (
        frame(HEADERS, 1, b"\0\0\0", END_HEADERS | client.HAS_PRIORITY),
        client.PROTOCOL_ERROR,
    ),
    "an even stream": (client.headers(2), client.PROTOCOL_ERROR),
    "stream 0": (client.headers(0), client.PROTOCOL_ERROR),
    "a stream that depends on itself": (
        frame(HEADERS, 1, b"\0\0\0\1\x10" + FIELDS, END_HEADERS | client.HAS_PRIORITY),
        client.PROTOCOL_ERROR,
    ),
    "a lower stream than before": (
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
    "a priority of stream 0": (frame(client.PRIORITY, 0, b"12345"), client.PROTOCOL_ERROR),
    "a short priority": (frame(client.PRIORITY, 1, b"1234"), client.FRAME_SIZE_ERROR),
    "a priority on itself": (frame(client.PRIORITY, 1, b"\0\0\0\1\0"), client.PROTOCOL_ERROR),
    "a reset of stream 0": (opened(rst_stream(0)), client.PROTOCOL_ERROR),
    "a long reset": (opened(frame(RST_STREAM, 1, b"12345")), client.FRAME_SIZE_ERROR),
    "settings of a stream": (frame(SETTINGS, 1), client.PROTOCOL_ERROR),
    "an acknowledgement with settings": (
        frame(SETTINGS, 0, b"\0\4\0\0\0\1", client.ACK),
        client.FRAME_SIZE_ERROR,
    ),
    "a push setting of 2": (frame(SETTINGS, 0, b"\0\2\0\0\0\2"), client.PROTOCOL_ERROR),
    "a ping of a stream": (frame(PING, 1, b"12345678"), client.PROTOCOL_ERROR),
    "a goodbye of a stream": (opened(frame(GOAWAY, 1, bytes(8))), client.PROTOCOL_ERROR),
    "a window of an idle stream": (window_update(1, 5), client.PROTOCOL_ERROR),
    "a window of a stream of the server's": (
        client.headers(3) + window_update(2, 5),
        client.PROTOCOL_ERROR,
    ),
    "a reset of a stream of the server's": (
        client.headers(3) + rst_stream(2),
        client.PROTOCOL_ERROR,
    ),
    "data of a stream of the server's": (client.headers(3) + data(2), client.PROTOCOL_ERROR),
    "a long window": (frame(WINDOW_UPDATE, 0, b"12345"), client.FRAME_SIZE_ERROR),
    "a continuation of nothing": (
        frame(client.CONTINUATION, 1, FIELDS, END_HEADERS),
        client.PROTOCOL_ERROR,
    ),
    "a continuation of another": (
        client.headers(1, flags=0) + frame(client.CONTINUATION, 3, FIELDS, END_HEADERS),
        client.PROTOCOL_ERROR,
    ),
    "headers between continuations": (
        client.headers(1, flags=0) + client.headers(3),
        client.PROTOCOL_ERROR,
    ),
    "a ping between continuations": (client.headers(1, flags=0) + ping(), client.PROTOCOL_ERROR),
    "data between continuations": (
        opened(client.headers(3, flags=0), data(1)),
        client.PROTOCOL_ERROR,
    ),
    "an unknown frame between continuations": (
        client.headers(1, flags=0) + frame(99),
        client.PROTOCOL_ERROR,
    ),
    "headers out of no table": (frame(HEADERS, 1, b"\xff\xff", END_HEADERS),
                                client.COMPRESSION_ERROR),
    "huge data": (opened(frame(DATA, 1, bytes(MIB + 1))), client.FRAME_SIZE_ERROR),
    "huge headers": (frame(HEADERS, 1, bytes(65_537)), client.FRAME_SIZE_ERROR),
    "a reset of an idle stream": (rst_stream(1), client.PROTOCOL_ERROR),
    "a short reset": (opened(frame(RST_STREAM, 1, b"abc")), client.FRAME_SIZE_ERROR),
    "settings of a broken length": (frame(SETTINGS, 0, b"1234567"), client.FRAME_SIZE_ERROR),
    "a window setting too large": (client.settings(window=1 << 31), client.FLOW_CONTROL_ERROR),
    "a frame setting too small": (client.settings(frame_bytes=16_383), client.PROTOCOL_ERROR),
    "a frame setting too large": (client.settings(frame_bytes=1 << 24), client.PROTOCOL_ERROR),
    "a push": (frame(client.PUSH_PROMISE, 1, b"1234"), client.PROTOCOL_ERROR),
    "a short ping": (ping(b"1234567"), client.FRAME_SIZE_ERROR),
    "a short goodbye": (frame(GOAWAY, 0, b"123"), client.FRAME_SIZE_ERROR),
    "a short window": (frame(WINDOW_UPDATE, 0, b"123"), client.FRAME_SIZE_ERROR),
    "a window over the top": (window_update(0, WINDOW_MAX), client.FLOW_CONTROL_ERROR),
    "a window that does not grow": (window_update(0, 0), client.PROTOCOL_ERROR),
    "a setting that takes a window over the top": (
        opened(window_update(1, WINDOW_MAX - WINDOW_DEFAULT), client.settings(window=65_536)),
        client.FLOW_CONTROL_ERROR,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("cut", [1, 1 << 18])
def test_frames_that_break_the_connection(case: str, cut: int) -> None:
    raw, code = BROKEN[case]
    if cut == 1 and len(raw) > 10_000:
        cut = 1000

    async def play() -> None:
        peer = Peer()
        peer.open(1) if raw.startswith(opened()) else None
        peer.say(raw.removeprefix(opened()), cut=cut)
        assert peer.goodbye == code
        assert not peer.calls
        await turns()
        assert not peer.host.connections and peer.transport.is_closed

    asyncio.run(play())


RESETS: dict[str, tuple[bytes, int]] = {
    "trailers without an end": (client.headers(1, [("a", "b")]), client.PROTOCOL_ERROR),
    "trailers with a path": (
        client.headers(1, [(":path", "b")], END_HEADERS | END_STREAM),
        client.PROTOCOL_ERROR,
    ),
    "trailers in upper case": (
        client.headers(1, [("A", "b")], END_HEADERS | END_STREAM),
        client.PROTOCOL_ERROR,
    ),
    "headers behind the end": (
        data(1, b"", END_STREAM) + client.headers(1, [("a", "b")], END_HEADERS | END_STREAM),
        client.STREAM_CLOSED,
    ),
    "a window over the top": (window_update(1, WINDOW_MAX), client.FLOW_CONTROL_ERROR),
    "a window that does not grow": (window_update(1, 0), client.PROTOCOL_ERROR),
}


@pytest.mark.parametrize("case", RESETS)
@pytest.mark.parametrize("cut", [1, 1 << 18])
def test_frames_that_break_a_call_and_not_the_connection(case: str, cut: int) -> None:
    raw, code = RESETS[case]

    async def play() -> None:
        peer = Peer()
        peer.open(1)
        peer.say(raw, cut=cut)
        await turns()
        assert peer.answer(1).reset == code
        assert peer.goodbye is None and not peer.calls
        peer.say(ping())
        assert len(peer.heard(PING)) == 1

    asyncio.run(play())


@pytest.mark.parametrize("length", [4, 6, 10])
@pytest.mark.parametrize("cut", [1, 1 << 18])
def test_data_that_content_length_does_not_allow_resets_the_call(length: int, cut: int) -> None:
    async def play() -> None:
        peer = Peer(echo)
        peer.open(1, ("content-length", str(length)))
        peer.say(data(1, message(b"")), data(1, b"", END_STREAM), cut=cut)
        await turns()
        assert peer.answer(1).reset == client.PROTOCOL_ERROR
        peer.open(3, ("content-length", "6"))
        peer.say(data(3, message(b"x"), END_STREAM, padding=3), cut=cut)
        await turns()
        assert peer.answer(3).messages == [b"x"] and peer.goodbye is None

    asyncio.run(play())


@in_loop
async def test_streams_that_the_client_has_reset_by_its_errors_are_counted() -> None:
    """The requests are served and thrown away, as in a rapid reset (CVE-2025-8671)."""
    peer = Peer(calls_max=5)
    for stream_id in range(1, 2 * BURST * 2, 2):
        if peer.transport.is_closed:
            break
        peer.say(client.headers(stream_id), window_update(stream_id, 0))
    assert peer.goodbye == client.ENHANCE_YOUR_CALM


HARMLESS = {
    "an unknown frame": frame(99, 1, b"whatever", 255),
    "priority": frame(client.PRIORITY, 7, b"12345"),
    "unknown settings": frame(SETTINGS, 0, b"\x99\x99\0\0\0\1"),
    "a window of a call that is over": window_update(1, 5),
    "data of a call that is over": data(1, b"x" * 99) + data(1, b"x", padding=7),
    "a reset of a call that is over": rst_stream(1) + rst_stream(1),
    "trailers of a call that is over": client.headers(1, [("a", "b")], END_HEADERS | END_STREAM),
    "a goodbye": frame(GOAWAY, 0, bytes(8) + b"bye"),
    "an answer to no ping": ping(b"whatever", client.ACK),
    "an answer to settings": frame(SETTINGS, 0, b"", client.ACK),
    "a reserved bit": data(1 | 1 << 31, b"x"),
    "a reserved bit of another kind": window_update(3 | 1 << 31, 1),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_frames_that_are_passed_over(case: str) -> None:
    """Call 1 was ended by the server, and the client may not know yet."""

    async def play() -> None:
        async def serve(call: Call) -> None:
            if call.stream_id == 1:
                raise RpcError(Status.NOT_FOUND, "not here")
            await echo(call)

        peer = Peer(serve)
        peer.open(1)
        await turns()
        assert peer.answer(1).status == Status.NOT_FOUND
        peer.open(3)
        peer.say(HARMLESS[case], data(3, message(b"still"), END_STREAM))
        await turns()
        assert peer.goodbye is None
        assert peer.answer(3).messages == [b"still"] and peer.answer(3).status == 0

    asyncio.run(play())


@in_loop
async def test_pings_and_settings_are_answered() -> None:
    peer = Peer()
    peer.say(ping(b"abcdefgh"), client.settings(window=5))
    acks = [each for each in peer.heard(PING, SETTINGS) if each.flags & client.ACK]
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
    "empty messages, many in a frame": lambda _: data(1, message(b"") * 100),
    "resets of nothing": lambda _: rst_stream(1),
    "rapid resets": lambda n: client.headers(2 * n + 3) + rst_stream(2 * n + 3),
    "calls that are none": lambda n: client.headers(2 * n + 3, [("a", "b")]),
    "calls beyond the limit": lambda n: client.headers(2 * n + 3),
    "answers to settings": lambda _: frame(SETTINGS, 0, b"", client.ACK),
    "answers to pings": lambda _: ping(b"whatever", client.ACK),
    "goodbyes": lambda _: frame(GOAWAY, 0, bytes(8)),
    "headers of calls that are over": lambda _: client.headers(
        3, [("a", "b")], END_HEADERS | END_STREAM
    ),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_floods_end_the_connection(flood: str) -> None:
    async def play() -> None:
        peer = Peer(calls_max=5)
        peer.open(1)
        if flood.startswith("headers"):
            peer.say(client.headers(3, request_fields(without=["content-type"])))
        for count in range(BURST * 3):
            if peer.transport.is_closed:
                break
            peer.say(FLOODS[flood](count))
        assert peer.goodbye == client.ENHANCE_YOUR_CALM
        assert count > BURST // 2 or "many" in flood
        await turns()
        assert not peer.host.connections and not peer.calls

    asyncio.run(play())


@in_loop
async def test_headers_are_charged_by_the_work_of_decoding_them() -> None:
    """One kilobyte is a thousand headers by a table, and five milliseconds of work."""
    peer = Peer()
    raw = b"\x40\0\0" + b"\xbe" * 1000
    count = 0
    while not peer.transport.is_closed and count < 200:
        count += 1
        peer.say(frame(HEADERS, 2 * count + 1, raw, END_HEADERS | END_STREAM))
    assert peer.goodbye == client.ENHANCE_YOUR_CALM


@in_loop
async def test_huffman_codes_are_charged_by_the_work_of_decoding_them() -> None:
    peer = Peer()
    raw = hpack.Encoder().encode(request_fields(extra=[("k", "a" * 20_000)]))
    count = 0
    while not peer.transport.is_closed and count < 200:
        count += 1
        peer.say(frame(HEADERS, 2 * count + 1, raw, END_HEADERS | END_STREAM))
    assert peer.goodbye == client.ENHANCE_YOUR_CALM


@in_loop
async def test_fragments_of_a_message_end_the_connection() -> None:
    peer = Peer()
    peer.open()
    peer.say(data(1, message(bytes(100_000))[:10]))
    count = 0
    while not peer.transport.is_closed and count < 20 * BURST:
        count += 1
        peer.say(data(1, b"x"))
    assert peer.goodbye == client.ENHANCE_YOUR_CALM


@in_loop
async def test_a_frame_that_does_not_end_ends_the_connection() -> None:
    for raw in (client.headers(1, flags=0), client.headers(1)[:20], ping()[:3]):
        peer = Peer()
        peer.say(raw)
        now = now_ns()
        peer.connection.enforce_timeouts(now + HEADERS_NS // 2)
        assert peer.goodbye is None
        peer.connection.enforce_timeouts(now + HEADERS_NS + NS_PER_S)
        assert peer.goodbye == client.ENHANCE_YOUR_CALM
        assert peer.host.ended == ["headers_timeout"]


@in_loop
async def test_a_read_is_processed_in_turns_and_nothing_of_it_is_lost() -> None:
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
async def test_a_frame_of_many_messages_is_processed_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = Reader()
    peer = Peer(reader)
    peer.open()
    sent = [b"%d" % n for n in range(5000)]
    raw = data(1, b"".join(map(message, sent)), END_STREAM)
    monkeypatch.setattr(connection, "QUANTUM_NS", 0)
    monkeypatch.setattr(turns_of_loop, "QUANTUM_NS", 2)
    peer.connection.get_buffer(-1)[: len(raw)] = raw
    peer.connection.buffer_updated(len(raw))
    assert peer.transport.is_paused and peer.connection.streams.has_data_left
    await until(lambda: reader.has_ended)
    assert reader.messages == sent and peer.goodbye is None


@in_loop
async def test_a_client_that_reads_nothing_is_not_answered_for_ever() -> None:
    """Headers by a table cost it a few bytes a call, and their answers are many."""

    async def refuse(call: Call) -> None:
        raise RpcError(Status.NOT_FOUND, "x" * 500)

    peer = Peer(refuse)
    encoder = hpack.Encoder()
    peer.transport.fill()
    for count in range(30_000):
        if peer.transport.is_closed:
            break
        raw = encoder.encode(request_fields())
        peer.say(frame(HEADERS, 2 * count + 1, raw, END_HEADERS | END_STREAM))
        if count % 50 == 0:
            await turns()
    assert len(peer.transport.written) < 12 * MIB


# Header blocks.


@in_loop
async def test_a_block_in_continuations_opens_a_call() -> None:
    peer = Peer(echo)
    raw = block(request_fields(extra=[("k", "v" * 99)]))
    peer.say(frame(HEADERS, 1, raw[:1], END_STREAM))
    for at in range(1, len(raw)):
        peer.say(frame(client.CONTINUATION, 1, raw[at : at + 1]))
    assert not peer.calls
    peer.say(frame(client.CONTINUATION, 1, b"", END_HEADERS))
    assert peer.calls[1].metadata == (("k", "v" * 99),)
    await turns()
    assert peer.answer().status == 0


@pytest.mark.parametrize("size", [1, MIB // 100])
def test_continuations_without_end_end_the_connection(size: int) -> None:
    async def play() -> None:
        peer = Peer()
        peer.say(frame(HEADERS, 1, b""))
        for _ in range(2000):
            peer.say(frame(client.CONTINUATION, 1, bytes(size)))
        assert peer.goodbye == client.ENHANCE_YOUR_CALM

    asyncio.run(play())


@pytest.mark.parametrize("size", [16_384, 40_000, 60_000])
def test_too_many_headers_end_the_call_and_not_the_connection(size: int) -> None:
    async def play() -> None:
        peer = Peer(echo)
        peer.open(1, ("k", "v" * size))
        answer = peer.answer(1)
        assert answer.status == Status.RESOURCE_EXHAUSTED and not peer.calls
        assert answer.reset == client.NO_ERROR
        peer.open(3, flags=END_STREAM)
        await turns()
        assert peer.answer(3).status == 0 and peer.goodbye is None
        assert len(peer.served) == 1

    asyncio.run(play())


@in_loop
async def test_far_too_many_headers_end_the_connection() -> None:
    peer = Peer()
    raw = block(request_fields(extra=[("k", "v" * 70_000)]))
    peer.say(frame(HEADERS, 1, raw[:60_000]))
    peer.say(frame(client.CONTINUATION, 1, raw[60_000:], END_HEADERS))
    assert peer.goodbye in (client.ENHANCE_YOUR_CALM, client.COMPRESSION_ERROR)


@pytest.mark.parametrize(
    "fields",
    [
        request_fields(extra=[("grpc-timeout", "soon")]),
        request_fields(extra=[("k-bin", "***")]),
    ],
)
@pytest.mark.parametrize("flags", [0, END_STREAM])
def test_headers_that_are_wrong_end_the_call_by_trailers_only(
    fields: client.Fields, flags: int
) -> None:
    async def play() -> None:
        peer = Peer(echo)
        peer.say(client.headers(1, fields, END_HEADERS | flags))
        answer = peer.answer()
        assert len(answer.blocks) == 1 and answer.blocks[0][":status"] == "200"
        assert answer.status == Status.INTERNAL and answer.blocks[0]["grpc-message"]
        assert answer.blocks[0]["why"] == "/t/M"
        assert answer.reset == (None if flags else client.NO_ERROR)
        await turns()
        assert not peer.served and not peer.calls and peer.goodbye is None

    asyncio.run(play())


@pytest.mark.parametrize(
    "fields",
    [
        request_fields(without=["content-type"]),
        [(":method", "GET"), *request_fields(without=[":method"])],
    ],
    ids=["without a content type", "GET"],
)
@pytest.mark.parametrize("flags", [0, END_STREAM])
def test_a_request_that_is_no_grpc_call_is_answered_as_http(
    fields: client.Fields, flags: int
) -> None:
    """415 and a text, as far as the client takes it; then the gRPC status in trailers."""

    async def play() -> None:
        peer = Peer(echo)
        peer.say(client.settings(window=10), client.headers(1, fields, END_HEADERS | flags))
        text = b"not a gRPC call: expected POST of application/grpc\n"
        assert peer.heard(DATA) == [(DATA, 0, 1, text[:10])]
        peer.say(data(1, b"more")) if not flags else None
        peer.say(window_update(1, 1000))
        assert b"".join(each.payload for each in peer.heard(DATA)) == text
        first, last = (hpack.Decoder().decode(each.payload) for each in peer.heard(HEADERS))
        assert dict(first) == {":status": "415", "content-type": "text/plain"}
        assert dict(last)["grpc-status"] == "13" and dict(last)["why"] == "/t/M"
        resets = [each.code for each in peer.heard(RST_STREAM)]
        assert len(resets) == (0 if flags else 1)
        assert not peer.served and not peer.calls and peer.goodbye is None
        assert peer.host.budget.used_bytes == 0

    asyncio.run(play())


@in_loop
async def test_a_window_of_nothing_for_a_call_that_is_over_ends_the_connection() -> None:
    peer = Peer()
    peer.open()
    peer.calls[1].end()
    peer.say(window_update(1, 0))
    assert peer.goodbye == client.PROTOCOL_ERROR


@in_loop
async def test_calls_beyond_the_limit_are_refused_and_those_below_go_on() -> None:
    peer = Peer(calls_max=2)
    for stream_id in (1, 3, 5):
        peer.open(stream_id)
    assert peer.answer(5).reset == client.REFUSED_STREAM
    peer.say(rst_stream(1))
    peer.open(7)
    assert sorted(peer.calls) == [3, 7]


@pytest.mark.parametrize("sizes", [(4096,), (65_536,), (0,), (100, 0), (0, 4096)])
@in_loop
async def test_a_client_with_a_smaller_table_is_told_that_this_was_understood(
    sizes: tuple[int, ...],
) -> None:
    """A strict reader breaks the connection where the next block does not say so."""
    peer = Peer(echo)
    strict = hpack.Decoder()
    strict.max_allowed_table_size = min(4096, *sizes)
    for size in sizes:
        peer.say(client.settings(table=size))
    for stream_id in (1, 3):
        peer.open(stream_id, flags=END_STREAM)
    await turns()

    blocks = [each.payload for each in peer.heard(HEADERS)]
    assert len(blocks) == 2
    said = [dict(strict.decode(each)) for each in blocks]
    assert said[0] == said[1] and said[0]["grpc-status"] == "0"
    updates = [each.startswith(b"\x20") for each in blocks]
    assert updates == [min(sizes) < 4096, False]


# How calls end.


@in_loop
async def test_a_response_is_headers_messages_and_trailers() -> None:
    peer = Peer(writer(b"one", b""))
    peer.open(flags=END_STREAM)
    await turns()
    assert [(each.kind, each.flags) for each in peer.heard() if each.stream_id] == [
        (HEADERS, END_HEADERS),
        (DATA, 0),
        (DATA, 0),
        (HEADERS, END_HEADERS | END_STREAM),
    ]
    assert peer.answer().messages == [b"one", b""]


@in_loop
async def test_an_only_message_and_its_status_go_out_at_once() -> None:
    async def serve(call: Call) -> None:
        await call.answer(b"on", b"ly")

    peer = Peer(serve)
    writes: list[bytes] = []
    write = peer.connection.output._transport.write
    peer.connection.output._transport.write = lambda raw: (writes.append(raw), write(raw))  # type: ignore[method-assign]
    peer.open(flags=END_STREAM)
    await turns()

    assert [(each.kind, each.flags) for each in peer.heard() if each.stream_id] == [
        (HEADERS, END_HEADERS),
        (DATA, 0),
        (HEADERS, END_HEADERS | END_STREAM),
    ]
    assert len(writes) == 1 and not peer.connection.calls
    assert (peer.answer().messages, peer.answer().status) == ([b"only"], 0)


@pytest.mark.parametrize("is_open", [True, False])
@in_loop
async def test_an_only_message_that_there_is_no_room_for_waits(is_open: bool) -> None:
    async def serve(call: Call) -> None:
        await call.answer(b"x" * 95)

    peer = Peer(serve)
    peer.say(client.settings(window=0 if not is_open else WINDOW_DEFAULT))
    peer.open(flags=0 if is_open else END_STREAM)
    await turns()
    assert peer.answer().blocks
    if not is_open:
        assert peer.sent_bytes() == 0 and peer.answer().status is None
        peer.say(window_update(1, 100))
        await turns()
    assert (peer.answer().messages, peer.answer().status) == ([b"x" * 95], 0)


@pytest.mark.parametrize("has_message", [True, False])
@in_loop
async def test_metadata_goes_before_the_first_message(has_message: bool) -> None:
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
async def test_a_call_without_messages_is_trailers_only() -> None:
    peer = Peer(writer())
    peer.open(flags=END_STREAM)
    await turns()
    (only,) = peer.answer().blocks
    assert (only[":status"], only["content-type"], only["grpc-status"]) == (
        "200", "application/grpc", "0",
    )  # fmt: skip


@in_loop
async def test_a_call_that_ends_before_its_input_asks_for_no_more_of_it() -> None:
    peer = Peer(writer(b"enough"))
    peer.open()
    await turns()
    assert peer.answer().status == 0 and peer.answer().reset == client.NO_ERROR
    peer.say(data(1, message(b"more")), data(1, b"", END_STREAM))
    assert peer.goodbye is None


@in_loop
async def test_an_error_is_told_with_its_trailers() -> None:
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
async def test_a_handler_that_fails_otherwise_does_not_end_well() -> None:
    failed: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))

    async def fail(call: Call) -> None:
        raise ValueError("a bug")

    peer = Peer(fail)
    peer.open(flags=END_STREAM)
    await turns()
    assert peer.answer().status not in (None, Status.OK)


@in_loop
async def test_a_status_too_long_for_a_frame_is_cut_into_several() -> None:
    async def fail(call: Call) -> None:
        raise RpcError(Status.INTERNAL, "\xf6" * 5000)

    peer = Peer(fail)
    peer.open(flags=END_STREAM)
    await turns()
    assert peer.answer().status == Status.INTERNAL
    assert max(len(each.payload) for each in peer.heard()) <= FRAME_DEFAULT


@in_loop
async def test_a_deadline_ends_the_call_and_its_handler() -> None:
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
async def test_a_call_whose_message_does_not_come_in_time_is_told_so(
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
async def test_deadlines_that_are_over_at_once_or_never() -> None:
    peer = Peer()
    for stream_id, said in ((1, "0n"), (3, "1n"), (5, "99999999H")):
        peer.open(stream_id, ("grpc-timeout", said))
    await until(lambda: peer.answer(1).is_over and peer.answer(3).is_over)
    assert peer.answer(1).status == peer.answer(3).status == Status.DEADLINE_EXCEEDED
    assert list(peer.calls) == [5]


@in_loop
async def test_a_deadline_is_told_though_a_message_waits_that_nothing_is_out_of() -> None:
    peer = Peer(writer(b"x" * 100))
    peer.say(client.settings(window=0))
    peer.open(1, ("grpc-timeout", "5m"))
    await until(lambda: peer.answer().is_over or peer.answer().reset is not None)
    assert peer.answer().status == Status.DEADLINE_EXCEEDED


@in_loop
async def test_a_call_does_not_end_well_without_its_last_message() -> None:
    async def serve(call: Call) -> None:
        call.send(b"x" * 100)

    peer = Peer(serve)
    peer.say(client.settings(window=0))
    peer.open(1, flags=END_STREAM)
    await turns()
    assert peer.answer().status != Status.OK


@in_loop
async def test_a_call_that_ends_amid_a_message_is_reset() -> None:
    peer = Peer(writer(b"x" * 100))
    peer.say(client.settings(window=50))
    peer.open(1, ("grpc-timeout", "5m"))
    await until(lambda: peer.answer().is_over or peer.answer().reset is not None)
    assert peer.answer().status is None and peer.answer().reset == client.CANCEL
    assert not peer.calls and not waiting(peer)


@in_loop
async def test_a_reset_ends_the_handler_and_frees_everything() -> None:
    ends: list[type[BaseException]] = []

    async def serve(call: Call) -> None:
        try:
            await (call.read() if call.stream_id == 1 else call.write(bytes(100_000)))
        except BaseException as error:
            ends.append(type(error))
            raise

    peer = Peer(serve)
    peer.open(1, ("grpc-timeout", "1H"))
    peer.say(data(1, message(bytes(1000))[:500]))
    peer.open(3)
    await turns()
    heard = len(peer.heard())
    peer.say(rst_stream(1), rst_stream(3))
    assert not peer.calls and not waiting(peer)
    peer.say(window_update(0, 100_000))
    await turns()
    assert ends == [asyncio.CancelledError] * 2
    assert len(peer.heard()) == heard
    peer.served.clear()
    assert not calls_kept(peer)


@in_loop
async def test_what_is_sent_after_the_end_goes_nowhere() -> None:
    """Results come when they come: a handler may learn of a reset a turn late."""
    peer = Peer()
    peer.open(1)
    peer.open(3)
    await turns()
    first, second = peer.calls[1], peer.calls[3]
    peer.say(rst_stream(1))
    second.end(Status.OK)
    heard = len(peer.heard())
    for call in (first, second):
        call.send(b"late")
        call.send(bytes(100_000))
    assert len(peer.heard()) == heard
    assert not waiting(peer)


@in_loop
async def test_what_is_read_after_the_end_gives_no_window_back() -> None:
    peer = Peer()
    peer.open(1)
    await turns()
    call = peer.calls[1]
    for _ in range(3):
        peer.say(data(1, message(bytes(MIB - 5))))
    peer.say(rst_stream(1))
    heard = len(peer.heard())
    for _ in range(3):
        assert call.receive() is None and await call.read() is None
    assert len(peer.heard()) == heard


@in_loop
async def test_memory_that_is_refused_is_freed_before_more_is() -> None:
    """Only the call that took most is refused, also where its own bytes went over the limit."""
    peer = Peer(receive_bytes=MIB)
    for stream_id in (1, 3, 5):
        peer.open(stream_id)
    await turns()
    for stream_id, size in ((1, 100_000), (3, 100_000), (5, 4 * MIB)):
        peer.say(data(stream_id, message(bytes(2 * size))[:5] + bytes(size // 8)))
    while not peer.calls[5]._is_discarding:
        peer.say(data(5, bytes(65_536)))
    assert peer.host.budget.refused == 1
    assert [peer.calls[each]._is_discarding for each in (1, 3)] == [False, False]
    assert peer.host.budget.used_bytes == 2 * 12_500


@in_loop
async def test_what_came_goes_with_its_call() -> None:
    """A call may be in a cycle, and then be there until a collection: not so its megabytes."""
    peer = Peer()
    peer.open(1)
    peer.open(3)
    await turns()
    whole, begun = peer.calls[1], peer.calls[3]
    peer.say(data(1, message(bytes(MIB - 5))))
    peer.say(data(3, message(bytes(4 * MIB))[:MIB]))
    assert whole.has_input
    peer.transport.abort()
    await turns()
    for call in (whole, begun):
        assert not call.has_input and call._partial is None


@in_loop
async def test_a_connection_that_is_lost_ends_its_calls() -> None:
    peer = Peer()
    for stream_id in (1, 3, 5):
        peer.open(stream_id)
    await turns()
    tasks = [call.task for call in peer.served]
    peer.transport.abort()
    await turns()
    assert all(task is not None and task.cancelled() for task in tasks)
    assert not peer.calls and not peer.host.connections


# Flow control, out.


@in_loop
async def test_a_client_with_no_window_is_sent_nothing_until_it_has_one() -> None:
    reached: list[int] = []

    async def serve(call: Call) -> None:
        await call.write(b"x" * 95)
        reached.append(1)

    peer = Peer(serve)
    peer.say(client.settings(window=0))
    peer.open(flags=END_STREAM)
    await turns()
    assert peer.sent_bytes() == 0 and peer.answer().blocks
    for count in range(1, 100):
        peer.say(window_update(1, 1))
        assert peer.sent_bytes() == count
    await turns()
    assert not reached and peer.answer().status is None
    peer.say(window_update(1, 1))
    await turns()
    assert reached and peer.answer().messages == [b"x" * 95] and peer.answer().status == 0


@in_loop
async def test_a_window_that_the_settings_make_larger_and_smaller() -> None:
    peer = Peer(writer(b"x" * 995))
    peer.say(client.settings(window=100))
    peer.open(flags=END_STREAM)
    await turns()
    assert peer.sent_bytes() == 100
    peer.say(client.settings(window=300))
    assert peer.sent_bytes() == 300
    peer.say(client.settings(window=50))
    peer.say(window_update(1, 250))
    assert peer.sent_bytes() == 300
    peer.say(window_update(1, 1))
    assert peer.sent_bytes() == 301
    peer.say(client.settings(window=0), client.settings(window=749))
    await turns()
    assert peer.sent_bytes() == 1000 and peer.answer().status == 0


@in_loop
async def test_a_new_call_has_the_window_of_the_last_settings() -> None:
    peer = Peer(writer(b"x" * 100))
    peer.say(client.settings(window=10))
    peer.open(1)
    await turns()
    peer.say(client.settings(window=20))
    peer.open(3)
    await turns()
    assert (peer.sent_bytes(1), peer.sent_bytes(3)) == (20, 20)


@in_loop
async def test_frames_are_as_large_as_the_client_takes_them() -> None:
    peer = Peer(writer(bytes(50_000 - 5)))
    peer.open(1)
    await turns()
    assert [len(each.payload) for each in peer.heard(DATA)] == [16_384, 16_384, 16_384, 848]
    peer.say(client.settings(frame_bytes=20_000), window_update(0, WINDOW_DEFAULT))
    peer.open(3)
    await turns()
    sizes = [len(each.payload) for each in peer.heard(DATA) if each.stream_id == 3]
    assert sizes == [20_000, 20_000, 10_000]


@in_loop
async def test_calls_share_the_connections_window_in_turn() -> None:
    peer = Peer(writer(bytes(400_000)))
    peer.say(client.settings(window=WINDOW_MAX))
    for stream_id in (1, 3, 5):
        peer.open(stream_id)
    await turns()
    assert peer.sent_bytes() == WINDOW_DEFAULT and peer.sent_bytes(1) == WINDOW_DEFAULT
    peer.say(window_update(0, 12 * FRAME_DEFAULT))
    sent = [peer.sent_bytes(each) for each in (1, 3, 5)]
    assert sum(sent) == WINDOW_DEFAULT + 12 * FRAME_DEFAULT
    assert [each // FRAME_DEFAULT for each in sent] == [7, 4, 4]
    for _ in range(500):
        peer.say(window_update(0, 1000))
    sent = [peer.sent_bytes(each) for each in (1, 3, 5)]
    assert max(sent) - min(sent) <= 5 * FRAME_DEFAULT


@in_loop
async def test_a_call_without_window_does_not_hold_up_others() -> None:
    peer = Peer(writer(bytes(1000)))
    peer.say(client.settings(window=0))
    for stream_id in (1, 3):
        peer.open(stream_id, flags=END_STREAM)
    await turns()
    peer.say(window_update(3, 2000))
    await turns()
    assert peer.answer(3).status == 0 and peer.sent_bytes(1) == 0


@in_loop
async def test_a_full_socket_holds_back_messages_until_it_is_empty() -> None:
    count = 0

    async def serve(call: Call) -> None:
        nonlocal count
        for _ in range(50):
            await call.write(bytes(1000))
            count += 1

    peer = Peer(serve)
    peer.transport.room_bytes = 10_000
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
async def test_a_large_message_goes_out_as_the_socket_takes_it() -> None:
    sent = bytes(range(256)) * 2000
    peer = Peer(writer(sent))
    peer.transport.room_bytes = 100_000
    peer.say(client.settings(window=WINDOW_MAX), window_update(0, MIB))
    peer.open(flags=END_STREAM)
    while not peer.answer().is_over:
        before = peer.sent_bytes()
        await turns()
        assert peer.sent_bytes() - before <= 100_000 + FRAME_DEFAULT
        peer.transport.empty()
    assert peer.answer().messages == [sent]


@in_loop
async def test_a_connection_lost_while_messages_wait_ends_the_handlers() -> None:
    peer = Peer(writer(bytes(400_000)))
    for stream_id in (1, 3):
        peer.open(stream_id)
    await turns()
    assert waiting(peer) == 2
    tasks = [call.task for call in peer.served]
    peer.transport.abort()
    await turns()
    assert not waiting(peer) and not peer.calls
    assert all(task is not None and task.cancelled() for task in tasks)
    assert all(call.task is None for call in peer.served)


# The orderly end.


def answer_leaving(peer: Peer) -> None:
    """As a client that has read the goodbye."""
    peer.say(ping(peer.heard(PING)[-1].payload, client.ACK))


@in_loop
async def test_a_client_that_is_asked_to_leave_finishes_its_calls() -> None:
    peer = Peer(echo)
    peer.open(1)
    peer.connection.close_gracefully()
    peer.connection.close_gracefully()
    (goodbye,) = peer.heard(GOAWAY)
    assert goodbye.payload[:8] == WINDOW_MAX.to_bytes(4) + bytes(4)

    peer.open(3)
    answer_leaving(peer)
    answer_leaving(peer)
    final = peer.heard(GOAWAY)[1:]
    assert [each.payload[:8] for each in final] == [(3).to_bytes(4) + bytes(4)]

    peer.open(5)
    assert peer.answer(5).reset == client.REFUSED_STREAM
    for stream_id in (1, 3):
        assert peer.goodbye is None
        peer.say(data(stream_id, message(b"on"), END_STREAM))
        await turns()
        assert peer.answer(stream_id).messages == [b"on"] and peer.answer(stream_id).status == 0
    assert peer.goodbye == client.NO_ERROR
    assert len(peer.served) == 2


@in_loop
async def test_a_client_without_calls_goes_as_soon_as_it_has_heard() -> None:
    peer = Peer()
    peer.connection.close_gracefully()
    assert peer.goodbye is None
    peer.say(ping(b"whatever", client.ACK))
    assert peer.goodbye is None
    answer_leaving(peer)
    assert peer.goodbye == client.NO_ERROR


@in_loop
async def test_the_answer_to_a_ping_that_was_not_sent_ends_nothing() -> None:
    peer = Peer()
    peer.say(ping(b"iskleave", client.ACK))
    assert peer.goodbye is None
    peer.open(1)
    assert 1 in peer.calls


@in_loop
async def test_a_client_that_never_said_what_it_speaks_does_not_hold_up_the_end() -> None:
    peer = Peer(greets=False)
    peer.connection.close_gracefully()
    await turns()
    assert not peer.host.connections


# What it costs.


@in_loop
async def test_an_idle_connection_with_an_idle_call_costs_little() -> None:
    peers: list[Peer] = []
    scratch = memoryview(bytearray(SCRATCH_BYTES))

    async def connect(count: int) -> None:
        for _ in range(count):
            peers.append(Peer(wait))
            peers[-1].host.scratch = scratch
            peers[-1].open(1, ("user-agent", "grpc-python/1.0"), ("client", "robot-7"))
        await turns()

    await connect(1)  # What is made once.
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
async def test_nothing_is_left_of_calls_that_ended() -> None:
    peer = Peer(echo)
    for stream_id in range(1, 401, 2):
        peer.open(stream_id, ("grpc-timeout", "1H"))
        peer.say(data(stream_id, message(b"x" * stream_id), END_STREAM))
        await turns()
        assert peer.answer(stream_id).status == 0 if stream_id < 20 else True
    output = peer.connection.output
    assert not peer.calls and not output._blocked and peer.connection.streams._data_call is None
    peer.served.clear()
    assert not calls_kept(peer)


@in_loop
async def test_a_connection_knows_of_what_its_client_has_not_read() -> None:
    """In its own window, and in the socket; a call that is open and says nothing is nothing."""

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
    peer.transport.room_bytes = 0
    peer.say(window_update(0, MIB), window_update(3, MIB))
    await turns()
    assert peer.transport.is_full and peer.connection.has_unsent
    peer.transport.empty()
    await turns()
    assert not peer.connection.has_unsent


def calls_of(count: int) -> bytes:
    """Calls that are whole: headers, a message, and the end."""
    return b"".join(
        client.headers(stream_id) + data(stream_id, message(b"x"), END_STREAM)
        for stream_id in range(1, 2 * count, 2)
    )


@in_loop
async def test_calls_of_one_read_that_need_no_task_are_answered_in_one_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "now_ns", lambda: 0)  # No turn takes any time.
    peer = Peer()
    whole: list[Message | None] = []
    peer.host.serve_inline = lambda call: whole.append(call.whole) is None
    peer.connection._process(memoryview(calls_of(30)), 1 << 62)
    assert whole == [b"x"] * 30 and not peer.connection.streams.is_interrupted


@in_loop
async def test_calls_of_one_read_that_need_tasks_take_several_turns() -> None:
    """No clock of the connection sees what tasks do."""
    peer = Peer()
    begun = []
    peer.connection._process(memoryview(calls_of(10)), 1 << 62)
    while peer.connection.streams.is_interrupted:
        begun.append(len(peer.calls))
        rest, peer.connection._rest = peer.connection._rest, memoryview(b"")
        peer.connection._process(rest, 1 << 62)
    await turns()
    assert begun == [4, 8] and len(peer.served) == 10
    assert [call.receive() for call in peer.served] == [b"x"] * 10


@in_loop
async def test_the_calls_of_a_connection_that_has_ended_end_some_in_each_turn() -> None:
    """The end of a call cancels its task; hundreds of them would hold up the loop."""
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
async def test_calls_that_wait_for_a_window_go_on_some_in_each_turn() -> None:
    """A wider window lets all of them send, and each that has sent wakes its task."""
    gone: list[Call] = []

    async def serve(call: Call) -> None:
        await call.write(bytes(100))
        gone.append(call)

    peer = Peer(serve, calls_max=400)
    peer.say(client.settings(window=0))
    for stream_id in range(1, 401, 2):
        peer.open(stream_id)
        await turns()
    assert not gone
    peer.say(client.settings(window=1000))
    counts = []
    while len(gone) < 200:
        before = len(gone)
        await asyncio.sleep(0)
        counts.append(len(gone) - before)
    assert max(counts) == 64
    assert all(peer.answer(stream_id).messages == [bytes(100)] for stream_id in range(1, 401, 2))


@in_loop
async def test_processor_time_of_a_turn_is_wasted_but_for_what_its_messages_are_granted() -> None:
    peer = Peer()
    peer.say(client.headers(1), data(1, message(bytes(995))))
    assert peer.connection.note_cpu(NS_PER_S // 100)
    assert peer.connection.wasted_ns == NS_PER_S // 100 - MESSAGE_CPU_NS - BYTE_CPU_NS * 1000
    assert peer.connection.note_cpu(NS_PER_S // 100)
    assert peer.connection.wasted_ns == NS_PER_S // 100
