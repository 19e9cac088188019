"""Inferential over ZeroMQ: where its clients connect, and what their sessions share.

Runs on: gateway loop. Source: the protocol of the package `inferential` 1.4.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from iskander.auth.grants import Grant
from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.measurement.recent_values import RecentValues
from iskander.protocols.inferential.metrics import InferentialMetrics
from iskander.protocols.inferential.session import Session
from iskander.repository.models import Models
from iskander.scheduling.dispatch import Dispatcher
from iskander.scheduling.input_arena import InputArena
from iskander.transport.addresses import zmq_address
from iskander.transport.connection_limits import ConnectionLimits
from iskander.transport.sockets import BoundPath, bind, with_port
from iskander.transport.zmtp.connection import Connection
from iskander.transport.zmtp.listener import Listener


class InferentialService:
    """The protocol's port.

    Args:
        config: Of the server.
        models: What is served.
        intake: The way into shared memory.
        dispatcher: The way to the workers.
        grant: What its clients may ask, who show no token.
        recent: Where points of its measures are kept.
        connection_limits: Over the connections of all listeners.

    Attributes:
        sessions: The clients that are connected, by their names.
        is_silent: What fails is not answered.
        budget: The memory of received bytes, and of results that are not sent.
        is_draining: What comes is refused.
        address: Where it listens, with the port that was taken; empty: nowhere.
    """

    def __init__(
        self,
        config: Config,
        models: Models,
        *,
        intake: InputArena,
        dispatcher: Dispatcher,
        grant: Grant,
        recent: RecentValues,
        connection_limits: ConnectionLimits,
    ) -> None:
        self.config = config.inferential
        self.limits = config.limits
        self.budget = connection_limits.budget
        self.models = models
        self.intake = intake
        self.dispatcher = dispatcher
        self.grant = grant
        self.journal = InferentialMetrics(recent)
        self.sessions: dict[str, Session] = {}
        self.is_silent = self.config.errors == "silent"
        self.is_draining = False
        self.address = ""
        self._server = config.server
        self._path: BoundPath | None = None
        self._run = os.urandom(8).hex()
        self._responses = self._names = 0
        self._listener = Listener(
            self._open,
            self.journal.cut,
            message_bytes=config.limits.message_bytes,
            connections_max=self.config.connections,
            limits=connection_limits,
        )

    @property
    def has_work(self) -> bool:
        """Whether something that was taken is not answered."""
        return any(session.has_work for session in self.sessions.values())

    async def start(self) -> None:
        """Listen, where the settings say so.

        Raises:
            ConfigError: The address is in use, or is none.
        """
        if not self.config.address:
            return
        target = zmq_address(self.config.address)
        assert target is not None
        try:
            if isinstance(target, Path):
                self._path = BoundPath(target, self._server)
                sockets = [self._path.socket]
                self.address = self.config.address
            else:
                sockets = await bind(target, is_shared=self._server.processes > 1)
                self.address = f"tcp://{with_port(target, sockets[0])}"
        except OSError as error:
            raise ConfigError(
                f"inferential.address {self.config.address}: cannot listen there: {error.strerror}"
            ) from None
        for listening in sockets:
            await self._listener.listen(listening)

    def close_door(self) -> None:
        """Take no more connections; those that are open go on."""
        self._listener.close_door()

    def drain(self) -> None:
        """Take nothing more; what was accepted is still answered."""
        self.is_draining = True

    async def stop(self, grace_s: float) -> None:
        """Stop listening, and let the clients go once they have what was said to them."""
        await self._listener.stop(grace_s)
        if self._path is not None:
            self._path.release()

    def stats(self) -> dict[str, Any]:
        """What has come of observations; empty where the protocol is not served."""
        if not self.address:
            return {}
        return {
            "address": self.address,
            "clients": len(self.sessions),
            "connections_broken": self.journal.broken,
            "observations": dict(self.journal.outcomes),
            "last_error": self.journal.last_error,
        }

    def next_response(self) -> str:
        """A name for a reply: 32 hexadecimal digits that no other has."""
        self._responses += 1
        return f"{self._run}{self._responses:016x}"

    def name_for(self, session: Session, wanted: str) -> str:
        """What a client is called: as it says, unless another that is connected is called so.

        Two of one name are two clients: what is one's is never the other's.
        """
        if self.grant.name:
            wanted = f"{self.grant.name}/{wanted}"
        name = wanted
        while name in self.sessions:
            self._names += 1
            name = f"{wanted} ({self._names})"
        self.sessions[name] = session
        self.journal.clients(len(self.sessions))
        return name

    def on_left(self, session: Session) -> None:
        """A client is gone."""
        if session.name:
            del self.sessions[session.name]
            self.journal.left(session.labels)
            self.journal.clients(len(self.sessions))

    def _open(self, connection: Connection, identity: bytes) -> Session:
        return Session(self, connection, identity)
