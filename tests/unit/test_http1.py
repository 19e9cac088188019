"""The HTTP port on a loop of its own: what connections may do and leave undone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from iskander.gateway import http1
from iskander.gateway.http1 import Http1Port

WITHIN_S = 10.0
GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
LARGE_BYTES = 32 << 20

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class App:
    """Answers every request with what it got; says what it met.

    Attributes:
        hold: A request is answered once this is set.
        begun: A request has come.
        pieces: Bytes of each piece of a body that it was given.
    """

    def __init__(self) -> None:
        self.hold = asyncio.Event()
        self.hold.set()
        self.begun = asyncio.Event()
        self.pieces: list[int] = []
        self.is_reading = True
        self.answer = b"ok"
        self.gone = 0

    async def __call__(self, _: Any, receive: Any, send: Any) -> None:
        self.begun.set()
        while self.is_reading:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone += 1
                return
            self.pieces.append(len(message["body"]))
            if not message["more_body"]:
                break
        await self.hold.wait()
        length = str(len(self.answer)).encode()
        headers = [(b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for start in range(0, len(self.answer), 1 << 18):
            piece = self.answer[start : start + (1 << 18)]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Port:
    """A port and its clients."""

    def __init__(self, app: App, connections_max: int) -> None:
        self.app = app
        self.http = Http1Port(app, connections_max)
        self.address: tuple[str, int] = ("", 0)

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Streams]:
        reader, writer = await asyncio.open_connection(*self.address)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def serve(talk: Callable[[Port], Awaitable[None]], connections_max: int = 10) -> None:
    async def run() -> None:
        port = Port(App(), connections_max)
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        await port.http.listen(bound)
        port.address = bound.getsockname()
        try:
            await talk(port)
        finally:
            port.app.hold.set()
            await port.http.stop(1.0)

    asyncio.run(asyncio.wait_for(run(), WITHIN_S))


async def answer(reader: asyncio.StreamReader) -> bytes:
    """The next answer's body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return await reader.readexactly(length)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionError):
        await reader.read()
    return True


def test_a_connection_is_kept_for_more_requests_also_when_they_come_together() -> None:
    async def talk(port: Port) -> None:
        async with port.connected() as (reader, writer):
            for sent in (GET, GET + GET):
                writer.write(sent)
                for _ in range(sent.count(b"GET")):
                    assert await answer(reader) == b"ok"

    serve(talk)


