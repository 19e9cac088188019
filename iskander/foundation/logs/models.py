"""Events of models: the repository, generations, quarantine, outages, changed files."""

from __future__ import annotations

from iskander.foundation.logs.event import Source

repository = Source("iskander.repository", "model")
shadow = Source("iskander.shadow", "model")
supervisor = Source("iskander.supervisor", "model")


@supervisor.error("model")
def model_isolated(*, model: str) -> str:
    """A batch of a model ended a shared worker; the model gets a worker of its own.

    Do: Find out which data or memory ends its workers. If it happens again and again, give it
    workers of its own (`models.workers`) with the next restart.
    """
    return f"model {model} moves to an isolated worker: its batch ended a shared worker"


@supervisor.info("model")
def model_returned(*, model: str) -> str:
    """An isolated model has ended no worker for some time; shared workers load it again."""
    return f"model {model} returns to the shared workers"


@supervisor.error("model")
def model_quarantined(*, model: str, pause_s: float, reason: str) -> str:
    """A model ended its own workers too; its requests are rejected for a while.

    Do: Replace the model version; `workers.quarantine_s` is the first pause.
    """
    return f"requests for model {model} are rejected for {pause_s:g} s: {reason}"


@supervisor.info("model")
def requests_combined(*, model: str, by: str, verdict: str, evidence: str) -> str:
    """Requests for a model may run as one batch."""
    return f"requests for model {model} are combined, by {by}; its rows are {verdict}: {evidence}"


@supervisor.info("model")
def requests_kept_apart(*, model: str, verdict: str, evidence: str) -> str:
    """Requests for a model run alone and as a whole: its manifest has `combine = false`."""
    return (
        f"requests for model {model} are not combined, by `combine = false` in its manifest; its "
        f"rows are {verdict}: {evidence}"
    )


@supervisor.warning("model", "verdict")
def requests_not_combined(*, model: str, effects: str, verdict: str, evidence: str) -> str:
    """Requests for a model run alone: a row's result depends on the other rows, or may do so.

    With the effects "combined, cut or padded", a request has at most `models.max_batch_rows`
    rows.

    Do: If the rows are known to be independent, or the differences do not matter, set `combine =
    true` in the manifest. With the verdict undecided, add warm-up samples to it.
    Set `combine = false` to accept the verdict without this warning.
    """
    return f"requests for model {model} are not {effects}: its rows are {verdict}: {evidence}"


@supervisor.warning("model")
def lane_settings_without_effect(*, model: str, settings: str) -> str:
    """Settings of a lane have no effect, because requests for the model are not combined.

    Do: Remove them, or see `requests_not_combined`.
    """
    return (
        f"settings of model {model} without effect, because its rows are not combined: {settings}"
    )


@supervisor.warning("model")
def model_quarantine_ended(*, model: str) -> str:
    """The quarantine of a model is over; its next batches decide.

    Do: See `model_quarantined`.
    """
    return f"requests for model {model} are accepted again: its quarantine is over"


@supervisor.error("model")
def model_unreachable(*, model: str, reason: str) -> str:
    """The remote server of a model does not answer; its requests are rejected until it does.

    Do: Start the remote server, or correct its address in the manifest.
    """
    return f"requests for model {model} are rejected: {reason}"


@supervisor.warning("model")
def model_reachable(*, model: str) -> str:
    """The remote server of a model answers again.

    Do: Nothing.
    """
    return f"requests for model {model} are accepted again: its server answers"


@repository.error("model")
def model_ignored(*, model: str) -> str:
    """A folder of the repository has the name of a `[[models]]` table.

    Do: Rename or remove one of them.
    """
    return f"model `{model}` of the repository is ignored: the configuration has it"


@repository.error("model", "reason")
def model_not_served(*, model: str, reason: str) -> str:
    """A model version cannot be loaded; an earlier version continues if there is one.

    Do: Read the reason and correct the files, or load it again: `iskander load NAME`.
    """
    return f"{model} is not served: {reason}"


@repository.warning("model")
def model_files_changed(*, model: str) -> str:
    """The files of a served version changed; the new ones are loaded next to it.

    Do: Nothing. Publish changes as new versions to be able to go back.
    """
    return f"the files of {model} have changed"


@repository.info("model")
def generation_loading(*, generation: int, model: str) -> str:
    """A new generation of a model version is being loaded."""
    return f"generation {generation} of {model} is loading"


@repository.info("generation", "change")
def generation_changed(*, generation: int, model: str, change: str, before: str, after: str) -> str:
    """A generation of a model version changed its stage."""
    return f"generation {generation} of {model}: {change}, was {before}, is {after}"


@repository.error()
def repository_change_failed(*, error: BaseException) -> str:
    """A change of the repository failed for no fault of a model.

    Do: Report a bug with the traceback.
    """
    return "a change of the repository failed"


@repository.warning("reason")
def repository_unwatched(*, reason: str) -> str:
    """The repository's folder cannot be watched; it is scanned every `repository.rescan_s`.

    Do: Check the permissions, and the limits `fs.inotify.max_user_watches` and
    `fs.inotify.max_user_instances` (`sysctl`).
    """
    return f"the repository cannot be watched: {reason}"


@repository.error("reason")
def repository_scan_rejected(*, reason: str) -> str:
    """The repository cannot be read; the served models continue.

    Do: Read the reason; correct the folder.
    """
    return reason


@repository.error()
def repository_scan_failed(*, error: BaseException) -> str:
    """A scan of the repository raised an exception.

    Do: Report a bug with the traceback.
    """
    return "the scan of the repository failed; the next change starts another"


@repository.warning()
def peer_request_failed(*, reason: str) -> str:
    """A load or unload of another gateway process was not completed.

    Do: Repeat the load; read the log of the process that received it.
    """
    return f"the request of a peer process failed: {reason}"


@repository.error("model")
def file_check_timed_out(*, model: str, limit_s: float) -> str:
    """The files of a model could not be read in time before a load by another worker.

    Do: Check the file system, for example a network mount.
    """
    return f"file check of {model} timed out after {limit_s:g} s"


@repository.error("model")
def file_check_failed(*, model: str, error: BaseException) -> str:
    """The files of a model cannot be compared with those that are served.

    Do: Check the permissions of the files; the traceback has the cause.
    """
    return f"file check of {model} failed"


@repository.error("model")
def file_check_not_started(*, model: str, reason: str) -> str:
    """No thread could be started to compare the files of a model.

    Do: Raise the limit of processes (RLIMIT_NPROC, `pids.max`).
    """
    return f"file check of {model} failed: {reason}"


@shadow.error("model")
def shadow_not_comparable(*, model: str, served: str, reason: str) -> str:
    """A shadow version cannot be compared with a served one; it gets no requests.

    Do: Correct the manifest of the shadow version, or remove it from the shadow versions.
    """
    return f"shadow version {model} is not compared with {served}: {reason}"


@shadow.error("model")
def shadow_ended_worker(*, model: str, worker: int) -> str:
    """A worker ended while it ran a shadow batch; the shadow version is suspended.

    Do: Find out why the shadow version ends workers before it is served.
    """
    return f"worker {worker} ended during a batch of shadow version {model}, which is suspended"


@shadow.error("model")
def shadow_comparison_failed(*, model: str, error: Exception) -> str:
    """Results of a shadow version could not be compared; it is suspended for some seconds.

    Do: Report it as a bug, with the traceback.
    """
    return f"the comparison of shadow version {model} failed"
