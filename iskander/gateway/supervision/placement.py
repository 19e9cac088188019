"""Which worker runs where: core groups from the machine's topology, divided among the workers.

`plan` is pure; `read_topology` reads sysfs.

Source: Documentation/admin-guide/cputopology.rst and sysfs-devices-node of the Linux kernel.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from iskander.config import Config
from iskander.errors import ConfigError
from iskander.gateway.supervision.workers import Place


class Topology(NamedTuple):
    """The cores that this process may use, by NUMA node, in the nodes' order."""

    nodes: dict[int, tuple[int, ...]]

    @property
    def cpus(self) -> set[int]:
        """All of them."""
        return {cpu for cpus in self.nodes.values() for cpu in cpus}


def read_topology(sysfs: Path = Path("/sys")) -> Topology:
    """The machine as this process may use it; one node where the kernel says nothing of nodes."""
    allowed = os.sched_getaffinity(0)
    nodes = {}
    for folder in (sysfs / "devices/system/node").glob("node[0-9]*"):
        listed = parse_cpu_list((folder / "cpulist").read_text().strip())
        usable = tuple(cpu for cpu in listed if cpu in allowed)
        if usable:
            nodes[int(folder.name.removeprefix("node"))] = usable
    known = {cpu for cpus in nodes.values() for cpu in cpus}
    if known != allowed:
        nodes = {0: tuple(sorted(allowed))}
    return Topology(dict(sorted(nodes.items())))


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Read a kernel cpu list such as `0-3,8`.

    Raises:
        ValueError: It is none.
    """
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, dash, last = part.partition("-")
        low, high = int(first), int(last if dash else first)
        if not 0 <= low <= high < 1 << 16:
            raise ValueError(text)
        cpus.update(range(low, high + 1))
    return tuple(sorted(cpus))


def plan(config: Config, topology: Topology) -> list[Place]:
    """Divide the core groups among the workers.

    Raises:
        ConfigError: Groups name cores that are not there or share some, there are more workers
            than cores or fewer than the quorum, or a model asks for more compute threads than its
            worker has cores.
    """
    groups = _groups(config, topology)
    count = config.workers.count or len(groups)
    if count < len(groups):
        raise ConfigError(
            f"workers.count = {count} is less than the {len(groups)} core groups: a group would "
            "have no worker"
        )
    if config.workers.quorum > count:
        raise ConfigError(
            f"workers.quorum = {config.workers.quorum} can never be met: the plan has {count} "
            "workers"
        )
    places: list[Place] = []
    for group, cpus in enumerate(groups):
        shares = count // len(groups) + (group < count % len(groups))
        if shares > len(cpus):
            raise ConfigError(
                f"workers.count = {count} puts {shares} workers on the {len(cpus)} cores of group "
                f"{group}: each needs one of its own"
            )
        node = _node_of(cpus, topology)
        for share in range(shares):
            mine = cpus[share * len(cpus) // shares : (share + 1) * len(cpus) // shares]
            places.append(Place(len(places), group, mine, node))
    _require_threads(config, places)
    return places


def _groups(config: Config, topology: Topology) -> list[tuple[int, ...]]:
    if config.workers.groups == "auto":
        return list(topology.nodes.values())
    groups: list[tuple[int, ...]] = []
    for index, text in enumerate(config.workers.groups):
        where = f'workers.groups[{index}] = "{text}"'
        try:
            cpus = parse_cpu_list(text)
        except ValueError:
            raise ConfigError(f"{where}: wanted a cpu list such as 0-3,8") from None
        missing = sorted(set(cpus) - topology.cpus)
        if missing or not cpus:
            raise ConfigError(
                f"{where}: this process may not use the cores {missing or 'of an empty list'}; "
                f"it may use {sorted(topology.cpus)}"
            )
        shared = sorted({cpu for group in groups for cpu in group} & set(cpus))
        if shared:
            raise ConfigError(f"{where}: the cores {shared} are in another group too")
        groups.append(cpus)
    if not groups:
        raise ConfigError("workers.groups is an empty list: no worker could run")
    return groups


def _node_of(cpus: tuple[int, ...], topology: Topology) -> int | None:
    if len(topology.nodes) < 2:
        return None
    return next((node for node, own in topology.nodes.items() if set(cpus) <= set(own)), None)


def _require_threads(config: Config, places: list[Place]) -> None:
    for index, model in enumerate(config.models):
        keys = f"intra_threads = {model.intra_threads}"
        if model.parallel_execution:
            keys += f" and inter_threads = {model.inter_threads}"
        for place in places:
            threads = model.intra_threads or len(place.cpus)
            if model.parallel_execution:
                threads += max(model.inter_threads, 1) - 1
            if threads > len(place.cpus):
                raise ConfigError(
                    f"models[{index}] (`{model.name}`): {keys} make {threads} compute threads, and "
                    f"worker {place.index} has {len(place.cpus)} cores"
                )
