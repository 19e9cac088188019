"""HTTP/1.1 connection: turns, timeouts, and charged memory.

A read is parsed for a quantum of time. With input left, the connection stops reading and waits in
the turn scheduler. Processor time without requests or bodies is limited.

Runs on: gateway loop. Source: RFC 9112.
"""

from __future__ import annotations

import asyncio
import http
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NoReturn

import h11
import msgspec
import uvicorn
from h11._receivebuffer import ReceiveBuffer
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from iskander.errors import MalformedInput
from iskander.foundation.clock import NS_PER_MS, NS_PER_S, now_ns, thread_cpu_ns
from iskander.foundation.logs import network as log
from iskander.gateway.auth.origin import UNKNOWN_ORIGIN
from iskander.gateway.transport.http1.sites import Refusal, is_loopback_name
from iskander.gateway.transport.limits.cpu_allowance import CpuAllowance
from iskander.gateway.transport.limits.turn_scheduler import QUANTUM_NS, ReadBurst
from iskander.gateway.transport.origin import origin_of

if TYPE_CHECKING:
    from iskander.gateway.transport.http1.listener import Http1Listener

LINGER_S = 5.0
"""Time to read and drop the rest of a rejected body, so that the client reads the response."""
HALF_CLOSED_S = 1.0
"""Time for a response to start on a half-closed connection, whose client may be gone."""
HEAD_BYTES_MAX: Final = 16_384
FIELDS_MAX: Final = 128
"""Lines of a head or of chunked trailers: each costs some microseconds."""
CHUNK_LINE_BYTES_MAX: Final = 4096
EXTENSION_BYTES_MAX: Final = 16_384
"""Of all chunks of a body: extensions are ignored, and cost as much as the body."""
CLOCK_EVENTS: Final = 8
"""Parser events between two clock reads."""
REQUEST_CPU_NS: Final = NS_PER_MS
BYTE_CPU_NS: Final = 2
"""Processor time granted per request and per body byte."""
EVICT_BYTES_MIN: Final = 4096
"""Connections with fewer charged bytes are not evicted."""

_FIELDS: Final = {name: getattr(MalformedInput, name) for name in ("code", "fault", "retryable")}
_MALFORMED: Final = "malformed HTTP/1.1 request"
_LENGTH: Final = b"content-length:"
_LENGTH_BYTES: Final = len(_LENGTH)
_IS_EXTENSION: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*").fullmatch


class _Flow(FlowControl):
    """Resumes reading once the application and the parser have processed all input."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_blocked = False

    def block(self) -> None:
        self._is_blocked = True
        self._transport.pause_reading()

    def unblock(self) -> None:
        self._is_blocked = False
        if not self.read_paused:
            self._transport.resume_reading()

    def resume_reading(self) -> None:
        if self._is_blocked:
            self.read_paused = False
        else:
            super().resume_reading()


class _Buffer(ReceiveBuffer):
    """Unparsed input with limits on heads, and without framing that others read in another way.

    h11 itself limits incomplete heads only, and accepts bare LF, folded lines and repeated lengths.
    A proxy that reads them differently would see other requests (request smuggling).

    Attributes:
        problem: What is wrong with the framing; empty for other errors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.problem = ""
        self._extension_bytes = 0

    def reject(self, problem: str) -> NoReturn:
        """Raise the error of invalid framing, which h11 turns into that of the client."""
        self.problem = problem
        raise h11.LocalProtocolError(problem)

    def maybe_extract_lines(self) -> list[bytearray] | None:
        data = self._data
        self._extension_bytes = 0
        if data.startswith(b"\r\n"):
            return super().maybe_extract_lines()  # No fields, such as after the last chunk.
        end = data.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)
        if end < 0 and len(data) > HEAD_BYTES_MAX:
            self.reject(f"head of more than {HEAD_BYTES_MAX} bytes")
        stop = HEAD_BYTES_MAX if end < 0 else end
        lines = data.count(b"\r\n", 0, stop)
        if lines > FIELDS_MAX:
            self.reject(f"more than {FIELDS_MAX} header lines")
        is_cut = end < 0 and data.endswith(b"\r")
        if not data.count(b"\n", 0, stop) == lines == data.count(b"\r", 0, stop) - is_cut:
            self.reject("CR or LF alone; lines end with CRLF")
        if data.find(b"\r\n ", 0, stop) >= 0 or data.find(b"\r\n\t", 0, stop) >= 0:
            self.reject("folded header line (obs-fold)")
        found = super().maybe_extract_lines()
        if found is not None:
            self._require_one_length(found)
        return found

    def maybe_extract_next_line(self) -> bytearray | None:
        most = CHUNK_LINE_BYTES_MAX
        if len(self._data) > most and self._data.find(b"\r\n", 0, most) < 0:
            self.reject(f"chunk line of more than {most} bytes")
        line = super().maybe_extract_next_line()
        if line is not None:
            size, semicolon, extension = line[:-2].partition(b";")
            self._extension_bytes += len(extension)
            if self._extension_bytes > EXTENSION_BYTES_MAX:
                self.reject(f"chunk extensions of more than {EXTENSION_BYTES_MAX} bytes")
            if not size.isalnum() or (semicolon and not _IS_EXTENSION(extension)):
                self.reject("chunk size with other characters than hex digits, or its extension")
        return line

    def _require_one_length(self, lines: Iterable[bytearray]) -> None:
        """Reject a repeated length, also of equal values, and a list as its value."""
        seen = 0
        for line in lines:
            if line[:_LENGTH_BYTES].lower() == _LENGTH:
                seen += 1
                if seen > 1 or not line[_LENGTH_BYTES:].strip(b" \t").isdigit():
                    self.reject("Content-Length is repeated, or not a number")


