"""`/events` at a real admin port, and its application with a client that does not read."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from iskander.config.auth import AccessConfig
from iskander.config.events import EventsConfig
from iskander.config.schema import Config, ServerConfig, TimeoutsConfig
from iskander.gateway.auth.grants import Authenticator
from iskander.gateway.auth.origin import UNKNOWN_ORIGIN
from iskander.gateway.auth.tokens import add_token
from iskander.gateway.event_stream import endpoint as module
from iskander.gateway.event_stream import publisher as publishing
from iskander.gateway.event_stream.endpoint import CHUNK_BYTES, EventEndpoint
from iskander.gateway.event_stream.messages import Completion, SentEvent, encode, parse_event
from iskander.gateway.event_stream.publisher import Publisher
from iskander.gateway.telemetry import admin
from iskander.gateway.telemetry.admin import AdminServer
from iskander.gateway.transport import connection_listener

WITHIN_S = 10.0
BUFFER_BYTES = 65_536
RESPONSE_S = 0.5

Message = dict[str, Any]


class Served:
    """An admin port with a stream, in the running loop."""

    def __init__(self, access: AccessConfig, *, max_age_s: float = 0, **settings: int) -> None:
        config = EventsConfig(enabled=True, **{"buffer_bytes": BUFFER_BYTES, **settings})
        self.publisher = Publisher(config)
        self.authenticator = Authenticator(access, lambda: None)
        self.endpoint = EventEndpoint(self.publisher, config, self.authenticator)
        served = Config(
            timeouts=TimeoutsConfig(response_s=RESPONSE_S),
            server=ServerConfig(max_connection_age_s=max_age_s),
        )
        self.server = AdminServer(
            "127.0.0.1:0", list, _no_metrics, config=served, events=self.endpoint
        )
        self.address = ""
        self.streams: list[Stream] = []

    def complete(self, model: str, **fields: Any) -> None:
        """Publish a completed request."""
        event = Completion(
            at_s=1.0, model=model, version="1", protocol="grpc", method="M", **fields
        )
        self.publisher.publish(f"completion/{model}/1", "completion", encode(event))

    async def open(self, path: str = "/events", *, method: str = "GET", **headers: str) -> Stream:
        host, _, port = self.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        self.streams.append(Stream(reader, writer, head))
        return self.streams[-1]


class Stream:
    """A response."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str
    ) -> None:
        self.status = int(head.split()[1])
        self.head = head
        self._reader, self._writer = reader, writer
        self._events: list[SentEvent] = []

    async def event(self) -> SentEvent:
        """The next event with a name."""
        while not self._events:
            text = await self._chunk()
            assert text, "the stream ended"
            found = [parse_event(each) for each in text.decode().split("\n\n")]
            self._events += [each for each in found if each.name]
        return self._events.pop(0)

    async def rest(self) -> bytes:
        """The rest of the stream, whose last chunk has to come."""
        text = b""
        while chunk := await self._chunk():
            text += chunk
        assert await self._reader.read() == b""  # The server closes the connection.
        return text

    async def body(self) -> Any:
        length = int(self.head.split("content-length: ")[1].split("\r\n")[0])
        return json.loads(await self._reader.readexactly(length))

    async def remaining(self) -> bytes:
        """All bytes after the headers, until the server closes the connection."""
        return await asyncio.wait_for(self._reader.read(), WITHIN_S)

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def _chunk(self) -> bytes:
        size = int(await self._reader.readline(), 16)
        text = await self._reader.readexactly(size)
        await self._reader.readline()
        return text


async def _no_metrics(is_openmetrics: bool) -> bytes:
    del is_openmetrics
    return b""


def serve(
    client: Callable[[Served], Awaitable[None]],
    access: AccessConfig = AccessConfig(),  # noqa: B008
    **settings: Any,
) -> None:
    """Run a client against a server, within a timeout."""

    async def run() -> None:
        served = Served(access, **settings)
        served.address = await served.server.start()
        try:
            await client(served)
        finally:
            for stream in served.streams:
                await stream.close()
            await served.publisher.stop()
            await served.server.stop()

    asyncio.run(asyncio.wait_for(run(), WITHIN_S))


