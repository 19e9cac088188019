"""Placement plan of a configuration for this machine: its cpus, and GPUs if wanted.

Runs on: the gateway before its loop, and the operator's tool.
"""

from __future__ import annotations

import os

from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.gateway.supervision.gpus.placement import wants_gpus
from iskander.gateway.supervision.gpus.query import Devices, read_devices
from iskander.gateway.supervision.placement.plan import PlacementPlan, plan
from iskander.gateway.supervision.placement.topology import read_topology


def plan_machine(config: Config) -> PlacementPlan:
    """Return the plan for the cpus and the GPUs that this process may use.

    Raises:
        ConfigError: As `plan`.
    """
    topology = read_topology(os.sched_getaffinity(0))
    devices = read_devices() if wants_gpus(config) else Devices()
    try:
        placed = plan(config, topology, devices.gpus)
    except ConfigError as error:
        if devices.gpus or not devices.notes:
            raise
        raise ConfigError(f"{error.message} ({'; '.join(devices.notes)})") from None
    return placed._replace(notes=(*placed.notes, *devices.notes))
