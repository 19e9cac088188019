"""The connections of one listener: their number, their timeouts and their end.

Where nearly as many connections as may be are open, the rest of the places is for sources with few
connections; where all places are taken, an idle connection of the source with most gives way.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from abc import abstractmethod
from collections import deque
from typing import Final, Generic, Protocol, TypeVar

from iskander.clock import NS_PER_S, now_ns
from iskander.transport.acceptor import AcceptedSocket, Acceptor
from iskander.transport.connection_limits import ConnectionLimits
from iskander.transport.sources import Source, SourceTable

SCRATCH_BYTES = 1 << 18
LOOK_AFTER_S = 5.0
"""Each connection is looked at so often, in turns of a few of them."""
LOOK_TURNS = 50
RESERVE_SHARE: Final = 8
"""One part in so many of the connections is for sources that have few."""
CLOSING_MAX: Final = 64
"""Connections that may be about to close beyond as many as may be open."""
UNSENT_BYTES_MIN: Final = 65_536
"""Connections that hold less are not ended for want of memory."""
TURN_S = 0.01


class Peer(Protocol):
    """The server's end of a connection."""

    @property
    def idle_since_ns(self) -> int:
        """Since when it has no open call and nothing to send; 0 while it has."""

    @property
    def unsent_bytes(self) -> int:
        """What waits in the transport for the client to read it."""

    def look_after(self, now: int) -> None:
        """End it where the peer is not there any more."""

    def leave(self) -> None:
        """Ask the peer to go, in order; once or again and again."""

    def give_way(self) -> None:
        """End an idle connection in order, and at once."""

    def abort(self) -> None:
        """Close now, whatever is unsent."""


Connection = TypeVar("Connection", bound=Peer)


