"""HTTP/1.1 connections, with `h11` alone and other fragmentations as the references.

An input is the byte stream of a client. The application must receive the requests that `h11` reads
from the unfragmented stream. If `h11` rejects a part, the response is 400 or a closed connection.
Framing that `h11` accepts and others may read in another way ends the stream of requests.
"""

from __future__ import annotations

import asyncio
import logging
import re
import zlib
from random import Random
from typing import Any, NamedTuple

import h11

from fuzz import mutation
from fuzz.serving import LOOP
from iskander.config.auth import AccessConfig
from iskander.config.schema import Config
from iskander.gateway.transport.http1.framing import HEAD_BYTES_MAX
from iskander.gateway.transport.http1.listener import Http1Listener
from iskander.gateway.transport.http1.sites import SitePolicy
from iskander.gateway.transport.limits.connection_limits import ConnectionLimits

EVERY_SITE = SitePolicy(AccessConfig(allowed_hosts=("*",)), "")
ITERATIONS = 300
TURNS = 60
WORDS = [
    "Content-Length: 5", "Content-Length: 5, 5", "Content-Length: +5", "content-length: 0",
    "Transfer-Encoding: chunked", "transfer-encoding: gzip, chunked", "Transfer-Encoding : chunked",
    "Connection: close", "Connection: upgrade", "Upgrade: websocket", "Expect: 100-continue",
    "Host: a", "host: b", " folded", "X: \0", "X: \xff", "5\r\nhello", "0", "-1",
    "ffffffffffffffff", "5;x=y", "GET / HTTP/1.1", "POST /a HTTP/1.0", "GET http://a/b HTTP/1.1",
    "PRI * HTTP/2.0", "CONNECT a:1 HTTP/1.1", "", "", "x" * 300,
]  # fmt: skip


STRICT = re.compile(
    rb"(?i)(?<!\r)\n|\r(?!\n)|\r\n[ \t]|http/(?!1\.1)|content-length:.*(?:\r\n.*content-length:|,)"
    rb"|content-length:[ \t]*\r|\r\n[0-9a-f]+[ \t]+\r|\r\n[0-9a-f]+[ \t]*;",
    re.DOTALL,
)
"""Framing that the server may reject and `h11` accepts."""


class Request(NamedTuple):
    """A complete request."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


def seeds() -> list[bytes]:
    get = b"GET /v2/health/live HTTP/1.1\r\nhost: here\r\n\r\n"
    post = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: here\r\nContent-Length: 5\r\n\r\nhello"
    chunked = b"POST /a?b=%20c HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"
    chunked += b"5\r\nhello\r\n1;x=y\r\n!\r\n0\r\nx-trailer: 1\r\n\r\n"
    small = b"POST /s HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"
    small += b"1\r\nz\r\n" * 400 + b"0\r\n\r\n"
    return [
        get,
        get + post + get,
        chunked + get,
        small + post,
        chunked.replace(b"host: h", b"host: h\r\ncontent-length: 5") + get,
        post.replace(b"Host: here", b"Host: here\r\nExpect: 100-continue"),
        get.replace(b"1.1", b"1.0") + get,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    def change(line: str) -> str:
        if random.randrange(2):
            return random.choice(WORDS)
        at = random.randrange(len(line) + 1)
        return line[:at] + random.choice((" ", ":", "\t", "\n", "\r", "0", "a", "\0")) + line[at:]

    lines = (each.decode("latin-1").split("\r\n") for each in (raw, other))
    changed = mutation.shuffle(*lines, random, change, lambda: random.choice(WORDS))
    return "\r\n".join(changed).encode("latin-1")


def run(raw: bytes) -> None:
    random = Random(zlib.crc32(raw))
    positions = sorted(random.randint(0, len(raw)) for _ in range(random.choice((1, 4, 30))))
    cut = [raw[a:b] for a, b in zip([0, *positions], [*positions, len(raw)], strict=True)]
    cuttings = [[raw], cut]
    if len(raw) < 400:
        cuttings.append([bytes((byte,)) for byte in raw])
    expected, is_rejected = reference(raw)
    for pieces in cuttings:
        actual, written = LOOP.run_until_complete(served(pieces))
        if actual != expected and actual == expected[: len(actual)] and STRICT.search(raw):
            statuses = (b"HTTP/1.1 400", b"HTTP/1.1 505")
            assert any(each in written for each in statuses) or not written
            continue
        assert actual == expected, f"different requests\n{actual}, h11 reads {expected}"
        if is_rejected and not expected:
            final = written.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
            assert final.startswith((b"HTTP/1.1 400", b"HTTP/1.1 505")) or not final


def reference(raw: bytes) -> tuple[list[Request], bool]:
    """The requests in an unfragmented stream, and whether `h11` rejects a part of it."""
    connection = h11.Connection(h11.SERVER, HEAD_BYTES_MAX)
    connection.receive_data(raw)
    requests: list[Request] = []
    head, body = None, b""
    try:
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):
                return requests, False
            if event is h11.PAUSED:
                if connection.our_state is not h11.DONE:
                    return requests, False
                connection.start_next_cycle()
            elif isinstance(event, h11.Request):
                head, body = event, b""
                names = [name for name, _ in event.headers]
                if b"content-length" in names and b"transfer-encoding" in names:
                    return requests, True
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                headers = [(bytes(name), bytes(value)) for name, value in head.headers]
                requests.append(Request(bytes(head.method), bytes(head.target), headers, body))
                connection.send(h11.Response(status_code=404, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is h11.MUST_CLOSE:
                    return requests, False
    except h11.RemoteProtocolError:
        return requests, True


class Transport(asyncio.Transport):
    """A transport that stores written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_over = False
        self.is_read = True
        self.protocol: Any

    def write(self, data: Any) -> None:
        if not self.is_over:
            self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.is_over

    def close(self) -> None:
        if not self.is_over:
            self.is_over = True
            LOOP.call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def get_write_buffer_size(self) -> int:
        return 0


class Tracebacks(logging.Handler):
    """Collects logged exceptions; a client must not cause any."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.errors.append(record.exc_info[1])


async def served(pieces: list[bytes]) -> tuple[list[Request], bytes]:
    """The complete requests of the application, and the bytes sent to the client."""
    requests: list[Request] = []
    failed: list[dict[str, Any]] = []
    LOOP.set_exception_handler(lambda _, context: failed.append(context))
    log, tracebacks = logging.getLogger("iskander.http"), Tracebacks()
    log.addHandler(tracebacks)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        target = scope["raw_path"] + (b"?" if scope["query_string"] else b"")
        target += scope["query_string"]
        method = scope["method"].encode()
        requests.append(Request(method, target, list(scope["headers"]), body))
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 404, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    limits = ConnectionLimits(Config())
    port = Http1Listener(app, 10, limits, sites=EVERY_SITE)
    transport = Transport()
    connection = transport.protocol = port.connection()
    connection.connection_made(transport)
    for piece in pieces:
        for _ in range(TURNS):
            if transport.is_read or transport.is_over:
                break
            await asyncio.sleep(0)
        if transport.is_over:
            break
        if piece:
            connection.data_received(piece)
    for _ in range(TURNS):
        await asyncio.sleep(0)
    transport.close()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not port.connections
    limits.stop()
    log.removeHandler(tracebacks)
    if tracebacks.errors:
        raise AssertionError("the application failed") from tracebacks.errors[0]
    for context in failed:
        raise context.get("exception") or AssertionError(context["message"])
    return requests, transport.written
