"""The streams of one connection: states, DATA and HEADERS frames, calls.

A stream that the server ended before the client is remembered, because frames of the client may
still arrive on it. A frame on any other closed stream is a connection error.

Runs on: gateway loop. Source: RFC 9113, sections 5.1, 6.1 and 6.2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from iskander.foundation.clock import NS_PER_US, now_ns
from iskander.gateway.auth.origin import UNKNOWN_ORIGIN
from iskander.gateway.auth.source import Source
from iskander.gateway.transport.http2 import frames
from iskander.gateway.transport.http2 import response_headers as headers
from iskander.gateway.transport.http2.call import Call
from iskander.gateway.transport.http2.frame_sender import FrameSender
from iskander.gateway.transport.http2.frames import ConnectionBroken, ErrorCode, StreamError
from iskander.gateway.transport.http2.header_block_reader import Fields, HeaderBlockReader
from iskander.gateway.transport.http2.rate_limit import RateLimiter
from iskander.gateway.transport.http2.request_headers import NotGrpc, RequestHeaders, check_fields
from iskander.gateway.transport.http2.status import RpcError, Status

if TYPE_CHECKING:
    from iskander.gateway.transport.http2.listener import Listener

FREE_BLOCK_BYTES: Final = 2048
"""Decoding cost that is free for a header block; each further such cost counts as a frame."""
FRAGMENT_BYTES: Final = 256
"""A DATA frame with less payload and without END_STREAM is a fragment."""
FRAGMENT_COST: Final = 0.25
"""Cost of a fragment, in frames."""
CONTINUATION_BYTES_MIN: Final = 1024
"""A CONTINUATION frame with less payload is a fragment: clients fill 16 KiB first."""
SHORT_CONTINUATION_COST: Final = 4.0
EMPTY_CONTINUATION_COST: Final = 100.0
"""Costs of a fragment, and of a frame without payload, which no client sends, in frames."""
MESSAGE_CPU_NS: Final = 500 * NS_PER_US
BYTE_CPU_NS: Final = 2
"""CPU time granted for a received message, and for a byte of one."""
EARLY_ENDS_MAX: Final = 1024
"""Remembered streams; above it, DATA and HEADERS are accepted on any closed stream."""
CLOSED_PER_ITERATION: Final = 8
"""Calls of a lost connection closed in one event loop iteration; each may cancel a task."""
_connection_numbers = itertools.count(1)


class Streams:
    """The streams of one connection."""

    def __init__(
        self, host: Listener, output: FrameSender, limiter: RateLimiter, on_idle: Callable[[], None]
    ) -> None:
        self.host = host
        self.output = output
        self.budget = host.budget
        self.calls_max = host.calls_max  # As announced: a later change is for other connections.
        self.origin = UNKNOWN_ORIGIN
        self._connection_number = next(_connection_numbers)
        self._tenant = ""
        self._source = Source(connection=self._connection_number)
        self.calls: dict[int, Call] = {}
        self.opened: list[Call] = []  # Not served yet.
        self.tasks_started = 0  # In this turn, for calls.
        self.messages_received = 0  # Of more than 0 bytes.
        self.last_id = self.now_ns = self._counted_messages = self._granted_messages = 0
        self._received = self._fed_bytes = 0
        self.is_interrupted = False  # The turn ended with unprocessed input.
        self.is_rejecting = False
        self._limiter = limiter
        self._on_idle = on_idle
        self.block_reader = HeaderBlockReader()
        self._data_left = self._padding_left = 0
        self._data_call: Call | None = None
        self._is_data_last = False
        self._ended_early: dict[int, None] = {}
        self._has_dropped_early_ends = False

    @property
    def has_data_left(self) -> bool:
        """Whether the next bytes are payload of a DATA frame."""
        return self._data_left > 0 or self._padding_left > 0

    def source(self, tenant: str) -> Source:
        """Return the source of a call's requests, for fair queueing."""
        if tenant != self._tenant:
            self._tenant, self._source = tenant, Source(tenant, self._connection_number)
        return self._source

    def is_idle(self, stream_id: int) -> bool:
        """Whether a stream is idle: clients open odd streams in ascending order."""
        return stream_id > self.last_id or not stream_id % 2

    def begin_data(self, length: int, padding: int, flags: int, stream_id: int) -> None:
        """Process the header of a DATA frame; flow control counts payload and padding."""
        if self.is_idle(stream_id):
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "DATA on an idle stream")
        self._data_left = length
        self._padding_left = max(padding - 1, 0)  # Without the pad length byte, which is consumed.
        self._is_data_last = bool(flags & frames.END_STREAM)
        self._received += length + padding
        if self._received > frames.WINDOW_MAX // 2:
            self.output.emit(frames.window_update(0, self._received))
            self._received = 0
        call = self._data_call = self.calls.get(stream_id)
        if call is None:
            self._require_early_end(stream_id, "DATA")
            self._limiter.charge(self.now_ns, FRAGMENT_COST)
            return
        if call.has_all_input:
            raise ConnectionBroken(ErrorCode.STREAM_CLOSED, "DATA after END_STREAM")
        if not call.count_frame(length, padding):
            self.reset(stream_id, ErrorCode.PROTOCOL_ERROR)
            return
        if length < FRAGMENT_BYTES and not self._is_data_last:
            self.charge_reply(FRAGMENT_COST if length else 1.0)
        if not length and self._is_data_last:
            self._end_input(call)

    def feed_data(self, view: memoryview, at: int, until_ns: int) -> int:
        """Process received DATA payload; return the position of the remaining input."""
        end = len(view)
        stop = min(at + self._data_left, end)
        while at < stop:
            call = self._data_call
            if call is None:
                self._data_left -= stop - at
                at = stop
                break
            count = call.feed_data(view[at:stop])
            at += count
            self._data_left -= count
            self._fed_bytes += count
            if call.empty_messages:
                empty, call.empty_messages = call.empty_messages, 0
                self.charge_reply(empty)
            if not self._data_left and self._is_data_last and self._data_call is call:
                self._end_input(call)
            if at < stop and now_ns() >= until_ns:
                self.is_interrupted = True
                return at
        if self._padding_left and not self._data_left:
            skipped = min(self._padding_left, end - at)
            self._padding_left -= skipped
            at += skipped
        return at

    def _end_input(self, call: Call) -> None:
        if not call.feed_eof():
            self.reset(call.stream_id, ErrorCode.PROTOCOL_ERROR)

    def charge_reply(self, cost: float) -> None:
        """Charge a frame; response frames and received messages each make some frames free."""
        count = self.messages_received - self._counted_messages
        self._counted_messages = self.messages_received
        earned = self.output.take_response_frames() + count
        self._limiter.charge_reply(self.now_ns, cost, earned)

    def take_granted_ns(self) -> int:
        """Return the CPU time granted for messages and bytes since the last call of this method."""
        count = self.messages_received - self._granted_messages
        self._granted_messages = self.messages_received
        size, self._fed_bytes = self._fed_bytes, 0
        return MESSAGE_CPU_NS * count + BYTE_CPU_NS * size

    def on_headers(self, flags: int, stream_id: int, payload: memoryview) -> None:
        """Process a HEADERS frame."""
        if not stream_id % 2:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, f"HEADERS on even stream {stream_id}")
        if flags & frames.HAS_PRIORITY and frames.dependency(payload, flags) == stream_id:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "stream depends on itself")
        self.block_reader.on_headers(stream_id, flags, payload)
        if flags & frames.END_HEADERS:
            self._end_block()

    def on_continuation(self, flags: int, stream_id: int, payload: memoryview) -> None:
        """Process a CONTINUATION frame."""
        self.block_reader.on_continuation(stream_id, payload)
        if not len(payload):
            self._limiter.charge(self.now_ns, EMPTY_CONTINUATION_COST)
        elif not flags & frames.END_HEADERS:
            is_short = len(payload) < CONTINUATION_BYTES_MIN
            self._limiter.charge(self.now_ns, SHORT_CONTINUATION_COST if is_short else 1.0)
        if flags & frames.END_HEADERS:
            self._end_block()

    def _end_block(self) -> None:
        """Process a complete header block: request headers or trailers."""
        stream_id, is_last, fields = self.block_reader.end()
        if fields.cost_bytes > FREE_BLOCK_BYTES:
            self.charge_reply(fields.cost_bytes / FREE_BLOCK_BYTES - 1.0)
        if stream_id > self.last_id:
            self._open(stream_id, fields, is_last=is_last)
            return
        call = self.calls.get(stream_id)
        if call is None:
            self._require_early_end(stream_id, "HEADERS")
            self._limiter.charge(self.now_ns)
            return
        if call.has_all_input:
            raise StreamError(ErrorCode.STREAM_CLOSED, "HEADERS after END_STREAM")
        if not is_last or check_fields(fields.pairs):
            raise StreamError(ErrorCode.PROTOCOL_ERROR, "malformed request trailers")
        self._end_input(call)

    def _open(self, stream_id: int, fields: Fields, *, is_last: bool) -> None:
        """Open a call, or reject it; `is_last` means that no DATA follows."""
        self.last_id = stream_id
        try:
            request = fields.request()
            if self.is_rejecting or len(self.calls) >= self.calls_max:
                raise StreamError(ErrorCode.REFUSED_STREAM, "too many open calls")
        except StreamError as error:
            if not is_last:
                self._remember_early_end(stream_id)
            self.reset(stream_id, error.code)
            return
        except NotGrpc as not_grpc:
            self._limiter.charge(self.now_ns)
            empty = RequestHeaders("", None, "", (), -1)
            call = self.calls[stream_id] = Call(self, stream_id, empty)
            call.has_all_input = is_last
            call.reject_http(self.host.add_details(fields.path, not_grpc))
            return
        except RpcError as rejection:
            self._limiter.charge(self.now_ns)
            end = self.host.add_details(fields.path, rejection)
            self.host.count_call(fields.path, end.status)
            trailers = headers.trailers(end.status, end.message, end.trailers)
            self.output.emit_block(stream_id, frames.END_STREAM, headers.RESPONSE + trailers)
            if not is_last:
                self._remember_early_end(stream_id)
                self.output.emit(frames.rst_stream(stream_id, ErrorCode.NO_ERROR))
            return
        call = self.calls[stream_id] = Call(self, stream_id, request)
        self.opened.append(call)
        if is_last:
            self._end_input(call)

    def reset(self, stream_id: int, code: ErrorCode) -> None:
        """Reset a stream after a client error; counts against the rate limit."""
        self._limiter.charge(self.now_ns)
        self.output.emit(frames.rst_stream(stream_id, code))
        call = self.calls.get(stream_id)
        if call is not None:
            call.close()

    def _remember_early_end(self, stream_id: int) -> None:
        self._ended_early[stream_id] = None
        if len(self._ended_early) > EARLY_ENDS_MAX:
            del self._ended_early[next(iter(self._ended_early))]
            self._has_dropped_early_ends = True

    def _require_early_end(self, stream_id: int, frame: str) -> None:
        """Raise ConnectionBroken unless the server ended the stream before the client."""
        if stream_id not in self._ended_early and not self._has_dropped_early_ends:
            raise ConnectionBroken(ErrorCode.STREAM_CLOSED, f"{frame} on a closed stream")

    def on_rst_stream(self, stream_id: int, payload: memoryview) -> None:
        """Process a RST_STREAM frame."""
        frames.read_number(payload)
        self._limiter.charge(self.now_ns)
        if self.is_idle(stream_id):
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "RST_STREAM on an idle stream")
        call = self.calls.get(stream_id)
        if call is not None:
            call.close()
        self._ended_early.pop(stream_id, None)

    def serve_opened(self) -> None:
        """Start to serve the opened calls with the input received so far."""
        opened, self.opened = self.opened, []
        for call in opened:
            if not (call.is_over or self.host.serve_inline(call)):
                self.tasks_started += 1
                call.task = self.host.loop.create_task(_serve(self.host, call))
            call.charge_unread()

    def remove(self, call: Call) -> None:
        """Remove a closed call."""
        self.calls.pop(call.stream_id, None)
        if not call.has_all_input:
            self._remember_early_end(call.stream_id)
        self.output.dequeue(call)
        if self._data_call is call:
            self._data_call = None
        if not self.calls:
            self._on_idle()

    def check_timeouts(self, now: int) -> None:
        """End the calls that make no progress."""
        for call in list(self.calls.values()):
            call.check_timeouts(now)

    def evictable(self, now_ns: int) -> float:
        """Return the releasable bytes times the nanoseconds since their message began, in total."""
        calls = self.calls.values()
        return float(sum(call.unread_bytes * (now_ns - call.began_ns) for call in calls))

    def evict(self) -> bool:
        """Reject the input of the call with the most unread bytes; return whether there was one."""
        largest = max(self.calls.values(), key=lambda call: call.unread_bytes, default=None)
        if largest is None or not largest.unread_bytes:
            return False
        largest.evict()
        return True

    def evict_stalled(self, now_ns: int, stall_ns: int) -> None:
        """Reject the partial messages that are `stall_ns` behind the minimum rate."""
        for call in list(self.calls.values()):
            call.evict_stalled(now_ns, stall_ns)

    def detach(self) -> None:
        """Close all calls of a lost connection, and release it: without a cycle it is freed now."""
        self._on_idle = _ignore
        self.close()

    def close(self) -> None:
        """Close all calls, a few in each event loop iteration."""
        self.opened.clear()
        for call in list(itertools.islice(self.calls.values(), CLOSED_PER_ITERATION)):
            call.close()
        if self.calls:
            self.host.loop.call_soon(self.close)


def _ignore() -> None:
    """Do nothing when the last call of a lost connection has closed."""


async def _serve(host: Listener, call: Call) -> None:
    """Run the handler of a call, then send its status, unless the handler has given up `task`."""
    own = call.task
    try:
        await host.serve(call)
    except RpcError as error:
        call.end(error.status, error.message, error.trailers)
    except BaseException:
        call.end(Status.INTERNAL, "internal server error")
        raise
    else:
        if call.task is own:
            call.end()
    finally:
        # The task keeps the traceback of an error, whose frames refer to messages.
        if call.task is own:
            call.task = None
