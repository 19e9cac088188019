"""Gateway-side state of one worker: its slot, memory, channel and process.

Runs on: gateway loop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from iskander.gateway.scheduling.worker_slot import CREDITS, WorkerSlot
from iskander.gateway.supervision.gpus.device import Gpu, environment_of
from iskander.gateway.supervision.lifecycle import Event, State
from iskander.interprocess.memory.arena import Arena
from iskander.interprocess.memory.backing import NO_MEMORY
from iskander.interprocess.memory.heartbeat import HEARTBEAT_BYTES
from iskander.interprocess.memory.segment import Segment

HISTORY_MAX: Final = 32
NOTICES_MAX: Final = 8
EXIT_INTERPRETER: Final = 78
"""Exit code of a worker whose interpreter cannot run it."""
NEVER: Final = sys.maxsize
"""More batches than a process will compute."""

Child = subprocess.Popen[bytes]


class ProcessExit(NamedTuple):
    """Exit of a process.

    Attributes:
        code: As in `subprocess`: negative for a signal. None for a child of another process.
        was_killed: This gateway ended the process.
    """

    code: int | None
    was_killed: bool

    def is_model_fault(self, *, was_hung: bool, was_out_of_memory: bool) -> bool:
        """Return whether the model's code caused the exit, not an operator or this gateway."""
        if was_hung or self.code is None:
            return True
        if self.was_killed or self.code in (-signal.SIGTERM, -signal.SIGINT):
            return False
        return self.code != -signal.SIGKILL or was_out_of_memory

    def __str__(self) -> str:
        """Part of a sentence: `by SIGSEGV`, `with exit code 70`."""
        if self.code is None:
            return "with an unknown exit code (no child of this process)"
        if self.code >= 0:
            return f"with exit code {self.code}"
        try:
            return f"by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"by signal {-self.code}"

    @property
    def explanation(self) -> str:
        """Details beyond the code; empty if there are none."""
        if self.code == EXIT_INTERPRETER:
            return ": its interpreter lacks a package that a worker needs (see its log)"
        if self.code is None or self.code >= 0:
            return ""
        if self.was_killed:
            return ", which this gateway sent"
        if self.code == -signal.SIGKILL:
            return ", which this gateway did not send: an operator or the OOM killer did"
        return ""


