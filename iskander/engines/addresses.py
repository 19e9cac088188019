"""Addresses of servers, as seen from one node.

Runs in: drivers and processes of engines. Pure.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Addresses(NamedTuple):
    """Addresses of servers that are ready.

    Attributes:
        preferred: Address of the server that a client prefers; empty: none is ready.
        others: Those of the others.
        is_expected: Whether there will be a preferred one, if there is none.
    """

    preferred: str
    others: tuple[str, ...]
    is_expected: bool = False


class Servers(Protocol):
    """Source of addresses; sent to the processes of an engine."""

    def addresses(self) -> tuple[str, ...]:
        """All addresses that were known at the start, for other nodes."""

    def look_up(self) -> Addresses:
        """Return the current addresses for this node."""
