"""Frames that end an HTTP/2 connection or one call, and frames that are ignored."""

from __future__ import annotations

import asyncio

import hpack
import pytest
from support import http2 as client
from support.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
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
    window_update,
)
from support.http2_calls import (
    MIB,
    WINDOW_DEFAULT,
    echo,
)
from support.input_arena import in_loop, turns

from iskander.gateway.transport.http2.call import Call
from iskander.gateway.transport.http2.status import RpcError, Status


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
