"""Responses of gRPC calls: headers, messages, trailers, deadlines and cancellation."""

from __future__ import annotations

import asyncio

import pytest
from support import http2 as client
from support.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    Peer,
    data,
    message,
    rst_stream,
    until,
    window_update,
)
from support.http2_calls import (
    FRAME_DEFAULT,
    WINDOW_DEFAULT,
    blocked_calls,
    calls_in_memory,
    writer,
)
from support.input_arena import in_loop, turns

from iskander.errors import DeadlineExceeded
from iskander.gateway.protocols import grpc_errors, grpc_server
from iskander.gateway.transport.http2 import frames, response_headers
from iskander.gateway.transport.http2.call import Call
from iskander.gateway.transport.http2.status import RpcError, Status


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
