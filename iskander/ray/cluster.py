"""Edge of Ray: nodes, actors and calls, with deadlines and named errors.

All other modules use Ray only through this one. Ray has few types, so its objects are `Any`.

Runs in: drivers and actors of Ray.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from iskander.errors import ConfigError, NotReady

NAMESPACE: Final = "iskander"
"""Namespace of all actors of fleets, so that every driver of the cluster finds them."""
SERVER_CALLS: Final = 8
"""Concurrent calls of a server's actor; a call that waits does not block other calls."""

_NOT_INSTALLED: Final = (
    "iskander.ray needs Ray, which is not installed: `pip install 'iskander[ray]'`"
)


class ClusterNode(NamedTuple):
    """A node of the cluster: its id, the IP address that Ray uses, and Ray's own entry."""

    id: str
    host: str
    entry: Mapping[str, Any]


def ray() -> Any:  # noqa: ANN401
    """Return the module of Ray, connected to a cluster.

    Raises:
        ConfigError: Ray is not installed, or this process is not connected.
    """
    try:
        import ray as module
    except ImportError:
        raise ConfigError(_NOT_INSTALLED) from None
    if not module.is_initialized():
        raise ConfigError("this process is not connected to a Ray cluster; call ray.init() first")
    return module


def connect(address: str) -> None:
    """Connect this process to a cluster.

    `auto` is a cluster of this machine, `local` a new cluster.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster.
    """
    try:
        import ray as module
    except ImportError:
        raise ConfigError(_NOT_INSTALLED) from None
    try:
        module.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error"
        )
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster at {address!r}: {first_line(error)}; start one with "
            "`ray start --head`, or give its address"
        ) from error


def disconnect() -> None:
    """Disconnect this process from its cluster."""
    ray().shutdown()


def cpus() -> int:
    """Return the number of CPUs of the cluster."""
    return int(ray().cluster_resources().get("CPU", 1))


def alive_nodes() -> list[ClusterNode]:
    """Return the alive nodes of the cluster."""
    return [
        ClusterNode(entry["NodeID"], entry["NodeManagerAddress"], entry)
        for entry in ray().nodes()
        if entry["Alive"]
    ]


def own_node_id() -> str:
    """Return the id of this process's node."""
    return str(ray().get_runtime_context().get_node_id())


def own_host() -> str:
    """Return the IP address of this process's node."""
    return str(ray().util.get_node_ip_address())


def start_actor(
    kind: type,
    arguments: Mapping[str, Any],
    *,
    name: str,
    node_id: str,
    num_gpus: float,
    is_detached: bool,
) -> Any:  # noqa: ANN401
    """Start a named actor on a node; Ray restarts it there as long as the node is alive.

    The actor reserves no CPU: with a fraction of each CPU reserved, tasks of Ray Data that need
    a whole CPU would wait for ever. The arguments are small and plain, since a restart fails if Ray
    has put them in its object store.

    Raises:
        ConfigError: There is an actor with this name.
    """
    module = ray()
    strategy = module.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "num_cpus": 0,
        "num_gpus": num_gpus,
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": SERVER_CALLS,
        "scheduling_strategy": strategy(node_id, soft=False),
    }
    if is_detached:
        options["lifetime"] = "detached"
    try:
        return module.remote(kind).options(**options).remote(**arguments)
    except ValueError as error:
        raise ConfigError(f"the actor {name!r} cannot be created: {error}") from None


def named_actors(prefix: str) -> dict[str, Any]:
    """Return the actors whose names begin with a prefix, by the rest of their names."""
    module = ray()
    found: dict[str, Any] = {}
    for entry in module.util.list_named_actors(all_namespaces=True):
        name = entry["name"]
        if entry["namespace"] == NAMESPACE and name.startswith(prefix):
            try:
                found[name.removeprefix(prefix)] = module.get_actor(name, namespace=NAMESPACE)
            except ValueError:  # The actor has ended in the meantime.
                continue
    return found


def call_each(actors: Mapping[str, Any], method: str, *, timeout_s: float) -> dict[str, Any]:
    """Call a method of several actors; return the results that arrive, or Ray's error, by key.

    Actors without a result before the timeout are left out.
    """
    module = ray()
    keys = {getattr(actor, method).remote(): key for key, actor in actors.items()}
    if not keys:
        return {}
    done, _ = module.wait(list(keys), num_returns=len(keys), timeout=timeout_s)
    results: dict[str, Any] = {}
    for reference in done:
        try:
            results[keys[reference]] = module.get(reference, timeout=timeout_s)
        except module.exceptions.RayError as error:
            results[keys[reference]] = error
    return results


def is_dead(result: object) -> bool:
    """Return whether an actor has ended for good; Ray may still restart any other actor."""
    exceptions = ray().exceptions
    return isinstance(result, exceptions.RayActorError) and not isinstance(
        result, exceptions.ActorUnavailableError
    )


def end_actors(actors: Sequence[Any]) -> None:
    """End actors at once, without restarts."""
    module = ray()
    for actor in actors:
        module.kill(actor, no_restart=True)


def put(value: object) -> Any:  # noqa: ANN401
    """Keep a value in the cluster, for tasks to share; return its reference."""
    return ray().put(value)


def start_task(function: Callable[..., Any], *arguments: object, retries: int) -> Any:  # noqa: ANN401
    """Start a task that reserves one CPU; Ray runs it again if its node or process is lost."""
    return _remote(function).options(num_cpus=1, max_retries=retries).remote(*arguments)


@functools.cache
def _remote(function: Callable[..., Any]) -> Any:  # noqa: ANN401
    """Return Ray's form of a function for tasks; cached, so that Ray sends it once."""
    return ray().remote(function)


def is_done(task: Any, *, within_s: float) -> bool:  # noqa: ANN401
    """Wait for a task; return whether it has ended."""
    return bool(ray().wait([task], timeout=within_s)[0])


def result_of(task: Any) -> Any:  # noqa: ANN401
    """Return the result of a task that has ended.

    Raises:
        NotReady: Ray lost the task more often than it may run again.
    """
    exceptions = ray().exceptions
    try:
        return ray().get(task)
    except exceptions.RayTaskError:
        raise
    except exceptions.RayError as error:
        raise NotReady(f"Ray lost the task: {first_line(error)}") from error


def cancel_task(task: Any) -> None:  # noqa: ANN401
    """End a task and its process."""
    ray().cancel(task, force=True)


def first_line(error: object) -> str:
    """Return the last line of an error's text that is not empty, for a message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
