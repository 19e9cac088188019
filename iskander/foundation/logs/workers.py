"""Events of workers: their lifecycle, their loads, and their own lines."""

from __future__ import annotations

from iskander.foundation.logs.event import Source

supervisor = Source("iskander.supervisor", "worker")
readers = Source("iskander.sources")
worker_process = Source("iskander.worker")


@supervisor.info("worker", "change", "after")
def worker_changed(*, worker: int, change: str, before: str, after: str) -> str:
    """A worker slot changed its state; the lifecycle page lists states and changes."""
    return f"worker {worker}: {change}, was {before}, is {after}"


@supervisor.warning("worker")
def worker_notice(*, worker: int, notice: str) -> str:
    """A worker runs with a restriction, for example without pinned cores or locked memory.

    Do: Read the notice; `iskander doctor` checks the machine.
    """
    return f"worker {worker}: {notice}"


@supervisor.error("worker")
def worker_frame_malformed(*, worker: int, reason: str) -> str:
    """A worker sent a frame that cannot be decoded, and is killed.

    Do: Check that gateway and worker have the same version; otherwise report a bug.
    """
    return f"malformed frame from worker {worker}, which is killed: {reason}"


@supervisor.error("worker")
def worker_message_failed(*, worker: int, kind: str, error: BaseException) -> str:
    """A message of a worker raised an exception, and the worker is killed.

    Do: Check that gateway and worker have the same version; otherwise report a bug.
    """
    return f"{kind} of worker {worker}, which is killed, cannot be processed: {error!r}"


@supervisor.error("worker")
def worker_hung(*, worker: int, silent_ms: int, running: str) -> str:
    """A worker sent no heartbeat during a batch (`workers.hang_s`, `workers.hang_factor`).

    Its stack follows on stderr. It is replaced, and its requests are retried.

    Do: Look for a loop or a lock in the model's code or libraries; raise the limit if batches
    take that long.
    """
    return f"worker {worker} hangs: no heartbeat for {silent_ms} ms, {running}"


@supervisor.error("worker")
def worker_ended(*, worker: int, running: str) -> str:
    """A worker ended while it had batches; they are retried on another one.

    Do: Read `worker_process_exited` for the exit code or signal.
    """
    return f"worker {worker} has ended, {running}"


@supervisor.warning("exit")
def worker_process_exited(*, worker_pid: int, exit: str, explanation: str) -> str:
    """A worker process exited with an error or by a signal.

    Do: Read the lines of that pid before it. Without any, signal 9 that the gateway did not send is
    often the kernel's memory limit (`dmesg`), signal 11 a fault in a library of a model.
    """
    return f"worker process {worker_pid} ended {exit}{explanation}"


@supervisor.error("worker")
def worker_spawn_failed(*, worker: int, reason: str) -> str:
    """A worker process cannot be started; the gateway tries again.

    Do: Check the limits of processes and memory, and the interpreter of the model.
    """
    return f"worker {worker} failed to start: {reason}"


@supervisor.error("worker")
def worker_boot_failed(*, worker: int, failures: int, detail: str) -> str:
    """A worker ended before it had loaded its models.

    Do: Load the models without a server: `iskander check FILE`.
    """
    death = f"failure {failures} in a row{detail}"
    return f"worker {worker} ended before it had loaded its models: {death}"


@supervisor.error("worker")
def worker_crash_loop(*, worker: int, deaths: int, pause_s: float) -> str:
    """A worker ended soon after its start several times in a row (`workers.crash_loop`).

    Do: Read the earlier lines of this worker; fix or unload the model.
    """
    return (
        f"worker {worker} is in a crash loop: {deaths} deaths in a row; "
        f"the next start is in {pause_s:g} s"
    )


@supervisor.info("worker")
def worker_recycled(*, worker: int, reason: str) -> str:
    """A worker reached `workers.recycle_batches` or `workers.recycle_rss_bytes`: it is replaced."""
    return f"worker {worker} is recycled: {reason}"