class ConnectionListener(Generic[Connection]):
    """What the listeners of all protocols have in common.

    Args:
        connections_max: At once.
        limits: Over the connections of all listeners.
        tls: What they are spoken to with; None: in the clear.
        slack: Connections beyond the limit that are taken to refuse their requests.

    Attributes:
        loop: Of the gateway.
        scratch: Where sockets are read into; a read is taken apart before the next.
        connections: The open ones.
        budget: The memory of received bytes.
        timeouts: The settings.
        turns: Where connections wait whose input was not all processed.
    """

    def __init__(
        self,
        connections_max: int,
        limits: ConnectionLimits,
        tls: ssl.SSLContext | None = None,
        *,
        slack: int = 0,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.connections: set[Connection] = set()
        self.turns = limits.turns
        self.budget = limits.budget
        self.timeouts = limits.timeouts
        self._limits = limits
        self._connections_max = connections_max
        self._slack = slack
        self._share = max(connections_max * limits.source_percent // 100, 1)
        self._tls = tls
        self._sources: SourceTable[AcceptedSocket[Connection]] = SourceTable()
        self._accepted: dict[Connection, AcceptedSocket[Connection]] = {}
        # Connections whose client does not read, and since when that was known.
        self._unread: dict[Connection, int] = {}
        self._acceptors: list[Acceptor[Connection]] = []
        self._caring: asyncio.TimerHandle | None = None
        self._to_look_at: deque[Connection] = deque()
        self._look_turn = self._open = self._surplus = 0

    async def listen(self, listening: socket.socket) -> None:
        """Take connections from a socket that is bound; over TLS where it is not a file's."""
        tls = None if listening.family == socket.AF_UNIX else self._tls
        self._acceptors.append(Acceptor(listening, self, tls))
        if self._caring is None:
            self.budget.holders.add(self)
            self._care()

    def close_door(self) -> None:
        """Take no more connections."""
        for acceptor in self._acceptors:
            acceptor.close()

    async def stop(self, grace_s: float) -> None:
        """Stop listening, ask all peers to go, and end what is still open after `grace_s`."""
        self.close_door()
        deadline_ns = now_ns() + int(grace_s * NS_PER_S)
        while self.connections and now_ns() < deadline_ns:
            for connection in list(self.connections):
                connection.leave()
            await asyncio.sleep(TURN_S)
        if self.connections:
            self.on_cut(len(self.connections))
        for connection in list(self.connections):
            connection.abort()
        if self._caring is not None:
            self._caring.cancel()
        self.budget.holders.discard(self)
        with contextlib.suppress(TimeoutError):
            # One turn more, in which the transports close their sockets.
            async with asyncio.timeout(1.0):
                while self.connections:
                    await asyncio.sleep(0)

    def count_ended(self, reason: str) -> None:
        """Count a connection that the server ended."""
        self._limits.count_ended(reason)

    @abstractmethod
    def connection(self) -> Connection:
        """The server's end of a new connection."""

    def forget(self, connection: Connection) -> None:
        """A connection is closed."""
        self.connections.discard(connection)
        self._unread.pop(connection, None)
        accepted = self._accepted.pop(connection, None)
        if accepted is not None:
            self.drop(accepted)

    def is_surplus(self, connection: Connection) -> bool:
        """Whether there was no place for a connection and is none yet: its requests are refused."""
        accepted = self._accepted.get(connection)
        if accepted is None or not accepted.is_surplus:
            return False
        if self._has_place(accepted.source):
            accepted.is_surplus = False
            self._surplus -= 1
        return accepted.is_surplus

    def on_too_many(self) -> None:
        """Count a connection that is closed at once, since there are as many as may be."""
        self.count_ended("too_many_connections")

    def on_cut(self, count: int) -> None:
        """So many connections did not end in time."""

    # For the acceptors.

    def admit(self, source: Source) -> AcceptedSocket[Connection] | None:
        """Count a new connection; None where it is to be closed."""
        # Those that gave way take a moment to close.
        is_taken = (
            self._open < self._connections_max + self._slack + CLOSING_MAX
            and self._limits.open_count < self._limits.descriptors.connections_max + CLOSING_MAX
        )
        is_surplus = is_taken and not self._has_place(source)
        if not is_taken or (is_surplus and self._surplus >= self._slack):
            self.on_too_many()
            return None
        accepted: AcceptedSocket[Connection] = AcceptedSocket(source)
        if is_surplus:
            accepted.is_surplus = True
            self._surplus += 1
        self._sources.add(source, accepted)
        self._open += 1
        self._limits.open_count += 1
        return accepted

    def make(self, accepted: AcceptedSocket[Connection]) -> asyncio.BaseProtocol:
        """The server's end of an accepted connection."""
        connection = self.connection()
        accepted.peer = connection
        self._accepted[connection] = accepted
        assert isinstance(connection, asyncio.BaseProtocol)
        return connection

    def drop(self, accepted: AcceptedSocket[Connection]) -> None:
        """An accepted connection is not there any more; more than once is as good as once."""
        if accepted.is_open:
            accepted.is_open = False
            self._open -= 1
            self._limits.open_count -= 1
            self._sources.remove(accepted.source, accepted)
            self._surplus -= accepted.is_surplus
            self.budget.release(accepted.unsent_bytes)

    def on_accept_error(self, listening: socket.socket, error: OSError) -> None:
        """The system refused to accept a connection: an idle one gives way, others are closed."""
        self._make_way(None)
        for _ in range(self._limits.descriptors.refuse(listening, error)):
            self.on_too_many()

    def _has_place(self, source: Source) -> bool:
        """Whether there is a place for a new connection; ends an idle one where that makes one."""
        count, most = len(self._sources) - self._surplus, self._connections_max
        is_full = count >= most or self._limits.is_full
        if is_full or count >= most - most // RESERVE_SHARE:
            if self._sources.count(source) >= self._share:
                return self._make_way(source)
            return not is_full or self._make_way(None)
        return True

    def _make_way(self, source: Source | None) -> bool:
        """End the oldest idle connection, of one source or of that with most; whether it did."""
        while True:
            oldest = self._sources.oldest_idle(self._idle_since, source)
            if oldest is None:
                return False
            self._sources.remove(oldest.source, oldest)
            self.count_ended("gave_way")
            if oldest.peer in self.connections:
                oldest.peer.give_way()
            elif oldest.handshake is not None:
                oldest.handshake.cancel()
            if not oldest.is_surplus:
                return True
            # That made no place.
            oldest.is_surplus = False
            self._surplus -= 1

    def _idle_since(self, accepted: AcceptedSocket[Connection]) -> int:
        # A peer is made before its handshake, and has no transport until that is over.
        peer = accepted.peer
        return peer.idle_since_ns if peer in self.connections else accepted.at_ns

    # Care.

    def _care(self) -> None:
        """Look at some of the connections: at all of them in `LOOK_AFTER_S`."""
        waiting = self._to_look_at
        if not self._look_turn:
            waiting.extend(self.connections)
        turns_left = LOOK_TURNS - self._look_turn
        self._look_turn = (self._look_turn + 1) % LOOK_TURNS
        now = now_ns()
        for _ in range(-(-len(waiting) // turns_left)):
            connection = waiting.popleft()
            if connection in self.connections:
                connection.look_after(now)
                self.charge_unsent(connection)
        self._caring = self.loop.call_later(LOOK_AFTER_S / LOOK_TURNS, self._care)

    def charge_unsent(self, connection: Connection) -> None:
        """Charge what the transport of a connection holds."""
        accepted, size = self._accepted.get(connection), connection.unsent_bytes
        if accepted is None or size == accepted.unsent_bytes:
            return
        if size < UNSENT_BYTES_MIN:
            self._unread.pop(connection, None)
        else:
            self._unread.setdefault(connection, now_ns())
        self.budget.release(accepted.unsent_bytes)
        accepted.unsent_bytes = size
        self.budget.charge(size)

    # For the receive budget: bytes in transports.

    def held(self, now_ns: int) -> float:
        """Bytes in transports, times the nanoseconds since that was known."""
        held = 0.0
        for connection, since_ns in self._unread.items():
            held += self._accepted[connection].unsent_bytes * float(now_ns - since_ns)
        return held

    def shed(self) -> bool:
        """End the connection whose transport holds most; return whether there is one."""
        if not self._unread:
            return False
        connection = max(self._unread, key=lambda each: self._accepted[each].unsent_bytes)
        del self._unread[connection]
        accepted = self._accepted[connection]
        self.count_ended("unread_responses")
        connection.abort()
        size, accepted.unsent_bytes = accepted.unsent_bytes, 0
        self.budget.release(size)
        return True

    def evict_stalled(self, now_ns: int, stall_ns: int) -> None:
        """Nothing is received here."""
