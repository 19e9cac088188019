"""HTTP/1.1 connections: timeouts, limits, chunked bodies, half-close and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from iskander.config.auth import AccessConfig
from iskander.config.schema import Config, LimitsConfig, TimeoutsConfig
from iskander.foundation.clock import thread_cpu_ns
from iskander.gateway.transport import connection_listener
from iskander.gateway.transport.http1 import connection as http1_connection
from iskander.gateway.transport.http1 import framing
from iskander.gateway.transport.http1 import listener as http1
from iskander.gateway.transport.http1.listener import Http1Listener
from iskander.gateway.transport.http1.sites import SitePolicy
from iskander.gateway.transport.limits import cpu_allowance
from iskander.gateway.transport.limits.connection_limits import ConnectionLimits
from iskander.gateway.transport.limits.turn_scheduler import QUANTUM_NS, TURN_NS

WITHIN_S = 10.0
GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
LARGE_BYTES = 32 << 20

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class App:
    """ASGI application with a fixed response; records its calls.

    Attributes:
        release: Event; responses are sent when it is set.
        requested: Event; set at each request.
        chunks: Size of each received part of a body.
        is_surplus: For each request, whether its connection is above the limit.
    """

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.release.set()
        self.requested = asyncio.Event()
        self.chunks: list[int] = []
        self.is_reading = True
        self.body = b"ok"
        self.disconnects = 0
        self.is_surplus: list[bool] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.is_surplus.append(scope["is_surplus"])
        self.requested.set()
        while self.is_reading:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnects += 1
                return
            self.chunks.append(len(message["body"]))
            if not message["more_body"]:
                break
        await self.release.wait()
        length = str(len(self.body)).encode()
        headers = [(b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for start in range(0, len(self.body), 1 << 18):
            chunk = self.body[start : start + (1 << 18)]
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Server:
    """A listener with its application."""

    def __init__(self, app: App, connections_max: int, config: Config) -> None:
        self.app = app
        sites = SitePolicy(AccessConfig(allowed_hosts=("a",)), "127.0.0.1:0")
        self.limits = ConnectionLimits(config)
        self.http = Http1Listener(app, connections_max, self.limits, sites=sites)
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


def run_scenario(
    scenario: Callable[[Server], Awaitable[None]],
    connections_max: int = 10,
    *,
    receive_bytes: int = 1 << 30,
    **timeouts: float,
) -> None:
    """Runs a scenario against a server; given timeouts are checked every 50 ms."""

    async def run() -> None:
        config = Config(
            timeouts=TimeoutsConfig(**timeouts),
            limits=LimitsConfig(receive_bytes=receive_bytes, message_bytes=1 << 16),
        )
        server = Server(App(), connections_max, config)
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        await server.http.listen(bound)
        server.address = bound.getsockname()
        try:
            await scenario(server)
        finally:
            server.app.release.set()
            await server.http.stop(1.0)
            server.limits.stop()
            assert server.limits.budget.used_bytes == 0 and server.limits.open_count == 0

    with pytest.MonkeyPatch.context() as patch:
        if timeouts:
            patch.setattr(connection_listener, "CHECK_INTERVAL_S", 0.05)
        asyncio.run(asyncio.wait_for(run(), WITHIN_S))


async def read_response(reader: asyncio.StreamReader) -> bytes:
    """Returns the body of the next response."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return await reader.readexactly(length)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionError):
        await reader.read()
    return True


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (("host: a", "host: rebound.example"), 421),
        (("host: a", "host: a\r\norigin: http://evil.example"), 403),
        (("host: a", "host: a\r\nsec-fetch-site: cross-site"), 403),
        (("GET /", "GET http://rebound.example/"), 421),
    ],
)
def test_requests_of_other_sites_do_not_reach_the_application(
    change: tuple[str, str], status: int
) -> None:
    async def scenario(server: Server) -> None:
        async with server.connected() as (reader, writer):
            writer.write(GET.decode().replace(*change).encode() + GET)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status)
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            assert b'"code":"cross_site"' in await reader.readexactly(length)
            assert await read_response(reader) == b"ok"
            assert len(server.app.chunks) == 1
            assert server.limits.ended == {"cross_site": 1}

    run_scenario(scenario)


