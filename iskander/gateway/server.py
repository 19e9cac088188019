"""The composition root: builds the parts, starts them in order, drains them in reverse.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from iskander import __version__
from iskander.clock import NS_PER_MS, NS_PER_S, now_ns
from iskander.config import Config
from iskander.errors import ConfigError
from iskander.gateway.addresses import require_addresses
from iskander.gateway.dispatch import Dispatcher
from iskander.gateway.frontends.flight import FlightService
from iskander.gateway.frontends.grpc_server import GrpcServer
from iskander.gateway.frontends.health import HealthService
from iskander.gateway.intake import Intake
from iskander.gateway.models import Models
from iskander.gateway.placement import plan, read_topology
from iskander.gateway.supervisor import Supervisor
from iskander.gateway.systemd import notify
from iskander.wire.attach import LockFile
from iskander.wire.channel import SOCKET_PATH_BYTES_MAX

log = logging.getLogger("iskander.server")

DRAIN_TURN_S = 0.01
GRACE_S = 1.0
GC_THRESHOLD = 20_000
"""Requests make a dozen containers each and leave no cycles; the default would look every 50."""


class Server:
    """One gateway.

    Args:
        config: Checked settings.

    Raises:
        ConfigError: The plan does not fit the machine, or another gateway has the directory.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        require_addresses(config)
        places = plan(config, read_topology())
        self._folder = runtime_directory(config)
        self._lock = LockFile(self._folder / "gateway.lock")
        if not self._lock.take():
            raise ConfigError(
                "server.runtime_directory: another gateway runs there; give this one its own"
            )
        self._started_ns = now_ns()
        self._is_stopping = False
        self._models = Models(config)
        self._intake = Intake(config.arena.input_bytes, config.limits.arena_wait_ms)
        self._dispatcher = Dispatcher(self._intake, self._models.by_key)
        self._health = HealthService(self._models, config.limits.streams)
        self._flight = FlightService(
            self._models,
            intake=self._intake,
            dispatcher=self._dispatcher,
            limits=config.limits,
            stats=self.stats,
        )
        self._grpc = GrpcServer(self._flight, self._health, config.limits.message_bytes)
        self._supervisor = Supervisor(
            config,
            places,
            folder=self._folder,
            lanes=self._models.by_key,
            intake=self._intake,
            dispatcher=self._dispatcher,
            on_change=self._health.publish,
        )
        self.addresses: list[str] = []

    async def start(self) -> None:
        """Listen, start the workers, and wait until every model is ready.

        Where a service manager starts the workers, listening is all that is waited for: they come
        after this gateway.

        Raises:
            IskanderError: An address, a model or a worker failed; says which.
        """
        config = self._config
        self.addresses = await self._grpc.start(config.server, config.addresses)
        self._supervisor.start()
        where = ", ".join(self.addresses)
        if config.workers.spawn:
            await self._supervisor.until_ready()
        # What lives now lives on: collections need not walk it again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        log.info("ready on %s after %d ms", where, (now_ns() - self._started_ns) // NS_PER_MS)
        notify(READY="1", STATUS=f"serving on {where}", X_ISKANDER_ADDRESS=self.addresses[0])

    async def drain(self) -> None:
        """Stop in order: not ready, take no more, finish what was accepted, let the workers go."""
        self._is_stopping = True
        notify(STOPPING="1", STATUS="draining")
        self._health.stop()
        self._flight.drain()
        deadline_ns = now_ns() + int(self._config.server.drain_s * NS_PER_S)
        log.info("draining %d streams", len(self._flight.exchanges))
        while self._flight.exchanges or self._dispatcher.in_flight:
            if now_ns() > deadline_ns:
                log.warning(
                    "%d streams and %d batches were not finished in time",
                    len(self._flight.exchanges),
                    self._dispatcher.in_flight,
                )
                break
            await asyncio.sleep(DRAIN_TURN_S)
        await self._grpc.stop(GRACE_S)
        await self._supervisor.stop()
        self._release()
        log.info("stopped")

    async def abandon(self) -> None:
        """End the workers and release what a failed start had taken."""
        await self._grpc.stop(0)
        await self._supervisor.stop()
        self._release()

    def kill_workers(self) -> None:
        """For an exit that waits for nothing."""
        self._supervisor.kill_all()

    def stats(self) -> dict[str, Any]:
        """Counters of lanes, workers and memory."""
        now = now_ns()
        arena = self._intake.arena
        return {
            "version": __version__,
            "pid": os.getpid(),
            "uptime_s": round((now - self._started_ns) / NS_PER_S, 3),
            "ready": self._models.is_ready and not self._is_stopping,
            "streams": len(self._flight.exchanges),
            "late_messages": self._dispatcher.counts["late_messages"],
            "input_arena": {
                "capacity_bytes": arena.capacity_bytes,
                "leased_bytes": arena.leased_bytes,
                "leases": len(arena),
            },
            "lanes": {
                lane.title: {
                    "ready": lane.is_ready,
                    "workers": len(lane.ready),
                    "queued": len(lane.queue),
                    "run_ms": round(lane.run_ns / NS_PER_MS, 3),
                    **lane.counts,
                }
                for lane in self._models
            },
            "workers": [
                {
                    "index": worker.place.index,
                    "group": worker.place.group,
                    "cpus": worker.place.cpus,
                    "state": worker.state.value,
                    "incarnation": worker.incarnation,
                    "pid": worker.pid,
                    "batches": worker.batches,
                    "in_flight": len(worker.in_flight),
                    "starts": worker.starts,
                    "output_leased_bytes": worker.output_arena.leased_bytes,
                    "story": [
                        f"{(now - at_ns) // NS_PER_MS} ms ago: {event}, {state}"
                        for at_ns, event, state in worker.story
                    ],
                }
                for worker in self._supervisor.workers
            ],
        }

    def _release(self) -> None:
        self._intake.close()
        self._lock.release()


def runtime_directory(config: Config) -> Path:
    """The folder for sockets and locks, made where it is not there, for this user only.

    Raises:
        ConfigError: It cannot be made, is another user's, or makes socket paths too long.
    """
    named = config.server.runtime_directory or os.environ.get("RUNTIME_DIRECTORY", "")
    if named:
        folder = Path(named)
    else:
        base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        address = "".join(c if c.isalnum() or c in ".-" else "-" for c in config.addresses[0])
        folder = base / f"iskander-{os.getuid()}" / address
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ours = [folder] if named else [folder, folder.parent]
        owners = {path.stat().st_uid for path in ours}
    except OSError as error:
        raise ConfigError(f"server.runtime_directory {folder}: {error.strerror}") from None
    if owners != {os.getuid()}:
        raise ConfigError(f"server.runtime_directory {folder} belongs to another user")
    if len(os.fsencode(folder)) + len("/results-1234567890123456789.ipc") > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(f"server.runtime_directory {folder}: too long for socket paths")
    return folder
