"""One gRPC call: messages in, messages out, until its status, deadline or client ends it.

`CallReceiver` receives. `write` waits while the client does not read; a call holds one unsent
message.

Runs on: gateway loop. Source: gRPC over HTTP/2 (Length-Prefixed-Message, Trailers).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from iskander.auth.grants import EVERYTHING, Grant
from iskander.auth.source import Source
from iskander.clock import NS_PER_S, now_ns
from iskander.errors import Overloaded
from iskander.transport.http2 import frames
from iskander.transport.http2 import response_headers as headers
from iskander.transport.http2.call_receiver import CallReceiver, Message
from iskander.transport.http2.frames import PREFIX_BYTES, Code
from iskander.transport.http2.request_headers import RequestHead
from iskander.transport.http2.response_headers import Metadata
from iskander.transport.http2.status import RpcError, Status

if TYPE_CHECKING:
    from iskander.transport.http2.streams import Streams

RETRY_MS: Final = 1000
__all__ = ["Call", "Message"]


class Call(CallReceiver):
    """One call of one connection.

    Args:
        streams: Of its connection.
        stream_id: Of the connection.
        head: What the client said first.

    Attributes:
        metadata: What the client sent with it.
        deadline_ns: On the monotonic clock; None where it has none.
        grant: What its caller may ask.
        on_gone: Called when it ends before its answer, for who has no `task`.
        on_room: Called when the client may take more, for who does not `write`.
        send_window: Bytes that the client takes of it.
        taken_bytes: Memory of the receive budget that its handler has, until it is over.
        task: Its handler's, where that is one.
    """

    __slots__ = (
        "_drawn_ns", "_has_begun", "_is_cut", "_outbox", "_outbox_bytes", "_timer", "deadline_ns",
        "grant", "metadata", "on_gone", "on_room", "send_window", "taken_bytes", "task",
    )  # fmt: skip

    def __init__(self, streams: Streams, stream_id: int, head: RequestHead) -> None:
        super().__init__(streams, stream_id, head)
        self.metadata: Metadata = head.metadata
        self.grant: Grant = EVERYTHING
        self.send_window = streams.output.call_window
        self.on_gone: Callable[[], None] | None = None
        self.on_room: Callable[[], None] | None = None
        self.task: asyncio.Task[None] | None = None
        self._outbox: deque[memoryview] | None = None
        self._outbox_bytes = self.taken_bytes = 0
        self._drawn_ns = 0
        self._has_begun = self._is_cut = False
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
    def source(self) -> Source:
        """Whose share of a queue its requests take."""
        return self._streams.source(self.grant.name)

    @property
    def is_blocked(self) -> bool:
        """Whether the client has to take something before more should be sent."""
        return bool(self._outbox)

    def begin(self, metadata: Metadata = ()) -> None:
        """Send the response headers with this metadata; nothing where they are sent already."""
        if self.is_over or self._has_begun:
            return
        self._has_begun = True
        self._output.emit_block(self.stream_id, 0, headers.RESPONSE + headers.block(metadata))

    def send(self, *parts: Message) -> None:
        """Send one message, made of these parts, which must not change any more."""
        if self.is_over:
            return
        output = self._output
        if not self._has_begun:
            self.begin()
        size = sum(map(len, parts))
        prefix = frames.prefix(size)
        size += PREFIX_BYTES
        outbox = self._outbox
        if not outbox and output.can_send(self, size):
            output.send(self, size, (prefix, *parts))
            return
        if outbox is None:
            outbox = self._outbox = deque()
            self._drawn_ns = now_ns()
        self._outbox_bytes += size
        self._streams.budget.charge(size)
        outbox.append(memoryview(prefix))
        outbox.extend(memoryview(part) for part in parts if part)
        output.hold(self)

    def refuse_http(self, error: RpcError) -> None:
        """Answer a request that is no gRPC call: 415, the error as text, then the gRPC status."""
        self.close_input()
        self._has_begun = True
        self._output.emit_block(self.stream_id, 0, headers.NOT_GRPC)
        text = f"{error.message}\n".encode()
        self._outbox = deque((memoryview(text),))
        self._outbox_bytes = len(text)
        self._streams.budget.charge(len(text))
        self._drawn_ns = now_ns()
        self.on_room = partial(self.end, error.status, error.message, error.trailers)
        self._output.hold(self)

    def take_memory(self, size: int) -> None:
        """Charge memory that the handler needs for what the client sent.

        Raises:
            Overloaded: It is over the limit.
        """
        budget = self._streams.budget
        if not budget.take(size):
            raise Overloaded(
                f"{size} bytes are needed to read a message, and nearly all of the "
                f"{budget.limit_bytes} for received bytes are in use (limits.receive_bytes)",
                retry_after_ms=RETRY_MS,
            )
        self.taken_bytes += size

    def give_back_memory(self, size: int) -> None:
        """The handler needs so many bytes no longer; fewer than none are there after the end."""
        if not self.is_over:
            self.taken_bytes -= size
            self._streams.budget.give_back(size)

    async def answer(self, *parts: Message) -> None:
        """Write the only message of a response and its status, at once where there is room."""
        if not self.try_answer(parts):
            await self.write(*parts)

    def try_answer(self, parts: Sequence[Message]) -> bool:
        """Send the only message of a response and its status, where there is room; whether so."""
        output, length = self._output, 0
        for part in parts:
            length += len(part)
        if self.is_over or self._has_begun or not self.has_all_input:
            return False
        if not output.can_answer(self, length):
            return False
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
        self.is_over = True
        # It may be in a cycle with what served it, and be there until a collection.
        self.close_input()
        self._outbox = None
        held_bytes = self._outbox_bytes + self.taken_bytes
        if held_bytes:
            self._streams.budget.release(held_bytes)
            self._outbox_bytes = self.taken_bytes = 0
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

    def look_after(self, now_ns: int) -> None:
        """End the call where a message of it, or its response, makes no progress."""
        timeouts = self._streams.host.timeouts
        self.evict_stalled(now_ns, int(timeouts.message_s * NS_PER_S))
        if self._outbox and now_ns - self._drawn_ns > int(timeouts.response_s * NS_PER_S):
            self._streams.host.count_ended("response_timeout")
            self._output.emit(frames.rst_stream(self.stream_id, Code.CANCEL))
            self.close()

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
        self._drawn_ns = self._streams.now_ns
        return drawn

    def sent(self) -> None:
        """All that waited is sent."""
        self._streams.budget.release(self._outbox_bytes)
        self._outbox_bytes = 0
        if self.on_room is not None:
            self.on_room()

    def _expire(self) -> None:
        late = RpcError(Status.DEADLINE_EXCEEDED, "the call's deadline has passed")
        error = self._streams.host.named(self.path, late)
        self.end(error.status, error.message, error.trailers)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
