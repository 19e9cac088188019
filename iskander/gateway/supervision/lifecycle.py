"""Worker lifecycle: a table of transitions and actions by state and event.

Every pair of state and event is in `TABLE` or in `IGNORED`. Pure: `supervisor` supplies the events
and runs the actions.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from iskander.foundation.backoff import backoff

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 10.0


class State(StrEnum):
    """State of a worker slot."""

    ABSENT = "absent"
    LOOPING = "crash loop"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    HUNG = "hung"
    LEAVING = "leaving"
    STOPPING = "stopping"
    STOPPED = "stopped"
    OUT_OF_SERVICE = "out of service"


class Event(StrEnum):
    """Input of a transition."""

    SPAWN_DUE = "spawn due"
    ATTACHED = "attached"
    LOADED = "loaded"
    LOAD_FAILED = "load failed"
    LOST = "lost"
    EXITED = "exited"
    DRAIN_REQUESTED = "drain requested"
    RECYCLE_DUE = "recycle due"
    HUNG = "hung"
    TIMED_OUT = "timed out"
    STEADY = "steady"
    CRASH_LOOP = "crash loop detected"
    DEVICE_LOST = "device lost"
    DEVICE_RETURNED = "device returned"
    STOP = "stop"


class Action(StrEnum):
    """Output of a transition; the actions of one transition run in this order."""

    KEEP_OPEN = "keep its queues open"
    CLOSE = "stop sending batches"
    DRAIN = "send drain"
    ABORT = "abort with a stack dump"
    KILL = "kill"
    DETACH = "reclaim its batches and unmap"
    COUNT_BOOT = "count a boot failure"
    COUNT_CRASH = "count a crash"
    RESET_FAILURES = "reset its failure count"
    SPAWN = "spawn"
    SPAWN_LATER = "spawn after a backoff"
    SPAWN_NEXT = "spawn at once"
    LOAD = "load models"
    OPEN = "start sending batches"


ATTACHED = frozenset((State.LOADING, State.READY, State.HUNG, State.LEAVING, State.STOPPING))
"""States with an attached process, so with memory and possibly batches to reclaim."""

ENDING = frozenset((State.STOPPING, State.STOPPED))
"""States in which no process is started."""

_FAILED_BOOT = (Action.DETACH, Action.COUNT_BOOT, Action.SPAWN_LATER)
_CRASHED = (Action.DETACH, Action.COUNT_CRASH, Action.SPAWN_LATER)
_REPLACED = (Action.KEEP_OPEN, Action.CLOSE, Action.DRAIN)
# At once: a process in a call of the driver may not end, and its batches run elsewhere.
_RELEASED = (Action.KILL, Action.DETACH)

TABLE: dict[tuple[State, Event], tuple[State, tuple[Action, ...]]] = {
    (State.ABSENT, Event.SPAWN_DUE): (State.STARTING, (Action.SPAWN,)),
    (State.ABSENT, Event.ATTACHED): (State.LOADING, (Action.LOAD,)),
    (State.ABSENT, Event.CRASH_LOOP): (State.LOOPING, ()),
    (State.ABSENT, Event.DEVICE_LOST): (State.OUT_OF_SERVICE, ()),
    (State.ABSENT, Event.STOP): (State.STOPPED, ()),
    (State.LOOPING, Event.SPAWN_DUE): (State.STARTING, (Action.SPAWN,)),
    (State.LOOPING, Event.ATTACHED): (State.LOADING, (Action.LOAD,)),
    (State.LOOPING, Event.DEVICE_LOST): (State.OUT_OF_SERVICE, ()),
    (State.LOOPING, Event.STOP): (State.STOPPED, ()),
    (State.STARTING, Event.ATTACHED): (State.LOADING, (Action.LOAD,)),
    (State.STARTING, Event.EXITED): (State.ABSENT, (Action.COUNT_BOOT, Action.SPAWN_LATER)),
    (State.STARTING, Event.TIMED_OUT): (State.STARTING, (Action.KILL,)),
    (State.STARTING, Event.DEVICE_LOST): (State.OUT_OF_SERVICE, (Action.KILL,)),
    (State.STARTING, Event.STOP): (State.STOPPED, (Action.KILL,)),
    (State.LOADING, Event.LOADED): (State.READY, (Action.OPEN,)),
    (State.LOADING, Event.LOAD_FAILED): (State.LOADING, (Action.KILL,)),
    (State.LOADING, Event.TIMED_OUT): (State.LOADING, (Action.KILL,)),
    (State.LOADING, Event.LOST): (State.ABSENT, _FAILED_BOOT),
    (State.LOADING, Event.DRAIN_REQUESTED): (State.LEAVING, (Action.DRAIN,)),
    (State.LOADING, Event.DEVICE_LOST): (State.OUT_OF_SERVICE, _RELEASED),
    (State.LOADING, Event.STOP): (State.STOPPING, (Action.DRAIN,)),
    (State.READY, Event.LOST): (State.ABSENT, (Action.CLOSE, *_CRASHED)),
    (State.READY, Event.HUNG): (State.HUNG, (Action.CLOSE, Action.ABORT)),
    (State.READY, Event.DRAIN_REQUESTED): (State.LEAVING, _REPLACED),
    (State.READY, Event.RECYCLE_DUE): (State.LEAVING, _REPLACED),
    (State.READY, Event.STEADY): (State.READY, (Action.RESET_FAILURES,)),
    (State.READY, Event.DEVICE_LOST): (State.OUT_OF_SERVICE, (Action.CLOSE, *_RELEASED)),
    (State.READY, Event.STOP): (State.STOPPING, (Action.CLOSE, Action.DRAIN)),
    (State.HUNG, Event.LOST): (State.ABSENT, _CRASHED),
    (State.HUNG, Event.TIMED_OUT): (State.HUNG, (Action.KILL,)),
    (State.HUNG, Event.DEVICE_LOST): (State.OUT_OF_SERVICE, _RELEASED),
    (State.HUNG, Event.STOP): (State.STOPPING, ()),
    (State.LEAVING, Event.LOST): (State.ABSENT, (Action.DETACH, Action.SPAWN_NEXT)),
    (State.LEAVING, Event.HUNG): (State.HUNG, (Action.ABORT,)),
    (State.LEAVING, Event.TIMED_OUT): (State.LEAVING, (Action.KILL,)),
    (State.LEAVING, Event.DEVICE_LOST): (State.OUT_OF_SERVICE, _RELEASED),
    (State.LEAVING, Event.STOP): (State.STOPPING, ()),
    (State.STOPPING, Event.LOST): (State.STOPPED, (Action.DETACH,)),
    (State.STOPPING, Event.HUNG): (State.STOPPING, (Action.ABORT,)),
    (State.STOPPING, Event.TIMED_OUT): (State.STOPPING, (Action.KILL,)),
    (State.STOPPED, Event.TIMED_OUT): (State.STOPPED, (Action.KILL,)),
    (State.OUT_OF_SERVICE, Event.DEVICE_RETURNED): (State.ABSENT, (Action.SPAWN_NEXT,)),
    (State.OUT_OF_SERVICE, Event.STOP): (State.STOPPED, ()),
}

_REPORTS = (Event.LOADED, Event.LOAD_FAILED, Event.DRAIN_REQUESTED)
"""Messages of an attached worker; they may arrive after a state change."""
_SERVING = (Event.RECYCLE_DUE, Event.HUNG, Event.STEADY)
"""Raised only for a worker that serves."""
_STALE = (Event.LOST, Event.EXITED, Event.TIMED_OUT)
"""Events of a process that has ended; EXITED follows LOST, which has been handled."""
_ONLY_ABSENT = (Event.SPAWN_DUE, Event.ATTACHED, Event.EXITED, Event.CRASH_LOOP)
"""Events that an attached process does not have: its exit is LOST, at the end of its socket."""
_DEVICE = (Event.DEVICE_LOST, Event.DEVICE_RETURNED)
"""Events of a GPU, without effect on a slot that is stopping or stopped."""

_NOT_STARTING = (Event.SPAWN_DUE, Event.LOST, Event.CRASH_LOOP, Event.DEVICE_RETURNED)
_NOT_READY = (Event.LOADED, Event.LOAD_FAILED, Event.TIMED_OUT, Event.DEVICE_RETURNED)
_NOT_DRAINING = (Event.RECYCLE_DUE, Event.STEADY)
_NOT_OUT = (Event.SPAWN_DUE, Event.ATTACHED, Event.CRASH_LOOP, Event.DEVICE_LOST)

_IGNORED_IN: dict[State, tuple[Event, ...]] = {
    State.ABSENT: (*_REPORTS, *_SERVING, *_STALE, Event.DEVICE_RETURNED),
    State.LOOPING: (*_REPORTS, *_SERVING, *_STALE, Event.CRASH_LOOP, Event.DEVICE_RETURNED),
    State.STARTING: (*_REPORTS, *_SERVING, *_NOT_STARTING),
    State.LOADING: (*_SERVING, *_ONLY_ABSENT, Event.DEVICE_RETURNED),
    State.READY: (*_ONLY_ABSENT, *_NOT_READY),
    State.HUNG: (*_REPORTS, *_SERVING, *_ONLY_ABSENT, Event.DEVICE_RETURNED),
    # A load that began before the drain may still be reported.
    State.LEAVING: (*_REPORTS, *_ONLY_ABSENT, *_NOT_DRAINING, Event.DEVICE_RETURNED),
    State.STOPPING: (*_REPORTS, *_ONLY_ABSENT, *_NOT_DRAINING, Event.STOP, *_DEVICE),
    State.STOPPED: (*_REPORTS, *_SERVING, *_ONLY_ABSENT, Event.LOST, Event.STOP, *_DEVICE),
    # Its killed process may end later.
    State.OUT_OF_SERVICE: (*_REPORTS, *_SERVING, *_STALE, *_NOT_OUT),
}

IGNORED = frozenset((state, event) for state, events in _IGNORED_IN.items() for event in events)
"""Pairs without effect: overtaken by another event, or without meaning in that state."""


def step(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """Return the next state and the actions, in order."""
    if (state, event) in TABLE:
        return TABLE[state, event]
    assert (state, event) in IGNORED, f"no transition for event `{event}` in state `{state}`"
    return state, ()


def backoff_s(failures: int) -> float:
    """Return the backoff before the next start after `failures` consecutive failures."""
    return backoff(failures, BACKOFF_FIRST_S, BACKOFF_MAX_S)


def reachable(start: State, events: Iterable[Event]) -> set[State]:
    """Return `start` and every state that any sequence of `events` leads to."""
    events = tuple(events)
    found, frontier = {start}, [start]
    while frontier:
        state = frontier.pop()
        reached = {step(state, event)[0] for event in events} - found
        found |= reached
        frontier += reached
    return found


def validate() -> None:
    """Assert that the tables are complete and consistent, and that no state is a dead end."""
    for state in State:
        for event in Event:
            rules = ((state, event) in TABLE) + ((state, event) in IGNORED)
            assert rules == 1, f"{state}, {event}: {rules} rules instead of 1"
    for (state, event), (after, actions) in TABLE.items():
        _validate_rule(state, after, actions, f"{state}, {event}")
    without_stop = set(Event) - {Event.STOP, Event.DEVICE_LOST}
    for state in State:
        stopped = reachable(step(state, Event.STOP)[0], Event)
        assert State.STOPPED in stopped <= ENDING, f"{state}: a stop does not lead to stopped"
        if state not in ENDING:
            assert State.READY in reachable(state, without_stop), f"{state}: no way back to ready"


def _validate_rule(state: State, after: State, actions: tuple[Action, ...], where: str) -> None:
    assert after is not state or actions, f"{where}: transition without effect"
    required = {
        Action.SPAWN: after is State.STARTING is not state,
        Action.LOAD: after is State.LOADING is not state,
        Action.OPEN: after is State.READY is not state,
        Action.CLOSE: state is State.READY is not after,
        Action.DETACH: state in ATTACHED and after not in ATTACHED,
    }
    for action, is_required in required.items():
        assert (action in actions) == is_required, f"{where}: `{action}` is missing or superfluous"
    starts = {Action.SPAWN_LATER, Action.SPAWN_NEXT} & set(actions)
    assert len(starts) == (after is State.ABSENT), f"{where}: one start after each end"
    counts = {Action.COUNT_BOOT, Action.COUNT_CRASH} & set(actions)
    assert len(counts) == (Action.SPAWN_LATER in starts), f"{where}: a backoff after each failure"
    # CLOSE comes before DETACH, so that no reclaimed batch is sent to the same worker again.
    order = [list(Action).index(action) for action in actions]
    assert order == sorted(set(order)), f"{where}: actions out of order"
