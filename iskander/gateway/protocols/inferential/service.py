"""Inferential over ZeroMQ: the listener and the state shared by its sessions.

Runs on: gateway loop. Source: the protocol of the package `inferential` 1.4.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.foundation.measurement.recent_values import RecentValues
from iskander.gateway.auth.grants import Grant
from iskander.gateway.protocols.inferential.metrics import InferentialMetrics
from iskander.gateway.protocols.inferential.session import Session
from iskander.gateway.repository.models import Models
from iskander.gateway.scheduling.dispatch import Dispatcher
from iskander.gateway.scheduling.entry import Entry
from iskander.gateway.transport.addresses import zmq_address
from iskander.gateway.transport.limits.connection_limits import ConnectionLimits
from iskander.gateway.transport.sockets import BoundPath, bind, with_port
from iskander.gateway.transport.zmtp.listener import Listener


class InferentialService:
    """The Inferential server."""

    def __init__(
        self,
        config: Config,
        models: Models,
        *,
        entry: Entry,
        dispatcher: Dispatcher,
        grant: Grant,
        recent: RecentValues,
        connection_limits: ConnectionLimits,
    ) -> None:
        self.config = config.inferential
        self.limits = config.limits
        self.budget = connection_limits.budget
        self.models = models
        self.entry = entry
        self.dispatcher = dispatcher
        self.grant = grant
        self.metrics = InferentialMetrics(recent)
        self.sessions: dict[str, Session] = {}  # By client name.
        self.is_silent = self.config.errors == "silent"  # Failed observations get no reply.
        self.is_draining = False  # New observations are rejected.
        self.address = ""  # With the allocated port; empty if the protocol is off.
        self._server = config.server
        self._path: BoundPath | None = None
        self._response_prefix = os.urandom(8).hex()
        self._responses = self._renamed = 0
        self._listener = Listener(
            lambda connection, identity: Session(self, connection, identity),
            self.metrics.on_connection_broken,
            message_bytes=config.limits.message_bytes,
            connections_max=self.config.connections,
            limits=connection_limits,
        )

    @property
    def busy_sessions(self) -> int:
        """Number of clients with an unanswered observation or an unsent reply."""
        return sum(session.has_work for session in self.sessions.values())

    async def start(self) -> None:
        """Listen, if an address is configured; raises ConfigError if it is in use or invalid."""
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
            where = f"inferential.address {self.config.address}"
            raise ConfigError(f"{where}: cannot listen there: {error.strerror}") from None
        for listening in sockets:
            await self._listener.listen(listening)

    def stop_accepting(self) -> None:
        """Stop accepting connections; open ones continue."""
        self._listener.stop_accepting()

    def configure(self, config: Config) -> None:
        """Apply the limits: of a window to new clients, the others to all."""
        self.limits = config.limits
        self._listener.message_bytes = config.limits.message_bytes
        self._listener.connections_max = config.inferential.connections

    def drain(self) -> None:
        """Reject new observations; accepted ones are still answered."""
        self.is_draining = True

    async def stop(self, grace_s: float) -> None:
        """Stop listening and close connections when their replies are sent."""
        await self._listener.stop(grace_s)
        if self._path is not None:
            self._path.release()

    def stats(self) -> dict[str, Any]:
        """Return counters; empty if the protocol is off."""
        if not self.address:
            return {}
        return {
            "address": self.address,
            "clients": len(self.sessions),
            "connections_broken": self.metrics.broken,
            "observations": dict(self.metrics.outcomes),
            "last_error": self.metrics.last_error,
        }

    def next_response(self) -> str:
        """Return a unique name for a reply: 32 hexadecimal digits."""
        self._responses += 1
        return f"{self._response_prefix}{self._responses:016x}"

    def register(self, session: Session, name: str) -> str:
        """Register a client; return its name, after the grant's name, made unique by a suffix."""
        if self.grant.name:
            name = f"{self.grant.name}/{name}"
        unique = name
        while unique in self.sessions:
            self._renamed += 1
            unique = f"{name} ({self._renamed})"
        self.sessions[unique] = session
        self.metrics.set_clients(len(self.sessions))
        return unique

    def unregister(self, session: Session) -> None:
        """Remove a client that disconnected."""
        if session.name:
            del self.sessions[session.name]
            self.metrics.on_client_left(session.labels)
            self.metrics.set_clients(len(self.sessions))
