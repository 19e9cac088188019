"""Sandbox server: forks a process with limits for each sandboxed load.

A line on standard input is a `JobRequest`, a line on standard output its `Answer`. The server opens
no model itself; it imports the libraries for its forks. It exits with its parent, and a fork exits
with the server.

Runs on: a process of its own, and its forks. It has one thread, so that it may fork. Source:
setrlimit(2), where RLIMIT_DATA counts private writable memory and no mapped weights, and a write
beyond RLIMIT_FSIZE fails where its signal is ignored; prctl(2), PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from iskander.errors import IskanderError, ManifestError, shorten
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.foundation.logs import workers as log
from iskander.foundation.logs.stderr import set_up_worker
from iskander.interprocess.control.messages import ModelSpec
from iskander_worker.affinity import set_library_environment
from iskander_worker.loading.measurement import Measurement, undecided
from iskander_worker.loading.weight_cache import MODEL, WEIGHTS
from iskander_worker.sandbox.client import (
    Answer,
    Job,
    JobRequest,
    Verdict,
    read_line,
    timeout_verdict,
)

if TYPE_CHECKING:
    from iskander_worker.session import Session

NICE = 5
GRACE_S = 10.0
"""Time between a fork's deadline and its own alarm, if nothing else ends it."""
IDLE_MAX_S = 60.0
"""The server exits after this time without a job; its parent should have stopped it."""
ERROR_CHARACTERS_MAX = 4000
_REPORT_BYTES = 1 << 16
ABORT_S = 2.0
"""Time within which a run must end after its abort."""
MEASURE_SHARE = 0.7
"""Share of the remaining time of a load that the measurement of its rows may use."""
_PR_SET_PDEATHSIG = 1
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""A stop of the service sends them to all its processes. A fork ignores them and exits with its
server: the exit by a signal would count against its model, in the cache too."""
_PRELOADED = (
    "backends.onnx", "failures", "loading.opener", "loading.prepacked", "session", "warm_up",
)  # fmt: skip
"""Imported after the library environment is set, and before the first fork."""
_libc = ctypes.CDLL(None)


def main() -> None:
    """Entry point of the server."""
    # Answers use a private descriptor, so output of libraries cannot mix with them.
    answers = os.dup(1)
    os.dup2(2, 1)
    Path("/proc/self/comm").write_text("isk-sandbox")
    os.nice(NICE)
    set_up_worker()
    set_library_environment()
    for name in _PRELOADED:
        import_module(f"iskander_worker.{name}")
    gc.freeze()  # Keeps the pages of live objects shared with the forks.
    while line := read_line(sys.stdin.buffer, IDLE_MAX_S):
        request = msgspec.json.decode(line, type=JobRequest)
        verdict = _run_in_fork(request, answers)
        if verdict is None:
            return
        os.write(answers, msgspec.json.encode(Answer(request.number, verdict)) + b"\n")


def _run_in_fork(request: JobRequest, answers: int) -> Verdict | None:
    """Fork, wait for the fork, and read its verdict; None once standard input has ended."""
    read_fd, write_fd = os.pipe()
    server = os.getpid()
    fork = os.fork()
    if not fork:
        os.close(answers)  # A fork can write its own verdict only.
        os.close(read_fd)
        _run_fork(request, server, write_fd)
    os.close(write_fd)
    fork_fd = os.pidfd_open(fork)
    try:
        # Standard input becomes readable during a job only at its end.
        left_s = max(request.deadline_ns - now_ns(), 0) / NS_PER_S
        ready = select.select([fork_fd, 0], [], [], left_s)[0]
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fork_fd, signal.SIGKILL)
        # The fork is not reaped yet, so its id still names its session: kills its own forks too.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(fork, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
        found = _read_report(read_fd)
    finally:
        os.close(fork_fd)
        os.close(read_fd)
    if 0 in ready:
        return None
    ended = f"the process ended {_exit_text(code)}" if ready else "it did not end in time"
    if found is not None:  # Else a library of the model can have exited with 0.
        if found.measurement is None and not found.error:
            reason = f"{ended} in a batch of generated rows"
            return msgspec.structs.replace(found, measurement=undecided(reason, found.unbound))
        return found
    if not ready:
        return timeout_verdict(request.job)
    return Verdict(refusal=f"it crashed the sandbox process {_exit_text(code)}")


def _read_report(read_fd: int) -> Verdict | None:
    """Return the verdict that a fork wrote, with the last measurement that it wrote."""
    os.set_blocking(read_fd, False)
    try:
        first, *measurements = os.read(read_fd, _REPORT_BYTES).splitlines()
        verdict = msgspec.json.decode(first, type=Verdict)
    except (BlockingIOError, ValueError):
        return None
    for line in reversed(measurements):  # The last valid measurement counts.
        with contextlib.suppress(ValueError):
            measurement = msgspec.json.decode(line, type=Measurement)
            return msgspec.structs.replace(verdict, measurement=measurement)
    return verdict


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"  # Most real-time signals have no name.
    hints = {"SIGKILL": " (out of memory?)", "SIGALRM": " (it took too long)"}
    return f"by {name}{hints.get(name, '')}"


def _run_fork(request: JobRequest, server_pid: int, write_fd: int) -> NoReturn:
    """Run the job in the fork, write its verdict, and exit."""
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server_pid:  # Else the server exited before the call above.
            os.setsid()
            set_up_worker()
            _apply_limits(request.job, request.deadline_ns)
            verdict, session = _load_job(request.job)
            os.write(write_fd, msgspec.json.encode(verdict) + b"\n")
            if session is not None:
                _measure(session, request.deadline_ns, write_fd)
            # No orderly exit: threads of the runtime could block it, and nothing is to be saved.
            os._exit(0)
    except BaseException as error:
        with contextlib.suppress(BaseException):
            log.worker_bug(error=error)
    finally:
        os._exit(1)


def _apply_limits(job: Job, deadline_ns: int) -> None:
    """Limit memory, file sizes and time of the fork; ignore stop signals."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.umask(0o077)
    for number in (*_STOP_SIGNALS, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    left_s = max(deadline_ns - now_ns(), 0) / NS_PER_S
    signal.setitimer(signal.ITIMER_REAL, left_s + GRACE_S)
    for limit, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_DATA, job.private_bytes),
        (resource.RLIMIT_FSIZE, job.file_bytes),
    ):
        resource.setrlimit(limit, (most, most))


