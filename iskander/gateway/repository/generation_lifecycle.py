"""State machine of a generation: one state of a model version's files, with its lane.

Pure. `generations` supplies the events and performs the actions.
"""

from __future__ import annotations

from enum import StrEnum


class Stage(StrEnum):
    """Stage of a generation."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    GONE = "gone"


class Event(StrEnum):
    """Input of the state machine."""

    LOADED = "enough workers have loaded it"
    LOAD_FAILED = "a worker cannot load it"
    TIMED_OUT = "timeout"
    RETIRED = "replaced or unloaded"
    DRAINED = "no requests left"


class Action(StrEnum):
    """Output of the state machine."""

    SERVE = "route calls to it"
    REPORT_FAILURE = "fail the load"
    WITHDRAW = "route no calls to it"
    REJECT_QUEUED = "reject its queued requests"
    UNLOAD = "unload it in all workers"


TABLE: dict[tuple[Stage, Event], tuple[Stage, tuple[Action, ...]]] = {
    (Stage.LOADING, Event.LOADED): (Stage.SERVING, (Action.SERVE,)),
    (Stage.LOADING, Event.LOAD_FAILED): (Stage.GONE, (Action.REPORT_FAILURE, Action.UNLOAD)),
    (Stage.LOADING, Event.TIMED_OUT): (Stage.GONE, (Action.REPORT_FAILURE, Action.UNLOAD)),
    (Stage.LOADING, Event.RETIRED): (Stage.GONE, (Action.REPORT_FAILURE, Action.UNLOAD)),
    (Stage.SERVING, Event.RETIRED): (Stage.DRAINING, (Action.WITHDRAW,)),
    (Stage.DRAINING, Event.DRAINED): (Stage.GONE, (Action.UNLOAD,)),
    (Stage.DRAINING, Event.TIMED_OUT): (Stage.DRAINING, (Action.REJECT_QUEUED,)),
}
"""A pair that is not listed changes nothing: a late event does not fail a serving generation."""


def step(stage: Stage, event: Event) -> tuple[Stage, tuple[Action, ...]]:
    """Return the next stage, and the actions in order."""
    return TABLE.get((stage, event), (stage, ()))
