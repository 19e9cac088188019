"""Construction of the sources of a gateway process, and their private listener.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from iskander.config.schema import Config, ServerConfig
from iskander.gateway.protocols.flight.service import FlightService
from iskander.gateway.protocols.flight.sources import FlightSources
from iskander.gateway.repository.models import Models
from iskander.gateway.sources.keys import operators_key, shared_key
from iskander.gateway.sources.readers import Readers
from iskander.gateway.supervision.worker import SlotPlan
from iskander.interprocess.control.runtime_directory import Member

SOCKET: Final = "reads.sock"
"""Socket in the runtime directory on which the processes that read sources call the gateway."""


def create_sources(
    config: Config,
    runtime: Path,
    member: Member,
    models: Models,
    service: FlightService,
    slots: Sequence[SlotPlan],
) -> FlightSources | None:
    """Create the sources of a configuration; None without any.

    Args:
        config: Configuration.
        runtime: Runtime directory of this process.
        member: This process among those of the gateway, which share a key.
        models: Models that score the rows.
        service: Service that describes the models.
        slots: Workers, whose cpus the reader processes use if the gateway has its own.

    Raises:
        ConfigError: The key cannot be read.
    """
    if not config.sources:
        return None
    reads = config.source_reads
    if reads.key_file:
        key = operators_key(Path(reads.key_file))
    else:
        key = shared_key(runtime.parent if member.peers else runtime)
    cpus = {cpu for slot in slots for cpu in slot.cpus} if config.server.cores else ()
    return FlightSources(
        config.sources,
        reads,
        key=key,
        address=f"unix:{runtime / SOCKET}",
        readers=Readers(reads, config.limits.message_bytes, frozenset(cpus)),
        find=models.find_loaded,
        describe=service.describe,
    )


def private_listener(config: ServerConfig) -> ServerConfig:
    """Settings of the listener of reader processes: a socket for the server's user only."""
    return msgspec.structs.replace(config, unix_mode="0600", unix_owner="")
