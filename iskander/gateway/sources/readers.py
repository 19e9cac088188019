"""Processes that read sources: start, reuse, deadlines and end.

A process serves one request at a time, and further ones while no request fails. It is killed when a
request fails, is cancelled or makes no progress, and after some idle time. What it has not sent yet
is in the buffers of its socket; the gateway holds one frame.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import Final, TypeVar

import msgspec

from iskander.config.sources import SourceReadsConfig
from iskander.errors import IskanderError, LimitExceeded, Overloaded, ReaderLost
from iskander.foundation.logs import workers as log
from iskander.gateway.auth.source import Source
from iskander.gateway.sources.messages import (
    HEAD,
    LENGTH,
    REQUEST_BYTES_MAX,
    Envelope,
    Frame,
    Kind,
    PlanRequest,
    Request,
    read_error,
    read_head,
)
from iskander.gateway.sources.slots import FairSlots, Held, SlotsFull
from iskander.gateway.supervision.worker import Child, start_process

REQUESTS_MAX: Final = 1000
"""Requests of one process, after which another one replaces it."""
PLANS_MAX: Final = 2
"""Plans at once; they do not wait for reads, which clients may leave open."""
WAITING_MAX: Final = 256
"""Plans, and reads, that wait for a process; more are rejected."""
STOP_S: Final = 5.0
RETRY_MS: Final = 1000

ResultT = TypeVar("ResultT")


def _start_process(memory_bytes: int) -> tuple[socket.socket, Child, int]:
    """Start a process; return the gateway's end of its socket, it, and its pidfd.

    May raise OSError; then nothing is left.
    """
    environment = dict(os.environ, OPENBLAS_NUM_THREADS="1", ARROW_DEFAULT_MEMORY_POOL="system")
    environment.pop("NOTIFY_SOCKET", None)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        command = [sys.executable, "-P", "-m", "iskander.lake.reader"]
        command += ["--socket", str(theirs.fileno()), "--parent", str(os.getpid())]
        command += ["--memory", str(memory_bytes)]
        try:
            child, pidfd = start_process(command, environment, passed=(theirs.fileno(),))
        except OSError:
            ours.close()
            raise
    ours.setblocking(False)
    return ours, child, pidfd


class Reader:
    """A reader process, and the gateway's end of its socket.

    Attributes:
        is_outdated: Whether the limits have changed since its start.
        has_answered: Whether the last frame of the request was received.
    """

    def __init__(self, memory_bytes: int, frame_bytes: int, cpus: frozenset[int]) -> None:
        self._loop = asyncio.get_running_loop()
        self._frame_bytes = frame_bytes
        self.requests = 0
        self.is_outdated = False
        self.has_answered = False
        self.idle_timer: asyncio.TimerHandle | None = None
        try:
            self._socket, self._child, self._pidfd = _start_process(memory_bytes)
        except OSError as error:
            raise ReaderLost(f"the reader process does not start: {error.strerror}") from None
        if cpus:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(self._child.pid, cpus)
        self.ended = self._loop.create_future()
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    async def send(self, request: Request) -> None:
        """Send a request; the process is idle."""
        self.requests += 1
        self.has_answered = False
        message = msgspec.msgpack.encode(Envelope(request))
        if len(message) > REQUEST_BYTES_MAX:
            limit = f"limit {REQUEST_BYTES_MAX}"
            raise LimitExceeded(f"the request to the reader has {len(message)} bytes, {limit}")
        try:
            await self._loop.sock_sendall(self._socket, LENGTH.pack(len(message)) + message)
        except OSError:
            raise await self._loss() from None

    async def receive(self) -> Frame:
        """Wait for a frame.

        Raises:
            IskanderError: The error of the request.
            ReaderLost: The process has ended.
        """
        head = read_head(await self._exactly(HEAD.size), self._frame_bytes)
        size = head.metadata_bytes
        data = await self._exactly(size + head.body_bytes)
        frame = Frame(head.kind, head.rows, data[:size], data[size:])
        self.has_answered = frame.kind in (Kind.END, Kind.ERROR)
        if frame.kind is Kind.ERROR:
            raise read_error(frame.metadata)
        return frame

    async def _exactly(self, count: int) -> memoryview:
        view = memoryview(bytearray(count))
        at = 0
        while at < count:
            try:
                got = await self._loop.sock_recv_into(self._socket, view[at:])
            except OSError:
                got = 0
            if not got:
                raise await self._loss()
            at += got
        return view

    async def _loss(self) -> ReaderLost:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await asyncio.shield(self.ended)
        code = self._child.returncode
        how = f"with exit code {code}" if code is None or code >= 0 else f"by signal {-code}"
        return ReaderLost(f"the process that reads the source ended {how}; see the server's log")

    def kill(self) -> None:
        """Close the socket, and end the process; it is reaped when the kernel reports its end."""
        if self.idle_timer is not None:
            self.idle_timer.cancel()
        self._socket.close()
        if not self.ended.done():
            self._child.kill()

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._child.wait()
        self.ended.set_result(None)


class Readers:
    """Bounded set of reader processes.

    Args:
        config: Limits.
        frame_bytes: Bytes of the body of one frame.
        cpus: Cpus of the processes; empty: those of the gateway.
    """

    def __init__(
        self, config: SourceReadsConfig, frame_bytes: int, cpus: frozenset[int] = frozenset()
    ) -> None:
        self._config = config
        self._frame_bytes = frame_bytes
        self._cpus = cpus
        self._slots = {
            "plan": FairSlots(PLANS_MAX, WAITING_MAX),
            "read": FairSlots(config.streams, WAITING_MAX),
        }
        self._idle: list[Reader] = []
        self.processes: set[Reader] = set()

    def configure(self, config: SourceReadsConfig, frame_bytes: int) -> None:
        """Apply the limits to new processes and steps; other processes end, after their reads."""
        self._config = config
        self._frame_bytes = frame_bytes
        self._slots["read"].resize(config.streams)
        for reader in self.processes:
            reader.is_outdated = True
        for reader in list(self._idle):
            self._retire(reader)

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a process."""
        return sum(slots.waiting for slots in self._slots.values())

    async def answers(
        self, request: Request, source: Source, held: Held | None = None
    ) -> AsyncGenerator[Frame]:
        """Send a request to a process, and yield its frames.

        The caller closes the iterator, which ends the process unless the request is done.

        Args:
            request: The request.
            source: Source of the call, which has a share of the processes.
            held: Ends if its process is taken back for a caller that waits.

        Raises:
            Overloaded: No process is free in time.
            ReaderLost: The process ended or makes no progress.
            IskanderError: The request failed.
        """
        kind = "plan" if isinstance(request, PlanRequest) else "read"
        async with self._slot(kind, source, held):
            reader = self._idle.pop() if self._idle else self._start()
            if reader.idle_timer is not None:
                reader.idle_timer.cancel()
            is_done = False
            try:
                await self._step(reader.send(request))
                while (frame := await self._step(reader.receive())).kind is not Kind.END:
                    yield frame
                is_done = True
            except IskanderError:
                # A plan has no threads that continue after its error.
                is_done = kind == "plan" and reader.has_answered
                raise
            finally:
                self._release(reader, is_reusable=is_done and reader.requests < REQUESTS_MAX)

    async def stop(self) -> None:
        """End all processes, and wait until they are reaped."""
        self._idle.clear()
        for reader in self.processes:
            reader.kill()
        if self.processes:
            await asyncio.wait([reader.ended for reader in self.processes], timeout=STOP_S)

    @contextlib.asynccontextmanager
    async def _slot(self, kind: str, source: Source, held: Held | None) -> AsyncIterator[None]:
        """Hold one of the processes that may run at once."""
        wait_s = self._config.wait_s
        try:
            async with self._slots[kind].hold(source, wait_s, held):
                yield
        except SlotsFull as error:
            if error.is_late:
                text = f"no reader process was free in {wait_s:g} s (`source_reads.wait_s`)"
            else:
                limit = f"limit {WAITING_MAX}, less for a caller with many of them"
                text = f"{error.waiting} calls wait for a reader process, {limit}"
            raise Overloaded(
                f"{text}; limit {self._config.streams} reads (`source_reads.streams`)",
                retry_after_ms=RETRY_MS,
            ) from None

    async def _step(self, work: Awaitable[ResultT]) -> ResultT:
        step_s = self._config.step_s
        try:
            async with asyncio.timeout(step_s):
                return await work
        except TimeoutError:
            limit = f"limit {step_s:g} s (`source_reads.step_s`)"
            raise ReaderLost(
                f"the process that reads the source made no progress, {limit}"
            ) from None

    def _start(self) -> Reader:
        reader = Reader(self._config.memory_bytes, self._frame_bytes, self._cpus)
        self.processes.add(reader)
        reader.ended.add_done_callback(lambda _: self._remove(reader))
        return reader

    def _remove(self, reader: Reader) -> None:
        self.processes.discard(reader)
        if reader in self._idle:
            self._idle.remove(reader)
            reader.kill()
            log.source_reader_ended(reader_pid=reader.pid)

    def _release(self, reader: Reader, *, is_reusable: bool) -> None:
        if not is_reusable or reader.is_outdated or reader.ended.done():
            reader.kill()
            return
        self._idle.append(reader)
        reader.idle_timer = asyncio.get_running_loop().call_later(
            self._config.idle_s, self._retire, reader
        )

    def _retire(self, reader: Reader) -> None:
        if reader.idle_timer is not None:
            reader.idle_timer.cancel()
        self._idle.remove(reader)
        reader.kill()
