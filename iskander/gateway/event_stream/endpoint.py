"""`/events` at the admin port: authentication, limits, and the response of a subscriber.

A response ends with the stream, the client, its grant, or the age of its connection. Timeouts and
limits of unsent bytes are those of the connection; a client that does not read delays only itself,
and loses events.

Runs on: gateway loop, and the parent's loop. Source: WHATWG HTML, section 9.2 "Server-sent events".
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl

import msgspec

from iskander.config.events import EventsConfig
from iskander.errors import IskanderError, MalformedInput, Overloaded, Unauthenticated
from iskander.foundation.logs import network as log
from iskander.gateway.auth.grants import Authenticator, Grant
from iskander.gateway.event_stream.buffer import Reader
from iskander.gateway.event_stream.messages import (
    COMPLETION,
    HEARTBEAT_S,
    LOST,
    OPENING,
    format_heartbeat,
)
from iskander.gateway.event_stream.publisher import Publisher

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

TOPICS_MAX: Final = 256
TOPIC: Final = "topic"
CHUNK_BYTES: Final = 32_768
"""Bytes of one write, and with the connection's write buffer those that wait for a subscriber."""
CACHED_TOPICS_MAX: Final = 1024
RETRY_AFTER_S: Final = 5
CHALLENGES: Final = b'Basic realm="iskander", Bearer'
"""A browser asks for user name and password, sends them again, and needs no other way."""
HEADERS: Final = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"connection", b"close"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
)
_LAST_ID: Final = b"last-event-id"


class EventEndpoint:
    """ASGI application of the stream.

    Attributes:
        streams_max: Open subscriptions; further ones are rejected.
    """

    def __init__(
        self, publisher: Publisher, config: EventsConfig, authenticator: Authenticator
    ) -> None:
        self._authenticator = authenticator
        self._publisher = publisher
        self.streams_max = config.subscribers
        # Of subscribers with more than a chunk to send: one of them in each loop iteration.
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a subscriber with the stream, or with an error."""
        try:
            _require_no_body(scope)
            topics = read_topics(scope["query_string"])
            grant = await self._authenticate(scope)
            if self._publisher.readers >= self.streams_max:
                limit = f"limit {self.streams_max} (`events.subscribers`)"
                log.subscriber_rejected(limit=self.streams_max)
                raise Overloaded(f"{self._publisher.readers} subscribers of events, {limit}")
        except IskanderError as error:
            await _send_error(error, send)
            return
        if scope["method"] == "HEAD":
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await send({"type": "http.response.body", "body": b""})
            return
        selection = Selection(topics, grant)
        last_id = next((value for name, value in scope["headers"] if name == _LAST_ID), b"")
        buffer = self._publisher.buffer
        reader = buffer.open(selection.includes, last_id.decode("latin-1"))
        self._publisher.readers += 1
        gone = asyncio.ensure_future(_wait_until_gone(receive))
        try:
            scope["mark_endless"](gone.cancel)
            await self._stream(reader, selection, gone, send)
        finally:
            gone.cancel()
            self._publisher.readers -= 1
            buffer.close(reader)

    async def _authenticate(self, scope: Scope) -> Grant:
        """Return the grant of a caller with a token, if the server has tokens."""
        headers = [(name.decode("latin-1"), v.decode("latin-1")) for name, v in scope["headers"]]
        grant = await self._authenticator.authenticate(headers, origin=scope["origin"])
        grant.require_token()
        return grant

    async def _stream(
        self, reader: Reader, selection: Selection, gone: asyncio.Future[None], send: Send
    ) -> None:
        """Send the response, in each loop iteration at most `CHUNK_BYTES`."""
        publisher, time = self._publisher, asyncio.get_running_loop().time
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        text, sent_s = OPENING + format_heartbeat(reader.position), 0.0
        while not gone.done() and selection.is_valid():
            arrived = publisher.arrived
            text += reader.take(CHUNK_BYTES)
            if not text and time() - sent_s >= HEARTBEAT_S:
                text = format_heartbeat(reader.position)
            if text:
                await send({"type": "http.response.body", "body": text, "more_body": True})
                text, sent_s = b"", time()
            if reader.is_behind:
                async with self._turn:
                    await asyncio.sleep(0)
            elif publisher.is_ended:
                break
            else:
                left_s = max(sent_s + HEARTBEAT_S - time(), 0)
                waits = (arrived, gone)
                await asyncio.wait(waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        await send({"type": "http.response.body", "body": b""})


class Selection:
    """Topics that a subscriber has selected and may see."""

    def __init__(self, begins: tuple[str, ...], grant: Grant) -> None:
        self._begins, self._grant = begins or ("",), grant
        self._permitted: object = None
        self._known: dict[str, bool] = {}

    def is_valid(self) -> bool:
        """Apply a change of the token file; return whether the token is still valid."""
        permitted = self._grant.scope, self._grant.is_operator
        if permitted != self._permitted:
            self._permitted = permitted
            self._known.clear()
        return self._grant.is_valid

    def includes(self, topic: str) -> bool:
        """Whether the subscriber gets the events of a topic."""
        is_included = self._known.get(topic)
        if is_included is None:
            if len(self._known) >= CACHED_TOPICS_MAX:
                self._known.clear()
            is_included = self._known[topic] = self._includes(topic)
        return is_included

    def _includes(self, topic: str) -> bool:
        if topic == LOST:
            return True
        kind, _, rest = topic.partition("/")
        if kind == COMPLETION:
            may_see = self._grant.may_call(rest.rpartition("/")[0])
        else:
            may_see = self._grant.is_operator
        return may_see and topic.startswith(self._begins)


def read_topics(query: bytes) -> tuple[str, ...]:
    """Return the values of `topic`. Raises MalformedInput for another parameter, or too many."""
    try:
        pairs = parse_qsl(query.decode("ascii"), True, max_num_fields=TOPICS_MAX, errors="strict")
    except ValueError:
        problem = f"query of `/events`: expected at most {TOPICS_MAX} parameters `topic=BEGIN`"
        raise MalformedInput(problem) from None
    unknown = next((name for name, _ in pairs if name != TOPIC), None)
    if unknown is not None:
        problem = f"query of `/events` has `{unknown[:100]}`; expected `topic=BEGIN`, repeatable"
        raise MalformedInput(problem)
    return tuple(value for _, value in pairs)


def _require_no_body(scope: Scope) -> None:
    """Raise MalformedInput for a request with a body, which the stream would read without end."""
    for name, value in scope["headers"]:
        if name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0")):
            raise MalformedInput("a request for events has no body")


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_error(error: IskanderError, send: Send) -> None:
    detail = error.to_wire()
    headers = [(b"content-type", b"application/json"), (b"x-content-type-options", b"nosniff")]
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", CHALLENGES))
    elif isinstance(error, Overloaded):
        headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
    body = msgspec.json.encode({"error": detail.pop("message"), **detail})
    headers.append((b"content-length", b"%d" % len(body)))
    status = error.http_status
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
