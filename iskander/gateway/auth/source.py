"""Source of a request: its token and connection, as the server knows them."""

from __future__ import annotations

from typing import Final, NamedTuple


class Source(NamedTuple):
    """Source of a request; fair queueing and memory quotas count by it.

    Attributes:
        tenant: Name of the token that the call presented; empty where no token is required.
        connection: Transport connection, unique in the process.
    """

    tenant: str = ""
    connection: str | int = 0

    @property
    def party(self) -> str | int:
        """Who is held responsible for it: the token, or the connection where none is required."""
        return self.tenant or self.connection


UNKNOWN_SOURCE: Final = Source()
