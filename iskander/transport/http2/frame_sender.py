"""What goes out on one connection: flow control, and whose turn it is.

What a window or the socket holds back stays with its call, and is drawn from there, a frame of each
call in turn, when there is room again.

Runs on: gateway loop. Source: RFC 9113, section 5.2 (flow control) and 6.9 (WINDOW_UPDATE); RFC
7541, section 4.2 (the table's size).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from iskander.clock import NS_PER_S, now_ns
from iskander.transport.http2 import frames
from iskander.transport.http2 import response_headers as headers
from iskander.transport.http2.frames import Code, ConnectionBroken, StreamError

if TYPE_CHECKING:
    from iskander.transport.http2.call import Call, Message

WRITE_BUFFER_BYTES: Final = 1 << 20
"""Beyond this, calls keep what they have to send."""
UNREAD_BYTES_MAX: Final = 1 << 20
"""Of what no window counts, behind a full socket; who leaves more unread is cut off."""
CRUMB_BYTES: Final = 512
"""Of a message that the client takes in smaller pieces, each is an answer to nothing."""
FRAMES_A_TURN: Final = 64
"""Sent in one turn for calls that waited for a window; each may wake a task."""
JOINED_BYTES_MAX: Final = 65_536
"""Up to here one copy costs less than handing over the parts of a message one by one."""

_KIND_BYTES: Final = 5
"""Of a frame's head, before its stream."""


def _begun(flags: int, block: bytes) -> bytes:
    return frames.head(len(block), frames.HEADERS, flags, 0)[:_KIND_BYTES]


_RESPONSE_HEAD: Final = _begun(frames.END_HEADERS, headers.RESPONSE)
_OK_HEAD: Final = _begun(frames.END_HEADERS | frames.END_STREAM, headers.OK)
_BEFORE: Final = struct.Struct(f"!{_KIND_BYTES}sI{len(headers.RESPONSE)}s BHxxI xI").pack
"""Of a response, before its message: headers, the head of a DATA frame, the message's prefix. The
kind and flags of DATA are 0, and so is the prefix of what is not compressed."""
_AFTER: Final = struct.Struct(f"!{_KIND_BYTES}sI{len(headers.OK)}s").pack


