"""Send windows of HTTP/2: responses wait for the client's windows and for the socket."""

from __future__ import annotations

from support import http2 as client
from support.http2 import (
    DATA,
    END_STREAM,
    WINDOW_MAX,
    Peer,
    until,
    window_update,
)
from support.http2_calls import (
    FRAME_DEFAULT,
    MIB,
    WINDOW_DEFAULT,
    blocked_calls,
    writer,
)
from support.input_arena import in_loop, turns

from iskander.gateway.transport.http2.call import Call


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
