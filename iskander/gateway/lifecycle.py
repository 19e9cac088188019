"""Life of a worker, decided: in this state, on this event, become that and do those things.

The table is the whole of it. Pure: `supervisor` feeds events in and carries actions out.
"""

from __future__ import annotations

from enum import StrEnum

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 10.0


class State(StrEnum):
    """Where a worker's place is in its life."""

    ABSENT = "absent"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    LEAVING = "leaving"
    STOPPING = "stopping"
    STOPPED = "stopped"


class Event(StrEnum):
    """What happened."""

    SPAWN_DUE = "spawn due"
    ATTACHED = "attached"
    LOADED = "loaded"
    LOAD_FAILED = "load failed"
    LOST = "lost"
    EXITED = "exited"
    LEFT = "asked to leave"
    HUNG = "hung"
    TIMED_OUT = "timed out"
    STOP = "stop"


class Action(StrEnum):
    """What to do about it."""

    SPAWN = "spawn"
    SPAWN_LATER = "spawn later"
    LOAD = "load models"
    OPEN = "open for work"
    CLOSE = "close for work"
    DRAIN = "send drain"
    DETACH = "fail its batches and unmap"
    KILL = "kill"


_LOST = (Action.CLOSE, Action.DETACH, Action.SPAWN_LATER)

TABLE: dict[tuple[State, Event], tuple[State, tuple[Action, ...]]] = {
    (State.ABSENT, Event.SPAWN_DUE): (State.STARTING, (Action.SPAWN,)),
    (State.ABSENT, Event.ATTACHED): (State.LOADING, (Action.LOAD,)),
    (State.ABSENT, Event.STOP): (State.STOPPED, ()),
    (State.STARTING, Event.ATTACHED): (State.LOADING, (Action.LOAD,)),
    (State.STARTING, Event.EXITED): (State.ABSENT, (Action.SPAWN_LATER,)),
    (State.STARTING, Event.TIMED_OUT): (State.STARTING, (Action.KILL,)),
    (State.STARTING, Event.STOP): (State.STOPPED, (Action.KILL,)),
    (State.LOADING, Event.LOADED): (State.READY, (Action.OPEN,)),
    (State.LOADING, Event.LOAD_FAILED): (State.LOADING, (Action.KILL,)),
    (State.LOADING, Event.TIMED_OUT): (State.LOADING, (Action.KILL,)),
    (State.LOADING, Event.LOST): (State.ABSENT, _LOST),
    (State.LOADING, Event.LEFT): (State.LEAVING, (Action.DRAIN,)),
    (State.LOADING, Event.STOP): (State.STOPPING, (Action.DRAIN,)),
    (State.READY, Event.LOST): (State.ABSENT, _LOST),
    (State.READY, Event.HUNG): (State.READY, (Action.KILL,)),
    (State.READY, Event.LEFT): (State.LEAVING, (Action.CLOSE, Action.DRAIN)),
    (State.READY, Event.STOP): (State.STOPPING, (Action.CLOSE, Action.DRAIN)),
    (State.LEAVING, Event.LOST): (State.ABSENT, _LOST),
    (State.LEAVING, Event.HUNG): (State.LEAVING, (Action.KILL,)),
    (State.LEAVING, Event.TIMED_OUT): (State.LEAVING, (Action.KILL,)),
    (State.LEAVING, Event.STOP): (State.STOPPING, ()),
    (State.STOPPING, Event.LOST): (State.STOPPED, (Action.DETACH,)),
    (State.STOPPING, Event.HUNG): (State.STOPPING, (Action.KILL,)),
    (State.STOPPING, Event.TIMED_OUT): (State.STOPPING, (Action.KILL,)),
    (State.STOPPED, Event.TIMED_OUT): (State.STOPPED, (Action.KILL,)),
}
"""An event with no line for a state changes nothing there: it was overtaken by another."""


def step(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """What a worker's place becomes, and what to do, in order."""
    return TABLE.get((state, event), (state, ()))


def backoff_s(failures: int) -> float:
    """How long to wait before a worker is started again after that many failures in a row."""
    return min(BACKOFF_FIRST_S * 2.0 ** min(failures, 16), BACKOFF_MAX_S)
