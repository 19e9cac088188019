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

    ACCEPTED = "enough workers have loaded it"
    REFUSED = "a worker cannot load it"
    OVERDUE = "timeout"
    RETIRED = "replaced or unloaded"
    EMPTY = "no requests left"


class Action(StrEnum):
    """Output of the state machine."""

    PUT_IN_PLACE = "route calls to it"
    REPORT_FAILURE = "fail the load"
    WITHDRAW = "route no calls to it"
    REFUSE_QUEUED = "reject its queued requests"
    UNLOAD = "unload it in all workers"


TABLE: dict[tuple[Stage, Event], tuple[Stage, tuple[Action, ...]]] = {
    (Stage.LOADING, Event.ACCEPTED): (Stage.SERVING, (Action.PUT_IN_PLACE,)),
    (Stage.LOADING, Event.REFUSED): (Stage.GONE, (Action.REPORT_FAILURE, Action.UNLOAD)),
    (Stage.LOADING, Event.OVERDUE): (Stage.GONE, (Action.REPORT_FAILURE, Action.UNLOAD)),
    (Stage.LOADING, Event.RETIRED): (Stage.GONE, (Action.REPORT_FAILURE, Action.UNLOAD)),
    (Stage.SERVING, Event.RETIRED): (Stage.DRAINING, (Action.WITHDRAW,)),
    (Stage.DRAINING, Event.EMPTY): (Stage.GONE, (Action.UNLOAD,)),
    (Stage.DRAINING, Event.OVERDUE): (Stage.DRAINING, (Action.REFUSE_QUEUED,)),
}
"""A pair that is not listed changes nothing: a late event does not fail a serving generation."""


def step(stage: Stage, event: Event) -> tuple[Stage, tuple[Action, ...]]:
    """Return the next stage, and the actions in order."""
    return TABLE.get((stage, event), (stage, ()))
