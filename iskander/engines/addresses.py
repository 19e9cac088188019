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
        others: Those of the others.
    """

    preferred: str | None
    others: tuple[str, ...]

    def open(self, options: Mapping[str, Any]) -> Client:
        """Open a client of them.

        Raises:
            NotReady: There is none.
        """
        if self.preferred is None and not self.others:
            raise NotReady("no server is known")
        return Client(self.others, preferred=self.preferred, **options)


class Servers(Protocol):
    """Source of addresses; sent to the processes of an engine."""

    def addresses(self) -> tuple[str, ...]:
        """All addresses that were known at the start, for other nodes."""

    def look_up(self) -> Addresses:
        """Return the current addresses for this node."""
