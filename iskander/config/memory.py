"""Shares of `server.memory`: arenas, received bytes, HTTP bodies, regions of clients.

    an eighth     the input arenas of all gateway processes
    an eighth     the output arenas of all workers
    an eighth     `limits.receive_bytes`
    a sixteenth   `http.bodies_bytes` of all gateway processes, if `http.address` is set
    an eighth     `shared_memory.total_bytes` of all, if `shared_memory.path` is set

A share is at least what the largest batch needs. A setting that the configuration has itself keeps
its value. The rest is for the processes and their models.

Pure.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import msgspec

from iskander.config.loader import Loaded
from iskander.config.schema import HEADER_BYTES_MAX, Config
from iskander.config.section import MIB
from iskander.errors import ConfigError

SETTING: Final = "server.memory"
GATEWAY_BYTES: Final = 160 * MIB
"""Resident bytes of a gateway process, without its arena."""
WORKER_BYTES: Final = 130 * MIB
"""Resident bytes of a worker with a small model, without arenas."""
_TEXT: Final = re.compile(r"(?P<number>\d{1,9}(\.\d{1,3})?) ?(?P<unit>MiB|GiB|TiB|%)")
_UNITS: Final = {"MiB": MIB, "GiB": 1024 * MIB, "TiB": 1024 * 1024 * MIB}


class Share(NamedTuple):
    """A setting that is a share of `server.memory`.

    Attributes:
        path: `section.key` of the setting.
        allocations: How often the server allocates the setting's bytes.
        part: Divisor: all allocations of the setting together get 1 / part of `server.memory`.
        least_bytes: Bytes that the largest batch needs.
    """

    path: str
    allocations: int
    part: int
    least_bytes: int


class Division(NamedTuple):
    """A configuration with the shares of its memory.

    Attributes:
        loaded: The configuration; the origin of a share is `server.memory`.
        total_bytes: The memory of the server; 0 without the setting.
        bytes_by_setting: Bytes of all allocations of each share, by the path of the setting.
        left_bytes: Bytes for the processes and their models.
    """

    loaded: Loaded
    total_bytes: int
    bytes_by_setting: dict[str, int]
    left_bytes: int

    @property
    def shares(self) -> str:
        """The shares, for the log and for errors."""
        sizes = self.bytes_by_setting.items()
        return ", ".join(f"{path} {size // MIB:,} MiB" for path, size in sizes)


def divide(loaded: Loaded, workers: int, machine_bytes: int) -> Division:
    """Return a configuration in which the shares of `server.memory` are set.

    Args:
        loaded: A checked configuration.
        workers: Number of workers.
        machine_bytes: Memory of the machine, or of the cgroup if less.

    Raises:
        ConfigError: The machine has less memory, or it is too little for the settings.
    """
    config = loaded.config
    if not config.server.memory:
        return Division(loaded, 0, {}, 0)
    total_bytes = _read(config.server.memory, machine_bytes)
    origins, sizes = dict(loaded.origins), {}
    sections: dict[str, dict[str, int]] = {}
    for share in _shares(config, workers):
        section, key = share.path.split(".")
        size: int = getattr(getattr(config, section), key)
        if share.path not in loaded.origins:
            size = max(total_bytes // share.part // share.allocations, share.least_bytes)
            sections.setdefault(section, {})[key] = size
            origins[share.path] = SETTING
        sizes[share.path] = size * share.allocations
    processes_bytes = config.server.processes * GATEWAY_BYTES + workers * WORKER_BYTES
    changed = {
        name: msgspec.structs.replace(getattr(config, name), **values)
        for name, values in sections.items()
    }
    loaded = Loaded(msgspec.structs.replace(config, **changed), origins, loaded.warnings)
    division = Division(loaded, total_bytes, sizes, total_bytes - sum(sizes.values()))
    if division.left_bytes < processes_bytes:
        raise ConfigError(
            f"{SETTING} = {config.server.memory!r} is too little: {division.shares}, and the "
            f"processes without models {processes_bytes // MIB:,} MiB. Raise it, or lower these "
            "settings, limits.bytes or limits.message_bytes"
        )
    return division


def _read(text: str, machine_bytes: int) -> int:
    """Return the bytes that `server.memory` names."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{SETTING} = {text!r}: expected a number of MiB, GiB or TiB, or a percentage of the "
            'memory of the machine, such as "8 GiB" or "50 %"'
        )
    number, unit = float(match["number"]), match["unit"]
    named_bytes = int(machine_bytes * number / 100 if unit == "%" else number * _UNITS[unit])
    if named_bytes > machine_bytes:
        raise ConfigError(
            f"{SETTING} = {text!r}: the machine, or the cgroup of the server, has "
            f"{machine_bytes // MIB:,} MiB"
        )
    return named_bytes


def _shares(config: Config, workers: int) -> list[Share]:
    limits, processes = config.limits, config.server.processes
    batch_bytes = limits.bytes + HEADER_BYTES_MAX
    shares = [
        Share("arena.input_bytes", processes, 8, batch_bytes),
        Share("arena.output_bytes", processes * max(workers, 1), 8, 16 * MIB),
        Share("limits.receive_bytes", 1, 8, 2 * limits.message_bytes * processes),
    ]
    if config.http.address:
        shares.append(Share("http.bodies_bytes", processes, 16, limits.message_bytes))
    if config.shared_memory.path:
        region_bytes = config.shared_memory.region_bytes
        shares.append(Share("shared_memory.total_bytes", processes, 8, region_bytes))
    return shares
