"""Placement plan: the gateway's cores, core groups divided among the workers, and GPUs.

Pure: the input is a `Topology` and the GPUs, and no affinity is set. `gpus.placement` decides about
the workers with a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple, TypeVar

import msgspec

from iskander.config.models import REMOTE, ModelConfig
from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.gateway.supervision.gpus.device import PREFIX, Gpu
from iskander.gateway.supervision.gpus.placement import (
    GpuGroup,
    gpu_groups,
    gpu_slots,
    select_gpus,
    wants_gpus,
)
from iskander.gateway.supervision.placement.topology import (
    Topology,
    parse_cpu_list,
    render_cpu_list,
)
from iskander.gateway.supervision.worker import SlotPlan

Item = TypeVar("Item")
Cpus = tuple[int, ...]

KINDS = ("auto", "l3")
"""Values of `workers.groups` that follow the topology."""
SPARE_CORES = 2
"""Physical cores that `server.cores = "auto"` leaves to the workers of the gateway's node: with
fewer, the models would lose half of them or all."""


class PlacementPlan(NamedTuple):
    """Placement of every process.

    Attributes:
        gateway: Cpus of the gateway; empty if it is not pinned.
        slots: Placement of the worker slots, by index.
        notes: Settings that could not be applied, with the reason, and avoidable core sharing.
    """

    gateway: Cpus
    slots: list[SlotPlan]
    notes: tuple[str, ...]


def plan(config: Config, topology: Topology, gpus: Sequence[Gpu] = ()) -> PlacementPlan:
    """Reserve the gateway's cores and divide core groups and GPUs among the workers.

    Raises ConfigError if an entry of `workers.groups` is invalid or overlaps another one, if cpus,
    workers or compute threads exceed a limit, or if models do not fit in the memory of a GPU.
    """
    listed = _listed_groups(config, topology)
    kind = _kind_of_groups(config, listed)
    gateway, note = _gateway_cpus(config, topology, listed)
    notes = [note] if note else []
    if kind == "l3" and not topology.has_l3:
        notes.append('workers.groups = "l3" uses NUMA nodes: the kernel reports no L3 cache')
    usable = topology.only(topology.numbers - set(gateway))
    if not usable.cpus:
        raise ConfigError(f'server.cores = "{config.server.cores}" leaves no cpu for a worker')
    selected = select_gpus(config, gpus)
    on_cpus = _models_on_cpus(config, has_gpus=bool(selected))
    needs_cores = bool(kind and (on_cpus or config.repository.path))
    # Listed cpus are for the workers of their group only, if there are others.
    free = usable.only(usable.numbers - set(chain.from_iterable(listed)))
    devices, gpu_notes = gpu_groups(
        selected, free if free.cpus else usable, keeps_cores=needs_cores
    )
    groups = listed
    if kind:
        taken = chain.from_iterable(each.cpus for each in devices if not each.shares_cores)
        left = usable.only(usable.numbers - set(taken) if needs_cores else usable.numbers)
        groups = list((left.domains if kind == "l3" else left.nodes).values())
    elif not groups:
        _require_no_cores(config, on_cpus)
    own, rest, shared_notes = _own_slots(on_cpus, topology, groups, _shared_count(config))
    shared = _shared_slots(config, topology, rest)
    remote = _remote_slots(on_cpus, topology, groups)
    accelerated = gpu_slots(config, _device_slots(devices, topology, len(groups)))
    placed = enumerate([*shared, *accelerated, *own, *remote])
    slots = [
        msgspec.structs.replace(slot, index=at, hides_gpus=bool(accelerated) and slot.gpu is None)
        for at, slot in placed
    ]
    computing = slots[: len(slots) - len(remote)]
    notes += gpu_notes
    notes += _notes_on_nodes(groups, topology)
    notes += _notes_on_shared_cores(gateway, computing, topology) + shared_notes
    _require_threads(config, slots)
    return PlacementPlan(gateway, slots, tuple(notes))


def shared_devices(config: Config) -> set[str]:
    """Return the kinds of workers, `cpu` and `gpu`, that several models may share."""
    devices = {device for m in config.models if not m.own_workers for device in m.devices}
    if config.repository.path:
        devices |= {"cpu", "gpu"} if wants_gpus(config) else {"cpu"}
    return devices


def _listed_groups(config: Config, topology: Topology) -> list[Cpus]:
    """Return the cpu lists of `workers.groups`."""
    if isinstance(config.workers.groups, str):
        return []
    groups: list[Cpus] = []
    for index, text in enumerate(config.workers.groups):
        if text.startswith(PREFIX) or text in KINDS:
            continue
        where = f'workers.groups[{index}] = "{text}"'
        cpus = _parse_cpus(where, text, topology, "a cpu list")
        shared = sorted({cpu for group in groups for cpu in group} & set(cpus))
        if shared:
            raise ConfigError(f"{where}: the cpus {shared} are in another group too")
        groups.append(cpus)
    if not config.workers.groups:
        raise ConfigError("workers.groups is an empty list: no worker could run")
    return groups


def _kind_of_groups(config: Config, listed: list[Cpus]) -> str:
    """Return `auto` or `l3` if core groups follow the topology, else an empty text."""
    groups = config.workers.groups
    if isinstance(groups, str):
        return groups
    kinds = [each for each in groups if each in KINDS]
    if len(kinds) > 1 or (kinds and listed):
        raise ConfigError(f"workers.groups: `{kinds[0]}` takes the cores of all other core groups")
    return kinds[0] if kinds else ""


def _models_on_cpus(config: Config, *, has_gpus: bool) -> list[ModelConfig]:
    """Return the models with workers without a GPU.

    A model with workers of its own that may use both has them on GPUs.
    """
    return [
        model
        for model in config.models
        if "cpu" in model.devices
        and not (has_gpus and model.own_workers and "gpu" in model.devices)
    ]


def _require_no_cores(config: Config, on_cpus: list[ModelConfig]) -> None:
    """Raise ConfigError if a model needs a core group, and only GPUs are listed."""
    only = [model.name for model in on_cpus if "gpu" not in model.devices]
    if only:
        text = "workers.groups lists only GPUs; add a cpu list, `auto` or `l3`"
        raise ConfigError(f"model `{only[0]}` needs a core group: {text}")


def _shared_count(config: Config) -> int:
    """Return the workers of each group that need a core beside models' own ones."""
    return max(config.workers.count, 1) if "cpu" in shared_devices(config) else 0