@supervisor.warning("reason")
def worker_registration_rejected(*, reason: str) -> str:
    """A process connected to `attach.sock` and was not accepted as a worker.

    Do: Check the worker's version, core group and pool, and that its slot is free.
    """
    return f"worker registration rejected: {reason}"


@supervisor.error("worker")
def worker_send_failed(*, worker: int, error: BaseException) -> str:
    """A message could not be sent to a worker, which is ended; its batches are retried.

    Do: Nothing, unless it repeats; then report a bug.
    """
    return f"sending to worker {worker} failed; ending the worker"


@supervisor.info("worker", "model")
def worker_loaded_model(
    *, worker: int, model: str, load_ms: int, providers: str, threads: int
) -> str:
    """A worker loaded and warmed a model."""
    return f"worker {worker} loaded {model} in {load_ms} ms: {providers}, {threads} threads"


@supervisor.info("worker")
def worker_load_step(*, worker: int, step: str) -> str:
    """A long step of a load is still running; reported after 10, 20, 40, ... seconds."""
    return f"worker {worker}: {step}"


@supervisor.info("worker", "generation")
def worker_unloaded_model(*, worker: int, generation: int) -> str:
    """A worker released a generation of a model."""
    return f"worker {worker} unloaded generation {generation}"


@supervisor.error("worker")
def worker_load_timed_out(*, worker: int, limit_s: int) -> str:
    """A worker did not load a model in time.

    Do: Raise `workers.start_s`, or make the model load faster (loading page).
    """
    return f"load timeout: worker {worker}, limit {limit_s} s (`workers.start_s`)"


@supervisor.error("worker", "model")
def worker_refused_model(*, worker: int, model: str, reason: str) -> str:
    """A worker cannot load a model.

    Do: Read the reason; `iskander check FILE` shows the same without a server.
    """
    return f"worker {worker} cannot serve {model}: {reason}"


@readers.warning()
def source_reader_ended(*, reader_pid: int) -> str:
    """An idle process that reads sources ended; the next read starts another.

    Do: Nothing, unless it repeats: then check the memory limit of the machine.
    """
    return f"idle reader process {reader_pid} ended"


@readers.error()
def source_read_failed(*, error: BaseException) -> str:
    """The read of a source raised an exception; its client gets the error `internal`.

    Do: Report a bug with the traceback.
    """
    return "internal error in the read of a source"


@worker_process.error()
def worker_failed(*, reason: str) -> str:
    """A worker process ends: no gateway answers, or it has another version or no memory.

    Do: Read the reason; check `--attach` and the gateway's log.
    """
    return reason


@worker_process.error()
def worker_device_lost(*, error: BaseException) -> str:
    """A GPU or a kernel on it failed; the worker is replaced.

    Do: Read the driver's error; check the card with `nvidia-smi`, and the model of the last batch.
    """
    return f"device lost: {error}"


@worker_process.error()
def worker_bug(*, error: BaseException) -> str:
    """A bug in a worker, which is replaced, or in a sandboxed load.

    Do: Report a bug with the traceback.
    """
    return f"bug: {error}"


@worker_process.error()
def worker_crashed(*, error: BaseException) -> str:
    """A worker process ends with an exception, and is replaced.

    Do: Read the traceback; report a bug unless it ends in a library of the model.
    """
    return f"unexpected {type(error).__name__}"


@worker_process.info()
def worker_cores_changed() -> str:
    """The next gateway assigned other cores; this worker is replaced."""
    return "exiting: the new gateway assigned other cores, and a pinned worker cannot move"


@worker_process.warning()
def gateway_connection_lost() -> str:
    """The gateway of a worker ended; the worker keeps its models for `workers.reattach_s`.

    Do: Read the end of the gateway's log.
    """
    return "connection to the gateway lost; keeping the models and waiting for the next gateway"


@worker_process.error()
def model_code_failed(*, error: BaseException) -> str:
    """A model's code or library raised an exception during a load.

    Do: Read the traceback, which ends in the model's code.
    """
    return f"the load of a model failed: {type(error).__name__}"
