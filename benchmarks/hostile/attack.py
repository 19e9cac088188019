"""Declaration of an attack. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

Chunk = Callable[[int], bytes]
"""Returns the bytes of one repetition, by its number from 0."""


class Calls(NamedTuple):
    """gRPC calls that keep to HTTP/2's flow control.

    Attributes:
        path: Method.
        opening: Returns the first messages of a call, by its number on the connection.
        repeated: Returns a further message, by the numbers of the call and of the repetition.
        repeats: Maximum number of these messages in one call.
        ahead: Such messages without a response.
        concurrent: Calls open at once on one connection.
        total: Maximum number of calls on one connection.
        is_held: A call stays open after its last message.
        window: Bytes of responses that the attacker takes; 0: none.
        first_message: Prepares a call at the server, by its port, and returns its message.
    """

    path: str
    opening: Callable[[int], list[bytes]] = lambda _: []
    repeated: Callable[[int, int], bytes] | None = None
    repeats: int = 1 << 40
    ahead: int = 1
    concurrent: int = 1
    total: int = 1 << 40
    is_held: bool = False
    window: int = 1 << 24
    first_message: Callable[[int], bytes] | None = None


class Attack(NamedTuple):
    """An attack.

    Attributes:
        name: A row of the table.
        opening: Returns the first bytes of each connection.
        chunk: Returns the repeated bytes; None: the connection stays open without input.
        listener: `grpc`, `http`, `zmtp`, or `memory`, the socket for shared-memory regions.
        connections: Concurrent connections of one attacker.
        repeats: Maximum number of chunks on one connection.
        reads: The attacker reads the responses.
        is_flight: It applies to any Flight server.
        pause_s: Between two chunks.
        calls: Calls, in place of bytes.
        ends_answered: The attacker closes a connection with the first byte of the response.
        has_tls: The server's port has TLS.
        probe: What the innocent client does in addition: `source` or `region`.
    """

    name: str
    opening: Callable[[], bytes] = bytes
    chunk: Chunk | None = None
    listener: str = "grpc"
    connections: int = 1
    repeats: int = 1 << 40
    reads: bool = True
    is_flight: bool = True
    pause_s: float = 0.0
    calls: Calls | None = None
    ends_answered: bool = False
    has_tls: bool = False
    probe: str = ""
