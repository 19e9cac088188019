"""Sender of frames on one connection: flow control and round robin over calls.

Data blocked by a flow-control window or a full socket stays with its call. When there is capacity,
the blocked calls send one frame each in turn.

Runs on: gateway loop. Source: RFC 9113, section 5.2 (flow control) and 6.9 (WINDOW_UPDATE); RFC
7541, section 4.2 (the table's size).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.gateway.transport.http2 import frames
from iskander.gateway.transport.http2 import response_headers as headers
from iskander.gateway.transport.http2.frames import ConnectionBroken, ErrorCode, StreamError

if TYPE_CHECKING:
    from iskander.gateway.transport.http2.call import Call, Message

WRITE_BUFFER_BYTES: Final = 1 << 20
"""High-water mark of the transport's write buffer."""
UNCOUNTED_BYTES_MAX: Final = 1 << 20
"""Limit on bytes without flow control behind a full socket; above it the connection is aborted."""
SMALL_FRAME_BYTES: Final = 512
"""A smaller DATA frame that does not empty its call is not counted as a response frame."""
FRAMES_PER_ITERATION: Final = 64
"""DATA frames sent for blocked calls in one event loop iteration; each may wake a task."""
JOINED_BYTES_MAX: Final = 65_536
"""Up to this size one copy costs less than writing the parts of a message one by one."""

_START_BYTES: Final = 5  # Frame header without the stream.


def _frame_start(flags: int, block: bytes) -> bytes:
    return frames.head(len(block), frames.HEADERS, flags, 0)[:_START_BYTES]


_RESPONSE_START: Final = _frame_start(frames.END_HEADERS, headers.RESPONSE)
_OK_START: Final = _frame_start(frames.END_HEADERS | frames.END_STREAM, headers.OK)
_pack_headers: Final = struct.Struct(f"!{_START_BYTES}sI{len(headers.RESPONSE)}s BHxxI xI").pack
"""HEADERS, DATA header and message prefix; DATA's type and flags and the compressed flag are 0."""
_pack_trailers: Final = struct.Struct(f"!{_START_BYTES}sI{len(headers.OK)}s").pack


