"""Limits on the work and memory that one HTTP/2 client can use.

The connections run without sockets and without a gateway.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import os
import zlib
from collections.abc import Callable

import hpack
import pytest
from support import http2 as client
from support.http2 import (
    END_HEADERS,
    END_STREAM,
    HEADERS,
    SETTINGS,
    WINDOW_SETTING,
    WINDOW_UPDATE,
    Peer,
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
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.gateway.transport.http2 import call_receiver, decompression
from iskander.gateway.transport.http2 import connection as connection_module
from iskander.gateway.transport.http2.call import Call
from iskander.gateway.transport.http2.call_receiver import WINDOW_BYTES
from iskander.gateway.transport.http2.rate_limit import BURST
from iskander.gateway.transport.http2.status import RpcError, Status
from iskander.gateway.transport.limits import receive_budget
from iskander.gateway.transport.limits.receive_budget import ReceiveBudget

pytestmark = pytest.mark.slow

MIB = 1 << 20
MESSAGE_BYTES = 72 * MIB


async def respond(call: Call) -> None:
    await call.read()
    await call.answer(b"a response")


def window_setting(value: int) -> bytes:
    return WINDOW_SETTING.to_bytes(2) + value.to_bytes(4)


# Control frames.


@in_loop
async def test_a_ping_and_window_updates_for_each_response_are_accepted() -> None:
    """grpc-go and grpc-java send them to measure the bandwidth-delay product."""
    peer = Peer(respond)
    for stream_id in range(1, BURST * 4, 2):
        peer.feed(client.headers(stream_id), data(stream_id, message(b"x"), END_STREAM))
        await turns()
        peer.feed(window_update(0, 14), window_update(stream_id, 14), ping())
    assert peer.goaway_code is None
    assert peer.answer(1).status == peer.answer(stream_id).status == 0


@in_loop
async def test_delayed_pings_count_against_earlier_responses() -> None:
    peer = Peer(respond)
    for stream_id in range(1, BURST * 4, 2):
        peer.feed(client.headers(stream_id), data(stream_id, message(b"x"), END_STREAM))
        await turns()
        if stream_id % 20 == 19:
            peer.feed(*[ping()] * 10)
    assert peer.goaway_code is None


@in_loop
async def test_ping_allowance_from_responses_is_bounded() -> None:
    peer = Peer(respond)
    for stream_id in range(1, 2001, 2):
        peer.feed(client.headers(stream_id), data(stream_id, message(b"x"), END_STREAM))
        await turns()
    for _ in range(BURST * 5):
        peer.feed(ping())
    assert peer.goaway_code == client.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("stream_id", [0, 1, 3])
def test_useless_window_updates_close_the_connection(stream_id: int) -> None:
    async def run_case() -> None:
        peer = Peer()
        peer.open(1)
        peer.open(3)
        peer.feed(rst_stream(3))
        for _ in range(BURST * 5):
            peer.feed(window_update(stream_id, 1))
        assert peer.goaway_code is None
        for _ in range(BURST * 15):
            peer.feed(window_update(stream_id, 1))
        assert peer.goaway_code == client.ENHANCE_YOUR_CALM

    asyncio.run(run_case())


@in_loop
async def test_one_byte_window_updates_close_the_connection() -> None:
    async def serve(call: Call) -> None:
        await call.write(bytes(MIB))

    peer = Peer(serve)
    peer.feed(client.settings(window=0))
    peer.open()
    await turns()
    for _ in range(BURST * 20):
        peer.feed(window_update(1, 1))
    assert peer.goaway_code == client.ENHANCE_YOUR_CALM


@in_loop
async def test_message_read_in_small_windows_is_complete() -> None:
    sent = os.urandom(8 * MIB)

    async def serve(call: Call) -> None:
        await call.write(sent)

    peer = Peer(serve)
    peer.feed(client.settings(window=2048), window_update(0, 16 * MIB))
    peer.open(flags=END_STREAM)
    await turns()
    for _ in range(len(sent) // 2048 + 1):
        peer.feed(window_update(1, 1024), window_update(0, 1024))
        peer.feed(window_update(1, 1024), window_update(0, 1024))
    await turns()
    assert peer.goaway_code is None
    assert peer.answer().messages == [sent]


# Settings.


@in_loop
async def test_last_of_repeated_settings_applies() -> None:
    peer = Peer(calls_max=2000)
    for stream_id in range(1, 401, 2):
        peer.open(stream_id)
    peer.feed(window_update(1, client.WINDOW_MAX - 65_535))
    many = b"".join(window_setting(value) for value in range(65_536 + 10_921, 65_535, -1))
    peer.feed(frame(SETTINGS, 0, many[: -len(window_setting(0))] + window_setting(65_534)))
    assert peer.goaway_code is None
    windows = {call.send_window for call in peer.calls.values()}
    assert windows == {65_534, client.WINDOW_MAX - 1}


@in_loop
async def test_settings_are_charged_by_their_number() -> None:
    peer = Peer()
    for _ in range(2):
        assert peer.goaway_code is None
        peer.feed(frame(SETTINGS, 0, b"\x99\x99\0\0\0\1" * 10_922))
    assert peer.goaway_code == client.ENHANCE_YOUR_CALM


@in_loop
async def test_settings_are_charged_by_the_calls_they_change() -> None:
    peer = Peer(calls_max=2000)
    for stream_id in range(1, 4001, 2):
        peer.open(stream_id)
    for count in range(200):
        if peer.transport.is_closed:
            break
        peer.feed(client.settings(window=count))
    assert peer.goaway_code == client.ENHANCE_YOUR_CALM and count > 20


@in_loop
async def test_invalid_setting_is_an_error_even_before_a_valid_one() -> None:
    peer = Peer()
    peer.feed(frame(SETTINGS, 0, window_setting(1 << 31) + window_setting(5)))
    assert peer.goaway_code == client.FLOW_CONTROL_ERROR


# Headers.


@in_loop
async def test_metadata_with_any_bytes_is_decoded_and_keeps_the_connection() -> None:
    peer = Peer(respond)
    encoder = hpack.Encoder()
    for stream_id, value in ((1, b"caf\xe9"), (3, b"caf\xe9"), (5, "caf\u00e9".encode())):
        fields = [*request_fields(), ("who", value), ("client", "robot-7")]
        raw = encoder.encode(fields)
        peer.feed(frame(HEADERS, stream_id, raw, END_HEADERS), data(stream_id, b"", END_STREAM))
        await turns()
        assert peer.goaway_code is None and peer.answer(stream_id).status == 0
    expected = (("who", "caf\u00e9"), ("client", "robot-7"))
    assert [call.metadata for call in peer.served] == [expected] * 3


@in_loop
async def test_error_text_can_contain_a_path_with_any_bytes() -> None:
    async def refuse(call: Call) -> None:
        raise RpcError(Status.UNIMPLEMENTED, call.path)

    peer = Peer(refuse)
    fields = [(":path", b"/t/\xff"), *request_fields(without=[":path"])]
    peer.feed(frame(HEADERS, 1, hpack.Encoder().encode(fields), END_HEADERS | END_STREAM))
    await turns()
    assert peer.answer().status == Status.UNIMPLEMENTED


# Compressed messages.


class CallbackReader:
    """A handler that reads in `Call.on_input`, as a Flight stream does.

    Attributes:
        received: Messages, then None at the end of the stream, or an error.
    """

    def __init__(self) -> None:
        self.received: list[bytes | RpcError | None] = []

    async def __call__(self, call: Call) -> None:
        done = asyncio.get_running_loop().create_future()

        def read() -> None:
            while call.has_input and not done.done():
                try:
                    raw = call.receive()
                except RpcError as error:
                    self.received.append(error)
                    return done.set_result(None)
                self.received.append(None if raw is None else bytes(raw))
                if raw is None:
                    return done.set_result(None)
            return None

        call.on_input = read
        read()
        await done


class Reader(CallbackReader):
    """A handler that awaits `Call.read`."""

    async def __call__(self, call: Call) -> None:
        try:
            while (raw := await call.read()) is not None:
                self.received.append(bytes(raw))
        except RpcError as error:
            self.received.append(error)
        else:
            self.received.append(None)


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
SIZES = [
    0,
    1,
    decompression.INLINE_BYTES_MAX - 1,
    decompression.INLINE_BYTES_MAX,
    decompression.INLINE_BYTES_MAX + 1,
]
SIZES += [decompression.READ_BYTES + 1, decompression.PIECE_BYTES, 3 * MIB + 7]


@pytest.mark.parametrize("encoding", COMPRESSORS)
@pytest.mark.parametrize("handler", [CallbackReader, Reader])
@pytest.mark.parametrize("fill", [os.urandom, bytes], ids=["noise", "zeros"])
def test_compressed_messages_of_all_sizes_arrive_in_order(
    encoding: str, handler: type[CallbackReader], fill: Callable[[int], bytes]
) -> None:
    async def run_case() -> None:
        reader = handler()
        peer = Peer(reader)
        peer.open(1, ("grpc-encoding", encoding))
        sent: list[bytes] = []
        for size in (*SIZES, *reversed(SIZES)):
            raw = fill(size)
            sent += (raw, b"as it is")
            body = message(COMPRESSORS[encoding](raw), 1) + message(b"as it is")
            for at in range(0, len(body), MIB):
                peer.feed(data(1, body[at : at + MIB]))
                await until(lambda: peer.calls[1]._received < WINDOW_BYTES // 2)
        peer.feed(data(1, b"", END_STREAM))
        await until(lambda: peer.answer().is_over)
        assert reader.received == [*sent, None] and peer.answer().status == 0

    asyncio.run(run_case())


@in_loop
async def test_large_message_is_decompressed_outside_the_event_loop() -> None:
    peer = Peer(message_bytes=MESSAGE_BYTES)
    peer.open(1, ("grpc-encoding", "gzip"))
    await turns()
    call = peer.calls[1]
    peer.feed(data(1, message(gzip.compress(bytes(MESSAGE_BYTES)), 1), END_STREAM))
    assert not call.has_input
    events: list[bool] = []
    call.on_input = lambda: events.append(call.has_input)
    await until(lambda: events)
    assert events == [True]
    raw = call.receive()
    assert raw is not None and len(raw) == MESSAGE_BYTES
    assert call.has_input and call.receive() is None


@pytest.mark.parametrize("handler", [CallbackReader, Reader])
def test_invalid_large_message_fails_the_call_after_earlier_messages(
    handler: type[CallbackReader],
) -> None:
    noise = os.urandom(MIB)
    size = MIB.to_bytes(4, "little")  # The size field of the gzip trailer.
    invalid = {
        "too large": (gzip.compress(bytes(MIB + 1)), Status.RESOURCE_EXHAUSTED),
        "declares too much": (gzip.compress(noise) + b"more", Status.RESOURCE_EXHAUSTED),
        "cut": (gzip.compress(noise)[:-200_000] + size, Status.INTERNAL),
        "followed": (gzip.compress(noise) + size, Status.INTERNAL),
        "followed by much": (gzip.compress(b"one") + noise[:500_000] + size, Status.INTERNAL),
        "broken": (gzip.compress(noise)[:500_000] + noise[:500_000] + size, Status.INTERNAL),
    }

    async def run_case(raw: bytes, status: Status) -> None:
        reader = handler()
        peer = Peer(reader, message_bytes=MIB)
        if len(raw) > MIB:
            peer = Peer(reader, message_bytes=2 * MIB)
        peer.open(1, ("grpc-encoding", "gzip"))
        peer.feed(data(1, message(b"before")))
        body = message(raw, 1) + message(b"behind")
        peer.feed(*(data(1, body[at : at + MIB]) for at in range(0, len(body), MIB)))
        peer.feed(data(1, b"", END_STREAM))
        await until(lambda: len(reader.received) > 1)
        before, error = reader.received
        assert before == b"before"
        assert isinstance(error, RpcError) and error.status == status

    for raw, status in invalid.values():
        asyncio.run(run_case(raw, status))


@in_loop
async def test_call_reset_during_decompression_releases_everything() -> None:
    failed: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    reader = Reader()
    peer = Peer(reader, message_bytes=MESSAGE_BYTES)
    bomb = message(gzip.compress(bytes(MESSAGE_BYTES // 2)), 1)
    for stream_id in range(1, 21, 2):
        peer.open(stream_id, ("grpc-encoding", "gzip"))
        peer.feed(data(stream_id, bomb))
    await turns()
    peer.feed(*(rst_stream(stream_id) for stream_id in range(1, 21, 2)))
    await asyncio.sleep(0.5)
    assert not reader.received and not failed and not peer.calls
    assert all(call.receive() is None and not call.has_input for call in peer.served)


# Large messages.


def granted(peer: Peer, stream_id: int) -> int:
    updates = peer.frames_of(WINDOW_UPDATE)
    return sum(each.number for each in updates if each.stream_id == stream_id)


def begin(peer: Peer, stream_id: int, size: int) -> None:
    """Sends the part of a large message that fits the window."""
    peer.open(stream_id)
    raw = message(bytes(size))[:WINDOW_BYTES]
    peer.feed(*(data(stream_id, raw[at : at + MIB]) for at in range(0, len(raw), MIB)))


def end(peer: Peer, stream_id: int, size: int) -> None:
    """Sends the rest of a large message."""
    left = size + 5 - WINDOW_BYTES
    while left:
        count = min(left, MIB)
        peer.feed(data(stream_id, bytes(count)))
        left -= count


def used(budget: ReceiveBudget) -> int:
    gc.collect()
    return budget.used_bytes


@in_loop
async def test_large_messages_are_received_within_the_memory_budget() -> None:
    reader = Reader()
    peer = Peer(reader, message_bytes=64 * MIB, receive_bytes=56 * MIB)
    budget = peer.host.budget
    for stream_id in (1, 3, 5, 7):
        begin(peer, stream_id, 10 * MIB)
    # A connection may reserve half of the budget; each message reserves its last 9 MiB.
    assert [granted(peer, each) > 0 for each in (1, 3, 5, 7)] == [True, True, True, False]
    begin(peer, 9, 3 * MIB)  # Fits one window.
    await turns()
    assert [len(each or b"") for each in reader.received] == [3 * MIB]

    peer.feed(rst_stream(1))
    assert granted(peer, 7)
    for stream_id in (3, 5, 7):
        end(peer, stream_id, 10 * MIB)
    await turns()
    received = [
        each if isinstance(each, RpcError) else len(each or b"") for each in reader.received
    ]
    assert received == [3 * MIB, 10 * MIB, 10 * MIB, 10 * MIB] and peer.goaway_code is None
    peer.connection.streams.close()
    await turns()
    assert used(budget) == 0 and not budget._reserved


@in_loop
async def test_connection_with_the_smallest_reservation_is_first() -> None:
    """A share of the budget is kept for messages without a reservation."""
    peer = Peer(Reader(), message_bytes=64 * MIB, receive_bytes=80 * MIB)
    budget = peer.host.budget
    others = [Reservation() for _ in range(3)]
    assert budget.reserve("a", others[0], 40 * MIB)
    assert budget.reserve("b", others[1], 30 * MIB)
    assert not budget.reserve("a", Reservation(), 1 * MIB)
    assert not budget.reserve("c", others[2], 8 * MIB)
    budget.release(38 * MIB)
    budget.end_reservation("b", others[1], 30 * MIB)
    assert others[2].is_granted
    begin(peer, 1, 3 * MIB)
    assert not budget.evictions


class Reservation:
    """A queued memory reservation."""

    is_granted = False

    def on_reserved(self) -> None:
        self.is_granted = True


@in_loop
async def test_stalled_message_is_rejected_when_another_needs_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [now_ns()]
    monkeypatch.setattr(receive_budget, "now_ns", lambda: clock[0])
    monkeypatch.setattr(call_receiver, "now_ns", lambda: clock[0])
    monkeypatch.setattr(receive_budget, "TICK_S", 0.0)
    reader = Reader()
    peer = Peer(reader, message_bytes=64 * MIB, receive_bytes=40 * MIB)
    begin(peer, 1, 20 * MIB)
    begin(peer, 3, 20 * MIB)
    await turns()
    assert granted(peer, 1) and not granted(peer, 3) and not reader.received
    clock[0] = now_ns() + receive_budget.STALL_NS_UNDER_PRESSURE + NS_PER_S
    await until(lambda: granted(peer, 3))
    end(peer, 3, 20 * MIB)
    await turns()
    error, message_read = reader.received
    assert isinstance(error, RpcError) and error.status == Status.UNAVAILABLE
    assert isinstance(message_read, bytes) and len(message_read) == 20 * MIB


@in_loop
async def test_incomplete_messages_stay_within_the_budget() -> None:
    """Each message lacks one byte; the oldest are rejected, and small messages still arrive."""
    reader = Reader()
    peer = Peer(reader, message_bytes=64 * MIB, receive_bytes=32 * MIB)
    budget = peer.host.budget
    peak = 0
    raw = message(bytes(3 * MIB))[:-1]
    for stream_id in range(1, 101, 2):
        peer.open(stream_id)
        peer.feed(*(data(stream_id, raw[at : at + MIB]) for at in range(0, len(raw), MIB)))
        peak = max(peak, used(budget))
    peer.open(201)
    peer.feed(data(201, message(b"small"), END_STREAM))
    await turns()
    assert peak <= 32 * MIB and budget.evictions >= 40
    rejected = [each for each in reader.received if isinstance(each, RpcError)]
    assert len(rejected) == budget.evictions
    assert {each.status for each in rejected} == {Status.UNAVAILABLE}
    assert b"small" in reader.received and peer.goaway_code is None
    peer.connection.streams.close()
    while peer.calls:
        await turns()
    reader.received.clear()
    assert used(budget) == 0


@in_loop
async def test_messages_without_a_reader_stay_within_the_budget() -> None:
    peer = Peer(message_bytes=64 * MIB, receive_bytes=8 * MIB)
    budget = peer.host.budget
    raw = b"".join(data(1, message(bytes(60_000))) for _ in range(60))
    for stream_id in (1, 3, 5, 7, 9):
        peer.open(stream_id)
        await turns()
        peer.feed(raw.replace(b"\0\0\0\0\1", b"\0\0\0\0" + bytes([stream_id])))
        assert used(budget) <= 8 * MIB
    assert budget.evictions > 0 and peer.goaway_code is None
    peer.connection.streams.close()
    assert used(budget) == 0


@in_loop
async def test_unread_response_is_charged_until_it_is_sent() -> None:
    async def serve(call: Call) -> None:
        await call.write(bytes(3 * MIB))

    peer = Peer(serve, receive_bytes=8 * MIB)
    budget = peer.host.budget
    peer.open(flags=END_STREAM)
    await turns()
    assert used(budget) >= 3 * MIB
    peer.feed(window_update(0, 4 * MIB), window_update(1, 4 * MIB))
    await turns()
    assert used(budget) == 0 and peer.answer().messages == [bytes(3 * MIB)]


@in_loop
async def test_large_message_is_charged_until_its_memory_is_freed() -> None:
    reader = Reader()
    peer = Peer(message_bytes=64 * MIB, receive_bytes=32 * MIB)
    budget = peer.host.budget
    peer.open()
    await turns()
    begin(peer, 3, 2 * MIB)
    call = peer.calls[3]
    kept = call.receive()
    assert kept is not None and used(budget) == 2 * MIB
    part = memoryview(kept)[100:200]
    del kept
    assert used(budget) == 2 * MIB
    del part
    assert used(budget) == 0 and not reader.received


# Timeouts.


@in_loop
async def test_message_without_progress_is_rejected() -> None:
    reader = Reader()
    peer = Peer(reader)
    for stream_id, raw in ((1, message(bytes(1000))[:-1]), (3, b"\0\0"), (5, message(b"whole"))):
        peer.open(stream_id)
        peer.feed(data(stream_id, raw))
    await turns()
    later = now_ns() + int(TimeoutsConfig().message_s * NS_PER_S)
    peer.connection.streams.check_timeouts(later - NS_PER_S)
    await turns()
    assert reader.received == [b"whole"]
    peer.connection.streams.check_timeouts(later + NS_PER_S)
    await turns()
    errors = reader.received[1:]
    assert len(errors) == 2 and all(isinstance(each, RpcError) for each in errors)
    assert peer.host.ended == ["message_timeout"] * 2 and 5 in peer.calls


@in_loop
async def test_slowly_sent_message_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte in 20 s is rejected; 10,000 bytes in 20 s (500 bytes/s) are accepted."""
    clock = now_ns()
    monkeypatch.setattr(connection_module, "now_ns", lambda: clock)
    peer = Peer(Reader())
    for stream_id in (1, 3):
        peer.open(stream_id)
        peer.feed(data(stream_id, message(bytes(100_000))[:-50_000]))
    for _ in range(3):
        clock += 20 * NS_PER_S
        peer.feed(data(1, b"a"), data(3, bytes(10_000)))
        peer.connection.streams.check_timeouts(clock)
    await turns()
    assert peer.host.ended == ["message_timeout"]
    assert list(peer.calls) == [3]


