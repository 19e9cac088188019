"""Settings file from the parent to a child process.

A child does not read the configuration file, which may contain edits that only a restart applies.
It receives the complete settings of its parent in a file next to its sockets, and reads them again
after `RELOAD_SIGNAL`.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Final

import msgspec

from iskander.config.models import REMOTE
from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.gateway.supervision.placement.plan import shared_devices

SETTINGS_FILE = "settings.json"
RELOAD_SIGNAL: Final = signal.SIGUSR1
"""SIGHUP ends a child, which another one replaces."""


def write_settings(config: Config, folder: Path) -> Path:
    """Write settings for the child with this runtime directory; may raise OSError."""
    server = msgspec.structs.replace(config.server, runtime_directory=str(folder))
    path = folder / SETTINGS_FILE
    written = path.with_suffix(".new")
    written.write_bytes(msgspec.json.encode(msgspec.structs.replace(config, server=server)))
    return written.replace(path)


def read_settings(path: Path) -> Config:
    """Read the settings of `write_settings`; raise ConfigError if they are invalid."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Config)
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path.name} is not a settings file of a parent: {error}") from None


def fixed(config: Config) -> dict[str, object]:
    """Return the settings that only a restart of all processes can change."""
    server, workers = config.server, config.workers
    return {
        "server.address": config.addresses,
        "server.processes": server.processes,
        "server.cores": server.cores,
        "server.runtime_directory": server.runtime_directory,
        "workers.groups": workers.groups,
        "workers.count": workers.count,
        "workers.thread_pool": workers.thread_pool,
        "workers.busy_poll_us": workers.busy_poll_us,
        "workers.reattach_s": workers.reattach_s,
        "shared workers": shared_devices(config),
        "workers of models": [
            (
                model.pool,
                model.own_workers,
                model.python,
                model.intra_threads,
                model.devices,
                model.backend == REMOTE,
            )
            for model in config.models
            if model.own_workers
        ],
        "workers.gpu_reserve_bytes": workers.gpu_reserve_bytes,
        "GPUs of models": [
            (model.name, model.version, model.devices, model.gpu_memory_bytes)
            for model in config.models
            if "gpu" in model.devices
        ],
        "admin.address": config.admin.address,
        "admin.tls": config.admin.tls,
        "admin.page": config.admin.page,
        "admin.log_format": config.admin.log_format,
        "events": config.events,
        # The parent verifies the tokens of subscribers, and its admin port has the certificate.
        "access": config.access if config.events.enabled else None,
        "tls": config.tls if config.admin.tls else None,
        "http.address": config.http.address,
        "inferential.address": config.inferential.address,
    }