def _load_job(job: Job) -> tuple[Verdict, Session | None]:
    """Return the verdict without its measurement, and the session to measure.

    The session is None if the load failed.
    """
    from iskander_worker.failures import load_error

    try:
        note, session = _load(job)
        return Verdict(note=note, unbound=session.measurement.unbound), session
    except MemoryError:
        return Verdict(
            error=f"it needs more memory than {job.private_bytes} bytes (loading.sandbox_bytes)"
        ), None
    except BaseException as error:
        failure = load_error(error)
        if not isinstance(failure, IskanderError):
            raise
        return Verdict(error=shorten(failure.message, ERROR_CHARACTERS_MAX)), None


def _measure(session: Session, deadline_ns: int, write_fd: int) -> None:
    """Measure the rows of a loaded model before the deadline of its load; write the findings.

    Findings are also written before batches that may end the process.
    """
    from iskander_worker.loading.row_measurement import MEASURE_S

    def write(found: Measurement) -> None:
        os.write(write_fd, msgspec.json.encode(found) + b"\n")

    left_s = MEASURE_SHARE * max(deadline_ns - now_ns(), 0) / NS_PER_S
    seconds = min(MEASURE_S, left_s)
    # The alarm ends a run that does not end after its abort.
    signal.setitimer(signal.ITIMER_REAL, seconds + ABORT_S)
    # The session that is opened with this measurement raises the error.
    with contextlib.suppress(ManifestError):
        session.measure(is_confined=True, seconds=seconds, on_risk=write)
    write(session.measurement)


def _load(job: Job) -> tuple[str, Session]:
    """Load and warm a model; if the job has a folder, save it there and compare the saved model.

    Returns why the weights cannot be shared, which is empty if they can, and the session.
    """
    from iskander_worker.backends.onnx import OnnxModel
    from iskander_worker.loading.engines import needs_engines
    from iskander_worker.loading.opener import ModelSource
    from iskander_worker.loading.prepacked import align_weights
    from iskander_worker.session import Session
    from iskander_worker.warm_up import random_results

    spec, source = job.spec, ModelSource(libraries=job.libraries)

    def open_session(source: ModelSource, measurement: Measurement | None = None) -> Session:
        def load(spec: ModelSpec, cores: int) -> OnnxModel:
            model = OnnxModel(spec, cores, source)
            model.measurement = measurement
            return model

        return Session(spec, job.cores, load)

    if job.folder is None or needs_engines(spec):
        if job.folder is not None:
            source = source._replace(engines=Path(job.folder), is_building=True)
        session = open_session(source)
        session.warm_up(spec.rows_max)
        return "", session
    folder = Path(job.folder)
    try:
        session = open_session(source._replace(save_to=folder / MODEL, save_weights=WEIGHTS))
    except ManifestError as error:
        session = open_session(source)
        session.warm_up(spec.rows_max)
        return shorten(f"the optimised model cannot be saved: {error.message}", 300), session
    session.warm_up(spec.rows_max)
    try:
        align_weights(folder / MODEL, folder / WEIGHTS)
        shared = open_session(source._replace(optimised=folder / MODEL), session.measurement)
    except ManifestError as error:
        return shorten(f"the saved model cannot be loaded: {error.message}", 300), session
    if shared.contract != session.contract:
        return "the saved model has another contract", session
    if random_results(session, spec.rows_max) != random_results(shared, spec.rows_max):
        return "the saved model has other results", session
    return "", session


if __name__ == "__main__":
    main()