def test_events_arrive_in_order_and_the_stream_ends_with_its_publisher() -> None:
    async def client(served: Served) -> None:
        stream = await served.open()
        assert stream.status == 200 and "content-type: text/event-stream" in stream.head
        assert "cache-control: no-store" in stream.head
        for rows in range(3):
            served.complete("m", rows=rows)
        assert [json.loads((await stream.event()).data)["rows"] for _ in range(3)] == [0, 1, 2]
        served.complete("m", rows=3)
        await served.publisher.stop()
        assert b'"rows":3' in await stream.rest()

    serve(client)


def test_topics_are_selected_by_their_begin() -> None:
    async def client(served: Served) -> None:
        stream = await served.open("/events?topic=completion/b/&topic=worker")
        for model in ("a", "b", "bc"):
            served.complete(model)
        served.publisher.publish("worker", "worker", b"{}")
        assert (await stream.event()).topic == "completion/b/1"
        assert (await stream.event()).topic == "worker"

    serve(client)


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("model=m", "query of `/events` has `model`; expected `topic=BEGIN`"),
        ("&".join(["topic=a"] * 257), "expected at most 256 parameters `topic=BEGIN`"),
        ("topic=%ff", "expected at most 256 parameters"),
    ],
)
def test_invalid_query(query: str, text: str) -> None:
    async def client(served: Served) -> None:
        stream = await served.open(f"/events?{query}")
        detail = await stream.body()
        assert stream.status == 400 and detail["code"] == "malformed" and text in detail["error"]

    serve(client)


def test_stream_goes_on_after_the_last_event_of_a_client() -> None:
    async def client(served: Served) -> None:
        first = await served.open()
        served.complete("m", rows=1)
        last = await first.event()
        await first.close()
        for rows in (2, 3):
            served.complete("m", rows=rows)
        again = await served.open(last_event_id=last.position)
        assert [json.loads((await again.event()).data)["rows"] for _ in range(2)] == [2, 3]
        other = await served.open(last_event_id="f" * 16 + "-1")
        assert json.loads((await other.event()).data) == {
            "kind": "lost", "process": None, "lost": None, "reason": "restarted",
        }  # fmt: skip

    serve(client)


def test_subscribers_are_limited_and_a_closed_one_makes_room() -> None:
    async def client(served: Served) -> None:
        first = await served.open()
        second = await served.open()
        assert second.status == 503 and "retry-after: 5" in second.head
        assert "limit 1 (`events.subscribers`)" in (await second.body())["error"]
        await first.close()
        while served.publisher.readers:
            await asyncio.sleep(0.01)
        assert (await served.open()).status == 200

    serve(client, subscribers=1)


def test_head_gets_the_headers_and_takes_no_place() -> None:
    async def client(served: Served) -> None:
        for _ in range(3):
            answer = await served.open(method="HEAD")
            assert answer.status == 200 and "text/event-stream" in answer.head
            assert await answer.remaining() == b""
        assert served.publisher.readers == 0
        assert (await served.open()).status == 200

    serve(client, subscribers=1)


@pytest.mark.parametrize(
    "headers", [{"transfer_encoding": "chunked"}, {"content_length": "5"}], ids=str
)
def test_request_with_a_body_is_rejected(headers: dict[str, str]) -> None:
    """The stream would read the body without end."""

    async def client(served: Served) -> None:
        answer = await served.open(**headers)
        assert answer.status == 400
        assert "has no body" in (await answer.body())["error"]

    serve(client)


