"""One peer: its greeting, its messages, its turns, and the memory that it holds.

A large frame is read straight into memory of its own, and a small one copied out of what all
connections read into. Whoever takes the messages says when there is room for more; until then some
are kept, so that a peer that goes is seen to go, and beyond that the socket is not read.

A read is processed for a quantum of time; what is left waits in the turn scheduler. Received bytes
are charged to the receive budget until they are taken, of large frames until they are freed.

Runs on: gateway loop. Source: RFC 37/ZMTP 3.1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, cast

from iskander.clock import NS_PER_S, NS_PER_US, now_ns, thread_cpu_ns
from iskander.transport.cpu_allowance import CpuAllowance
from iskander.transport.receive_budget import MESSAGE_RATE_MIN, progress_ns
from iskander.transport.turn_scheduler import QUANTUM_NS, ReadBurst
from iskander.transport.zmtp import frames
from iskander.transport.zmtp.backlog import Backlog
from iskander.transport.zmtp.context import Host, Part, Session, is_hung_up
from iskander.transport.zmtp.frames import ProtocolViolation
from iskander.transport.zmtp.partial_frame import PartialFrame

PARTS_MAX: Final = 16
COMMAND_BYTES_MAX: Final = 8192
WRITE_BUFFER_BYTES: Final = 1 << 20
"""Beyond this, what there is to send stays with whoever has it."""
JOINED_BYTES_MAX: Final = 65_536
"""Up to here one copy costs less than handing over the parts of a message one by one."""
READ_BYTES_MAX: Final = 1 << 18
"""Read at once of a large frame: its memory is new, and costs time when it is written to first."""
CLOCK_FRAMES: Final = 16
"""Frames that complete no message between two looks at the clock."""
MESSAGE_CPU_NS: Final = 500 * NS_PER_US
BYTE_CPU_NS: Final = 2
"""Processor time that a message or a byte of one is granted."""


class Connection(asyncio.BufferedProtocol):
    """The server's end of a connection.

    Attributes:
        is_blocked: The socket takes nothing for now.
        deficit_ns: Of its turns.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._transport: asyncio.Transport
        self._session: Session | None = None
        self._made_ns = self._heard_ns = self._moved_ns = self._since_ns = now_ns()
        self._blocked_ns = self._pinged_ns = 0
        self._is_greeted = self._can_ping = False
        self._is_over = False
        self._is_waiting = self._is_behind = False
        self._rest = b""
        self._partial = PartialFrame(self, host.budget, self._read_on)
        self._parts: list[Part] = []
        self._parts_bytes = self._parts_small = 0
        self._backlog = Backlog()
        self._charged_bytes = 0
        self._delivered_ns = 0
        self._cpu = CpuAllowance(self._made_ns)
        self._burst = ReadBurst(host.turns)
        self.deficit_ns = self.wasted_ns = 0
        self.is_blocked = False

    @property
    def has_unsent(self) -> bool:
        """Whether the socket has not taken all that was sent."""
        return not self._is_over and self._transport.get_write_buffer_size() > 0

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._host.connections.add(self)
        self._host.budget.holders.add(self)
        self._transport.write(frames.GREETING)

    def connection_lost(self, error: Exception | None) -> None:
        """Nobody is there for answers."""
        del error
        self._is_over = True
        self._host.forget(self)
        self._host.budget.holders.discard(self)
        self._drop_input()
        if self._session is not None:
            self._session.on_lost()

    def pause_writing(self) -> None:
        """The socket is full."""
        self.is_blocked = True
        self._blocked_ns = now_ns()
        self._host.charge_unsent(self)

    def resume_writing(self) -> None:
        """The socket takes more."""
        self.is_blocked = False
        self._host.charge_unsent(self)
        if self._session is not None:
            self._session.on_room()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: into the frame that they belong to, if it is a large one."""
        del sizehint
        body, filled = self._partial.body, self._partial.filled
        return self._host.scratch if body is None else body[filled : filled + READ_BYTES_MAX]

    def buffer_updated(self, nbytes: int) -> None:
        """Take apart what has come, for at most a quantum of time."""
        began_ns = self._heard_ns = now_ns()
        is_amid = self._is_amid
        self._moved_ns = progress_ns(self._moved_ns, began_ns, nbytes) if is_amid else began_ns
        cpu_ns = thread_cpu_ns()
        self._pinged_ns = 0
        if self._partial.body is not None:
            self._partial.fill(nbytes)
            self._take(memoryview(b""), began_ns + QUANTUM_NS)
        else:
            view = self._host.scratch[:nbytes]
            if self._rest:
                view, self._rest = memoryview(self._rest + view), b""
            self._take(view, began_ns + QUANTUM_NS)
        ended_ns = now_ns()
        if self._burst.is_long(began_ns, ended_ns, nbytes, QUANTUM_NS) or self._is_behind:
            self._wait_turn(QUANTUM_NS - (ended_ns - began_ns))
        self._settle()
        self.note_cpu(thread_cpu_ns() - cpu_ns)

    def take_turn(self, until_ns: int) -> bool:
        """Process input that was left over until that time; return whether some is left."""
        self._is_waiting = False
        self._go_on(until_ns)
        self._is_waiting = self._is_behind and not self._is_over
        self._settle()
        return self._is_waiting

    def note_cpu(self, used_ns: int) -> bool:
        """Account for processor time of a turn; return whether the connection goes on."""
        delivered_ns, self._delivered_ns = self._delivered_ns, 0
        self.wasted_ns = used_ns - delivered_ns
        if not self._cpu.charge(now_ns(), self.wasted_ns) and not self._is_over:
            self._break("a peer takes processor time and sends no messages", "cpu_time")
        return not self._is_over

    # The session's and the server's side.

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send a message; where the socket is full it is kept until there is room."""
        if self._is_over:
            return
        pieces = frames.message(parts)
        if sum(map(len, pieces)) <= JOINED_BYTES_MAX:
            self._transport.write(b"".join(pieces))
        else:
            self._transport.writelines(pieces)

    def resume(self) -> None:
        """Go on: the session has room."""
        if self._is_waiting or self._is_over or self._session is None:
            return
        if self._backlog or not self._transport.is_reading():
            self._go_on(now_ns() + QUANTUM_NS)
            if self._is_behind:
                self._wait_turn(0)
            self._settle()

    def look_after(self, now: int) -> None:
        """End the connection of a peer that is not heard of, or has gone while it was not read."""
        timeouts = self._host.timeouts
        if self._session is None:
            if now - self._made_ns > timeouts.preface_s * NS_PER_S:
                self._break("a peer did not say in time who it is", "preface_timeout")
        elif self.is_blocked and now - self._blocked_ns > timeouts.response_s * NS_PER_S:
            self._break("a peer does not read its answers", "response_timeout")
        elif self._transport.is_reading():
            silent_s = (now - self._heard_ns) / NS_PER_S
            if self._is_amid:
                self.evict_stalled(now, int(timeouts.message_s * NS_PER_S))
            elif self._pinged_ns:
                if now - self._pinged_ns > timeouts.keepalive_s * NS_PER_S:
                    self._break("a peer does not answer a PING", "keepalive_timeout")
            elif silent_s > timeouts.idle_s and self._can_ping and not self.is_blocked:
                self._pinged_ns = now
                self._transport.write(frames.command(frames.PING, b"\0\0"))
        elif is_hung_up(self._transport):
            self.abort()

    @property
    def unsent_bytes(self) -> int:
        """What the socket has not taken."""
        return self._transport.get_write_buffer_size()

    @property
    def idle_since_ns(self) -> int:
        """Since when nothing is asked and there is nothing to send; 0 while there is."""
        session = self._session
        if session is None:
            return self._made_ns
        return 0 if self._is_waiting or self._backlog or session.has_work else self._heard_ns

    def give_way(self) -> None:
        """Close, so that another connection has a place."""
        self.leave()

    def leave(self) -> None:
        """Say no more than what was sent, and go."""
        self._is_over = True
        self._transport.close()

    def abort(self) -> None:
        """Go at once."""
        self._is_over = True
        self._transport.abort()

    # For the receive budget.

    def held(self, now_ns: int) -> float:
        """Bytes that could be freed, times the nanoseconds since their message began."""
        unread = self._unread_bytes * float(now_ns - self._blocked_ns)
        return unread + self._held_bytes * float(now_ns - self._since_ns)

    def shed(self) -> bool:
        """Refuse the messages that wait; or end a connection of unread or half received ones."""
        session, held, unread = self._session, self._held_bytes, self._unread_bytes
        if self._is_over or not held + unread:
            return False
        if unread > held:
            self._break("answers are not read (limits.receive_bytes)", "unread_responses")
        elif session is not None and 2 * self._backlog.total_bytes > held:
            for parts in self._backlog.take_all():
                session.refuse(parts)
            self._settle()
        else:
            self._break("there is no memory for a message (limits.receive_bytes)", "receive_memory")
        return True

    def evict_stalled(self, now_ns: int, stall_ns: int) -> None:
        """End the connection where a message fell so far behind its slowest rate."""
        is_read = not self._is_over and self._transport.is_reading()
        if is_read and self._is_amid and now_ns - self._moved_ns > stall_ns:
            message = f"a message of a peer came slower than {MESSAGE_RATE_MIN} bytes/s"
            self._break(message, "message_timeout")

    @property
    def _unread_bytes(self) -> int:
        """Answers that wait for the peer to read those before them."""
        if self._session is None or not self.is_blocked:
            return 0
        return self._session.unread_bytes + self.unsent_bytes

    @property
    def _held_bytes(self) -> int:
        return self._backlog.total_bytes + self._parts_bytes + self._partial.filled

    @property
    def _is_amid(self) -> bool:
        """Whether a message has begun."""
        return self._partial.body is not None or len(self._rest) > 0 or len(self._parts) > 0

    def _settle(self) -> None:
        """Charge what is held, but for large frames, which are charged as they come."""
        wanted = self._parts_small + self._backlog.small_bytes + len(self._rest)
        more, self._charged_bytes = wanted - self._charged_bytes, wanted
        if more > 0:
            self._host.budget.charge(more)
        elif more:
            self._host.budget.release(-more)

    def _drop_input(self) -> None:
        """Free what has come and was not taken."""
        self._partial.end()
        self._parts.clear()
        self._backlog.take_all()
        self._rest = b""
        self._parts_bytes = self._parts_small = 0
        self._settle()

    # Taking apart.

    def _take(self, view: memoryview, until_ns: int) -> None:
        """Take frames, until they end, the session is full, or it is the turn of others."""
        self._is_behind = False
        if self._is_over:
            return
        try:
            at = self._greet(view)
            if at is not None:
                self._frames(view, at, until_ns)
        except ProtocolViolation as error:
            self._break(str(error), "protocol_error")

    def _greet(self, view: memoryview) -> int | None:
        """Where the frames begin; None while the greeting has not come whole."""
        if self._is_greeted:
            return 0
        self._can_ping = frames.check_greeting(view)
        if len(view) < frames.GREETING_BYTES:
            self._rest = bytes(view)
            self._read_on()
            return None
        self._is_greeted = True
        self._transport.write(frames.ready(Socket_Type=b"ROUTER", Identity=b""))
        return frames.GREETING_BYTES

    def _frames(self, view: memoryview, at: int, until_ns: int) -> None:
        countdown, partial, began = CLOCK_FRAMES, self._partial, at
        while not self._is_over:
            if self._backlog.is_full or partial.is_reserving:
                return self._hold(view, at)
            countdown -= 1
            # A message takes long enough to look at the clock behind it.
            if began < at < len(view) and (countdown < 0 or not self._parts):
                countdown = CLOCK_FRAMES
                if now_ns() >= until_ns:
                    self._is_behind = True
                    return self._hold(view, at)
            body = partial.body
            if body is not None:
                if partial.filled < len(body):
                    return self._read_on()
                partial.end()
                self._on_frame(partial.flags, body.toreadonly(), 0)
                continue
            head = frames.read_head(view, at)
            if head is None:
                self._rest = bytes(view[at:])
                return self._read_on()
            self._require_limits(head)
            start, at = head.end, head.end + head.length
            if at <= len(view):
                self._on_frame(head.flags, bytes(view[start:at]), head.length)
                continue
            if not self._parts:
                self._since_ns = self._heard_ns
            partial.begin(head, view[start:])
            at = len(view)
        return None

    def _go_on(self, until_ns: int) -> None:
        """Give the session what was kept for it, and take what was read and is left over."""
        self._is_behind = False
        if self._session is not None:
            self._hand_over(self._session, until_ns)
        if not (self._is_behind or self._is_over or self._transport.is_reading()):
            rest, self._rest = self._rest, b""
            self._take(memoryview(rest), until_ns)

    def _hand_over(self, session: Session, until_ns: int) -> None:
        """Give the session what was kept for it."""
        while self._backlog and not (self._is_over or session.is_full):
            parts, arrived_ns = self._backlog.pop()
            session.take(parts, arrived_ns)
            if self._backlog and now_ns() >= until_ns:
                self._is_behind = True
                return

    def _wait_turn(self, deficit_ns: int) -> None:
        """Read no more until what is left over has had its turns."""
        if not (self._is_waiting or self._is_over):
            self._is_waiting = True
            self.deficit_ns = deficit_ns
            self._pause()
            self._host.turns.wait(self)

    def _hold(self, view: memoryview, at: int) -> None:
        """Keep what was read and is not taken yet, and read no more."""
        self._rest = bytes(view[at:])
        self._pause()

    def _pause(self) -> None:
        if not self._is_over and self._transport.is_reading():
            self._transport.pause_reading()

    def _read_on(self) -> None:
        if not (self._is_over or self._is_waiting or self._transport.is_reading()):
            self._heard_ns = self._moved_ns = now_ns()
            self._transport.resume_reading()

    def _require_limits(self, head: frames.Head) -> None:
        most = self._host.message_bytes - self._parts_bytes
        if head.flags & frames.COMMAND or self._session is None:
            most = COMMAND_BYTES_MAX
        if head.length > most:
            raise ProtocolViolation(
                f"a peer sends {head.length} bytes where at most {most} are taken"
            )
        if len(self._parts) >= PARTS_MAX:
            raise ProtocolViolation(f"a peer sends a message of more than {PARTS_MAX} parts")

    def _on_frame(self, flags: int, body: Part, small: int) -> None:
        """Take a whole frame; `small` is its length where it is not charged as it came."""
        if flags & frames.COMMAND:
            return self._on_command(*frames.read_command(body))
        session = self._session
        if session is None:
            raise ProtocolViolation("a peer sends messages before it says who it is")
        if not self._parts:
            self._since_ns = self._heard_ns
        self._parts.append(body)
        self._parts_bytes += len(body)
        self._parts_small += small
        if not flags & frames.MORE:
            self._on_message(session)
        return None

    def _on_message(self, session: Session) -> None:
        parts, self._parts = self._parts, []
        size, small = self._parts_bytes, self._parts_small
        self._parts_bytes = self._parts_small = 0
        self._delivered_ns += MESSAGE_CPU_NS + BYTE_CPU_NS * size
        self._moved_ns = self._heard_ns
        if self._backlog or session.is_full:
            self._backlog.append(parts, size, small, self._heard_ns)
        else:
            session.take(parts, self._heard_ns)

    def _on_command(self, name: bytes, data: bytes) -> None:
        if name == frames.READY and self._session is None:
            self._session = self._host.open(self, frames.read_identity(data))
        elif name == frames.PING and self._session is not None:
            if not self.is_blocked:
                context = data[2 : 2 + frames.PING_CONTEXT_BYTES_MAX]
                self._transport.write(frames.command(frames.PONG, context))
        elif name == frames.ERROR or self._session is None:
            raise ProtocolViolation("a peer does not want to talk")

    def _break(self, message: str, reason: str) -> None:
        self._host.on_broken(message)
        self._host.count_ended(reason)
        self.abort()
        self._drop_input()
