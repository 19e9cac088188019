"""One peer: its greeting, its messages, and what it may cost.

A large frame is read straight into memory of its own, and a small one copied out of what all
connections read into. Nothing here waits: whoever takes the messages says when there is room for
more. Until then some are kept, with the time at which they came, so that a peer that goes is seen
to go and one that asks whether we are there is answered; beyond that the socket is not read.

Runs on: gateway loop. Source: RFC 37/ZMTP 3.1.
"""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

import numpy as np

from iskander.clock import NS_PER_S, now_ns
from iskander.gateway.zmtp import frames
from iskander.gateway.zmtp.frames import BrokenPeer

GREETING_NS: Final = 10 * NS_PER_S
"""How long a peer may take to say who it is."""
SILENCE_NS: Final = 30 * NS_PER_S
"""How long it may say nothing in the midst of a message."""
PEERS: Final = (b"DEALER", b"REQ", b"ROUTER")
"""Sockets that a ROUTER talks with."""
PARTS_MAX: Final = 16
COMMAND_BYTES_MAX: Final = 8192
WRITE_BUFFER_BYTES: Final = 1 << 20
"""Beyond this, what there is to send stays with whoever has it."""
JOINED_BYTES_MAX: Final = 65_536
"""Up to here one copy costs less than handing over the parts of a message one by one."""
TURN_FRAMES: Final = 64
TURN_BYTES: Final = 65_536
"""Taken apart before others have their turn; of large frames, one more."""
BACKLOG_MESSAGES: Final = 256
BACKLOG_BYTES: Final = 1 << 20
"""Kept for a session that is full, whichever is reached first; of large messages, one more."""

Part = bytes | memoryview


class Session(Protocol):
    """Whoever takes a peer's messages."""

    @property
    def is_full(self) -> bool:
        """Whether it takes no more for now; it calls `Connection.resume` when it does."""

    def take(self, parts: list[Part], arrived_ns: int) -> None:
        """Take a message, which came at that time of the monotonic clock."""

    @property
    def has_work(self) -> bool:
        """Whether something that was taken is not answered, or an answer is not sent."""

    def on_room(self) -> None:
        """The peer takes messages again."""

    def on_lost(self) -> None:
        """The peer is gone."""


class Host(Protocol):
    """What the connections of one server share.

    Attributes:
        loop: Theirs.
        message_bytes: The largest message taken.
        scratch: Where sockets are read into; a read is taken apart before the next.
        connections: The open ones.
        open: The session of a peer that has said its identity.
        on_broken: Told why a connection was ended.
    """

    loop: asyncio.AbstractEventLoop
    message_bytes: int
    scratch: memoryview
    connections: set[Connection]
    open: Callable[[Connection, bytes], Session]
    on_broken: Callable[[str], None]

    def forget(self, connection: Connection) -> None:
        """A connection is closed."""


