"""Sources of connections by address.

Pure.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Any, Final, TypeAlias

PREFIX_BITS: Final = 64
"""Prefix of an IPv6 address that identifies one client."""

Source: TypeAlias = str


def source_of(family: int, address: Any) -> Source:  # noqa: ANN401
    """Return the source of a connection: IPv4 address, IPv6 /64 prefix, or `unix`."""
    if family == socket.AF_UNIX:
        return "unix"
    host: str = address[0]
    if family == socket.AF_INET:
        return host
    parsed = ipaddress.IPv6Address(host.partition("%")[0])
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, PREFIX_BITS), strict=False).network_address)
