"""ZMTP connection of one peer: handshake, messages, turns, and charged memory.

A large frame is read into its own buffer; a small one is copied from the shared read buffer. While
the session is full, messages queue in a bounded backlog, so that a disconnect is still noticed;
when the backlog is full, the socket is not read.

A read is processed for a quantum of time; if input is left, the connection waits for its next
turn. Received bytes are charged to the receive budget until the session takes them, large frames
until they are freed.

Runs on: gateway loop. Source: RFC 37/ZMTP 3.1; poll(2).
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol, cast

from iskander.foundation.clock import NS_PER_MS, NS_PER_S, NS_PER_US, now_ns, thread_cpu_ns
from iskander.gateway.transport.limits.cpu_allowance import PER_S_NS, CpuAllowance
from iskander.gateway.transport.limits.receive_budget import MESSAGE_RATE_MIN, progress_ns
from iskander.gateway.transport.limits.turn_scheduler import QUANTUM_NS, ReadBurst
from iskander.gateway.transport.zmtp import frames
from iskander.gateway.transport.zmtp.frames import Part, ProtocolViolation
from iskander.gateway.transport.zmtp.received import Backlog, PartialFrame

if TYPE_CHECKING:
    from iskander.gateway.transport.zmtp.listener import Listener

PARTS_MAX: Final = 16
COMMAND_BYTES_MAX: Final = 8192
WRITE_BUFFER_BYTES: Final = 1 << 20
"""High-water mark of the write buffer; above it, the session keeps its responses."""
JOINED_BYTES_MAX: Final = 65_536
"""Up to this size, one copy costs less than a write per part."""
READ_BYTES_MAX: Final = 1 << 18
"""Limit on one read of a large frame: the first write to new memory is slow."""
CLOCK_FRAMES: Final = 16
"""Frames without a complete message between two clock reads."""
MESSAGE_CPU_NS: Final = 500 * NS_PER_US
BYTE_CPU_NS: Final = 2
"""Processor time granted per valid message and per byte."""


class Session(Protocol):
    """Consumer of a peer's messages."""

    unread_bytes: int  # Charged bytes of queued responses.

    @property
    def is_full(self) -> bool:
        """Whether it accepts no messages; calls `Connection.resume` when it accepts them again."""

    def on_message(self, parts: list[Part], arrived_ns: int) -> bool:
        """Process a message; `arrived_ns` is its monotonic arrival time.

        Returns whether it was valid: an invalid message earns its connection no processor time.
        """

    def reject(self, parts: list[Part]) -> None:
        """Reject a message for lack of memory."""

    @property
    def has_work(self) -> bool:
        """Whether a message is unanswered or a response unsent."""

    def on_writable(self) -> None:
        """Send queued responses: the socket is writable again."""

    def on_lost(self) -> None:
        """Withdraw the work of the closed connection."""