class FrameSender:
    """The sending half of a connection; discards all output once it `is_closed`."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._window = frames.WINDOW_DEFAULT
        self.call_window = frames.WINDOW_DEFAULT  # Initial send window of a call.
        self.frame_bytes = frames.FRAME_BYTES_DEFAULT  # Largest that the client accepts.
        self._table_bytes = headers.TABLE_BYTES_DEFAULT
        self._table_update = b""
        self._blocked: dict[Call, None] = {}
        self._paused_ns = self._uncounted_bytes = self._response_frames = 0
        self._is_paused = self._is_flush_scheduled = self.is_closed = False
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    @property
    def has_unsent(self) -> bool:
        """Whether the transport's write buffer contains data."""
        return not self.is_closed and self._transport.get_write_buffer_size() > 0

    def emit(self, raw: bytes) -> None:
        """Send bytes without flow control; abort if too many are unsent."""
        if self.is_closed:
            return
        self._transport.write(raw)
        if self._is_paused:
            self._uncounted_bytes += len(raw)
            if self._uncounted_bytes > UNCOUNTED_BYTES_MAX:
                self.is_closed = True
                self._transport.abort()

    def emit_block(self, stream_id: int, flags: int, block: bytes) -> None:
        """Send a header block, with a table size update if one is due."""
        self._response_frames += 1
        if self._table_update:
            block, self._table_update = self._table_update + block, b""
        self.emit(frames.header_block(stream_id, flags, block, self.frame_bytes))

    def can_send(self, call: Call, size: int) -> bool:
        """Whether a message of this size can be sent now, in one frame."""
        is_within_window = size <= self._window and size <= call.send_window
        return is_within_window and size <= self.frame_bytes and not self._is_paused

    def send(self, call: Call, size: int, parts: Sequence[Message]) -> None:
        """Send a DATA frame with these parts; requires capacity."""
        self._write_data(call, size, [frames.head(size, frames.DATA, 0, call.stream_id), *parts])

    def can_answer(self, call: Call, length: int) -> bool:
        """Whether a response of one message can be sent now."""
        return not self._table_update and self.can_send(call, frames.PREFIX_BYTES + length)

    def answer(
        self, call: Call, length: int, parts: Sequence[Message], load_trailer: bytes
    ) -> None:
        """Send a response of one message with its status; requires capacity."""
        stream_id, size = call.stream_id, frames.PREFIX_BYTES + length
        high, low = size >> 16, size & 0xFFFF
        head = headers.RESPONSE
        start = _pack_headers(_RESPONSE_START, stream_id, head, high, low, stream_id, length)
        if load_trailer:
            block = headers.OK + load_trailer
            end = frames.header_block(stream_id, frames.END_STREAM, block, self.frame_bytes)
        else:
            end = _pack_trailers(_OK_START, stream_id, headers.OK)
        self._write_data(call, size, [start, *parts, end])

    def _write_data(self, call: Call, size: int, raw: list[Message]) -> None:
        """Write frames that contain one DATA frame of this size."""
        self._window -= size
        call.send_window -= size
        self._response_frames += 1 + (size >> 14)
        if self.is_closed:
            return
        if size <= JOINED_BYTES_MAX:
            self._transport.write(b"".join(raw))
        else:
            self._transport.writelines(raw)

    def enqueue(self, call: Call) -> None:
        """Send the call's data as soon as there is capacity."""
        self._blocked[call] = None
        self._flush()

    def dequeue(self, call: Call) -> None:
        """Remove a closed call from the queue."""
        self._blocked.pop(call, None)

    def is_stalled(self, now_ns: int, response_s: float) -> bool:
        """Whether the socket has been full for longer than `response_s`."""
        return self._is_paused and now_ns - self._paused_ns > response_s * NS_PER_S

    def pause(self) -> None:
        """Stop sending: the socket is full."""
        self._is_paused = True
        self._paused_ns = now_ns()

    def resume(self) -> None:
        """Continue sending: the socket has capacity."""
        self._uncounted_bytes = 0
        self._is_paused = False
        self._flush()

    def increase_window(self, call: Call | None, increment: int) -> None:
        """Apply a WINDOW_UPDATE to a call, or to the connection if None."""
        window = self._window if call is None else call.send_window
        if not increment or increment > frames.WINDOW_MAX - window:
            code = ErrorCode.FLOW_CONTROL_ERROR if increment else ErrorCode.PROTOCOL_ERROR
            message = f"WINDOW_UPDATE of {increment} bytes to a window of {window}"
            raise ConnectionBroken(code, message) if call is None else StreamError(code, message)
        if call is None:
            self._window += increment
        else:
            call.send_window += increment
            if call.is_blocked:
                self._blocked[call] = None
        if self._blocked:
            self._flush()

    def apply_settings(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Apply the client's frame size and header table size."""
        for name, value in pairs:
            if name == frames.MAX_FRAME_SIZE:
                self.frame_bytes = value
            elif name == frames.HEADER_TABLE_SIZE and value < self._table_bytes:
                # The encoder never adds entries, so a table of 0 bytes fits every limit.
                self._table_bytes, self._table_update = 0, headers.NO_TABLE

    def set_call_window(self, window: int, calls: Iterable[Call]) -> None:
        """Change the initial window, and the windows of open calls by the difference."""
        for call in calls:
            call.send_window += window - self.call_window
            if call.send_window > frames.WINDOW_MAX:
                raise ConnectionBroken(ErrorCode.FLOW_CONTROL_ERROR, "window overflow by SETTINGS")
            if call.is_blocked:
                self._blocked[call] = None
        self.call_window = window
        self._flush()

    def take_response_frames(self) -> int:
        """Return the response frames since the last call; each 16 KiB of DATA adds one."""
        count, self._response_frames = self._response_frames, 0
        return count

    def close(self) -> None:
        """Discard all later output."""
        self.is_closed = True
        self._blocked.clear()

    def _flush(self) -> None:
        """Send the data of blocked calls, up to `FRAMES_PER_ITERATION` frames now."""
        blocked, left = self._blocked, FRAMES_PER_ITERATION
        while blocked and self._window > 0 and not self._is_paused:
            left -= 1
            if left < 0:
                if not self._is_flush_scheduled:
                    self._is_flush_scheduled = True
                    asyncio.get_running_loop().call_soon(self._continue_flush)
                return
            call = next(iter(blocked))
            del blocked[call]
            capacity = min(self._window, call.send_window, self.frame_bytes)
            if capacity <= 0:
                continue  # A WINDOW_UPDATE of the call queues it again.
            parts = call.next_parts(capacity)
            size = sum(map(len, parts))
            self.send(call, size, parts)
            if call.is_blocked:
                blocked[call] = None
                if size < SMALL_FRAME_BYTES:
                    self._response_frames -= 1
            else:
                call.on_sent()

    def _continue_flush(self) -> None:
        self._is_flush_scheduled = False
        self._flush()