def _gateway_cpus(config: Config, topology: Topology, listed: list[Cpus]) -> tuple[Cpus, str]:
    """Return the gateway's cpus, and a note if `auto` finds none."""
    text = config.server.cores
    if not text:
        return (), ""
    used = set(chain.from_iterable(listed))
    if text == "auto":
        return _auto_cores(topology, used, config.server.processes)
    where = f'server.cores = "{text}"'
    cpus = _parse_cpus(where, text, topology, "`auto` or a cpu list")
    shared = sorted(used & set(cpus))
    if shared:
        raise ConfigError(f"{where}: the cpus {shared} are in workers.groups too")
    return cpus, ""


def _parse_cpus(where: str, text: str, topology: Topology, expected: str) -> Cpus:
    try:
        cpus = parse_cpu_list(text)
    except ValueError:
        raise ConfigError(f"{where}: expected {expected} such as 0-3,8") from None
    missing = sorted(set(cpus) - topology.numbers)
    if not cpus:
        raise ConfigError(f"{where}: the cpu list is empty")
    if missing:
        text = f"this process may not use the cpus {missing}"
        raise ConfigError(f"{where}: {text}; it may use {render_cpu_list(topology.numbers)}")
    return cpus


def _auto_cores(topology: Topology, used: set[int], processes: int) -> tuple[Cpus, str]:
    """Return a whole core for each process, outside listed groups, else of one node; or a note."""
    if used:
        free = [core for core in topology.cores if not used.intersection(core)]
        reason = "workers.groups leaves no whole core free"
    else:
        least = processes + SPARE_CORES
        nodes = (topology.only(cpus).cores for cpus in topology.nodes.values())
        free = next((cores for cores in nodes if len(cores) >= least), [])
        reason = f"no NUMA node has {least} usable physical cores or more"
    if free:
        return tuple(sorted(chain.from_iterable(free[:processes]))), ""
    return (), f'the gateway has no core of its own with server.cores = "auto": {reason}'


def _own_slots(
    models: list[ModelConfig], topology: Topology, groups: list[Cpus], shared: int
) -> tuple[list[SlotPlan], list[Cpus], list[str]]:
    """Place the workers that serve one model each: one core for each compute thread.

    Groups take turns, and each gives its last cores. Returns the slots without final indexes, the
    rest of each group, and notes on shared cores.
    """
    rest, slots, notes = list(groups), [], []
    computing = [m for m in models if m.backend != REMOTE for _ in range(m.own_workers)]
    for ordinal, model in enumerate(computing):
        group = ordinal % len(groups)
        cores, threads = topology.only(rest[group]).cores, max(model.intra_threads, 1)
        is_alone = len(cores) - threads >= shared
        if not is_alone:
            cores = topology.only(groups[group]).cores
            subject = f"a worker of model `{model.name}` shares cores with others"
            notes.append(f"{subject}: group {group} has too few for all")
        cpus = tuple(sorted(chain.from_iterable(cores[-threads:])))
        if is_alone:
            rest[group] = tuple(cpu for cpu in rest[group] if cpu not in cpus)
        part = topology.only(cpus)
        slot = _slot(0, group, _preferred_node(part, topology), part)
        slots.append(msgspec.structs.replace(slot, pool=model.pool, python=model.python))
    return slots, rest, notes


def _remote_slots(
    models: list[ModelConfig], topology: Topology, groups: list[Cpus]
) -> list[SlotPlan]:
    """Place the workers of remote models, which wait for servers, on all cpus of a group."""
    remote = [m for m in models if m.backend == REMOTE for _ in range(m.own_workers)]
    slots = []
    for ordinal, model in enumerate(remote):
        group = ordinal % len(groups)
        part = topology.only(groups[group])
        slot = _slot(0, group, _preferred_node(part, topology), part)
        slots.append(msgspec.structs.replace(slot, pool=model.pool, python=model.python))
    return slots


