"""One HTTP/1.1 connection: its turns, its timeouts, and the memory that it holds.

A read is taken apart for a quantum of time; what is left waits in the turn scheduler, and the
socket is not read meanwhile. Processor time that brings neither requests nor bodies is limited.

Runs on: gateway loop. Source: RFC 9112.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

import h11
import msgspec
import uvicorn
from h11._receivebuffer import ReceiveBuffer
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from iskander.clock import NS_PER_MS, NS_PER_S, now_ns, thread_cpu_ns
from iskander.config.schema import TimeoutsConfig
from iskander.errors import MalformedInput
from iskander.transport.cpu_allowance import CpuAllowance
from iskander.transport.receive_budget import ReceiveBudget
from iskander.transport.turn_scheduler import QUANTUM_NS, ReadBurst, TurnScheduler

LINGER_S = 5.0
"""How long the rest of a body that was refused is read and thrown away, so that its client, which
is still sending, gets to see the answer."""
HALF_CLOSED_S = 1.0
"""How long an answer may take to begin whose client sends no more. It waits for that, or has left:
the two cannot be told apart before something is sent."""
HEAD_BYTES_MAX: Final = 16_384
FIELDS_MAX: Final = 128
"""Lines of a head, or of the trailers of a chunked body: each takes some microseconds."""
CHUNK_LINE_BYTES_MAX: Final = 4096
CLOCK_EVENTS: Final = 8
"""Events of a parser between two looks at the clock."""
REQUEST_CPU_NS: Final = NS_PER_MS
BYTE_CPU_NS: Final = 2
"""Processor time that a request or a byte of a body is granted."""
SHED_BYTES_MIN: Final = 4096
"""Connections that hold less are not ended for want of memory."""

log = logging.getLogger("iskander.http")

_MALFORMED: Final = msgspec.json.encode(
    {
        "error": "this is not HTTP/1.1, or not as it may be",
        "code": MalformedInput.code,
        "fault": MalformedInput.fault,
        "retryable": MalformedInput.retryable,
    }
)


class Host(Protocol):
    """What the connections of one port share.

    Attributes:
        budget: The memory of received bytes.
        timeouts: The settings.
        turns: Where connections wait whose input was not all processed.
        life_s: The longest life of a connection; None for as long as it likes.
    """

    budget: ReceiveBudget
    timeouts: TimeoutsConfig
    turns: TurnScheduler
    life_s: float | None

    def count_ended(self, reason: str) -> None:
        """Count a connection that the server ended."""

    def charge_unsent(self, connection: Connection) -> None:
        """Charge what the transport of a connection holds."""

    def forget(self, connection: Connection) -> None:
        """A connection is closed."""

    def is_surplus(self, connection: Connection) -> bool:
        """Whether there is no place for a connection, and its requests are to be refused."""


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


class _Buffer(ReceiveBuffer):
    """Input that is not taken apart; h11 limits what is incomplete, this what is complete too."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        ends = [self._data.find(end, 0, HEAD_BYTES_MAX) for end in (b"\n\r\n", b"\n\n")]
        end = min((at for at in ends if at >= 0), default=-1)
        if end < 0 and len(self._data) > HEAD_BYTES_MAX:
            raise h11.LocalProtocolError("header fields too large", error_status_hint=431)
        if self._data.count(b"\n", 0, HEAD_BYTES_MAX if end < 0 else end) > FIELDS_MAX:
            raise h11.LocalProtocolError("too many header fields", error_status_hint=431)
        return super().maybe_extract_lines()

    def maybe_extract_next_line(self) -> bytearray | None:
        most = CHUNK_LINE_BYTES_MAX
        if len(self._data) > most and self._data.find(b"\r\n", 0, most) < 0:
            raise h11.LocalProtocolError("the line of a chunk is too long")
        return super().maybe_extract_next_line()


