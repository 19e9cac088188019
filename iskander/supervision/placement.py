"""Which process runs where: the gateway's cores, and core groups divided among the workers.

Pure: it decides from a `Topology`, and touches no core.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import msgspec

from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.supervision.topology import Topology, parse_cpu_list, render_cpu_list
from iskander.supervision.worker import SlotPlan

Item = TypeVar("Item")

LEFT_CORES = 2
"""Physical cores that `server.cores = "auto"` leaves of the node that it takes its own from: with
fewer, the models would lose half of them or all."""


class PlacementPlan(NamedTuple):
    """Where every process runs.

    Attributes:
        gateway: Cpus of the gateway; empty where it is not pinned.
        places: Of the workers, by their index.
        notes: What was asked for and is not so, and why; and what shares a core that need not.
    """

    gateway: tuple[int, ...]
    places: list[SlotPlan]
    notes: tuple[str, ...]


def plan(config: Config, topology: Topology) -> PlacementPlan:
    """Set the gateway's cores aside, and divide the core groups among the workers.

    Raises:
        ConfigError: Lists name cpus that are not there or share some, there are more workers than
            cpus or fewer than the quorum, nothing is left for a worker, or a model asks for more
            compute threads than its worker has cpus.
    """
    named = _named_groups(config, topology)
    gateway, note = _gateway_cpus(config, topology, named)
    notes = [note] if note else []
    if config.workers.groups == "l3" and not topology.has_l3:
        notes.append(
            'workers.groups = "l3" goes by NUMA node: the kernel tells of no L3 cache here'
        )
    groups = _groups(config, topology.only(topology.numbers - set(gateway)), named)
    if not groups:
        raise ConfigError(f'server.cores = "{config.server.cores}" leaves no cpu for a worker')
    own, left, crowded = _own(config, topology, groups)
    places = _places(config, topology, left)
    places += [
        msgspec.structs.replace(place, index=len(places) + at) for at, place in enumerate(own)
    ]
    notes += _across_nodes(groups, topology)
    notes += _shared_cores(gateway, places, topology) + crowded
    _require_threads(config, places)
    return PlacementPlan(gateway, places, tuple(notes))


def _named_groups(config: Config, topology: Topology) -> list[tuple[int, ...]]:
    """The groups of `workers.groups` where it is a list, else none."""
    if isinstance(config.workers.groups, str):
        return []
    groups: list[tuple[int, ...]] = []
    for index, text in enumerate(config.workers.groups):
        where = f'workers.groups[{index}] = "{text}"'
        cpus = _named_cpus(where, text, topology, "a cpu list")
        shared = sorted({cpu for group in groups for cpu in group} & set(cpus))
        if shared:
            raise ConfigError(f"{where}: the cpus {shared} are in another group too")
        groups.append(cpus)
    if not groups:
        raise ConfigError("workers.groups is an empty list: no worker could run")
    return groups


def _gateway_cpus(
    config: Config, topology: Topology, named: list[tuple[int, ...]]
) -> tuple[tuple[int, ...], str]:
    """The gateway's cpus, and why it has none where it was to have some."""
    text = config.server.cores
    if not text:
        return (), ""
    taken = set(chain.from_iterable(named))
    if text == "auto":
        return _spare_cores(topology, taken, config.server.processes)
    where = f'server.cores = "{text}"'
    cpus = _named_cpus(where, text, topology, "`auto` or a cpu list")
    shared = sorted(taken & set(cpus))
    if shared:
        raise ConfigError(f"{where}: the cpus {shared} are in workers.groups too")
    return cpus, ""


def _named_cpus(where: str, text: str, topology: Topology, wanted: str) -> tuple[int, ...]:
    try:
        cpus = parse_cpu_list(text)
    except ValueError:
        raise ConfigError(f"{where}: wanted {wanted} such as 0-3,8") from None
    missing = sorted(set(cpus) - topology.numbers)
    if missing or not cpus:
        raise ConfigError(
            f"{where}: this process may not use the cpus {missing or 'of an empty list'}; "
            f"it may use {render_cpu_list(topology.numbers)}"
        )
    return cpus


def _spare_cores(
    topology: Topology, taken: set[int], processes: int
) -> tuple[tuple[int, ...], str]:
    """A whole core for each process: what no group names, or of the first node with enough."""
    if taken:
        free = [core for core in topology.cores if not taken.intersection(core)]
        reason = "workers.groups leaves no whole core free"
    else:
        least = processes + LEFT_CORES
        nodes = (topology.only(cpus).cores for cpus in topology.nodes.values())
        free = next((cores for cores in nodes if len(cores) >= least), [])
        reason = f"no NUMA node has {least} physical cores or more that may be used"
    if free:
        return tuple(sorted(chain.from_iterable(free[:processes]))), ""
    return (), f'the gateway has no core of its own with server.cores = "auto": {reason}'