def _device_slots(devices: list[GpuGroup], topology: Topology, first: int) -> list[SlotPlan]:
    """Return a slot for each device; their groups follow the core groups."""
    slots = []
    for group, device in enumerate(devices, first):
        part = topology.only(device.cpus)
        slot = _slot(0, group, _preferred_node(part, topology), part)
        slots.append(msgspec.structs.replace(slot, gpu=device.gpu))
    return slots


def _slot(index: int, group: int, node: int | None, part: Topology) -> SlotPlan:
    domains = tuple(part.domains) if part.has_l3 else ()
    return SlotPlan(index, group, tuple(sorted(part.numbers)), node, len(part.cores), domains)


def _preferred_node(part: Topology, topology: Topology) -> int | None:
    """Return the node of `part`; None if it spans nodes or the machine has only one."""
    return next(iter(part.nodes)) if len(topology.nodes) > 1 and len(part.nodes) == 1 else None


def _shared_slots(config: Config, topology: Topology, groups: list[Cpus]) -> list[SlotPlan]:
    """Place the workers that serve all models."""
    if not groups or not _shared_count(config):
        return []
    count = config.workers.count or len(groups)
    if count < len(groups):
        raise ConfigError(f"workers.count = {count} is less than the {len(groups)} core groups")
    if config.workers.quorum > count:
        quorum = f"workers.quorum = {config.workers.quorum}"
        raise ConfigError(f"{quorum} can never be met: the plan has {count} workers")
    slots: list[SlotPlan] = []
    for group, cpus in enumerate(groups):
        shares = count // len(groups) + (group < count % len(groups))
        if shares > len(cpus):
            text = f"{shares} workers on the {len(cpus)} cpus of group {group}"
            raise ConfigError(f"workers.count = {count} puts {text}: each needs one of its own")
        part = topology.only(cpus)
        node = _preferred_node(part, topology)
        for share in _divide(part, shares):
            slots.append(_slot(len(slots), group, node, part.only(share)))
    return slots


def _divide(group: Topology, shares: int) -> list[Cpus]:
    """Divide a group into runs of whole cores, or into parts of cores if there are too few."""
    cores = group.cores
    if shares <= len(cores):
        return [tuple(sorted(chain.from_iterable(run))) for run in _runs(cores, shares)]
    workers = [1] * len(cores)
    for _ in range(shares - len(cores)):
        least_loaded = max(range(len(cores)), key=lambda at: len(cores[at]) / workers[at])
        workers[least_loaded] += 1
    parts = zip(cores, workers, strict=True)
    return [tuple(run) for core, count in parts for run in _runs(core, count)]


def _runs(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """Split items into `count` runs whose lengths differ by at most one."""
    cuts = [run * len(items) // count for run in range(count + 1)]
    return [items[first:last] for first, last in pairwise(cuts)]


def _notes_on_nodes(groups: list[Cpus], topology: Topology) -> list[str]:
    return [
        f"group {group} spans the NUMA nodes {', '.join(map(str, nodes))}: its workers prefer the "
        "memory of none"
        for group, cpus in enumerate(groups)
        if len(nodes := topology.only(cpus).nodes) > 1
    ]


def _notes_on_shared_cores(gateway: Cpus, slots: list[SlotPlan], topology: Topology) -> list[str]:
    """Return a note if SMT siblings of one core belong to different processes."""
    owner = dict.fromkeys(gateway, "the gateway")
    for slot in slots:
        owner |= dict.fromkeys(slot.cpus, f"worker {slot.index}")
    shared: dict[tuple[str, ...], list[Cpus]] = defaultdict(list)
    for core in topology.cores:
        owners = tuple(dict.fromkeys(owner[cpu] for cpu in core if cpu in owner))
        if len(owners) > 1:
            shared[owners].append(core)
    if not shared:
        return []
    (owners, cores), *_ = shared.items()
    more = f", and {len(shared) - 1} more pairs like it" if len(shared) > 1 else ""
    cpus = render_cpu_list(cores[0])
    return [f"{' and '.join(owners)} share a physical core: its cpus are {cpus}{more}"]


def _require_threads(config: Config, slots: list[SlotPlan]) -> None:
    """Raise ConfigError if a model has more compute threads than a worker of it has cpus."""
    for index, model in enumerate(config.models):
        keys = f"intra_threads = {model.intra_threads}"
        if model.parallel_execution:
            keys += f" and inter_threads = {model.inter_threads}"
        for slot in slots:
            if slot.pool != model.pool or slot.device not in model.devices:
                continue
            threads = model.intra_threads or slot.cores
            if model.parallel_execution:
                threads += max(model.inter_threads, 1) - 1
            if threads > len(slot.cpus):
                limit = f"worker {slot.index} has {len(slot.cpus)} cpus"
                text = f"{keys} make {threads} compute threads, and {limit}"
                raise ConfigError(f"models[{index}] (`{model.name}`): {text}")
