"""The worker processes: started, taken on, given their models, watched, replaced, stopped.

What to do is decided in `lifecycle`; here it is done. Reads as: an event comes in, the table says
what the worker's place becomes and what to do, and those things are done in order.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from iskander.clock import NS_PER_MS, NS_PER_S, now_ns
from iskander.config import Config
from iskander.contract.tensors import Contract, require_room
from iskander.errors import IskanderError, ManifestError, NotReady, ProtocolError
from iskander.gateway.dispatch import Dispatcher
from iskander.gateway.intake import Intake
from iskander.gateway.lanes import Lane
from iskander.gateway.lifecycle import Action, Event, State, backoff_s, step
from iskander.gateway.reception import Reception
from iskander.gateway.workers import Place, Worker
from iskander.memory.arena import usable_bytes
from iskander.memory.beat import BEAT_BYTES
from iskander.wire import attach
from iskander.wire.channel import Receiver, Sender, open_context
from iskander.wire.messages import (
    Done,
    Drain,
    Failed,
    Hello,
    Load,
    Loaded,
    LoadFailed,
    Ready,
    Welcome,
    decode_to_gateway,
    encode,
)

log = logging.getLogger("iskander.supervisor")

STEADY_NS = 10 * NS_PER_S
"""A worker that was ready for so long has not failed in a row."""
ADOPTION_TURN_S = 0.1
"""How often a worker of an earlier gateway, perhaps busy, is looked for again."""
WATCH_INTERVAL_S = 0.5
STOP_S = 5.0
BOOT_STARTS_MAX = 3


class Supervisor:
    """Every place of the plan and the process that fills it.

    Args:
        config: Checked settings.
        places: The plan.
        folder: The runtime directory; its lock is held by the caller.
        lanes: By the key of their model.
        intake: Owner of the input arena.
        dispatcher: Told who may have work.
        on_change: Called when what is ready may have changed.
    """

    def __init__(
        self,
        config: Config,
        places: list[Place],
        *,
        folder: Path,
        lanes: dict[int, Lane],
        intake: Intake,
        dispatcher: Dispatcher,
        on_change: Callable[[], None],
    ) -> None:
        self._config = config
        self._folder = folder
        self._lanes = lanes
        self._intake = intake
        self._dispatcher = dispatcher
        self._on_change = on_change
        self._output_bytes = usable_bytes(config.arena.output_bytes)
        self.workers = [Worker(place) for place in places]
        self._by_incarnation: dict[int, Worker] = {}
        # From the clock, so that no two gateways, one after the other, give the same numbers: what
        # a worker says to one that is gone must mean nothing to the next.
        self._incarnation = now_ns()
        for stale in folder.glob("*.ipc"):
            stale.unlink()
        self._context = open_context()
        self._results = Receiver(self._context, str(folder / f"results-{self._incarnation}.ipc"))
        self._reception = Reception(folder / "attach.sock", self._take_on)
        self._loop = asyncio.get_running_loop()
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._watch_timer: asyncio.TimerHandle | None = None
        self._boot_error: IskanderError | None = None
        self._changed = asyncio.Event()
        self._actions = {
            Action.SPAWN: self._spawn,
            Action.SPAWN_LATER: self._spawn_later,
            Action.LOAD: self._load,
            Action.OPEN: self._open,
            Action.CLOSE: dispatcher.close,
            Action.DRAIN: self._drain,
            Action.DETACH: self._detach,
            Action.KILL: Worker.kill,
        }

    @property
    def is_ready(self) -> bool:
        """Whether every model has a warmed worker."""
        return all(lane.is_ready for lane in self._lanes.values())

    def start(self) -> None:
        """Listen for workers, and start those of the plan that do not live already."""
        self._reception.open()
        self._loop.add_reader(self._results.fd, self.receive)
        self._watch()
        if not self._config.workers.spawn:
            return
        deadline_ns = now_ns() + int(self._config.workers.start_s * NS_PER_S / 2)
        for worker in self.workers:
            self._adopt_or_spawn(worker, deadline_ns)

    async def until_ready(self) -> None:
        """Wait until every model has a warmed worker.

        Raises:
            ManifestError: A model cannot be loaded.
            NotReady: It took longer than `workers.start_s`.
        """
        try:
            async with asyncio.timeout(self._config.workers.start_s):
                while not self.is_ready:
                    if self._boot_error is not None:
                        raise self._boot_error
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise NotReady(
                f"the workers were not ready after {self._config.workers.start_s:g} s"
            ) from None

    def receive(self) -> None:
        """Take everything that workers have said."""
        dispatcher = self._dispatcher
        for frame in self._results.receive_waiting():
            try:
                messages = decode_to_gateway(frame)
            except ValueError as error:
                log.error("a worker's frame was not understood: %s", error)
                continue
            for message in messages:
                if type(message) is Done:
                    dispatcher.on_done(message)
                elif type(message) is Failed:
                    dispatcher.on_failed(message)
                elif type(message) is not Ready:
                    worker = self._by_incarnation.get(message.incarnation)
                    if worker is not None:
                        self._on_news(worker, message)
        dispatcher.pump()

    async def stop(self) -> None:
        """Let every worker go, and wait for the last; those that stay are killed."""
        self._reception.close()
        for worker in self.workers:
            self._happened(worker, Event.STOP)
        deadline_ns = now_ns() + int(STOP_S * NS_PER_S)
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
        for timer in (*self._timers.values(), self._watch_timer):
            if timer is not None:
                timer.cancel()
        for worker in self.workers:
            worker.kill()
            if worker.connection is not None:
                self._loop.remove_reader(worker.connection)
            worker.detach()
        self._loop.remove_reader(self._results.fd)
        self._results.close()
        self._reception.close()
        self._context.destroy(0)

    def kill_all(self) -> None:
        """End every worker now; for an exit that waits for nothing."""
        for worker in self.workers:
            worker.kill()

    def _happened(self, worker: Worker, event: Event) -> None:
        before = worker.state
        worker.state, actions = step(before, event)
        if actions or worker.state is not before:
            worker.story.append((now_ns(), event, worker.state))
            log.info(
                "worker %d: %s, was %s, is %s", worker.place.index, event, before, worker.state
            )
        for action in actions:
            self._actions[action](worker)
        self._changed.set()
        self._on_change()

    def _take_on(self, connection: socket.socket, pid: int, hello: Hello) -> None:
        """Give a worker that came in its place, its memory and its models."""
        worker = self._vacancy(pid, hello.group, hello.index)
        if worker is None:
            raise ProtocolError(
                f"no place is free in core group {hello.group}"
                if hello.group is not None
                else "every place of the plan has its worker"
            )
        self._incarnation += 1
        place = worker.place
        try:
            worker.attach(self._incarnation, pid, self._config.arena.output_bytes)
        except (IskanderError, OSError):
            worker.detach()
            raise
        self._by_incarnation[self._incarnation] = worker
        assert worker.output is not None and worker.beat is not None
        work_address = f"ipc://{self._folder}/work-{self._incarnation}.ipc"
        welcome = Welcome(
            incarnation=self._incarnation,
            index=place.index,
            group=place.group,
            cpus=place.cpus,
            node=place.node,
            work_address=work_address,
            results_address=self._results.address,
            input_bytes=len(self._intake.segment),
            output_bytes=len(worker.output),
            beat_bytes=BEAT_BYTES,
            reattach_s=self._config.workers.reattach_s,
        )
        descriptors = (self._intake.segment.fd, worker.output.fd, worker.beat.fd)
        try:
            attach.send_answer(connection, welcome, descriptors)
        except OSError:
            del self._by_incarnation[self._incarnation]
            worker.detach()
            raise
        worker.connection = connection
        worker.sender = Sender(self._context, work_address)
        self._loop.add_reader(connection, self._on_end, worker)
        self._happened(worker, Event.ATTACHED)

    def _vacancy(self, pid: int, group: int | None, index: int | None) -> Worker | None:
        """The place for a worker: where it was started for, its old one, else any in its group."""
        free = [w for w in self.workers if w.state in (State.ABSENT, State.STARTING)]
        own = [w for w in free if w.child is not None and w.child.pid == pid]
        old = [w for w in free if w.place.index == index and w.child is None]
        any_in_group = [w for w in free if group in (None, w.place.group) and w.child is None]
        return next(iter(own + old + any_in_group), None)

    def _on_end(self, worker: Worker) -> None:
        assert worker.connection is not None
        self._loop.remove_reader(worker.connection)
        # What it said before it ended is still to be read.
        self.receive()
        self._happened(worker, Event.LOST)

    def _on_news(self, worker: Worker, message: object) -> None:
        if isinstance(message, Loaded):
            lane = self._lanes[message.model]
            try:
                self._accept_contract(lane, message.contract)
            except IskanderError as error:
                self._on_load_failed(worker, lane, error)
                return
            worker.models.add(message.model)
            log.info(
                "worker %d loaded %s in %.0f ms: %s, %d threads",
                worker.place.index,
                lane.title,
                message.load_ms,
                ", ".join(message.providers),
                message.threads,
            )
            if len(worker.models) == len(self._lanes):
                self._happened(worker, Event.LOADED)
        elif isinstance(message, LoadFailed):
            refusal = IskanderError.from_wire({"code": message.code, "message": message.message})
            self._on_load_failed(worker, self._lanes[message.model], refusal)
        else:
            self._happened(worker, Event.LEFT)

    def _accept_contract(self, lane: Lane, contract: Contract) -> None:
        if lane.contract is None:
            require_room(contract, lane.model.rows_max, self._output_bytes)
            lane.set_contract(contract)
        elif lane.contract != contract:
            raise ManifestError(
                "its contract is not the one that is being served: the files were changed"
            )

    def _on_load_failed(self, worker: Worker, lane: Lane, error: IskanderError) -> None:
        log.error("worker %d cannot serve %s: %s", worker.place.index, lane.title, error.message)
        if not worker.has_been_ready:
            self._boot_error = ManifestError(f"model `{lane.title}`: {error.message}")
        self._happened(worker, Event.LOAD_FAILED)

    def _spawn(self, worker: Worker) -> None:
        try:
            child, pidfd = worker.spawn(self._folder / "attach.sock")
        except OSError as error:
            log.error("worker %d cannot be started: %s", worker.place.index, error)
            self._happened(worker, Event.EXITED)
            return
        self._loop.add_reader(pidfd, self._on_exit, worker, child, pidfd)
        self._later(worker, self._config.workers.start_s, Event.TIMED_OUT)

    def _adopt_or_spawn(self, worker: Worker, deadline_ns: int) -> None:
        """Wait while a worker of an earlier gateway lives in this place; else start one."""
        if worker.state is not State.ABSENT:
            return
        lock = attach.LockFile(self._folder / f"worker-{worker.place.index}.lock")
        if not lock.take() and now_ns() < deadline_ns:
            self._timers[worker.place.index] = self._loop.call_later(
                ADOPTION_TURN_S, self._adopt_or_spawn, worker, deadline_ns
            )
            return
        lock.release()
        self._happened(worker, Event.SPAWN_DUE)

    def _spawn_later(self, worker: Worker) -> None:
        was_steady = worker.opened_ns and now_ns() - worker.opened_ns > STEADY_NS
        worker.opened_ns = 0
        worker.failures = 0 if was_steady else worker.failures + 1
        self._later(worker, backoff_s(worker.failures), Event.SPAWN_DUE)

    def _later(self, worker: Worker, delay_s: float, event: Event) -> None:
        index = worker.place.index
        if index in self._timers:
            self._timers[index].cancel()
        if event is Event.SPAWN_DUE and not self._config.workers.spawn:
            return
        self._timers[index] = self._loop.call_later(delay_s, self._happened, worker, event)

    def _load(self, worker: Worker) -> None:
        assert worker.sender is not None
        self._later(worker, self._config.workers.start_s, Event.TIMED_OUT)
        worker.sender.send(encode([Load(lane.model) for lane in self._lanes.values()]))

    def _open(self, worker: Worker) -> None:
        self._timers.pop(worker.place.index).cancel()
        worker.has_been_ready = True
        worker.opened_ns = now_ns()
        self._dispatcher.open(worker)

    def _drain(self, worker: Worker) -> None:
        assert worker.sender is not None
        self._later(worker, self._config.server.drain_s, Event.TIMED_OUT)
        worker.sender.send(encode([Drain()]))

    def _detach(self, worker: Worker) -> None:
        self._dispatcher.on_lost(worker)
        self._by_incarnation.pop(worker.incarnation, None)
        (self._folder / f"work-{worker.incarnation}.ipc").unlink(missing_ok=True)
        worker.detach()
        abandoned = [lane for lane in self._lanes.values() if not lane.is_ready]
        self._loop.call_later(self._config.workers.start_s, self._give_up_on, abandoned)

    def _give_up_on(self, lanes: list[Lane]) -> None:
        self._dispatcher.refuse_queued(lane for lane in lanes if not lane.is_ready)

    def _on_exit(self, worker: Worker, child: subprocess.Popen[bytes], pidfd: int) -> None:
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        code = child.wait()
        if worker.child is not child:
            return
        worker.child = None
        if code:
            log.warning("worker process %d ended with %d", child.pid, code)
        if not worker.has_been_ready and worker.starts >= BOOT_STARTS_MAX:
            self._boot_error = NotReady(
                f"worker {worker.place.index} ended {worker.starts} times before it was ready, "
                f"the last time with {code}"
            )
        self._happened(worker, Event.EXITED)

    def _watch(self) -> None:
        """Look at the beats of workers that have batches."""
        limit_ns = int(self._config.workers.hang_s * NS_PER_S)
        for worker in self.workers:
            if worker.in_flight:
                oldest_ns = next(iter(worker.in_flight.values())).sent_ns
                silent_ns = now_ns() - max(worker.last_beat().at_ns, oldest_ns)
                if silent_ns > limit_ns:
                    log.error(
                        "worker %d has been silent for %d ms",
                        worker.place.index,
                        silent_ns // NS_PER_MS,
                    )
                    self._happened(worker, Event.HUNG)
        self._watch_timer = self._loop.call_later(WATCH_INTERVAL_S, self._watch)
