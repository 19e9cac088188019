"""TCP ports: sockets that are bound, for one process or for several that share a port.

Source: socket(7) (SO_REUSEPORT), ipv6(7) (IPV6_V6ONLY).
"""

from __future__ import annotations

import asyncio
import socket


async def bind(address: str, *, is_shared: bool) -> list[socket.socket]:
    """Sockets for a host and a port, one for each address of the host; none of them listens yet.

    Args:
        address: `HOST:PORT`; port 0 takes a free one.
        is_shared: Others of this user may bind it too; the kernel deals connections out among
            those that listen.

    Raises:
        OSError: It is taken, or not this machine's.
    """
    host, _, wanted = address.rpartition(":")
    host, port = host.strip("[]"), int(wanted)
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, where in dict.fromkeys(found):
            bound = socket.socket(family, kind, protocol)
            sockets.append(bound)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(is_shared))
            if family == socket.AF_INET6:
                # The address of all takes IPv4 too, as servers do; any other is just itself.
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
            bound.bind((where[0], port, *where[2:]))
            port = bound.getsockname()[1]
    except BaseException:
        for bound in sockets:
            bound.close()
        raise
    return sockets


def with_port(address: str, bound: socket.socket) -> str:
    """An address with the port that a socket has."""
    return f"{address.rpartition(':')[0]}:{bound.getsockname()[1]}"
