"""Origin of an accepted connection, read once from its transport.

Runs on: gateway loop. Source: unix(7) (SO_PEERCRED).
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Final

from iskander.gateway.auth.origin import Origin, certificate_names

_CREDENTIALS: Final = struct.Struct("3i")


def origin_of(transport: asyncio.BaseTransport) -> Origin:
    """Return the origin of an accepted connection."""
    certificate = transport.get_extra_info("peercert")
    names = certificate_names(certificate) if certificate else ()
    return Origin(_peer(transport), names)


def process_of(connection: socket.socket) -> tuple[int, int]:
    """Return the user and process of the peer of a unix socket, at its connect."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return uid, pid


def _peer(transport: asyncio.BaseTransport) -> str:
    connection = transport.get_extra_info("socket")
    try:
        if connection is not None and connection.family == socket.AF_UNIX:
            uid, pid = process_of(connection)
            return f"unix:uid={uid},pid={pid}"
        address = transport.get_extra_info("peername")
    except OSError:
        return ""
    if not isinstance(address, tuple):
        return ""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
