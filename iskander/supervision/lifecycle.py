"""Life of a worker, decided: in this state, on this event, become that and do those things.

The two tables are the whole of it: what happens, and what is ignored. A pair of state and event
that is in neither is a mistake in this file. Pure: `supervisor` feeds events in and carries actions
out.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 10.0


class State(StrEnum):
    """Where a worker's place is in its life."""

    ABSENT = "absent"
    LOOPING = "crash loop"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    HUNG = "hung"
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
    RECYCLE_DUE = "recycle due"
    HUNG = "hung"
    TIMED_OUT = "timed out"
    STEADY = "steady"
    LOOPED = "died again and again"
    STOP = "stop"


class Action(StrEnum):
    """What to do about it."""

    SPAWN = "spawn"
    SPAWN_LATER = "spawn after a pause"
    SPAWN_NEXT = "spawn at once"
    LOAD = "load models"
    OPEN = "open for work"
    AWAIT = "let requests wait"
    CLOSE = "close for work"
    DRAIN = "send drain"
    DETACH = "take its batches back and unmap"
    COUNT_BOOT = "count a boot failure"
    COUNT_CRASH = "count a crash"
    FORGIVE = "forget its deaths"
    ABORT = "abort for a stack, then kill"
    KILL = "kill"


ATTACHED = frozenset((State.LOADING, State.READY, State.HUNG, State.LEAVING, State.STOPPING))
"""Where a process is attached, and so has memory, and perhaps batches, to be taken back."""

ENDING = frozenset((State.STOPPING, State.STOPPED))
"""Where nothing is started any more."""

_CRASHED = (Action.DETACH, Action.COUNT_CRASH, Action.SPAWN_LATER)
_REPLACED = (Action.AWAIT, Action.CLOSE, Action.DRAIN)

TABLE: dict[tuple[State, Event], tuple[State, tuple[Action, ...]]] = {
    (State.ABSENT, Event.SPAWN_DUE): (State.STARTING, (Action.SPAWN,)),
    (State.ABSENT, Event.ATTACHED): (State.LOADING, (Action.LOAD,)),
    (State.ABSENT, Event.LOOPED): (State.LOOPING, ()),
    (State.ABSENT, Event.STOP): (State.STOPPED, ()),
    (State.LOOPING, Event.SPAWN_DUE): (State.STARTING, (Action.SPAWN,)),
    (State.LOOPING, Event.ATTACHED): (State.LOADING, (Action.LOAD,)),
    (State.LOOPING, Event.STOP): (State.STOPPED, ()),
    (State.STARTING, Event.ATTACHED): (State.LOADING, (Action.LOAD,)),
    (State.STARTING, Event.EXITED): (State.ABSENT, (Action.COUNT_BOOT, Action.SPAWN_LATER)),
    (State.STARTING, Event.TIMED_OUT): (State.STARTING, (Action.KILL,)),
    (State.STARTING, Event.STOP): (State.STOPPED, (Action.KILL,)),
    (State.LOADING, Event.LOADED): (State.READY, (Action.OPEN,)),
    (State.LOADING, Event.LOAD_FAILED): (State.LOADING, (Action.KILL,)),
    (State.LOADING, Event.TIMED_OUT): (State.LOADING, (Action.KILL,)),
    (State.LOADING, Event.LOST): (
        State.ABSENT,
        (Action.DETACH, Action.COUNT_BOOT, Action.SPAWN_LATER),
    ),
    (State.LOADING, Event.LEFT): (State.LEAVING, (Action.DRAIN,)),
    (State.LOADING, Event.STOP): (State.STOPPING, (Action.DRAIN,)),
    (State.READY, Event.LOST): (State.ABSENT, (Action.CLOSE, *_CRASHED)),
    (State.READY, Event.HUNG): (State.HUNG, (Action.CLOSE, Action.ABORT)),
    (State.READY, Event.LEFT): (State.LEAVING, _REPLACED),
    (State.READY, Event.RECYCLE_DUE): (State.LEAVING, _REPLACED),
    (State.READY, Event.STEADY): (State.READY, (Action.FORGIVE,)),
    (State.READY, Event.STOP): (State.STOPPING, (Action.CLOSE, Action.DRAIN)),
    (State.HUNG, Event.LOST): (State.ABSENT, _CRASHED),
    (State.HUNG, Event.TIMED_OUT): (State.HUNG, (Action.KILL,)),
    (State.HUNG, Event.STOP): (State.STOPPING, ()),
    (State.LEAVING, Event.LOST): (State.ABSENT, (Action.DETACH, Action.SPAWN_NEXT)),
    (State.LEAVING, Event.HUNG): (State.HUNG, (Action.ABORT,)),
    (State.LEAVING, Event.TIMED_OUT): (State.LEAVING, (Action.KILL,)),
    (State.LEAVING, Event.STOP): (State.STOPPING, ()),
    (State.STOPPING, Event.LOST): (State.STOPPED, (Action.DETACH,)),
    (State.STOPPING, Event.HUNG): (State.STOPPING, (Action.ABORT,)),
    (State.STOPPING, Event.TIMED_OUT): (State.STOPPING, (Action.KILL,)),
    (State.STOPPED, Event.TIMED_OUT): (State.STOPPED, (Action.KILL,)),
}

_NEWS = (Event.LOADED, Event.LOAD_FAILED, Event.LEFT)
"""What only an attached worker says; in its socket when its state changed, or never to come."""
_SERVICE = (Event.RECYCLE_DUE, Event.HUNG, Event.STEADY)
"""What is only asked of a worker that serves."""

