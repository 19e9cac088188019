"""One gRPC call: request messages, response messages, deadline and status.

`write` waits while the client does not read, so at most one message of a call is unsent.

Runs on: gateway loop. Source: gRPC over HTTP/2 (Length-Prefixed-Message, Trailers).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from iskander.errors import Cancelled, Overloaded
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.gateway.auth.grants import FULL_GRANT, Grant
from iskander.gateway.auth.origin import Origin
from iskander.gateway.auth.source import Source
from iskander.gateway.transport.http2 import frames
from iskander.gateway.transport.http2 import response_headers as headers
from iskander.gateway.transport.http2.call_receiver import CallReceiver, Message
from iskander.gateway.transport.http2.frames import PREFIX_BYTES, ErrorCode
from iskander.gateway.transport.http2.request_headers import RequestHeaders
from iskander.gateway.transport.http2.response_headers import Metadata
from iskander.gateway.transport.http2.status import RpcError, Status

if TYPE_CHECKING:
    from iskander.gateway.transport.http2.streams import Streams

RETRY_MS: Final = 1000
__all__ = ["Call", "Message"]


class Call(CallReceiver):
    """One call of one connection."""

    __slots__ = (
        "_has_sent_headers", "_is_part_sent", "_outbox", "_outbox_bytes", "_sent_ns", "_status",
        "_timer",
        "deadline_ns", "grant", "handler_bytes", "metadata", "on_closed", "on_writable",
        "send_window", "task",
    )  # fmt: skip

    def __init__(self, streams: Streams, stream_id: int, head: RequestHeaders) -> None:
        super().__init__(streams, stream_id, head)
        self.metadata: Metadata = head.metadata
        self.grant: Grant = FULL_GRANT
        self.send_window = streams.output.call_window
        # Called when the call is closed; for handlers without a `task`.
        self.on_closed: Callable[[], None] | None = None
        # Called when no data is blocked any more, also during `send`; for handlers that do not
        # `write`.
        self.on_writable: Callable[[], None] | None = None
        self.task: asyncio.Task[None] | None = None
        self._outbox: deque[memoryview] | None = None
        self._outbox_bytes = self._sent_ns = 0
        self._status = Status.CANCELLED  # Until a status is sent.
        self.handler_bytes = 0  # Charged by `charge_memory`, released at the end of the call.
        self._has_sent_headers = self._is_part_sent = False
        self._timer: asyncio.TimerHandle | None = None
        self.deadline_ns: int | None = None  # On the monotonic clock.
        if head.timeout_ns is not None:
            self.deadline_ns = now_ns() + head.timeout_ns
            self._timer = self._loop.call_later(head.timeout_ns / NS_PER_S, self._expire)

    @property
    def caller(self) -> Hashable:
        """Identity of the caller: the name of its grant, or else the connection."""
        return self.grant.name or self._streams

    @property
    def source(self) -> Source:
        """Source of the call's requests, for fair queueing."""
        return self._streams.source(self.grant.name)

    @property
    def origin(self) -> Origin:
        """Origin of the call's connection."""
        return self._streams.origin

    @property
    def is_blocked(self) -> bool:
        """Whether flow control or a full socket holds back data."""
        return bool(self._outbox)

    @property
    def progress_ns(self) -> int:
        """Last progress of data that flow control holds back, or of a partial message; else 0."""
        if self._outbox:
            return self._sent_ns
        return self._progress_ns if self._partial is not None else 0

    def begin(self, metadata: Metadata = ()) -> None:
        """Send the response headers with this metadata, unless they are already sent."""
        if self.is_over or self._has_sent_headers:
            return
        self._has_sent_headers = True
        self._output.emit_block(self.stream_id, 0, headers.RESPONSE + headers.block(metadata))

    def send(self, *parts: Message) -> None:
        """Send or queue one message, the concatenation of the parts; they must not change later."""
        if self.is_over:
            return
        output = self._output
        if not self._has_sent_headers:
            self.begin()
        size = sum(map(len, parts))
        prefix = frames.prefix(size)
        size += PREFIX_BYTES
        if not self._outbox and output.can_send(self, size):
            output.send(self, size, (prefix, *parts))
            return
        self._enqueue(size, (memoryview(part) for part in (prefix, *parts) if part))

    def _enqueue(self, size: int, parts: Iterable[memoryview]) -> None:
        """Charge data, and send it as flow control allows."""
        outbox = self._outbox
        if outbox is None:
            outbox = self._outbox = deque()
        if not outbox:
            self._sent_ns = now_ns()
        self._outbox_bytes += size
        self._streams.budget.charge(size)
        if self.is_over:
            return  # The charge has evicted this call.
        outbox.extend(parts)
        self._output.enqueue(self)

    def reject_http(self, error: RpcError) -> None:
        """Reject a request that is not gRPC: 415, the error as text, then the gRPC status."""
        self.discard_input()
        self._has_sent_headers = True
        self._output.emit_block(self.stream_id, 0, headers.NOT_GRPC)
        text = f"{error.message}\n".encode()
        self.on_writable = partial(self.end, error.status, error.message, error.trailers)
        self._enqueue(len(text), (memoryview(text),))

    def charge_memory(self, size: int) -> None:
        """Charge memory that the handler needs to process a message.

        Raises:
            Cancelled: The call is over: nothing would release the charge.
            Overloaded: The budget is exhausted.
        """
        if self.is_over:
            raise Cancelled("the caller is gone")
        budget = self._streams.budget
        if not budget.try_charge(size):
            limit = f"limit {budget.limit_bytes:,} for all connections (`limits.receive_bytes`)"
            message = f"receive memory exhausted: {size:,} bytes needed to read a message, {limit}"
            raise Overloaded(message, retry_after_ms=RETRY_MS)
        self.handler_bytes += size

    def release_memory(self, size: int) -> None:
        """Release memory charged by `charge_memory`; the end of the call releases the rest."""
        if not self.is_over:
            self.handler_bytes -= size
            self._streams.budget.release(size)

    async def answer(self, *parts: Message) -> None:
        """Write the only response message, and the status with it if both can be sent now."""
        if not self.try_answer(parts):
            await self.write(*parts)

    def try_answer(self, parts: Sequence[Message]) -> bool:
        """Send the only response message and its status if possible now; return whether sent."""
        output, length = self._output, 0
        for part in parts:
            length += len(part)
        if self.is_over or self._has_sent_headers or not self.has_all_input:
            return False
        if not output.can_answer(self, length):
            return False
        output.answer(self, length, parts, self._streams.host.load_trailer)
        self._status = Status.OK
        self.close()
        return True

    async def read(self) -> Message | None:
        """Wait for the next message; None at the end of input or of the call."""
        while not (self.has_input or self.is_over):
            waiter = self._loop.create_future()
            self.on_input = partial(_wake, waiter)
            try:
                await waiter
            finally:
                self.on_input = None
        return self.receive()

    async def write(self, *parts: Message) -> None:
        """Send a message, and wait until all of it is sent."""
        self.send(*parts)
        if self._outbox:
            waiter = self._loop.create_future()
            self.on_writable = partial(_wake, waiter)
            try:
                await waiter
            finally:
                self.on_writable = None

    def end(self, status: Status = Status.OK, message: str = "", metadata: Metadata = ()) -> None:
        """Send the status and close the call, unless it is over; unsent data is discarded."""
        if self.is_over:
            return
        block = headers.trailers(status, message, metadata) + self._streams.host.load_trailer
        if not self._has_sent_headers:
            block = headers.RESPONSE + block
        if self._outbox and (self._is_part_sent or status is Status.OK):
            # No status can follow part of a message, and OK cannot follow a missing one.
            self._output.emit(frames.rst_stream(self.stream_id, ErrorCode.CANCEL))
        else:
            self._status = status
            self._output.emit_block(self.stream_id, frames.END_STREAM, block)
            if not self.has_all_input:
                self._output.emit(frames.rst_stream(self.stream_id, ErrorCode.NO_ERROR))
        self.close()

    def close(self) -> None:
        """Close the call without a status: release its memory, and cancel its task.

        The current task is not cancelled.
        """
        if self.is_over:
            return
        self.is_over = True
        self._streams.host.count_call(self.path, self._status)
        # A reference cycle may keep the call until a garbage collection, so drop the data now.
        self.discard_input()
        self._outbox = None
        charged_bytes = self._outbox_bytes + self.handler_bytes
        if charged_bytes:
            self._streams.budget.release(charged_bytes)
            self._outbox_bytes = self.handler_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._streams.remove(self)
        on_closed, self.on_closed = self.on_closed, None
        if on_closed is not None:
            on_closed()
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()

    def check_timeouts(self, now_ns: int) -> None:
        """End the call if a request message or the response makes no progress."""
        timeouts = self._streams.host.timeouts
        self.evict_stalled(now_ns, int(timeouts.message_s * NS_PER_S))
        if self._outbox and now_ns - self._sent_ns > int(timeouts.response_s * NS_PER_S):
            self._streams.host.count_ended("response_timeout")
            self._output.emit(frames.rst_stream(self.stream_id, ErrorCode.CANCEL))
            self.close()

    def next_parts(self, bytes_max: int) -> list[memoryview]:
        """Remove and return the next bytes to send, at most `bytes_max`."""
        parts = []
        outbox = self._outbox
        while outbox and bytes_max:
            part = outbox.popleft()
            if len(part) > bytes_max:
                outbox.appendleft(part[bytes_max:])
                part = part[:bytes_max]
            parts.append(part)
            bytes_max -= len(part)
        self._is_part_sent = bool(outbox)
        self._sent_ns = self._streams.now_ns
        return parts

    def on_sent(self) -> None:
        """Release the memory of the blocked data: all of it is sent."""
        self._streams.budget.release(self._outbox_bytes)
        self._outbox_bytes = 0
        if self.on_writable is not None:
            self.on_writable()

    def _expire(self) -> None:
        """End the call at its deadline."""
        error = RpcError(Status.DEADLINE_EXCEEDED, "call deadline exceeded")
        error = self._streams.host.add_details(self.path, error)
        self.end(error.status, error.message, error.trailers)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
