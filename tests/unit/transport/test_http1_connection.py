"""The HTTP port on a loop of its own: what connections may do and leave undone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from iskander.clock import thread_cpu_ns
from iskander.config.schema import Config, LimitsConfig, TimeoutsConfig
from iskander.transport import connection_listener as listening
from iskander.transport import cpu_allowance
from iskander.transport.connection_limits import ConnectionLimits
from iskander.transport.http1 import connection as http1_connection
from iskander.transport.http1 import listener as http1
from iskander.transport.http1.listener import Http1Listener
from iskander.transport.turn_scheduler import QUANTUM_NS, TURN_NS

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
        refused: Of each request, whether there was no place for its connection.
    """

    def __init__(self) -> None:
        self.hold = asyncio.Event()
        self.hold.set()
        self.begun = asyncio.Event()
        self.pieces: list[int] = []
        self.is_reading = True
        self.answer = b"ok"
        self.gone = 0
        self.refused: list[bool] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.refused.append(scope["is_surplus"])
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

    def __init__(self, app: App, connections_max: int, config: Config) -> None:
        self.app = app
        self.limits = ConnectionLimits(config)
        self.http = Http1Listener(app, connections_max, self.limits)
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


def serve(
    talk: Callable[[Port], Awaitable[None]],
    connections_max: int = 10,
    *,
    receive_bytes: int = 1 << 30,
    **timeouts: float,
) -> None:
    """Talk to a port whose timeouts are looked at all the time where one is given."""

    async def run() -> None:
        config = Config(
            timeouts=TimeoutsConfig(**timeouts),
            limits=LimitsConfig(receive_bytes=receive_bytes, message_bytes=1 << 16),
        )
        port = Port(App(), connections_max, config)
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        await port.http.listen(bound)
        port.address = bound.getsockname()
        try:
            await talk(port)
        finally:
            port.app.hold.set()
            await port.http.stop(1.0)
            port.limits.stop()
            assert port.limits.budget.used_bytes == 0 and port.limits.open_count == 0

    with pytest.MonkeyPatch.context() as patch:
        if timeouts:
            patch.setattr(listening, "CHECK_INTERVAL_S", 0.05)
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


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        (b"", "preface"),
        (b"GET / HT", "headers"),
        (GET, "idle"),
        (GET + b"GET / HTTP/1.1\r\na: ", "headers"),
    ],
)
def test_a_connection_that_brings_no_request_is_closed(sent: bytes, name: str) -> None:
    """Also one that goes on sending a letter now and then."""

    async def talk(port: Port) -> None:
        async with port.connected() as (reader, writer):
            writer.write(sent)
            closing = asyncio.create_task(is_closed(reader))
            while not closing.done():
                if sent.endswith(b" "):
                    with contextlib.suppress(ConnectionError):
                        writer.write(b"a")
                await asyncio.sleep(0.01)
        assert port.limits.ended == {f"{name}_timeout": 1}

    serve(talk, **{f"{name}_s": 0.05})


def test_a_request_takes_its_time() -> None:
    async def talk(port: Port) -> None:
        port.app.hold.clear()
        async with port.connected() as (reader, writer):
            writer.write(GET)
            await port.app.begun.wait()
            asyncio.get_running_loop().call_later(0.2, port.app.hold.set)
            assert await answer(reader) == b"ok"

    serve(talk, preface_s=0.01, headers_s=0.01, idle_s=0.01, message_s=0.01)


def test_a_client_that_reads_nothing_of_its_answer_is_cut() -> None:
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
        assert port.limits.ended == {"response_timeout": 1}

    serve(talk, response_s=0.05)


def test_a_large_answer_comes_whole() -> None:
    async def talk(port: Port) -> None:
        port.app.answer = bytes(LARGE_BYTES)
        async with port.connected() as (reader, writer):
            writer.write(GET)
            assert await answer(reader) == port.app.answer

    serve(talk)