class SlotPlan(msgspec.Struct, frozen=True):
    """Placement of one worker slot.

    Attributes:
        node: Preferred NUMA node; None with a single node, or with cpus on several.
        cores: Physical cores of `cpus`: the compute threads of a model that sets none.
        pool: The only model of the worker, as `NAME/VERSION`; empty for the shared pool.
        python: Interpreter of the worker; empty for the gateway's.
        domains: L3 domains of `cpus`, if the kernel reports any.
        gpu: The only GPU that the worker sees.
        gpu_budget_bytes: Memory of the GPU for models, of all its workers; 0 if unknown.
        hides_gpus: A worker without a GPU sees none, because others of the plan have them.
    """

    index: int
    group: int
    cpus: tuple[int, ...]
    node: int | None
    cores: int = 1
    domains: tuple[int, ...] = ()
    pool: str = ""
    python: str = ""
    gpu: Gpu | None = None
    gpu_budget_bytes: int = 0
    hides_gpus: bool = False

    @property
    def device(self) -> str:
        return "cpu" if self.gpu is None else "gpu"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the process that select its GPU."""
        return environment_of(self.gpu) if self.gpu is not None or self.hides_gpus else {}


def worker_command(python: str) -> list[str]:
    """Return the worker command for an interpreter, which need not have Iskander installed.

    Empty: this interpreter.
    """
    if not python:
        return [sys.executable, "-P", "-m", "iskander_worker"]
    packages = [find_spec(name) for name in ("iskander", "iskander_worker")]
    origins = [Path(spec.origin) for spec in packages if spec is not None and spec.origin]
    folders = os.pathsep.join(dict.fromkeys(str(origin.parent.parent) for origin in origins))
    script = origins[-1].with_name("foreign_interpreter.py")
    return [python, "-P", str(script), folders, "iskander_worker.__main__"]


def start_process(
    command: list[str],
    environment: dict[str, str],
    stdin: int = subprocess.DEVNULL,
    *,
    stdout: int | None = None,
    passed: Sequence[int] = (),
) -> tuple[Child, int]:
    """Start a process; return it, and a pidfd that the caller owns. May raise OSError."""
    # A session of its own: Ctrl-C in a terminal reaches only the first process, which drains.
    child = subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        start_new_session=True,
        env=environment,
        pass_fds=passed,
    )
    try:
        return child, os.pidfd_open(child.pid)
    except OSError:
        child.kill()
        child.wait()
        raise


class Worker(WorkerSlot):
    """A worker slot and its current process.

    `is_ours` is False if another gateway process owns the process; this one sends no signals.

    Attributes:
        child: The process, if this gateway started it and has not reaped it.
        loading_key: Key of the model that it loads, since `load_started_ns`; None if it loads none.
        loading_title: Model of the last unanswered `Load`; empty for none.
        load_step: Reported long step of that load, with its time; empty for none.
        load_errors: Load errors by model key.
        load_error: Load error that ended the last process; empty for none.
        opened_batches: Value of `batches` at `opened_ns`.
        recycle_at: Value of `batches` at which the process is recycled.
        failures: Consecutive unexpected exits, without steady service between them.
        exit_counts: Exits by kind: crash, hang, boot_failure, replaced.
        copied_bytes: Bytes that its processes copied to the GPU (in) and to the arenas (out).
        is_recycling: It exceeds a limit of batches or memory and is being replaced.
        is_replacement_pending: Its queues accept requests until the next process is ready.
        is_registering: The slot is reserved for a registration in progress.
        ended_in_batch: The last process ended while it ran a batch, for which the batch's model
            is held responsible unless its exit shows otherwise.
        is_hung: Its heartbeat stopped, and it is being killed.
        was_stopped: It hung because of a SIGSTOP.
        has_been_ready: The slot was ready at least once, the last time since `opened_ns`.
        was_loaded: The previous process had loaded its models.
        device_error: Why its GPU cannot be used; empty if it can.
        notices: Requests that the system denied to the process, such as memory locks.
        history: Last events with their time and the state after them.
    """

    def __init__(self, plan: SlotPlan, *, is_ours: bool = True) -> None:
        super().__init__(plan.index, plan.pool, plan.device)
        self.plan = plan
        self.group = plan.group
        self._is_ours = is_ours
        self.state = State.ABSENT
        self.load_started_ns = self.opened_ns = self.opened_batches = 0
        self.child: Child | None = None
        self.loading_key: int | None = None
        self.loading_title = self.load_step = self.load_error = self.device_error = ""
        self.load_errors: dict[int, str] = {}
        self.recycle_at = NEVER
        self.starts = self.failures = 0
        self.exit_counts: Counter[str] = Counter()
        self.copied_bytes: Counter[str] = Counter()
        self.last_exit: ProcessExit | None = None
        self.is_recycling = self.is_replacement_pending = self.is_registering = False
        self.is_hung = self.was_stopped = self.was_loaded = self.has_been_ready = False
        self.ended_in_batch = False
        self.backing = NO_MEMORY
        self.notices: deque[str] = deque(maxlen=NOTICES_MAX)
        self.history: deque[tuple[int, Event, State]] = deque(maxlen=HISTORY_MAX)
        self._pidfd: int | None = None
        self._abort_fd: int | None = None
        self._was_killed = self._is_child = False

    def __repr__(self) -> str:
        process = f"incarnation {self.incarnation} pid {self.pid}"
        return f"<Worker {self.index} {self.state} {process}, {len(self.in_flight)} in flight>"

    def spawn(self, attach_socket: Path) -> tuple[Child, int]:
        """Start a process for this slot; the caller owns the pidfd."""
        self.starts += 1
        self._was_killed = False
        command = worker_command(self.plan.python)
        command += ["--attach", str(attach_socket), "--group", str(self.plan.group)]
        if self.plan.pool:
            command += ["--pool", self.plan.pool]
        environment = dict(os.environ, PYTHONFAULTHANDLER="1", **self.plan.environment)
        environment.pop("NOTIFY_SOCKET", None)
        self.child, pidfd = start_process(command, environment)
        # Keeps the start off the gateway's cores; the worker pins itself later.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(self.child.pid, self.plan.cpus)
        return self.child, pidfd

    def reap(self, child: Child) -> bool:
        """Record the exit of a child; return False if the slot already has another process."""
        # Kills the processes that the model's code forked. Before `wait`, the pid is not reused.
        if self.plan.pool:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        self.last_exit = ProcessExit(child.wait(), self._was_killed and child is self.child)
        if child is not self.child:
            return False
        self.child = None
        return True

    def attach(self, incarnation: int, pid: int, output: Segment, output_bytes: int) -> None:
        """Assign a process to the slot. Owns: `output`, the segment of the output arena."""
        self.output = output
        self.backing = output.backing
        self.notices.extend(f"output arena: {each}" for each in self.backing.notices)
        self.beat = Segment.create(f"iskander-beat-{self.index}", HEARTBEAT_BYTES)
        self.output_arena = Arena(output_bytes)
        self.incarnation = incarnation
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self.models = set()
        self.is_hung = self.was_stopped = self.ended_in_batch = False
        self.loading_title = self.load_step = self.load_error = ""
        self.busy_until_ns = 0
        self.credits = CREDITS
        # The kernel reports an exit code only to the parent.
        self._is_child = self.child is not None and self.child.pid == pid
        self._was_killed = self._was_killed and self._is_child

    def open_abort_pipe(self) -> int:
        """Create the pipe of batch cancellations; the caller owns the returned read end."""
        read_end, self._abort_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(read_end, True)
        return read_end

    def abort(self, batch_id: int) -> None:
        """Ask the worker to cancel a running batch; the worker answers as for any batch."""
        if self._abort_fd is not None:
            # A full or closed pipe only loses the cancellation: the answer still arrives.
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._abort_fd, batch_id.to_bytes(8, "little"))

    def detach(self) -> None:
        """Release the memory, channel and descriptors of a process that has ended."""
        if self.pid and not self._is_child:
            self.last_exit = ProcessExit(None, self._was_killed)
        self.incarnation = self.pid = self.credits = 0
        self.models, self.load_errors, self.loading_key = set(), {}, None
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
        self._signal(signal.SIGKILL)

    def dump(self) -> None:
        """Send SIGABRT: the process writes its stack to its log, if it can, and ends."""
        self._signal(signal.SIGABRT)

    def _signal(self, number: signal.Signals) -> None:
        """Signal the process through a child or pidfd, which cannot name another process."""
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
