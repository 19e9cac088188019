"""Receive windows of HTTP/2 connections and calls, and the receive budget."""

from __future__ import annotations

from support import http2 as client
from support.http2 import (
    END_STREAM,
    WINDOW_UPDATE,
    Peer,
    data,
    message,
    rst_stream,
)
from support.http2_calls import (
    MIB,
    Reader,
)
from support.input_arena import in_loop, turns

from iskander.gateway.transport.http2.call import Call
from iskander.gateway.transport.http2.call_receiver import WINDOW_BYTES
from iskander.gateway.transport.http2.status import RpcError, Status


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
