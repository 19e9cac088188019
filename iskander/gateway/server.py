"""The composition root: builds the parts, starts them in order, drains them in reverse.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from iskander.auth.grants import Authenticator
from iskander.clock import NS_PER_MS, NS_PER_S, now_ns
from iskander.config.schema import Config
from iskander.control.runtime_directory import Member, RuntimeDirectory
from iskander.gateway.systemd import notify, notify_changes
from iskander.measurement.recent_values import RecentValues
from iskander.memory.backing import BackingOptions, log_backing
from iskander.protocols.flight.regions import RegionServer
from iskander.protocols.flight.service import FlightService
from iskander.protocols.grpc_server import GrpcServer
from iskander.protocols.health import HealthService
from iskander.protocols.inferential.service import InferentialService
from iskander.protocols.oip.service import OipService
from iskander.protocols.submit import RequestSubmitter
from iskander.repository.models import configured
from iskander.repository.peers import Peers
from iskander.repository.repository import Repository
from iskander.scheduling.dispatch import Dispatcher
from iskander.scheduling.input_arena import InputArena
from iskander.scheduling.wakeup import BusyPolling
from iskander.supervision.supervisor import Supervisor
from iskander.supervision.worker import SlotPlan
from iskander.telemetry.loop_lag import LoopLag
from iskander.telemetry.metric_sources import MetricSources
from iskander.telemetry.stats import collect
from iskander.transport.addresses import admin_address, require_addresses, sharing_path
from iskander.transport.connection_limits import ConnectionLimits
from iskander.transport.tls import Tls

if TYPE_CHECKING:
    from iskander.protocols.oip.http.server import OipHttpServer
    from iskander.telemetry.admin import AdminServer

log = logging.getLogger("iskander.server")

DRAIN_TURN_S = 0.01
PROGRESS_NS = NS_PER_S
"""How often the log says how far a drain is."""
GRACE_S = 1.0
SWITCH_S = 0.0002
"""How soon the loop gets the interpreter back from a thread that reads files or large batches."""
GC_THRESHOLD = 20_000
"""Requests make a dozen containers each and leave no cycles; the default would look every 50."""


class Server:
    """One gateway.

    Args:
        config: Checked settings.
        places: Where the workers run.
        index: Number of this process, where `server.processes` are several; the workers are those
            of process 0, and attach to all.

    Raises:
        ConfigError: An address is none, or another gateway has the directory.
        SegmentError: The system has not the memory for the input arena.
    """

    def __init__(self, config: Config, places: list[SlotPlan], index: int = 0) -> None:
        self._config = config
        require_addresses(config)
        self._runtime = RuntimeDirectory(config)
        self._member = Member.of(self._runtime.path, index, config.server.processes)
        self._started_ns = now_ns()
        self._is_stopping = False
        self._is_started = False
        self._recent = RecentValues()
        self._models = configured(config, self._recent)
        arena = config.arena
        self._intake = InputArena(
            arena.input_bytes,
            config.limits,
            BackingOptions(is_huge=arena.huge_pages, is_locked=arena.lock),
        )
        log_backing(log, "input arena", self._intake.segment.backing)
        self._connection_limits = ConnectionLimits(config)
        self._dispatcher = Dispatcher(
            self._intake, self._models.by_key, BusyPolling(config.server.busy_poll_us)
        )
        self._supervisor = Supervisor(
            config,
            places,
            folder=self._runtime.path,
            member=self._member,
            models=self._models,
            intake=self._intake,
            dispatcher=self._dispatcher,
            on_change=self._on_change,
        )
        self._repository = Repository(
            config,
            self._models,
            self._supervisor.loading,
            self._dispatcher.refuse_queued,
            recent=self._recent,
            on_change=self._supervisor.noticed,
        )
        self._tls = Tls(config.tls)
        self._access = Authenticator(config.access, self._on_access)
        self._models.is_discreet = bool(config.access.tokens)
        self._siblings = Peers(
            self._repository, self._member, self._runtime.path, config.workers.start_s
        )
        self._health = HealthService(self._models, config.limits.streams)
        self._regions = RegionServer(
            config.shared_memory, config.server, sharing_path(config, index)
        )
        self._flight = FlightService(
            self._models,
            self._siblings,
            intake=self._intake,
            dispatcher=self._dispatcher,
            limits=config.limits,
            stats=self.stats,
            recent=self._recent,
            regions=self._regions,
        )
        self._desk = RequestSubmitter(self._intake, self._dispatcher, config.limits)
        self._oip = OipService(self._models, self._desk, self._siblings)
        self._grpc = self._grpc_server()
        self._inferential = self._inferential_service()
        self._lag = LoopLag()
        self._observed = self._observe()
        self._admin: AdminServer | None = None
        self._admin_address = ""
        self._http: OipHttpServer | None = None
        self._http_address = ""
        self.addresses: list[str] = []

    async def start(self) -> None:
        """Listen, start the workers, and wait until every model is ready.

        Where a service manager starts the workers, listening is all that is waited for: they come
        after this gateway. One process of several listens when it is ready, since until then the
        others can be asked.

        Raises:
            IskanderError: An address, a model or a worker failed; says which.
        """
        config = self._config
        if address := admin_address(config.admin):
            from iskander.telemetry.admin import AdminServer  # A tenth of a second.
            from iskander.telemetry.metrics import Collector

            self._admin = AdminServer(address, Collector(self._observed), self._connection_limits)
            self._admin_address = await self._admin.start()
        self._access.start()
        self._tls.start()
        if not self._member.siblings:
            await self._listen()
        self._supervisor.start()
        await self._repository.start(await self._siblings.start())
        if config.workers.spawn:
            await self._supervisor.until_ready()
        if self._member.siblings:
            await self._listen()
        where = ", ".join([*self.addresses, *filter(None, [self._inferential.address])])
        self._is_started = True
        # What lives now lives on: collections need not walk it again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        sys.setswitchinterval(SWITCH_S)
        self._lag.start()
        self._connection_limits.start()
        log.info("ready on %s after %d ms", where, (now_ns() - self._started_ns) // NS_PER_MS)
        notify(
            READY="1",
            STATUS=f"serving on {where}",
            X_ISKANDER_ADDRESS=self.addresses[0],
            X_ISKANDER_ADMIN=self._admin_address,
            X_ISKANDER_INFERENTIAL=self._inferential.address,
            X_ISKANDER_READY=str(int(self._models.is_ready)),
        )

    async def drain(self, keeps_workers: Callable[[], bool] = lambda: False) -> None:
        """Stop in order: not ready, take no more, finish what was accepted, let the workers go.

        Between the first two, for `server.lame_duck_s`, batches are still taken, so that those who
        choose among servers have seen that this one is not ready.

        Args:
            keeps_workers: Whether they are for the process that takes this one's place; asked when
                the rest is done.
        """
        self._is_stopping = self._models.is_stopping = True
        notify(STOPPING="1", STATUS="draining")
        self._health.stop()
        self._siblings.close()
        self._repository.close()
        self._supervisor.settle()
        if self._is_started and self._config.server.lame_duck_s:
            log.info("not ready; batches are taken for %g s", self._config.server.lame_duck_s)
            await self._wait_while(lambda: True, self._config.server.lame_duck_s)
        if self._member.siblings:
            self._grpc.close_door()  # New connections are for the siblings.
            self._inferential.close_door()
            if self._http is not None:
                self._http.close_door()
        self._flight.drain()
        self._desk.drain()
        self._inferential.drain()
        log.info("draining %s", self._work())
        if not await self._wait_while(self._has_work, self._config.server.drain_s):
            log.warning("not finished in time: %s", self._work())
        await self._grpc.stop(GRACE_S)
        await self._inferential.stop(GRACE_S)
        self._regions.close()
        if self._http is not None:
            await self._http.stop(GRACE_S)
        if keeps_workers():
            self._supervisor.let_go()
        else:
            await self._supervisor.stop()
        await self._release()
        log.info("stopped")

    async def abandon(self) -> None:
        """End the workers and release what a failed start had taken."""
        self._siblings.close()
        self._repository.close()
        await self._grpc.stop(0)
        await self._inferential.stop(0)
        self._regions.close()
        if self._http is not None:
            await self._http.stop(0)
        await self._supervisor.abandon()
        await self._release()

    def kill_workers(self) -> None:
        """For an exit that waits for nothing."""
        self._supervisor.kill_all()

    def stats(self) -> dict[str, Any]:
        """What lanes, workers and memory have come to."""
        return collect(self._observed) | {
            "admin_address": self._admin_address,
            "http_address": self._http_address,
            "process": self._member.number,
            "inferential": self._inferential.stats(),
            "access": self._access.stats(),
        }

    def _grpc_server(self) -> GrpcServer:
        return GrpcServer(
            self._flight,
            self._health,
            self._oip,
            self._access,
            self._tls,
            limits=self._config.limits,
            connection_limits=self._connection_limits,
        )

    def _inferential_service(self) -> InferentialService:
        return InferentialService(
            self._config,
            self._models,
            intake=self._intake,
            dispatcher=self._dispatcher,
            grant=self._access.anonymous,
            recent=self._recent,
            connection_limits=self._connection_limits,
        )

    def _observe(self) -> MetricSources:
        return MetricSources(
            started_ns=self._started_ns,
            models=self._models,
            input_arena=self._intake.arena,
            input_backing=self._intake.segment.backing,
            streams=self._flight.exchanges,
            regions=self._regions.lent,
            calls=self._desk.calls,
            counts=self._dispatcher.counts,
            loop_lag_ns=self._lag.lag_ns,
            clients=self._inferential.sessions,
            outcomes=self._inferential.journal.outcomes,
            refused=self._access.refused,
            budget=self._connection_limits.budget,
            connections_ended=self._connection_limits.ended,
        )

    def _on_change(self) -> None:
        """Tell those who watch what is ready; of several processes, the parent too."""
        self._repository.look()
        self._health.publish()
        if self._member.siblings and self._is_started and not self._is_stopping:
            notify_changes(X_ISKANDER_READY=str(int(self._models.is_ready)))

    def _on_access(self) -> None:
        """Who may ask what has changed."""
        self._flight.look_at_grants()
        self._oip.look_at_grants()
        self._grpc.look_at_grants()
        self._health.publish()

    async def _listen(self) -> None:
        is_shared = bool(self._member.siblings)
        self.addresses = await self._grpc.start(
            self._config.server, self._config.addresses, is_shared=is_shared
        )
        await self._inferential.start()
        self._regions.start()
        if self._config.http.address:
            from iskander.protocols.oip.http.server import OipHttpServer

            self._http = OipHttpServer(
                self._models,
                self._oip,
                self._desk,
                self._access,
                self._tls,
                self._config.http,
                limits=self._connection_limits,
            )
            self._http_address = await self._http.start(is_shared=is_shared)
            log.info("the Open Inference Protocol over HTTP is on %s", self._http_address)

    async def _wait_while(self, condition: Callable[[], bool], wait_s: float) -> bool:
        """Wait for a condition to end, with news every second; False where it took too long."""
        begun_ns = told_ns = now_ns()
        while condition():
            now = now_ns()
            if now - begun_ns > wait_s * NS_PER_S:
                return False
            if now - told_ns >= PROGRESS_NS:
                told_ns = now
                log.info("draining: %s", self._work())
            await asyncio.sleep(DRAIN_TURN_S)
        return True

    def _has_work(self) -> bool:
        is_asked = self._flight.exchanges or self._desk.calls or self._inferential.has_work
        return bool(is_asked or self._dispatcher.in_flight or self._queued() or self._unsent())

    def _unsent(self) -> int:
        return self._grpc.unsent + (self._http.unsent if self._http is not None else 0)

    def _queued(self) -> int:
        return sum(len(lane.queue) for lane in self._models)

    def _work(self) -> str:
        return (
            f"{len(self._flight.exchanges)} streams, {len(self._desk.calls)} calls, "
            f"{self._queued()} requests in queues, "
            f"{self._dispatcher.in_flight} batches in flight, "
            f"{self._unsent()} connections with answers not read"
        )

    async def _release(self) -> None:
        if self._admin is not None:
            await self._admin.stop()
        self._lag.stop()
        self._connection_limits.stop()
        self._access.stop()
        self._tls.stop()
        self._dispatcher.alarm.clear()
        self._intake.close()
        self._runtime.release()
