"""Supervisor of the worker processes: feeds events to `lifecycle` and runs its actions.

`spawner` starts processes, `registration` assigns slots, `model_loader` loads models, `watchdog`
detects hangs, `gpus.health` lost GPUs, and `no_worker_timeout` and `outages` reject requests of
lanes without workers or remote servers.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Protocol

from iskander.config.schema import Config
from iskander.errors import IskanderError, NotReady
from iskander.foundation.clock import NS_PER_MS, NS_PER_S, now_ns
from iskander.foundation.logs import workers as log
from iskander.gateway.scheduling.dispatch import Dispatcher
from iskander.gateway.scheduling.input_arena import InputArena
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.worker_slot import WorkerSlot
from iskander.gateway.supervision.gpus.health import GpuHealth
from iskander.gateway.supervision.lifecycle import Action, Event, State, step, validate
from iskander.gateway.supervision.loading.file_freshness import FileFreshness
from iskander.gateway.supervision.loading.model_loader import ModelLoader
from iskander.gateway.supervision.loading.quarantine import Quarantines
from iskander.gateway.supervision.no_worker_timeout import NoWorkerTimeout
from iskander.gateway.supervision.outages import Outages
from iskander.gateway.supervision.recycling import Recycling
from iskander.gateway.supervision.registration import (
    RegistrationListener,
    create_memory,
    slot_for,
    welcome,
)
from iskander.gateway.supervision.spawner import Spawner, Timers
from iskander.gateway.supervision.watchdog import Watchdog
from iskander.gateway.supervision.worker import SlotPlan, Worker
from iskander.gateway.supervision.worker_messages import WorkerMessageReader
from iskander.interprocess.control import messages
from iskander.interprocess.control.attach import open_channel
from iskander.interprocess.control.channel import Channel
from iskander.interprocess.control.runtime_directory import ATTACH_SOCKET, Member, ZmqPaths
from iskander.interprocess.memory.arena import usable_bytes

STEADY_S = 10.0
"""Service time after which a worker's failure count is reset."""
ABORT_S = 0.02
"""A process writes its stack in a few milliseconds; a stopped process never does."""
STOP_S = 5.0


class ServedModels(Protocol):
    """The model registry, as the supervisor uses it; the supervisor sets `workers`."""

    by_key: dict[int, Lane]
    freshness: FileFreshness
    workers: list[Worker]

    @property
    def is_settled(self) -> bool:
        """Whether each model has its workers or failed to load."""

    def reasons(self) -> Iterable[str]:
        """Describe each model that is not ready."""


