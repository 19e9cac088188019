"""One HTTP/2 connection of the server: preface, frame dispatch, time quanta, shutdown.

DATA payload is passed to its call as it arrives, other frames are processed once complete. A read
is processed for one time quantum; the rest waits in the turn scheduler, and reading is paused.

Runs on: gateway loop. Source: RFC 9113.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, cast

from iskander.errors import Draining
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.foundation.logs import network as log
from iskander.gateway.transport.http2 import frames
from iskander.gateway.transport.http2.call import Call
from iskander.gateway.transport.http2.call_receiver import WINDOW_BYTES
from iskander.gateway.transport.http2.frame_sender import FrameSender
from iskander.gateway.transport.http2.frames import ConnectionBroken, ErrorCode, StreamError
from iskander.gateway.transport.http2.rate_limit import RateLimiter
from iskander.gateway.transport.http2.request_headers import HEADER_LIST_BYTES_MAX
from iskander.gateway.transport.http2.streams import Streams
from iskander.gateway.transport.limits.turn_scheduler import QUANTUM_NS, ReadBurst
from iskander.gateway.transport.origin import origin_of

if TYPE_CHECKING:
    from iskander.gateway.transport.http2.listener import Listener

FRAME_BYTES_MAX: Final = 1 << 20
"""Limit on a DATA frame; a larger message consists of several."""
CONTROL_BYTES_MAX: Final = 65_536
"""Limit on any other frame."""
CLOCK_FRAMES: Final = 8
"""Frames between two checks of the clock."""
OPENED_CALLS_MAX: Final = 4
"""Calls opened in a row before they are served."""
TASKS_PER_TURN: Final = 4
"""Calls that start a task in one turn; the turn's clock does not include the work of tasks."""
SETTINGS_PER_COST: Final = 16
"""Settings in a frame that cost as much as one frame."""
CALLS_PER_COST: Final = 100
"""Open calls for which a change of the initial window costs as much as one frame."""
WINDOW_COST: Final = 0.1
"""Cost of a WINDOW_UPDATE that is not a reply to a response frame."""
HTTP1_LINE_BYTES: Final = 4096
"""Part of the first read that is searched for an HTTP/1 request line."""
_KEEPALIVE_PING: Final = b"iskalive"
_DRAIN_PING: Final = b"iskleave"
_EXPIRED: Final = (
    "the connection has reached its maximum age (`server.max_connection_age_s`, "
    "`server.max_connection_age_grace_s`); retry on a new one"
)
_NOT_HTTP2: Final = (
    b"HTTP/1.1 505 HTTP Version Not Supported\r\nconnection: close\r\n"
    b"content-type: text/plain\r\n\r\nThis port serves gRPC over HTTP/2.\n"
)