def _groups(
    config: Config, topology: Topology, named: list[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    if named:
        return named
    by = topology.domains if config.workers.groups == "l3" else topology.nodes
    return list(by.values())


def _own(
    config: Config, topology: Topology, groups: list[tuple[int, ...]]
) -> tuple[list[SlotPlan], list[tuple[int, ...]], list[str]]:
    """Places of workers that serve one model: as many cores as it has threads, from a group's end.

    The workers go to the groups in turn. Where a group has too few cores for all, one of these
    shares those of others.

    Returns:
        The places, still without numbers of their own; what they leave of each group; and who
        shares cores.
    """
    left, places, notes = list(groups), [], []
    shared = config.has_shared_models
    models = [model for model in config.models for _ in range(model.own_workers)]
    for ordinal, model in enumerate(models):
        group = ordinal % len(groups)
        cores, threads = topology.only(left[group]).cores, max(model.intra_threads, 1)
        is_alone = len(cores) - threads >= (max(config.workers.count, 1) if shared else 0)
        if not is_alone:
            cores = topology.only(groups[group]).cores
            notes.append(
                f"a worker of model `{model.name}` shares cores with others: group {group} has too "
                "few for all"
            )
        mine = tuple(sorted(chain.from_iterable(cores[-threads:])))
        if is_alone:
            left[group] = tuple(cpu for cpu in left[group] if cpu not in mine)
        here = topology.only(mine)
        node = _node_of(here, topology)
        domains = tuple(here.domains) if topology.has_l3 else ()
        places.append(
            SlotPlan(
                index=0,
                group=group,
                cpus=mine,
                node=node,
                cores=len(here.cores),
                domains=domains,
                pool=model.pool,
                python=model.python,
            )
        )
    return places, left, notes


def _node_of(part: Topology, topology: Topology) -> int | None:
    """Several nodes that may be used, or there is nothing to prefer."""
    return next(iter(part.nodes)) if len(topology.nodes) > 1 and len(part.nodes) == 1 else None


def _places(config: Config, topology: Topology, groups: list[tuple[int, ...]]) -> list[SlotPlan]:
    """Places of the workers that serve all models."""
    if not config.has_shared_models:
        return []
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
    places: list[SlotPlan] = []
    for group, cpus in enumerate(groups):
        shares = count // len(groups) + (group < count % len(groups))
        if shares > len(cpus):
            raise ConfigError(
                f"workers.count = {count} puts {shares} workers on the {len(cpus)} cpus of group "
                f"{group}: each needs one of its own"
            )
        here = topology.only(cpus)
        node = _node_of(here, topology)
        for mine in _divide(here, shares):
            part = here.only(mine)
            domains = tuple(part.domains) if topology.has_l3 else ()
            places.append(SlotPlan(len(places), group, mine, node, len(part.cores), domains))
    return places


def _divide(group: Topology, shares: int) -> list[tuple[int, ...]]:
    """Whole cores, neighbours together; or, of fewer cores than workers, each worker in one."""
    cores = group.cores
    if shares <= len(cores):
        return [tuple(sorted(chain.from_iterable(run))) for run in _runs(cores, shares)]
    workers = [1] * len(cores)
    for _ in range(shares - len(cores)):
        roomiest = max(range(len(cores)), key=lambda at: len(cores[at]) / workers[at])
        workers[roomiest] += 1
    parts = zip(cores, workers, strict=True)
    return [tuple(run) for core, count in parts for run in _runs(core, count)]


def _runs(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """Cut into runs whose lengths differ by one at most."""
    return [
        items[run * len(items) // count : (run + 1) * len(items) // count] for run in range(count)
    ]


def _across_nodes(groups: list[tuple[int, ...]], topology: Topology) -> list[str]:
    return [
        f"group {group} lies on the NUMA nodes {', '.join(map(str, nodes))}: its workers prefer "
        "the memory of none"
        for group, cpus in enumerate(groups)
        if len(nodes := topology.only(cpus).nodes) > 1
    ]


def _shared_cores(
    gateway: tuple[int, ...], places: list[SlotPlan], topology: Topology
) -> list[str]:
    """A line where siblings went to different processes, which slow each other down."""
    holder = dict.fromkeys(gateway, "the gateway")
    for place in places:
        holder |= dict.fromkeys(place.cpus, f"worker {place.index}")
    shared: dict[tuple[str, ...], list[tuple[int, ...]]] = defaultdict(list)
    for core in topology.cores:
        holders = tuple(dict.fromkeys(holder[cpu] for cpu in core if cpu in holder))
        if len(holders) > 1:
            shared[holders].append(core)
    if not shared:
        return []
    (holders, cores), *_ = shared.items()
    more = f", and {len(shared) - 1} more pairs like it" if len(shared) > 1 else ""
    return [
        f"{' and '.join(holders)} share a physical core: its cpus are "
        f"{render_cpu_list(cores[0])}{more}"
    ]


def _require_threads(config: Config, places: list[SlotPlan]) -> None:
    for index, model in enumerate(config.models):
        keys = f"intra_threads = {model.intra_threads}"
        if model.parallel_execution:
            keys += f" and inter_threads = {model.inter_threads}"
        for place in places:
            if place.pool != model.pool:
                continue
            threads = model.intra_threads or place.cores
            if model.parallel_execution:
                threads += max(model.inter_threads, 1) - 1
            if threads > len(place.cpus):
                raise ConfigError(
                    f"models[{index}] (`{model.name}`): {keys} make {threads} compute threads, and "
                    f"worker {place.index} has {len(place.cpus)} cpus"
                )
