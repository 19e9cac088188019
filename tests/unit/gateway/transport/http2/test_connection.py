"""HTTP/2 connections: preface, keepalive, reads of any size, and the end of a connection."""

from __future__ import annotations

import asyncio
import tracemalloc

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import http2 as client
from support.http2 import (
    END_STREAM,
    GOAWAY,
    PING,
    PREFACE,
    SETTINGS,
    WINDOW_MAX,
    WINDOW_UPDATE,
    Peer,
    data,
    message,
    ping,
    request_fields,
)
from support.http2_calls import (
    MIB,
    TIMEOUTS,
    WINDOW_DEFAULT,
    Reader,
    blocked_calls,
    calls_in_memory,
    echo,
    wait,
)
from support.input_arena import in_loop, turns
from support.random_examples import up_to

from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.gateway.transport.connection_listener import SCRATCH_BYTES
from iskander.gateway.transport.http2 import frames
from iskander.gateway.transport.http2.call import Call
from iskander.gateway.transport.http2.call_receiver import WINDOW_BYTES
from iskander.gateway.transport.http2.status import Status

PREFACE_NS = int(TIMEOUTS.preface_s * NS_PER_S)

IDLE_NS = int(TIMEOUTS.idle_s * NS_PER_S)

KEEPALIVE_NS = int(TIMEOUTS.keepalive_s * NS_PER_S)

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


@settings(max_examples=up_to(30), deadline=None)
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
async def test_pings_and_settings_are_acknowledged() -> None:
    peer = Peer()
    peer.feed(ping(b"abcdefgh"), client.settings(window=5))
    acks = [each for each in peer.frames_of(PING, SETTINGS) if each.flags & client.ACK]
    assert [(each.kind, each.payload) for each in acks] == [
        (SETTINGS, b""),
        (PING, b"abcdefgh"),
        (SETTINGS, b""),
    ]


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