@dataclass(eq=False, repr=False)
class Supervisor:
    """Owner of every worker slot and its process.

    Attributes:
        folder: The runtime directory; the caller holds its lock.
        member: This gateway process; the first one starts and ends the workers.
        models: The lanes; receives the worker slots.
        on_change: Called when readiness may have changed.
    """

    config: Config
    slots: list[SlotPlan]
    _: KW_ONLY
    folder: Path
    member: Member
    models: ServedModels
    input_arena: InputArena
    dispatcher: Dispatcher
    on_change: Callable[[], None]

    def __post_init__(self) -> None:
        validate()
        config, folder, member, models = self.config, self.folder, self.member, self.models
        self._settings = settings = config.workers
        dispatcher = self.dispatcher
        dispatcher.end_worker = self._on_unresponsive
        workers = [Worker(slot, is_ours=member.is_first) for slot in self.slots]
        self.workers = models.workers = workers
        self._message_reader = WorkerMessageReader(dispatcher, self)
        self._incarnation = 0
        self._zmq_paths = ZmqPaths(folder) if settings.channel == "zmq" else None
        self._is_stopping = False
        self._listener = RegistrationListener(folder / ATTACH_SOCKET, self._register)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._timers = timers = Timers()
        lanes, on_event, is_first = models.by_key, self._on_event, member.is_first
        capacity = usable_bytes(config.arena.output_bytes)
        send, reject = dispatcher.send, dispatcher.reject_queued
        self.loading = ModelLoader(
            lanes,
            workers,
            capacity,
            models.freshness,
            on_event,
            self._on_load_error,
            send,
            config.limits,
        )
        self._watchdog = Watchdog(
            workers,
            int(settings.hang_s * NS_PER_S),
            self._on_hung,
            factor=settings.hang_factor,
            is_shared=bool(member.peers) and is_first,
        )
        self.recycling = Recycling(
            workers, settings, lambda worker: on_event(worker, Event.RECYCLE_DUE)
        )
        self._no_worker_timeout = NoWorkerTimeout(lanes, workers, settings.start_s, reject)
        self._quarantines = Quarantines(
            lanes,
            workers,
            settings,
            is_first,
            self.loading,
            reject,
            on_event,
            self.notify_change,
            dispatcher.pump,
        )
        self._outages = Outages(lanes, reject, self.notify_change, send)
        dispatcher.on_unreachable = self._outages.on_unreachable
        self.gpus = GpuHealth(workers, lanes, on_event, reject)
        on_exit = self._quarantines.on_exit
        self._spawner = Spawner(settings, folder, is_first, timers, on_event, on_exit)
        self._actions: dict[Action, Callable[[Worker], None]] = {
            Action.SPAWN: self._spawner.spawn,
            Action.SPAWN_LATER: self._spawner.spawn_later,
            Action.SPAWN_NEXT: self._spawner.spawn_next,
            Action.LOAD: self._load,
            Action.OPEN: self._open,
            Action.KEEP_OPEN: self._keep_open,
            Action.CLOSE: dispatcher.close,
            Action.DRAIN: self._drain,
            Action.DETACH: self._detach,
            Action.COUNT_BOOT: self._spawner.count_boot,
            Action.COUNT_CRASH: self._spawner.count_crash,
            Action.RESET_FAILURES: self._spawner.reset_failures,
            Action.ABORT: self._abort,
            Action.KILL: self._kill,
        }

    def start(self) -> None:
        """Listen for workers, and start those that no earlier gateway left running."""
        self._listener.open()
        self._watchdog.start()
        if self.member.is_first:
            self.recycling.start()
            self.gpus.start()
            if self._settings.spawn:
                self._spawner.fill(self.workers)

    def configure(self, config: Config) -> None:
        """Apply the live settings, to running workers and batches too."""
        self.config, self._settings = config, config.workers
        settings = self._spawner.settings = config.workers
        self._watchdog.configure(int(settings.hang_s * NS_PER_S), settings.hang_factor)
        self._quarantines.configure(settings)
        if self.member.is_first:
            self.recycling.configure(settings)

    async def until_ready(self) -> None:
        """Wait until every model has its quorum of workers or has failed to load.

        Raises ManifestError if a model cannot be loaded; NotReady if a worker does not start, or
        after `workers.start_s`.
        """
        try:
            async with asyncio.timeout(self._settings.start_s):
                while not self.models.is_settled:
                    if self._spawner.boot_error is not None:
                        raise self._spawner.boot_error
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise NotReady(
                f"the workers were not ready after {self._settings.start_s:g} s "
                f"(`workers.start_s`): {'; '.join(self.models.reasons())}"
            ) from None

    async def stop(self) -> None:
        """Drain every worker and wait until all have exited; kill those that exceed the limit."""
        self._is_stopping = True
        self._listener.close()
        self.recycling.close()
        for worker in self.workers:
            self._on_event(worker, Event.STOP)
        limit_s = STOP_S + (self.config.server.drain_s if self.member.peers else 0)
        deadline_ns = now_ns() + int(limit_s * NS_PER_S)
        while any(map(_is_running, self.workers)):
            if now_ns() > deadline_ns:
                for worker in self.workers:
                    self._on_event(worker, Event.TIMED_OUT)
                deadline_ns = now_ns() + NS_PER_S
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await self._changed.wait()
        self.kill_all()
        await self.release_workers()

    async def release_workers(self) -> None:
        """Release all resources; the workers keep running for the peers or the next gateway."""
        await self.gpus.stop()
        timers = (self._timers, self._watchdog, self.recycling, self._no_worker_timeout)
        for part in (*timers, self._quarantines, self._outages, self._listener):
            part.close()
        for worker in self.workers:
            if worker.channel is not None:
                self._loop.remove_reader(worker.channel)
            worker.detach()
        if self._zmq_paths is not None:
            self._zmq_paths.remove()

    async def abandon(self) -> None:
        """Undo a failed start; workers that peers use keep running."""
        if not self.member.peers:
            return await self.stop()
        for worker in self.workers:
            if worker.child is not None:
                worker.kill()
        await self.release_workers()

    def kill_all(self) -> None:
        """Kill every worker, for an immediate exit."""
        for worker in self.workers:
            worker.kill()

    def _on_event(self, worker: Worker, event: Event) -> None:
        before = worker.state
        worker.state, actions = step(before, event)
        if actions or worker.state is not before:
            worker.history.append((now_ns(), event, worker.state))
            log.worker_changed(worker=worker.index, change=event, before=before, after=worker.state)
        for action in actions:
            self._actions[action](worker)
        self._no_worker_timeout.update()
        self.notify_change()

    def notify_change(self) -> None:
        """Signal that readiness may have changed."""
        self._changed.set()
        self.on_change()

    def on_message(self, worker: Worker, message: messages.ToGateway) -> None:
        """Handle a message other than a batch result."""
        if isinstance(message, messages.Stepped):
            self.models.by_key[message.model].metrics.on_stepped(message.steps)
            for on_steps in self.dispatcher.hooks.on_steps:
                on_steps(worker, message.steps)
        elif isinstance(message, messages.Copied):
            worker.copied_bytes["in"] += message.in_bytes
            worker.copied_bytes["out"] += message.out_bytes
        elif isinstance(message, messages.Probed):
            self._outages.on_probed(message)
        elif isinstance(message, messages.Leaving):
            self._on_event(worker, Event.DRAIN_REQUESTED)
        elif isinstance(message, messages.LoadStep):
            self.loading.on_step(worker, message)
        elif isinstance(message, messages.Notice):
            worker.notices.append(message.text)
            log.worker_notice(worker=worker.index, notice=message.text)
        else:
            assert not isinstance(message, messages.Done | messages.Failed)
            self.loading.on_answer(worker, message)
            self.notify_change()

    def on_malformed(self, worker: Worker, error: Exception) -> None:
        """End the worker, since the lost frame may have been the result of a batch."""
        log.worker_frame_malformed(worker=worker.index, reason=str(error))
        self._end_worker(worker, worker.incarnation)

    def on_unprocessable(
        self, worker: Worker, message: messages.ToGateway, error: Exception
    ) -> None:
        """End a worker whose message is invalid here, or shows a bug."""
        kind = type(message).__name__
        log.worker_message_failed(worker=worker.index, kind=kind, error=error)
        self._end_worker(worker, worker.incarnation)

    def on_end(self, worker: Worker, channel: Channel) -> None:
        """Handle the end of a worker's channel."""
        self._loop.remove_reader(channel)
        self._on_event(worker, Event.LOST)

    def _on_unresponsive(self, slot: WorkerSlot) -> None:
        """End a worker that does not read its channel, after the current callback."""
        assert isinstance(slot, Worker)
        self._loop.call_soon(self._end_worker, slot, slot.incarnation)

    def _end_worker(self, worker: Worker, incarnation: int) -> None:
        """End a process, unless the slot has another one by now."""
        if incarnation == worker.incarnation:
            is_loading = worker.state is State.LOADING
            self._on_event(worker, Event.LOAD_FAILED if is_loading else Event.HUNG)

    def _on_released(self, worker: Worker, incarnation: int) -> None:
        if incarnation == worker.incarnation:
            self._on_event(worker, Event.LOST)

    async def _register(self, connection: socket.socket, pid: int, hello: messages.Hello) -> None:
        """Give a worker its slot, memory and models."""
        self._quarantines.follow_isolation(hello)
        worker = slot_for(self.workers, pid, hello)
        self._incarnation += 1
        try:
            await create_memory(worker, self._incarnation, pid, self.config.arena)
            prefix = self._zmq_paths.prefix(worker.incarnation) if self._zmq_paths else ""
            welcome(
                worker, connection, self.input_arena.segment, self._settings, self.member, prefix
            )
            worker.channel = channel = open_channel(connection, prefix, is_gateway=True)
        except (IskanderError, OSError):
            worker.detach()
            raise
        self._loop.add_reader(channel, self._message_reader.read, worker, channel)
        self._on_event(worker, Event.ATTACHED)

    def _on_load_error(self, worker: Worker, error: IskanderError) -> None:
        if not worker.has_been_ready:
            self._spawner.boot_error = error

    def _on_hung(self, worker: Worker, since_beat_ns: int) -> None:
        worker.was_stopped = worker.is_stopped
        log.worker_hung(
            worker=worker.index,
            silent_ms=since_beat_ns // NS_PER_MS,
            running=_running_batch(worker),
        )
        self._on_event(worker, Event.HUNG)

    def _set_timer(self, worker: Worker, delay_s: float, event: Event) -> None:
        self._timers.set(worker, delay_s, self._on_event, worker, event)

    def _load(self, worker: Worker) -> None:
        self._set_timer(worker, self._settings.start_s, Event.TIMED_OUT)
        self.loading.load_next(worker)

    def _open(self, worker: Worker) -> None:
        self._timers.clear(worker)
        worker.has_been_ready = True
        worker.is_replacement_pending = False
        if self.member.is_first:
            self.recycling.on_open(worker)
        if worker.failures:
            self._set_timer(worker, STEADY_S, Event.STEADY)
        self.dispatcher.open(worker)
        self.loading.load_next(worker)

    def _keep_open(self, worker: Worker) -> None:
        """Keep the queues open if a replacement is certain."""
        worker.is_replacement_pending = self._settings.spawn or worker.is_recycling
        self._no_worker_timeout.update()

    def _drain(self, worker: Worker) -> None:
        self._set_timer(worker, self.config.server.drain_s, Event.TIMED_OUT)
        self.dispatcher.send(worker, [messages.Drain(self._is_stopping)])
        self.loading.on_leaving(worker, is_stopping=self._is_stopping)

    def _detach(self, worker: Worker) -> None:
        if worker.in_flight:
            log.worker_ended(worker=worker.index, running=_running_batch(worker))
        # Before the heartbeat is unmapped, which identifies the running batch.
        if not worker.device_error:
            self._quarantines.record_running_model(worker)
        self.dispatcher.on_lost(worker)
        self.loading.on_lost(worker)
        if worker.channel is not None:
            self._loop.remove_reader(worker.channel)
        worker.detach()

    def _abort(self, worker: Worker) -> None:
        self._set_timer(worker, ABORT_S, Event.TIMED_OUT)
        worker.dump()

    def _kill(self, worker: Worker) -> None:
        """Kill the process, or only detach from it if peers may still use it."""
        is_used_by_peers = bool(self.member.peers) and (
            not self.member.is_first or (worker.state is State.LOADING and worker.child is None)
        )
        if not is_used_by_peers:
            worker.kill()
        elif worker.channel is not None:
            self._loop.remove_reader(worker.channel)
            self._loop.call_soon(self._on_released, worker, worker.incarnation)


def _is_running(worker: Worker) -> bool:
    """Whether a shutdown waits for a worker: not for a killed process of a lost device."""
    has_process = worker.child is not None and not worker.device_error
    return worker.state is not State.STOPPED or has_process


def _running_batch(worker: Worker) -> str:
    """Describe the running batch according to the heartbeat."""
    batch_id = worker.last_beat().batch_id
    if batch_id not in worker.in_flight:
        return f"with {len(worker.in_flight)} batches sent and none started"
    return f"with batch {batch_id} of model `{worker.in_flight[batch_id].lane.title}`"
