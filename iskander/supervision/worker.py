"""What the gateway holds of one worker: its place, its memory, its socket and what it runs.

Runs on: gateway loop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter, deque
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from iskander.memory.arena import Arena
from iskander.memory.backing import NO_MEMORY
from iskander.memory.heartbeat import BEAT_BYTES
from iskander.memory.segment import Segment
from iskander.scheduling.worker_slot import CREDITS, WorkerSlot
from iskander.supervision.lifecycle import Event, State

STORY_LENGTH: Final = 32
NOTICES_MAX: Final = 8
EXIT_LACKS: Final = 78
"""Of a worker whose interpreter cannot run it."""
NEVER: Final = sys.maxsize
"""More batches than a process will compute."""


Child = subprocess.Popen[bytes]


class ProcessExit(NamedTuple):
    """How a process ended.

    Attributes:
        code: As `subprocess` has it: negative for a signal; None where only another process, its
            parent, is told.
        was_killed: This gateway ended it.
    """

    code: int | None
    was_killed: bool

    def is_own_doing(self, *, was_hung: bool, was_out_of_memory: bool) -> bool:
        """Whether what the process ran ended it, and not an operator or this gateway.

        Args:
            was_hung: This gateway ended it because it hung.
            was_out_of_memory: The kernel has ended a process for want of memory meanwhile.
        """
        if was_hung or self.code is None:
            return True
        if self.was_killed or self.code in (-signal.SIGTERM, -signal.SIGINT):
            return False
        return self.code != -signal.SIGKILL or was_out_of_memory

    def __str__(self) -> str:
        """For a sentence: `by SIGSEGV`, `with exit code 70`."""
        if self.code is None:
            return "in a way that its parent knows"
        if self.code >= 0:
            return f"with exit code {self.code}"
        try:
            return f"by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"by signal {-self.code}"

    @property
    def explanation(self) -> str:
        """What the code does not say; empty where there is nothing to add."""
        if self.code == EXIT_LACKS:
            return ": its interpreter lacks what a worker needs, as its log says"
        if self.code is None or self.code >= 0:
            return ""
        if self.was_killed:
            return ", which this gateway sent"
        if self.code == -signal.SIGKILL:
            return ", which this gateway did not send: an operator, or the system for its memory"
        return ""


class SlotPlan(msgspec.Struct, frozen=True):
    """Where a worker of the plan runs.

    Attributes:
        node: Whose memory it prefers; None where there is one node, or its cpus lie on several.
        cores: Physical cores of `cpus`: the compute threads of a model that names none.
        pool: The one model that its worker serves, as `NAME/VERSION`; empty for those of all.
        python: Interpreter of its worker; empty for the gateway's.
        domains: L3 domains of `cpus`, where the kernel tells of any.
    """

    index: int
    group: int
    cpus: tuple[int, ...]
    node: int | None
    cores: int = 1
    domains: tuple[int, ...] = ()
    pool: str = ""
    python: str = ""


def worker_command(python: str) -> list[str]:
    """What starts a worker's program with an interpreter; empty for this process's own.

    Another one need not have this distribution installed: it is told where the code is.
    """
    if not python:
        return [sys.executable, "-P", "-m", "iskander_worker"]
    packages = [find_spec(name) for name in ("iskander", "iskander_worker")]
    origins = [Path(spec.origin) for spec in packages if spec is not None and spec.origin]
    places = [str(origin.parent.parent) for origin in origins]
    guest = origins[-1].with_name("foreign_interpreter.py")
    folders = os.pathsep.join(dict.fromkeys(places))
    return [python, "-P", str(guest), folders, "iskander_worker.__main__"]


class Worker(WorkerSlot):
    """A place of the plan, and the process that fills it now.

    Args:
        place: Of the plan.
        is_ours: The process is this gateway's to end; otherwise signals to it do nothing.

    Attributes:
        child: The process, where this gateway started it and has not seen its end.
        asked: Key of the model that it is loading, since `asked_ns`; None while it loads none.
        refused: Why it cannot have a model, by its key.
        recycle_at: Value of `batches` at which the process is recycled.
        starts: Processes that were started for the place.
        failures: Ends in a row that nobody asked for, with no steady service between them.
        ends: How its processes ended: crash, hang, boot failure, or replaced in order.
        is_due: It is being replaced in order, because it has computed or grown enough.
        is_awaited: It is being replaced in order, and requests may wait for the next process.
        is_claimed: A process is being taken on for it.
        is_hung: It was silent for too long, and is being ended.
        was_stopped: A signal had stopped it then (SIGSTOP).
        has_been_ready: Whether the place was filled once; `opened_ns` is when it last was.
        loading: The model that it was asked for last and has not answered for; empty for none.
        complaint: Why the last process could not serve a model; empty where it could.
        backing: What memory its output arena is.
        notices: What was refused to the process, and to the gateway for it.
        was_loaded: Whether the process before had its models.
        last_end: Of the last process that ended.
        story: The last events, for the operator.
    """

    def __init__(self, place: SlotPlan, *, is_ours: bool = True) -> None:
        super().__init__(place.index, place.pool)
        self.place = place
        self._is_ours = is_ours
        self.state = State.ABSENT
        self.pid = 0
        self.asked: int | None = None
        self.asked_ns = 0
        self.refused: dict[int, str] = {}
        self.starts = 0
        self.failures = 0
        self.recycle_at = NEVER
        self.ends: Counter[str] = Counter()
        self.is_due = False
        self.is_awaited = False
        self.is_claimed = False
        self.is_hung = self.was_stopped = False
        self.has_been_ready = False
        self.opened_ns = 0
        self.loading = ""
        self.complaint = ""
        self.backing = NO_MEMORY
        self.notices: deque[str] = deque(maxlen=NOTICES_MAX)
        self.was_loaded = False
        self.last_end: ProcessExit | None = None
        self.story: deque[tuple[int, Event, State]] = deque(maxlen=STORY_LENGTH)
        self.child: Child | None = None
        self._pidfd: int | None = None
        self._abort_fd: int | None = None
        self._was_killed = False
        self._is_own = False

    def __repr__(self) -> str:
        return (
            f"<Worker {self.index} {self.state} incarnation {self.incarnation} "
            f"pid {self.pid}, {len(self.in_flight)} in flight>"
        )

    def spawn(self, attach_socket: Path) -> tuple[Child, int]:
        """Start a process for this place; the caller owns the pidfd.

        Raises:
            OSError: The system refused it.
        """
        self.starts += 1
        self._was_killed = False
        command = worker_command(self.place.python)
        command += ["--attach", str(attach_socket), "--group", str(self.place.group)]
        if self.place.pool:
            command += ["--pool", self.place.pool]
        environment = dict(os.environ, PYTHONFAULTHANDLER="1")
        environment.pop("NOTIFY_SOCKET", None)
        # A session of its own: a Ctrl-C at the terminal is for the gateway, which drains.
        self.child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
        )
        # It will pin itself; until then it is not to take the time of the gateway's cores.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(self.child.pid, self.place.cpus)
        try:
            return self.child, os.pidfd_open(self.child.pid)
        except OSError:
            self.child.kill()
            self.child.wait()
            self.child = None
            raise

    def reap(self, child: Child) -> bool:
        """Note how a child ended; False where the place has another process already.

        What a model's code has forked ends with it: the child, not waited for yet, keeps the number
        of their group from meaning any other.
        """
        if self.place.pool:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        self.last_end = ProcessExit(child.wait(), self._was_killed and child is self.child)
        if child is not self.child:
            return False
        self.child = None
        return True

    def attach(
        self,
        incarnation: int,
        pid: int,
        output: Segment,
        output_bytes: int,
    ) -> None:
        """Take on a process.

        Args:
            incarnation: Its number.
            pid: Its process.
            output: Memory for its results; owned from here on.
            output_bytes: That are wanted of it.
        """
        index = self.index
        self.output = output
        self.backing = output.backing
        self.notices.extend(f"output arena: {each}" for each in self.backing.complaints)
        self.beat = Segment.create(f"iskander-beat-{index}", BEAT_BYTES)
        self.output_arena = Arena(output_bytes)
        self.incarnation = incarnation
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self.models = set()
        self.is_hung = self.was_stopped = False
        self.loading = self.complaint = ""
        self.busy_until_ns = 0
        self.credits = CREDITS
        # The system tells the end of a process to its parent only.
        self._is_own = self.child is not None and self.child.pid == pid
        self._was_killed = self._was_killed and self._is_own

    def open_abort_pipe(self) -> int:
        """Make the pipe on which batches are given up; the caller owns the end to read from."""
        read_end, self._abort_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(read_end, True)
        return read_end

    def abort(self, batch_id: int) -> None:
        """Ask the worker to give a batch up where it can; it answers as for any other."""
        if self._abort_fd is not None:
            # A pipe that is full, or whose reader is gone, loses a favour and no answer.
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._abort_fd, batch_id.to_bytes(8, "little"))

    def detach(self) -> None:
        """Let go of a process that is gone: its memory, sockets and descriptors."""
        if self.pid and not self._is_own:
            self.last_end = ProcessExit(None, self._was_killed)
        self.incarnation = self.pid = self.credits = 0
        self.models, self.refused, self.asked = set(), {}, None
        self.output_arena = Arena(0)
        self.backing = NO_MEMORY
        self.notices.clear()
        for part in (self.channel, self.output, self.beat):
            if part is not None:
                part.close()
        for fd in (self._pidfd, self._abort_fd):
            if fd is not None:
                os.close(fd)
        self.channel = self.output = self.beat = self._pidfd = self._abort_fd = None

    def kill(self) -> None:
        """End the process now."""
        self._signal(signal.SIGKILL)

    def dump(self) -> None:
        """End the process with a stack in its log, if it can still write one."""
        self._signal(signal.SIGABRT)

    def _signal(self, number: signal.Signals) -> None:
        """Signal the process, by a descriptor or child that can mean no other."""
        if not self._is_ours:
            return
        self._was_killed = True
        if self.child is not None:
            self.child.send_signal(number)
        elif self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process. Source: proc(5), `/proc/PID/stat`."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")
