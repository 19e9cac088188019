"""HTTP/1.1 connection: turns, timeouts, and charged memory.

A read is parsed for a quantum of time. With input left, the connection stops reading and waits in
the turn scheduler. Processor time without requests or bodies is limited.

Runs on: gateway loop. Source: RFC 9112.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import unquote

import h11
import msgspec
from starlette.types import Receive, Scope, Send

from iskander.errors import MalformedInput
from iskander.foundation.clock import NS_PER_MS, NS_PER_S, now_ns, thread_cpu_ns
from iskander.foundation.logs import network as log
from iskander.gateway.auth.origin import UNKNOWN_ORIGIN
from iskander.gateway.transport.http1.asgi_call import AsgiCall
from iskander.gateway.transport.http1.framing import HEAD_BYTES_MAX, Framing, MalformedRequest
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
BODY_BYTES_MAX: Final = 65_536
"""Above it, the connection does not read until the application receives the body."""
REQUEST_CPU_NS: Final = NS_PER_MS
BYTE_CPU_NS: Final = 2
"""Processor time granted per request and per body byte."""
EVICT_BYTES_MIN: Final = 4096
"""Connections with fewer charged bytes are not evicted."""

_FIELDS: Final = {name: getattr(MalformedInput, name) for name in ("code", "fault", "retryable")}
_MALFORMED: Final = "malformed HTTP/1.1 request"
_ASGI: Final = {"version": "3.0", "spec_version": "2.3"}


class Connection(asyncio.Protocol):
    """The server side of a connection.

    Attributes:
        call: The last request; None before the first, and after the end of the connection.
    """

    transport: asyncio.Transport

    def __init__(self, host: Http1Listener) -> None:
        self.call: AsgiCall | None = None
        self.deficit_ns = self.wasted_ns = 0
        self._host = host
        self._http = h11.Connection(h11.SERVER, HEAD_BYTES_MAX)
        self._framing = Framing()
        self._origin = UNKNOWN_ORIGIN
        self._is_waiting = self._has_read = self._is_reading_held = self._is_last = False
        self._end_response: Callable[[], None] | None = None  # Of a response without end.
        self._is_local = True
        self._is_head = False  # The response to HEAD has no body.
        self._addresses: Scope = {}
        self._writable = asyncio.Event()
        self._writable.set()
        self._read_ns = self._idle_ns = now_ns()
        self._until_ns = self._head_ns = self._blocked_ns = 0
        self._granted_ns = 0  # Processor time granted since the last charge.
        self._charged_bytes = self._charged_ns = 0
        self._cpu = CpuAllowance(self._read_ns)
        self._burst = ReadBurst(host.turns)
        self._life: asyncio.TimerHandle | None = None
        self._lingering: asyncio.TimerHandle | None = None
        self._half_closed: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start reading."""
        self.transport = transport
        self._host.connections.add(self)
        self._origin = origin_of(transport)
        local = transport.get_extra_info("sockname")
        self._addresses = {
            "server": _host_and_port(local),
            "client": _host_and_port(transport.get_extra_info("peername")),
            "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
        }
        # The tuple of an internet address; the kernel sets it at the accept.
        self._is_local = is_loopback_name(str(local[0])) if isinstance(local, tuple) else True
        self._host.budget.holders.add(self)
        if self._host.life_s is not None:
            self._life = self._host.loop.call_later(self._host.life_s, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request of the closed connection."""
        del exc
        for timer in (self._life, self._lingering, self._half_closed):
            if timer is not None:
                timer.cancel()
        self._host.budget.holders.discard(self)
        self._host.forget(self)
        self._charge(0)
        self._writable.set()
        # Without the cycle through the call, the connection is freed now.
        call, self.call = self.call, None
        if call is not None and not call.is_complete:
            call.disconnect()

    def data_received(self, data: bytes) -> None:
        """Parse the data for at most a quantum of time."""
        self._read_ns = now_ns()
        self._has_read = True
        if self._is_idle and not self._head_ns:
            self._head_ns = self._read_ns
        self._framing.add(data)
        if self._is_waiting:
            self._update_reading()
            self._update_charge()
            return
        cpu_ns = thread_cpu_ns()
        self._until_ns = self._read_ns + QUANTUM_NS
        is_input_left = self._process()
        self._update_charge()
        is_long = self._burst.is_long(self._read_ns, now_ns(), len(data), QUANTUM_NS)
        if is_input_left or is_long:
            self._wait_turn()
        self.note_cpu(thread_cpu_ns() - cpu_ns)

    def eof_received(self) -> bool:
        """Keep a half-closed connection open until the response is sent; not possible with TLS."""
        call = self.call
        is_tls = self._addresses["scheme"] == "https"
        if is_tls or call is None or call.has_more_body or call.is_complete:
            return False
        if self._end_response is not None:
            return False
        if self._half_closed is None:
            self._half_closed = self._host.loop.call_later(HALF_CLOSED_S, self._abort_half_closed)
        return True

    def pause_writing(self) -> None:
        """Start the response timeout: the write buffer is full."""
        self._writable.clear()
        self._blocked_ns = now_ns()
        self._host.charge_unsent(self)

    def resume_writing(self) -> None:
        """Stop the response timeout."""
        self._blocked_ns = 0
        self._host.charge_unsent(self)
        self._writable.set()

    def _process(self) -> bool:
        """Parse input for one turn, up to the end of a request; return whether input is left."""
        until_ns = max(self._until_ns, now_ns() + QUANTUM_NS // 2)
        is_out_of_time = False
        try:
            while not is_out_of_time and self._may_parse:
                piece = self._framing.take()
                if piece is None:
                    break
                self._http.receive_data(cast(bytes, piece))  # It takes any bytes-like object.
                self._take_events()
                is_out_of_time = now_ns() >= until_ns
        except MalformedRequest as error:
            self._reject(error)
        except h11.RemoteProtocolError:
            self._reject(MalformedRequest(""))
        self._update_reading()
        return is_out_of_time and self._may_parse and len(self._framing) > 0

    @property
    def _may_parse(self) -> bool:
        """Whether the next input belongs to the current request, or begins the next one."""
        state = self._http.their_state
        return (state is h11.IDLE or state is h11.SEND_BODY) and not self.transport.is_closing()

    def _take_events(self) -> None:
        """Process the events of one piece of input."""
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Request):
                self._granted_ns += REQUEST_CPU_NS
                self._begin_call(event)
                continue
            assert self.call is not None
            if isinstance(event, h11.Data):
                self._granted_ns += BYTE_CPU_NS * len(event.data)
                self.call.add_body(event.data)
            elif isinstance(event, h11.EndOfMessage):
                self.call.end_body()
                self._framing.expect_head()
                if self._lingering is not None:
                    self._lingering.cancel()
                    self._lingering = None
                self._begin_next_request()
                return
            else:
                return

    def _begin_call(self, request: h11.Request) -> None:
        """Run the application for a request, unless another site's page sends it."""
        self._is_head = request.method == b"HEAD"
        self._expect_body(request)
        path, _, query = request.target.partition(b"?")
        scope: Scope = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": request.http_version.decode("ascii"),
            "method": request.method.decode("ascii"),
            "root_path": "",
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "headers": list(request.headers),
            **self._addresses,
            "origin": self._origin,
            "mark_endless": self._mark_endless,
        }
        self.call = AsgiCall(self, scope)
        scope["is_surplus"] = self._host.is_surplus(self)  # May evict an idle connection.
        app = self._host.app
        refusal = self._host.sites.judge(scope, is_local=self._is_local)
        if refusal is not None:
            self._host.count_ended("cross_site")
            app = partial(_refuse, refusal)
        self._host.run(self.call.run(app))

    def _expect_body(self, request: h11.Request) -> None:
        """Find the framing of the body; reject versions and lengths that a proxy may misread.

        Source: RFC 9112, section 6.1.
        """
        version = request.http_version
        if version not in (b"1.1", b"1.0"):
            problem = f"HTTP/{version.decode()}; the server supports HTTP/1.1 and HTTP/1.0"
            raise MalformedRequest(problem, http.HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
        length, is_chunked = None, False
        for name, value in request.headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"transfer-encoding":
                is_chunked = True
        if not is_chunked:
            self._framing.expect_body(length or 0)
            return
        if length is not None:
            raise MalformedRequest("Content-Length with Transfer-Encoding")
        if version == b"1.0":
            raise MalformedRequest("Transfer-Encoding with HTTP/1.0")
        self._framing.expect_chunks()

    def _begin_next_request(self) -> None:
        """Let h11 parse the next request, if the last one and its response are complete."""
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()

    def _update_reading(self) -> None:
        """Read only while the parser and the application keep up with the input."""
        call = self.call
        is_held = self._is_waiting
        if call is not None and not call.is_complete:
            has_next = len(self._framing) > 0 and not call.has_more_body
            is_held = is_held or has_next or len(call.body) > BODY_BYTES_MAX
        if is_held != self._is_reading_held and not self.transport.is_closing():
            self._is_reading_held = is_held
            if is_held:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def _wait_turn(self) -> None:
        """Stop reading until the input is processed."""
        if not self._is_waiting and not self.transport.is_closing():
            self._is_waiting = True
            self._update_reading()
            self._host.turns.wait(self)

    def take_turn(self, until_ns: int) -> bool:
        """Process input until that time; return whether input is left."""
        self._until_ns = until_ns
        is_input_left = False
        if not self.transport.is_closing():
            try:
                is_input_left = self._process()
            except Exception as failure:
                log.http_connection_failed(error=failure)
                self.transport.abort()
            self._update_charge()
        self._is_waiting = is_input_left and not self.transport.is_closing()
        self._update_reading()
        return self._is_waiting

    def note_cpu(self, used_ns: int) -> bool:
        """Charge the processor time of a turn; return whether the connection stays open."""
        granted_ns, self._granted_ns = self._granted_ns, 0
        self.wasted_ns = used_ns - granted_ns
        if not self._cpu.charge(now_ns(), self.wasted_ns):
            self._end("cpu_time")
        return not self.transport.is_closing()

    def send(self, event: h11.Response | h11.Data | h11.EndOfMessage) -> None:
        """Send a part of the response."""
        data = self._http.send(event)
        if data:
            self.transport.write(data)

    def send_continue(self) -> None:
        """Send status 100 if the client waits for it before it sends the body."""
        if self._http.they_are_waiting_for_100_continue and not self.transport.is_closing():
            event = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self._http.send(event) or b"")

    async def wait_writable(self) -> None:
        """Wait until the write buffer has space, or the connection is closed."""
        if not self._writable.is_set():
            await self._writable.wait()

    def on_body_received(self) -> None:
        """Read on: the application has received the body up to now, which is not charged here."""
        self._update_reading()
        self._update_charge()

    def _mark_endless(self, end: Callable[[], None]) -> None:
        """Exempt a response without end from the maximum lifetime; its client closes both sides.

        `end` is called when the connection should close, and ends the response.
        """
        self._end_response = end
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
        size, call = len(self._framing), self.call
        is_answering = call is not None and not call.is_complete
        if is_answering or not size:
            self._head_ns = 0
        self._charge(size + (len(call.body) if call is not None and is_answering else 0))

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
        return self.call is None or self.call.is_complete

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
        if self._http.our_state is h11.MUST_CLOSE or self._is_last:
            self.transport.close()
        elif self._http.their_state is h11.SEND_BODY:
            self._lingering = self._host.loop.call_later(LINGER_S, self.transport.abort)
        elif len(self._framing):
            self._head_ns = self._idle_ns
        self._begin_next_request()
        if not self._is_waiting and self._process():
            self._wait_turn()
        self._update_reading()
        self._update_charge()
        if self._half_closed is not None and self._is_idle:
            self.transport.close()

    def close_gracefully(self) -> None:
        """Close after the current response."""
        self._is_last = True
        if self._is_idle:
            self.transport.close()
        elif self._end_response is not None:
            self._end_response()

    def close_idle(self) -> None:
        """Close to free capacity for another connection."""
        self.transport.close()

    def close_expired(self) -> None:
        """Close during a request: its client gets no response, or part of one."""
        self.abort()

    def abort(self) -> None:
        """Close now and drop unsent bytes."""
        self.transport.abort()

    def _reject(self, error: MalformedRequest) -> None:
        """Send the error response to a malformed request, if the connection state allows it."""
        if self.call is not None and not self.call.is_complete:
            self.call.disconnect()
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # A response has started, or was the last.
            return
        is_bare = self._is_head and self._http.our_state is h11.SEND_RESPONSE
        text = f"{_MALFORMED}: {error.problem}" if error.problem else _MALFORMED
        headers = [("content-type", "application/json"), ("connection", "close")]
        reason = error.status.phrase.encode()
        self.send(h11.Response(status_code=error.status, headers=headers, reason=reason))
        if not is_bare:
            self.send(h11.Data(data=msgspec.json.encode({"error": text, **_FIELDS})))
        self.send(h11.EndOfMessage())
        self.transport.close()

    def _abort_half_closed(self) -> None:
        """Abort a half-closed connection unless a response has started."""
        if self.call is not None and self.call.has_response:
            self._half_closed = self._host.loop.call_later(HALF_CLOSED_S, self._abort_half_closed)
        else:
            self.transport.abort()

    def _end(self, reason: str) -> None:
        """Abort the connection; count the reason."""
        self._host.count_ended(reason)
        self.transport.abort()


async def _refuse(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a rejected request in place of its application."""
    del scope, receive
    detail = refusal.error.to_wire()
    body = msgspec.json.encode({"error": detail.pop("message"), **detail})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-content-type-options", b"nosniff"),
    ]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _host_and_port(address: object) -> tuple[str, int | None] | None:
    """Return an address of a socket in the form of ASGI; None if it has none."""
    if isinstance(address, tuple):
        return str(address[0]), int(address[1])
    return (str(address), None) if address else None
