"""The streams of one connection: their states, their DATA and HEADERS, and the calls on them.

A stream whose call the server ended first is remembered, since frames of the client may still be on
their way; frames of any other closed stream are errors.

Runs on: gateway loop. Source: RFC 9113, sections 5.1, 6.1 and 6.2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

from iskander.auth.source import Source
from iskander.clock import NS_PER_US, now_ns
from iskander.transport.http2 import frames
from iskander.transport.http2 import response_headers as headers
from iskander.transport.http2.call import Call
from iskander.transport.http2.context import Host
from iskander.transport.http2.frame_sender import FrameSender
from iskander.transport.http2.frames import Code, ConnectionBroken, StreamError
from iskander.transport.http2.header_block_reader import Fields, HeaderBlockReader
from iskander.transport.http2.rate_limit import RateLimiter
from iskander.transport.http2.request_headers import NotGrpc, RequestHead, check_fields
from iskander.transport.http2.status import RpcError, Status

FREE_BLOCK_BYTES: Final = 2048
"""Decoding cost of a header block that is free, and the cost that counts as one frame."""
FRAGMENT_BYTES: Final = 256
"""A DATA frame of less payload that completes no message and ends no call is a fragment."""
FRAGMENT_COST: Final = 0.25
MESSAGE_CPU_NS: Final = 500 * NS_PER_US
BYTE_CPU_NS: Final = 2
"""Processor time that a message or a byte of one, delivered, is granted."""
EARLY_ENDS_MAX: Final = 1024
"""Streams that the server ended before the client did, which are remembered."""
ENDED_A_TURN: Final = 8
"""Calls closed in one turn once their connection has ended; each may have a task to cancel."""
_connection_numbers = itertools.count(1)


class Streams:
    """The streams of one connection.

    Args:
        host: What the connections of a server share.
        output: Sends frames.
        limiter: Of the connection.
        on_idle: Called when the last call has ended.

    Attributes:
        budget: Of the host.
        calls: The open calls, by stream.
        opened: Calls that are not served yet.
        tasks_begun: By calls that were served in this turn.
        last_id: The highest stream that the client has opened.
        messages_arrived: Messages of more than 0 bytes.
        is_behind: A turn ended in the midst of a DATA frame's payload.
        is_refusing: New calls are refused, since the connection closes.
    """

    def __init__(
        self, host: Host, output: FrameSender, limiter: RateLimiter, on_idle: Callable[[], None]
    ) -> None:
        self.host = host
        self.output = output
        self.budget = host.budget
        self._connection_number = next(_connection_numbers)
        self._tenant = ""
        self._source = Source(connection=self._connection_number)
        self.calls: dict[int, Call] = {}
        self.opened: list[Call] = []
        self.tasks_begun = 0
        self.last_id = 0
        self.messages_arrived = 0
        self._answered = self._granted = 0
        self._taken_bytes = 0
        self.is_behind = self.is_refusing = False
        self.now_ns = 0
        self._limiter = limiter
        self._on_idle = on_idle
        self._blocks = HeaderBlockReader()
        self._data_left = self._padding_left = 0
        self._data_call: Call | None = None
        self._data_ends = False
        self._received = 0
        self._ended_early: dict[int, None] = {}
        self._has_forgotten = False

    @property
    def is_block_open(self) -> bool:
        """Whether the next frame must be a CONTINUATION."""
        return self._blocks.is_open

    @property
    def has_data_left(self) -> bool:
        """Whether the next bytes are payload of a DATA frame."""
        return self._data_left > 0 or self._padding_left > 0

    def source(self, tenant: str) -> Source:
        """Whose share of a queue the requests of a call take."""
        if tenant != self._tenant:
            self._tenant, self._source = tenant, Source(tenant, self._connection_number)
        return self._source

    def is_idle(self, stream_id: int) -> bool:
        """Whether no call was ever opened on a stream: clients open odd ones, in their order."""
        return stream_id > self.last_id or not stream_id % 2

    def begin_data(self, length: int, padding: int, flags: int, stream_id: int) -> None:
        """Take the head of a DATA frame; flow control counts the whole frame."""
        if self.is_idle(stream_id):
            raise ConnectionBroken(Code.PROTOCOL_ERROR, "DATA of a call that was never opened")
        self._data_left = length
        self._padding_left = max(padding - 1, 0)  # Its length, one byte, was read.
        self._data_ends = bool(flags & frames.END_STREAM)
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
            raise ConnectionBroken(Code.STREAM_CLOSED, "DATA after the end of a call's input")
        if not call.take_frame(length, padding):
            self.reset(stream_id, Code.PROTOCOL_ERROR)
            return
        if length < FRAGMENT_BYTES and not self._data_ends:
            self._limiter.charge_reply(
                self.now_ns, FRAGMENT_COST if length else 1.0, self.take_answers()
            )
        if not length and self._data_ends:
            self._end_input(call)

    def take_data(self, view: memoryview, at: int, until_ns: int) -> int:
        """Take what has come of a DATA frame; return where the rest of the input begins."""
        end = len(view)
        stop = min(at + self._data_left, end)
        while at < stop:
            call = self._data_call
            if call is None:
                self._data_left -= stop - at
                at = stop
                break
            taken = call.take(view[at:stop])
            at += taken
            self._data_left -= taken
            self._taken_bytes += taken
            if call.empty_messages:
                self._charge_empty(call)
            if not self._data_left and self._data_ends and self._data_call is call:
                self._end_input(call)
            if at < stop and now_ns() >= until_ns:
                self.is_behind = True
                return at
        if self._padding_left and not self._data_left:
            skipped = min(self._padding_left, end - at)
            self._padding_left -= skipped
            at += skipped
        return at

    def _end_input(self, call: Call) -> None:
        if not call.take_end():
            self.reset(call.stream_id, Code.PROTOCOL_ERROR)

    def _charge_empty(self, call: Call) -> None:
        count, call.empty_messages = call.empty_messages, 0
        self._limiter.charge_reply(self.now_ns, count, self.take_answers())

    def take_answers(self) -> int:
        """Frames of answers sent and messages delivered since the last call; both earn credit."""
        arrived, self._answered = self.messages_arrived - self._answered, self.messages_arrived
        return self.output.take_answers() + arrived

    def take_granted_ns(self) -> int:
        """Processor time granted for what has arrived since the last call."""
        arrived, self._granted = self.messages_arrived - self._granted, self.messages_arrived
        taken, self._taken_bytes = self._taken_bytes, 0
        return MESSAGE_CPU_NS * arrived + BYTE_CPU_NS * taken

    def on_headers(self, flags: int, stream_id: int, payload: memoryview) -> None:
        """Process a HEADERS frame."""
        if not stream_id % 2:
            raise ConnectionBroken(Code.PROTOCOL_ERROR, f"a client opened stream {stream_id}")
        if flags & frames.HAS_PRIORITY and frames.dependency(payload, flags) == stream_id:
            raise ConnectionBroken(Code.PROTOCOL_ERROR, "a stream depends on itself")
        self._blocks.begin(stream_id, flags, payload)
        if flags & frames.END_HEADERS:
            self._end_block()

    def on_continuation(self, flags: int, stream_id: int, payload: memoryview) -> None:
        """Process a CONTINUATION frame."""
        self._blocks.go_on(stream_id, payload)
        if flags & frames.END_HEADERS:
            self._end_block()
        else:
            self._limiter.charge(self.now_ns)

    def _end_block(self) -> None:
        stream_id, is_last, fields = self._blocks.end()
        if fields.cost_bytes > FREE_BLOCK_BYTES:
            cost = fields.cost_bytes / FREE_BLOCK_BYTES - 1.0
            self._limiter.charge_reply(self.now_ns, cost, self.take_answers())
        if stream_id > self.last_id:
            self._open(stream_id, fields, is_last=is_last)
            return
        call = self.calls.get(stream_id)
        if call is None:
            self._require_early_end(stream_id, "HEADERS")
            self._limiter.charge(self.now_ns)
            return
        if call.has_all_input:
            raise StreamError(Code.STREAM_CLOSED, "HEADERS after the end of a call's input")
        if not is_last or check_fields(fields.pairs):
            raise StreamError(Code.PROTOCOL_ERROR, "malformed trailers of a request")
        self._end_input(call)

    def _open(self, stream_id: int, fields: Fields, *, is_last: bool) -> None:
        self.last_id = stream_id
        try:
            request = fields.request()
            if self.is_refusing or len(self.calls) >= self.host.calls_max:
                raise StreamError(Code.REFUSED_STREAM, "too many calls")
        except StreamError as error:
            if not is_last:
                self._remember_early_end(stream_id)
            self.reset(stream_id, error.code)
            return
        except NotGrpc as other:
            self._limiter.charge(self.now_ns)
            call = self.calls[stream_id] = Call(self, stream_id, RequestHead("", None, "", ()))
            call.has_all_input = is_last
            call.refuse_http(self.host.named(fields.path, other))
            return
        except RpcError as refused:
            self._limiter.charge(self.now_ns)
            why = self.host.named(fields.path, refused)
            ends = headers.trailers(why.status, why.message, why.trailers)
            self.output.emit_block(stream_id, frames.END_STREAM, headers.RESPONSE + ends)
            if not is_last:
                self._remember_early_end(stream_id)
                self.output.emit(frames.rst_stream(stream_id, Code.NO_ERROR))
            return
        call = self.calls[stream_id] = Call(self, stream_id, request)
        self.opened.append(call)
        if is_last:
            self._end_input(call)

    def reset(self, stream_id: int, code: Code) -> None:
        """Reset a stream for an error of the client; many such resets end the connection."""
        self._limiter.charge(self.now_ns)
        self.output.emit(frames.rst_stream(stream_id, code))
        call = self.calls.get(stream_id)
        if call is not None:
            call.close()

    def _remember_early_end(self, stream_id: int) -> None:
        """Remember a stream on which frames of the client may still be on their way."""
        self._ended_early[stream_id] = None
        if len(self._ended_early) > EARLY_ENDS_MAX:
            del self._ended_early[next(iter(self._ended_early))]
            self._has_forgotten = True

    def _require_early_end(self, stream_id: int, what: str) -> None:
        """Raise ConnectionBroken unless the server ended the stream before the client did."""
        if stream_id not in self._ended_early and not self._has_forgotten:
            raise ConnectionBroken(Code.STREAM_CLOSED, f"{what} of a call that has ended")

    def on_rst_stream(self, stream_id: int, payload: memoryview) -> None:
        """Process a RST_STREAM frame."""
        frames.read_number(payload)
        self._limiter.charge(self.now_ns)
        if self.is_idle(stream_id):
            raise ConnectionBroken(Code.PROTOCOL_ERROR, "a reset of a call that was never opened")
        call = self.calls.get(stream_id)
        if call is not None:
            call.close()
        self._ended_early.pop(stream_id, None)

    def serve_opened(self) -> None:
        """Begin to answer the calls that were opened, with what has come of them by now."""
        opened, self.opened = self.opened, []
        for call in opened:
            if not (call.is_over or self.host.at_once(call)):
                self.tasks_begun += 1
                call.task = self.host.loop.create_task(_run(self.host, call))
            call.charge_waiting()

    def forget(self, call: Call) -> None:
        """Remove a call that is over."""
        self.calls.pop(call.stream_id, None)
        if not call.has_all_input:
            self._remember_early_end(call.stream_id)
        self.output.drop(call)
        if self._data_call is call:
            self._data_call = None
        if not self.calls:
            self._on_idle()

    def look_after(self, now: int) -> None:
        """End the calls of which nothing makes progress."""
        for call in list(self.calls.values()):
            call.look_after(now)

    # For the receive budget.

    def held(self, now_ns: int) -> float:
        """Received bytes that could be freed, times the nanoseconds since their message began."""
        held = 0.0
        for call in self.calls.values():
            if call.held_bytes:
                held += call.held_bytes * (now_ns - call.began_ns)
        return held

    def shed(self) -> bool:
        """Refuse the call that holds most; return whether there is one."""
        largest = max(self.calls.values(), key=_held_bytes, default=None)
        if largest is None or not largest.held_bytes:
            return False
        largest.shed()
        return True

    def evict_stalled(self, now_ns: int, stall_ns: int) -> None:
        """Refuse the half-received messages that made no progress for so long."""
        for call in list(self.calls.values()):
            call.evict_stalled(now_ns, stall_ns)

    def close(self) -> None:
        """End all calls: nobody is there for their answers. Some in each turn of the loop."""
        self.opened.clear()
        for call in list(itertools.islice(self.calls.values(), ENDED_A_TURN)):
            call.close()
        if self.calls:
            self.host.loop.call_soon(self.close)


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
    finally:
        # A task keeps the traceback of its end, and with it the frames that hold messages.
        call.task = None


def _held_bytes(call: Call) -> int:
    return call.held_bytes