class FrameSender:
    """The sending half of a connection.

    Args:
        transport: Of the connection.

    Attributes:
        call_window: Bytes that the client takes of a new call.
        frame_bytes: The largest frame that it takes.
        is_closed: Nothing goes out any more.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._window = self.call_window = frames.WINDOW_DEFAULT
        self.frame_bytes = frames.FRAME_BYTES_DEFAULT
        self._table_bytes = headers.TABLE_BYTES_DEFAULT
        self._update = b""
        self._held: dict[Call, None] = {}
        self._is_paused = False
        self._paused_ns = 0
        self._unread_bytes = 0
        self._answers = 0
        self._is_pour_due = False
        self.is_closed = False
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    @property
    def has_unsent(self) -> bool:
        """Whether the socket has not taken all that was sent."""
        return not self.is_closed and self._transport.get_write_buffer_size() > 0

    def emit(self, raw: bytes) -> None:
        """Send bytes that no window counts."""
        if self.is_closed:
            return
        self._transport.write(raw)
        if self._is_paused:
            self._unread_bytes += len(raw)
            if self._unread_bytes > UNREAD_BYTES_MAX:
                # It asks and does not read; nothing that could be said would reach it.
                self.is_closed = True
                self._transport.abort()

    def emit_block(self, stream_id: int, flags: int, block: bytes) -> None:
        """Send a header block, in as many frames as it takes.

        Behind a smaller table the first says that it is known.
        """
        self._answers += 1
        if self._update:
            block, self._update = self._update + block, b""
        self.emit(frames.header_block(stream_id, flags, block, self.frame_bytes))

    def can_send(self, call: Call, size: int) -> bool:
        """Whether a message goes out whole, at once, in one frame."""
        return (
            size <= self._window
            and size <= call.send_window
            and size <= self.frame_bytes
            and not self._is_paused
        )

    def send(self, call: Call, size: int, parts: Sequence[Message]) -> None:
        """Send a DATA frame, for which there is room."""
        self._send(call, size, [frames.head(size, frames.DATA, 0, call.stream_id), *parts])

    def can_answer(self, call: Call, length: int) -> bool:
        """Whether a response of one message goes out whole, at once."""
        return not self._update and self.can_send(call, frames.PREFIX_BYTES + length)

    def answer(self, call: Call, length: int, parts: Sequence[Message]) -> None:
        """Send a response of one message, for which there is room, and its status."""
        stream_id, size = call.stream_id, frames.PREFIX_BYTES + length
        high, low = size >> 16, size & 0xFFFF
        before = _BEFORE(_RESPONSE_HEAD, stream_id, headers.RESPONSE, high, low, stream_id, length)
        self._send(call, size, [before, *parts, _AFTER(_OK_HEAD, stream_id, headers.OK)])

    def _send(self, call: Call, size: int, raw: list[Message]) -> None:
        """Send what has a DATA frame of that size in it."""
        self._window -= size
        call.send_window -= size
        self._answers += 1 + (size >> 14)
        if self.is_closed:
            return
        if size <= JOINED_BYTES_MAX:
            self._transport.write(b"".join(raw))
        else:
            self._transport.writelines(raw)

    def hold(self, call: Call) -> None:
        """Send what a call has as soon as there is room."""
        self._held[call] = None
        self._pour()

    def drop(self, call: Call) -> None:
        """A call has nothing more to send."""
        self._held.pop(call, None)

    def is_stalled(self, now_ns: int, response_s: float) -> bool:
        """Whether the socket has taken nothing for so long, though there is something to send."""
        return self._is_paused and now_ns - self._paused_ns > response_s * NS_PER_S

    def pause(self) -> None:
        """The socket takes nothing for now."""
        self._is_paused = True
        self._paused_ns = now_ns()

    def resume(self) -> None:
        """The socket takes more."""
        self._unread_bytes = 0
        self._is_paused = False
        self._pour()

    def widen(self, call: Call | None, increment: int) -> None:
        """The client takes more of a call, or of the connection as a whole.

        Raises:
            StreamError: The window of a call grows by nothing, or beyond its maximum.
            ConnectionBroken: The same of the connection's window.
        """
        window = self._window if call is None else call.send_window
        if not increment or increment > frames.WINDOW_MAX - window:
            code = Code.FLOW_CONTROL_ERROR if increment else Code.PROTOCOL_ERROR
            message = f"WINDOW_UPDATE of {increment} bytes to a window of {window}"
            raise ConnectionBroken(code, message) if call is None else StreamError(code, message)
        if call is None:
            self._window += increment
        else:
            call.send_window += increment
            if call.is_blocked:
                self._held[call] = None
        if self._held:
            self._pour()

    def take_settings(self, pairs: Iterable[tuple[int, int]]) -> None:
        """What the client says of the frames that it takes, and of its table."""
        for name, value in pairs:
            if name == frames.MAX_FRAME_SIZE:
                self.frame_bytes = value
            elif name == frames.HEADER_TABLE_SIZE and value < self._table_bytes:
                # Nothing is ever put there, so that none is needed serves for every size.
                self._table_bytes, self._update = 0, headers.NO_TABLE

    def set_call_window(self, window: int, calls: Iterable[Call]) -> None:
        """The client takes so much of each call, of those that are open too."""
        for call in calls:
            call.send_window += window - self.call_window
            if call.send_window > frames.WINDOW_MAX:
                raise ConnectionBroken(Code.FLOW_CONTROL_ERROR, "a setting takes a window too far")
            if call.is_blocked:
                self._held[call] = None
        self.call_window = window
        self._pour()

    def take_answers(self) -> int:
        """How many frames of answers were sent since the last time, as if of the usual size."""
        count, self._answers = self._answers, 0
        return count

    def close(self) -> None:
        """Send nothing more."""
        self.is_closed = True
        self._held.clear()

    def _pour(self) -> None:
        held, left = self._held, FRAMES_A_TURN
        while held and self._window > 0 and not self._is_paused:
            left -= 1
            if left < 0:
                self._pour_later()
                return
            call = next(iter(held))
            del held[call]
            budget = min(self._window, call.send_window, self.frame_bytes)
            if budget <= 0:
                continue  # Its own window is used up; more of that brings it back.
            parts = call.draw(budget)
            size = sum(map(len, parts))
            self.send(call, size, parts)
            if call.is_blocked:
                held[call] = None
                if size < CRUMB_BYTES:
                    self._answers -= 1
            else:
                call.sent()

    def _pour_later(self) -> None:
        """Go on in the next turn of the loop."""
        if not self._is_pour_due:
            self._is_pour_due = True
            asyncio.get_running_loop().call_soon(self._pour_again)

    def _pour_again(self) -> None:
        self._is_pour_due = False
        self._pour()
