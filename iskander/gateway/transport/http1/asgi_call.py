"""One request and its response, as an ASGI application receives and sends them.

Runs on: gateway loop. Source: ASGI 3.0, HTTP connection scope.
"""

from __future__ import annotations

import asyncio
import http
from typing import TYPE_CHECKING, Final

import h11
from starlette.types import ASGIApp, Message, Scope

from iskander.foundation.logs import network as log

if TYPE_CHECKING:
    from iskander.gateway.transport.http1.connection import Connection

_PHRASES: Final = {status.value: status.phrase.encode() for status in http.HTTPStatus}
_FAILED_BODY: Final = b"Internal Server Error"
_FAILED_HEADERS: Final = [
    (b"content-type", b"text/plain; charset=utf-8"),
    (b"content-length", str(len(_FAILED_BODY)).encode()),
    (b"connection", b"close"),
]


class AsgiCall:
    """State of a request and its response.

    Attributes:
        body: Bytes of the body that the application has not received yet.
        has_more_body: Whether a part of the body is still missing.
        has_response: Whether the application has started the response.
        is_complete: Whether the response is complete.
        is_disconnected: Whether the client gets no more of the response.
    """

    __slots__ = (
        "_changed", "_connection", "_scope", "body", "has_more_body", "has_response", "is_complete",
        "is_disconnected",
    )  # fmt: skip

    def __init__(self, connection: Connection, scope: Scope) -> None:
        self._connection = connection
        self._scope = scope
        self._changed = asyncio.Event()
        self.body = bytearray()
        self.has_more_body = True
        self.has_response = self.is_complete = self.is_disconnected = False

    def add_body(self, data: bytes | bytearray) -> None:
        """Append a part of the body, which is dropped after the response."""
        if not self.is_complete:
            self.body += data
            self._changed.set()

    def end_body(self) -> None:
        """Note the end of the body."""
        self.has_more_body = False
        self._changed.set()

    def disconnect(self) -> None:
        """Tell the application that the client is gone."""
        self.is_disconnected = True
        self._changed.set()

    async def run(self, app: ASGIApp) -> None:
        """Run the application; if it fails, respond with status 500 or close the connection."""
        try:
            await app(self._scope, self._receive, self._send)
        except Exception as failure:
            log.http_application_failed(error=failure)
        if self.is_complete or self.is_disconnected:
            return
        if self.has_response:
            self._connection.transport.close()
            return
        await self._send({"type": "http.response.start", "status": 500, "headers": _FAILED_HEADERS})
        await self._send({"type": "http.response.body", "body": _FAILED_BODY})

    async def _receive(self) -> Message:
        if not (self.is_disconnected or self.is_complete):
            self._connection.send_continue()
            await self._changed.wait()
            self._changed.clear()
        if self.is_disconnected or self.is_complete:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        self._connection.on_body_received()
        return {"type": "http.request", "body": body, "more_body": self.has_more_body}

    async def _send(self, message: Message) -> None:
        await self._connection.wait_writable()
        if self.is_disconnected:
            return
        expected = "http.response.body" if self.has_response else "http.response.start"
        if message["type"] != expected or self.is_complete:
            raise RuntimeError(f"unexpected ASGI message {message['type']}")
        if not self.has_response:
            status = message["status"]
            headers = list(message.get("headers", ()))
            reason = _PHRASES.get(status, b"")
            self._connection.send(h11.Response(status_code=status, headers=headers, reason=reason))
            self.has_response = True
            return
        body = message.get("body", b"")
        if body and self._scope["method"] != "HEAD":
            self._connection.send(h11.Data(data=body))
        if not message.get("more_body", False):
            self._connection.send(h11.EndOfMessage())
            self.is_complete = True
            self._changed.set()
            self._connection.on_response_complete()