def test_connection_serves_consecutive_and_pipelined_requests() -> None:
    async def scenario(server: Server) -> None:
        async with server.connected() as (reader, writer):
            for sent in (GET, GET + GET):
                writer.write(sent)
                for _ in range(sent.count(b"GET")):
                    assert await read_response(reader) == b"ok"

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        (b"", "preface"),
        (b"GET / HT", "headers"),
        (GET, "idle"),
        (GET + b"GET / HTTP/1.1\r\na: ", "headers"),
    ],
)
def test_connection_without_a_complete_request_is_closed(sent: bytes, name: str) -> None:
    """Single bytes of a header do not extend the timeout."""

    async def scenario(server: Server) -> None:
        async with server.connected() as (reader, writer):
            writer.write(sent)
            closing = asyncio.create_task(is_closed(reader))
            while not closing.done():
                if sent.endswith(b" "):
                    with contextlib.suppress(ConnectionError):
                        writer.write(b"a")
                await asyncio.sleep(0.01)
        assert server.limits.ended == {f"{name}_timeout": 1}

    run_scenario(scenario, **{f"{name}_s": 0.05})


def test_timeouts_do_not_apply_while_a_request_is_processed() -> None:
    async def scenario(server: Server) -> None:
        server.app.release.clear()
        async with server.connected() as (reader, writer):
            writer.write(GET)
            await server.app.requested.wait()
            asyncio.get_running_loop().call_later(0.2, server.app.release.set)
            assert await read_response(reader) == b"ok"

    run_scenario(scenario, preface_s=0.01, headers_s=0.01, idle_s=0.01, message_s=0.01)


