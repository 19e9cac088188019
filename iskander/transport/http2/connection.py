"""One HTTP/2 connection of the server: its preface, its frames, its turns and its end.

The payload of DATA frames goes to its call as it comes, cut anywhere; every other frame is
processed once it is whole. A read is processed for a quantum of time; what is left waits in the
turn scheduler, and the socket is not read meanwhile. Nothing here blocks.

Runs on: gateway loop. Source: RFC 9113.
"""

from __future__ import annotations

import asyncio
from typing import Final, cast

from iskander.clock import NS_PER_S, now_ns
from iskander.transport.http2 import frames
from iskander.transport.http2.call import Call
from iskander.transport.http2.call_receiver import WINDOW_BYTES
from iskander.transport.http2.context import Host
from iskander.transport.http2.frame_sender import FrameSender
from iskander.transport.http2.frames import Code, ConnectionBroken, StreamError
from iskander.transport.http2.rate_limit import RateLimiter
from iskander.transport.http2.request_headers import HEADER_LIST_BYTES_MAX
from iskander.transport.http2.streams import Streams
from iskander.transport.turn_scheduler import QUANTUM_NS, ReadBurst

FRAME_BYTES_MAX: Final = 1 << 20
"""Of the DATA frames that are taken; a larger message comes in several."""
CONTROL_BYTES_MAX: Final = 65_536
"""Of any other frame."""
CLOCK_FRAMES: Final = 8
"""Frames between two looks at the clock."""
CALLS_TOGETHER: Final = 4
"""Calls opened in a row before they are served."""
TASKS_A_TURN: Final = 4
"""Calls that began a task in one turn; no clock here sees the work of a task."""
FREE_SETTINGS: Final = 16
"""Settings of one frame that cost no more than the frame."""
FREE_CALLS: Final = 100
"""Open calls whose windows a setting changes at the cost of a frame."""
WINDOW_COST: Final = 0.1
"""Of opening a window, where nothing was sent that used it up."""
HTTP1_LINE_BYTES: Final = 4096
"""Of the first read, in which a request line of HTTP/1 is recognized."""
_ALIVE: Final = b"iskalive"
_LEAVING: Final = b"iskleave"
_NOT_HTTP2: Final = (
    b"HTTP/1.1 505 HTTP Version Not Supported\r\nconnection: close\r\n"
    b"content-type: text/plain\r\n\r\nThis port speaks gRPC over HTTP/2.\n"
)


