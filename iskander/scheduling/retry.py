"""What becomes of a request whose batch came back without results.

A request is run again where that can help: inference is pure. What has failed together with others
runs alone from then on, so that one caller's bad rows cost nobody else anything and the batch that
kills workers is found.

Pure, but for what it notes on the request and in the log.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from iskander.errors import Cancelled, IskanderError, PoisonedRequest, detach
from iskander.scheduling.request import Request

if TYPE_CHECKING:
    from iskander.scheduling.worker_slot import BatchPart

log: Final = logging.getLogger("iskander.dispatch")

KILLS_MAX: Final = 2
LOSSES_MAX: Final = 8
"""Workers that may die under a request whether or not they ran it; every retry has an end."""


def after_failure(
    request: Request, error: IskanderError, *, is_shared: bool
) -> IskanderError | None:
    """The error that a request gets whose batch was not computed; None: it runs again, alone.

    Args:
        request: One of the batch's.
        error: What the worker said of the batch, maybe with words of another request's rows.
        is_shared: There were others in it.
    """
    if is_shared and not isinstance(error, Cancelled):
        request.is_alone = True
        return None
    return error


def after_loss(request: Request, *, was_running: bool) -> IskanderError | None:
    """The error that a request gets whose worker died; None: it runs again.

    Args:
        request: What killed a worker runs alone the next time, and not a third time.
        was_running: The worker was running its batch, and not one before it.
    """
    request.losses += 1
    if was_running:
        request.kills += 1
        request.is_alone = True
    if request.kills < KILLS_MAX and request.losses < LOSSES_MAX:
        return None
    did = "they ran" if request.kills >= KILLS_MAX else "they had"
    count = request.kills if request.kills >= KILLS_MAX else request.losses
    return PoisonedRequest(
        f"{count} workers died while {did} this request for model `{request.lane.title}`; it is "
        "not given to another",
        model=request.lane.model.name,
    )


def results_error(request: Request, error: Exception) -> IskanderError:
    """The error that a request gets whose results were computed and cannot be taken.

    It would be so again: nothing runs twice for that. What is no error of ours is the log's.
    """
    if not isinstance(error, IskanderError):
        log.error("results for %s cannot be taken", request.lane.title, exc_info=error)
        error = IskanderError("the server failed to take the results")
    return detach(error)  # Its frames hold views of the worker's arena.


def undo_parts(parts: list[BatchPart]) -> list[Request]:
    """Undo the parts of a batch that has no results; every request of it once."""
    for part in parts:
        request = part.request
        request.running -= 1
        if request.is_over:
            continue
        if request.is_waiting:
            request.lane.queue.remove(request)
        request.todo.append((part.first, part.rows))
    return list(dict.fromkeys(part.request for part in parts))
