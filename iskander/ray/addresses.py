"""Addresses of the servers that a dataset is scored with, as seen from one node.

Runs in: drivers and actors of Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from iskander.engines.addresses import Addresses
from iskander.errors import ConfigError
from iskander.ray import cluster
from iskander.ray.node_server import local_socket

STATUS_S: Final = 3.0
"""Time for the actors of a fleet to answer; a restarting actor does not answer."""


@dataclass(frozen=True)
class FixedServers:
    """Servers that do not move.

    Attributes:
        by_node: Address for each node id.
        unplaced: Addresses without a node; preferred on the node with the same host.
    """

    by_node: Mapping[str, str] = field(default_factory=dict)
    unplaced: tuple[str, ...] = ()

    def addresses(self) -> tuple[str, ...]:
        """Return all addresses."""
        return (*self.by_node.values(), *self.unplaced)

    def look_up(self) -> Addresses:
        """Return the addresses for this node."""
        own = self.by_node.get(cluster.own_node_id())
        if own is None and self.unplaced:
            host = cluster.own_host()
            here = (each for each in self.unplaced if each.rpartition(":")[0].strip("[]") == host)
            own = next(here, None)
        return Addresses(own, tuple(address for address in self.addresses() if address != own))


@dataclass(frozen=True)
class FleetServers:
    """Servers of a fleet, whose actors are asked for their addresses.

    Attributes:
        prefix: Start of the names of the fleet's actors.
        by_node: Address for each node id, at the start.
    """

    prefix: str
    by_node: Mapping[str, str]

    def addresses(self) -> tuple[str, ...]:
        """Return all addresses that were known at the start."""
        return tuple(self.by_node.values())

    def look_up(self) -> Addresses:
        """Return the addresses of all servers; for a server that is not ready, its last address.

        The address of the own node's server is its unix socket, which has shared memory, unless
        this process cannot see the socket.
        """
        actors = cluster.named_actors(self.prefix)
        ready = {key: str(each["address"]) for key, each in ready_statuses(actors).items()}
        known = {key: entry for key, entry in {**self.by_node, **ready}.items() if key in actors}
        node_id = cluster.own_node_id()
        own = known.pop(node_id, None)
        if (socket := local_socket(f"{self.prefix}{node_id}")).is_symlink():
            own = f"unix:{socket}"
        return Addresses(own, tuple(known.values()))


def ready_statuses(actors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the status of each ready server by node id, from actors by node id."""
    results = cluster.call_each(actors, "status", timeout_s=STATUS_S)
    return {
        node_id: result
        for node_id, result in results.items()
        if isinstance(result, dict) and result["is_ready"]
    }


def fixed_servers(target: str | Sequence[str] | Mapping[str, str]) -> FixedServers:
    """Return the servers of an address, of several, or of a table by node id.

    Raises:
        ConfigError: There is no address.
    """
    if isinstance(target, str):
        servers = FixedServers(unplaced=(target,))
    elif isinstance(target, Mapping):
        servers = FixedServers(by_node=dict(target))
    else:
        servers = FixedServers(unplaced=tuple(target))
    if not servers.addresses():
        raise ConfigError("`target` has no address; the minimum is one")
    return servers
