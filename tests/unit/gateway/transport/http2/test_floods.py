"""Rates of an HTTP/2 connection: floods of frames, timeouts of incomplete frames, and turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import hpack
import pytest
from support import http2 as client
from support.http2 import (
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    SETTINGS,
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
from support.http2_calls import (
    MIB,
    TIMEOUTS,
    Reader,
    echo,
)
from support.input_arena import in_loop, turns

from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.gateway.transport.http2 import connection
from iskander.gateway.transport.http2.call import Call, Message
from iskander.gateway.transport.http2.rate_limit import BURST
from iskander.gateway.transport.http2.status import RpcError, Status
from iskander.gateway.transport.http2.streams import BYTE_CPU_NS, MESSAGE_CPU_NS
from iskander.gateway.transport.limits import turn_scheduler

HEADERS_NS = int(TIMEOUTS.headers_s * NS_PER_S)

ODD = range(1, 1601, 2)


@in_loop
async def test_streams_reset_after_client_errors_are_rate_limited() -> None:
    """The server does the work and drops the result, as with rapid reset (CVE-2025-8671)."""
    peer = Peer(calls_max=5)
    for stream_id in range(1, 2 * BURST * 2, 2):
        if peer.transport.is_closed:
            break
        peer.feed(client.headers(stream_id), window_update(stream_id, 0))
    assert peer.goaway_code == client.ENHANCE_YOUR_CALM


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
