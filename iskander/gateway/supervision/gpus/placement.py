"""Workers with a GPU: selected devices, the cores near them, and the models that share them.

Pure. Each device has a group with one worker for all models that may use a GPU, and workers of
models that have workers of their own. The cores of a group are near the card.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import msgspec

from iskander.config.models import ModelConfig
from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.gateway.supervision.gpus.budgets import (
    Share,
    budget_of,
    require_budget,
    share_of,
    shortage,
)
from iskander.gateway.supervision.gpus.device import ALL, PREFIX, Gpu
from iskander.gateway.supervision.placement.topology import Topology
from iskander.gateway.supervision.worker import SlotPlan

Cpus = tuple[int, ...]

GPU_CORES = 4
"""Most physical cores of a group beside workers without a GPU: one thread starts the kernels and
copies, the others run operators that stay on the CPU and post-processing."""
KEPT_SHARE = 2
"""The groups of GPUs take at most one of so many cores from workers without a GPU."""


class GpuGroup(NamedTuple):
    """A device with its cpus; `shares_cores`: they also belong to other groups."""

    gpu: Gpu
    cpus: Cpus
    shares_cores: bool = False


def wants_gpus(config: Config) -> bool:
    """Return whether the plan of a configuration needs to know the GPUs."""
    if any(each.startswith(PREFIX) for each in _entries(config)):
        return True
    return any("gpu" in model.devices for model in config.models)


def select_gpus(config: Config, gpus: Sequence[Gpu]) -> list[Gpu]:
    """Return the devices of `workers.groups`, in its order.

    Raises:
        ConfigError: An entry names no device or several, or a model needs one and there is none.
    """
    selected: list[Gpu] = []
    for where, text in _named(config):
        found = list(gpus) if text == ALL else [gpu for gpu in gpus if gpu.is_named(text)]
        if not found:
            raise ConfigError(f"{where}: {_missing(gpus, text)}")
        if text != ALL and len(found) > 1:
            names = ", ".join(gpu.uuid for gpu in found)
            raise ConfigError(f"{where} names several GPUs: {names}")
        if twice := [gpu.title for gpu in found if gpu in selected]:
            raise ConfigError(f"{where}: {twice[0]} is in another group too")
        selected += found
    if isinstance(config.workers.groups, str) and any("gpu" in m.devices for m in config.models):
        selected = list(gpus)
    if not selected:
        _require_no_need(config, gpus)
    return selected


def _entries(config: Config) -> tuple[str, ...]:
    groups = config.workers.groups
    return () if isinstance(groups, str) else groups


def _named(config: Config) -> list[tuple[str, str]]:
    """Return where each GPU is named, and its name without the prefix."""
    return [
        (f'workers.groups[{index}] = "{text}"', text.removeprefix(PREFIX))
        for index, text in enumerate(_entries(config))
        if text.startswith(PREFIX)
    ]


def _missing(gpus: Sequence[Gpu], text: str) -> str:
    if not gpus:
        return "this machine has no GPU that this process may use"
    slices = [gpu for gpu in gpus if gpu.parent and text in (str(gpu.index), gpu.parent, gpu.pci)]
    if slices:
        names = ", ".join(f"{PREFIX}{gpu.number}" for gpu in slices)
        return f"the card is divided into slices: name them, {names}"
    known = ", ".join(f"{PREFIX}{gpu.number} ({gpu.uuid}, {gpu.pci})" for gpu in gpus)
    return f"there is no such GPU; there are {known}"


def _require_no_need(config: Config, gpus: Sequence[Gpu]) -> None:
    """Raise ConfigError if a model needs a GPU, but no group has one."""
    for index, model in enumerate(config.models):
        if model.devices == ("gpu",):
            where = f"models[{index}] (`{model.name}`) needs a GPU"
            if gpus:
                known = ", ".join(f'"{PREFIX}{gpu.number}"' for gpu in gpus)
                reason = f"workers.groups lists none; add {known} or `{PREFIX}{ALL}`"
            else:
                reason = f"{_missing(gpus, '')}, and the CPU is not used instead"
            raise ConfigError(f"{where}: {reason}")


def gpu_groups(
    gpus: Sequence[Gpu], free: Topology, *, keeps_cores: bool
) -> tuple[list[GpuGroup], list[str]]:
    """Divide the cores near each card among the devices that are near them.

    Args:
        gpus: The selected devices.
        free: Cpus of no other group.
        keeps_cores: Other workers use the rest of the cpus.

    Returns:
        The groups in the order of `gpus`, and notes on cores that are not near or not their own.
    """
    by_cpus: dict[Cpus, list[Gpu]] = {}
    notes = []
    for gpu in gpus:
        near = tuple(sorted(free.numbers.intersection(gpu.cpus)))
        if not near:
            near = tuple(sorted(free.numbers))
            if gpu.cpus:
                notes.append(f"{gpu.title}: no free cpu is near it, so its worker uses others")
        if gpu.node is None and len(free.nodes) > 1:
            text = "the firmware reports no NUMA node, so its worker may be on another one"
            notes.append(f"{gpu.title}: {text}")
        by_cpus.setdefault(near, []).append(gpu)
    found: dict[Gpu, GpuGroup] = {}
    # The cards with the fewest near cores first: those with a known node.
    for near, cards in sorted(by_cpus.items(), key=lambda item: len(item[0])):
        taken = set(chain.from_iterable(group.cpus for group in found.values()))
        cores = free.only(set(near) - taken).cores
        count = len(cores)
        if keeps_cores:
            count = min(len(cores) // KEPT_SHARE, GPU_CORES * len(cards))
        if count < len(cards):
            titles = ", ".join(gpu.title for gpu in cards)
            notes.append(f"{titles}: too few cores are near, so their workers share them")
            found |= {gpu: GpuGroup(gpu, near, shares_cores=True) for gpu in cards}
            continue
        runs = _runs(cores[len(cores) - count :], len(cards))
        found |= {gpu: GpuGroup(gpu, run) for gpu, run in zip(cards, runs, strict=True)}
    return [found[gpu] for gpu in gpus], notes


def _runs(cores: Sequence[Cpus], count: int) -> list[Cpus]:
    """Split cores into runs whose lengths differ by at most one."""
    cuts = [run * len(cores) // count for run in range(count + 1)]
    return [tuple(sorted(chain.from_iterable(cores[a:b]))) for a, b in pairwise(cuts)]


def gpu_slots(config: Config, slots: Sequence[SlotPlan]) -> list[SlotPlan]:
    """Return the workers of the devices, with the budget of each: shared ones, then models' own.

    Args:
        config: The configuration.
        slots: One slot for each device.

    Raises:
        ConfigError: The models do not fit in a device, or too few workers are planned for one.
    """
    if not slots:
        return []
    models = [model for model in config.models if "gpu" in model.devices]
    shared = [share_of(model) for model in models if not model.own_workers]
    is_shared = bool(shared or config.repository.path)
    needs_gpu = any(m.devices == ("gpu",) and not m.own_workers for m in models)
    if needs_gpu and config.workers.quorum > len(slots):
        quorum = f"workers.quorum = {config.workers.quorum}"
        raise ConfigError(f"{quorum} can never be met: the plan has {len(slots)} GPUs")
    placed: list[list[Share]] = [list(shared) for _ in slots]
    counts = [int(is_shared) for _ in slots]
    own: list[tuple[int, ModelConfig]] = []
    for model in (m for m in models for _ in range(m.own_workers)):
        at = _roomiest(config, slots, placed, counts, share_of(model))
        placed[at].append(share_of(model))
        counts[at] += 1
        own.append((at, model))
    budgets = []
    for slot, shares, workers in zip(slots, placed, counts, strict=True):
        assert slot.gpu is not None
        require_budget(slot.gpu, shares, workers, config.workers.gpu_reserve_bytes)
        budgets.append(budget_of(slot.gpu, workers, config.workers.gpu_reserve_bytes))
    replace = msgspec.structs.replace
    filled = [
        replace(slot, gpu_budget_bytes=budget) for slot, budget in zip(slots, budgets, strict=True)
    ]
    found = list(filled) if is_shared else []
    return found + [replace(filled[at], pool=m.pool, python=m.python) for at, m in own]


def _roomiest(
    config: Config,
    slots: Sequence[SlotPlan],
    placed: Sequence[Sequence[Share]],
    counts: Sequence[int],
    share: Share,
) -> int:
    """Return the device for one more worker: one with space, few workers and much memory left."""

    def rank(at: int) -> tuple[bool, int, int, int]:
        gpu = slots[at].gpu
        assert gpu is not None
        budget = budget_of(gpu, counts[at] + 1, config.workers.gpu_reserve_bytes)
        used = sum(each.budget_bytes for each in placed[at])
        lacks_space = bool(gpu.memory_bytes and shortage([*placed[at], share], budget))
        return lacks_space, counts[at], used - budget, at

    return min(range(len(slots)), key=rank)