class Connection(asyncio.BufferedProtocol):
    """The server side of a connection; `is_blocked` while the write buffer is full."""

    def __init__(self, host: Listener) -> None:
        self._host = host
        self._transport: asyncio.Transport
        self._session: Session | None = None
        self._opened_ns = self._read_ns = self._progress_ns = self._message_ns = now_ns()
        self._blocked_ns = self._pinged_ns = 0
        self._is_greeted = self._can_ping = self._is_closed = False
        self._is_waiting = self._is_interrupted = False
        self._rest = b""
        self._partial = PartialFrame(self, host.budget, self._resume_reading)
        self._parts: list[Part] = []
        self._parts_bytes = self._small_bytes = 0
        self._message_bytes_max = 0  # Of the message in progress.
        self._backlog = Backlog()
        self._charged_bytes = self._granted_ns = 0
        self._cpu = CpuAllowance(self._opened_ns)
        self._burst = ReadBurst(host.turns)
        self.deficit_ns = self.wasted_ns = 0
        self.is_blocked = False

    @property
    def has_unsent(self) -> bool:
        """Whether the write buffer is not empty."""
        return not self._is_closed and self.unsent_bytes > 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the greeting."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._host.connections.add(self)
        self._host.budget.holders.add(self)
        self._transport.write(frames.GREETING)

    def connection_lost(self, error: Exception | None) -> None:
        """Free the input and end the session; without a reference cycle, both are freed at once."""
        del error
        self._is_closed = True
        self._host.forget(self)
        self._host.budget.holders.discard(self)
        self._drop_input()
        self._partial.detach()
        if self._session is not None:
            self._session.on_lost()
            self._session = None

    def pause_writing(self) -> None:
        """Start the response timeout: the write buffer is full."""
        self.is_blocked = True
        self._blocked_ns = now_ns()
        self._host.charge_unsent(self)

    def resume_writing(self) -> None:
        """Resume the session's responses."""
        self.is_blocked = False
        self._host.charge_unsent(self)
        if self._session is not None:
            self._session.on_writable()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer of the partial frame, or the shared one."""
        del sizehint
        body, filled = self._partial.body, self._partial.filled
        return self._host.scratch if body is None else body[filled : filled + READ_BYTES_MAX]

    def buffer_updated(self, nbytes: int) -> None:
        """Process the read for at most a quantum of time."""
        began_ns = self._read_ns = now_ns()
        is_partial = self._is_partial
        self._progress_ns = (
            progress_ns(self._progress_ns, began_ns, nbytes) if is_partial else began_ns
        )
        cpu_ns = thread_cpu_ns()
        self._pinged_ns = 0
        if self._partial.body is not None:
            self._partial.fill(nbytes)
            self._parse(memoryview(b""), began_ns + QUANTUM_NS)
        else:
            view = self._host.scratch[:nbytes]
            if self._rest:
                view, self._rest = memoryview(self._rest + view), b""
            self._parse(view, began_ns + QUANTUM_NS)
        ended_ns = now_ns()
        if self._burst.is_long(began_ns, ended_ns, nbytes, QUANTUM_NS) or self._is_interrupted:
            self._wait_turn(QUANTUM_NS - (ended_ns - began_ns))
        self._update_charge()
        self.note_cpu(thread_cpu_ns() - cpu_ns)

    def take_turn(self, until_ns: int) -> bool:
        """Process input until that time; return whether input is left."""
        self._is_waiting = False
        self._resume_input(until_ns)
        self._is_waiting = self._is_interrupted and not self._is_closed
        self._update_charge()
        return self._is_waiting

    def note_cpu(self, used_ns: int) -> bool:
        """Charge the processor time of a turn; return whether the connection stays open."""
        granted_ns, self._granted_ns = self._granted_ns, 0
        self.wasted_ns = used_ns - granted_ns
        if not self._cpu.charge(now_ns(), self.wasted_ns) and not self._is_closed:
            self._fail(
                f"CPU limit exceeded: {PER_S_NS // NS_PER_MS} ms/s without a message", "cpu_time"
            )
        return not self._is_closed

    def send(self, parts: Sequence[Part]) -> None:
        """Send a message; the transport buffers it while the socket is not writable."""
        if self._is_closed:
            return
        pieces = frames.message(parts)
        if sum(map(len, pieces)) <= JOINED_BYTES_MAX:
            self._transport.write(b"".join(pieces))
        else:
            self._transport.writelines(pieces)

    def resume(self) -> None:
        """Resume input: the session is not full any more."""
        if self._is_waiting or self._is_closed or self._session is None:
            return
        if self._backlog or not self._transport.is_reading():
            self._resume_input(now_ns() + QUANTUM_NS)
            if self._is_interrupted:
                self._wait_turn(0)
            self._update_charge()

    def enforce_timeouts(self, now: int) -> None:
        """End the connection after a timeout, or after a disconnect while paused."""
        timeouts = self._host.timeouts
        if self._session is None:
            if now - self._opened_ns > timeouts.preface_s * NS_PER_S:
                self._fail("no READY within `timeouts.preface_s`", "preface_timeout")
        elif self.is_blocked and now - self._blocked_ns > timeouts.response_s * NS_PER_S:
            limit = f"limit {timeouts.response_s:g} s (`timeouts.response_s`)"
            self._fail(f"responses unread for too long: {limit}", "response_timeout")
        elif self._transport.is_reading():
            silent_s = (now - self._read_ns) / NS_PER_S
            if self._is_partial:
                self.evict_stalled(now, int(timeouts.message_s * NS_PER_S))
            elif self._pinged_ns:
                if now - self._pinged_ns > timeouts.keepalive_s * NS_PER_S:
                    limit = f"limit {timeouts.keepalive_s:g} s (`timeouts.keepalive_s`)"
                    self._fail(f"no PONG: {limit}", "keepalive_timeout")
            elif silent_s > timeouts.idle_s and self._can_ping and not self.is_blocked:
                self._pinged_ns = now
                self._transport.write(frames.command(frames.PING, b"\0\0"))
        elif _is_disconnected(self._transport):
            self.abort()

    @property
    def unsent_bytes(self) -> int:
        """Bytes in the write buffer."""
        return self._transport.get_write_buffer_size()

    @property
    def idle_since_ns(self) -> int:
        """Start of the time without work; 0 while the session or this connection has work."""
        session = self._session
        if session is None:
            return self._opened_ns
        return 0 if self._is_waiting or self._backlog or session.has_work else self._read_ns

    def close_idle(self) -> None:
        """Close to free capacity for another connection."""
        self.close_gracefully()

    def close_gracefully(self) -> None:
        """Close after the write buffer is sent."""
        self._is_closed = True
        self._transport.close()

    def close_expired(self) -> None:
        """Close after the write buffer is sent; not used, as connections have no maximum age."""
        self.close_gracefully()

    def abort(self) -> None:
        """Close now and drop unsent bytes."""
        self._is_closed = True
        self._transport.abort()

    def evictable(self, now_ns: int) -> float:
        """Return the releasable bytes times the nanoseconds since their message began."""
        unread = self._unread_bytes * float(now_ns - self._blocked_ns)
        return unread + self._received_bytes * float(now_ns - self._message_ns)

    def evict(self) -> bool:
        """Reject the backlog, or end the connection if other bytes outweigh it."""
        session, received, unread = self._session, self._received_bytes, self._unread_bytes
        if self._is_closed or not received + unread:
            return False
        limit = (
            f"limit {self._host.budget.limit_bytes:,} for all connections (`limits.receive_bytes`)"
        )
        if unread > received:
            self._fail(
                f"receive memory exhausted: {unread:,} unread bytes, {limit}", "unread_responses"
            )
        elif session is not None and 2 * self._backlog.total_bytes > received:
            for parts in self._backlog.take_all():
                session.reject(parts)
            self._update_charge()
        else:
            self._fail(
                f"receive memory exhausted: {received:,} bytes here, {limit}", "receive_memory"
            )
        return True

    def evict_stalled(self, now_ns: int, stall_ns: int) -> None:
        """End the connection if a message is `stall_ns` behind the minimum rate."""
        is_read = not self._is_closed and self._transport.is_reading()
        if is_read and self._is_partial and now_ns - self._progress_ns > stall_ns:
            self._fail(f"message slower than {MESSAGE_RATE_MIN} bytes/s", "message_timeout")

    @property
    def _unread_bytes(self) -> int:
        """Bytes of responses that the peer does not read."""
        if self._session is None or not self.is_blocked:
            return 0
        return self._session.unread_bytes + self.unsent_bytes

    @property
    def _received_bytes(self) -> int:
        return self._backlog.total_bytes + self._parts_bytes + self._partial.filled

    @property
    def _is_partial(self) -> bool:
        """Whether a message is partially received."""
        return self._partial.body is not None or len(self._rest) > 0 or len(self._parts) > 0

    def _update_charge(self) -> None:
        """Charge the input except large frames, which are charged as they arrive."""
        size = self._small_bytes + self._backlog.small_bytes + len(self._rest)
        change, self._charged_bytes = size - self._charged_bytes, size
        if change > 0:
            self._host.budget.charge(change)
        elif change:
            self._host.budget.release(-change)

    def _drop_input(self) -> None:
        """Free all unprocessed input."""
        self._partial.end()
        self._parts.clear()
        self._backlog.take_all()
        self._rest = b""
        self._parts_bytes = self._small_bytes = 0
        self._update_charge()

    def _parse(self, view: memoryview, until_ns: int) -> None:
        """Parse until the input or the turn ends, or the session is full."""
        self._is_interrupted = False
        if self._is_closed:
            return
        try:
            at = self._read_greeting(view)
            if at is not None:
                self._parse_frames(view, at, until_ns)
        except ProtocolViolation as error:
            self._fail(str(error), "protocol_error")

    def _read_greeting(self, view: memoryview) -> int | None:
        """Check and answer the greeting; return the offset of the frames, None if incomplete."""
        if self._is_greeted:
            return 0
        self._can_ping = frames.check_greeting(view)
        if len(view) < frames.GREETING_BYTES:
            self._rest = bytes(view)
            self._resume_reading()
            return None
        self._is_greeted = True
        self._transport.write(frames.ready(Socket_Type=b"ROUTER", Identity=b""))
        return frames.GREETING_BYTES

    def _parse_frames(self, view: memoryview, at: int, until_ns: int) -> None:
        """Process the frames from offset `at`."""
        countdown, partial, start_at = CLOCK_FRAMES, self._partial, at
        while not self._is_closed:
            if self._backlog.is_full or partial.is_reserving:
                return self._keep_rest(view, at)
            countdown -= 1
            # The clock is also read after each complete message, whose work costs much more.
            if start_at < at < len(view) and (countdown < 0 or not self._parts):
                countdown = CLOCK_FRAMES
                if now_ns() >= until_ns:
                    self._is_interrupted = True
                    return self._keep_rest(view, at)
            body = partial.body
            if body is not None:
                if partial.filled < len(body):
                    return self._resume_reading()
                partial.end()
                self._on_frame(partial.flags, body.toreadonly(), 0)
                continue
            head = frames.read_head(view, at)
            if head is None:
                self._rest = bytes(view[at:])
                return self._resume_reading()
            self._require_limits(head)
            start, at = head.end, head.end + head.length
            if at <= len(view):
                self._on_frame(head.flags, bytes(view[start:at]), head.length)
                continue
            if not self._parts:
                self._message_ns = self._read_ns
            partial.begin(head, view[start:])
            at = len(view)
        return None

    def _resume_input(self, until_ns: int) -> None:
        """Pass the backlog to the session, then parse the rest of the last read."""
        self._is_interrupted = False
        backlog, session = self._backlog, self._session
        while session is not None and backlog and not (self._is_closed or session.is_full):
            parts, arrived_ns = backlog.pop()
            self._take(session, parts, arrived_ns)
            if backlog and now_ns() >= until_ns:
                self._is_interrupted = True
                return
        if not (self._is_closed or self._transport.is_reading()):
            rest, self._rest = self._rest, b""
            self._parse(memoryview(rest), until_ns)

    def _wait_turn(self, deficit_ns: int) -> None:
        """Stop reading until the input is processed."""
        if not (self._is_waiting or self._is_closed):
            self._is_waiting = True
            self.deficit_ns = deficit_ns
            self._pause_reading()
            self._host.turns.wait(self)

    def _keep_rest(self, view: memoryview, at: int) -> None:
        """Keep unparsed input and stop reading."""
        self._rest = bytes(view[at:])
        self._pause_reading()

    def _pause_reading(self) -> None:
        if not self._is_closed and self._transport.is_reading():
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if not (self._is_closed or self._is_waiting or self._transport.is_reading()):
            self._read_ns = self._progress_ns = now_ns()
            self._transport.resume_reading()

    def _require_limits(self, head: frames.Head) -> None:
        if not self._parts:
            self._message_bytes_max = self._host.message_bytes
        is_command = head.flags & frames.COMMAND or self._session is None
        most = COMMAND_BYTES_MAX if is_command else self._message_bytes_max - self._parts_bytes
        if head.length > most:
            setting = "" if is_command else " (`limits.message_bytes`)"
            raise ProtocolViolation(f"frame of {head.length} bytes, limit {most}{setting}")
        if len(self._parts) >= PARTS_MAX:
            raise ProtocolViolation(f"message of more than {PARTS_MAX} parts")

    def _on_frame(self, flags: int, body: Part, small_bytes: int) -> None:
        """Process a complete frame; `small_bytes` is its length, 0 if charged on arrival."""
        if flags & frames.COMMAND:
            return self._on_command(*frames.read_command(body))
        session = self._session
        if session is None:
            raise ProtocolViolation("message before READY")
        if not self._parts:
            self._message_ns = self._read_ns
        self._parts.append(body)
        self._parts_bytes += len(body)
        self._small_bytes += small_bytes
        if not flags & frames.MORE:
            self._on_message(session)
        return None

    def _on_message(self, session: Session) -> None:
        """Pass a complete message to the session, or to the backlog if the session is full."""
        parts, self._parts = self._parts, []
        size, small_bytes = self._parts_bytes, self._small_bytes
        self._parts_bytes = self._small_bytes = 0
        self._granted_ns += BYTE_CPU_NS * size
        self._progress_ns = self._read_ns
        if self._backlog or session.is_full:
            self._backlog.append(parts, size, small_bytes, self._read_ns)
        else:
            self._take(session, parts, self._read_ns)

    def _take(self, session: Session, parts: list[Part], arrived_ns: int) -> None:
        if session.on_message(parts, arrived_ns):
            self._granted_ns += MESSAGE_CPU_NS

    def _on_command(self, name: bytes, data: bytes) -> None:
        if name == frames.READY and self._session is None:
            self._session = self._host.open(self, frames.read_identity(data))
        elif name == frames.PING and self._session is not None:
            if not self.is_blocked:
                context = data[2 : 2 + frames.PING_CONTEXT_BYTES_MAX]
                self._transport.write(frames.command(frames.PONG, context))
        elif name == frames.ERROR or self._session is None:
            raise ProtocolViolation(f"unexpected command {name[:20]!r}")

    def _fail(self, message: str, reason: str) -> None:
        """Abort the connection; report the message and count the reason."""
        self._host.on_broken(message)
        self._host.count_ended(reason)
        self.abort()
        self._drop_input()


def _is_disconnected(transport: asyncio.Transport) -> bool:
    """Return whether the peer has disconnected; for a paused socket."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))