class _Parser(h11.Connection):
    """Parser that returns NEED_DATA at the end of a turn, even with input left."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES_MAX)
        self.is_head = False  # The response to HEAD has no body.
        self.status = http.HTTPStatus.BAD_REQUEST  # Of the answer to a malformed request.
        self._buffer = self._receive_buffer = _Buffer()
        self.is_out_of_time = False  # The turn ended before the input.
        self.granted_ns = 0  # Processor time granted for events; the connection resets it.
        self._until_ns = 0
        self._countdown = CLOCK_EVENTS

    @property
    def problem(self) -> str:
        """What is wrong with the framing of a malformed request; empty for other errors."""
        return self._buffer.problem

    @property
    def buffered_bytes(self) -> int:
        return len(self._receive_buffer)

    def begin_turn(self, until_ns: int) -> None:
        """Let `next_event` return events until that time."""
        self._until_ns = until_ns
        self._countdown = CLOCK_EVENTS
        self.is_out_of_time = False

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        self._countdown -= 1
        if self._countdown < 0:
            self._countdown = CLOCK_EVENTS
            self.is_out_of_time = self.is_out_of_time or now_ns() >= self._until_ns
        if self.is_out_of_time:
            return h11.NEED_DATA
        event = super().next_event()
        if type(event) is h11.Data:
            self.granted_ns += BYTE_CPU_NS * len(event.data)
        elif type(event) is h11.Request:
            self.granted_ns += REQUEST_CPU_NS
            self.is_head = event.method == b"HEAD"
            self._countdown = 0  # A head costs much more than a clock read.
            self._require_framing(event)
        return event

    def _require_framing(self, request: h11.Request) -> None:
        """Reject versions and lengths that a proxy may read in another way.

        Source: RFC 9112, section 6.1.
        """
        version = request.http_version
        if version not in (b"1.1", b"1.0"):
            self.status = http.HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
            self._reject(f"HTTP/{version.decode()}; the server supports HTTP/1.1 and HTTP/1.0")
        names = {name for name, _ in request.headers}
        if b"transfer-encoding" in names:
            if b"content-length" in names:
                self._reject("Content-Length with Transfer-Encoding")
            if version == b"1.0":
                self._reject("Transfer-Encoding with HTTP/1.0")

    def _reject(self, problem: str) -> NoReturn:
        self._buffer.problem = problem
        raise h11.RemoteProtocolError(problem)


class Connection(H11Protocol):
    """The server side of a connection."""

    conn: _Parser
    flow: _Flow

    def __init__(self, config: uvicorn.Config, state: ServerState, host: Http1Listener) -> None:
        super().__init__(config, state, {})
        self.conn = _Parser()
        self.deficit_ns = self.wasted_ns = 0
        self._host = host
        self._app = self.app
        self.app = self._serve
        self._origin = UNKNOWN_ORIGIN
        self._is_waiting = self._has_read = self._is_endless = False
        self._is_local = True
        self._read_ns = self._idle_ns = now_ns()
        self._until_ns = self._head_ns = self._blocked_ns = 0
        self._charged_bytes = self._charged_ns = 0
        self._cpu = CpuAllowance(self._read_ns)
        self._burst = ReadBurst(host.turns)
        self._life: asyncio.TimerHandle | None = None
        self._lingering: asyncio.TimerHandle | None = None
        self._half_closed: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start reading."""
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._origin = origin_of(transport)
        # The tuple of an internet address; the kernel sets it at the accept.
        local = transport.get_extra_info("sockname")
        self._is_local = is_loopback_name(str(local[0])) if isinstance(local, tuple) else True
        self._host.budget.holders.add(self)
        if self._host.life_s is not None:
            self._life = self.loop.call_later(self._host.life_s, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request of the closed connection."""
        for timer in (self._life, self._lingering, self._half_closed):
            if timer is not None:
                timer.cancel()
        self._host.budget.holders.discard(self)
        self._host.forget(self)
        super().connection_lost(exc)
        self._charge(0)
        self.app = self._app  # Without the cycle through `_serve`, the connection is freed now.

    def data_received(self, data: bytes) -> None:
        """Parse the data for at most a quantum of time."""
        self._read_ns = now_ns()
        self._has_read = True
        if self._is_idle and not self._head_ns:
            self._head_ns = self._read_ns
        if self._is_waiting:
            self.conn.receive_data(data)
            self.flow.block()
            self._update_charge()
            return
        cpu_ns = thread_cpu_ns()
        self._until_ns = self._read_ns + QUANTUM_NS
        super().data_received(data)
        self._update_charge()
        if self._burst.is_long(self._read_ns, now_ns(), len(data), QUANTUM_NS):
            self._wait_turn()
        self.note_cpu(thread_cpu_ns() - cpu_ns)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep a half-closed connection open until the response is sent; not possible with TLS."""
        cycle = self.cycle
        if self.scheme == "https" or cycle is None or cycle.more_body or cycle.response_complete:
            return None
        if self._is_endless:
            return None
        if self._half_closed is None:
            self._half_closed = self.loop.call_later(HALF_CLOSED_S, self._abort_half_closed)
        return True

    def pause_writing(self) -> None:
        """Start the response timeout: the write buffer is full."""
        super().pause_writing()
        self._blocked_ns = now_ns()
        self._host.charge_unsent(self)

    def resume_writing(self) -> None:
        """Stop the response timeout."""
        self._blocked_ns = 0
        self._host.charge_unsent(self)
        super().resume_writing()

    def handle_events(self) -> None:
        """Process parser events for one turn."""
        self.conn.begin_turn(max(self._until_ns, now_ns() + QUANTUM_NS // 2))
        super().handle_events()
        if self._lingering is not None and self.conn.their_state is not h11.SEND_BODY:
            self._lingering.cancel()
            self._lingering = None
        if self.conn.is_out_of_time:
            self._wait_turn()

    def _wait_turn(self) -> None:
        """Stop reading until the input is processed."""
        if self.transport.is_closing():
            return
        self.flow.block()
        if not self._is_waiting:
            self._is_waiting = True
            self._host.turns.wait(self)

    def take_turn(self, until_ns: int) -> bool:
        """Process input until that time; return whether input is left."""
        self._until_ns = until_ns
        if not self.transport.is_closing():
            try:
                self.handle_events()
            except Exception as failure:
                log.http_connection_failed(error=failure)
                self.transport.abort()
            self._update_charge()
        is_open = not self.transport.is_closing()
        self._is_waiting = is_open and self.conn.is_out_of_time
        if is_open and not self._is_waiting:
            self.flow.unblock()
        return self._is_waiting

    def note_cpu(self, used_ns: int) -> bool:
        """Charge the processor time of a turn; return whether the connection stays open."""
        granted_ns, self.conn.granted_ns = self.conn.granted_ns, 0
        self.wasted_ns = used_ns - granted_ns
        if not self._cpu.charge(now_ns(), self.wasted_ns):
            self._end("cpu_time")
        return not self.transport.is_closing()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application; input that it received is not charged here any more."""

        async def receive_and_release() -> Message:
            message = await receive()
            self._update_charge()
            return message

        scope["is_surplus"] = self._host.is_surplus(self)
        scope["origin"] = self._origin
        scope["mark_endless"] = self._mark_endless
        refusal = self._host.sites.judge(scope, is_local=self._is_local)
        if refusal is not None:
            self._host.count_ended("cross_site")
            await _refuse(refusal, send)
            return
        await self._app(scope, receive_and_release, send)

    def _mark_endless(self) -> None:
        """Exempt a response without end from the maximum lifetime; its client closes both sides."""
        self._is_endless = True
        if self._life is not None:
            self._life.cancel()

    def evictable(self, now_ns: int) -> float:
        """Return the charged bytes times the nanoseconds since the first of them."""
        return self._charged_bytes * float(now_ns - self._charged_ns)

    def evict(self) -> bool:
        """Abort the connection if its charge reaches `EVICT_BYTES_MIN`; return whether it did.

        Bodies that the application received are evicted there.
        """
        if self._charged_bytes < EVICT_BYTES_MIN or self.transport.is_closing():
            return False
        self._end("receive_memory")
        self._charge(0)
        return True

    def evict_stalled(self, now_ns: int, stall_ns: int) -> None:
        """Do nothing: HTTP/1.1 connections reserve no memory."""

    def _update_charge(self) -> None:
        """Charge the unparsed input, and the body that the application has not received."""
        if self.transport.is_closing():
            self._charge(0)
            return
        cycle = self.cycle
        is_answering = cycle is not None and not cycle.response_complete
        self._charge(self.conn.buffered_bytes + (len(cycle.body) if is_answering else 0))
        if is_answering or not self.conn.buffered_bytes:
            self._head_ns = 0

    def _charge(self, size: int) -> None:
        change, self._charged_bytes = size - self._charged_bytes, size
        if change > 0:
            if change == size:
                self._charged_ns = now_ns()
            self._host.budget.charge(change)
        elif change:
            self._host.budget.release(-change)

    @property
    def _is_idle(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def unsent_bytes(self) -> int:
        """Bytes in the write buffer."""
        return self.transport.get_write_buffer_size()

    @property
    def idle_since_ns(self) -> int:
        """Start of the time without request and unsent bytes; 0 if busy."""
        return 0 if not self._is_idle or self._is_waiting or self.unsent_bytes else self._idle_ns

    def enforce_timeouts(self, now: int) -> None:
        """Abort the connection after a timeout of the client."""
        timeouts = self._host.timeouts
        if self._blocked_ns:
            name, since_ns, limit_s = "response", self._blocked_ns, timeouts.response_s
        elif not self._is_idle:
            return  # The application and the body have their own timeouts.
        elif self._head_ns:
            name, since_ns, limit_s = "headers", self._head_ns, timeouts.headers_s
        elif not self._has_read:
            name, since_ns, limit_s = "preface", self._idle_ns, timeouts.preface_s
        else:
            name, since_ns, limit_s = "idle", self._idle_ns, timeouts.idle_s
        if now - since_ns > limit_s * NS_PER_S:
            self._end(f"{name}_timeout")

    def on_response_complete(self) -> None:
        """Start the idle time, or the linger time if the request body is incomplete."""
        self._idle_ns = now_ns()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._lingering = self.loop.call_later(LINGER_S, self.transport.abort)
        elif self.conn.buffered_bytes:
            self._head_ns = self._idle_ns
        super().on_response_complete()
        self._update_charge()
        if self._half_closed is not None and self.cycle.response_complete:
            self.transport.close()

    def close_gracefully(self) -> None:
        """Close after the current response."""
        if not self.transport.is_closing():
            self.shutdown()

    def close_idle(self) -> None:
        """Close to free capacity for another connection."""
        self.transport.close()

    def close_expired(self) -> None:
        """Close during a request: its client gets no response, or part of one."""
        self.abort()

    def abort(self) -> None:
        """Close now and drop unsent bytes."""
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Send the error response to a malformed request, if the connection state allows it."""
        del msg  # uvicorn's text, not JSON.
        cycle = self.cycle
        if cycle is not None and not (cycle.more_body or cycle.response_complete):
            return  # The last request before it is complete and gets its response.
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # A response has started, or was the last.
            return
        status, problem = self.conn.status, self.conn.problem
        error = f"{_MALFORMED}: {problem}" if problem else _MALFORMED
        headers = [("content-type", "application/json"), ("connection", "close")]
        is_bare = self.conn.is_head and self.conn.our_state is h11.SEND_RESPONSE
        for event in (
            h11.Response(status_code=status, headers=headers, reason=status.phrase.encode()),
            h11.Data(data=b"" if is_bare else msgspec.json.encode({"error": error, **_FIELDS})),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _abort_half_closed(self) -> None:
        """Abort a half-closed connection unless a response has started."""
        if self.cycle.response_started:
            self._half_closed = self.loop.call_later(HALF_CLOSED_S, self._abort_half_closed)
        else:
            self.transport.abort()

    def _end(self, reason: str) -> None:
        """Abort the connection; count the reason."""
        self._host.count_ended(reason)
        self.transport.abort()


async def _refuse(refusal: Refusal, send: Send) -> None:
    """Answer a rejected request without its application."""
    detail = refusal.error.to_wire()
    body = msgspec.json.encode({"error": detail.pop("message"), **detail})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-content-type-options", b"nosniff"),
    ]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
