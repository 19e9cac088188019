"""Base of the listeners of all protocols: connection limit, age, timeouts, shutdown.

Near the limit, the remaining capacity is for sources with few connections. At the limit, an idle
connection of the source with the most connections is evicted.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from abc import abstractmethod
from collections import deque
from typing import ClassVar, Final, Generic, Protocol, TypeVar

from iskander.config.schema import TimeoutsConfig
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.gateway.auth.shares import SourceTable
from iskander.gateway.transport.acceptor import NEVER_NS, AcceptedSocket, Acceptor
from iskander.gateway.transport.limits.connection_limits import ConnectionLimits
from iskander.gateway.transport.sources import Source
from iskander.gateway.transport.tls import ContextSource

SCRATCH_BYTES = 1 << 18
CHECK_INTERVAL_S = 5.0
"""Period of the timeout check of each connection, spread over `CHECK_STEPS` steps."""
CHECK_STEPS = 50
RESERVE_SHARE: Final = 8
"""The last 1/8 of the connections is for sources below `limits.source_percent`."""
CLOSING_MAX: Final = 64
"""Evicted connections that are still open, above the limit."""
UNSENT_BYTES_MIN: Final = 65_536
"""Connections with fewer unsent bytes are not aborted to free memory."""
POLL_S = 0.01
AGE_JITTER: Final = 0.1
"""Random deviation of a connection's maximum age, so that not all clients reconnect at once."""


class Peer(Protocol):
    """The protocol object of a connection."""

    @property
    def idle_since_ns(self) -> int:
        """Start of the time without open calls and unsent bytes; 0 if busy."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes in the transport's write buffer."""

    def enforce_timeouts(self, now: int) -> None:
        """Close the connection after a timeout."""

    def close_gracefully(self) -> None:
        """Start to close after the open calls; may be called repeatedly."""

    def close_idle(self) -> None:
        """Close an idle connection without waiting for its client."""

    def close_expired(self) -> None:
        """Close at the end of the grace period: its open calls end now."""

    def abort(self) -> None:
        """Close now and drop unsent bytes."""


Connection = TypeVar("Connection", bound=Peer)


