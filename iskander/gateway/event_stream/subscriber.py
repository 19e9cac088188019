"""Client of an event stream: connects again after a lost connection, and goes on there.

Source: WHATWG HTML, section 9.2 "Server-sent events".
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
from collections.abc import Iterator, Sequence
from typing import Final
from urllib.parse import urlencode, urlsplit

import msgspec

from iskander.errors import ConnectionFailed, IskanderError, ProtocolError
from iskander.foundation.clock import NS_PER_S, now_ns, pause_s
from iskander.foundation.decoders import DECODE_ERRORS
from iskander.gateway.event_stream.messages import HEARTBEAT_S, RETRY_MS, SentEvent, read_events

PATH: Final = "/events"
SILENT_S: Final = 3 * HEARTBEAT_S
"""A connection without a byte for this time is lost."""
RETRIES_NS: Final = 60 * NS_PER_S
"""The server is gone if it does not answer for this time."""
ERROR_BYTES_MAX: Final = 65_536
_RETRIED: Final = (429, 502, 503, 504)


class Subscriber:
    """Reads events until `close`.

    Args:
        url: `http://HOST:PORT` or `https://HOST:PORT` of the admin port; `/events` may follow.
        topics: Begins of topics; none: all.
        token: Token of the caller, if the server has tokens.
        tls: Settings of `https`.
    """

    def __init__(
        self,
        url: str,
        topics: Sequence[str] = (),
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ProtocolError(
                f"{url} is no address of an event stream: expected http://HOST:PORT"
            )
        self._url, self._parts, self._tls = url, parts, tls
        query = urlencode([("topic", topic) for topic in topics])
        self._target = PATH + (f"?{query}" if query else "")
        self._headers = {"accept": "text/event-stream"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._connection: http.client.HTTPConnection | None = None
        self._response: http.client.HTTPResponse | None = None

    def events(self) -> Iterator[SentEvent]:
        """Yield events, and `lost` events where some are missing.

        Raises:
            ConnectionFailed: The server cannot be reached, or not again within `RETRIES_NS`.
            IskanderError: The server rejects the subscription.
        """
        response = self._connect()
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                for event in read_events(response.readline):
                    if event.position:
                        self._headers["last-event-id"] = event.position
                    if event.name:
                        yield event
            response = self._reconnect()

    def close(self) -> None:
        """Disconnect."""
        for part in (self._response, self._connection):
            if part is not None:
                part.close()

    def _reconnect(self) -> http.client.HTTPResponse:
        until_ns = now_ns() + RETRIES_NS
        while True:
            pause_s(RETRY_MS / 1000)
            try:
                return self._connect()
            except ConnectionFailed:
                if now_ns() > until_ns:
                    raise

    def _connect(self) -> http.client.HTTPResponse:
        self.close()
        host, port = self._parts.hostname, self._parts.port
        assert host is not None
        if self._parts.scheme == "https":
            tls = self._tls or ssl.create_default_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=SILENT_S, context=tls
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=SILENT_S)
        self._connection = connection
        try:
            connection.request("GET", self._target, headers=self._headers)
            self._response = response = connection.getresponse()
            if response.status == http.client.OK:
                return response
            body = response.read(ERROR_BYTES_MAX)
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionFailed(f"no event stream at {self._url}: {error}") from None
        self.close()
        raise _rejection(self._url, response.status, body)


def _rejection(url: str, status: int, body: bytes) -> IskanderError:
    """Return the error of a response."""
    text = body.decode("utf-8", "replace").strip()
    with contextlib.suppress(*DECODE_ERRORS):
        detail = msgspec.json.decode(body)
        if isinstance(detail, dict):
            error = IskanderError.from_wire({**detail, "message": detail.get("error")})
            if status not in _RETRIED:
                return error
            text = error.message
    return ConnectionFailed(f"no event stream at {url}: status {status}: {text[:500]}")
