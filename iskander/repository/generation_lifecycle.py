"""Life of a generation, decided: in this stage, on this event, become that and do those things.

A generation is a model version as its files were when it was looked at; it has a lane of its own.
Pure: `generations` feeds events in and carries actions out.
"""

from __future__ import annotations

from enum import StrEnum


class Stage(StrEnum):
    """Where a generation is in its life."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    GONE = "gone"


class Event(StrEnum):
    """What happened."""

    ACCEPTED = "enough workers have it"
    REFUSED = "a worker cannot load it"
    OVERDUE = "it took too long"
    RETIRED = "another takes its place, or nobody wants it"
    EMPTY = "nothing of it is under way"


class Action(StrEnum):
    """What to do about it."""

    PUT_IN_PLACE = "let it be found"
    TELL = "tell who waits for it that it is not served"
    WITHDRAW = "let it be found no more"
    REFUSE_QUEUED = "answer what still waits in its queue"
    UNLOAD = "let workers give it up, and forget it"


TABLE: dict[tuple[Stage, Event], tuple[Stage, tuple[Action, ...]]] = {
    (Stage.LOADING, Event.ACCEPTED): (Stage.SERVING, (Action.PUT_IN_PLACE,)),
    (Stage.LOADING, Event.REFUSED): (Stage.GONE, (Action.TELL, Action.UNLOAD)),
    (Stage.LOADING, Event.OVERDUE): (Stage.GONE, (Action.TELL, Action.UNLOAD)),
    (Stage.LOADING, Event.RETIRED): (Stage.GONE, (Action.TELL, Action.UNLOAD)),
    (Stage.SERVING, Event.RETIRED): (Stage.DRAINING, (Action.WITHDRAW,)),
    (Stage.DRAINING, Event.EMPTY): (Stage.GONE, (Action.UNLOAD,)),
    (Stage.DRAINING, Event.OVERDUE): (Stage.DRAINING, (Action.REFUSE_QUEUED,)),
}
"""A pair that is not here changes nothing: what is served is not failed by a late word."""


def step(stage: Stage, event: Event) -> tuple[Stage, tuple[Action, ...]]:
    """What a generation becomes, and what to do, in order."""
    return TABLE.get((stage, event), (stage, ()))