def test_more_connections_than_are_served_are_known_and_far_more_are_closed() -> None:
    """All are busy, so none gives way."""

    async def talk(port: Port) -> None:
        port.app.hold.clear()
        async with contextlib.AsyncExitStack() as stack:
            held = []
            for _ in range(1 + http1.CONNECTIONS_SLACK):
                streams = await stack.enter_async_context(port.connected())
                streams[1].write(GET)
                await port.app.begun.wait()
                port.app.begun.clear()
                held.append(streams)
            assert port.app.refused == [False] + [True] * http1.CONNECTIONS_SLACK
            too_many, _ = await stack.enter_async_context(port.connected())
            assert await is_closed(too_many)
            assert port.limits.ended == {"too_many_connections": 1}
            port.app.hold.set()
            for reader, _ in held:
                assert await answer(reader) == b"ok"
            port.app.refused.clear()
            held[-1][1].write(GET)
            assert await answer(held[-1][0]) == b"ok"
            assert port.app.refused == [False]

    serve(talk, connections_max=1)


def test_an_idle_connection_gives_way_to_a_new_one() -> None:
    async def talk(port: Port) -> None:
        async with contextlib.AsyncExitStack() as stack:
            streams = []
            for _ in range(4):
                streams.append(await stack.enter_async_context(port.connected()))
                streams[-1][1].write(GET)
                assert await answer(streams[-1][0]) == b"ok"
            gone = [reader.at_eof() or await is_closed_now(reader) for reader, _ in streams]
            assert gone == [True, True, False, False]
            assert port.limits.ended == {"gave_way": 2}

    serve(talk, connections_max=2)


async def is_closed_now(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            return await reader.read() == b""
    return False


def test_the_rest_of_a_body_that_nobody_read_is_taken_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a client which is still sending sees its answer; then it is cut."""
    monkeypatch.setattr(http1_connection, "LINGER_S", 0.2)

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


class Clock:
    """A clock by which each look takes so long; no work takes any time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_ns: int) -> None:
        self.ns, self.step_ns, self.looks = 10**18, step_ns, 0
        monkeypatch.setattr(http1_connection, "now_ns", self)

    def __call__(self) -> int:
        self.ns += self.step_ns
        return self.ns