def test_heartbeats_have_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that selects rare events goes on from there, and not from its last event."""
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.05)

    async def client(served: Served) -> None:
        stream = await served.open("/events?topic=worker")
        for _ in range(4):
            served.complete("m")
        while b"-4\n" not in (text := await stream._chunk()):
            pass
        assert text.startswith(b": heartbeat\n")

    serve(client)


def test_stream_outlives_the_connections_of_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "CONNECTION_S", 0.2)
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.05)

    async def client(served: Served) -> None:
        stream = await served.open()
        host, _, port = served.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.read() == b""  # A connection without a stream.
        writer.close()
        served.complete("m")
        assert (await stream.event()).name == "completion"

    serve(client)


def test_stream_of_an_old_connection_ends_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abrupt end is an error that some clients do not repeat."""
    monkeypatch.setattr(connection_listener, "CHECK_INTERVAL_S", 0.5)

    async def client(served: Served) -> None:
        stream = await served.open()
        await stream.rest()

    serve(client, max_age_s=0.2)


def test_browser_of_another_site_is_rejected_and_the_own_page_is_not() -> None:
    async def client(served: Served) -> None:
        other = await served.open(sec_fetch_site="cross-site", origin="https://evil.example")
        assert other.status == 403
        own = await served.open(sec_fetch_site="same-origin", sec_fetch_mode="cors")
        assert own.status == 200

    serve(client)


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, str]:
    """Tokens by their names, and the path of their file as `file`."""
    path = tmp_path / "tokens.toml"
    grants = {"team": ("a*",), "operator": ("*",)}
    made = {
        name: add_token(path, name, models, manage=name == "operator")
        for name, models in grants.items()
    }
    return {**made, "file": str(path)}


def test_caller_needs_a_token(tokens: dict[str, str]) -> None:
    async def client(served: Served) -> None:
        for header in ({}, {"authorization": "Bearer no-token"}):
            stream = await served.open(**header)
            assert stream.status == 401
            assert 'www-authenticate: basic realm="iskander", bearer' in stream.head
            assert (await stream.body())["code"] == "unauthenticated"
        basic = base64.b64encode(f"any:{tokens['team']}".encode()).decode()
        for header in (f"Bearer {tokens['team']}", f"Basic {basic}"):
            assert (await served.open(authorization=header)).status == 200

    serve(client, AccessConfig(tokens=tokens["file"]))


def test_anonymous_caller_needs_a_token_too(tokens: dict[str, str]) -> None:
    async def client(served: Served) -> None:
        assert (await served.open()).status == 401

    serve(client, AccessConfig(tokens=tokens["file"], anonymous=("*",)))


def test_caller_sees_its_models_and_an_operator_everything(tokens: dict[str, str]) -> None:
    async def client(served: Served) -> None:
        team = await served.open(authorization=f"Bearer {tokens['team']}")
        operator = await served.open(authorization=f"Bearer {tokens['operator']}")
        served.publisher.publish("worker", "worker", b"{}")
        for model in ("secret", "", "alpha"):
            served.complete(model)
        assert (await team.event()).topic == "completion/alpha/1"
        topics = [(await operator.event()).topic for _ in range(4)]
        assert topics == ["worker", "completion/secret/1", "completion//1", "completion/alpha/1"]

    serve(client, AccessConfig(tokens=tokens["file"]))


def test_revoked_token_ends_its_stream(
    tokens: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.05)

    async def client(served: Served) -> None:
        served.authenticator.start()
        team = await served.open(authorization=f"Bearer {tokens['team']}")
        Path(tokens["file"]).write_text("")
        os.utime(tokens["file"], (1, 1))
        await team.rest()
        served.authenticator.stop()

    serve(client, AccessConfig(tokens=tokens["file"]))


class Client:
    """The two functions of an ASGI connection; it reads while `is_reading` is set."""

    def __init__(self) -> None:
        self.is_reading, self.is_gone = asyncio.Event(), asyncio.Event()
        self.sent: list[bytes] = []

    async def receive(self) -> Message:
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            await self.is_reading.wait()
            self.sent.append(message["body"])

    def events(self) -> list[SentEvent]:
        found = [parse_event(text) for text in b"".join(self.sent).decode().split("\n\n")]
        return [event for event in found if event.name]


def scope() -> Message:
    return {
        "method": "GET",
        "query_string": b"",
        "headers": [],
        "origin": UNKNOWN_ORIGIN,
        "mark_endless": lambda end: None,
    }


