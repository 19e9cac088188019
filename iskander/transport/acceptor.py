"""Listening sockets: connections are accepted, a few in each turn of the loop, and handshakes done.

Where there are as many connections as may be, the listener has an idle one give way, or the new one
is closed. TLS handshakes have a limit of their own: where there are more, the oldest of the source
with most of them ends; those that are meant to be finished are by then.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

from iskander.clock import now_ns
from iskander.transport.sources import Source, SourceTable, source_of

BACKLOG: Final = 1024
ACCEPTS_A_TURN: Final = 16
PAUSE_S: Final = 0.1
"""Nothing is accepted for so long where the system has no descriptor for another connection."""
HANDSHAKE_S: Final = 10.0
"""How long a client may take."""
HANDSHAKES_MAX: Final = 128
"""Of one socket."""
SHUTDOWN_S: Final = 1.0

log = logging.getLogger("iskander.connections")


Peer = TypeVar("Peer")


class AcceptedSocket(Generic[Peer]):
    """A connection from its accept to its end.

    Attributes:
        source: Of the connection.
        peer: The server's end; None before.
        handshake: The task that connects it; None once that is done.
        unsent_bytes: As they were last charged.
        is_open: It is counted.
        is_surplus: There was no place for it: it is taken to refuse its requests.
    """

    __slots__ = ("at_ns", "handshake", "is_open", "is_surplus", "peer", "source", "unsent_bytes")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.at_ns = now_ns()
        self.peer: Peer | None = None
        self.handshake: asyncio.Task[None] | None = None
        self.unsent_bytes = 0
        self.is_open = True
        self.is_surplus = False


class ConnectionFactory(Protocol[Peer]):
    """A listener that takes connections."""

    def admit(self, source: Source) -> AcceptedSocket[Peer] | None:
        """Count a new connection; None where it is to be closed."""

    def make(self, accepted: AcceptedSocket[Peer]) -> asyncio.BaseProtocol:
        """The server's end of an accepted connection."""

    def drop(self, accepted: AcceptedSocket[Peer]) -> None:
        """An accepted connection is not there any more; more than once is as good as once."""

    def on_accept_error(self, listening: socket.socket, error: OSError) -> None:
        """The system refused to accept a connection."""


class Acceptor(Generic[Peer]):
    """One listening socket; closed as `asyncio.Server` is.

    Args:
        listening: The socket, bound; from now on this one's.
        taker: Of its connections.
        tls: Of the handshakes; None: connections are in the clear.
    """

    def __init__(
        self,
        listening: socket.socket,
        taker: ConnectionFactory[Peer],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._taker = taker
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshakes: SourceTable[AcceptedSocket[Peer]] = SourceTable()
        self._pause: asyncio.TimerHandle | None = None
        self._is_closed = False
        listening.setblocking(False)
        listening.listen(BACKLOG)
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Take no more connections; those that are open go on."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listening)
        for task in list(self._tasks):
            task.cancel()
        self._listening.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                connection, address = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                return self._on_error(error)
            accepted = self._taker.admit(source_of(connection.family, address))
            if accepted is None:
                connection.close()
                continue
            connection.setblocking(False)
            if self._tls is not None:
                self._make_room()
                self._handshakes.add(accepted.source, accepted)
            task = self._loop.create_task(self._connect(connection, accepted))
            accepted.handshake = task
            self._tasks.add(task)
            task.add_done_callback(partial(self._on_connected, connection, accepted))
        return None

    def _make_room(self) -> None:
        if len(self._handshakes) >= HANDSHAKES_MAX:
            oldest = self._handshakes.oldest_idle(_accepted_ns)
            if oldest is not None:
                self._handshakes.remove(oldest.source, oldest)
                if oldest.handshake is not None:
                    oldest.handshake.cancel()

    async def _connect(self, connection: socket.socket, accepted: AcceptedSocket[Peer]) -> None:
        make = partial(self._taker.make, accepted)
        if self._tls is None:
            await self._loop.connect_accepted_socket(make, connection)
        else:
            await self._loop.connect_accepted_socket(
                make,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )

    def _on_connected(
        self, connection: socket.socket, accepted: AcceptedSocket[Peer], task: asyncio.Task[None]
    ) -> None:
        # Not in the task itself: one that is cancelled before its first step never begins.
        self._tasks.discard(task)
        self._handshakes.remove(accepted.source, accepted)
        accepted.handshake = None
        if task.cancelled() or task.exception() is not None:
            connection.close()
            self._taker.drop(accepted)
            # An OSError: it spoke no TLS, not in time, or is gone.
            if not task.cancelled() and not isinstance(task.exception(), OSError):
                log.error("a connection could not be made", exc_info=task.exception())

    def _on_error(self, error: OSError) -> None:
        """Accept nothing for a while; the socket stays readable, and would be asked each turn."""
        self._taker.on_accept_error(self._listening, error)
        self._loop.remove_reader(self._listening)
        self._pause = self._loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listening, self._accept)


def _accepted_ns(accepted: AcceptedSocket[Any]) -> int:
    return accepted.at_ns