def test_a_body_of_tiny_chunks_is_taken_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between them the loop goes round, and no more is read than what was left over."""
    Clock(monkeypatch, QUANTUM_NS // 8)

    async def talk(port: Port) -> None:
        sent = chunked(b"a", 20_000)
        async with port.connected() as (reader, writer):
            writer.write(sent + GET)
            answers = asyncio.create_task(both(reader))
            left = 0
            while not answers.done():
                await asyncio.sleep(0)
                for each in port.http.connections:
                    left = max(left, each.conn.buffered_bytes)
            assert answers.result() == [b"ok", b"ok"]
        assert sum(port.app.pieces) == 20_000
        assert max(port.app.pieces) <= 1024
        assert left <= 1 << 19

    async def both(reader: asyncio.StreamReader) -> list[bytes]:
        return [await answer(reader), await answer(reader)]

    serve(talk)


def test_connections_with_tiny_chunks_share_their_turns() -> None:
    """However many they are, the loop takes no longer to go round."""

    async def talk(port: Port) -> None:
        async with contextlib.AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(port.connected()) for _ in range(8)]
            answers = asyncio.gather(*(answer(reader) for reader, _ in streams))
            used_ns = rounds = 0
            while not answers.done():
                if not rounds:
                    for _, writer in streams:
                        writer.write(chunked(b"a", 10_000))
                begun_ns = thread_cpu_ns()
                await asyncio.sleep(0)
                used_ns += thread_cpu_ns() - begun_ns
                rounds += 1
            assert await answers == [b"ok"] * 8
        # A round is the reads of each, a quantum at most, and the turns of all that wait.
        assert rounds > used_ns / (8 * 2 * QUANTUM_NS + 2 * TURN_NS)

    serve(talk, connections_max=20)


def test_processor_time_that_brings_little_ends_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_allowance, "BURST_NS", 20_000_000)

    async def talk(port: Port) -> None:
        async with port.connected() as (reader, writer), port.connected() as (other, to_other):
            writer.write(chunked(b"a", 100_000))
            assert await is_closed(reader)
            assert port.limits.ended == {"cpu_time": 1}
            to_other.write(chunked(bytes(1 << 16), 100))
            assert await answer(other) == b"ok"

    serve(talk)


@pytest.mark.parametrize("count", [http1_connection.FIELDS_MAX - 20, 1000, 20_000])
@pytest.mark.parametrize("where", ["head", "trailers"])
def test_fields_are_few_also_where_all_come_at_once(count: int, where: str) -> None:
    fields = b"a:\r\n" * count
    sent = {
        "head": GET[:-2] + fields + b"\r\n",
        "trailers": chunked(b"a", 1)[:-2] + fields + b"\r\n",
    }[where]

    async def talk(port: Port) -> None:
        async with port.connected() as (reader, writer):
            writer.write(sent)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split()[1] == (b"200" if count < 1000 else b"400")

    serve(talk)


def test_the_line_of_a_chunk_is_short() -> None:
    async def talk(port: Port) -> None:
        async with port.connected() as (reader, writer):
            for length, status in ((100, b" 200 "), (10_000, b" 400 ")):
                line = b"\r\n\r\n1;" + b"x" * length + b"\r\n"
                writer.write(chunked(b"a", 1).replace(b"\r\n\r\n1\r\n", line))
                assert status in await reader.readuntil(b"\r\n")
                await reader.readuntil(b"\r\n\r\n")
                await reader.read(2)

    serve(talk)


def test_what_is_read_and_not_taken_is_within_the_budget() -> None:
    """Requests that wait behind another: of those that hold most, some connections are ended."""

    async def talk(port: Port) -> None:
        port.app.hold.clear()
        budget, most = port.limits.budget, 0
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(8):
                _, writer = await stack.enter_async_context(port.connected())
                writer.write(GET)
                await asyncio.sleep(0.02)
                writer.write(GET * 3000)
                await asyncio.sleep(0.05)
                most = max(most, budget.used_bytes)
            assert 1 << 17 < most <= budget.limit_bytes
            assert port.limits.ended["receive_memory"] >= 3

    serve(talk, receive_bytes=1 << 18)


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
        while port.http.connections or not port.app.gone:
            await asyncio.sleep(0.01)
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
            assert max(port.app.pieces) > 1 << 16

    serve(talk)


def test_reads_of_one_turn_share_one_quantum(monkeypatch: pytest.MonkeyPatch) -> None:
    """libuv reads a socket again and again in one turn of the loop."""
    Clock(monkeypatch, QUANTUM_NS // 20)

    async def talk(port: Port) -> None:
        async with port.connected() as (reader, writer):
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n")
            while not any(each.cycle for each in port.http.connections):
                await asyncio.sleep(0.01)
            (connection,) = port.http.connections
            count = 0
            while not connection._is_waiting and count < 20:
                connection.data_received(bytes(50_000))
                count += 1
            assert 2 <= count <= 10
            while connection._is_waiting:
                await asyncio.sleep(0)
            writer.write(bytes(1_000_000 - count * 50_000))
            assert await answer(reader) == b"ok"

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
    monkeypatch.setattr(http1_connection, "HALF_CLOSED_S", 0.05)

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
        monkeypatch.setattr(http1_connection, "HALF_CLOSED_S", 2 * WITHIN_S)
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
            assert port.http.unsent == 0 and len(port.http.connections) == 1

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


@pytest.mark.parametrize("method", [b"HEAD", b"POST"])
@pytest.mark.parametrize(
    "rest",
    [
        b"transfer-encoding: chunked\r\n\r\nx",
        b"transfer-encoding: chunked\r\ncontent-length: 1\r\n\r\n",
    ],
    ids=["a broken body", "two lengths"],
)
def test_a_broken_request_is_answered_whatever_its_method(method: bytes, rest: bytes) -> None:
    """The answer to HEAD has no body: an attempt to send one failed in the event loop."""

    async def talk(port: Port) -> None:
        failed: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, said: failed.append(said))
        async with port.connected() as (reader, writer):
            writer.write(method + b" / HTTP/1.1\r\nhost: a\r\n" + rest + b"\r\n")
            raw = await reader.read()
        assert raw.startswith(b"HTTP/1.1 400 ") and not failed
        assert (b"}" in raw) == (method == b"POST")

    serve(talk)
