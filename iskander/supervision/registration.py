"""Taking a worker on that has come in: which place it gets, its memory, and what it is told.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeAlias

from iskander.config.schema import ArenaConfig, WorkersConfig
from iskander.control import attach
from iskander.control.channel import FRAME_BYTES_MAX
from iskander.control.messages import Hello, Refused, Welcome, require_protocol
from iskander.control.runtime_directory import Member
from iskander.errors import IskanderError, ProtocolError
from iskander.memory.backing import BackingOptions, log_backing
from iskander.memory.heartbeat import BEAT_BYTES
from iskander.memory.segment import Segment
from iskander.supervision.lifecycle import State
from iskander.supervision.worker import Worker
from iskander.transport.local_listener import LocalListener

TakeOn: TypeAlias = Callable[[socket.socket, int, Hello], Awaitable[None]]

log = logging.getLogger("iskander.reception")


class RegistrationListener:
    """The attach socket.

    Args:
        path: Of the socket; the runtime directory's lock is held.
        take_on: Called with the connection, the peer's pid and its hello; it may refuse by
            raising an `IskanderError`, which is what the peer is told.
    """

    def __init__(self, path: Path, take_on: TakeOn) -> None:
        self._path = path
        self._take_on = take_on
        self._doorstep: LocalListener | None = None

    def open(self) -> None:
        """Begin to let workers in."""
        listening = attach.listen(str(self._path))
        self._doorstep = LocalListener(listening, FRAME_BYTES_MAX, self._greet, self._refuse)
        self._doorstep.open()

    def close(self) -> None:
        """Let nobody in any more."""
        if self._doorstep is not None:
            self._doorstep.close()
            self._doorstep = None
            self._path.unlink(missing_ok=True)

    async def _greet(self, connection: socket.socket, frame: bytes) -> None:
        attach.require_peer(connection)
        hello = attach.read_hello(frame)
        require_protocol(hello.protocol)
        await self._take_on(connection, attach.peer_of(connection).pid, hello)

    def _refuse(self, connection: socket.socket, error: Exception) -> None:
        log.warning("a worker was not taken on: %s", str(error) or "it said nothing")
        if isinstance(error, TimeoutError):
            return  # It may only have been slow: whom nobody answers asks again.
        code = error.code if isinstance(error, IskanderError) else ProtocolError.code
        attach.send_answer(connection, Refused(code, str(error)))


log = logging.getLogger("iskander.supervisor")

VACANT = (State.ABSENT, State.LOOPING, State.STARTING)


def is_free(worker: Worker) -> bool:
    """Whether a place can have a process, and none is on its way to it."""
    return worker.state in VACANT and not worker.is_claimed


def slot_for(workers: Iterable[Worker], pid: int, hello: Hello) -> Worker:
    """The place that a process gets: where it was started for, its old one, else any in its group.

    Raises:
        ProtocolError: None is free.
    """
    free = [each for each in workers if is_free(each) and each.place.pool == hello.pool]
    own = [each for each in free if each.child is not None and each.child.pid == pid]
    unclaimed = [each for each in free if each.child is None]
    old = [each for each in unclaimed if each.index == hello.index]
    any_in_group = [each for each in unclaimed if hello.group in (None, each.place.group)]
    for worker in own + old + any_in_group:
        return worker
    whose = f" of model `{hello.pool}`" if hello.pool else ""
    raise ProtocolError(
        f"no place{whose} is free in core group {hello.group}"
        if hello.group is not None
        else f"every place{whose} of the plan has its worker"
    )


async def create_memory(worker: Worker, incarnation: int, pid: int, arena: ArenaConfig) -> None:
    """Make the segments that are this worker's own: the large one in a thread.

    Nobody else gets the place meanwhile.

    Raises:
        SegmentError: The system has not the memory.
        ProtocolError: The place is not to be filled any more.
    """
    index = worker.index
    options = BackingOptions(worker.place.node, arena.huge_pages, arena.lock)
    worker.is_claimed = True
    making = asyncio.get_running_loop().run_in_executor(
        None, Segment.create, f"iskander-output-{index}", arena.output_bytes, options
    )
    try:
        output = await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_close)
        raise
    finally:
        worker.is_claimed = False
    if worker.state not in VACANT:
        output.close()
        raise ProtocolError(f"the place {index} is {worker.state}")
    worker.attach(incarnation, pid, output, arena.output_bytes)
    log_backing(log, f"output arena of worker {worker.index}", worker.backing)


def _close(made: asyncio.Future[Segment]) -> None:
    """Memory came that nobody waits for any more."""
    if made.exception() is None:
        made.result().close()


def welcome(
    worker: Worker,
    connection: socket.socket,
    inputs: Segment,
    settings: WorkersConfig,
    member: Member,
) -> None:
    """Tell it its place, and hand it the descriptors of its memory.

    Raises:
        OSError: It is gone.
    """
    assert worker.output is not None and worker.beat is not None
    answer = Welcome(
        incarnation=worker.incarnation,
        index=worker.index,
        group=worker.place.group,
        cpus=worker.place.cpus,
        cores=worker.place.cores,
        node=worker.place.node,
        input_bytes=len(inputs),
        output_bytes=len(worker.output),
        beat_bytes=BEAT_BYTES,
        reattach_s=settings.reattach_s,
        siblings=member.siblings,
        has_one_pool=settings.thread_pool == "worker",
        busy_poll_us=settings.busy_poll_us,
    )
    read_end = worker.open_abort_pipe()
    try:
        descriptors = (inputs.fd, worker.output.fd, worker.beat.fd, read_end)
        attach.send_answer(connection, answer, descriptors)
    finally:
        os.close(read_end)
