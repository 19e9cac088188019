"""Addresses of the servers that a DataFrame is scored with, as seen from one executor.

Runs in: drivers and Python workers of Spark.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from iskander.engines.addresses import Addresses
from iskander.errors import ConfigError

_PORT_MAX = 65_535
_HOST_VARIABLES = ("SPARK_LOCAL_HOSTNAME", "SPARK_LOCAL_IP")
"""Variables with the executor's host, in the order in which Spark reads them."""
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class NodeServers:
    """Servers with fixed addresses, and a server on each executor's own node.

    Attributes:
        target: Addresses that all executors and the driver reach.
        preferred: Address that an executor prefers, or its port on the executor's host; None: no
            preference.
    """

    target: tuple[str, ...]
    preferred: str | int | None = None

    def addresses(self) -> tuple[str, ...]:
        """Return all addresses that are the same for each executor."""
        return self.target

    def look_up(self) -> Addresses:
        """Return the addresses for this executor."""
        own = self.preferred
        if own is None:
            return Addresses(None, self.target)
        if isinstance(own, int):
            own = f"{_own_host()}:{own}"
        return Addresses(own, tuple(address for address in self.target if address != own))


def node_servers(target: str | Sequence[str], preferred: str | int | None) -> NodeServers:
    """Return the servers that the arguments of `scorer` name.

    Raises:
        ConfigError: There is no address, or the port is invalid.
    """
    addresses = (target,) if isinstance(target, str) else tuple(target)
    if not addresses:
        raise ConfigError("`target` has no address; the minimum is one")
    if isinstance(preferred, str | None):
        is_valid = preferred != ""
    else:
        is_valid = type(preferred) is int and 0 < preferred <= _PORT_MAX
    if not is_valid:
        text = f"expected HOST:PORT, unix:PATH, or a port from 1 to {_PORT_MAX}"
        raise ConfigError(f"`preferred` is {preferred!r}; {text}")
    return NodeServers(addresses, preferred)


def _own_host() -> str:
    given = (os.environ.get(name) for name in _HOST_VARIABLES)
    host = next((each for each in given if each), _LOOPBACK)
    return f"[{host}]" if ":" in host else host
