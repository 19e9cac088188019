"""Retry policy for failed and lost batches.

A retry is safe because inference is pure. A request whose batch failed together with others is
retried alone, so that bad rows of one caller fail nobody else and a batch that crashes workers is
identified.

Pure, except for the marks on the request and the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from iskander.errors import (
    Cancelled,
    DeadlineExceeded,
    IskanderError,
    PoisonedRequest,
    RemoteDenied,
    RemoteLoop,
    RemoteNotReady,
    RemoteOverloaded,
    RemoteTimeout,
    RemoteUnavailable,
    detach,
)
from iskander.foundation.logs import requests as log
from iskander.gateway.scheduling.request import Request

if TYPE_CHECKING:
    from iskander.gateway.scheduling.worker_slot import BatchPart

ROW_INDEPENDENT: Final = (
    Cancelled,
    DeadlineExceeded,
    RemoteDenied,
    RemoteLoop,
    RemoteNotReady,
    RemoteOverloaded,
    RemoteTimeout,
    RemoteUnavailable,
)
"""Errors that a batch without the rows of other requests would have too."""
KILLS_MAX: Final = 2
"""Workers that die while running a request, until it is poisoned."""
LOSSES_MAX: Final = 8
"""The same for workers that hold it, running or not; it bounds the retries."""


def after_failure(
    request: Request, error: IskanderError, *, is_shared: bool, hops: int = 0
) -> IskanderError | None:
    """The error of a request whose batch failed; None: retry it alone.

    If the batch `is_shared` with other requests, the error may concern their rows, or the `hops` of
    the batch, the most of its requests.
    """
    has_other_hops = isinstance(error, RemoteLoop) and request.terms.hops < hops
    if has_other_hops or (is_shared and not isinstance(error, ROW_INDEPENDENT)):
        request.is_alone = True
        return None
    return error


def after_loss(
    request: Request, *, was_running: bool, kills_max: int = KILLS_MAX
) -> IskanderError | None:
    """The error of a request whose worker died; None: retry it, alone if it was running.

    `kills_max` is 1 for a request that ran alone, of a source that is known to end workers.
    """
    request.losses += 1
    if was_running:
        request.kills += 1
        request.is_alone = True
    if request.kills < kills_max and request.losses < LOSSES_MAX:
        return None
    did = "ran" if request.kills >= kills_max else "held"
    count = request.kills if request.kills >= kills_max else request.losses
    workers = "1 worker died while it" if count == 1 else f"{count} workers died while they"
    return PoisonedRequest(
        f"{workers} {did} this request for model `{request.lane.title}`; "
        "it is not retried, and its values may be the cause",
        model=request.lane.model.name,
    )


def results_error(request: Request, error: Exception) -> IskanderError:
    """The error of a request whose results cannot be copied; a retry would fail in the same way."""
    if not isinstance(error, IskanderError):
        log.result_copy_failed(model=request.lane.title, error=error)
        error = IskanderError("internal error: copying the results failed")
    return detach(error)  # Its frames hold views of the worker's arena.


def undo_parts(parts: list[BatchPart]) -> list[Request]:
    """Return the rows of a batch without results to its requests.

    Returns each request once, removed from its queue.
    """
    for part in parts:
        request = part.request
        request.running -= 1
        if request.is_over:
            continue
        if request.is_waiting:
            request.lane.queue.remove(request)
        request.todo.append((part.first, part.rows))
    return list(dict.fromkeys(part.request for part in parts))
