"""Worker registration: slot assignment, output arena, and the Welcome message.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeAlias

from iskander import __version__
from iskander.config.schema import ArenaConfig, WorkersConfig
from iskander.errors import IskanderError, ProtocolError
from iskander.foundation.logs import gateway as gateway_log
from iskander.foundation.logs import workers as log
from iskander.gateway.supervision.lifecycle import State
from iskander.gateway.supervision.worker import Worker
from iskander.gateway.transport.local_listener import LocalListener
from iskander.interprocess.control import attach
from iskander.interprocess.control.channel import FRAME_BYTES_MAX
from iskander.interprocess.control.messages import Hello, Refused, Welcome, require_protocol
from iskander.interprocess.control.runtime_directory import Member
from iskander.interprocess.memory.backing import BackingOptions
from iskander.interprocess.memory.heartbeat import HEARTBEAT_BYTES
from iskander.interprocess.memory.segment import Segment

Register: TypeAlias = Callable[[socket.socket, int, Hello], Awaitable[None]]

FREE_STATES = (State.ABSENT, State.LOOPING, State.STARTING)


class RegistrationListener:
    """The attach socket; the caller holds the lock of the runtime directory.

    An `IskanderError` from `register` rejects the worker, which receives the error.
    """

    def __init__(self, path: Path, register: Register) -> None:
        self._path = path
        self._register = register
        self._listener: LocalListener | None = None

    def open(self) -> None:
        """Start to listen."""
        listener = attach.listen(str(self._path))
        self._listener = LocalListener(listener, FRAME_BYTES_MAX, self._on_hello, self._reject)
        self._listener.open()

    def close(self) -> None:
        """Stop listening and remove the socket."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)

    async def _on_hello(self, connection: socket.socket, frame: bytes) -> None:
        attach.require_same_user(connection)
        hello = attach.read_hello(frame)
        require_protocol(hello.protocol)
        _require_release(hello.version)
        pid, _ = attach.peer_of(connection)
        await self._register(connection, pid, hello)

    def _reject(self, connection: socket.socket, error: Exception) -> None:
        log.worker_registration_rejected(reason=str(error) or "no message received")
        if isinstance(error, TimeoutError):
            return  # A slow worker retries if it receives no answer.
        code = error.code if isinstance(error, IskanderError) else ProtocolError.code
        attach.send_answer(connection, Refused(code, str(error)))


def _require_release(version: str) -> None:
    """Reject a worker that waited through an upgrade; its service manager starts the new one."""
    if version != __version__:
        raise ProtocolError(f"the worker is of release {version}, and the gateway of {__version__}")


def slot_for(workers: Iterable[Worker], pid: int, hello: Hello) -> Worker:
    """Return the slot that started a process, its previous slot, or any free one of its group."""
    free = [each for each in workers if each.state in FREE_STATES and not each.is_registering]
    free = [each for each in free if each.plan.pool == hello.pool]
    own = [each for each in free if each.child is not None and each.child.pid == pid]
    unclaimed = [each for each in free if each.child is None]
    previous = [each for each in unclaimed if each.index == hello.index]
    any_in_group = [each for each in unclaimed if hello.group in (None, each.plan.group)]
    for worker in own + previous + any_in_group:
        return worker
    model = f" of model `{hello.pool}`" if hello.pool else ""
    group = f" in core group {hello.group}" if hello.group is not None else ""
    raise ProtocolError(f"no worker slot{model} is free{group}")


async def create_memory(worker: Worker, incarnation: int, pid: int, arena: ArenaConfig) -> None:
    """Create a worker's segments, the output arena on a thread; the slot is reserved meanwhile.

    Raises SegmentError if the system refused the memory, ProtocolError if the slot was stopped.
    """
    index = worker.index
    options = BackingOptions(worker.plan.node, arena.huge_pages, arena.lock)
    worker.is_registering = True
    create = partial(Segment.create, f"iskander-output-{index}", arena.output_bytes, options)
    creation = asyncio.get_running_loop().run_in_executor(None, create)
    try:
        output = await asyncio.shield(creation)
    except asyncio.CancelledError:
        creation.add_done_callback(_close_segment)
        raise
    finally:
        worker.is_registering = False
    if worker.state not in FREE_STATES:
        output.close()
        raise ProtocolError(f"worker slot {index} is {worker.state}")
    worker.attach(incarnation, pid, output, arena.output_bytes)
    title = f"output arena of worker {index}"
    gateway_log.output_arena_allocated(arena=title, backing=str(worker.backing))
    for notice in worker.backing.notices:
        gateway_log.output_arena_restricted(arena=title, notice=notice)


def _close_segment(creation: asyncio.Future[Segment]) -> None:
    if creation.exception() is None:
        creation.result().close()


def welcome(
    worker: Worker,
    connection: socket.socket,
    inputs: Segment,
    settings: WorkersConfig,
    member: Member,
    channel: str,
) -> None:
    """Send a worker its slot and the descriptors of its memory."""
    assert worker.output is not None and worker.beat is not None
    answer = Welcome(
        incarnation=worker.incarnation,
        index=worker.index,
        group=worker.plan.group,
        cpus=worker.plan.cpus,
        cores=worker.plan.cores,
        node=worker.plan.node,
        input_bytes=len(inputs),
        output_bytes=len(worker.output),
        heartbeat_bytes=HEARTBEAT_BYTES,
        reattach_s=settings.reattach_s,
        peers=member.peers,
        has_one_pool=settings.thread_pool == "worker",
        busy_poll_us=settings.busy_poll_us,
        channel=channel,
    )
    read_end = worker.open_abort_pipe()
    try:
        descriptors = (inputs.fd, worker.output.fd, worker.beat.fd, read_end)
        attach.send_answer(connection, answer, descriptors)
    finally:
        os.close(read_end)
