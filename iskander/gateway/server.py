"""Composition root: builds the components, starts them in order, drains them in reverse.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from iskander.config.schema import Config
from iskander.errors import Draining
from iskander.foundation.clock import NS_PER_MS, NS_PER_S, now_ns
from iskander.foundation.file_watcher import ReloadStatus
from iskander.foundation.logs import gateway as log
from iskander.foundation.measurement.recent_values import RecentValues
from iskander.gateway.auth.audit import AuditLog
from iskander.gateway.auth.grants import Authenticator
from iskander.gateway.events import EventStream
from iskander.gateway.observation.drift_installed import require_sketches
from iskander.gateway.observation.process import ObserverProcess
from iskander.gateway.protocols.extension import Services, create_protocols
from iskander.gateway.protocols.flight.plans import Plans
from iskander.gateway.protocols.flight.regions import RegionServer
from iskander.gateway.protocols.flight.service import FlightService
from iskander.gateway.protocols.grpc_server import GrpcServer
from iskander.gateway.protocols.health import HealthService
from iskander.gateway.protocols.inferential.service import InferentialService
from iskander.gateway.protocols.load_report import LoadReports
from iskander.gateway.protocols.oip.service import OipService
from iskander.gateway.protocols.submit import RequestSubmitter
from iskander.gateway.repository.models import configured
from iskander.gateway.repository.peers import Peers
from iskander.gateway.repository.repository import Repository
from iskander.gateway.scheduling.dispatch import Dispatcher
from iskander.gateway.scheduling.entry import Entry
from iskander.gateway.scheduling.input_arena import InputArena
from iskander.gateway.scheduling.tracing import joined
from iskander.gateway.scheduling.wakeup import BusyPolling
from iskander.gateway.shadow.routes import shares_of
from iskander.gateway.shadow.runner import ShadowRunner
from iskander.gateway.source_listing import create_sources, private_listener
from iskander.gateway.supervision.supervisor import Supervisor
from iskander.gateway.supervision.worker import SlotPlan
from iskander.gateway.systemd import notify, notify_changes
from iskander.gateway.telemetry.logs import set_log_level
from iskander.gateway.telemetry.loop_lag import LoopLag
from iskander.gateway.telemetry.metrics.sources import MetricSources
from iskander.gateway.telemetry.status.drift_status import DriftReader
from iskander.gateway.telemetry.status.events import EventLog
from iskander.gateway.telemetry.status.history_sampler import HistorySampler
from iskander.gateway.telemetry.status.reader import StatusReader
from iskander.gateway.telemetry.status.stats_reader import read_stats
from iskander.gateway.telemetry.tracing.export_process import ExportProcess
from iskander.gateway.transport.addresses import (
    admin_address,
    require_addresses,
    require_extension_protected,
    shared_memory_socket,
)
from iskander.gateway.transport.limits.connection_limits import ConnectionLimits
from iskander.gateway.transport.tls import HTTP1, Tls
from iskander.interprocess.control.identity import gateway_id
from iskander.interprocess.control.runtime_directory import Member, RuntimeDirectory
from iskander.interprocess.memory.backing import Backing, BackingOptions

if TYPE_CHECKING:
    from iskander.gateway.protocols.oip.http.server import OipHttpServer
    from iskander.gateway.telemetry.admin import AdminServer
    from iskander.gateway.telemetry.status.document import Status

Operate = Callable[[str], Awaitable[dict[str, Any]]]

HTTP = "Open Inference Protocol over HTTP"

DRAIN_TURN_S = 0.01
PROGRESS_LOG_NS = NS_PER_S
GRACE_S = 1.0
SWITCH_S = 0.0002
"""Interval after which a thread with Python code releases the interpreter to the loop."""
GC_THRESHOLD = 20_000
"""A request creates a dozen containers and no cycles; the default collects every 50 requests."""


class Server:
    """One gateway process; process 0 supervises the workers, which attach to all processes."""

    def __init__(self, config: Config, slots: list[SlotPlan], index: int = 0) -> None:
        self._config = config
        require_addresses(config)
        self._traces = ExportProcess(config.tracing) if config.tracing.enabled else None
        self._runtime = RuntimeDirectory(config)
        self._member = Member.of_process(self._runtime.path, index, config.server.processes)
        self._started_ns = now_ns()
        self.reloads = ReloadStatus()
        self._is_stopping = self._is_started = False
        self._recent = RecentValues()
        self._models = configured(config, self._recent)
        arena = config.arena
        backing = BackingOptions(is_huge=arena.huge_pages, is_locked=arena.lock)
        self._input_arena = InputArena(arena.input_bytes, backing)
        _log_backing(self._input_arena.segment.backing)
        self._connection_limits = ConnectionLimits(config)
        busy_polling = BusyPolling(config.server.busy_poll_us)
        self._dispatcher = Dispatcher(self._input_arena, self._models.by_key, busy_polling)
        self._entry = Entry(self._input_arena, self._dispatcher.submit, config.limits)
        self._stream = EventStream(config, index if self._member.peers else None)
        self._supervisor = Supervisor(
            config,
            slots,
            folder=self._runtime.path,
            member=self._member,
            models=self._models,
            input_arena=self._input_arena,
            dispatcher=self._dispatcher,
            on_change=self._on_change,
        )
        self._repository = Repository(
            config,
            self._models,
            self._supervisor.loading,
            self._dispatcher.reject_queued,
            recent=self._recent,
            on_change=self._supervisor.notify_change,
        )
        self._observation: ObserverProcess | None = None
        if config.is_observed:
            require_sketches(config.drift)
            settings_of = self._repository.settings_of
            self._observation = ObserverProcess(config, self._input_arena, settings_of)
        self._add_hooks()
        self._tls = Tls(config.tls)
        self._shadow = ShadowRunner(
            self._dispatcher,
            self._input_arena,
            self._models.by_key,
            config.shadow,
            config.server.processes,
        )
        self._models.on_revision = lambda: self._shadow.set_pairs(shares_of(self._models))
        self._models.on_revision()
        self.audit = AuditLog(config.access.audit_file, index)
        processes = config.server.processes
        self._access = Authenticator(config.access, self._on_access, processes, self.audit)
        self._entry.quotas = self._access.quotas.by_name
        self._models.hides_models = bool(config.access.tokens)
        self._create_services(shared_memory_socket(config, index), slots)
        self._lag = LoopLag()
        self._events = EventLog()
        self._sampler = HistorySampler(self._models)
        self._sources = self._metric_sources()
        self._admin: AdminServer | None = None
        self._admin_address = ""
        self._protocol_addresses: dict[str, str] = {}
        self.addresses: list[str] = []

    def _add_hooks(self) -> None:
        """Let traces, events and samples read the requests."""
        dispatcher, hooks = self._dispatcher, self._dispatcher.hooks
        recorded = (self._traces, self._stream.publisher)
        dispatcher.tracer = joined([each.recorder for each in recorded if each is not None])
        if self._traces is not None:
            hooks.on_batch.append(self._traces.recorder.on_batch)
            hooks.on_steps.append(self._traces.recorder.on_steps)
        if self._observation is not None:
            dispatcher.observer = sampler = self._observation.sampler
            hooks.on_results.append(sampler.on_results)
            hooks.on_worker_lost.append(sampler.on_worker_lost)

    def _create_services(self, sharing: Path, slots: list[SlotPlan]) -> None:
        config, models = self._config, self._models
        self._peers = Peers(
            self._repository, self._member, self._runtime.path, config.workers.start_s
        )
        self._health = HealthService(models, config.limits.streams)
        self._regions = RegionServer(config.shared_memory, config.server, sharing)
        self._flight = FlightService(
            models,
            self._peers,
            entry=self._entry,
            dispatcher=self._dispatcher,
            plans=Plans(config.limits, self._connection_limits.budget),
            stats=self.stats,
            recent=self._recent,
            regions=self._regions,
        )
        self._flight.sources = create_sources(
            config, self._runtime.path, self._member, models, self._flight, slots
        )
        self._submitter = RequestSubmitter(self._entry, self._dispatcher, config.limits)
        self._oip = OipService(models, self._submitter, self._peers)
        self._flight.audit = self._oip.audit = self.audit
        self._grpc = GrpcServer(
            self._flight,
            self._health,
            self._oip,
            self._access,
            self._tls,
            limits=config.limits,
            connection_limits=self._connection_limits,
            own_id=gateway_id(self._runtime.path),
        )
        self._load_reports = LoadReports(models, self._grpc.set_load_trailer)
        self._inferential = InferentialService(
            config,
            models,
            entry=self._entry,
            dispatcher=self._dispatcher,
            grant=self._access.anonymous,
            recent=self._recent,
            connection_limits=self._connection_limits,
        )
        services = Services(
            models=models,
            submitter=self._submitter,
            authenticator=self._access,
            tls=self._tls,
            connection_limits=self._connection_limits,
        )
        self._protocols = create_protocols(config, services)
        self._http: OipHttpServer | None = None
        if config.http.address:
            from iskander.gateway.protocols.oip.http.server import OipHttpServer

            self._http = OipHttpServer(services, self._oip, config)
            self._protocols[HTTP] = self._http

    @property
    def is_serving(self) -> bool:
        """Whether the start is complete, and the drain has not begun."""
        return self._is_started and not self._is_stopping

    def set_operation(self, operate: Operate) -> None:
        """Set the function that runs the actions `drain` and `reload`."""
        self._flight.operate = operate

    async def start(self) -> None:
        """Listen, start the workers, and wait until every model is ready.

        With `workers.spawn` off, workers attach later and are not waited for. One process of
        several listens only when it is ready; meanwhile the others serve.
        """
        config = self._config
        if address := admin_address(config.admin):
            from iskander.gateway.telemetry.admin import AdminServer  # The import costs 0.1 s.
            from iskander.gateway.telemetry.metrics.drift_metrics import DRIFT_SCOPE
            from iskander.gateway.telemetry.metrics.exposition import SCOPES, Collector
            from iskander.gateway.telemetry.metrics.shadow_metrics import SHADOW_SCOPE
            from iskander.gateway.telemetry.metrics.triton_metrics import TRITON_SCOPE

            scopes = (*SCOPES, SHADOW_SCOPE, DRIFT_SCOPE)
            if config.admin.triton_metrics:
                scopes = (*scopes, TRITON_SCOPE)
            render, limits = Collector(self._sources, scopes).render, self._connection_limits
            status = self._start_status() if config.admin.page else None
            reasons = self._models.reasons
            events = None if self._member.peers else self._stream.endpoint(self._access)
            self._admin = AdminServer(
                address,
                reasons,
                render,
                limits,
                status,
                config=config,
                tls=self._tls.context(HTTP1) if config.admin.tls else None,
                events=events,
            )
            self._admin_address = await self._admin.start()
        self._stream.start(self._member, self._runtime.path, self._admin_address)
        self.audit.start()
        self._access.start()
        self._tls.start()
        if self._observation is not None:
            self._observation.start(self._member.number)  # Its start takes as long as a worker's.
        if not self._member.peers:
            await self._listen()
        self._supervisor.start()
        await self._repository.start(await self._peers.start())
        if config.workers.spawn:
            await self._supervisor.until_ready()
        if self._member.peers:
            await self._listen()
        where = ", ".join([*self.addresses, *filter(None, [self._inferential.address])])
        self._is_started = True
        self.audit.record("start", where)
        # Objects of the startup are permanent: exclude them from later collections.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        sys.setswitchinterval(SWITCH_S)
        self._lag.start()
        self._connection_limits.start()
        if config.server.load_reports:
            self._load_reports.start()
        start_ms = (now_ns() - self._started_ns) // NS_PER_MS
        log.ready(addresses=where, start_ms=start_ms)
        notify(
            READY="1",
            STATUS=f"serving on {where}",
            X_ISKANDER_ADDRESS=self.addresses[0],
            X_ISKANDER_ADMIN=self._admin_address,
            X_ISKANDER_INFERENTIAL=self._inferential.address,
            X_ISKANDER_READY=str(int(self._models.is_ready)),
        )

    async def drain(self, keeps_workers: Callable[[], bool] = lambda: False) -> None:
        """Shut down: become not ready, reject new requests, complete accepted ones, stop workers.

        For `server.lame_duck_s` after the first step, requests are still accepted, so that load
        balancers can detect the change. `keeps_workers` is called last: whether the workers
        continue for the process that replaces this one.
        """
        self._is_stopping = self._models.is_stopping = True
        self.audit.record("stop")
        notify(STOPPING="1", STATUS="draining")
        self._health.stop()
        self._peers.close()
        self._repository.close()
        self._supervisor.recycling.close()
        lame_duck_s = self._config.server.lame_duck_s
        if self._is_started and lame_duck_s:
            log.lame_duck_started(lame_duck_s=lame_duck_s)
            await self._wait_while(lambda: True, lame_duck_s)
        if self._member.peers:
            self._grpc.stop_accepting()  # The peers accept new connections.
            self._inferential.stop_accepting()
            for protocol in self._protocols.values():
                protocol.stop_accepting()
        for service in (self._flight, self._submitter, self._inferential, self._shadow):
            service.drain()
        log.drain_started(work=self._describe_work())
        drain_s = self._config.server.drain_s
        if not await self._wait_while(self._has_work, drain_s):
            log.drain_timed_out(drain_s=drain_s, work=self._describe_work())
            if self._flight.sources is not None:
                self._flight.sources.stop(
                    Draining("the server is stopping; repeat the read on another")
                )
        await self._stop_listeners(GRACE_S)
        if self._observation is not None:
            await self._observation.settle()
        if keeps_workers():
            await self._supervisor.release_workers()
        else:
            await self._supervisor.stop()
        log.stopped()
        await self._stream.stop()
        await self._release()

    def configure(self, config: Config) -> None:
        """Apply the `Live` settings of a configuration that differs in no others."""
        self._config = config
        limits = config.limits
        self._connection_limits.configure(config)
        self._entry.configure(limits)
        self._flight.configure(limits)
        self._grpc.configure(limits)
        self._submitter.limits = limits
        self._inferential.configure(config)
        if self._http is not None:
            self._http.configure(config)
        self._regions.configure(config.shared_memory)
        if self._flight.sources is not None:
            self._flight.sources.configure(config.source_reads, limits.message_bytes)
        if self._observation is not None:
            self._observation.sampler.configure(config.observation)
        if self._traces is not None:
            self._traces.recorder.configure(config.tracing)
        self._supervisor.configure(config)
        self._shadow.configure(config.shadow)
        self._repository.configure(config)
        set_log_level(config.admin)

    async def abandon(self) -> None:
        """Stop the workers and release all resources after a failed start."""
        self._peers.close()
        self._repository.close()
        await self._stop_listeners(0)
        await self._supervisor.abandon()
        await self._stream.stop()
        await self._release()

    def kill_workers(self) -> None:
        """Kill the workers before an immediate exit."""
        self._supervisor.kill_all()

    async def stats(self) -> dict[str, Any]:
        """Return counters of lanes, workers and memory."""
        return asdict(await read_stats(self._sources)) | {
            "admin_address": self._admin_address,
            "http_address": self._protocol_addresses.get(HTTP, ""),
            "protocol_addresses": self._protocol_addresses,
            "inferential": self._inferential.stats(),
            "access": self._access.stats(),
            "events": self._stream.stats(),
            "sources": {} if self._flight.sources is None else self._flight.sources.stats(),
            "observation": {} if self._observation is None else self._observation.stats(),
        }

    def _observed(self) -> dict[str, Any]:
        """Return the last report of each consumer of sampled requests."""
        return {} if self._observation is None else self._observation.last_report

    def _start_status(self) -> Callable[[], Awaitable[Status]]:
        """Start to collect what the page shows; return its reader."""
        self._events.start()
        self._sampler.start()
        return StatusReader(self._sources, self._sampler.history, self._events).read

    def _metric_sources(self) -> MetricSources:
        sources = self._flight.sources
        limits = self._connection_limits
        reloads = (
            ("configuration", None if self._member.peers else self.reloads),
            ("tokens", self._access.reloads),
            ("tls", self._tls.reloads),
        )
        return MetricSources(
            started_ns=self._started_ns,
            process=self._member.number,
            models=self._models,
            input_arena=self._input_arena.arena,
            input_backing=self._input_arena.segment.backing,
            streams=self._flight.exchanges,
            regions=self._regions.allocated,
            calls=self._submitter.calls,
            counts=self._dispatcher.counts,
            loop_lag_ns=self._lag.lag_ns,
            clients=self._inferential.sessions,
            outcomes=self._inferential.metrics.outcomes,
            spans={} if self._traces is None else self._traces.recorder.counts,
            **self._sample_sources(),
            shadows=lambda: self._shadow.pairs,
            drift=DriftReader(self._observed).read,
            refused=self._access.refused,
            grants=self._access.quotas.usage,
            audited=self.audit.counts,
            budget=limits.budget,
            connections=lambda: limits.open_count,
            connections_max=lambda: limits.descriptors.connections_max,
            connections_ended=limits.ended,
            calls_ended=limits.calls_ended,
            reloads={name: each for name, each in reloads if each is not None},
            expiry_s=lambda: self._tls.expiry_s,
            gpus=self._supervisor.gpus.states,
            reads=() if sources is None else sources.reads,
            read_counts={} if sources is None else sources.counts,
        )

    def _sample_sources(self) -> dict[str, Any]:
        observation = self._observation
        if observation is None:
            return {}
        holds = observation.sampler.holds
        return {
            "samples": observation.sampler.counts,
            "samples_held": lambda: (len(holds), holds.bytes),
            "log_counts": lambda: observation.counts("prediction_log"),
            "observer_starts": lambda: observation.starts,
        }

    def _on_change(self) -> None:
        """Publish the readiness to health watchers, and to the parent if there is one."""
        self._repository.update()
        self._health.publish()
        if self._member.peers and self.is_serving:
            notify_changes(X_ISKANDER_READY=str(int(self._models.is_ready)))

    def _on_access(self) -> None:
        """Apply changed grants to open calls."""
        self._flight.check_grants()
        self._oip.check_grants()
        self._grpc.check_grants()
        self._health.publish()

    async def _listen(self) -> None:
        is_shared = bool(self._member.peers)
        config = self._config
        start = self._grpc.start
        self.addresses = await start(config.server, config.addresses, is_shared=is_shared)
        if self._flight.sources is not None:
            reads = self._flight.sources.address
            await start(private_listener(config.server), (reads,))
        await self._inferential.start()
        self._regions.start()
        for name, protocol in self._protocols.items():
            address = await protocol.start(is_shared=is_shared)
            if name in config.extensions.protocols:
                require_extension_protected(config, name, address)
            self._protocol_addresses[name] = address
            log.protocol_listening(protocol=name, address=address)
        if self._traces is not None:
            listeners = {
                "grpc": self.addresses,
                "http": [self._protocol_addresses.get(HTTP, "")],
                "zmq": [self._inferential.address.removeprefix("tcp://")],
            }
            self._traces.start(self._member.number, listeners)

    async def _wait_while(self, condition: Callable[[], bool], wait_s: float) -> bool:
        """Wait for a condition to end, and log the progress; return False after the timeout."""
        logged_ns = now_ns()
        deadline_ns = logged_ns + wait_s * NS_PER_S
        while condition():
            now = now_ns()
            if now > deadline_ns:
                return False
            if now - logged_ns >= PROGRESS_LOG_NS:
                logged_ns = now
                log.drain_progressed(work=self._describe_work())
            await asyncio.sleep(DRAIN_TURN_S)
        return True

    def _has_work(self) -> bool:
        is_open = self._flight.has_work or self._submitter.calls or self._inferential.busy_sessions
        return bool(is_open or self._dispatcher.in_flight or self._queued() or self._unsent())

    def _unsent(self) -> int:
        return self._grpc.unsent + sum(each.unsent for each in self._protocols.values())

    def _queued(self) -> int:
        return sum(len(lane.queue) for lane in self._models)

    def _describe_work(self) -> str:
        return (
            f"{len(self._flight.exchanges)} streams, {len(self._submitter.calls)} calls, "
            f"{self._queued()} requests in queues, "
            f"{self._dispatcher.in_flight} batches in flight, "
            f"{self._unsent()} connections with unread responses, "
            f"{self._inferential.busy_sessions} Inferential clients with work"
        )

    async def _stop_listeners(self, grace_s: float) -> None:
        await self._grpc.stop(grace_s)
        await self._inferential.stop(grace_s)
        self._regions.close()
        for protocol in self._protocols.values():
            await protocol.stop(grace_s)

    async def _release(self) -> None:
        if self._admin is not None:
            await self._admin.stop()
        if self._flight.sources is not None:
            await self._flight.sources.close()
        if self._traces is not None:
            await self._traces.stop()
        if self._observation is not None:
            await self._observation.stop()
        timers = (self._lag, self._load_reports, self._sampler, self._events)
        for part in (*timers, self._connection_limits, self._access, self._tls):
            part.stop()
        self.audit.stop()
        self._dispatcher.alarm.clear()
        self._input_arena.close()
        self._runtime.release()


def _log_backing(backing: Backing) -> None:
    """Log the memory pages of the input arena."""
    log.arena_allocated(arena="input arena", backing=str(backing))
    for notice in backing.notices:
        log.arena_restricted(arena="input arena", notice=notice)
