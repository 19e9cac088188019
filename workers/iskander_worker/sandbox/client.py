"""Sandboxed load, worker side: starts the sandbox server and sends it jobs.

    worker          SandboxServer   starts the server for the first job, sends it, waits
    its child       sandbox.server  imports the runtime once, and forks a process for each model
    its forks       _load           limit their memory and files, open and warm the model, report

A model file is a program: it may loop for ever while constants are folded, allocate all memory, or
trigger a bug of the runtime. A crash of a fork harms no caller.

Runs on: worker main.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
from pathlib import Path
from typing import IO

import msgspec

from iskander.foundation import clock
from iskander.foundation.decoders import thread_safe
from iskander.foundation.machine_memory import available_bytes
from iskander.interprocess.control.messages import LoadingSpec, ModelSpec
from iskander_worker.foreign_interpreter import own_command
from iskander_worker.loading.engines import needs_engines
from iskander_worker.loading.measurement import Measurement

IDLE_S = 10.0
"""Idle time after which the server is stopped: it uses some 50 MB."""
ANSWER_S = 5.0
"""Time for the server to kill a late fork and to answer."""
STARTING_BYTES = 1 << 28
"""Memory of Python, NumPy and the runtime without a model."""
_LINE_BYTES = 1 << 16


@thread_safe
class Job(msgspec.Struct, frozen=True):
    """A model to load, with the limits of its process.

    Attributes:
        libraries: Paths of custom operator libraries.
        folder: Target of the optimised model, or of TensorRT's engines; None: nothing is saved.
        private_bytes: Limit of private memory.
        file_bytes: Limit of each file that the process writes.
        seconds: Limit of the time.
        setting: Name of the setting that is the limit of the time.
    """

    spec: ModelSpec
    cores: int
    libraries: tuple[str, ...]
    folder: str | None
    private_bytes: int
    file_bytes: int
    seconds: float
    setting: str


@thread_safe
class JobRequest(msgspec.Struct, frozen=True):
    """A job for the server, with its deadline on the monotonic clock.

    The answer repeats `number`.
    """

    number: int
    deadline_ns: int
    job: Job


@thread_safe
class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of a sandboxed load.

    Attributes:
        error: Why the load failed.
        refusal: How the model crashed or hung its process.
        note: Why weights cannot be shared.
        is_late: The load reached its time limit.
        unbound: As `Measurement.unbound`, which is known before the rest of the measurement.
        measurement: None if the load failed.
    """

    error: str = ""
    refusal: str = ""
    note: str = ""
    is_late: bool = False
    unbound: tuple[int, ...] = ()
    measurement: Measurement | None = None


@thread_safe
class Answer(msgspec.Struct, frozen=True):
    """The verdict for the request with the same number."""

    number: int
    verdict: Verdict


def timeout_verdict(job: Job) -> Verdict:
    """Return the verdict of a job that reached its time limit."""
    return Verdict(
        refusal=f"not loaded and warmed in a sandbox within {job.seconds:.3g} s ({job.setting})",
        is_late=True,
    )


class SandboxServer:
    """The sandbox server of this process; started on demand, stopped when it is idle."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._number = 0
        self._idle_timer: threading.Timer | None = None

    def run(self, job: Job) -> Verdict:
        """Run a job, whose time begins now, and return its verdict."""
        deadline_ns = clock.now_ns() + int(job.seconds * clock.NS_PER_S)
        with self._lock:
            try:
                for _ in range(2):  # Once more with a new server, if this one was killed.
                    verdict = self._run_once(job, deadline_ns)
                    if verdict is not None:
                        self._start_idle_timer()
                        return verdict
                    self._kill()
            except BaseException:
                self._kill()
                raise
        if clock.now_ns() >= deadline_ns:
            return timeout_verdict(job)
        return Verdict(refusal="the sandbox server exited during the load, twice")

    def end(self) -> None:
        """Stop the server after its current job."""
        with self._lock:
            self._kill()

    def _run_once(self, job: Job, deadline_ns: int) -> Verdict | None:
        """Send a job to the server, which is started if needed.

        None without a valid answer in time.
        """
        self._number += 1
        server = self._server = self._server or subprocess.Popen(
            own_command("iskander_worker.sandbox.server"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert server.stdin is not None and server.stdout is not None
        request = msgspec.json.encode(JobRequest(self._number, deadline_ns, job)) + b"\n"
        until_ns = deadline_ns + int(ANSWER_S * clock.NS_PER_S)
        if not _write(server.stdin, request, until_ns):
            return None
        line = read_line(server.stdout, (until_ns - clock.now_ns()) / clock.NS_PER_S)
        try:
            answer = msgspec.json.decode(line, type=Answer)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return answer.verdict if answer.number == self._number else None

    def _start_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = timer = threading.Timer(IDLE_S, self._kill_idle, (self._number,))
        timer.name, timer.daemon = "isk-sandbox-end", True
        timer.start()

    def _kill_idle(self, number: int) -> None:
        """Stop the server unless a job followed: a timer may fire before it is cancelled."""
        with self._lock:
            if self._number == number:
                self._kill()

    def _kill(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        for stream in (server.stdin, server.stdout):
            assert stream is not None
            stream.close()
        if server.poll() is None:  # Not reaped yet, so the pid is not reused.
            os.kill(server.pid, signal.SIGKILL)
        server.wait()


sandbox_server = SandboxServer()


def load_in_sandbox(
    spec: ModelSpec,
    cores: int,
    libraries: tuple[str, ...],
    *,
    seconds: float,
    folder: Path | None = None,
) -> Verdict:
    """Load and warm a model in a sandbox, with the limits of its `loading`; fields as in `Job`."""
    return sandbox_server.run(
        Job(
            msgspec.structs.replace(spec, loading=LoadingSpec()),
            cores,
            libraries,
            None if folder is None else str(folder),
            private_bytes=spec.loading.sandbox_bytes or max(available_bytes(), STARTING_BYTES),
            file_bytes=spec.loading.cache_bytes,
            seconds=seconds,
            setting="loading.engine_s" if needs_engines(spec) else "loading.sandbox_s",
        )
    )


def _write(stream: IO[bytes], line: bytes, deadline_ns: int) -> bool:
    """Write a line, which may exceed the pipe's buffer; return whether all was written in time."""
    os.set_blocking(stream.fileno(), False)
    poll = select.poll()
    poll.register(stream, select.POLLOUT)
    rest = memoryview(line)
    while rest:
        if not _wait_ready(poll, deadline_ns):
            return False
        try:
            rest = rest[os.write(stream.fileno(), rest) :]
        except BrokenPipeError:
            return False
    return True


def read_line(stream: IO[bytes], wait_s: float) -> bytes:
    """Read a line from an unbuffered stream; empty after the timeout or at the end."""
    line = b""
    deadline_ns = clock.now_ns() + int(wait_s * clock.NS_PER_S)
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    while not line.endswith(b"\n"):
        if not _wait_ready(poll, deadline_ns):
            return b""
        piece = os.read(stream.fileno(), _LINE_BYTES)
        if not piece:
            return b""
        line += piece
    return line


def _wait_ready(poll: select.poll, deadline_ns: int) -> bool:
    left_ms = (deadline_ns - clock.now_ns()) / clock.NS_PER_MS
    return left_ms > 0 and bool(poll.poll(left_ms))
