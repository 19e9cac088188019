"""Needs of a configuration: memory, descriptors, threads, placement.

Pure: a configuration and a topology in, numbers out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from iskander.config.memory import GATEWAY_BYTES, WORKER_BYTES
from iskander.config.models import ModelConfig
from iskander.config.schema import Config
from iskander.gateway.supervision.gpus.device import PREFIX, Gpu
from iskander.gateway.supervision.placement.plan import PlacementPlan, plan
from iskander.gateway.supervision.placement.topology import Topology
from iskander.gateway.transport.limits.descriptors import RESERVED_MAX
from iskander.interprocess.memory.backing import huge_pages_needed

GATEWAY_TASKS, WORKER_TASKS = 40, 8
"""Threads of a gateway process with its pool for files, and of a worker beside its models'."""


class Demand(NamedTuple):
    """What a gateway with a configuration needs."""

    config: Config
    placed: PlacementPlan

    @property
    def arenas(self) -> list[int]:
        """Bytes of each arena of all gateway processes."""
        arena, slots = self.config.arena, self.placed.slots
        sizes = [arena.input_bytes] + len(slots) * [arena.output_bytes]
        return self.config.server.processes * sizes

    @property
    def huge_pages(self) -> int:
        """Pages of 2 MiB that back all arenas."""
        return sum(map(huge_pages_needed, self.arenas))

    @property
    def private_bytes(self) -> int:
        """Private bytes of all processes, about, without the models."""
        return self.config.server.processes * GATEWAY_BYTES + len(self.placed.slots) * WORKER_BYTES

    @property
    def files(self) -> int:
        """Descriptors of a gateway process at all of its limits."""
        config = self.config
        connections = [config.limits.connections, 2 * config.shared_memory.regions]
        if config.http.address:
            connections.append(config.http.connections)
        if config.inferential.address:
            connections.append(config.inferential.connections)
        return sum(connections) + RESERVED_MAX

    @property
    def tasks(self) -> int:
        """Threads of all processes, about."""
        models = max(len(self.config.models), 1)
        pools = 1 if self.config.workers.thread_pool == "worker" else models
        workers = sum(WORKER_TASKS + slot.cores * pools for slot in self.placed.slots)
        return self.config.server.processes * GATEWAY_TASKS + workers

    @property
    def providers(self) -> list[str]:
        """Execution providers that the models name."""
        named: Iterable[str] = (
            provider for model in self.config.models for provider in model.execution_providers
        )
        return list(dict.fromkeys(named))


def demand_of(config: Config, topology: Topology, gpus: Sequence[Gpu] = ()) -> Demand:
    """Return the needs of a configuration; raise ConfigError if it does not fit the machine.

    Without GPUs, the cpus are those of the same models without one: another check reports it.
    """
    return Demand(config, plan(config if gpus else _without_gpus(config), topology, gpus))


def _without_gpus(config: Config) -> Config:
    """Return a configuration with its models on workers without a GPU."""
    groups = config.workers.groups
    if not isinstance(groups, str):
        groups = tuple(each for each in groups if not each.startswith(PREFIX)) or "auto"
    replace = msgspec.structs.replace
    models = tuple(replace(model, placement="cpu") for model in config.models)
    return replace(config, models=models, workers=replace(config.workers, groups=groups))


def default_demand(topology: Topology) -> Demand:
    """Return the needs of the default settings with one model."""
    model = ModelConfig(name="model", path="/", version="1")
    return demand_of(msgspec.structs.replace(Config(), models=(model,)), topology)
