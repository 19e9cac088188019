"""HTTP/1.1 ports for frontends: uvicorn's protocol on the gateway's own loop and sockets.

uvicorn takes requests apart and runs an application for each. What it leaves open is closed here:
a connection that says nothing, or takes nothing of its answer, ends; there are so many and no more.
A body in very many chunks is taken apart in turns, between which the loop serves the others.

Runs on: gateway loop. Source: RFC 9112.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque

import h11
import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from iskander.errors import MalformedInput
from iskander.gateway.access.handshakes import Door

QUIET_S = 60.0
"""How long a connection may be without the whole head of a request."""
STALL_S = 30.0
"""How long a client may take nothing of an answer that is larger than the socket's buffers."""
LINGER_S = 5.0
"""How long the rest of a body that was refused is read and thrown away, so that its client, which
is still sending, gets to see the answer."""
HALF_CLOSED_S = 1.0
"""How long an answer may take to begin whose client sends no more. It waits for that, or has left:
the two cannot be told apart before something is sent."""
CHUNKS_A_TURN = 256
"""Pieces of a body, of one byte or of many, that are taken in one turn: about a millisecond. What
a read brings of an ordinary body is one piece."""
HEAD_BYTES_MAX = 16_384
CONNECTIONS_SLACK = 64
"""Connections beyond the limit whose requests are answered, with a refusal; more are closed."""
BACKLOG = 1024
_STOP_TURN_S = 0.01
_ABORT_S = 1.0

_MALFORMED = msgspec.json.encode(
    {
        "error": "this is not HTTP/1.1, or not as it may be",
        "code": MalformedInput.code,
        "fault": MalformedInput.fault,
        "retryable": MalformedInput.retryable,
    }
)


class Http1Port:
    """Listens, and gives requests to an application.

    Args:
        app: Answers them. It looks at `is_full` itself.
        connections_max: Connections that are served at once.
        tls: What they are spoken to with; None: in the clear.
    """

    def __init__(
        self, app: ASGIApp, connections_max: int, tls: ssl.SSLContext | None = None
    ) -> None:
        self._tls = tls
        self._connections_max = connections_max
        self._state = ServerState()
        self._turns = _Turns()
        self._servers: list[asyncio.Server | Door] = []
        # A failure of the application is logged by our own handlers and answered with a bare 500.
        self._config = uvicorn.Config(
            app,
            ws="none",
            loop="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=int(QUIET_S),
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        )
        self._config.load()

    @property
    def connections(self) -> int:
        """Those that are open."""
        return len(self._state.connections)

    @property
    def is_full(self) -> bool:
        """Whether there are more connections than are served."""
        return self.connections > self._connections_max

    @property
    def unsent(self) -> int:
        """Connections whose clients have not read all of their answers."""
        open_ones = self._state.connections
        return sum(each.transport.get_write_buffer_size() > 0 for each in open_ones)

    async def listen(self, bound: socket.socket) -> None:
        """Take connections on a socket that is bound."""
        loop = asyncio.get_running_loop()
        self._servers.append(
            await loop.create_server(self._connect, sock=bound, backlog=BACKLOG)
            if self._tls is None
            else Door(bound, self._tls, self._connect, BACKLOG)
        )

    def close_door(self) -> None:
        """Take no more connections; those that are open go on."""
        for server in self._servers:
            server.close()

    async def stop(self, grace_s: float) -> None:
        """Stop listening, and end what is still open after `grace_s`."""
        self.close_door()
        connections = self._state.connections
        for connection in list(connections):
            connection.shutdown()
        await self._wait_for_clients(grace_s)
        for connection in list(connections):
            connection.transport.abort()
        await self._wait_for_clients(_ABORT_S)

    async def _wait_for_clients(self, wait_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._state.connections or self._state.tasks:
                    await asyncio.sleep(_STOP_TURN_S)

    def _connect(self) -> _Connection:
        most = self._connections_max + CONNECTIONS_SLACK
        return _Connection(self._config, self._state, most, self._turns)


class _Turns:
    """Connections of which something is left over; a turn of the loop goes on with one of them."""

    def __init__(self) -> None:
        self._waiting: deque[_Connection] = deque()

    def ask(self, connection: _Connection) -> None:
        """Have `go_on` called, once."""
        self._waiting.append(connection)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        try:
            self._waiting[0].go_on()
        finally:
            self._waiting.popleft()
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._run)


