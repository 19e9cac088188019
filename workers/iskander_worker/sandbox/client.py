"""A model's first opening, in a process of its own: what it may break there is nobody else's.

    worker          TrialServer     starts the server when a model is first tried out, asks, waits
    that process    trial_server    imports the runtime once, and forks a process for each model
    its forks       _judge          limit their memory and files, open and warm the model, say so

A model file is a program: it may loop for ever while constants are folded, ask for all memory there
is, or meet a bug of the runtime. A worker has callers to lose, a fork has none.

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

from iskander import clock
from iskander.control.messages import LoadingSpec, ModelSpec
from iskander.decoders import thread_safe
from iskander_worker.foreign_interpreter import own_command

IDLE_S = 10.0
"""The server is ended when it was asked nothing for so long: it has some 50 MB."""
ANSWER_S = 5.0
"""How long the server may take to end what is late, and to say so."""
STARTING_BYTES = 1 << 28
"""What Python, NumPy and the runtime take before there is a model."""
_LINE_BYTES = 1 << 16


@thread_safe
class Job(msgspec.Struct, frozen=True):
    """What is to be tried out.

    Attributes:
        cores: Compute threads where the model names none.
        folder: Where to save the optimised model; None where weights are not shared.
        private_bytes: Memory that it may take.
        file_bytes: Of each file that it writes.
        seconds: That it may take.
    """

    spec: ModelSpec
    cores: int
    libraries: tuple[str, ...]
    folder: str | None
    private_bytes: int
    file_bytes: int
    seconds: float


@thread_safe
class Order(msgspec.Struct, frozen=True):
    """A job as the server gets it.

    Attributes:
        number: Of the order; its answer has the same.
        deadline_ns: When its time is over, on the monotonic clock, which all processes share.
    """

    number: int
    deadline_ns: int
    job: Job


@thread_safe
class Verdict(msgspec.Struct, frozen=True):
    """How it went.

    Attributes:
        error: What is wrong with the model, in the runtime's or the contract's words.
        refusal: How the model ended or hung its process; then nothing else is known.
        is_late: It did so by taking too long.
        note: Why its weights cannot be shared; empty where they are, or were not to be.
    """

    error: str = ""
    refusal: str = ""
    note: str = ""
    is_late: bool = False


@thread_safe
class Answer(msgspec.Struct, frozen=True):
    """A verdict, and on which order."""

    number: int
    verdict: Verdict


def late(seconds: float) -> Verdict:
    """A model took too long."""
    return Verdict(
        refusal=f"it was not loaded and warmed within {seconds:.3g} s (loading.trial_s), in a "
        "process of its own",
        is_late=True,
    )


class SandboxServer:
    """The server of a worker: there while models are tried out and a little longer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._number = 0
        self._ending: threading.Timer | None = None

    def ask(self, job: Job) -> Verdict:
        """Have a model tried out; its time begins now."""
        deadline_ns = clock.now_ns() + int(job.seconds * clock.NS_PER_S)
        with self._lock:
            try:
                for _ in range(2):  # Whatever has ended the server meanwhile, it is asked anew.
                    verdict = self._asked(job, deadline_ns)
                    if verdict is not None:
                        self._end_later()
                        return verdict
                    self._end()
            except BaseException:
                self._end()
                raise
        if clock.now_ns() >= deadline_ns:
            return late(job.seconds)
        return Verdict(refusal="the process that tries models out was ended with it, twice")

    def end(self) -> None:
        """Give the server up, once it is done with what it tries out."""
        with self._lock:
            self._end()

    def _asked(self, job: Job, deadline_ns: int) -> Verdict | None:
        """What the server says of a job; None where it says nothing, or not of this one."""
        self._number += 1
        order = Order(self._number, deadline_ns, job)
        server = self._server = self._server or _started()
        until_ns = deadline_ns + int(ANSWER_S * clock.NS_PER_S)
        line = _answer(server, msgspec.json.encode(order) + b"\n", until_ns)
        try:
            answer = msgspec.json.decode(line, type=Answer)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return answer.verdict if answer.number == self._number else None

    def _end_later(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        self._ending = ending = threading.Timer(IDLE_S, self._end_idle, (self._number,))
        ending.name, ending.daemon = "isk-trials-end", True
        ending.start()

    def _end_idle(self, number: int) -> None:
        """End it, where nothing was asked since a job; a timer may be too late to be cancelled."""
        with self._lock:
            if self._number == number:
                self._end()

    def _end(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        for stream in (server.stdin, server.stdout):
            assert stream is not None
            stream.close()
        if server.poll() is None:  # Not reaped, so its number is still its own.
            os.kill(server.pid, signal.SIGKILL)
        server.wait()


sandbox_server = SandboxServer()
"""This process's own."""


def load_in_sandbox(
    spec: ModelSpec,
    cores: int,
    libraries: tuple[str, ...],
    *,
    seconds: float,
    folder: Path | None = None,
) -> Verdict:
    """Open and warm a model in a process of its own, and wait for its end.

    Args:
        spec: Of the model; its `loading` has the limits.
        cores: Compute threads where the model names none.
        libraries: Of custom operators, by path.
        seconds: How long it may take.
        folder: Where the optimised model is wanted; None where it is not.
    """
    return sandbox_server.ask(
        Job(
            msgspec.structs.replace(spec, loading=LoadingSpec()),
            cores,
            libraries,
            None if folder is None else str(folder),
            private_bytes=spec.loading.trial_bytes or available_bytes(),
            file_bytes=spec.loading.cache_bytes,
            seconds=seconds,
        )
    )


def available_bytes() -> int:
    """Memory that the system, and this process's control group, have free."""
    found = []
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        folder = Path("/sys/fs/cgroup") / group.lstrip("/")
        most = (folder / "memory.max").read_text().strip()
        if most.isdecimal():
            found.append(max(int(most) - int((folder / "memory.current").read_text()), 0))
    except OSError:
        pass  # No control group of version 2: the machine's memory is what there is.
    return max(min(found, default=1 << 34), STARTING_BYTES)


def _started() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        own_command("iskander_worker.sandbox.server"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )


def _answer(server: subprocess.Popen[bytes], line: bytes, deadline_ns: int) -> bytes:
    """Say a line to the server and wait for its own; empty where none comes."""
    assert server.stdin is not None and server.stdout is not None
    if not _write(server.stdin, line, deadline_ns):
        return b""
    return read_line(server.stdout, (deadline_ns - clock.now_ns()) / clock.NS_PER_S)


def _write(stream: IO[bytes], line: bytes, deadline_ns: int) -> bool:
    """Write a line, which may be longer than a pipe holds; whether all of it was taken in time."""
    os.set_blocking(stream.fileno(), False)
    poll = select.poll()
    poll.register(stream, select.POLLOUT)
    left = memoryview(line)
    while left:
        left_ms = (deadline_ns - clock.now_ns()) / clock.NS_PER_MS
        if left_ms <= 0 or not poll.poll(left_ms):
            return False
        try:
            left = left[os.write(stream.fileno(), left) :]
        except BrokenPipeError:
            return False
    return True


def read_line(stream: IO[bytes], wait_s: float) -> bytes:
    """The next line, for a stream on which nothing is said before it is asked for.

    Args:
        stream: Whose buffer is not used.
        wait_s: For how long it is waited for.

    Returns:
        With its end; empty where it does not come in time, or the stream has ended.
    """
    line = b""
    deadline_ns = clock.now_ns() + int(wait_s * clock.NS_PER_S)
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    while not line.endswith(b"\n"):
        left_ms = (deadline_ns - clock.now_ns()) / clock.NS_PER_MS
        if left_ms <= 0 or not poll.poll(left_ms):
            return b""
        piece = os.read(stream.fileno(), _LINE_BYTES)
        if not piece:
            return b""
        line += piece
    return line