class Connection(asyncio.BufferedProtocol):
    """The server's end of a connection."""

    def __init__(self, host: Listener) -> None:
        self.host = host
        self.output: FrameSender
        self.streams: Streams
        self.deficit_ns = self.wasted_ns = 0
        self._transport: asyncio.Transport
        self._has_preface = self._is_draining = self._is_closing = self._is_waiting = False
        self._rest = memoryview(b"")
        self._incomplete_ns = self._countdown = self._ping_ns = 0
        self._read_ns = now_ns()
        self._limiter = RateLimiter(self._read_ns)
        self._burst = ReadBurst(host.turns)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up the sender and the streams."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has another base class.
        self.output = FrameSender(self._transport)
        self.streams = Streams(self.host, self.output, self._limiter, self._on_idle)
        self.streams.origin = origin_of(transport)
        self.host.connections.add(self)
        self.host.budget.holders.add(self.streams)

    def connection_lost(self, error: Exception | None) -> None:
        """Close the calls."""
        del error
        self.host.forget(self)
        self.host.budget.holders.discard(self.streams)
        self._rest = memoryview(b"")
        self.output.close()
        self.streams.detach()

    def pause_writing(self) -> None:
        """Stop sending: the socket is full."""
        self.output.pause()
        self.host.charge_unsent(self)

    def resume_writing(self) -> None:
        """Continue sending: the socket has capacity."""
        self.host.charge_unsent(self)
        self.output.resume()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the read buffer, shared by all connections: it is empty between reads."""
        del sizehint
        return self.host.scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Process a read for at most one time quantum."""
        began_ns = self._read_ns = now_ns()
        self._ping_ns = 0
        view = self.host.scratch[:nbytes]
        if self._rest:
            view, self._rest = memoryview(bytes(self._rest) + view), memoryview(b"")
        if self._is_waiting:
            self._rest = memoryview(bytes(view))
            return
        self._process(view, began_ns + QUANTUM_NS)
        ended_ns = now_ns()
        is_long = self._burst.is_long(began_ns, ended_ns, nbytes, QUANTUM_NS)
        if (is_long or self.streams.is_interrupted) and not self.output.is_closed:
            self.deficit_ns = QUANTUM_NS - (ended_ns - began_ns)
            self._is_waiting = True
            self._transport.pause_reading()
            self.host.turns.wait(self)

    def take_turn(self, until_ns: int) -> bool:
        """Process remaining input until that time; return whether some is left."""
        rest, self._rest = self._rest, memoryview(b"")
        try:
            self._process(rest, until_ns)
        except Exception as failure:
            log.grpc_connection_failed(error=failure)
            self.abort()
        if self.streams.is_interrupted and not self.output.is_closed:
            return True
        self._is_waiting = False
        if not self._transport.is_closing():
            self._transport.resume_reading()
        return False

    def note_cpu(self, used_ns: int) -> bool:
        """Charge the CPU time of a turn; return whether the connection stays open."""
        self.wasted_ns = used_ns - self.streams.take_granted_ns()
        try:
            self._limiter.charge_cpu(now_ns(), self.wasted_ns)
        except ConnectionBroken as error:
            self._fail(error)
        return not self.output.is_closed

    @property
    def calls(self) -> dict[int, Call]:
        """The open calls, by stream."""
        return self.streams.calls

    @property
    def has_unsent(self) -> bool:
        """Whether any response data is unsent, in the socket or in a call."""
        return self.output.has_unsent or any(call.is_blocked for call in self.calls.values())

    @property
    def unsent_bytes(self) -> int:
        """Bytes in the transport's write buffer."""
        return self._transport.get_write_buffer_size()

    @property
    def idle_since_ns(self) -> int:
        """Start of the time without open calls and unsent data; 0 if the connection is active."""
        return 0 if self.calls or self._is_waiting or self.has_unsent else self._read_ns

    def close_idle(self) -> None:
        """Close an idle connection to free capacity; the client may retry requests in transit."""
        self.output.emit(frames.goaway(self.streams.last_id, ErrorCode.NO_ERROR, "idle"))
        self._close()

    def close_gracefully(self) -> None:
        """Start a graceful shutdown: calls are accepted until the client replies to a PING."""
        if not self._has_preface:
            self._close()
        elif not self._is_draining:
            self._is_draining = True
            self.output.emit(frames.goaway(frames.WINDOW_MAX, ErrorCode.NO_ERROR))
            self.output.emit(frames.frame(frames.PING, 0, 0, _DRAIN_PING))

    def close_expired(self) -> None:
        """End the open calls with a retryable error, and close the connection."""
        error = Draining(_EXPIRED, retry_after_ms=0)
        for call in list(self.calls.values()):
            ended = self.host.add_details(call.path, error)
            call.end(ended.status, ended.message, ended.trailers)
        self.output.emit(frames.goaway(self.streams.last_id, ErrorCode.NO_ERROR, "maximum age"))
        self._close()

    def abort(self) -> None:
        """Close at once and discard unsent data."""
        self.output.close()
        self._transport.abort()

    def enforce_timeouts(self, now: int) -> None:
        """Enforce the timeouts; send a keepalive PING to an idle client."""
        timeouts = self.host.timeouts
        silent_s = (now - self._read_ns) / NS_PER_S
        if self.output.is_closed or not self._has_preface:
            if silent_s > timeouts.preface_s:
                self._time_out("preface")
            return
        self.streams.check_timeouts(now)
        if self._incomplete_ns and now - self._incomplete_ns > timeouts.headers_s * NS_PER_S:
            message = f"frame incomplete after {timeouts.headers_s:g} s (`timeouts.headers_s`)"
            self._fail(ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, message, "headers_timeout"))
        elif self.output.is_stalled(now, timeouts.response_s):
            self._time_out("response")
        elif self._ping_ns:
            if now - self._ping_ns > timeouts.keepalive_s * NS_PER_S:
                self._time_out("keepalive")
        elif silent_s > timeouts.idle_s:
            self._ping_ns = now
            self.output.emit(frames.frame(frames.PING, 0, 0, _KEEPALIVE_PING))

    def _time_out(self, name: str) -> None:
        self.host.count_ended(f"{name}_timeout")
        self.abort()

    def _process(self, view: memoryview, until_ns: int) -> None:
        """Process input until that time, and start to serve the opened calls."""
        self.streams.is_interrupted = False
        if self.output.is_closed:
            return
        self.streams.now_ns = self._read_ns
        try:
            at = 0 if self._has_preface else self._read_preface(view)
            if self._has_preface:
                self._process_frames(view, at, until_ns)
            if self.streams.opened:
                self.streams.serve_opened()
        except ConnectionBroken as error:
            self._fail(error)

    def _read_preface(self, view: memoryview) -> int:
        """Read the client's preface and send the server's; return the position of the frames."""
        preface = bytes(view[: len(frames.PREFACE)])
        self._has_preface = preface == frames.PREFACE
        if self._has_preface:
            settings = {
                frames.MAX_CONCURRENT_STREAMS: self.streams.calls_max,
                frames.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
                frames.MAX_FRAME_SIZE: FRAME_BYTES_MAX,
                frames.MAX_HEADER_LIST_SIZE: HEADER_LIST_BYTES_MAX,
            }
            # Only calls have a flow-control limit; the connection's window is as large as possible.
            update = frames.window_update(0, frames.WINDOW_MAX - frames.WINDOW_DEFAULT)
            self.output.emit(frames.settings(settings) + update)
        elif frames.PREFACE.startswith(preface):
            self._rest = memoryview(preface)
        else:
            is_http1 = b" HTTP/1." in bytes(view[:HTTP1_LINE_BYTES])
            invalid = frames.goaway(0, ErrorCode.PROTOCOL_ERROR, "invalid connection preface")
            self.output.emit(_NOT_HTTP2 if is_http1 else invalid)
            self._close()
        return len(frames.PREFACE)

    def _process_frames(self, view: memoryview, at: int, until_ns: int) -> None:
        end, streams = len(view), self.streams
        streams.tasks_started = 0
        if streams.has_data_left:
            at = streams.feed_data(view, at, until_ns)
        self._countdown = CLOCK_FRAMES
        while end - at >= frames.HEAD_BYTES and not streams.is_interrupted:
            self._countdown -= 1
            if self._countdown < 0:
                if now_ns() >= until_ns:
                    streams.is_interrupted = True
                    break
                self._countdown = CLOCK_FRAMES
            next_at = self._process_frame(view, at, until_ns)
            if next_at == at:
                break
            at = next_at
        self._keep_rest(view, at)

    def _process_frame(self, view: memoryview, at: int, until_ns: int) -> int:
        """Process the frame at `at`; return the position of the next, or `at` if incomplete."""
        head: tuple[int, int, int, int, int] = frames.read_head(view, at)
        high, low, kind, flags, stream_id = head
        stream_id &= frames.WINDOW_MAX
        length = high << 16 | low
        if self.streams.block_reader.is_open and kind != frames.CONTINUATION:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "frame inside a header block")
        limit = CONTROL_BYTES_MAX if kind != frames.DATA else FRAME_BYTES_MAX
        if length > limit:
            message = f"frame of {length} bytes, limit {limit}"
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, message)
        start = at + frames.HEAD_BYTES
        if kind == frames.DATA:
            padding = 0
            if flags & frames.PADDED:
                if length and start == len(view):
                    return at
                padding = frames.padding_bytes(view, start, length)
                start += 1
            self.streams.begin_data(length - padding, padding, flags, stream_id)
            return self.streams.feed_data(view, start, until_ns)
        stop = start + length
        if stop > len(view) or (kind == frames.HEADERS and not self._can_open_call()):
            return at
        try:
            self._on_frame(kind, flags, stream_id, view[start:stop])
        except StreamError as error:
            self.streams.reset(stream_id, error.code)
        return stop

    def _can_open_call(self) -> bool:
        """Whether this turn may open another call; serves the opened calls first."""
        streams = self.streams
        if len(streams.opened) >= OPENED_CALLS_MAX:
            streams.serve_opened()
            streams.is_interrupted = streams.tasks_started >= TASKS_PER_TURN
        return not (streams.is_interrupted or self.output.is_closed)

    def _keep_rest(self, view: memoryview, at: int) -> None:
        """Keep unprocessed input, and the start time of an incomplete frame or header block."""
        is_left = at < len(view)
        if not (self.streams.block_reader.is_open or (is_left and not self.streams.is_interrupted)):
            self._incomplete_ns = 0
        elif not self._incomplete_ns or (at and not self.streams.block_reader.is_open):
            self._incomplete_ns = self._read_ns
        if is_left:
            # Waiting input is a copy already; other input is in the shared read buffer.
            rest = view[at:]
            self._rest = rest if self._is_waiting else memoryview(bytes(rest))

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: memoryview) -> None:
        streams = self.streams
        if kind == frames.HEADERS:
            streams.on_headers(flags, stream_id, payload)
            self._countdown = 0  # Decoding is expensive: check the clock next.
        elif kind == frames.WINDOW_UPDATE:
            self._on_window_update(stream_id, payload)
        elif kind == frames.PING:
            self._on_ping(flags, stream_id, payload)
        elif kind == frames.RST_STREAM:
            streams.on_rst_stream(stream_id, payload)
        elif kind == frames.SETTINGS:
            self._on_settings(flags, stream_id, payload)
        elif kind == frames.CONTINUATION:
            streams.on_continuation(flags, stream_id, payload)
            self._countdown = 0
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        else:  # Priorities are not used, GOAWAY needs no action, unknown types are ignored.
            self._limiter.charge(self._read_ns)
            if kind == frames.GOAWAY:
                self._require_no_stream(stream_id)
                frames.read_number(payload, frames.GOAWAY_BYTES)
            elif kind == frames.PRIORITY:
                number = frames.read_number(payload, frames.PRIORITY_BYTES)
                if not stream_id or number == stream_id:
                    message = f"invalid PRIORITY on stream {stream_id}"
                    raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, message)

    def _on_settings(self, flags: int, stream_id: int, payload: memoryview) -> None:
        self._limiter.charge(self._read_ns)
        self._require_no_stream(stream_id)
        if flags & frames.ACK:
            if payload:
                raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS ACK with a payload")
            return
        pairs = frames.read_settings(payload)
        self._limiter.charge(self._read_ns, len(pairs) / SETTINGS_PER_COST)
        # ACK first: the client accepts data of a larger window only after it.
        self.output.emit(frames.frame(frames.SETTINGS, frames.ACK, 0))
        self.output.apply_settings(pairs)
        window = dict(pairs).get(frames.INITIAL_WINDOW_SIZE, self.output.call_window)
        if window != self.output.call_window:
            self._limiter.charge(self._read_ns, len(self.calls) / CALLS_PER_COST)
            self.output.set_call_window(window, self.calls.values())

    def _on_ping(self, flags: int, stream_id: int, payload: memoryview) -> None:
        self._require_no_stream(stream_id)
        if len(payload) != 8:
            message = f"PING of {len(payload)} bytes, not 8"
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, message)
        self.streams.charge_reply(1.0)
        if not flags & frames.ACK:
            self.output.emit(frames.frame(frames.PING, frames.ACK, 0, bytes(payload)))
        elif bytes(payload) == _DRAIN_PING and self._is_draining and not self._is_closing:
            self._is_closing = self.streams.is_rejecting = True
            self.output.emit(frames.goaway(self.streams.last_id, ErrorCode.NO_ERROR))
            if not self.calls:
                self._transport.close()

    def _on_window_update(self, stream_id: int, payload: memoryview) -> None:
        increment = frames.read_number(payload)
        self.streams.charge_reply(WINDOW_COST)
        if stream_id and self.streams.is_idle(stream_id):
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE on an idle stream")
        call = self.calls.get(stream_id)
        if not stream_id or call is not None:
            self.output.increase_window(call, increment)
        elif not increment:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0 bytes")

    def _require_no_stream(self, stream_id: int) -> None:
        if stream_id:
            message = f"connection frame on stream {stream_id}"
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, message)

    def _fail(self, error: ConnectionBroken) -> None:
        """End the connection with GOAWAY after a connection error."""
        self.host.count_ended(error.reason)
        self.output.emit(frames.goaway(self.streams.last_id, error.code, str(error)))
        self._close()

    def _close(self) -> None:
        self._transport.close()
        self.output.close()
        self.streams.close()

    def _on_idle(self) -> None:
        """Close the connection after its last call, if it is shutting down."""
        if self._is_closing:
            self._transport.close()