class Connection(asyncio.BufferedProtocol):
    """The server's end of a connection.

    Attributes:
        is_blocked: The socket takes nothing for now.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._transport: asyncio.Transport
        self._session: Session | None = None
        self._made_ns = self._heard_ns = now_ns()
        self._is_greeted = False
        self._is_over = False
        self._is_turn_due = False
        self._rest = b""
        self._body: memoryview | None = None
        self._body_flags = 0
        self._filled = 0
        self._parts: list[Part] = []
        self._parts_bytes = 0
        self._backlog: deque[tuple[list[Part], int, int]] = deque()
        self._backlog_bytes = 0
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
        self._transport.write(frames.GREETING)

    def connection_lost(self, error: Exception | None) -> None:
        """Nobody is there for answers."""
        del error
        self._is_over = True
        self._host.forget(self)
        self._backlog.clear()
        if self._session is not None:
            self._session.on_lost()

    def pause_writing(self) -> None:
        """The socket is full."""
        self.is_blocked = True

    def resume_writing(self) -> None:
        """The socket takes more."""
        self.is_blocked = False
        if self._session is not None:
            self._session.on_room()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: into the frame that they belong to, if it is a large one."""
        del sizehint
        if self._body is not None:
            return self._body[self._filled :]
        return self._host.scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Take apart what has come."""
        self._heard_ns = now_ns()
        if self._body is not None:
            self._filled += nbytes
            self._take(memoryview(b""))
        else:
            view = self._host.scratch[:nbytes]
            if self._rest:
                view, self._rest = memoryview(self._rest + view), b""
            self._take(view)

    # The session's and the server's side.

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send a message; where the socket is full it is kept until there is room."""
        if self._is_over:
            return
        last = len(parts) - 1
        pieces: list[bytes | memoryview] = []
        for index, part in enumerate(parts):
            pieces += (frames.head(len(part), frames.MORE if index < last else 0), part)
        if sum(map(len, pieces)) <= JOINED_BYTES_MAX:
            self._transport.write(b"".join(pieces))
        else:
            self._transport.writelines(pieces)

    def resume(self) -> None:
        """Go on: the session has room."""
        if self._is_turn_due or self._is_over or self._session is None:
            return
        self._hand_over(self._session)
        if not self._is_turn_due and not self._is_over and not self._transport.is_reading():
            rest, self._rest = self._rest, b""
            self._take(memoryview(rest))

    def look_after(self, now: int) -> None:
        """End the connection of a peer that is not heard of, or has gone while it was not read."""
        if self._session is None:
            if now - self._made_ns > GREETING_NS:
                self._break("a peer did not say in time who it is")
        elif self._transport.is_reading():
            is_amid = self._body is not None or self._rest or self._parts
            if is_amid and now - self._heard_ns > SILENCE_NS:
                self._break("a peer stopped in the midst of a message")
        elif self._is_hung_up():
            self.abort()

    @property
    def unsent_bytes(self) -> int:
        """What the socket has not taken."""
        return self._transport.get_write_buffer_size()

    @property
    def idle_since_ns(self) -> int:
        """Since when nothing is asked and there is nothing to send; 0 while there is."""
        session = self._session
        if self._is_turn_due or self._backlog or (session is not None and session.has_work):
            return 0
        return self._made_ns if session is None else self._heard_ns

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

    # Taking apart.

    def _take(self, view: memoryview) -> None:
        """Take frames, until they end, the session is full, or it is the turn of others."""
        try:
            at = self._greet(view)
            if at is not None:
                self._frames(view, at)
        except BrokenPeer as error:
            self._break(str(error))

    def _greet(self, view: memoryview) -> int | None:
        """Where the frames begin; None while the greeting has not come whole."""
        if self._is_greeted:
            return 0
        frames.check_greeting(view)
        if len(view) < frames.GREETING_BYTES:
            self._rest = bytes(view)
            return None
        self._is_greeted = True
        self._transport.write(frames.ready(Socket_Type=b"ROUTER", Identity=b""))
        return frames.GREETING_BYTES

    def _frames(self, view: memoryview, at: int) -> None:
        began = at
        for _ in range(TURN_FRAMES):
            if self._is_over:
                return
            if self._is_backlog_full:
                return self._wait(view, at)
            if began + TURN_BYTES < at < len(view):
                break
            if self._body is not None:
                if self._filled < len(self._body):
                    return self._read_on()
                body, self._body = self._body, None
                self._on_frame(self._body_flags, body.toreadonly())
                continue
            head = frames.read_head(view, at)
            if head is None:
                self._rest = bytes(view[at:])
                return self._read_on()
            self._require_limits(head)
            at = head.end + head.length
            if at <= len(view):
                self._on_frame(head.flags, bytes(view[head.end : at]))
                continue
            # Not cleared: pages of which nothing came cost nothing.
            self._body, self._body_flags = np.empty(head.length, np.uint8).data, head.flags
            self._filled = len(view) - head.end
            self._body[: self._filled] = view[head.end :]
            at = len(view)
        self._go_on_later()
        return self._wait(view, at)

    def _hand_over(self, session: Session) -> None:
        """Give the session what was kept for it."""
        for _ in range(TURN_FRAMES):
            if not self._backlog or self._is_over or session.is_full:
                return
            parts, size, arrived_ns = self._backlog.popleft()
            self._backlog_bytes -= size
            session.take(parts, arrived_ns)
        self._go_on_later()

    @property
    def _is_backlog_full(self) -> bool:
        return self._backlog_bytes >= BACKLOG_BYTES or len(self._backlog) >= BACKLOG_MESSAGES

    def _go_on_later(self) -> None:
        self._is_turn_due = True
        self._host.loop.call_soon(self._on_turn)

    def _on_turn(self) -> None:
        self._is_turn_due = False
        self.resume()

    def _wait(self, view: memoryview, at: int) -> None:
        """Keep what was read and is not taken yet, and read no more."""
        self._rest = bytes(view[at:])
        if not self._is_over:
            self._transport.pause_reading()

    def _read_on(self) -> None:
        if not self._is_over and not self._transport.is_reading():
            self._heard_ns = now_ns()
            self._transport.resume_reading()

    def _is_hung_up(self) -> bool:
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    def _require_limits(self, head: frames.Head) -> None:
        most = self._host.message_bytes - self._parts_bytes
        if head.flags & frames.COMMAND or self._session is None:
            most = COMMAND_BYTES_MAX
        if head.length > most:
            raise BrokenPeer(f"a peer sends {head.length} bytes where at most {most} are taken")
        if len(self._parts) >= PARTS_MAX:
            raise BrokenPeer(f"a peer sends a message of more than {PARTS_MAX} parts")

    def _on_frame(self, flags: int, body: Part) -> None:
        if flags & frames.COMMAND:
            return self._on_command(*frames.read_command(body))
        if self._session is None:
            raise BrokenPeer("a peer sends messages before it says who it is")
        self._parts.append(body)
        self._parts_bytes += len(body)
        if not flags & frames.MORE:
            self._on_message(self._session)
        return None

    def _on_message(self, session: Session) -> None:
        parts, self._parts = self._parts, []
        size, self._parts_bytes = self._parts_bytes, 0
        if self._backlog or session.is_full:
            self._backlog.append((parts, size, self._heard_ns))
            self._backlog_bytes += size
        else:
            session.take(parts, self._heard_ns)

    def _on_command(self, name: bytes, data: bytes) -> None:
        if name == frames.READY and self._session is None:
            properties = frames.read_properties(data)
            kind = properties.get("socket-type", b"")
            if kind not in PEERS:
                raise BrokenPeer(f"a {kind[:20].decode('ascii', 'replace')} socket came")
            self._session = self._host.open(self, properties.get("identity", b""))
        elif name == frames.PING and self._session is not None:
            if not self.is_blocked:
                context = data[2 : 2 + frames.PING_CONTEXT_BYTES_MAX]
                self._transport.write(frames.command(frames.PONG, context))
        elif name == frames.ERROR or self._session is None:
            raise BrokenPeer("a peer does not want to talk")

    def _break(self, reason: str) -> None:
        self._host.on_broken(reason)
        self.abort()