_IGNORED_IN: dict[State, tuple[Event, ...]] = {
    # The end of a process comes after that of its socket, which was the news.
    State.ABSENT: (*_NEWS, *_SERVICE, Event.LOST, Event.EXITED, Event.TIMED_OUT),
    State.LOOPING: (
        *_NEWS, *_SERVICE, Event.LOST, Event.EXITED, Event.TIMED_OUT, Event.LOOPED,
    ),
    State.STARTING: (*_NEWS, *_SERVICE, Event.SPAWN_DUE, Event.LOST, Event.LOOPED),
    # In all that follow: the end of a process waits for that of its socket, which says all first.
    State.LOADING: (*_SERVICE, Event.SPAWN_DUE, Event.ATTACHED, Event.EXITED, Event.LOOPED),
    State.READY: (
        Event.LOADED, Event.LOAD_FAILED, Event.SPAWN_DUE, Event.ATTACHED, Event.EXITED,
        Event.TIMED_OUT, Event.LOOPED,
    ),
    # Given up already: what it asks or answers changes nothing.
    State.HUNG: (
        *_NEWS, *_SERVICE, Event.SPAWN_DUE, Event.ATTACHED, Event.EXITED, Event.LOOPED,
    ),
    # Drained once; a model that it had begun to load may still be told of.
    State.LEAVING: (
        *_NEWS, Event.RECYCLE_DUE, Event.STEADY, Event.SPAWN_DUE, Event.ATTACHED, Event.EXITED,
        Event.LOOPED,
    ),
    State.STOPPING: (
        *_NEWS, Event.RECYCLE_DUE, Event.STEADY, Event.SPAWN_DUE, Event.ATTACHED, Event.EXITED,
        Event.LOOPED, Event.STOP,
    ),
    State.STOPPED: (
        *_NEWS, *_SERVICE, Event.SPAWN_DUE, Event.ATTACHED, Event.LOST, Event.EXITED,
        Event.LOOPED, Event.STOP,
    ),
}  # fmt: skip

IGNORED = frozenset((state, event) for state, events in _IGNORED_IN.items() for event in events)
"""Pairs that change nothing: overtaken by another event, or of no meaning there."""


def step(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """What a worker's place becomes, and what to do, in order."""
    if (state, event) in TABLE:
        return TABLE[state, event]
    assert (state, event) in IGNORED, f"nothing is said of `{event}` for a worker that is {state}"
    return state, ()


def backoff_s(deaths: int) -> float:
    """How long to wait before a worker is started again after that many deaths in a row."""
    return min(BACKOFF_FIRST_S * 2.0 ** min(max(deaths - 1, 0), 16), BACKOFF_MAX_S)


def reachable(start: State, events: Iterable[Event]) -> set[State]:
    """Every state that those events can lead to, in any number and order; `start` too."""
    events = tuple(events)
    found, frontier = {start}, [start]
    while frontier:
        state = frontier.pop()
        following = {step(state, event)[0] for event in events} - found
        found |= following
        frontier += following
    return found


def validate() -> None:
    """Assert that the tables are whole, agree with themselves and trap no worker."""
    for state in State:
        for event in Event:
            said = ((state, event) in TABLE) + ((state, event) in IGNORED)
            assert said == 1, f"{state}, {event}: said {said} times"
    for (state, event), (following, actions) in TABLE.items():
        _require_sense(state, following, actions, f"{state}, {event}")
    without_stop = set(Event) - {Event.STOP}
    for state in State:
        stopped = reachable(step(state, Event.STOP)[0], Event)
        assert State.STOPPED in stopped <= ENDING, f"{state}: a stop does not stop"
        if state not in ENDING:
            assert State.READY in reachable(state, without_stop), f"{state}: no way back to ready"


def _require_sense(state: State, following: State, actions: tuple[Action, ...], where: str) -> None:
    """What every line of the table has to keep to, whatever else it says."""
    assert following is not state or actions, f"{where}: a line that does nothing is no line"
    due = {
        Action.SPAWN: following is State.STARTING is not state,
        Action.LOAD: following is State.LOADING is not state,
        Action.OPEN: following is State.READY is not state,
        Action.CLOSE: state is State.READY is not following,
        Action.DETACH: state in ATTACHED and following not in ATTACHED,
    }
    for action, is_due in due.items():
        assert (action in actions) == is_due, f"{where}: `{action}` is missing, or too many"
    starts = {Action.SPAWN_LATER, Action.SPAWN_NEXT} & set(actions)
    assert len(starts) == (following is State.ABSENT), f"{where}: one start after each end"
    counts = {Action.COUNT_BOOT, Action.COUNT_CRASH} & set(actions)
    assert len(counts) == (Action.SPAWN_LATER in starts), f"{where}: a pause after each failure"
    # Closed before its batches are taken back, so that none of them is sent to it again, and
    # started anew when all that is done.
    order = [_ORDER.index(action) for action in actions]
    assert order == sorted(set(order)), f"{where}: out of order"


_ORDER = (
    Action.AWAIT,
    Action.CLOSE,
    Action.DRAIN,
    Action.ABORT,
    Action.KILL,
    Action.DETACH,
    Action.COUNT_BOOT,
    Action.COUNT_CRASH,
    Action.FORGIVE,
    Action.SPAWN,
    Action.SPAWN_LATER,
    Action.SPAWN_NEXT,
    Action.LOAD,
    Action.OPEN,
)
"""One line's actions come in this order."""
