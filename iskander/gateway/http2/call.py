"""One gRPC call: messages in, messages out, until its status, its deadline or its client ends it.

What a handler has not read is not asked for again: the stream's window is given back once every
message that came has been read, so a client feels a slow handler, and a call holds one message and
one window at most. What a client does not read waits here, one message of a call at a time, and so
does `write`.

Runs on: gateway loop. Source: gRPC over HTTP/2 (Length-Prefixed-Message, Trailers).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from iskander.clock import NS_PER_S, now_ns
from iskander.gateway.access.grants import EVERYTHING, Grant
from iskander.gateway.http2 import frames, headers, inflating
from iskander.gateway.http2.frames import PREFIX_BYTES, Code
from iskander.gateway.http2.headers import Metadata
from iskander.gateway.http2.inflating import Compressed
from iskander.gateway.http2.request_head import RequestHead
from iskander.gateway.http2.status import RpcError, Status

if TYPE_CHECKING:
    from iskander.gateway.http2.streams import Streams

WINDOW_BYTES: Final = 4 << 20
"""What a client may send of one call before it is read."""

MESSAGES_A_TAKE: Final = 32
"""Messages, or pieces of one, that are taken before the clock is looked at again."""

Message: TypeAlias = bytes | memoryview


class Call:
    """One call of one connection.

    Args:
        streams: Of its connection.
        stream_id: Of the connection.
        head: What the client said first.

    Attributes:
        path: `/SERVICE/METHOD`.
        metadata: What the client sent with it.
        deadline_ns: On the monotonic clock; None where it has none.
        empty_messages: Messages of 0 bytes that came and are not charged yet.
        grant: What its caller may ask.
        on_gone: Called when it ends before its answer, for who has no `task`.
        on_input: Called when something came, for who does not `read`.
        on_room: Called when the client may take more, for who does not `write`.
        send_window: Bytes that the client takes of it.
        has_all_input: The client has said that it sends no more.
        is_over: It has its status, or nobody is there for one.
        task: Its handler's, where that is one.
    """

    __slots__ = (
        "_content_left", "_encoding", "_expanding", "_filled", "_has_begun", "_is_compressed",
        "_is_cut", "_is_deaf", "_loop", "_message_bytes_max", "_messages", "_outbox", "_output",
        "_partial", "_prefix", "_received", "_streams", "_timer", "deadline_ns", "empty_messages",
        "grant", "has_all_input", "is_over", "metadata", "on_gone", "on_input", "on_room", "path",
        "send_window", "stream_id", "task",
    )  # fmt: skip

    def __init__(self, streams: Streams, stream_id: int, head: RequestHead) -> None:
        self._streams = streams
        self._output = streams.output
        self._loop = streams.host.loop
        self.stream_id = stream_id
        self.path = head.path
        self.metadata: Metadata = head.metadata
        self.grant: Grant = EVERYTHING
        self.send_window = streams.output.call_window
        self.has_all_input = False
        self.on_gone: Callable[[], None] | None = None
        self.on_input: Callable[[], None] | None = None
        self.on_room: Callable[[], None] | None = None
        self.task: asyncio.Task[None] | None = None
        self._encoding = head.encoding
        self._content_left = head.content_bytes
        self.empty_messages = 0
        self._message_bytes_max = streams.host.message_bytes(head.path)
        self._messages: deque[Message | Compressed | RpcError | None] = deque()
        self._prefix = b""
        self._partial: memoryview | None = None
        self._filled = 0
        self._received = 0
        self._outbox: deque[memoryview] | None = None
        self._expanding: asyncio.Future[Message | RpcError] | None = None
        self._has_begun = self._is_compressed = self._is_cut = False
        self._is_deaf = self.is_over = False
        self._timer: asyncio.TimerHandle | None = None
        self.deadline_ns: int | None = None
        if head.timeout_ns is not None:
            self.deadline_ns = now_ns() + head.timeout_ns
            timeout_s = head.timeout_ns / NS_PER_S
            self._timer = self._loop.call_later(timeout_s, self._expire)

    @property
    def caller(self) -> object:
        """Whose it is, as far as one is told from another: by name, or else by connection."""
        return self.grant.name or self._streams

    @property
    def has_input(self) -> bool:
        """Whether `receive` has something to give: a message, the end, or what went wrong.

        Who asks has a compressed message expanded: by a thread where it is large, and `on_input`
        tells when that is done.
        """
        if not self._messages:
            return False
        first = self._messages[0]
        return not isinstance(first, Compressed) or self._expand(first)

    @property
    def whole(self) -> Message | None:
        """The one message that its input is, where all of that is there; it is not received yet."""
        messages = self._messages
        if not self.has_all_input or len(messages) != 2:
            return None
        first = messages[0]
        return first if isinstance(first, (bytes, memoryview)) else None

    @property
    def is_blocked(self) -> bool:
        """Whether the client has to take something before more should be sent."""
        return bool(self._outbox)

    def receive(self) -> Message | None:
        """The next message, where `has_input`; None at the end of them, or of the call.

        Raises:
            RpcError: It is too large, or compressed in an unknown way.
        """
        if self.is_over:
            return None
        messages = self._messages
        message = messages[0]
        if message is None:
            return None
        if isinstance(message, RpcError):
            raise message
        assert not isinstance(message, Compressed)
        messages.popleft()
        self.give_back()
        return message

    def send(self, *parts: Message) -> None:
        """Send one message, made of these parts, which must not change any more."""
        if self.is_over:
            return
        output = self._output
        if not self._has_begun:
            self._has_begun = True
            output.emit_block(self.stream_id, 0, headers.RESPONSE)
        size = sum(map(len, parts))
        prefix = frames.prefix(size)
        size += PREFIX_BYTES
        outbox = self._outbox
        if not outbox and output.can_send(self, size):
            output.send(self, size, (prefix, *parts))
            return
        if outbox is None:
            outbox = self._outbox = deque()
        outbox.append(memoryview(prefix))
        outbox.extend(memoryview(part) for part in parts if part)
        output.hold(self)

    async def answer(self, *parts: Message) -> None:
        """Write the only message of a response and its status, at once where there is room."""
        if not self.try_answer(parts):
            await self.write(*parts)

    def try_answer(self, parts: Sequence[Message]) -> bool:
        """Send the only message of a response and its status, where there is room; whether so."""
        output, length = self._output, 0
        for part in parts:
            length += len(part)
        if self.is_over or not (self.has_all_input and output.can_answer(self, length)):
            return False
        assert not self._has_begun
        output.answer(self, length, parts)
        self.close()
        return True

    async def read(self) -> Message | None:
        """As `receive`, once there is something."""
        while not (self.has_input or self.is_over):
            there = self._loop.create_future()
            self.on_input = partial(_wake, there)
            try:
                await there
            finally:
                self.on_input = None
        return self.receive()

    async def write(self, *parts: Message) -> None:
        """As `send`, and wait until the client may take more."""
        self.send(*parts)
        if self._outbox:
            gone = self._loop.create_future()
            self.on_room = partial(_wake, gone)
            try:
                await gone
            finally:
                self.on_room = None

    def end(
        self,
        status: Status = Status.OK,
        message: str = "",
        metadata: tuple[tuple[str, str | bytes], ...] = (),
    ) -> None:
        """Send the status; nothing where the call is over already."""
        if self.is_over:
            return
        block = headers.trailers(status, message, metadata)
        if not self._has_begun:
            block = headers.RESPONSE + block
        if self._outbox and (self._is_cut or status is Status.OK):
            # Half of a message is out, and no status can follow it; or a whole one is missing.
            self._output.emit(frames.rst_stream(self.stream_id, Code.CANCEL))
        else:
            self._output.emit_block(self.stream_id, frames.END_STREAM, block)
            if not self.has_all_input:
                self._output.emit(frames.rst_stream(self.stream_id, Code.NO_ERROR))
        self.close()

    def close(self) -> None:
        """Forget the call, and end its handler where that has not ended."""
        if self.is_over:
            return
        self.is_over = self._is_deaf = True
        self._drop_partial()
        if self._expanding is not None:
            self._expanding.cancel()
        # It may be in a cycle with what served it, and be there until a collection.
        self._messages.clear()
        self._outbox = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._streams.forget(self)
        gone, self.on_gone = self.on_gone, None
        if gone is not None:
            gone()
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()

    # For the connection.

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
        if self._partial is None and not self._prefix and size > PREFIX_BYTES:
            compressed, length = frames.read_prefix(piece)
            if length + PREFIX_BYTES == size <= self._message_bytes_max and not compressed:
                # One whole message: most of those that are small.
                if not self._is_deaf:
                    self._streams.messages_arrived += 1
                    self._append(piece[PREFIX_BYTES:].tobytes())
                return size
        for _ in range(MESSAGES_A_TAKE):
            if not piece or self._is_deaf:
                piece = piece[:0]
                break
            if self._partial is None:
                piece = self._begin(piece)
            else:
                count = min(len(piece), len(self._partial) - self._filled)
                self._partial[self._filled : self._filled + count] = piece[:count]
                self._filled += count
                piece = piece[count:]
                if self._filled == len(self._partial):
                    self._arrive(self._partial)
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

    @property
    def progress(self) -> int:
        """Bytes that came of a message in pieces; -1 where the client waits for the handler."""
        return -1 if self._messages else self._filled

    def give_back(self) -> None:
        """Let the client send more, once all is read and half of the window is used."""
        if self._messages or self._received < WINDOW_BYTES // 2 or self._is_deaf or self.is_over:
            return
        size = 0 if self._partial is None else len(self._partial)
        if size <= WINDOW_BYTES or self._streams.room.take(self, size):
            self._output.emit(frames.window_update(self.stream_id, self._received))
            self._received = 0

    def give_up(self) -> None:
        """Take nothing more of a message that does not come."""
        self._drop_partial()
        self._refuse(RpcError(Status.UNAVAILABLE, "others waited for the rest of a message"))

    def draw(self, budget: int) -> list[memoryview]:
        """The next bytes to send, at most `budget` of them."""
        drawn = []
        outbox = self._outbox
        while outbox and budget:
            part = outbox.popleft()
            if len(part) > budget:
                outbox.appendleft(part[budget:])
                part = part[:budget]
            drawn.append(part)
            budget -= len(part)
        self._is_cut = bool(outbox)
        return drawn

    def sent(self) -> None:
        """All that waited is sent."""
        if self.on_room is not None:
            self.on_room()

    def _begin(self, piece: memoryview) -> memoryview:
        """Read a message's prefix, and the message where it is whole; what is left."""
        if not self._prefix and len(piece) >= PREFIX_BYTES:
            compressed, length = frames.read_prefix(piece)
            start = PREFIX_BYTES
        else:
            start = PREFIX_BYTES - len(self._prefix)
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
        if len(piece) >= start + length:
            self._arrive(bytes(piece[start : start + length]))
            return piece[start + length :]
        # Not cleared: pages that nothing was written to cost nothing.
        self._partial = np.empty(length, np.uint8).data
        self._filled = 0
        return piece[start:]

    def _arrive(self, message: Message) -> None:
        self._drop_partial()
        if message:
            self._streams.messages_arrived += 1
        else:
            self.empty_messages += 1
        self._append(Compressed(message) if self._is_compressed else message)

    def _expand(self, message: Compressed) -> bool:
        """Expand the first message, or have that done; whether it is."""
        if self._expanding is None:
            begun = inflating.begin(message.raw, self._encoding, self._message_bytes_max)
            if not isinstance(begun, inflating.Inflation):
                self._replace_first(begun)
                return True
            self._expanding = self._loop.run_in_executor(inflating.THREADS, begun.finish)
            self._expanding.add_done_callback(self._on_expanded)
        return False

    def _on_expanded(self, work: asyncio.Future[Message | RpcError]) -> None:
        self._expanding = None
        if not self.is_over:
            self._replace_first(work.result())
            if self.on_input is not None:
                self.on_input()

    def _replace_first(self, expanded: Message | RpcError) -> None:
        if isinstance(expanded, RpcError):
            self._is_deaf = True
            self._messages.clear()
            self._messages.append(expanded)
        else:
            self._messages[0] = expanded

    def _drop_partial(self) -> None:
        partial, self._partial = self._partial, None
        if partial is not None and len(partial) > WINDOW_BYTES:
            self._streams.room.leave(self)

    def _refuse(self, error: RpcError) -> None:
        """Take nothing more, and let the handler know when it has read what came before."""
        self._is_deaf = True
        self._append(error)

    def _append(self, message: Message | Compressed | RpcError | None) -> None:
        self._messages.append(message)
        if self.on_input is not None:
            self.on_input()

    def _expire(self) -> None:
        late = RpcError(Status.DEADLINE_EXCEEDED, "the call's deadline has passed")
        error = self._streams.host.named(self.path, late)
        self.end(error.status, error.message, error.trailers)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
