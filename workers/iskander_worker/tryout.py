"""A model's first opening, in a process of its own: what it may break there is nobody else's.

    worker          try_out   starts the process with a limit of time, and takes its verdict
    that process    main      limits its memory and files, opens and warms the model, and where
                              weights are shared, saves it optimised and compares its results

A model file is a program: it may loop for ever while constants are folded, ask for all memory there
is, or meet a bug of the runtime. A worker has callers to lose, this process has none.

Runs on: worker main (`try_out`), and the process that it starts.

Source: setrlimit(2), where RLIMIT_DATA counts private writable memory and no mapped weights, and a
write beyond RLIMIT_FSIZE fails where its signal is ignored; prctl(2), PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from iskander.errors import IskanderError, ManifestError, shorten
from iskander.wire.messages import LoadingSpec, ModelSpec
from iskander_worker.failures import named
from iskander_worker.guest import own_command
from iskander_worker.placement import set_library_environment
from iskander_worker.weights import MODEL, WEIGHTS

NICE = 5
GRACE_S = 10.0
"""How long the process outlives its time, where whoever waits for it does not end it."""
STARTING_BYTES = 1 << 28
"""What Python, NumPy and the runtime take before there is a model."""
_PR_SET_PDEATHSIG = 1
_SIGNAL_OF_MEMORY = signal.SIGKILL


class Job(msgspec.Struct, frozen=True):
    """What the process is to do.

    Attributes:
        cores: Compute threads where the model names none.
        folder: Where to save the optimised model; None where weights are not shared.
        private_bytes: Memory that it may take.
        file_bytes: Of each file that it writes.
        parent: The process that waits for it; it does nothing for any other.
        seconds: After so many it ends by itself, whoever lives.
    """

    spec: ModelSpec
    cores: int
    libraries: tuple[str, ...]
    folder: str | None
    private_bytes: int
    file_bytes: int
    parent: int
    seconds: float


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


def try_out(
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
    limit = spec.loading.trial_bytes or available_bytes()
    bare = msgspec.structs.replace(spec, loading=LoadingSpec())
    job = Job(
        bare,
        cores,
        libraries,
        None if folder is None else str(folder),
        private_bytes=limit,
        file_bytes=spec.loading.cache_bytes,
        parent=os.getpid(),
        seconds=seconds + GRACE_S,
    )
    child = subprocess.Popen(
        own_command("iskander_worker.tryout"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        answer, _ = child.communicate(msgspec.json.encode(job), seconds)
    except subprocess.TimeoutExpired:
        return Verdict(
            refusal=f"it was not loaded and warmed within {seconds:.3g} s (loading.trial_s), in a "
            "process of its own",
            is_late=True,
        )
    finally:
        if child.returncode is None:  # Not reaped, so its number is still that of its group.
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    if child.returncode == 0:
        return msgspec.json.decode(answer, type=Verdict)
    return Verdict(refusal=f"it ended the process that tried it out {_end_of(child.returncode)}")


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


def _end_of(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    name = signal.Signals(-code).name
    hint = ": by the system, for its memory?" if -code == _SIGNAL_OF_MEMORY else ""
    return f"by {name}{hint}"


def main() -> None:
    """Entry point of the process."""
    # The verdict has this descriptor to itself, whatever a library prints.
    verdict = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    if os.getppid() != job.parent:
        os._exit(0)  # It ended before this process could ask to be ended with it.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, job.seconds)
    os.umask(0o077)
    os.nice(NICE)
    set_library_environment()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (job.private_bytes, job.private_bytes))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (job.file_bytes, job.file_bytes))
    try:
        found = Verdict(note=_judge(job))
    except MemoryError:
        found = Verdict(error=f"it needs more than {job.private_bytes} bytes (loading.trial_bytes)")
    except BaseException as error:
        failure = named(error)
        if not isinstance(failure, IskanderError):
            raise
        found = Verdict(error=failure.message)
    verdict.write(msgspec.json.encode(found))
    verdict.flush()
    # Without an orderly end: threads of the runtime could keep it, and nothing is to be saved.
    os._exit(0)


def _judge(job: Job) -> str:
    """Open, warm, save and compare; why the weights cannot be shared, or nothing.

    Raises:
        ManifestError: The model cannot be served.
    """
    from iskander_worker.backends.onnx import OnnxModel
    from iskander_worker.opening import Source
    from iskander_worker.prepacked import align_weights
    from iskander_worker.session import Session
    from iskander_worker.warm_up import sample_results

    spec, source = job.spec, Source(libraries=job.libraries)

    def opened(source: Source) -> Session:
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