def test_slow_reader_has_bounded_memory_and_is_told_its_losses() -> None:
    """While one client does not read, another one gets all events."""

    async def client(served: Served) -> None:
        slow, quick = Client(), Client()
        quick.is_reading.set()
        tasks = [
            asyncio.ensure_future(served.endpoint(scope(), each.receive, each.send))
            for each in (slow, quick)
        ]
        await asyncio.sleep(0)
        sent = 1000
        for rows in range(sent):
            served.complete("m", rows=rows)
            if rows % 50 == 0:
                await asyncio.sleep(publishing.PERIOD_S)
        assert not slow.sent
        slow.is_reading.set()
        await served.publisher.stop()
        await asyncio.gather(*tasks)
        assert len(quick.events()) == sent
        losses = [event for event in slow.events() if event.name == "lost"]
        received = [json.loads(e.data)["rows"] for e in slow.events() if e.name == "completion"]
        lost = [json.loads(event.data) for event in losses]
        assert lost and {each["reason"] for each in lost} == {"slow"}
        assert sum(each["lost"] for each in lost) + len(received) == sent
        assert received == sorted(received) and received[-1] == sent - 1
        assert served.publisher.buffer._bytes <= BUFFER_BYTES
        one = len(encode(Completion(at_s=1.0, protocol="grpc", method="M"))) + 256
        assert max(map(len, slow.sent)) <= CHUNK_BYTES + one
        # Events that come together have one write.
        assert len(quick.sent) < sent / 10

    serve(client)


def test_connection_that_does_not_read_ends_at_the_response_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More bytes than the kernel's buffers of both sockets take."""
    monkeypatch.setattr(connection_listener, "CHECK_INTERVAL_S", 0.5)
    sent_bytes = 16 << 20

    async def client(served: Served) -> None:
        with socket.create_connection(served.address.split(":")) as stalled:
            stalled.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while not served.publisher.readers:
                await asyncio.sleep(0.01)
            for _ in range(sent_bytes // 4096):
                served.publisher.publish("worker", "worker", b'"%b"' % (b"x" * 4096))
            while served.publisher.readers:
                await asyncio.sleep(0.01)
        assert served.publisher.buffer.next == sent_bytes // 4096

    serve(client, buffer_bytes=2 * sent_bytes)


def test_subscribers_that_are_behind_take_turns() -> None:
    """Each loop iteration sends what one of them misses, however many have connected again."""

    async def client(served: Served) -> None:
        start = served.publisher.buffer.position(0).decode()
        for rows in range(4000):
            served.complete("m", rows=rows)
        clients = [Client() for _ in range(20)]
        message = {**scope(), "headers": [(b"last-event-id", start.encode())]}
        for each in clients:
            each.is_reading.set()
        tasks = [
            asyncio.ensure_future(served.endpoint(dict(message), each.receive, each.send))
            for each in clients
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        counts: list[int] = []
        while not all(each.sent and b"-4000\n" in each.sent[-1] for each in clients):
            await asyncio.sleep(0)
            counts.append(sum(len(each.sent) for each in clients))
        steps = [after - before for before, after in pairwise(counts)]
        assert max(steps) <= 2 and sum(steps) > 20
        await served.publisher.stop()
        await asyncio.gather(*tasks)

    serve(client, buffer_bytes=8 << 20)


def test_client_that_is_gone_frees_its_place() -> None:
    async def client(served: Served) -> None:
        gone = Client()
        gone.is_reading.set()
        task = asyncio.ensure_future(served.endpoint(scope(), gone.receive, gone.send))
        await asyncio.sleep(0)
        assert served.publisher.readers == 1
        gone.is_gone.set()
        await task
        assert served.publisher.readers == 0

    serve(client)


def test_port_without_a_stream_says_which_setting_is_missing() -> None:
    async def run() -> None:
        server = AdminServer("127.0.0.1:0", list, _no_metrics)
        host, _, port = (await server.start()).rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await server.stop()
        assert b"404" in answer.split(b"\r\n")[0] and b"`events.enabled`" in answer

    asyncio.run(asyncio.wait_for(run(), WITHIN_S))
