"""ZMTP connections without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from iskander.config.schema import TimeoutsConfig
from iskander.gateway.transport.limits.receive_budget import ReceiveBudget
from iskander.gateway.transport.limits.turn_scheduler import TurnScheduler
from iskander.gateway.transport.zmtp.connection import Connection
from iskander.gateway.transport.zmtp.frames import Part


class Transport:
    """A socket that records written data, and has read its input."""

    def __init__(self) -> None:
        self.written = b""
        self.reading = True
        self.is_aborted = False

    def set_write_buffer_limits(self, high: int) -> None: ...

    def write(self, raw: bytes) -> None:
        self.written += raw

    def writelines(self, pieces: list[bytes]) -> None:
        self.written += b"".join(pieces)

    def is_reading(self) -> bool:
        return self.reading

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        self.is_aborted = True

    def get_write_buffer_size(self) -> int:
        return 0


class Peer:
    """A connection, its session, and the results of both.

    Attributes:
        messages: Those accepted by the session.
        room: Limit of accepted messages.
        is_valid: Whether the session takes them as valid.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        room: int = 1 << 30,
        receive_bytes: int = 1 << 30,
        message_bytes: int = 1 << 20,
    ) -> None:
        self.loop = loop
        self.message_bytes = message_bytes
        self.scratch = memoryview(bytearray(4096))
        self.connections: set[Connection] = set()
        self.identity: bytes | None = None
        self.messages: list[list[Part]] = []
        self.arrivals: list[int] = []
        self.reasons: list[str] = []
        self.room = room
        self.is_valid = True
        self.transport = Transport()
        self.budget = ReceiveBudget(receive_bytes)
        self.timeouts = TimeoutsConfig()
        self.turns = TurnScheduler(loop)
        self.connection = Connection(self)
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]
        self.on_broken: Callable[[str], None] = self.reasons.append
        self.has_work = False
        self.unread_bytes = 0
        self.rejected: list[list[Part]] = []
        self.reject = self.rejected.append
        self.ended: list[str] = []
        self.count_ended = self.ended.append

    def charge_unsent(self, connection: Connection) -> None: ...

    def forget(self, connection: Connection) -> None:
        self.connections.discard(connection)

    def open(self, _: Connection, identity: bytes) -> Peer:
        self.identity = identity
        return self

    @property
    def is_full(self) -> bool:
        return len(self.messages) >= self.room

    def on_message(self, parts: list[Part], arrived_ns: int) -> bool:
        self.messages.append(parts)
        self.arrivals.append(arrived_ns)
        return self.is_valid

    def on_writable(self) -> None: ...

    def on_lost(self) -> None: ...

    async def feed(self, raw: bytes, step: int, *, is_whole: bool = True) -> int:
        """Feed the connection with input in pieces; returns the number of delivered bytes.

        A paused socket delivers none. If `is_whole`, wait for its turns.
        """
        at = 0
        while at < len(raw):
            while not self.transport.is_aborted and (
                self.connection._is_waiting or not (self.transport.reading or self.is_full)
            ):
                await asyncio.sleep(0)
            if not self.transport.reading or self.transport.is_aborted:
                return at
            buffer = self.connection.get_buffer(-1)
            piece = raw[at : at + min(step, len(buffer))]
            buffer[: len(piece)] = piece
            self.connection.buffer_updated(len(piece))
            # Data that is kept must be copied out of the shared read buffer.
            self.scratch[:] = b"\xaa" * len(self.scratch)
            at += len(piece)
        while is_whole and self.connection._is_waiting and not self.transport.is_aborted:
            await asyncio.sleep(0)
        return at
