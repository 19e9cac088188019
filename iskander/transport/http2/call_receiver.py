"""The receiving half of a call: messages out of DATA frames, their memory and their window.

A message is assembled as its bytes come, cut anywhere. The stream's window is given back once every
message that came has been read, so a client feels a slow handler. Received bytes are charged to the
server's receive budget: of half-received messages as they come, of whole ones until they are read,
or, where they are large, until they are freed. A message larger than the window reserves its memory
before it is given more window.

Runs on: gateway loop. Source: gRPC over HTTP/2 (Length-Prefixed-Message).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from iskander.clock import NS_PER_S, now_ns
from iskander.transport.http2 import decompression as inflating
from iskander.transport.http2 import frames
from iskander.transport.http2.decompression import Compressed
from iskander.transport.http2.frames import PREFIX_BYTES, Code
from iskander.transport.http2.request_headers import RequestHead
from iskander.transport.http2.status import RpcError, Status
from iskander.transport.receive_budget import (
    MESSAGE_RATE_MIN,
    TRACKED_BYTES_MIN,
    TrackedArray,
    progress_ns,
)

if TYPE_CHECKING:
    from iskander.transport.http2.streams import Streams

WINDOW_BYTES: Final = 4 << 20
"""What a client may send of one call before it is read."""
MESSAGES_A_TAKE: Final = 32
"""Messages, or pieces of one, that are taken before the clock is looked at again."""
QUEUED_COST: Final = 128
"""Charged for a message that waits to be read, beside its bytes."""

Message: TypeAlias = bytes | memoryview


class CallReceiver:
    """The receiving half of one call.

    Args:
        streams: Of its connection.
        stream_id: Of the connection.
        head: Its request headers.

    Attributes:
        path: `/SERVICE/METHOD`.
        on_input: Called when something came, for who does not `read`.
        has_all_input: The client has ended its half of the stream.
        is_over: The call has its status, or nobody is there for one.
        empty_messages: Messages of 0 bytes that came and are not charged yet.
        began_ns: When the message that is half received began.
    """

    __slots__ = (
        "_array", "_content_left", "_encoding", "_expanding", "_filled", "_is_charged",
        "_is_compressed", "_is_deaf", "_is_reserved", "_is_waiting", "_loop", "_message_bytes_max",
        "_messages", "_moved_ns", "_output", "_partial", "_prefix", "_queued_bytes", "_received",
        "_reserved_bytes", "_streams", "began_ns", "empty_messages", "has_all_input", "is_over",
        "on_input", "path", "stream_id",
    )  # fmt: skip

    def __init__(self, streams: Streams, stream_id: int, head: RequestHead) -> None:
        self._streams = streams
        self._output = streams.output
        self._loop = streams.host.loop
        self.stream_id = stream_id
        self.path = head.path
        self.has_all_input = self.is_over = False
        self.on_input: Callable[[], None] | None = None
        self.empty_messages = 0
        self.began_ns = streams.now_ns
        self._encoding = head.encoding
        self._content_left = head.content_bytes
        self._message_bytes_max = streams.host.message_bytes(head.path)
        self._messages: deque[Message | Compressed | RpcError | None] = deque()
        self._queued_bytes = 0
        self._prefix = b""
        self._partial: memoryview | None = None
        self._array: TrackedArray | None = None
        self._filled = 0
        self._moved_ns = 0
        self._received = 0
        self._reserved_bytes = 0
        self._is_charged = self._is_compressed = self._is_deaf = False
        self._is_reserved = self._is_waiting = False
        self._expanding: asyncio.Future[Message | RpcError] | None = None

    @property
    def has_input(self) -> bool:
        """Whether `receive` has something to give: a message, the end, or an error.

        A compressed message is expanded first: by a thread where it is large, and `on_input` is
        called when that is done.
        """
        if not self._messages:
            return False
        first = self._messages[0]
        return not isinstance(first, Compressed) or self._expand(first)

    @property
    def whole(self) -> Message | None:
        """The only message of its input, where all of that has come; it is not received yet."""
        messages = self._messages
        if not self.has_all_input or len(messages) != 2:
            return None
        first = messages[0]
        return first if isinstance(first, (bytes, memoryview)) else None

    @property
    def held_bytes(self) -> int:
        """Charged bytes that would be freed if the call were refused."""
        return self._queued_bytes + (self._filled if self._partial is not None else 0)

    def receive(self) -> Message | None:
        """The next message, where `has_input`; None at the end of them, or of the call.

        Raises:
            RpcError: The message is too large, or compressed in an unknown way.
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
                del message, messages  # Its traceback keeps this frame.
        assert not isinstance(message, Compressed)
        messages.popleft()
        if self._queued_bytes:
            self._uncharge_queued(message)
        self.give_back()
        return message

    # For the connection.

    def charge_waiting(self) -> None:
        """Charge the messages that its handler has not read; from now on each as it comes.

        Most calls are answered in the turn in which they came, and nothing of them waits.
        """
        self._is_charged = True
        messages = self._messages
        if messages and messages[0] is not None:
            self._charge_queued(sum(map(_queued_cost, messages)))

    def take_frame(self, length: int, padding: int) -> bool:
        """Count a DATA frame, before its payload; return whether `content-length` allows it.

        Raises:
            ConnectionBroken: The frame is larger than the window.
        """
        self._received += length + padding
        if self._received > WINDOW_BYTES:
            raise frames.ConnectionBroken(Code.FLOW_CONTROL_ERROR, "more DATA than the window")
        if self._content_left >= 0:
            self._content_left -= length
            if self._content_left < 0:
                return False
        if padding:
            self.give_back()
        return True

    def take(self, piece: memoryview) -> int:
        """Take payload of DATA frames, cut anywhere; return how many bytes were taken.

        That is all of them, unless they hold many messages.
        """
        size = len(piece)
        if self._partial is None and not self._prefix and PREFIX_BYTES < size < TRACKED_BYTES_MIN:
            compressed, length = frames.read_prefix(piece)
            if length + PREFIX_BYTES == size <= self._message_bytes_max and not compressed:
                # One whole message: most of those that are small.
                if not self._is_deaf:
                    self._streams.messages_arrived += 1
                    self._append(piece[PREFIX_BYTES:].tobytes())
                    self._charge_last()
                return size
        for _ in range(MESSAGES_A_TAKE):
            if not piece or self._is_deaf:
                piece = piece[:0]
                break
            piece = self._begin(piece) if self._partial is None else self._fill(piece)
        self.give_back()
        return size - len(piece)

    def take_end(self) -> bool:
        """The client has sent everything; return whether `content-length` agrees."""
        self.has_all_input = True
        if self._content_left > 0:
            return False
        if self._is_deaf:
            return True
        if self._prefix or self._partial is not None:
            self._refuse(RpcError(Status.INTERNAL, "the last message is cut short"))
        else:
            self._append(None)
        return True

    def give_back(self) -> None:
        """Let the client send more, once all is read and half of the window is used."""
        if self._messages or self._received < WINDOW_BYTES // 2 or self._is_deaf or self.is_over:
            return
        if self._is_waiting or not (self._is_reserved or self._reserve()):
            return
        self._output.emit(frames.window_update(self.stream_id, self._received))
        self._received = 0

    def on_reserved(self) -> None:
        """The memory of a large message is reserved: let it come."""
        self._is_waiting = False
        self._is_reserved = True
        self._moved_ns = now_ns()
        self.give_back()

    def evict_stalled(self, now: int, stall_ns: int) -> None:
        """Refuse a half-received message that fell so far behind its slowest rate.

        A client that waits for window, or for memory, is not to blame.
        """
        is_begun = self._partial is not None or self._prefix
        if is_begun and not (self._messages or self._is_waiting or self._is_deaf):
            behind_ns = now - self._moved_ns
            if behind_ns > stall_ns:
                self._streams.host.count_ended("message_timeout")
                behind_s = behind_ns / NS_PER_S
                message = f"a message fell {behind_s:.0f} s behind {MESSAGE_RATE_MIN} bytes/s"
                self._refuse(RpcError(Status.UNAVAILABLE, message))

    def shed(self) -> None:
        """Refuse the messages that have come and are not read, and the half-received one."""
        self._messages.clear()
        self._refuse(self._no_memory())

    def close_input(self) -> None:
        """Drop what has come."""
        self._is_deaf = True
        self._drop_partial()
        if self._expanding is not None:
            self._expanding.cancel()
        self._messages.clear()
        self._clear_queued()

    # Assembly.

    def _begin(self, piece: memoryview) -> memoryview:
        """Read a message's prefix, and the message where it is whole; what is left."""
        if not self._prefix and len(piece) >= PREFIX_BYTES:
            compressed, length = frames.read_prefix(piece)
            start = PREFIX_BYTES
        else:
            start = PREFIX_BYTES - len(self._prefix)
            if not self._prefix:
                self._moved_ns = self._streams.now_ns
            self._prefix += piece[:start]
            if len(self._prefix) < PREFIX_BYTES:
                return piece[:0]
            compressed, length = frames.read_prefix(self._prefix)
        self._prefix = b""
        self._is_compressed = compressed != 0
        if length > self._message_bytes_max:
            self._refuse(
                RpcError(
                    Status.RESOURCE_EXHAUSTED,
                    f"a message may have {self._message_bytes_max} bytes, got {length}",
                )
            )
            return piece[:0]
        if length < TRACKED_BYTES_MIN:
            if len(piece) >= start + length:
                self._arrive(bytes(piece[start : start + length]))
                self._charge_last()
                return piece[start + length :]
            self._partial = memoryview(bytearray(length))
        else:
            array = self._array = self._streams.budget.array(length)
            self._partial = array.data
        self._filled = 0
        self.began_ns = self._moved_ns = self._streams.now_ns
        return piece[start:]

    def _fill(self, piece: memoryview) -> memoryview:
        """Take more of the half-received message; what is left."""
        # No variable holds it while it is charged: if it is refused then, it is freed at once.
        assert self._partial is not None
        count = min(len(piece), len(self._partial) - self._filled)
        self._partial[self._filled : self._filled + count] = piece[:count]
        self._filled += count
        self._moved_ns = progress_ns(self._moved_ns, self._streams.now_ns, count)
        if not self._is_reserved:
            if self._array is not None:
                self._array.charged_bytes += count
            self._streams.budget.charge(count)
            if self._partial is None:
                return piece[:0]  # It was refused, for want of memory.
        if self._filled == len(self._partial):
            self._arrive(self._partial)
            self._charge_last()
        return piece[count:]

    def _arrive(self, message: Message) -> None:
        self._drop_partial()
        if message:
            self._streams.messages_arrived += 1
        else:
            self.empty_messages += 1
        self._append(Compressed(message) if self._is_compressed else message)

    def _reserve(self) -> bool:
        """Reserve memory for a message larger than the window; return whether more may come."""
        length = 0 if self._partial is None else len(self._partial)
        if length <= WINDOW_BYTES:
            return True
        streams = self._streams
        assert self._array is not None
        size = self._reserved_bytes = length - self._filled
        # What is reserved is released with the array, like what was charged before.
        self._array.charged_bytes += size
        self._is_waiting = not streams.budget.reserve(streams, self, size)
        self._is_reserved = not self._is_waiting
        return self._is_reserved

    def _drop_partial(self) -> None:
        """End the half-received message: it has come, or it will not."""
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

    # Messages that wait to be read.

    def _append(self, message: Message | Compressed | RpcError | None) -> None:
        self._messages.append(message)
        if self.on_input is not None:
            self.on_input()

    def _charge_last(self) -> None:
        """Charge the message that came last and was not read at once; no caller may hold it."""
        if self._messages and self._is_charged:
            self._charge_queued(_queued_cost(self._messages[-1]))

    def _charge_queued(self, size: int) -> None:
        self._queued_bytes += size
        self._streams.budget.charge(size)

    def _uncharge_queued(self, message: Message | Compressed) -> None:
        size = min(_queued_cost(message), self._queued_bytes)
        self._queued_bytes -= size
        self._streams.budget.release(size)

    def _clear_queued(self) -> None:
        size, self._queued_bytes = self._queued_bytes, 0
        if size:
            self._streams.budget.release(size)

    def _refuse(self, error: RpcError) -> None:
        """Take nothing more; the handler gets the error after what came before."""
        self._is_deaf = True
        self._drop_partial()
        if not self._messages:
            self._clear_queued()
        self._append(error)

    def _no_memory(self) -> RpcError:
        return RpcError(
            Status.UNAVAILABLE,
            "the server has no memory to receive a message: "
            f"{self._streams.budget.limit_bytes} bytes are in use (limits.receive_bytes)",
        )

    # Compressed messages.

    def _expand(self, message: Compressed) -> bool:
        """Expand the first message, or have that done; whether it is."""
        if self._expanding is None:
            begun = inflating.begin(message.raw, self._encoding, self._message_bytes_max)
            if isinstance(begun, inflating.Inflation):
                target = self._streams.budget.charged_array(begun.bytes_most)
                if target is not None:
                    work = self._loop.run_in_executor(inflating.THREADS, begun.finish, target)
                    self._expanding = work
                    work.add_done_callback(partial(self._on_expanded, target))
                    return False
                begun = self._no_memory()
            self._replace_first(begun)
            return True
        return False

    def _on_expanded(self, target: TrackedArray, work: asyncio.Future[Message | RpcError]) -> None:
        self._expanding = None
        if self._messages and isinstance(self._messages[0], Compressed):
            expanded = work.result()
            if isinstance(expanded, memoryview):
                self._streams.budget.shrink(target, len(expanded))
            self._replace_first(expanded)
            if self.on_input is not None:
                self.on_input()

    def _replace_first(self, expanded: Message | RpcError) -> None:
        first = self._messages[0]
        if isinstance(expanded, RpcError):
            self._is_deaf = True
            self._drop_partial()
            self._messages.clear()
            self._clear_queued()
            self._messages.append(expanded)
        else:
            if self._queued_bytes and isinstance(first, Compressed):
                self._uncharge_queued(first)
            self._messages[0] = expanded
            self._charge_queued(_queued_cost(expanded))


def _queued_cost(message: Message | Compressed | RpcError | None) -> int:
    """Bytes to charge for a message that waits; a large one is charged by its array."""
    raw = message.raw if isinstance(message, Compressed) else message
    if raw is None or isinstance(raw, RpcError):
        return 0
    return QUEUED_COST + (len(raw) if len(raw) < TRACKED_BYTES_MIN else 0)
