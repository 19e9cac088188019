"""Refusal of listeners that are open to the network without TLS and tokens.

A unix socket is exempt, and so is a host that resolves to loopback addresses only. Any other
listener needs TLS and tokens, or its setting in `access.allow_unprotected_network`.

Pure.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from typing import NamedTuple

ALLOW = "access.allow_unprotected_network"


class Listener(NamedTuple):
    """A TCP listener, and what protects it.

    Attributes:
        setting: Setting of the address, such as `admin.address`.
        address: `HOST:PORT`.
        lacks: What it needs and does not have.
        is_protectable: Whether it could have TLS and tokens.
    """

    setting: str
    address: str
    lacks: tuple[str, ...]
    is_protectable: bool = True

    def describe(self) -> str:
        """What is wrong with it on the network."""
        lacks = " and ".join(self.lacks) + ("" if self.is_protectable else ", which it cannot have")
        return f"{self.setting} {self.address} is open to the network without {lacks}"


def exposure_error(listener: Listener, resolved: Collection[str], allowed: Collection[str]) -> str:
    """The reason to refuse a listener; empty if it may listen.

    Args:
        listener: The listener.
        resolved: The IP addresses of its host; none if the host is unknown, which may be anything.
        allowed: Value of `access.allow_unprotected_network`.
    """
    if not is_exposed(listener, resolved) or listener.setting in allowed:
        return ""
    unknown = "" if resolved else " (its host is unknown here)"
    fix = "set that, listen" if listener.is_protectable else "listen"
    permit = f'or permit it by {ALLOW} = ["{listener.setting}"]'
    return f"{listener.describe()}{unknown}: {fix} on 127.0.0.1 or a unix socket, {permit}"


def is_exposed(listener: Listener, resolved: Collection[str]) -> bool:
    """Whether other machines may reach a listener that lacks TLS or tokens."""
    return bool(listener.lacks) and not (resolved and all(map(_is_loopback, resolved)))


def _is_loopback(address: str) -> bool:
    """Whether an IP address is of this machine only; that of every interface is not."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback
