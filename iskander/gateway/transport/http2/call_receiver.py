"""Request messages of a call: assembly from DATA frames, memory and flow-control window.

The window is updated once the handler has read all messages, so a slow handler slows down the
client. A partial message is charged to the receive budget as it arrives. A small message stays
charged until it is read, a large one until it is freed. A message larger than the window reserves
its memory before the window is updated.

Runs on: gateway loop. Source: gRPC over HTTP/2 (Length-Prefixed-Message).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.gateway.transport.http2 import decompression, frames
from iskander.gateway.transport.http2.decompression import Compressed
from iskander.gateway.transport.http2.frames import PREFIX_BYTES, ErrorCode
from iskander.gateway.transport.http2.request_headers import RequestHeaders
from iskander.gateway.transport.http2.status import RpcError, Status
from iskander.gateway.transport.limits.receive_budget import (
    MESSAGE_RATE_MIN,
    TRACKED_BYTES_MIN,
    TrackedArray,
    progress_ns,
)

if TYPE_CHECKING:
    from iskander.gateway.transport.http2.streams import Streams

WINDOW_BYTES: Final = 4 << 20
MESSAGES_PER_FEED: Final = 32
"""Messages, or pieces of one, processed between two checks of the clock."""
QUEUED_COST: Final = 128
"""Bytes charged for an unread message in addition to its own."""

Message: TypeAlias = bytes | memoryview


class CallReceiver:
    """The receiving half of one call."""

    __slots__ = (
        "_array", "_content_left", "_decompression", "_encoding", "_filled", "_is_charged",
        "_is_compressed", "_is_discarding", "_is_reserved", "_is_waiting", "_loop",
        "_message_bytes_max", "_messages", "_output", "_partial", "_prefix", "_progress_ns",
        "_queued_bytes", "_received", "_reserved_bytes", "_streams", "began_ns", "empty_messages",
        "has_all_input", "is_over", "on_input", "path", "stream_id",
    )  # fmt: skip

    def __init__(self, streams: Streams, stream_id: int, head: RequestHeaders) -> None:
        self._streams = streams
        self._output = streams.output
        self._loop = streams.host.loop
        self.stream_id = stream_id
        self.path = head.path
        self.has_all_input = False  # The client has ended its half of the stream.
        self.is_over = False  # The status is sent, or the connection is lost.
        # Called when input arrives or is decompressed; for handlers that do not `read`.
        self.on_input: Callable[[], None] | None = None
        self.began_ns = streams.now_ns  # Start of the partial message.
        self._encoding = head.encoding
        self._content_left = head.content_bytes
        self._message_bytes_max = streams.host.message_bytes(head.path)
        self._messages: deque[Message | Compressed | RpcError | None] = deque()
        self._prefix = b""
        self._partial: memoryview | None = None
        self._array: TrackedArray | None = None
        self.empty_messages = 0  # Received messages of 0 bytes that are not charged yet.
        self._queued_bytes = self._reserved_bytes = 0
        self._received = self._filled = self._progress_ns = 0
        self._is_charged = self._is_compressed = self._is_discarding = False
        self._is_reserved = self._is_waiting = False
        self._decompression: asyncio.Future[Message | RpcError] | None = None

    @property
    def has_input(self) -> bool:
        """Whether `receive` can return a message, the end of input, or an error.

        Starts to decompress a compressed message: a small one at once, a large one in a thread,
        which calls `on_input` through the loop at its end.
        """
        if not self._messages:
            return False
        first = self._messages[0]
        return not isinstance(first, Compressed) or self._decompress(first)

    @property
    def whole(self) -> Message | None:
        """The only message of a complete input, which stays unread; otherwise None."""
        messages = self._messages
        if not self.has_all_input or len(messages) != 2:
            return None
        first = messages[0]
        return first if isinstance(first, (bytes, memoryview)) else None

    @property
    def unread_bytes(self) -> int:
        """Charged bytes that rejecting the call would free."""
        return self._queued_bytes + (self._filled if self._partial is not None else 0)

    def receive(self) -> Message | None:
        """Remove the next message; None at the end of input or of the call. Requires `has_input`.

        A message that is invalid, too large or out of memory raises `RpcError`.
        """
        if self.is_over:
            return None
        messages = self._messages
        message = messages[0]
        if message is None:
            return None
        if isinstance(message, RpcError):
            try:
                raise message
            finally:
                del message, messages  # The traceback of the error keeps this frame.
        assert not isinstance(message, Compressed)
        messages.popleft()
        if self._queued_bytes:
            self._uncharge_queued(_queued_cost(message))
        self.update_window()
        return message

    def charge_unread(self) -> None:
        """Charge the messages of a call that is not answered at once, and later ones on arrival."""
        self._is_charged = True
        messages = self._messages
        if messages and messages[0] is not None:
            self._charge_queued(sum(map(_queued_cost, messages)))

    def count_frame(self, length: int, padding: int) -> bool:
        """Count a DATA frame before its payload; return whether `content-length` allows it."""
        self._received += length + padding
        if self._received > WINDOW_BYTES:
            raise frames.ConnectionBroken(ErrorCode.FLOW_CONTROL_ERROR, "DATA exceeds the window")
        if self._content_left >= 0:
            self._content_left -= length
            if self._content_left < 0:
                return False
        if padding:
            self.update_window()
        return True

    def feed_data(self, piece: memoryview) -> int:
        """Process DATA payload, at most `MESSAGES_PER_FEED` messages; return the bytes consumed."""
        size = len(piece)
        if self._partial is None and not self._prefix and PREFIX_BYTES < size < TRACKED_BYTES_MIN:
            compressed, length = frames.read_prefix(piece)
            if length + PREFIX_BYTES == size <= self._message_bytes_max and not compressed:
                # One complete message, as in most small requests.
                if not self._is_discarding:
                    self._streams.messages_received += 1
                    self._append(piece[PREFIX_BYTES:].tobytes())
                    self._charge_last()
                return size
        for _ in range(MESSAGES_PER_FEED):
            if not piece or self._is_discarding:
                piece = piece[:0]
                break
            piece = self._begin(piece) if self._partial is None else self._fill(piece)
        self.update_window()
        return size - len(piece)

    def feed_eof(self) -> bool:
        """Process the end of input; return whether `content-length` allows it."""
        self.has_all_input = True
        if self._content_left > 0:
            return False
        if self._is_discarding:
            return True
        if self._prefix or self._partial is not None:
            self._reject(RpcError(Status.INTERNAL, "last message truncated"))
        else:
            self._append(None)
        return True

    def update_window(self) -> None:
        """Send a WINDOW_UPDATE once all messages are read and half of the window is used."""
        if self._messages or self._received < WINDOW_BYTES // 2 or self.is_over:
            return
        if self._is_discarding or self._is_waiting or not (self._is_reserved or self._reserve()):
            return
        self._output.emit(frames.window_update(self.stream_id, self._received))
        self._received = 0

    def on_reserved(self) -> None:
        """Continue a large message: its memory is reserved now."""
        self._is_waiting = False
        self._is_reserved = True
        self._progress_ns = now_ns()
        self.update_window()

    def evict_stalled(self, now: int, stall_ns: int) -> None:
        """Reject a partial message that is `stall_ns` behind the minimum rate.

        Time in which the client waits for window or memory does not count.
        """
        is_begun = self._partial is not None or self._prefix
        if is_begun and not (self._messages or self._is_waiting or self._is_discarding):
            behind_ns = now - self._progress_ns
            if behind_ns > stall_ns:
                self._streams.host.count_ended("message_timeout")
                lag = f"{behind_ns / NS_PER_S:.0f} s behind {MESSAGE_RATE_MIN} bytes/s"
                limit = f"limit {stall_ns / NS_PER_S:g} s (at most `timeouts.message_s`)"
                self._reject(RpcError(Status.UNAVAILABLE, f"message too slow: {lag}, {limit}"))

    def evict(self) -> None:
        """Reject the unread messages and the partial one."""
        self._messages.clear()
        self._reject(self._memory_error())

    def discard_input(self) -> None:
        """Discard everything received, now and later."""
        self._is_discarding = True
        self._end_partial()
        if self._decompression is not None:
            self._decompression.cancel()
        self._messages.clear()
        self._uncharge_queued(self._queued_bytes)

    def _begin(self, piece: memoryview) -> memoryview:
        """Read a message's prefix, and the message if it is complete; return the rest."""
        if not self._prefix and len(piece) >= PREFIX_BYTES:
            compressed, length = frames.read_prefix(piece)
            start = PREFIX_BYTES
        else:
            start = PREFIX_BYTES - len(self._prefix)
            if not self._prefix:
                self._progress_ns = self._streams.now_ns
            self._prefix += piece[:start]
            if len(self._prefix) < PREFIX_BYTES:
                return piece[:0]
            compressed, length = frames.read_prefix(self._prefix)
        self._prefix = b""
        self._is_compressed = compressed != 0
        if length > self._message_bytes_max:
            message = f"message too large: {length:,} bytes, limit {self._message_bytes_max:,}"
            self._reject(RpcError(Status.RESOURCE_EXHAUSTED, message))
            return piece[:0]
        if length < TRACKED_BYTES_MIN:
            if len(piece) >= start + length:
                self._complete(bytes(piece[start : start + length]))
                self._charge_last()
                return piece[start + length :]
            self._partial = memoryview(bytearray(length))
        else:
            array = self._array = self._streams.budget.array(length)
            self._partial = array.data
        self._filled = 0
        self.began_ns = self._progress_ns = self._streams.now_ns
        return piece[start:]

    def _fill(self, piece: memoryview) -> memoryview:
        """Add to the partial message; return the rest."""
        # No local variable refers to the message: if the charge rejects it, it is freed at once.
        assert self._partial is not None
        count = min(len(piece), len(self._partial) - self._filled)
        self._partial[self._filled : self._filled + count] = piece[:count]
        self._filled += count
        self._progress_ns = progress_ns(self._progress_ns, self._streams.now_ns, count)
        if not self._is_reserved:
            if self._array is not None:
                self._array.charged_bytes += count
            self._streams.budget.charge(count)
            if self._partial is None:
                return piece[:0]  # Rejected: out of memory.
        if self._filled == len(self._partial):
            self._complete(self._partial)
            self._charge_last()
        return piece[count:]

    def _complete(self, message: Message) -> None:
        """Queue a complete message for the handler."""
        self._end_partial()
        if message:
            self._streams.messages_received += 1
        else:
            self.empty_messages += 1
        self._append(Compressed(message) if self._is_compressed else message)

    def _reserve(self) -> bool:
        """Reserve memory if a message is larger than the window; return False if it must wait."""
        length = 0 if self._partial is None else len(self._partial)
        if length <= WINDOW_BYTES:
            return True
        streams = self._streams
        assert self._array is not None
        size = self._reserved_bytes = length - self._filled
        # The array releases the reserved bytes as well as those charged before.
        self._array.charged_bytes += size
        self._is_waiting = not streams.budget.reserve(streams, self, size)
        self._is_reserved = not self._is_waiting
        return self._is_reserved

    def _end_partial(self) -> None:
        """End the partial message: it is complete or discarded."""
        if self._partial is None:
            return
        budget = self._streams.budget
        if self._array is None:
            budget.release(self._filled)
        elif self._is_waiting:
            self._array.charged_bytes -= self._reserved_bytes
        self._partial = self._array = None
        if self._is_waiting or self._is_reserved:
            size = self._reserved_bytes if self._is_reserved else 0
            self._is_waiting = self._is_reserved = False
            budget.end_reservation(self._streams, self, size)

    def _append(self, message: Message | Compressed | RpcError | None) -> None:
        self._messages.append(message)
        if self.on_input is not None:
            self.on_input()

    def _charge_last(self) -> None:
        """Charge the last message if it is unread; no caller may hold a reference to it."""
        if self._messages and self._is_charged:
            self._charge_queued(_queued_cost(self._messages[-1]))

    def _charge_queued(self, size: int) -> None:
        self._queued_bytes += size
        self._streams.budget.charge(size)

    def _uncharge_queued(self, size: int) -> None:
        size = min(size, self._queued_bytes)
        if size:
            self._queued_bytes -= size
            self._streams.budget.release(size)

    def _reject(self, error: RpcError, *, notify: bool = True) -> None:
        """Discard later input; queue the error behind the unread messages."""
        self._is_discarding = True
        self._end_partial()
        if not self._messages:
            self._uncharge_queued(self._queued_bytes)
        if notify:
            self._append(error)
        else:
            self._messages.append(error)

    def _memory_error(self) -> RpcError:
        limit = f"limit {self._streams.budget.limit_bytes:,} bytes (`limits.receive_bytes`)"
        return RpcError(Status.UNAVAILABLE, f"receive memory exhausted: {limit}")

    def _decompress(self, message: Compressed) -> bool:
        """Decompress the first message, or start a thread for it; return whether it is done."""
        if self._decompression is not None:
            return False
        result = decompression.start(message.raw, self._encoding, self._message_bytes_max)
        if isinstance(result, decompression.Decompressor):
            target = self._streams.budget.charged_array(result.output_bytes_max)
            if target is not None:
                work = self._loop.run_in_executor(decompression.THREADS, result.finish, target)
                self._decompression = work
                work.add_done_callback(partial(self._on_decompressed, target))
                return False
            result = self._memory_error()
        self._replace_first(result)
        return True

    def _on_decompressed(
        self, target: TrackedArray, work: asyncio.Future[Message | RpcError]
    ) -> None:
        self._decompression = None
        if self._messages and isinstance(self._messages[0], Compressed):
            result = work.result()
            if isinstance(result, memoryview):
                self._streams.budget.shrink(target, len(result))
            self._replace_first(result)
            if self.on_input is not None:
                self.on_input()

    def _replace_first(self, result: Message | RpcError) -> None:
        """Replace the compressed message by its result; an error ends the input."""
        if isinstance(result, RpcError):
            self._messages.clear()
            self._reject(result, notify=False)
        else:
            self._uncharge_queued(_queued_cost(self._messages[0]))
            self._messages[0] = result
            self._charge_queued(_queued_cost(result))


def _queued_cost(message: Message | Compressed | RpcError | None) -> int:
    """Bytes to charge for an unread message; a large one is charged by its array."""
    raw = message.raw if isinstance(message, Compressed) else message
    if raw is None or isinstance(raw, RpcError):
        return 0
    return QUEUED_COST + (len(raw) if len(raw) < TRACKED_BYTES_MIN else 0)
