"""Fleet: one server on each node of a Ray cluster.

    driver  ->  Fleet  ->  NodeServer actor on each node  ->  gateway  ->  workers

Ray restarts the actors, the actors restart the gateways. The fleet has no state but the names of
its actors, so that any driver of the cluster can use it.

Runs in: drivers of Ray.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from iskander.errors import ConfigError, DeadlineExceeded, IskanderError, NotReady
from iskander.foundation import clock
from iskander.ray import cluster
from iskander.ray.addresses import STATUS_S, FleetServers, ready_statuses
from iskander.ray.cluster import ClusterNode
from iskander.ray.node_server import STOP_S, NodeServer

START_S: Final = 300.0
FAILURES_MAX: Final = 2
"""Number of failed starts in a row of one server after which the start of the fleet fails."""
_POLL_S: Final = 0.1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\Z")

Nodes: TypeAlias = Collection[str] | Callable[[Mapping[str, Any]], bool]


class Fleet:
    """One server on each alive node of a Ray cluster.

    The servers listen on the network, which needs tokens and TLS of a configuration, or
    `allow_unprotected_network`. They end with the driver or with this object, unless the fleet is
    detached.

    Args:
        model: Path of a model, the same on each node.
        config: Path of a configuration, the same on each node, whose addresses are replaced.
        name: Name of the fleet for other drivers; None: a random one.
        nodes: Ids of the nodes, or a function that selects entries of `ray.nodes()`; None: all.
        address_of: Function that returns the address at which other nodes reach an entry of
            `ray.nodes()`; None: the address that Ray uses.
        port: Port of each server; 0: a free port from 20000 on.
        token: Token for probes and for `score`, if the configuration has tokens; the actors get it.
        allow_unprotected_network: Let everybody who reaches the network of the cluster use the
            servers, without TLS or without tokens, like Ray's own ports.
        num_gpus: GPUs of each node that Ray reserves for its server; the server sees only these
            GPUs.
        is_detached: Whether the servers keep running when this driver ends.
        timeout_s: Time for all servers to become ready.

    Raises:
        ConfigError: An argument is invalid, or the model is not readable on a node.
        NotReady: A server does not start.
        DeadlineExceeded: It is not ready in time.
    """

    def __init__(  # noqa: PLR0913 - all but the first by keyword
        self,
        model: str | Path | None = None,
        *,
        config: str | Path | None = None,
        name: str | None = None,
        nodes: Nodes | None = None,
        address_of: Callable[[Mapping[str, Any]], str] | None = None,
        port: int = 0,
        token: str | None = None,
        allow_unprotected_network: bool = False,
        num_gpus: float = 0,
        is_detached: bool = False,
        timeout_s: float = START_S,
    ) -> None:
        given = [path for path in (model, config) if path is not None]
        if len(given) != 1:
            raise ConfigError("a fleet serves a model or a configuration; give one of the two")
        self.name = name or f"fleet-{uuid.uuid4().hex[:8]}"
        if not _NAME.match(self.name):
            raise ConfigError(f"`name` is {name!r}; expected letters, digits, `_`, `.` or `-`")
        self._source = str(Path(given[0]).absolute())
        self._is_config = config is not None
        self._nodes, self._address_of = nodes, address_of
        self.token, self._is_unprotected = token, allow_unprotected_network
        self._port, self._num_gpus, self._is_detached = port, num_gpus, is_detached
        self._known: dict[str, str] = {}
        # Ray ends an actor that is not detached with its last handle here.
        self._actors: dict[str, Any] = {}
        if cluster.named_actors(self._prefix):
            raise ConfigError(f"there is a fleet {self.name!r}; use Fleet.connect, or another name")
        try:
            self.refresh(timeout_s=timeout_s)
        except BaseException:
            self.close()
            raise

    @classmethod
    def connect(cls, name: str, *, token: str | None = None) -> Fleet:
        """Return a fleet that this driver or another driver started.

        `refresh` of the result starts servers on all nodes without a server, with Ray's addresses.

        Raises:
            NotReady: There is no fleet with this name, or it does not answer.
        """
        actors = cluster.named_actors(_prefix(name))
        found = cluster.call_each(actors, "spec", timeout_s=STATUS_S).values()
        spec = next((answer for answer in found if isinstance(answer, dict)), None)
        if spec is None:
            raise NotReady(f"no fleet {name!r} answers in this cluster")
        fleet = cls.__new__(cls)
        fleet.name, fleet.token = name, token
        fleet._source, fleet._is_config = spec["source"], spec["is_config"]
        fleet._port, fleet._is_unprotected = spec["port"], spec["is_unprotected"]
        fleet._nodes, fleet._address_of = None, None
        fleet._num_gpus, fleet._is_detached = 0, True
        fleet._known, fleet._actors = {}, {}
        fleet.uris()
        return fleet

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        shown = ", ".join(f"{node[:8]} {address}" for node, address in self._known.items())
        return f"Fleet({self.name!r}, {self._source}, servers: {shown or 'none'})"

    def uris(self) -> dict[str, str]:
        """Return the address of each server that is ready now, by node id."""
        statuses = ready_statuses(cluster.named_actors(self._prefix))
        self._known = {node_id: status["address"] for node_id, status in statuses.items()}
        return dict(self._known)

    def servers(self) -> FleetServers:
        """Return the servers for clients of this fleet.

        Raises:
            NotReady: No server is ready.
        """
        addresses = self.uris()
        if not addresses:
            raise NotReady(f"no server of the fleet {self.name!r} is ready")
        return FleetServers(self._prefix, addresses)

    def refresh(self, *, timeout_s: float = START_S) -> dict[str, str]:
        """Start servers on nodes that have joined; return the addresses of all, by node id.

        Raises:
            ConfigError: The model is not readable on a node, or no node is selected.
            NotReady: A server does not start.
            DeadlineExceeded: A server is not ready in time.
        """
        nodes = {node.id: node for node in cluster.alive_nodes() if self._selects(node)}
        if not nodes:
            raise ConfigError("no alive node of the cluster is selected by `nodes`")
        actors = cluster.named_actors(self._prefix)
        new = {id_: self._start(node) for id_, node in nodes.items() if id_ not in actors}
        self._actors.update(new)
        self._wait(new, nodes, timeout_s)
        return self.uris()

    def close(self, *, timeout_s: float = 2 * STOP_S) -> None:
        """Stop all servers, and end their actors."""
        actors = cluster.named_actors(self._prefix)
        cluster.call_each(actors, "stop", timeout_s=timeout_s)
        cluster.end_actors(list(actors.values()))
        self._known, self._actors = {}, {}

    @property
    def _prefix(self) -> str:
        return _prefix(self.name)

    def _selects(self, node: ClusterNode) -> bool:
        if self._nodes is None:
            return True
        return self._nodes(node.entry) if callable(self._nodes) else node.id in self._nodes

    def _start(self, node: ClusterNode) -> Any:  # noqa: ANN401
        host = node.host if self._address_of is None else self._address_of(node.entry)
        name = f"{self._prefix}{node.id}"
        return cluster.start_actor(
            NodeServer,
            {
                "source": self._source,
                "is_config": self._is_config,
                "host": host,
                "port": self._port,
                "key": name,
                "token": self.token,
                "is_unprotected": self._is_unprotected,
            },
            name=name,
            node_id=node.id,
            num_gpus=self._num_gpus,
            is_detached=self._is_detached,
        )

    def _wait(
        self, actors: Mapping[str, Any], nodes: Mapping[str, ClusterNode], timeout_s: float
    ) -> None:
        """Wait until the servers of actors are ready."""
        end_ns = clock.now_ns() + int(timeout_s * clock.NS_PER_S)
        waiting = dict(actors)
        last: dict[str, Any] = {}
        while waiting:
            results = cluster.call_each(waiting, "status", timeout_s=STATUS_S)
            for node_id, result in results.items():
                last[node_id] = result
                if cluster.is_dead(result):
                    raise _with_node(nodes[node_id], _dead_actor_error(result))
                if not isinstance(result, dict):
                    continue
                if result["is_ready"]:
                    del waiting[node_id]
                elif (error := _failure(result)) is not None:
                    raise _with_node(nodes[node_id], error)
            if waiting and clock.now_ns() > end_ns:
                node_id = next(iter(waiting))
                text = f"the server is not ready after {timeout_s:g} s (`timeout_s`)"
                raise _with_node(
                    nodes[node_id], DeadlineExceeded(f"{text}: {_state(last.get(node_id))}")
                )
            if waiting:
                clock.pause_s(_POLL_S)


def _prefix(name: str) -> str:
    return f"{name}/"


def _failure(status: Mapping[str, Any]) -> IskanderError | None:
    """Return the error of a server that will not become ready by itself."""
    if status["error"] is None:
        return None
    error = IskanderError.from_wire(status["error"])
    is_final = isinstance(error, ConfigError) or status["failures"] >= FAILURES_MAX
    return error if is_final else None


def _dead_actor_error(result: object) -> NotReady:
    text = cluster.first_line(result)
    return NotReady(f"its actor ended: {text}; is iskander installed there in the same version?")


def _state(status: object) -> str:
    """Describe the last known state of a server."""
    if not isinstance(status, Mapping):
        return "its actor has not answered; Ray may still be starting it"
    error = status["error"]
    return "it is starting" if error is None else str(error["message"])


def _with_node(node: ClusterNode, error: IskanderError) -> IskanderError:
    """Return the same error with its node in the message and fields."""
    text = f"node {node.id[:8]} ({node.host}): {error.message}"
    return type(error)(text, node=node.id, **error.fields)