class Connection(asyncio.BufferedProtocol):
    """The server's end of a connection."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.output: FrameSender
        self.streams: Streams
        self.deficit_ns = self.wasted_ns = 0
        self._transport: asyncio.Transport
        self._is_greeted = self._is_leaving = self._is_closing = False
        self._rest = memoryview(b"")
        self._is_waiting = self._is_behind = False
        self._incomplete_ns = self._countdown = 0
        self._heard_ns = now_ns()
        self._pinged_ns = 0
        self._limiter = RateLimiter(self._heard_ns)
        self._burst = ReadBurst(host.turns)

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)  # By its methods; uvloop's is no kin.
        self.output = FrameSender(self._transport)
        self.streams = Streams(self.host, self.output, self._limiter, self._on_idle)
        self.host.connections.add(self)
        self.host.budget.holders.add(self.streams)

    def connection_lost(self, error: Exception | None) -> None:
        """End the calls: nobody is there for their answers."""
        del error
        self.host.forget(self)
        self.host.budget.holders.discard(self.streams)
        self._rest = memoryview(b"")
        self._end_calls()

    def pause_writing(self) -> None:
        """The socket is full."""
        self.output.pause()
        self.host.charge_unsent(self)

    def resume_writing(self) -> None:
        """The socket takes more."""
        self.host.charge_unsent(self)
        self.output.resume()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: the same for all connections, since none is kept there."""
        del sizehint
        return self.host.scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Process what was read, for at most a quantum of time."""
        began_ns = self._heard_ns = now_ns()
        self._pinged_ns = 0
        view = self.host.scratch[:nbytes]
        if self._rest:
            view, self._rest = memoryview(bytes(self._rest) + view), memoryview(b"")
        if self._is_waiting:
            self._rest = memoryview(bytes(view))
            return
        self._process(view, began_ns + QUANTUM_NS)
        ended_ns = now_ns()
        if self._burst.is_long(began_ns, ended_ns, nbytes, QUANTUM_NS) or self._is_behind:
            self.deficit_ns = QUANTUM_NS - (ended_ns - began_ns)
            self._wait()

    def take_turn(self, until_ns: int) -> bool:
        """Process input that was left over until that time; return whether some is left."""
        rest, self._rest = self._rest, memoryview(b"")
        self._process(rest, until_ns)
        if self._is_behind and not self.output.is_closed:
            return True
        self._is_waiting = False
        if not self._transport.is_closing():
            self._transport.resume_reading()
        return False

    def note_cpu(self, used_ns: int) -> bool:
        """Account for processor time of a turn; return whether the connection goes on."""
        self.wasted_ns = used_ns - self.streams.take_granted_ns()
        try:
            self._limiter.charge_cpu(now_ns(), self.wasted_ns)
        except ConnectionBroken as error:
            self._break(error)
        return not self.output.is_closed

    # The calls' and the server's side.

    @property
    def calls(self) -> dict[int, Call]:
        """The open calls, by stream."""
        return self.streams.calls

    @property
    def has_unsent(self) -> bool:
        """Whether anything that was said to the client still waits for it to read."""
        return self.output.has_unsent or any(call.is_blocked for call in self.calls.values())

    @property
    def unsent_bytes(self) -> int:
        """What the socket has not taken."""
        return self._transport.get_write_buffer_size()

    @property
    def idle_since_ns(self) -> int:
        """Since when there is no open call and nothing to send; 0 while there is."""
        return 0 if self.calls or self._is_waiting or self.has_unsent else self._heard_ns

    def give_way(self) -> None:
        """Close, so that another connection has a place; the client may repeat what it sent."""
        self.output.emit(frames.goaway(self.streams.last_id, Code.NO_ERROR, "idle"))
        self._part()

    def leave(self) -> None:
        """Ask the client to open its next calls elsewhere.

        What it opens before it has heard of that is still taken: the first GOAWAY refuses nothing,
        and the answer to the ping behind it tells that it was read.
        """
        if not self._is_greeted:
            self._part()
        elif not self._is_leaving:
            self._is_leaving = True
            self.output.emit(frames.goaway(frames.WINDOW_MAX, Code.NO_ERROR))
            self.output.emit(frames.frame(frames.PING, 0, 0, _LEAVING))

    def abort(self) -> None:
        """Close now, whatever is unsent."""
        self.output.close()
        self._transport.abort()

    def look_after(self, now: int) -> None:
        """Find out whether the peer is still there; one that never said what it is goes."""
        timeouts = self.host.timeouts
        silent_s = (now - self._heard_ns) / NS_PER_S
        if self.output.is_closed or not self._is_greeted:
            if silent_s > timeouts.preface_s:
                self._time_out("preface")
            return
        self.streams.look_after(now)
        if self._incomplete_ns and now - self._incomplete_ns > timeouts.headers_s * NS_PER_S:
            message = f"a header block or frame was not complete within {timeouts.headers_s:g} s"
            self._break(ConnectionBroken(Code.ENHANCE_YOUR_CALM, message, "headers_timeout"))
        elif self.output.is_stalled(now, timeouts.response_s):
            self._time_out("response")
        elif self._pinged_ns:
            if now - self._pinged_ns > timeouts.keepalive_s * NS_PER_S:
                self._time_out("keepalive")
        elif silent_s > timeouts.idle_s:
            self._pinged_ns = now
            self.output.emit(frames.frame(frames.PING, 0, 0, _ALIVE))

    def _time_out(self, name: str) -> None:
        self.host.count_ended(f"{name}_timeout")
        self.abort()

    # Frames.

    def _process(self, view: memoryview, until_ns: int) -> None:
        """Process input until its end or that time; keep the rest."""
        self._is_behind = False
        if self.output.is_closed:
            return
        self.streams.now_ns = self._heard_ns
        try:
            at = 0
            if not self._is_greeted:
                at = self._greet(view)
            if self._is_greeted:
                self._take(view, at, until_ns)
            if self.streams.opened:
                self.streams.serve_opened()
        except ConnectionBroken as error:
            self._break(error)

    def _wait(self) -> None:
        """Stop reading until the rest of the input has had its turns."""
        if not (self._is_waiting or self.output.is_closed):
            self._is_waiting = True
            self._transport.pause_reading()
            self.host.turns.wait(self)

    def _greet(self, view: memoryview) -> int:
        """Read the client's preface and send the server's settings; return where frames begin."""
        said = bytes(view[: len(frames.PREFACE)])
        self._is_greeted = said == frames.PREFACE
        if self._is_greeted:
            self.output.emit(self._settings())
        elif frames.PREFACE.startswith(said):
            self._rest = memoryview(said)
        else:
            is_http1 = b" HTTP/1." in bytes(view[:HTTP1_LINE_BYTES])
            invalid = frames.goaway(0, Code.PROTOCOL_ERROR, "invalid connection preface")
            self.output.emit(_NOT_HTTP2 if is_http1 else invalid)
            self._part()
        return len(frames.PREFACE)

    def _settings(self) -> bytes:
        taken = {
            frames.MAX_CONCURRENT_STREAMS: self.host.calls_max,
            frames.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
            frames.MAX_FRAME_SIZE: FRAME_BYTES_MAX,
            frames.MAX_HEADER_LIST_SIZE: HEADER_LIST_BYTES_MAX,
        }
        # What is under way is bounded for each call; all of them together are not held up.
        wide = frames.window_update(0, frames.WINDOW_MAX - frames.WINDOW_DEFAULT)
        return frames.settings(taken) + wide

    def _take(self, view: memoryview, at: int, until_ns: int) -> None:
        """Process frames until the input ends, or that time; keep the rest."""
        end, streams = len(view), self.streams
        streams.is_behind = False
        streams.tasks_begun = 0
        if streams.has_data_left:
            at = streams.take_data(view, at, until_ns)
        self._countdown = CLOCK_FRAMES
        while end - at >= frames.HEAD_BYTES and not streams.is_behind:
            self._countdown -= 1
            if self._countdown < 0:
                if now_ns() >= until_ns:
                    streams.is_behind = True
                    break
                self._countdown = CLOCK_FRAMES
            behind = self._take_frame(view, at, until_ns)
            if behind == at:
                break
            at = behind
        self._is_behind = streams.is_behind
        self._keep(view, at)

    def _take_frame(self, view: memoryview, at: int, until_ns: int) -> int:
        """Process the frame that begins at `at`; return where the next does, `at` to wait for more.

        The payload of DATA may come later: `streams.has_data_left`.
        """
        head: tuple[int, int, int, int, int] = frames.read_head(view, at)
        high, low, kind, flags, stream_id = head
        stream_id &= frames.WINDOW_MAX
        length = high << 16 | low
        if self.streams.is_block_open and kind != frames.CONTINUATION:
            raise ConnectionBroken(Code.PROTOCOL_ERROR, "a header block is not finished")
        if length > (CONTROL_BYTES_MAX if kind != frames.DATA else FRAME_BYTES_MAX):
            raise ConnectionBroken(Code.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
        start = at + frames.HEAD_BYTES
        if kind == frames.DATA:
            padding = 0
            if flags & frames.PADDED:
                if length and start == len(view):
                    return at
                padding = frames.padding_bytes(view, start, length)
                start += 1
            self.streams.begin_data(length - padding, padding, flags, stream_id)
            return self.streams.take_data(view, start, until_ns)
        stop = start + length
        if stop > len(view) or (kind == frames.HEADERS and not self._may_open()):
            return at
        try:
            self._on_frame(kind, flags, stream_id, view[start:stop])
        except StreamError as error:
            self.streams.reset(stream_id, error.code)
        return stop

    def _may_open(self) -> bool:
        """Whether one more call may be opened in this turn; serve those that were."""
        streams = self.streams
        if len(streams.opened) >= CALLS_TOGETHER:
            streams.serve_opened()
            streams.is_behind = streams.tasks_begun >= TASKS_A_TURN
        return not (streams.is_behind or self.output.is_closed)

    def _keep(self, view: memoryview, at: int) -> None:
        """Keep the input that was not processed, and since when the rest of a frame is missing."""
        is_left = at < len(view)
        if not (self.streams.is_block_open or (is_left and not self._is_behind)):
            self._incomplete_ns = 0
        elif not self._incomplete_ns:
            self._incomplete_ns = self._heard_ns
        if is_left:
            # Input that waits for its turn was copied once, and is the connection's own.
            rest = view[at:]
            self._rest = rest if self._is_waiting else memoryview(bytes(rest))

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: memoryview) -> None:
        streams = self.streams
        if kind == frames.HEADERS:
            streams.on_headers(flags, stream_id, payload)
            self._countdown = 0  # A block takes long enough to look at the clock after it.
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
        elif kind == frames.GOAWAY:
            self._on_goaway(stream_id, payload)
        elif kind == frames.PRIORITY:
            self._on_priority(stream_id, payload)
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionBroken(Code.PROTOCOL_ERROR, "a client cannot push")
        else:
            self._limiter.charge(self._heard_ns)  # Unknown kinds are ignored.

    def _on_priority(self, stream_id: int, payload: memoryview) -> None:
        """Priorities are not used."""
        self._limiter.charge(self._heard_ns)
        number = frames.read_number(payload, frames.PRIORITY_BYTES)
        if not stream_id or number == stream_id:
            raise ConnectionBroken(Code.PROTOCOL_ERROR, f"PRIORITY of stream {stream_id}")

    def _on_settings(self, flags: int, stream_id: int, payload: memoryview) -> None:
        self._limiter.charge(self._heard_ns)
        self._require_no_stream(stream_id)
        if flags & frames.ACK:
            if payload:
                raise ConnectionBroken(Code.FRAME_SIZE_ERROR, "an acknowledgement with settings")
            return
        pairs = frames.read_settings(payload)
        self._limiter.charge(self._heard_ns, len(pairs) / FREE_SETTINGS)
        # First: what a wider window lets out is more than the client takes until it has read this.
        self.output.emit(frames.frame(frames.SETTINGS, frames.ACK, 0))
        self.output.take_settings(pairs)
        window = dict(pairs).get(frames.INITIAL_WINDOW_SIZE, self.output.call_window)
        if window != self.output.call_window:
            self._limiter.charge(self._heard_ns, len(self.calls) / FREE_CALLS)
            self.output.set_call_window(window, self.calls.values())

    def _on_ping(self, flags: int, stream_id: int, payload: memoryview) -> None:
        self._require_no_stream(stream_id)
        if len(payload) != 8:
            raise ConnectionBroken(Code.FRAME_SIZE_ERROR, "a ping has 8 bytes")
        self._limiter.charge_reply(self._heard_ns, 1.0, self.streams.take_answers())
        if not flags & frames.ACK:
            self.output.emit(frames.frame(frames.PING, frames.ACK, 0, bytes(payload)))
        elif bytes(payload) == _LEAVING and self._is_leaving and not self._is_closing:
            self._is_closing = self.streams.is_refusing = True
            self.output.emit(frames.goaway(self.streams.last_id, Code.NO_ERROR))
            if not self.calls:
                self._transport.close()

    def _on_window_update(self, stream_id: int, payload: memoryview) -> None:
        increment = frames.read_number(payload)
        self._limiter.charge_reply(self._heard_ns, WINDOW_COST, self.streams.take_answers())
        if stream_id and self.streams.is_idle(stream_id):
            raise ConnectionBroken(Code.PROTOCOL_ERROR, "WINDOW_UPDATE of a call never opened")
        call = self.calls.get(stream_id)
        if not stream_id or call is not None:
            self.output.widen(call, increment)
        elif not increment:
            raise ConnectionBroken(Code.PROTOCOL_ERROR, "WINDOW_UPDATE of 0 bytes")

    def _on_goaway(self, stream_id: int, payload: memoryview) -> None:
        """The client opens nothing more; what it opened is finished."""
        self._limiter.charge(self._heard_ns)
        self._require_no_stream(stream_id)
        frames.read_number(payload, frames.GOAWAY_BYTES)

    def _require_no_stream(self, stream_id: int) -> None:
        if stream_id:
            raise ConnectionBroken(Code.PROTOCOL_ERROR, f"a connection's frame on {stream_id}")

    def _break(self, error: ConnectionBroken) -> None:
        self.host.count_ended(error.reason)
        self.output.emit(frames.goaway(self.streams.last_id, error.code, str(error)))
        self._part()

    def _part(self) -> None:
        self._transport.close()
        self._end_calls()

    def _end_calls(self) -> None:
        self.output.close()
        self.streams.close()

    def _on_idle(self) -> None:
        """Close, where the client was told to go and its last call has ended."""
        if self._is_closing:
            self._transport.close()
