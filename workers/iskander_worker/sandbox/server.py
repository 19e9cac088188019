"""The server that tries models out: a process forked for each, with limits, and its verdict.

A line on standard input is an `Order`, a line on standard output its `Answer`. The server opens no
model itself; what it has imported its forks need not. It goes when who started it is gone, and a
fork goes with it.

Runs on: a process of its own, and its forks. It has one thread, so that it may fork.

Source: setrlimit(2), where RLIMIT_DATA counts private writable memory and no mapped weights, and a
write beyond RLIMIT_FSIZE fails where its signal is ignored; prctl(2), PR_SET_PDEATHSIG.
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
import traceback
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import msgspec

from iskander.clock import NS_PER_S, now_ns
from iskander.errors import IskanderError, ManifestError, shorten
from iskander_worker.affinity import set_library_environment
from iskander_worker.loading.weight_cache import MODEL, WEIGHTS
from iskander_worker.sandbox.client import Answer, Job, Order, Verdict, late, read_line

NICE = 5
GRACE_S = 10.0
"""How long a fork outlives its time where nobody ends it, whoever lives."""
LONELY_S = 60.0
"""The server goes when it was asked nothing for so long: who started it should have ended it."""
WORDS_MAX = 4000
_VERDICT_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1
_SIGNAL_OF_MEMORY = signal.SIGKILL
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Sent to all processes of a service that is stopped. A fork goes with its server; ended by one of
these, it would have its model blamed, and the blame is remembered."""
_NEEDED = (
    "backends.onnx",
    "failures",
    "loading.opener",
    "loading.prepacked",
    "session",
    "warm_up",
)
"""Imported when libraries have been kept from threads of their own, and before the first fork."""
_libc = ctypes.CDLL(None)


def main() -> None:
    """Entry point of the server."""
    # The answers have this descriptor to themselves, whatever a library prints.
    answers = os.dup(1)
    os.dup2(2, 1)
    Path("/proc/self/comm").write_text("isk-trials")
    os.nice(NICE)
    set_library_environment()
    for name in _NEEDED:
        import_module(f"iskander_worker.{name}")
    gc.freeze()  # Forks share the memory of what lives now, as long as nobody walks it.
    while line := read_line(sys.stdin.buffer, LONELY_S):
        order = msgspec.json.decode(line, type=Order)
        verdict = _verdict(order, answers)
        if verdict is None:
            return
        os.write(answers, msgspec.json.encode(Answer(order.number, verdict)) + b"\n")


def _verdict(order: Order, answers: int) -> Verdict | None:
    """Fork, and see how the fork ends; None where nobody waits for that any more."""
    said, say = os.pipe()
    server = os.getpid()
    fork = os.fork()
    if not fork:
        os.close(answers)  # It has a word in its own verdict and in no other.
        os.close(said)
        _judge_and_end(order, server, say)
    os.close(say)
    ended = os.pidfd_open(fork)
    try:
        # On standard input nothing comes meanwhile but its end.
        left_s = max(order.deadline_ns - now_ns(), 0) / NS_PER_S
        ready = select.select([ended, 0], [], [], left_s)[0]
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(ended, signal.SIGKILL)
        # Not reaped yet, so its number is still that of its session: what it has forked goes too.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(fork, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
        os.set_blocking(said, False)
        # A library that the model brings along can end its process in order, and say nothing.
        with contextlib.suppress(BlockingIOError, msgspec.DecodeError, UnicodeDecodeError):
            if ended in ready and code == 0:
                return msgspec.json.decode(os.read(said, _VERDICT_BYTES), type=Verdict)
    finally:
        os.close(ended)
        os.close(said)
    if 0 in ready:
        return None
    if not ready:
        return late(order.job.seconds)
    return Verdict(refusal=f"it ended the process that tried it out {_end_of(code)}")


def _end_of(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"  # One of the real-time ones has no name.
    hint = ": by the system, for its memory?" if -code == _SIGNAL_OF_MEMORY else ""
    return f"by {name}{hint}"


def _judge_and_end(order: Order, server: int, say: int) -> NoReturn:
    """Main function of a fork."""
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:  # Else it ended before this process could ask to end with it.
            os.setsid()
            _limit(order.job, order.deadline_ns)
            os.write(say, msgspec.json.encode(_judged(order.job)))
            # Without an orderly end: threads of the runtime could keep it, nothing is to be saved.
            os._exit(0)
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(1)


def _limit(job: Job, deadline_ns: int) -> None:
    """Take memory, files, descriptors and time from this process."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.umask(0o077)
    for stop in _STOPS:
        signal.signal(stop, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    left_s = max(deadline_ns - now_ns(), 0) / NS_PER_S
    signal.setitimer(signal.ITIMER_REAL, left_s + GRACE_S)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (job.private_bytes, job.private_bytes))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (job.file_bytes, job.file_bytes))


def _judged(job: Job) -> Verdict:
    from iskander_worker.failures import load_error

    try:
        return Verdict(note=_judge(job))
    except MemoryError:
        return Verdict(error=f"it needs more than {job.private_bytes} bytes (loading.trial_bytes)")
    except BaseException as error:
        failure = load_error(error)
        if not isinstance(failure, IskanderError):
            raise
        return Verdict(error=shorten(failure.message, WORDS_MAX))


def _judge(job: Job) -> str:
    """Open, warm, save and compare; why the weights cannot be shared, or nothing.

    Raises:
        ManifestError: The model cannot be served.
    """
    from iskander_worker.backends.onnx import OnnxModel
    from iskander_worker.loading.opener import ModelSource
    from iskander_worker.loading.prepacked import align_weights
    from iskander_worker.session import Session
    from iskander_worker.warm_up import sample_results

    spec, source = job.spec, ModelSource(libraries=job.libraries)

    def opened(source: ModelSource) -> Session:
        return Session(spec, job.cores, lambda spec, cores: OnnxModel(spec, cores, source))

    if job.folder is None:
        opened(source).warm_up(spec.rows_max)
        return ""
    folder = Path(job.folder)
    try:
        session = opened(source._replace(save_to=folder / MODEL, save_weights=WEIGHTS))
    except ManifestError as error:
        opened(source).warm_up(spec.rows_max)
        return shorten(f"it cannot be saved optimised: {error.message}", 300)
    session.warm_up(spec.rows_max)
    try:
        align_weights(folder / MODEL, folder / WEIGHTS)
        shared = opened(source._replace(optimised=folder / MODEL))
    except ManifestError as error:
        return shorten(f"it cannot be loaded as it was saved: {error.message}", 300)
    if shared.contract != session.contract:
        return "its contract is another one when it is loaded as it was saved"
    if sample_results(session, spec.rows_max) != sample_results(shared, spec.rows_max):
        return "its results are other ones when it is loaded as it was saved"
    return ""


if __name__ == "__main__":
    main()
