"""Addresses of servers, as seen from one node.

Runs in: drivers and processes of engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from iskander.client import Client
from iskander.errors import NotReady


class Addresses(NamedTuple):
    """Addresses of servers, ready or not.

    Attributes:
        preferred: Address of the server that a client prefers; None: no preference.
        others: Addresses of the other servers.
    """

    preferred: str | None
    others: tuple[str, ...]

    def open(self, options: Mapping[str, Any]) -> Client:
        """Open a client of these servers.

        Raises:
            NotReady: There is no address.
        """
        if self.preferred is None and not self.others:
            raise NotReady("no server is known")
        return Client(self.others, preferred=self.preferred, **options)


class Servers(Protocol):
    """Finds addresses of servers; an engine sends the object to its processes."""

    def addresses(self) -> tuple[str, ...]:
        """Return all addresses that were known at the start, for other nodes."""

    def look_up(self) -> Addresses:
        """Return the current addresses for this node."""
