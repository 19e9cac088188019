"""One connection: frames in, frames out, flow control, and what a peer may cost.

A DATA frame's bytes go to its call as they come, cut anywhere; every other frame is taken once it
is whole. Nothing here waits.

Runs on: gateway loop. Source: RFC 9113.
"""

from __future__ import annotations

import asyncio
from typing import Final, cast

from iskander.clock import NS_PER_S, now_ns
from iskander.gateway.http2 import frames, headers
from iskander.gateway.http2.call import WINDOW_BYTES, Call
from iskander.gateway.http2.frames import Code, ConnectionBroken
from iskander.gateway.http2.headers import Fields, HeaderBlocks
from iskander.gateway.http2.host import Host
from iskander.gateway.http2.output import Output
from iskander.gateway.http2.patience import Patience
from iskander.gateway.http2.room import Room
from iskander.gateway.http2.status import RpcError, Status

FRAME_BYTES_MAX: Final = 1 << 20
"""Of the DATA frames that are taken; a larger message comes in several."""
CONTROL_BYTES_MAX: Final = 65_536
"""Of any other frame."""
FREE_FIELDS: Final = 32
"""Headers of a call that cost no patience; 2000, by a table two kilobytes, take 10 ms to read."""
FREE_SETTINGS: Final = 16
"""Settings of one frame that cost no more than the frame."""
FREE_CALLS: Final = 100
"""Open calls whose windows a setting changes at the cost of a frame."""
WINDOW_COST: Final = 0.1
"""Of opening a window, where nothing was sent that used it up."""
GREETING_NS: Final = 10 * NS_PER_S
"""How long a client may take to say what it speaks, and to be gone when it is told to go."""
IDLE_NS: Final = 60 * NS_PER_S
PING_NS: Final = 20 * NS_PER_S
"""A client that was silent for the one is asked whether it is there, and goes without an answer
within the other."""
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
        self.calls: dict[int, Call] = {}
        self.output: Output
        self.room = Room()
        self._opened: list[Call] = []
        self._transport: asyncio.Transport
        self._is_greeted = self._is_leaving = self._is_closing = False
        self._blocks = HeaderBlocks()
        self._rest = b""
        self._data_left = 0
        self._data_call: Call | None = None
        self._data_ends = False
        self._received = 0
        self._last_id = 0
        self._heard_ns = now_ns()
        self._pinged_ns = 0
        self._patience = Patience(self._heard_ns)

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)  # By its methods; uvloop's is no kin.
        self.output = Output(self._transport)
        self.host.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        """End the calls: nobody is there for their answers."""
        del error
        self.host.connections.discard(self)
        self._end_calls()

    def pause_writing(self) -> None:
        """The socket is full."""
        self.output.pause()

    def resume_writing(self) -> None:
        """The socket takes more."""
        self.output.resume()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: the same for all connections, since none is kept there."""
        del sizehint
        return self.host.scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Take apart what has come."""
        self._heard_ns, self._pinged_ns = now_ns(), 0
        view = self.host.scratch[:nbytes]
        if self._rest:
            view, self._rest = memoryview(self._rest + view), b""
        try:
            if self._is_greeted:
                self._take(view)
            elif self._greet(view):
                self._take(view[len(frames.PREFACE) :])
            if self._opened:
                self._begin()
        except ConnectionBroken as error:
            self._break(error.code, str(error))

    # The calls' and the server's side.

    def forget(self, call: Call) -> None:
        """A call is over."""
        self.calls.pop(call.stream_id, None)
        self.output.drop(call)
        if self._data_call is call:
            self._data_call = None
        if self._is_closing and not self.calls:
            self._transport.close()

    @property
    def has_unsent(self) -> bool:
        """Whether anything that was said to the client still waits for it to read."""
        return self.output.has_unsent or any(call.is_blocked for call in self.calls.values())

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
        self._transport.abort()

    def look_after(self, now: int) -> None:
        """Find out whether the peer is still there; one that never said what it is goes."""
        self.room.look_after(now)
        silent_ns = now - self._heard_ns
        if self.output.is_closed or not self._is_greeted:
            if silent_ns > GREETING_NS:
                self.abort()
        elif self._pinged_ns:
            if now - self._pinged_ns > PING_NS:
                self.abort()
        elif silent_ns > IDLE_NS:
            self._pinged_ns = now
            self.output.emit(frames.frame(frames.PING, 0, 0, _ALIVE))

    # Frames.

    def _greet(self, view: memoryview) -> bool:
        """Read the client's preface, and say what this server takes; whether it is complete."""
        said = bytes(view[: len(frames.PREFACE)])
        self._is_greeted = said == frames.PREFACE
        if self._is_greeted:
            self.output.emit(self._settings())
        elif frames.PREFACE.startswith(said):
            self._rest = said
        else:
            self.output.emit(_NOT_HTTP2)
            self._part()
        return self._is_greeted

    def _settings(self) -> bytes:
        taken = {
            frames.MAX_CONCURRENT_STREAMS: self.host.calls_max,
            frames.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
            frames.MAX_FRAME_SIZE: FRAME_BYTES_MAX,
            frames.MAX_HEADER_LIST_SIZE: headers.HEADER_LIST_BYTES_MAX,
        }
        # What is under way is bounded for each call; all of them together are not held up.
        wide = frames.window_update(0, frames.WINDOW_MAX - frames.WINDOW_DEFAULT)
        return frames.settings(taken) + wide

    def _take(self, view: memoryview) -> None:
        at, end = 0, len(view)
        if self._data_left:
            at = min(self._data_left, end)
            self._take_data(view[:at])
        while end - at >= frames.HEAD_BYTES:
            head: tuple[int, int, int, int, int] = frames.read_head(view, at)
            high, low, kind, flags, stream_id = head
            stream_id &= frames.WINDOW_MAX
            length = high << 16 | low
            if self._blocks.is_open and kind != frames.CONTINUATION:
                raise ConnectionBroken(Code.PROTOCOL_ERROR, "a header block is not finished")
            if length > (CONTROL_BYTES_MAX if kind != frames.DATA else FRAME_BYTES_MAX):
                raise ConnectionBroken(Code.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            start = at + frames.HEAD_BYTES
            stop = start + length
            if kind == frames.DATA and not flags & frames.PADDED:
                self._begin_data(length, flags, stream_id)
                at = min(stop, end)
                self._take_data(view[start:at])
                continue
            if stop > end:
                break
            at = stop
            self._on_frame(kind, flags, stream_id, view[start:stop])
        if at < end:
            self._rest = bytes(view[at:])

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: memoryview) -> None:
        if kind == frames.HEADERS:
            self._on_headers(flags, stream_id, payload)
        elif kind == frames.WINDOW_UPDATE:
            self._on_window_update(stream_id, payload)
        elif kind == frames.DATA:
            self._on_padded_data(flags, stream_id, payload)
        elif kind == frames.PING:
            self._on_ping(flags, payload)
        elif kind == frames.RST_STREAM:
            self._on_rst_stream(stream_id, payload)
        elif kind == frames.SETTINGS:
            self._on_settings(flags, payload)
        elif kind == frames.CONTINUATION:
            self._on_continuation(flags, stream_id, payload)
        elif kind == frames.GOAWAY:
            self._on_goaway(payload)
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionBroken(Code.PROTOCOL_ERROR, "a client cannot push")
        else:
            self._patience.spend(self._heard_ns)  # Priorities and unknown kinds are passed over.

    def _begin_data(self, length: int, flags: int, stream_id: int) -> None:
        if not 0 < stream_id <= self._last_id:
            raise ConnectionBroken(Code.PROTOCOL_ERROR, "DATA of a call that was never opened")
        self._data_left = length
        self._data_call = self.calls.get(stream_id)
        self._data_ends = bool(flags & frames.END_STREAM)
        self._received += length
        if self._received > frames.WINDOW_MAX // 2:
            self.output.emit(frames.window_update(0, self._received))
            self._received = 0
        if not length and not self._data_ends:
            self._patience.spend(self._heard_ns)

    def _take_data(self, piece: memoryview) -> None:
        self._data_left -= len(piece)
        call = self._data_call
        if call is None:
            return  # It is over; the client does not know yet.
        if call.has_all_input:
            raise ConnectionBroken(Code.STREAM_CLOSED, "DATA behind the end of a call's input")
        call.take(piece)
        if self._data_ends and not self._data_left:
            call.take_end()

    def _on_padded_data(self, flags: int, stream_id: int, payload: memoryview) -> None:
        piece = frames.unpadded(payload, flags & frames.PADDED)
        self._begin_data(len(piece), flags, stream_id)
        self._take_data(piece)
        # Padding counts against the windows, and nobody reads it.
        self._received += len(payload) - len(piece)
        if stream_id in self.calls and len(payload) > len(piece):
            self.output.emit(frames.window_update(stream_id, len(payload) - len(piece)))

    def _on_headers(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if not stream_id % 2:
            raise ConnectionBroken(Code.PROTOCOL_ERROR, f"a client opened stream {stream_id}")
        self._blocks.begin(stream_id, flags, payload)
        if flags & frames.END_HEADERS:
            self._end_block()

    def _on_continuation(self, flags: int, stream_id: int, payload: memoryview) -> None:
        self._blocks.go_on(stream_id, payload)
        if flags & frames.END_HEADERS:
            self._end_block()
        else:
            self._patience.spend(self._heard_ns)

    def _end_block(self) -> None:
        stream_id, is_last, fields = self._blocks.end()
        count = len(fields.pairs)
        if count > FREE_FIELDS:
            self._patience.spend(self._heard_ns, count / FREE_FIELDS)
        call = self.calls.get(stream_id)
        if stream_id > self._last_id:
            self._open(stream_id, fields, is_last=is_last)
        elif call is None:
            self._patience.spend(self._heard_ns)  # Its end and these crossed, or it is one of many.
        else:
            if not is_last or call.has_all_input:
                raise ConnectionBroken(Code.PROTOCOL_ERROR, "a second header block of a call")
            call.take_end()

    def _open(self, stream_id: int, fields: Fields, *, is_last: bool) -> None:
        self._last_id = stream_id
        if self._is_closing or len(self.calls) >= self.host.calls_max:
            self._patience.spend(self._heard_ns)
            return self.output.emit(frames.rst_stream(stream_id, Code.REFUSED_STREAM))
        try:
            request = fields.request()
        except RpcError as refused:
            self._patience.spend(self._heard_ns)
            error = self.host.named(fields.path, refused)
            ends = headers.trailers(error.status, error.message, error.trailers)
            block = headers.RESPONSE + ends
            self.output.emit_block(stream_id, frames.END_STREAM, block)
            if not is_last:
                self.output.emit(frames.rst_stream(stream_id, Code.NO_ERROR))
            return None
        call = self.calls[stream_id] = Call(self, stream_id, request)
        if is_last:
            call.take_end()
        self._opened.append(call)
        return None

    def _begin(self) -> None:
        """Begin to answer the calls that were opened, with what has come of them by now."""
        opened, self._opened = self._opened, []
        for call in opened:
            if not (call.is_over or self.host.at_once(call)):
                call.task = self.host.loop.create_task(_run(self.host, call))

    def _on_rst_stream(self, stream_id: int, payload: memoryview) -> None:
        frames.read_number(payload)
        self._patience.spend(self._heard_ns)
        if stream_id > self._last_id:
            raise ConnectionBroken(Code.PROTOCOL_ERROR, "a reset of a call that was never opened")
        call = self.calls.get(stream_id)
        if call is not None:
            call.close()

    def _on_settings(self, flags: int, payload: memoryview) -> None:
        self._patience.spend(self._heard_ns)
        if flags & frames.ACK:
            return
        pairs = frames.read_settings(payload)
        self._patience.spend(self._heard_ns, len(pairs) / FREE_SETTINGS)
        # First: what a wider window lets out is more than the client takes until it has read this.
        self.output.emit(frames.frame(frames.SETTINGS, frames.ACK, 0))
        self.output.take_settings(pairs)
        window = dict(pairs).get(frames.INITIAL_WINDOW_SIZE, self.output.call_window)
        if window != self.output.call_window:
            self._patience.spend(self._heard_ns, len(self.calls) / FREE_CALLS)
            self.output.set_call_window(window, self.calls.values())

    def _on_ping(self, flags: int, payload: memoryview) -> None:
        if len(payload) != 8:
            raise ConnectionBroken(Code.FRAME_SIZE_ERROR, "a ping has 8 bytes")
        self._patience.hear(self._heard_ns, 1.0, self.output.take_answers())
        if not flags & frames.ACK:
            self.output.emit(frames.frame(frames.PING, frames.ACK, 0, bytes(payload)))
        elif bytes(payload) == _LEAVING and self._is_leaving and not self._is_closing:
            self._is_closing = True
            self.output.emit(frames.goaway(self._last_id, Code.NO_ERROR))
            if not self.calls:
                self._transport.close()

    def _on_window_update(self, stream_id: int, payload: memoryview) -> None:
        increment = frames.read_number(payload)
        self._patience.hear(self._heard_ns, WINDOW_COST, self.output.take_answers())
        call = self.calls.get(stream_id)
        if not stream_id or call is not None:
            self.output.widen(call, increment)

    def _on_goaway(self, payload: memoryview) -> None:
        """The client opens nothing more; what it opened is finished."""
        self._patience.spend(self._heard_ns)
        frames.read_number(payload)

    def _break(self, code: Code, message: str) -> None:
        self.output.emit(frames.goaway(self._last_id, code, message))
        self._part()

    def _part(self) -> None:
        self._transport.close()
        self._end_calls()

    def _end_calls(self) -> None:
        self.output.close()
        self._opened.clear()
        for call in list(self.calls.values()):
            call.close()


async def _run(host: Host, call: Call) -> None:
    try:
        await host.serve(call)
    except RpcError as error:
        call.end(error.status, error.message, error.trailers)
    except BaseException:
        call.end(Status.INTERNAL, "the server failed")
        raise
    else:
        call.end()