class _Parser(h11.Connection):
    """Says that it needs more, where it has worked for as long as one turn may take.

    Attributes:
        is_behind: It did.
        delivered_ns: Processor time granted for what it gave; the connection takes it.
        is_head: The last request was HEAD, whose answer has no body.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES_MAX)
        self.is_head = False
        self._receive_buffer = _Buffer()
        self.is_behind = False
        self.delivered_ns = 0
        self._until_ns = 0
        self._countdown = CLOCK_EVENTS

    @property
    def buffered_bytes(self) -> int:
        """Input that is not taken apart."""
        return len(self._receive_buffer)

    def begin_turn(self, until_ns: int) -> None:
        """Give events until that time."""
        self._until_ns = until_ns
        self._countdown = CLOCK_EVENTS
        self.is_behind = False

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        self._countdown -= 1
        if self._countdown < 0:
            self._countdown = CLOCK_EVENTS
            self.is_behind = self.is_behind or now_ns() >= self._until_ns
        if self.is_behind:
            return h11.NEED_DATA
        event = super().next_event()
        if type(event) is h11.Data:
            self.delivered_ns += BYTE_CPU_NS * len(event.data)
        elif type(event) is h11.Request:
            self.delivered_ns += REQUEST_CPU_NS
            self.is_head = event.method == b"HEAD"
            self._countdown = 0  # A head takes long enough to look at the clock after it.
            if _is_two_lengths(event):
                raise h11.RemoteProtocolError("two lengths")
        return event


def _is_two_lengths(request: h11.Request) -> bool:
    """Whether a proxy on the way may have read another body than this server would.

    Source: RFC 9112, section 6.1.
    """
    names = {name for name, _ in request.headers}
    return b"content-length" in names and b"transfer-encoding" in names


class Connection(H11Protocol):
    """One connection.

    Args:
        config: Of the port.
        state: Of the port.
        host: What the connections of the port share.

    Attributes:
        deficit_ns: Of its turns.
    """

    conn: _Parser
    flow: _Flow

    def __init__(self, config: uvicorn.Config, state: ServerState, host: Host) -> None:
        super().__init__(config, state, {})
        self.conn = _Parser()
        self.deficit_ns = self.wasted_ns = 0
        self._host = host
        self._app = self.app
        self.app = self._serve
        self._is_waiting = False
        self._until_ns = 0
        self._heard_ns = self._idle_ns = now_ns()
        self._head_ns = self._blocked_ns = 0
        self._has_heard = False
        self._charged_bytes = 0
        self._charged_ns = 0
        self._cpu = CpuAllowance(self._heard_ns)
        self._burst = ReadBurst(host.turns)
        self._life: asyncio.TimerHandle | None = None
        self._lingering: asyncio.TimerHandle | None = None
        self._half_closed: asyncio.TimerHandle | None = None

    # The transport's side.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._host.budget.holders.add(self)
        if self._host.life_s is not None:
            self._life = self.loop.call_later(self._host.life_s, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request: nobody is there for its answer."""
        for timer in (self._life, self._lingering, self._half_closed):
            if timer is not None:
                timer.cancel()
        self._host.budget.holders.discard(self)
        self._host.forget(self)
        super().connection_lost(exc)
        self._charge(0)

    def data_received(self, data: bytes) -> None:
        """Process what was read, for at most a quantum of time."""
        self._heard_ns = now_ns()
        self._has_heard = True
        if self._is_between and not self._head_ns:
            self._head_ns = self._heard_ns
        if self._is_waiting:
            self.conn.receive_data(data)
            self.flow.hold()
            self._note_held()
            return
        cpu_ns = thread_cpu_ns()
        self._until_ns = self._heard_ns + QUANTUM_NS
        super().data_received(data)
        self._note_held()
        if self._burst.is_long(self._heard_ns, now_ns(), len(data), QUANTUM_NS):
            self._wait_turn()
        self.note_cpu(thread_cpu_ns() - cpu_ns)

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

    def pause_writing(self) -> None:
        """The socket is full."""
        super().pause_writing()
        self._blocked_ns = now_ns()
        self._host.charge_unsent(self)

    def resume_writing(self) -> None:
        """The socket takes more."""
        self._blocked_ns = 0
        self._host.charge_unsent(self)
        super().resume_writing()

    # Turns.

    def handle_events(self) -> None:
        """As much of what was read as one turn may have."""
        self.conn.begin_turn(max(self._until_ns, now_ns() + QUANTUM_NS // 2))
        super().handle_events()
        if self._lingering is not None and self.conn.their_state is not h11.SEND_BODY:
            self._lingering.cancel()
            self._lingering = None
        if self.conn.is_behind:
            self._wait_turn()

    def _wait_turn(self) -> None:
        """Stop reading until what was read has had its turns."""
        if self.transport.is_closing():
            return
        self.flow.hold()
        if not self._is_waiting:
            self._is_waiting = True
            self._host.turns.wait(self)

    def take_turn(self, until_ns: int) -> bool:
        """Process input that was left over until that time; return whether some is left."""
        self._until_ns = until_ns
        if not self.transport.is_closing():
            try:
                self.handle_events()
            except Exception:
                log.exception("a connection could not be served")
                self.transport.abort()
            self._note_held()
        if self.transport.is_closing():
            self._is_waiting = False
            return False
        if self.conn.is_behind:
            return True
        self._is_waiting = False
        self.flow.let_go()
        return False

    def note_cpu(self, used_ns: int) -> bool:
        """Account for processor time of a turn; return whether the connection goes on."""
        delivered_ns, self.conn.delivered_ns = self.conn.delivered_ns, 0
        self.wasted_ns = used_ns - delivered_ns
        if not self._cpu.charge(now_ns(), self.wasted_ns):
            self._end("cpu_time")
        return not self.transport.is_closing()

    # Memory.

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application; what it has taken is charged by it, and no more here."""

        async def take() -> Message:
            message = await receive()
            self._note_held()
            return message

        scope["is_surplus"] = self._host.is_surplus(self)
        await self._app(scope, take, send)

    def held(self, now_ns: int) -> float:
        """What it holds, in bytes times nanoseconds."""
        return self._charged_bytes * float(now_ns - self._charged_ns)

    def shed(self) -> bool:
        """End the connection where it holds much; the application refuses bodies by itself."""
        if self._charged_bytes < SHED_BYTES_MIN or self.transport.is_closing():
            return False
        self._end("receive_memory")
        self._charge(0)
        return True

    def evict_stalled(self, now_ns: int, stall_ns: int) -> None:
        """Nothing: no memory is reserved here."""

    def _note_held(self) -> None:
        if self.transport.is_closing():
            self._charge(0)
            return
        cycle = self.cycle
        is_asked = cycle is not None and not cycle.response_complete
        self._charge(self.conn.buffered_bytes + (len(cycle.body) if is_asked else 0))
        if is_asked or not self.conn.buffered_bytes:
            self._head_ns = 0

    def _charge(self, size: int) -> None:
        more, self._charged_bytes = size - self._charged_bytes, size
        if more > 0:
            if more == size:
                self._charged_ns = now_ns()
            self._host.budget.charge(more)
        elif more:
            self._host.budget.release(-more)

    # Time.

    @property
    def _is_between(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def unsent_bytes(self) -> int:
        """What the socket has not taken."""
        return self.transport.get_write_buffer_size()

    @property
    def idle_since_ns(self) -> int:
        """Since when there is no request and nothing to send; 0 while there is."""
        return 0 if not self._is_between or self._is_waiting or self.unsent_bytes else self._idle_ns

    def look_after(self, now: int) -> None:
        """End it where its client lets it wait too long."""
        timeouts = self._host.timeouts
        if self._blocked_ns:
            name, since_ns, limit_s = "response", self._blocked_ns, timeouts.response_s
        elif not self._is_between:
            return  # Time is the application's business, and that of the body.
        elif self._head_ns:
            name, since_ns, limit_s = "headers", self._head_ns, timeouts.headers_s
        elif not self._has_heard:
            name, since_ns, limit_s = "preface", self._idle_ns, timeouts.preface_s
        else:
            name, since_ns, limit_s = "idle", self._idle_ns, timeouts.idle_s
        if now - since_ns > limit_s * NS_PER_S:
            self._end(f"{name}_timeout")

    def on_response_complete(self) -> None:
        """The answer was given to the socket: wait for the next request."""
        self._idle_ns = now_ns()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._lingering = self.loop.call_later(LINGER_S, self.transport.abort)
        elif self.conn.buffered_bytes:
            self._head_ns = self._idle_ns
        super().on_response_complete()
        self._note_held()
        if self._half_closed is not None and self.cycle.response_complete:
            self.transport.close()

    def leave(self) -> None:
        """Answer what is under way, and close."""
        if not self.transport.is_closing():
            self.shutdown()

    def give_way(self) -> None:
        """Close, so that another connection has a place."""
        self.transport.close()

    def abort(self) -> None:
        """Close now, whatever is unsent."""
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, where that can be answered."""
        del msg  # In uvicorn's words, and no JSON.
        cycle = self.cycle
        if cycle is not None and not (cycle.more_body or cycle.response_complete):
            return  # It is behind the last request, which is whole and gets its answer.
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # An answer has begun, or was the last.
            return
        headers = [("content-type", "application/json"), ("connection", "close")]
        is_bare = self.conn.is_head and self.conn.our_state is h11.SEND_RESPONSE
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=b"" if is_bare else _MALFORMED),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _leave(self) -> None:
        """End a connection whose client has perhaps left; not amid an answer, which it may read."""
        if self.cycle.response_started:
            self._half_closed = self.loop.call_later(HALF_CLOSED_S, self._leave)
        else:
            self.transport.abort()

    def _end(self, reason: str) -> None:
        self._host.count_ended(reason)
        self.transport.abort()
