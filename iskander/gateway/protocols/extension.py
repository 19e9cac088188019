"""Protocols from other distributions or from an embedding program.

A protocol is a factory: `factory(services, settings)` returns a `ProtocolServer`. Its settings are
the table `[extensions.protocols.NAME]`, which the factory decodes. It is registered by
`iskander.embed.register_protocol` or an entry point of the group `iskander.protocols`.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.gateway.auth.grants import Authenticator
from iskander.gateway.protocols.submit import RequestSubmitter
from iskander.gateway.repository.models import Models
from iskander.gateway.transport.limits.connection_limits import ConnectionLimits
from iskander.gateway.transport.tls import Tls

ENTRY_POINTS = "iskander.protocols"


@dataclass(frozen=True, kw_only=True, slots=True)
class Services:
    """Components of the gateway that a protocol uses."""

    models: Models  # Finds the lane of a model version.
    submitter: RequestSubmitter  # Admits a request, and calls back with its results.
    authenticator: Authenticator  # Grants of tokens.
    tls: Tls  # Certificates of the TCP listeners.
    connection_limits: ConnectionLimits  # Memory, iterations and timeouts of all connections.


class ProtocolServer(Protocol):
    """A listener with its connections."""

    @property
    def unsent(self) -> int:
        """Number of connections with unread responses."""

    async def start(self, *, is_shared: bool) -> str:
        """Listen and return the address; `is_shared`: other gateway processes use it too."""

    def stop_accepting(self) -> None:
        """Accept no more connections; open ones continue."""

    async def stop(self, grace_s: float) -> None:
        """Stop listening, and close open connections after `grace_s`."""


Factory = Callable[[Services, dict[str, Any]], ProtocolServer]
REGISTERED: dict[str, Factory] = {}


def create_protocols(config: Config, services: Services) -> dict[str, ProtocolServer]:
    """Create the servers of all configured protocols; raises ConfigError for an unknown name."""
    settings = config.extensions.protocols
    return {name: _factory(name)(services, table) for name, table in settings.items()}


def _factory(name: str) -> Factory:
    if name in REGISTERED:
        return REGISTERED[name]
    installed = entry_points(group=ENTRY_POINTS)
    if name not in installed.names:
        known = ", ".join(sorted({*REGISTERED, *installed.names})) or "none"
        raise ConfigError(f"unknown protocol: extensions.protocols.{name}; available: {known}")
    factory: Factory = installed[name].load()
    return factory