@pytest.mark.parametrize("sent", [b"", b"GET / HT", GET, GET + b"GET / HTTP/1.1\r\na: "])
def test_a_connection_that_brings_no_request_is_closed(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that goes on sending a letter now and then."""
    monkeypatch.setattr(http1, "QUIET_S", 0.05)

    async def talk(port: Port) -> None:
        async with port.connected() as (reader, writer):
            writer.write(sent)
            closing = asyncio.create_task(is_closed(reader))
            while not closing.done():
                if sent.endswith(b" "):
                    with contextlib.suppress(ConnectionError):
                        writer.write(b"a")
                await asyncio.sleep(0.01)

    serve(talk)


def test_a_request_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "QUIET_S", 0.01)

    async def talk(port: Port) -> None:
        port.app.hold.clear()
        async with port.connected() as (reader, writer):
            writer.write(GET)
            await port.app.begun.wait()
            asyncio.get_running_loop().call_later(0.1, port.app.hold.set)
            assert await answer(reader) == b"ok"

    serve(talk)


def test_a_client_that_reads_nothing_of_its_answer_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http1, "STALL_S", 0.05)

    async def talk(port: Port) -> None:
        port.app.answer = bytes(LARGE_BYTES)
        async with port.connected() as (reader, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(GET)
            await port.app.begun.wait()
            while port.http.connections:
                await asyncio.sleep(0.01)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            with contextlib.suppress(ConnectionError):
                assert len(await reader.read()) < LARGE_BYTES

    serve(talk)


def test_a_large_answer_comes_whole() -> None:
    async def talk(port: Port) -> None:
        port.app.answer = bytes(LARGE_BYTES)
        async with port.connected() as (reader, writer):
            writer.write(GET)
            assert await answer(reader) == port.app.answer

    serve(talk)


def test_more_connections_than_are_served_are_known_and_far_more_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http1, "CONNECTIONS_SLACK", 1)

    async def talk(port: Port) -> None:
        async with port.connected() as (reader, writer):
            writer.write(GET)
            await answer(reader)
            assert not port.http.is_full
            async with port.connected() as (second, to_second):
                to_second.write(GET)
                await answer(second)
                assert port.http.is_full
                async with port.connected() as (third, _):
                    assert await is_closed(third)
        while port.http.connections:
            await asyncio.sleep(0.01)
        assert not port.http.is_full

    serve(talk, connections_max=1)


def test_the_rest_of_a_body_that_nobody_read_is_taken_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a client which is still sending sees its answer; then it is cut."""
    monkeypatch.setattr(http1, "LINGER_S", 0.2)

    async def talk(port: Port) -> None:
        port.app.is_reading = False
        async with port.connected() as (reader, writer):
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n")
            assert await answer(reader) == b"ok"
            closing = asyncio.create_task(is_closed(reader))
            while not closing.done():
                with contextlib.suppress(ConnectionError):
                    writer.write(b"a")
                await asyncio.sleep(0.01)

    serve(talk)


@pytest.mark.parametrize("is_read", [True, False], ids=["before", "after"])
def test_a_body_that_is_no_http_ends_its_connection_and_nothing_else(
    is_read: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Before its request was answered, and after that, while nobody reads it."""

    async def talk(port: Port) -> None:
        port.app.is_reading = is_read
        async with port.connected() as (reader, writer):
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
            if not is_read:
                assert await answer(reader) == b"ok"
            writer.write(b"nonsense\r\n\r\n")
            assert await is_closed(reader)
        while is_read and not port.app.gone:
            await asyncio.sleep(0.01)
        async with port.connected() as (reader, writer):
            writer.write(GET)
            assert await answer(reader) == b"ok"

    with caplog.at_level(logging.WARNING):
        serve(talk)
    assert "Traceback" not in caplog.text


def chunked(chunk: bytes, count: int) -> bytes:
    head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%s\r\n" % (len(chunk), chunk) * count + b"0\r\n\r\n"


def test_a_body_of_tiny_chunks_is_taken_in_turns() -> None:
    """Between them the loop goes round, and no more is read than what was left over."""

    async def talk(port: Port) -> None:
        sent = chunked(b"a", 100_000)
        async with port.connected() as (reader, writer):
            writer.write(sent + GET)
            answers = asyncio.create_task(both(reader))
            left = 0
            while not answers.done():
                await asyncio.sleep(0)
                each: Any
                for each in port.http._state.connections:
                    left = max(left, len(each.conn.trailing_data[0]))
            assert answers.result() == [b"ok", b"ok"]
        assert sum(port.app.pieces) == 100_000
        assert max(port.app.pieces) <= 3 * http1.CHUNKS_A_TURN
        assert left <= 1 << 19

    async def both(reader: asyncio.StreamReader) -> list[bytes]:
        return [await answer(reader), await answer(reader)]

    serve(talk)


def test_connections_with_tiny_chunks_share_their_turns() -> None:
    """However many they are, the loop takes no longer to go round."""

    async def talk(port: Port) -> None:
        async with contextlib.AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(port.connected()) for _ in range(8)]
            for _, writer in streams:
                writer.write(chunked(b"a", 10_000))
            answers = asyncio.gather(*(answer(reader) for reader, _ in streams))
            rounds = 0
            while not answers.done():
                await asyncio.sleep(0)
                rounds += 1
            assert await answers == [b"ok"] * 8
        assert rounds > 0.8 * sum(port.app.pieces) / http1.CHUNKS_A_TURN

    serve(talk)


def test_a_body_of_tiny_chunks_that_nobody_reads_is_thrown_away() -> None:
    async def talk(port: Port) -> None:
        port.app.is_reading = False
        async with port.connected() as (reader, writer):
            writer.write(chunked(b"a", 10_000) + GET)
            assert await answer(reader) == b"ok"
            assert await answer(reader) == b"ok"

    serve(talk)


def test_a_client_that_leaves_amid_tiny_chunks_is_forgotten() -> None:
    async def talk(port: Port) -> None:
        async with port.connected() as (_, writer):
            writer.write(chunked(b"a", 50_000)[:-5])
            await port.app.begun.wait()
            writer.transport.abort()
        while port.http.connections:
            await asyncio.sleep(0.01)
        assert port.app.gone == 1
        async with port.connected() as (reader, writer):
            writer.write(GET)
            assert await answer(reader) == b"ok"

    serve(talk)


def test_an_ordinary_body_is_taken_as_it_comes() -> None:
    """Also one in chunks of some size."""

    async def talk(port: Port) -> None:
        length = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % LARGE_BYTES
        for sent in (length + bytes(LARGE_BYTES), chunked(bytes(4096), LARGE_BYTES >> 12)):
            port.app.pieces.clear()
            async with port.connected() as (reader, writer):
                writer.write(sent)
                assert await answer(reader) == b"ok"
            assert sum(port.app.pieces) == LARGE_BYTES
            assert max(port.app.pieces) > 1 << 17

    serve(talk)


@pytest.mark.parametrize("count", [1, 2])
def test_a_client_that_has_said_all_gets_its_answers(count: int) -> None:
    """It closes its half of the connection; then the other half is closed too."""

    async def talk(port: Port) -> None:
        port.app.hold.clear()
        async with port.connected() as (reader, writer):
            writer.write(GET * count)
            await port.app.begun.wait()
            writer.write_eof()
            asyncio.get_running_loop().call_later(0.1, port.app.hold.set)
            for _ in range(count):
                assert await answer(reader) == b"ok"
            assert await reader.read() == b""
        while port.http.connections:
            await asyncio.sleep(0.01)

    serve(talk)


def test_a_client_that_closes_its_half_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have left, and then nobody wants the answer; amid a request it has, amid its answer
    it shows whether it has."""
    monkeypatch.setattr(http1, "HALF_CLOSED_S", 0.05)

    async def talk(port: Port) -> None:
        port.app.hold.clear()
        async with port.connected() as (reader, writer):
            writer.write(GET)
            await port.app.begun.wait()
            writer.write_eof()
            assert await is_closed(reader)
            assert not port.http.connections
        port.app.hold.set()
        port.app.answer = bytes(LARGE_BYTES)
        async with port.connected() as (reader, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(GET)
            writer.write_eof()
            await asyncio.sleep(0.2)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert len(await answer(reader)) == LARGE_BYTES
        monkeypatch.setattr(http1, "HALF_CLOSED_S", 2 * WITHIN_S)
        async with port.connected() as (reader, writer):
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n")
            writer.write_eof()
            assert await is_closed(reader)

    serve(talk)


def test_a_stop_answers_what_is_under_way_and_closes_what_is_quiet() -> None:
    async def talk(port: Port) -> None:
        port.app.hold.clear()
        async with port.connected() as (busy, writer), port.connected() as (quiet, _):
            writer.write(GET)
            await port.app.begun.wait()

            stopping = asyncio.create_task(port.http.stop(WITHIN_S))
            assert await is_closed(quiet)
            with pytest.raises(ConnectionError):
                await asyncio.open_connection(*port.address)
            port.app.hold.set()

            assert await answer(busy) == b"ok"
            assert await is_closed(busy)
            await stopping

    serve(talk)


def test_a_stop_does_not_wait_longer_than_it_may() -> None:
    async def talk(port: Port) -> None:
        async with port.connected() as (reader, writer):
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n")
            await port.app.begun.wait()
            await port.http.stop(0.05)
            assert await is_closed(reader)
            assert port.app.gone == 1

    serve(talk)


def test_an_answer_that_is_not_read_is_known_of() -> None:
    async def talk(port: Port) -> None:
        port.app.answer = bytes(LARGE_BYTES)
        async with port.connected() as (reader, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            assert port.http.unsent == 0
            writer.write(GET)
            while not port.http.unsent:
                await asyncio.sleep(0.01)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert await answer(reader) == port.app.answer
            assert port.http.unsent == 0 and port.http.connections == 1

    serve(talk)


LAST = {
    "old": GET.replace(b"1.1", b"1.0"),
    "last": GET.replace(b"host: a", b"host: a\r\nconnection: close"),
}


@pytest.mark.parametrize("last", LAST.values(), ids=LAST)
@pytest.mark.parametrize("behind", [b"\r\n", b"X", GET], ids=["a line", "a letter", "a request"])
def test_what_is_behind_the_last_request_takes_its_answer_from_nobody(
    last: bytes, behind: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """It was answered with 400 in the place of its answer, which then failed with a traceback."""

    async def talk(port: Port) -> None:
        port.app.hold.clear()
        async with port.connected() as (reader, writer):
            writer.write(last)
            await port.app.begun.wait()
            writer.write(behind)
            await asyncio.sleep(0.01)
            port.app.hold.set()
            assert await answer(reader) == b"ok"
            assert await is_closed(reader)

    serve(talk)
    assert "Traceback" not in caplog.text