def test_connection_is_closed_if_the_client_does_not_read_its_response() -> None:
    async def scenario(server: Server) -> None:
        server.app.body = bytes(LARGE_BYTES)
        async with server.connected() as (reader, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(GET)
            await server.app.requested.wait()
            while server.http.connections:
                await asyncio.sleep(0.01)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            with contextlib.suppress(ConnectionError):
                assert len(await reader.read()) < LARGE_BYTES
        assert server.limits.ended == {"response_timeout": 1}

    run_scenario(scenario, response_s=0.05)


def test_large_response_is_complete() -> None:
    async def scenario(server: Server) -> None:
        server.app.body = bytes(LARGE_BYTES)
        async with server.connected() as (reader, writer):
            writer.write(GET)
            assert await read_response(reader) == server.app.body

    run_scenario(scenario)


def test_surplus_connections_are_marked_and_further_ones_closed() -> None:
    """All connections are busy, so none is evicted."""

    async def scenario(server: Server) -> None:
        server.app.release.clear()
        async with contextlib.AsyncExitStack() as stack:
            held = []
            for _ in range(1 + http1.CONNECTIONS_SLACK):
                streams = await stack.enter_async_context(server.connected())
                streams[1].write(GET)
                await server.app.requested.wait()
                server.app.requested.clear()
                held.append(streams)
            assert server.app.is_surplus == [False] + [True] * http1.CONNECTIONS_SLACK
            too_many, _ = await stack.enter_async_context(server.connected())
            assert await is_closed(too_many)
            assert server.limits.ended == {"too_many_connections": 1}
            server.app.release.set()
            for reader, _ in held:
                assert await read_response(reader) == b"ok"
            server.app.is_surplus.clear()
            held[-1][1].write(GET)
            assert await read_response(held[-1][0]) == b"ok"
            assert server.app.is_surplus == [False]

    run_scenario(scenario, connections_max=1)


def test_idle_connection_is_evicted_for_a_new_one() -> None:
    async def scenario(server: Server) -> None:
        async with contextlib.AsyncExitStack() as stack:
            streams = []
            for _ in range(4):
                streams.append(await stack.enter_async_context(server.connected()))
                streams[-1][1].write(GET)
                assert await read_response(streams[-1][0]) == b"ok"
            closed = [reader.at_eof() or await is_closed_now(reader) for reader, _ in streams]
            assert closed == [True, True, False, False]
            assert server.limits.ended == {"gave_way": 2}

    run_scenario(scenario, connections_max=2)


async def is_closed_now(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            return await reader.read() == b""
    return False


def test_unread_rest_of_a_body_is_received_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that still sends receives its response before the connection closes."""
    monkeypatch.setattr(http1_connection, "LINGER_S", 0.2)

    async def scenario(server: Server) -> None:
        server.app.is_reading = False
        async with server.connected() as (reader, writer):
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n")
            assert await read_response(reader) == b"ok"
            closing = asyncio.create_task(is_closed(reader))
            while not closing.done():
                with contextlib.suppress(ConnectionError):
                    writer.write(b"a")
                await asyncio.sleep(0.01)

    run_scenario(scenario)


@pytest.mark.parametrize("is_read", [True, False], ids=["before response", "after response"])
def test_malformed_body_closes_only_its_connection(
    is_read: bool, caplog: pytest.LogCaptureFixture
) -> None:

    async def scenario(server: Server) -> None:
        server.app.is_reading = is_read
        async with server.connected() as (reader, writer):
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
            if not is_read:
                assert await read_response(reader) == b"ok"
            writer.write(b"nonsense\r\n\r\n")
            assert await is_closed(reader)
        while is_read and not server.app.disconnects:
            await asyncio.sleep(0.01)
        async with server.connected() as (reader, writer):
            writer.write(GET)
            assert await read_response(reader) == b"ok"

    with caplog.at_level(logging.WARNING):
        run_scenario(scenario)
    assert "Traceback" not in caplog.text


def chunked(chunk: bytes, count: int) -> bytes:
    head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%s\r\n" % (len(chunk), chunk) * count + b"0\r\n\r\n"


class Clock:
    """A clock that advances by `step_ns` at each call only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_ns: int) -> None:
        self.ns, self.step_ns = 10**18, step_ns
        monkeypatch.setattr(http1_connection, "now_ns", self)

    def __call__(self) -> int:
        self.ns += self.step_ns
        return self.ns


def test_body_of_tiny_chunks_is_processed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop runs between turns; reading stops while input is left."""
    Clock(monkeypatch, QUANTUM_NS // 8)

    async def scenario(server: Server) -> None:
        sent = chunked(b"a", 20_000)
        async with server.connected() as (reader, writer):
            writer.write(sent + GET)
            responses = asyncio.create_task(read_two(reader))
            left = 0
            while not responses.done():
                await asyncio.sleep(0)
                for each in server.http.connections:
                    left = max(left, len(each._framing))
            assert responses.result() == [b"ok", b"ok"]
        assert sum(server.app.chunks) == 20_000
        assert max(server.app.chunks) <= 1024
        assert left <= 1 << 19

    async def read_two(reader: asyncio.StreamReader) -> list[bytes]:
        return [await read_response(reader), await read_response(reader)]

    run_scenario(scenario)


def test_connections_with_tiny_chunks_share_turns() -> None:
    """The duration of a loop iteration does not depend on the number of connections."""

    async def scenario(server: Server) -> None:
        async with contextlib.AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(server.connected()) for _ in range(8)]
            responses = asyncio.gather(*(read_response(reader) for reader, _ in streams))
            used_ns = iterations = 0
            while not responses.done():
                if not iterations:
                    for _, writer in streams:
                        writer.write(chunked(b"a", 10_000))
                started_ns = thread_cpu_ns()
                await asyncio.sleep(0)
                used_ns += thread_cpu_ns() - started_ns
                iterations += 1
            assert await responses == [b"ok"] * 8
        # An iteration has at most one quantum of reads per connection, and the turns.
        assert iterations > used_ns / (8 * 2 * QUANTUM_NS + 2 * TURN_NS)

    run_scenario(scenario, connections_max=20)


def test_connection_above_the_cpu_limit_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_allowance, "BURST_NS", 20_000_000)

    async def scenario(server: Server) -> None:
        async with server.connected() as (reader, writer), server.connected() as (other, to_other):
            writer.write(chunked(b"a", 100_000))
            assert await is_closed(reader)
            assert server.limits.ended == {"cpu_time": 1}
            to_other.write(chunked(bytes(1 << 16), 100))
            assert await read_response(other) == b"ok"

    run_scenario(scenario)


@pytest.mark.parametrize("count", [framing.FIELDS_MAX - 20, 1000, 20_000])
@pytest.mark.parametrize("where", ["head", "trailers"])
def test_number_of_header_fields_is_limited(count: int, where: str) -> None:
    fields = b"a:\r\n" * count
    sent = {
        "head": GET[:-2] + fields + b"\r\n",
        "trailers": chunked(b"a", 1)[:-2] + fields + b"\r\n",
    }[where]

    async def scenario(server: Server) -> None:
        async with server.connected() as (reader, writer):
            writer.write(sent)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split()[1] == (b"200" if count < 1000 else b"400")

    run_scenario(scenario)


def test_lines_after_a_body_do_not_count_as_its_trailers() -> None:
    """Regression test: they rejected the request, whose own trailers are empty."""

    async def scenario(server: Server) -> None:
        async with server.connected() as (reader, writer):
            writer.write(chunked(b"a", 1) + b"x\r\n" * 200 + b"\r\n")
            assert b" 200 " in await reader.readuntil(b"\r\n")

    run_scenario(scenario)


def test_length_of_a_chunk_line_is_limited() -> None:
    async def scenario(server: Server) -> None:
        async with server.connected() as (reader, writer):
            for length, status in ((100, b" 200 "), (10_000, b" 400 ")):
                line = b"\r\n\r\n1;" + b"x" * length + b"\r\n"
                writer.write(chunked(b"a", 1).replace(b"\r\n\r\n1\r\n", line))
                assert status in await reader.readuntil(b"\r\n")
                await reader.readuntil(b"\r\n\r\n")
                await reader.read(2)

    run_scenario(scenario)


def test_pipelined_requests_are_charged_to_the_receive_budget() -> None:
    """Connections with the most pipelined bytes are closed above the limit."""

    async def scenario(server: Server) -> None:
        server.app.release.clear()
        budget, most = server.limits.budget, 0
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(8):
                _, writer = await stack.enter_async_context(server.connected())
                writer.write(GET)
                await asyncio.sleep(0.02)
                writer.write(GET * 3000)
                await asyncio.sleep(0.05)
                most = max(most, budget.used_bytes)
            assert 1 << 17 < most <= budget.limit_bytes
            assert server.limits.ended["receive_memory"] >= 3

    run_scenario(scenario, receive_bytes=1 << 18)


def test_unread_body_of_tiny_chunks_is_discarded() -> None:
    async def scenario(server: Server) -> None:
        server.app.is_reading = False
        async with server.connected() as (reader, writer):
            writer.write(chunked(b"a", 10_000) + GET)
            assert await read_response(reader) == b"ok"
            assert await read_response(reader) == b"ok"

    run_scenario(scenario)


def test_connection_is_removed_if_the_client_aborts_during_tiny_chunks() -> None:
    async def scenario(server: Server) -> None:
        async with server.connected() as (_, writer):
            writer.write(chunked(b"a", 50_000)[:-5])
            await server.app.requested.wait()
            writer.transport.abort()
        while server.http.connections or not server.app.disconnects:
            await asyncio.sleep(0.01)
        async with server.connected() as (reader, writer):
            writer.write(GET)
            assert await read_response(reader) == b"ok"

    run_scenario(scenario)


def test_large_body_is_delivered_in_large_parts() -> None:
    """The same applies to a body in chunks of 4 KiB."""

    async def scenario(server: Server) -> None:
        length = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % LARGE_BYTES
        for sent in (length + bytes(LARGE_BYTES), chunked(bytes(4096), LARGE_BYTES >> 12)):
            server.app.chunks.clear()
            async with server.connected() as (reader, writer):
                writer.write(sent)
                assert await read_response(reader) == b"ok"
            assert sum(server.app.chunks) == LARGE_BYTES
            assert max(server.app.chunks) > 1 << 16

    run_scenario(scenario)


def test_reads_of_one_iteration_share_one_quantum(monkeypatch: pytest.MonkeyPatch) -> None:
    """libuv reads one socket several times in one loop iteration."""
    Clock(monkeypatch, QUANTUM_NS // 20)

    async def scenario(server: Server) -> None:
        async with server.connected() as (reader, writer):
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n")
            while not any(each.call for each in server.http.connections):
                await asyncio.sleep(0.01)
            (connection,) = server.http.connections
            count = 0
            while not connection._is_waiting and count < 20:
                connection.data_received(bytes(50_000))
                count += 1
            assert 2 <= count <= 10
            while connection._is_waiting:
                await asyncio.sleep(0)
            writer.write(bytes(1_000_000 - count * 50_000))
            assert await read_response(reader) == b"ok"

    run_scenario(scenario)


@pytest.mark.parametrize("count", [1, 2])
def test_half_closed_client_receives_its_responses(count: int) -> None:
    """The server closes its half after the last response."""

    async def scenario(server: Server) -> None:
        server.app.release.clear()
        async with server.connected() as (reader, writer):
            writer.write(GET * count)
            await server.app.requested.wait()
            writer.write_eof()
            asyncio.get_running_loop().call_later(0.1, server.app.release.set)
            for _ in range(count):
                assert await read_response(reader) == b"ok"
            assert await reader.read() == b""
        while server.http.connections:
            await asyncio.sleep(0.01)

    run_scenario(scenario)


def test_half_closed_connection_is_closed_after_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A half-closed client may have disconnected. A partial request closes the connection at once;
    during a response, the response timeout applies.
    """
    monkeypatch.setattr(http1_connection, "HALF_CLOSED_S", 0.05)

    async def scenario(server: Server) -> None:
        server.app.release.clear()
        async with server.connected() as (reader, writer):
            writer.write(GET)
            await server.app.requested.wait()
            writer.write_eof()
            assert await is_closed(reader)
            assert not server.http.connections
        server.app.release.set()
        server.app.body = bytes(LARGE_BYTES)
        async with server.connected() as (reader, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(GET)
            writer.write_eof()
            await asyncio.sleep(0.2)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert len(await read_response(reader)) == LARGE_BYTES
        monkeypatch.setattr(http1_connection, "HALF_CLOSED_S", 2 * WITHIN_S)
        async with server.connected() as (reader, writer):
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n")
            writer.write_eof()
            assert await is_closed(reader)

    run_scenario(scenario)


def test_stop_completes_requests_and_closes_idle_connections() -> None:
    async def scenario(server: Server) -> None:
        server.app.release.clear()
        async with server.connected() as (busy, writer), server.connected() as (idle, _):
            writer.write(GET)
            await server.app.requested.wait()

            stopping = asyncio.create_task(server.http.stop(WITHIN_S))
            assert await is_closed(idle)
            with pytest.raises(ConnectionError):
                await asyncio.open_connection(*server.address)
            server.app.release.set()

            assert await read_response(busy) == b"ok"
            assert await is_closed(busy)
            await stopping

    run_scenario(scenario)


def test_stop_aborts_connections_after_the_grace_period() -> None:
    async def scenario(server: Server) -> None:
        async with server.connected() as (reader, writer):
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n")
            await server.app.requested.wait()
            await server.http.stop(0.05)
            assert await is_closed(reader)
            assert server.app.disconnects == 1

    run_scenario(scenario)


def test_unsent_responses_are_counted() -> None:
    async def scenario(server: Server) -> None:
        server.app.body = bytes(LARGE_BYTES)
        async with server.connected() as (reader, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            assert server.http.unsent == 0
            writer.write(GET)
            while not server.http.unsent:
                await asyncio.sleep(0.01)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert await read_response(reader) == server.app.body
            assert server.http.unsent == 0 and len(server.http.connections) == 1

    run_scenario(scenario)


LAST = {
    "HTTP/1.0": GET.replace(b"1.1", b"1.0"),
    "connection: close": GET.replace(b"host: a", b"host: a\r\nconnection: close"),
}


@pytest.mark.parametrize("last", LAST.values(), ids=LAST)
@pytest.mark.parametrize("trailing", [b"\r\n", b"X", GET], ids=["line", "byte", "request"])
def test_bytes_after_the_last_request_do_not_replace_its_response(
    last: bytes, trailing: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression test: a 400 was sent in place of the response, which failed with a traceback."""

    async def scenario(server: Server) -> None:
        server.app.release.clear()
        async with server.connected() as (reader, writer):
            writer.write(last)
            await server.app.requested.wait()
            writer.write(trailing)
            await asyncio.sleep(0.01)
            server.app.release.set()
            assert await read_response(reader) == b"ok"
            assert await is_closed(reader)

    run_scenario(scenario)
    assert "Traceback" not in caplog.text


HOST = b"host: a\r\n"
POST = b"POST / HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
ACCEPTED = {
    "length": (POST + b"content-length: 2\r\n\r\nok", 2),
    "spaces around a value": (POST + b"content-length: \t 2 \t\r\n\r\nok", 2),
    "no length": (POST + b"\r\n", 0),
    "chunks": (CHUNKED + b"1\r\no\r\n01\r\nk\r\n0\r\n\r\n", 2),
    "extension": (CHUNKED + b'2;a="b c";d\r\nok\r\n0;x\r\n\r\n', 2),
    "trailers": (CHUNKED + b"2\r\nok\r\n0\r\nx: 1\r\ny: 2\r\n\r\n", 2),
    "LF in a body": (POST + b"content-length: 4\r\n\r\n\n\n\r ", 4),
    "HTTP/1.0": (b"POST / HTTP/1.0\r\ncontent-length: 2\r\n\r\nok", 2),
}
REJECTED = {
    "LF only": (GET.replace(b"\r", b""), "CRLF"),
    "LF after the request line": (GET.replace(b"\r\n", b"\n", 1), "CRLF"),
    "LF after a field": (GET.replace(b"host: a\r\n", b"host: a\nx: 1\r\n"), "CRLF"),
    "LF before the end": (POST + b"x: 1\r\n\n", "CRLF"),
    "LF at the end": (POST + b"x: 1\n\r\n", "CRLF"),
    "CR in a value": (GET.replace(b"host: a", b"host: a\rx: 1"), "CRLF"),
    "CR before CRLF": (POST + b"x: 1\r\r\n\r\n", "CRLF"),
    "CR after a name": (POST + b"x\r: 1\r\n\r\n", "CRLF"),
    "folded coding": (POST + b"transfer-encoding:\r\n chunked\r\n\r\n0\r\n\r\n", "obs-fold"),
    "folded by a tab": (POST + b"x: 1\r\n\ty\r\n\r\n", "obs-fold"),
    "fold without text": (POST + b"x: 1\r\n \r\n\r\n", "obs-fold"),
    "fold of the request line": (b"POST / HTTP/1.1\r\n x\r\n" + HOST + b"\r\n", "obs-fold"),
    "HTTP/0.9": (b"GET /\r\n\r\n", ""),
    "HTTP/0.9 with a version": (GET.replace(b"1.1", b"0.9"), "HTTP/0.9"),
    "HTTP/9": (GET.replace(b"1.1", b"9"), ""),
    "HTTP/9.0": (GET.replace(b"1.1", b"9.0"), "HTTP/9.0"),
    "HTTP/1.2": (GET.replace(b"1.1", b"1.2"), "HTTP/1.2"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/2.0"),
    "two spaces": (GET.replace(b" /", b"  /"), ""),
    "two lengths": (POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\nok", "repeated"),
    "one length twice": (POST + b"content-length: 2\r\nContent-Length: 2\r\n\r\nok", "repeated"),
    "list of lengths": (POST + b"content-length: 2, 2\r\n\r\nok", "number"),
    "length with a sign": (POST + b"content-length: +2\r\n\r\nok", "number"),
    "length in hex": (POST + b"content-length: 0x2\r\n\r\nok", "number"),
    "no digits": (POST + b"content-length:\r\n\r\nok", "number"),
    "space before the colon": (POST + b"content-length : 2\r\n\r\nok", ""),
    "coding and space": (POST + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n", ""),
    "two codings": (CHUNKED[:-2] + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", ""),
    "list of codings": (POST + b"transfer-encoding: x, chunked\r\n\r\n0\r\n\r\n", ""),
    "coding and length": (
        CHUNKED[:-2] + b"content-length: 5\r\n\r\n0\r\n\r\n",
        "Content-Length with",
    ),
    "coding with HTTP/1.0": (CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n", "HTTP/1.0"),
    "NUL": (POST + b"x: \0\r\n\r\n", ""),
}
REJECTED_CHUNKS = {
    "LF after the size": b"2\nok\r\n0\r\n\r\n",
    "LF in the extension": b"2;\nok\r\n0\r\n\r\n",
    "CR in the extension": b"2;a\rb\r\nok\r\n0\r\n\r\n",
    "space after the size": b"2 \r\nok\r\n0\r\n\r\n",
    "space before the size": b" 2\r\nok\r\n0\r\n\r\n",
    "sign": b"+2\r\nok\r\n0\r\n\r\n",
    "prefix": b"0x2\r\nok\r\n0\r\n\r\n",
    "no size": b"\r\nok\r\n0\r\n\r\n",
    "LF after the data": b"2\r\nok\n0\r\n\r\n",
    "data too long": b"2\r\nokk\r\n0\r\n\r\n",
    "LF after the last": b"2\r\nok\r\n0\r\n\n",
    "LF in the trailers": b"2\r\nok\r\n0\r\nx: 1\n\r\n",
    "folded trailer": b"2\r\nok\r\n0\r\nx: 1\r\n y\r\n\r\n",
    "extensions": b"1;%b\r\no\r\n" % (b"x" * 4000) * 5,
}


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(("raw", "size"), ACCEPTED.values(), ids=ACCEPTED)
def test_valid_framing_is_accepted(raw: bytes, size: int, is_split: bool) -> None:
    async def scenario(server: Server) -> None:
        async with server.connected() as (reader, writer):
            for at in range(len(raw)) if is_split else ():
                writer.write(raw[at : at + 1])
                await asyncio.sleep(0)
            writer.write(b"" if is_split else raw)
            assert await read_response(reader) == b"ok"
            if b"HTTP/1.1" in raw:  # Nothing of the first request is left.
                writer.write(GET)
                assert await read_response(reader) == b"ok"
            assert sum(server.app.chunks) == size

    run_scenario(scenario)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(("raw", "problem"), REJECTED.values(), ids=REJECTED)
def test_conflicting_or_obsolete_framing_is_rejected(
    raw: bytes, problem: str, is_split: bool
) -> None:
    """A proxy may read another request, so none reaches the application."""

    async def scenario(server: Server) -> None:
        async with server.connected() as (reader, writer):
            for at in range(len(raw)) if is_split else ():
                writer.write(raw[at : at + 1])
                await asyncio.sleep(0)
            writer.write(GET if is_split else raw + GET)
            response = b""
            # The rest of a head that is rejected early resets the connection.
            with contextlib.suppress(ConnectionError) if is_split else contextlib.nullcontext():
                response = await reader.read()
            assert server.http.connections == set() and not server.app.chunks
        if is_split and not response:
            return
        status = b"505" if problem.startswith("HTTP/") and b"chunked" not in raw else b"400"
        assert response.startswith(b"HTTP/1.1 %b " % status)
        assert response.count(b"content-type") == 1
        assert b'"code":"malformed"' in response and problem.encode() in response

    run_scenario(scenario)


@pytest.mark.parametrize("chunks", REJECTED_CHUNKS.values(), ids=REJECTED_CHUNKS)
def test_malformed_chunks_end_the_connection(chunks: bytes) -> None:
    async def scenario(server: Server) -> None:
        server.app.release.clear()  # No response before the error.
        async with server.connected() as (reader, writer):
            writer.write(CHUNKED + chunks + GET)
            response = await reader.read()
        assert response.startswith(b"HTTP/1.1 400 ")
        assert response.count(b"content-type") == 1
        assert len(server.app.is_surplus) == 1

    run_scenario(scenario)


@pytest.mark.parametrize("method", [b"HEAD", b"POST"])
@pytest.mark.parametrize(
    "rest",
    [
        b"transfer-encoding: chunked\r\n\r\nx",
        b"transfer-encoding: chunked\r\ncontent-length: 1\r\n\r\n",
    ],
    ids=["malformed body", "two lengths"],
)
def test_malformed_request_gets_status_400_for_any_method(method: bytes, rest: bytes) -> None:
    """A response to HEAD has no body: sending one failed in the event loop."""

    async def scenario(server: Server) -> None:
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        async with server.connected() as (reader, writer):
            writer.write(method + b" / HTTP/1.1\r\nhost: a\r\n" + rest + b"\r\n")
            raw = await reader.read()
        assert raw.startswith(b"HTTP/1.1 400 ") and not errors
        assert (b"}" in raw) == (method == b"POST")

    run_scenario(scenario)