class _Flow(FlowControl):
    """Reading goes on once the application has taken what there is, and nothing is left over."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_held = False

    def hold(self) -> None:
        """Something is left over."""
        self._is_held = True
        self._transport.pause_reading()

    def let_go(self) -> None:
        """Nothing is any more."""
        self._is_held = False
        if not self.read_paused:
            self._transport.resume_reading()

    def resume_reading(self) -> None:
        if self._is_held:
            self.read_paused = False
        else:
            super().resume_reading()


class _Parser(h11.Connection):
    """Says that it needs more, where it has given as many pieces of a body as one turn may have.

    Attributes:
        left: Pieces that it gives until then.
    """

    left = CHUNKS_A_TURN

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.left == 0:
            return h11.NEED_DATA
        event = super().next_event()
        if type(event) is h11.Data:
            self.left -= 1
        elif type(event) is h11.Request and _is_two_lengths(event):
            raise h11.RemoteProtocolError("two lengths")
        return event


def _is_two_lengths(request: h11.Request) -> bool:
    """Whether a proxy on the way may have read another body than this server would.

    Source: RFC 9112, section 6.1.
    """
    names = {name for name, _ in request.headers}
    return b"content-length" in names and b"transfer-encoding" in names


class _Connection(H11Protocol):
    """One connection, with the time that it may be quiet or not read."""

    conn: _Parser
    flow: _Flow

    def __init__(
        self, config: uvicorn.Config, state: ServerState, most: int, turns: _Turns
    ) -> None:
        super().__init__(config, state, {})
        self.conn = _Parser(h11.SERVER, HEAD_BYTES_MAX)
        self._most = most
        self._turns = turns
        self._is_behind = False
        self._quiet: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._half_closed: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        if len(self.connections) > self._most:
            transport.abort()
        else:
            self._await_request(QUIET_S)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._quiet, self._stalled, self._half_closed):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_behind:
            self.conn.receive_data(data)
            self.flow.hold()
        else:
            super().data_received(data)
            self._note_request()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends no more; whether it gets the answer to what it has sent.

        With TLS there is no such thing.
        """
        cycle = self.cycle
        if self.scheme == "https" or cycle is None or cycle.more_body or cycle.response_complete:
            return None
        if self._half_closed is None:
            self._half_closed = self.loop.call_later(HALF_CLOSED_S, self._leave)
        return True

    def handle_events(self) -> None:
        """As much of what was read as one turn may have."""
        self.conn.left = CHUNKS_A_TURN
        super().handle_events()
        if self.conn.left == 0 and not self.transport.is_closing():
            self.flow.hold()
            if not self._is_behind:
                self._is_behind = True
                self._turns.ask(self)

    def go_on(self) -> None:
        """Take the next of what was left over."""
        self._is_behind = False
        if self.transport.is_closing():
            return
        self.handle_events()
        self._note_request()
        if not self._is_behind and not self.transport.is_closing():
            self.flow.let_go()

    def on_response_complete(self) -> None:
        is_unread = self.conn.their_state is h11.SEND_BODY
        self._await_request(LINGER_S if is_unread else QUIET_S)
        super().on_response_complete()
        self._note_request()
        if self._half_closed is not None and self.cycle.response_complete:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        del msg  # In uvicorn's words, and no JSON.
        cycle = self.cycle
        if cycle is not None and not (cycle.more_body or cycle.response_complete):
            return  # It is behind the last request, which is whole and gets its answer.
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # An answer has begun, or was the last.
            return
        headers = [("content-type", "application/json"), ("connection", "close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=_MALFORMED),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
        super().resume_writing()

    def _leave(self) -> None:
        """End a connection whose client has perhaps left; not amid an answer, which it may read."""
        if self.cycle.response_started:
            self._half_closed = self.loop.call_later(HALF_CLOSED_S, self._leave)
        else:
            self.transport.abort()

    def _await_request(self, wait_s: float) -> None:
        if self._quiet is not None:
            self._quiet.cancel()
        if not self.transport.is_closing():
            self._quiet = self.loop.call_later(wait_s, self.transport.abort)

    def _note_request(self) -> None:
        """Once its head is there, time is the application's business."""
        if self.cycle is not None and not self.cycle.response_complete and self._quiet is not None:
            self._quiet.cancel()
