"""The worker processes: started, taken on, given their models, watched, replaced, stopped.

What to do is decided in `lifecycle`; here it is done. Reads as: an event comes in, the table says
what the worker's place becomes and what to do, and those things are done in order. What a worker's
silence, age or absence means is in `watch`, `recycling` and `vacancy`; how it is started is in
`starting`, which place it gets in `taking_on`, which models in `loading`.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from iskander.clock import NS_PER_MS, NS_PER_S, now_ns
from iskander.config.schema import Config
from iskander.control.channel import Channel
from iskander.control.messages import (
    Drain,
    Hello,
    Leaving,
    Loaded,
    LoadFailed,
    Notice,
    Stepped,
    ToGateway,
    Unloaded,
    encode,
)
from iskander.control.runtime_directory import ATTACH_SOCKET, Member
from iskander.errors import IskanderError, NotReady
from iskander.memory.arena import usable_bytes
from iskander.scheduling.dispatch import Dispatcher
from iskander.scheduling.input_arena import InputArena
from iskander.scheduling.lane import Lane
from iskander.scheduling.worker_slot import WorkerSlot
from iskander.supervision.file_freshness import FileFreshness
from iskander.supervision.lifecycle import Action, Event, State, step, validate
from iskander.supervision.model_loader import ModelLoader
from iskander.supervision.no_worker_timeout import NoWorkerTimeout
from iskander.supervision.quarantine import Quarantines
from iskander.supervision.recycling import Recycling
from iskander.supervision.registration import RegistrationListener, create_memory, slot_for, welcome
from iskander.supervision.spawner import Spawner, Timers
from iskander.supervision.watchdog import Watchdog
from iskander.supervision.worker import ProcessExit, SlotPlan, Worker
from iskander.supervision.worker_messages import WorkerMessageReader

log = logging.getLogger("iskander.supervisor")

STEADY_S = 10.0
"""A worker that was ready for so long has not failed in a row."""
ABORT_S = 0.02
"""A process writes its stack in a few milliseconds, or cannot: one that is stopped never does."""
STOP_S = 5.0


class ServedModels(Protocol):
    """The models of the repository, as far as the supervisor needs them.

    Attributes:
        by_key: Every lane by the key that control messages use.
        freshness: Detects model files that changed after they were loaded.
        workers: Every worker slot; set by the supervisor.
    """

    by_key: dict[int, Lane]
    freshness: FileFreshness
    workers: list[Worker]

    @property
    def is_settled(self) -> bool:
        """Whether each model has its workers or failed to load."""

    def reasons(self) -> Iterable[str]:
        """Describe each model that is not ready."""


class Supervisor:
    """Every place of the plan and the process that fills it.

    Args:
        config: Checked settings.
        places: The plan.
        folder: The runtime directory; its lock is held by the caller.
        member: Which of the gateway's processes this one is; the first starts and ends workers.
        models: The lanes; told which workers there are.
        intake: Owner of the input arena.
        dispatcher: Told who may have work.
        on_change: Called when what is ready may have changed.
    """

    def __init__(
        self,
        config: Config,
        places: list[SlotPlan],
        *,
        folder: Path,
        member: Member,
        models: ServedModels,
        intake: InputArena,
        dispatcher: Dispatcher,
        on_change: Callable[[], None],
    ) -> None:
        validate()
        self._config = config
        self._settings = settings = config.workers
        self._member = member
        self._models = models
        self._intake = intake
        self._dispatcher = dispatcher
        dispatcher.end_worker = self._on_deaf
        self._on_change = on_change
        self.workers = models.workers = [Worker(place, is_ours=member.is_first) for place in places]
        self._hearing = WorkerMessageReader(dispatcher, self)
        self._incarnation = 0
        self._is_stopping = False
        self._reception = RegistrationListener(folder / ATTACH_SOCKET, self._take_on)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._timers = Timers()
        self._starting = Spawner(
            settings,
            folder,
            is_first=member.is_first,
            timers=self._timers,
            happened=self._happened,
            ended=self._on_process_end,
        )
        self.loading = ModelLoader(
            models.by_key,
            self.workers,
            usable_bytes(config.arena.output_bytes),
            freshness=models.freshness,
            happened=self._happened,
            on_refused=self._on_refused,
        )
        self._watch = Watchdog(
            self.workers,
            int(settings.hang_s * NS_PER_S),
            self._on_hung,
            factor=settings.hang_factor,
            is_shared=bool(member.siblings) and member.is_first,
        )
        self._recycling = Recycling(self.workers, settings, self._on_recycle_due)
        self._vacancy = NoWorkerTimeout(
            models.by_key,
            self.workers,
            wait_s=settings.start_s,
            refuse=dispatcher.refuse_queued,
        )
        self._quarantines = Quarantines(
            models.by_key,
            self.workers,
            settings,
            is_first=member.is_first,
            loading=self.loading,
            refuse_queued=dispatcher.refuse_queued,
            happened=self._happened,
            on_change=self.noticed,
        )
        self._actions = self._make_actions()

    def start(self) -> None:
        """Listen for workers, and start those of the plan that do not live already."""
        self._reception.open()
        self._watch.start()
        if self._member.is_first:
            self._recycling.start()
            if self._settings.spawn:
                self._starting.fill(self.workers)

    async def until_ready(self) -> None:
        """Wait until every model has the workers that it needs, or is known not to load.

        Raises:
            ManifestError: A model cannot be loaded.
            NotReady: A worker does not start, or it took longer than `workers.start_s`.
        """
        try:
            async with asyncio.timeout(self._settings.start_s):
                while not self._models.is_settled:
                    if self._starting.boot_error is not None:
                        raise self._starting.boot_error
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise NotReady(
                f"the workers were not ready after {self._settings.start_s:g} s: "
                + "; ".join(self._models.reasons())
            ) from None

    def settle(self) -> None:
        """Replace no worker in order any more: the gateway is about to stop."""
        self._recycling.close()

    async def stop(self) -> None:
        """Let every worker go, and wait for the last; those that stay are killed.

        A worker that siblings still want stays until they have finished, too.
        """
        self._is_stopping = True
        self._reception.close()
        self._recycling.close()
        for worker in self.workers:
            self._happened(worker, Event.STOP)
        limit_s = STOP_S + (self._config.server.drain_s if self._member.siblings else 0)
        deadline_ns = now_ns() + int(limit_s * NS_PER_S)
        while any(w.state is not State.STOPPED or w.child is not None for w in self.workers):
            if now_ns() > deadline_ns:
                for worker in self.workers:
                    self._happened(worker, Event.TIMED_OUT)
                deadline_ns = now_ns() + NS_PER_S
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await self._changed.wait()
        self.close()

    def close(self) -> None:
        """Release everything at once; what still lives is killed."""
        self.kill_all()
        self.let_go()

    def let_go(self) -> None:
        """Release everything, and leave the workers to the siblings, and to whoever comes next."""
        for part in (
            self._timers,
            self._watch,
            self._recycling,
            self._vacancy,
            self._quarantines,
            self._reception,
        ):
            part.close()
        for worker in self.workers:
            if worker.channel is not None:
                self._loop.remove_reader(worker.channel)
            worker.detach()

    async def abandon(self) -> None:
        """End what a failed start has begun; workers that siblings have stay with them."""
        if not self._member.siblings:
            return await self.stop()
        for worker in self.workers:
            if worker.child is not None:
                worker.kill()
        self.let_go()

    def kill_all(self) -> None:
        """End every worker now; for an exit that waits for nothing."""
        for worker in self.workers:
            worker.kill()

    def _make_actions(self) -> dict[Action, Callable[[Worker], None]]:
        starting = self._starting
        return {
            Action.SPAWN: starting.spawn,
            Action.SPAWN_LATER: starting.spawn_later,
            Action.SPAWN_NEXT: starting.spawn_next,
            Action.LOAD: self._load,
            Action.OPEN: self._open,
            Action.AWAIT: self._await,
            Action.CLOSE: self._dispatcher.close,
            Action.DRAIN: self._drain,
            Action.DETACH: self._detach,
            Action.COUNT_BOOT: starting.count_boot,
            Action.COUNT_CRASH: starting.count_crash,
            Action.FORGIVE: starting.forgive,
            Action.ABORT: self._abort,
            Action.KILL: self._kill,
        }

    def _happened(self, worker: Worker, event: Event) -> None:
        before = worker.state
        worker.state, actions = step(before, event)
        if actions or worker.state is not before:
            worker.story.append((now_ns(), event, worker.state))
            log.info("worker %d: %s, was %s, is %s", worker.index, event, before, worker.state)
        for action in actions:
            self._actions[action](worker)
        self._vacancy.look()
        self.noticed()

    def noticed(self) -> None:
        """What is ready may have changed."""
        self._changed.set()
        self._on_change()

    def on_message(self, worker: Worker, message: ToGateway) -> None:
        """A worker has said something that is not about a batch."""
        if isinstance(message, Stepped):
            self._models.by_key[message.model].measures.on_stepped(message.steps)
        elif isinstance(message, Leaving):
            self._happened(worker, Event.LEFT)
        elif isinstance(message, Notice):
            worker.notices.append(message.text)
            log.warning("worker %d: %s", worker.index, message.text)
        else:
            assert isinstance(message, Loaded | LoadFailed | Unloaded)
            self.loading.on_answer(worker, message)
            self.noticed()

    def on_garbled(self, worker: Worker, error: Exception) -> None:
        """End a worker that was not understood: somebody might wait for ever for what it meant."""
        index = worker.index
        log.error("worker %d is ended: a frame was not understood: %s", index, error)
        self._give_up(worker, worker.incarnation)

    def on_end(self, worker: Worker, channel: Channel) -> None:
        """A worker has gone."""
        self._loop.remove_reader(channel)
        self._happened(worker, Event.LOST)

    def on_worn(self, worker: Worker) -> None:
        """A worker has run as many batches as it should."""
        self._recycling.look(worker)

    def _on_deaf(self, slot: WorkerSlot) -> None:
        """End a worker that takes no messages, once whoever was sending has come to an end."""
        self._loop.call_soon(self._give_up, self.workers[slot.index], slot.incarnation)

    def _give_up(self, worker: Worker, incarnation: int) -> None:
        """End a process with which this one cannot talk, if it is still there."""
        if incarnation == worker.incarnation:
            is_loading = worker.state is State.LOADING
            self._happened(worker, Event.LOAD_FAILED if is_loading else Event.HUNG)

    def _on_let_go(self, worker: Worker, incarnation: int) -> None:
        if incarnation == worker.incarnation:
            self._happened(worker, Event.LOST)

    async def _take_on(self, connection: socket.socket, pid: int, hello: Hello) -> None:
        """Give a worker that came in its place, its memory and its models."""
        self._quarantines.follow(hello)
        worker = slot_for(self.workers, pid, hello)
        self._incarnation += 1
        try:
            await create_memory(worker, self._incarnation, pid, self._config.arena)
            welcome(worker, connection, self._intake.segment, self._settings, self._member)
        except (IskanderError, OSError):
            worker.detach()
            raise
        worker.channel = channel = Channel(connection)
        self._loop.add_reader(channel, self._hearing.take, worker, channel)
        self._happened(worker, Event.ATTACHED)

    def _on_refused(self, worker: Worker, error: IskanderError) -> None:
        if not worker.has_been_ready:
            self._starting.boot_error = error

    def _on_recycle_due(self, worker: Worker) -> None:
        self._happened(worker, Event.RECYCLE_DUE)

    def _on_hung(self, worker: Worker, silent_ns: int) -> None:
        worker.was_stopped = worker.is_stopped
        log.error(
            "worker %d has been silent for %d ms, %s: it is ended",
            worker.index,
            silent_ns // NS_PER_MS,
            _doing(worker),
        )
        self._happened(worker, Event.HUNG)

    def _on_process_end(self, worker: Worker, end: ProcessExit) -> None:
        self._quarantines.on_end(worker, end)

    def _later(self, worker: Worker, delay_s: float, event: Event) -> None:
        self._timers.set(worker, delay_s, self._happened, worker, event)

    def _load(self, worker: Worker) -> None:
        self._later(worker, self._settings.start_s, Event.TIMED_OUT)
        self.loading.ask_next(worker)

    def _open(self, worker: Worker) -> None:
        self._timers.clear(worker)
        worker.has_been_ready = True
        worker.is_awaited = False
        if self._member.is_first:
            self._recycling.opened(worker)
        if worker.failures:
            self._later(worker, STEADY_S, Event.STEADY)
        self._dispatcher.open(worker)
        self.loading.ask_next(worker)

    def _await(self, worker: Worker) -> None:
        """Let requests wait where it is known that another process will come."""
        worker.is_awaited = self._settings.spawn or worker.is_due
        self._vacancy.look()

    def _drain(self, worker: Worker) -> None:
        assert worker.channel is not None
        self._later(worker, self._config.server.drain_s, Event.TIMED_OUT)
        worker.channel.send(encode([Drain(self._is_stopping)]))
        self.loading.on_leaving(worker, is_stopping=self._is_stopping)

    def _detach(self, worker: Worker) -> None:
        if worker.in_flight:
            log.error("worker %d is gone, %s", worker.index, _doing(worker))
        # While the beat can still be read: it says which batch was running.
        self._quarantines.suspect(worker)
        self._dispatcher.on_lost(worker)
        self.loading.on_lost(worker)
        worker.detach()

    def _abort(self, worker: Worker) -> None:
        self._later(worker, ABORT_S, Event.TIMED_OUT)
        worker.dump()

    def _kill(self, worker: Worker) -> None:
        """End the process; one that siblings have, and that failed here only, is let go."""
        is_theirs = bool(self._member.siblings) and (
            not self._member.is_first or (worker.state is State.LOADING and worker.child is None)
        )
        if not is_theirs:
            worker.kill()
        elif worker.channel is not None:
            self._loop.remove_reader(worker.channel)
            self._loop.call_soon(self._on_let_go, worker, worker.incarnation)


def _doing(worker: Worker) -> str:
    """What a worker was at, as far as its beat says."""
    batch_id = worker.last_beat().batch_id
    if batch_id not in worker.in_flight:
        return f"with none of the batches begun that it was sent, {len(worker.in_flight)}"
    lane = worker.in_flight[batch_id].lane
    return f"with batch {batch_id} of model `{lane.title}`"
