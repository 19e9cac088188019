"""Settings that the parent of several processes has accepted: what a process is started with.

A process does not read the configuration file: it may have been edited since, for a restart that is
still to come. It gets what its parent goes by, complete, from a file beside its sockets.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from iskander.config.schema import Config
from iskander.errors import ConfigError

SETTINGS_FILE = "settings.json"


def write_settings(config: Config, folder: Path) -> Path:
    """Put settings where the process with that runtime directory reads them.

    Raises:
        OSError: The system refused it.
    """
    server = msgspec.structs.replace(config.server, runtime_directory=str(folder))
    path = folder / SETTINGS_FILE
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(config, server=server)))
    return path


def read_settings(path: Path) -> Config:
    """What `write_settings` put there; nothing is taken from the environment.

    Raises:
        ConfigError: It is not there, or none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Config)
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path.name} is not what a parent writes: {error}") from None


def fixed(config: Config) -> dict[str, object]:
    """What the processes have to agree on with each other, with the parent and with the workers."""
    server, workers = config.server, config.workers
    return {
        "server.address": config.addresses,
        "server.processes": server.processes,
        "server.cores": server.cores,
        "workers.groups": workers.groups,
        "workers.count": workers.count,
        "workers.thread_pool": workers.thread_pool,
        "workers.busy_poll_us": workers.busy_poll_us,
        "workers of models": [
            (model.pool, model.own_workers, model.python, model.intra_threads)
            for model in config.models
            if model.own_workers
        ],
        "admin.address": config.admin.address,
        "http.address": config.http.address,
        "inferential.address": config.inferential.address,
    }