class ConnectionListener(Generic[Connection]):
    """Listening sockets and connections of one protocol.

    Up to `slack` connections above `connections_max` stay open, but their requests are rejected;
    further connections are closed. A lower `connections_max` closes none: while there are more, a
    new connection replaces an idle one, or is rejected.
    """

    has_max_age: ClassVar[bool] = True
    """Whether `server.max_connection_age_s` applies; its clients must be able to reconnect."""

    def __init__(
        self,
        connections_max: int,
        limits: ConnectionLimits,
        tls: ContextSource | None = None,
        *,
        slack: int = 0,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        # Read buffer of all connections: each read is parsed before the next.
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.connections: set[Connection] = set()
        self.turns = limits.turns
        self.budget = limits.budget
        self.count_ended = limits.count_ended
        self.connections_max = connections_max
        self._limits = limits
        self._slack = slack
        self._tls = tls
        self._sources: SourceTable[AcceptedSocket[Connection]] = SourceTable()
        self._accepted: dict[Connection, AcceptedSocket[Connection]] = {}
        # Connections whose client does not read, and the time of detection.
        self._unread: dict[Connection, int] = {}
        self._acceptors: list[Acceptor] = []
        self._check_timer: asyncio.TimerHandle | None = None
        self._unchecked: deque[Connection] = deque()
        self._check_step = self._open = self._surplus = 0

    @property
    def timeouts(self) -> TimeoutsConfig:
        """Timeouts of all connections."""
        return self._limits.timeouts

    async def listen(self, listening: socket.socket) -> None:
        """Accept connections on a bound socket, without TLS on a unix socket."""
        tls = None if listening.family == socket.AF_UNIX else self._tls
        self._acceptors.append(Acceptor(listening, self, tls, self._limits.handshakes))
        if self._check_timer is None:
            self.budget.holders.add(self)
            self._check_connections()

    def stop_accepting(self, *, keeps_unix: bool = False) -> None:
        """Stop accepting connections, except on unix sockets if these are kept."""
        for acceptor in self._acceptors:
            if not (keeps_unix and acceptor.is_unix):
                acceptor.close()

    async def stop(self, grace_s: float) -> None:
        """Stop listening, close connections gracefully, and abort the rest after `grace_s`."""
        self.stop_accepting()
        deadline_ns = now_ns() + int(grace_s * NS_PER_S)
        while self.connections and now_ns() < deadline_ns:
            for connection in list(self.connections):
                connection.close_gracefully()
            await asyncio.sleep(POLL_S)
        if self.connections:
            self.on_aborted(len(self.connections))
        for connection in list(self.connections):
            connection.abort()
        if self._check_timer is not None:
            self._check_timer.cancel()
        self.budget.holders.discard(self)
        with contextlib.suppress(TimeoutError):
            # Let the transports close their sockets.
            async with asyncio.timeout(1.0):
                while self.connections:
                    await asyncio.sleep(0)

    @abstractmethod
    def connection(self) -> Connection:
        """Create the protocol object of a new connection."""

    def forget(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self.connections.discard(connection)
        self._unread.pop(connection, None)
        accepted = self._accepted.pop(connection, None)
        if accepted is not None:
            self.drop(accepted)

    def is_surplus(self, connection: Connection) -> bool:
        """Return whether a connection is above the limit; update it if there is capacity now."""
        accepted = self._accepted.get(connection)
        if accepted is None or not accepted.is_surplus:
            return False
        if self._has_capacity(accepted.source):
            accepted.is_surplus = False
            self._surplus -= 1
        return accepted.is_surplus

    def on_rejected(self) -> None:
        """Count a connection rejected at the limit."""
        self.count_ended("too_many_connections")

    def on_aborted(self, count: int) -> None:
        """Report connections that did not close within the grace period."""

    def admit(self, source: Source) -> AcceptedSocket[Connection] | None:
        """Count a new connection and return its state; None if the caller must close it."""
        # Evicted connections close with a delay.
        is_below_max = (
            self._open - len(self._sources) < CLOSING_MAX
            and self._limits.open_count < self._limits.descriptors.connections_max + CLOSING_MAX
        )
        is_surplus = is_below_max and not self._has_capacity(source)
        if not is_below_max or (is_surplus and self._surplus >= self._slack):
            self.on_rejected()
            return None
        accepted: AcceptedSocket[Connection] = AcceptedSocket(source, is_surplus)
        if self.has_max_age and self._limits.max_age_s:
            age_s = self._limits.max_age_s * random.uniform(1 - AGE_JITTER, 1 + AGE_JITTER)
            accepted.expires_ns = accepted.accepted_ns + int(age_s * NS_PER_S)
        self._surplus += is_surplus
        self._sources.add(source, accepted)
        self._open += 1
        self._limits.open_count += 1
        return accepted

    def make(self, accepted: AcceptedSocket[Connection]) -> asyncio.BaseProtocol:
        """Create and register the protocol object of an accepted connection."""
        connection = self.connection()
        accepted.peer = connection
        self._accepted[connection] = accepted
        assert isinstance(connection, asyncio.BaseProtocol)
        return connection

    def drop(self, accepted: AcceptedSocket[Connection]) -> None:
        """Stop counting a closed connection. Idempotent."""
        if accepted.is_open:
            accepted.is_open = False
            self._open -= 1
            self._limits.open_count -= 1
            self._sources.remove(accepted.source, accepted)
            self._surplus -= accepted.is_surplus
            self.budget.release(accepted.unsent_bytes)

    def on_accept_error(self, listening: socket.socket, error: OSError) -> None:
        """After a failed `accept`, evict an idle connection and close pending ones."""
        self._evict_idle(None)
        for _ in range(self._limits.descriptors.refuse(listening, error)):
            self.on_rejected()

    def _has_capacity(self, source: Source) -> bool:
        """Return whether a new connection fits, after evicting an idle one if necessary."""
        limits = self._limits
        left = self.connections_max - (len(self._sources) - self._surplus)
        is_full = left <= 0 or limits.open_count >= limits.descriptors.connections_max
        if is_full or left <= self.connections_max // RESERVE_SHARE:
            source_max = max(self.connections_max * limits.source_percent // 100, 1)
            if self._sources.count(source) >= source_max:
                return self._evict_idle(source)
            return not is_full or self._evict_idle(None)
        return True

    def _evict_idle(self, source: Source | None) -> bool:
        """Evict the longest idle connection; return whether that freed capacity.

        Searches `source` only, if given; otherwise sources with the most connections first.
        """
        while True:
            oldest = self._sources.oldest_idle(self._idle_since, source)
            if oldest is None:
                return False
            self._sources.remove(oldest.source, oldest)
            self.count_ended("gave_way")
            if oldest.peer in self.connections:
                oldest.peer.close_idle()
            elif oldest.handshake is not None:
                oldest.handshake.cancel()
            if not oldest.is_surplus:
                return True
            # A surplus connection frees no capacity.
            oldest.is_surplus = False
            self._surplus -= 1

    def _idle_since(self, accepted: AcceptedSocket[Connection]) -> int:
        # Before the end of its handshake, a protocol object has no transport.
        peer = accepted.peer
        return peer.idle_since_ns if peer in self.connections else accepted.accepted_ns

    def _check_connections(self) -> None:
        """Check the timeouts of 1/`CHECK_STEPS` of the connections."""
        unchecked = self._unchecked
        if not self._check_step:
            unchecked.extend(self.connections)
        steps_left = CHECK_STEPS - self._check_step
        self._check_step = (self._check_step + 1) % CHECK_STEPS
        now = now_ns()
        for _ in range(-(-len(unchecked) // steps_left)):
            connection = unchecked.popleft()
            if connection in self.connections:
                connection.enforce_timeouts(now)
                self._enforce_age(connection, now)
                self.charge_unsent(connection)
        step_s = CHECK_INTERVAL_S / CHECK_STEPS
        self._check_timer = self.loop.call_later(step_s, self._check_connections)

    def _enforce_age(self, connection: Connection, now: int) -> None:
        """Close a connection gracefully at its maximum age, and finally after the grace period."""
        accepted = self._accepted.get(connection)
        if accepted is None or now < accepted.expires_ns:
            return
        if accepted.is_expired:
            accepted.expires_ns = NEVER_NS
            self.count_ended("max_age_grace")
            connection.close_expired()
            return
        accepted.is_expired = True
        grace_ns = int(self._limits.max_age_grace_s * NS_PER_S)
        accepted.expires_ns = now + grace_ns if grace_ns else NEVER_NS
        self.count_ended("max_age")
        connection.close_gracefully()

    def charge_unsent(self, connection: Connection) -> None:
        """Update the charge for the unsent bytes of a connection."""
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

    def evictable(self, now_ns: int) -> float:
        """Return the unsent bytes times the nanoseconds since their detection, in total."""
        return sum(
            self._accepted[connection].unsent_bytes * float(now_ns - since_ns)
            for connection, since_ns in self._unread.items()
        )

    def evict(self) -> bool:
        """Abort the connection with the most unsent bytes; return whether there was one."""
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
        """Do nothing: the listener holds no messages."""
