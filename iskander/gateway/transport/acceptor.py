"""Acceptor of a listening socket: accepts a few connections at a time, runs TLS handshakes.

At the connection limit, the listener evicts an idle connection or rejects the new one. At
`HANDSHAKES_MAX`, the oldest TLS handshake of the source with the most of them is cancelled. A
handshake begins with the client's first bytes, in its turn (`handshakes`).

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, Final, Generic, Protocol, TypeVar

from iskander.foundation.clock import now_ns
from iskander.foundation.logs import network as log
from iskander.gateway.auth.shares import SourceTable
from iskander.gateway.transport.limits.handshakes import HandshakeTurns, first_bytes, has_ended
from iskander.gateway.transport.sources import Source, source_of
from iskander.gateway.transport.tls import ContextSource

BACKLOG: Final = 1024
ACCEPTS_PER_ITERATION: Final = 16
ACCEPT_PAUSE_S: Final = 0.1
"""Pause after an accept error, such as no free file descriptor."""
HANDSHAKE_TIMEOUT_S: Final = 10.0
HANDSHAKES_MAX: Final = 128
"""Per listening socket."""
SHUTDOWN_TIMEOUT_S: Final = 1.0
NEVER_NS: Final = sys.maxsize

Peer = TypeVar("Peer")


@dataclass(slots=True, eq=False)
class AcceptedSocket(Generic[Peer]):
    """State of a connection from accept to close."""

    source: Source
    is_surplus: bool = False  # Above the limit: its requests are rejected.
    accepted_ns: int = field(default_factory=now_ns)
    peer: Peer | None = None  # The protocol object.
    handshake: asyncio.Task[None] | None = None  # Its connection setup, with or without TLS.
    unsent_bytes: int = 0  # Last charge to the receive budget.
    is_open: bool = True  # The connection is counted.
    expires_ns: int = NEVER_NS  # Start of the graceful close, and later the end of its grace.
    is_expired: bool = False  # The graceful close has started.


class Admission(Protocol):
    """Owner of the accepted connections."""

    def admit(self, source: Source) -> AcceptedSocket[Any] | None:
        """Return the state of a new connection; None if the caller must close it."""

    def make(self, accepted: AcceptedSocket[Any]) -> asyncio.BaseProtocol:
        """Create the protocol object of an accepted connection."""

    def drop(self, accepted: AcceptedSocket[Any]) -> None:
        """Forget a connection whose setup failed."""

    def on_accept_error(self, listening: socket.socket, error: OSError) -> None:
        """Report a failed `accept`; the acceptor pauses."""


class Acceptor:
    """Listens on a bound socket, which it owns, from its creation to `close`."""

    def __init__(
        self,
        listening: socket.socket,
        listener: Admission,
        tls: ContextSource | None = None,
        turns: HandshakeTurns | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._listener = listener
        self._tls = tls
        self._turns = turns or HandshakeTurns()
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshakes: SourceTable[AcceptedSocket[Any]] = SourceTable()
        self._pause: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        listening.listen(BACKLOG)
        self._loop.add_reader(listening, self._accept)

    @property
    def is_unix(self) -> bool:
        """Whether the socket is a unix socket, which no other process listens on."""
        return self._listening.family == socket.AF_UNIX

    def close(self) -> None:
        """Close the listening socket, cancel handshakes; open connections stay open. Idempotent."""
        if self._listening.fileno() < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listening)
        for task in list(self._tasks):
            task.cancel()
        self._listening.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_ITERATION):
            try:
                connection, address = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                return self._on_error(error)
            accepted = self._listener.admit(source_of(connection.family, address))
            if accepted is None:
                connection.close()
                continue
            connection.setblocking(False)
            if self._tls is not None:
                self._evict_handshake()
                self._handshakes.add(accepted.source, accepted)
            task = self._loop.create_task(self._connect(connection, accepted))
            accepted.handshake = task
            self._tasks.add(task)
            task.add_done_callback(partial(self._on_setup_done, connection, accepted))
        return None

    def _evict_handshake(self) -> None:
        """At the limit, cancel the oldest handshake of the source with the most of them."""
        if len(self._handshakes) >= HANDSHAKES_MAX:
            oldest = self._handshakes.oldest_idle(attrgetter("accepted_ns"))
            if oldest is not None:
                self._handshakes.remove(oldest.source, oldest)
                if oldest.handshake is not None:
                    oldest.handshake.cancel()

    async def _connect(self, connection: socket.socket, accepted: AcceptedSocket[Any]) -> None:
        if self._tls is not None:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await first_bytes(self._loop, connection)
                await self._turns.wait(accepted.source, self._tls().handshake_ns)
            if has_ended(connection):
                raise ConnectionAbortedError("the client is gone")
        context = None if self._tls is None else self._tls()
        await self._loop.connect_accepted_socket(
            partial(self._listener.make, accepted),
            connection,
            ssl=context,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S if context else None,
            ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S if context else None,
        )

    def _on_setup_done(
        self, connection: socket.socket, accepted: AcceptedSocket[Any], task: asyncio.Task[None]
    ) -> None:
        # A callback: a task cancelled before its first step never runs its own cleanup.
        self._tasks.discard(task)
        self._handshakes.remove(accepted.source, accepted)
        accepted.handshake = None
        if task.cancelled() or task.exception() is not None:
            connection.close()
            self._listener.drop(accepted)
            # OSError: no TLS, handshake timeout, or disconnect.
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, OSError):
                log.connection_setup_failed(error=error)

    def _on_error(self, error: OSError) -> None:
        """Pause accepting: the socket stays readable, so each loop iteration would retry."""
        self._listener.on_accept_error(self._listening, error)
        self._loop.remove_reader(self._listening)
        self._pause = self._loop.call_later(ACCEPT_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listening, self._accept)