@in_loop
async def test_unsent_bytes_are_charged_while_the_socket_is_full() -> None:
    peer = Peer()
    peer.transport.free_bytes = 100
    peer.feed(*[ping()] * 20)
    peer.transport.empty()
    assert len(peer.host.unsent) == 2 and peer.host.unsent[0] > 100 and not peer.host.unsent[1]


@in_loop
async def test_response_without_progress_ends_the_call() -> None:
    async def serve(call: Call) -> None:
        await call.write(bytes(MIB))

    peer = Peer(serve)
    peer.open(flags=END_STREAM)
    await turns()
    later = now_ns() + int(TimeoutsConfig().response_s * NS_PER_S)
    peer.connection.streams.check_timeouts(later - NS_PER_S)
    assert peer.calls
    peer.connection.streams.check_timeouts(later + NS_PER_S)
    assert not peer.calls and peer.host.ended == ["response_timeout"]
    assert peer.answer().reset == client.CANCEL


@in_loop
async def test_connection_is_aborted_when_the_socket_accepts_no_data() -> None:
    peer = Peer()
    peer.transport.fill()
    peer.connection.enforce_timeouts(now_ns() + NS_PER_S)
    assert not peer.transport.is_aborted
    peer.feed(ping())
    later = now_ns() + int(TimeoutsConfig().response_s * NS_PER_S)
    peer.connection.enforce_timeouts(later + NS_PER_S)
    assert peer.transport.is_aborted and peer.host.ended == ["response_timeout"]


# Deadline.


@in_loop
async def test_deadline_error_comes_from_the_host() -> None:
    peer = Peer()
    peer.open(1, ("grpc-timeout", "1m"))
    await until(lambda: peer.answer().is_over)
    assert peer.answer().blocks[-1]["why"] == "/t/M"
