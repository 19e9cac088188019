"""The life of a worker, as a table: every pair of state and event, and every walk through it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iskander.gateway.lifecycle import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    TABLE,
    Action,
    Event,
    State,
    backoff_s,
    step,
)

ATTACHED = (State.LOADING, State.READY, State.LEAVING, State.STOPPING)
"""States in which a process is attached, and so has memory and batches to be taken back."""

PAIRS = list(itertools.product(State, Event))
EVENTS = st.lists(st.sampled_from(Event), max_size=60)


def reachable(start: State, events: Iterable[Event]) -> set[State]:
    """Every state that those events can lead to, in any number and order."""
    events = tuple(events)
    found, frontier = {start}, [start]
    while frontier:
        state = frontier.pop()
        following = {step(state, event)[0] for event in events} - found
        found |= following
        frontier += following
    return found


def walk(events: list[Event], state: State = State.ABSENT) -> tuple[State, list[Action]]:
    done: list[Action] = []
    for event in events:
        state, actions = step(state, event)
        done += actions
    return state, done


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_every_pair_is_in_the_table_or_changes_nothing(state: State, event: Event) -> None:
    assert step(state, event) == TABLE.get((state, event), (state, ()))


def test_the_table_speaks_of_nothing_unknown() -> None:
    for (state, event), (following, actions) in TABLE.items():
        assert state in State and event in Event and following in State
        assert all(action in Action for action in actions)
        assert len(set(actions)) == len(actions)
        assert following is not state or actions, "a line that does nothing is no line"


def test_every_action_is_used() -> None:
    assert {action for _, actions in TABLE.values() for action in actions} == set(Action)


def test_every_state_can_be_reached() -> None:
    assert reachable(State.ABSENT, Event) == set(State)


@pytest.mark.parametrize("state", ATTACHED)
def test_a_loss_always_detaches(state: State) -> None:
    """Whatever a process was doing, its batches fail and its memory is unmapped."""
    following, actions = step(state, Event.LOST)

    assert Action.DETACH in actions
    assert following in (State.ABSENT, State.STOPPED)


@pytest.mark.parametrize("state", sorted(set(State) - set(ATTACHED)))
def test_nobody_is_lost_who_is_not_there(state: State) -> None:
    assert step(state, Event.LOST) == (state, ())


@pytest.mark.parametrize("state", [State.LOADING, State.READY, State.LEAVING])
def test_a_loss_closes_before_it_detaches_and_spawns_after(state: State) -> None:
    """Closed first, so that the batches that fail cannot be sent to the same worker again."""
    assert step(state, Event.LOST) == (
        State.ABSENT,
        (Action.CLOSE, Action.DETACH, Action.SPAWN_LATER),
    )


def test_only_a_ready_worker_was_opened_and_is_closed_when_it_goes() -> None:
    """Open and closed as the two sides of one edge: into READY opens, out of it closes."""
    for (state, _), (following, actions) in TABLE.items():
        assert (Action.OPEN in actions) == (state is not following is State.READY)
        if state is State.READY is not following:
            assert actions[0] is Action.CLOSE


def test_only_absent_places_are_filled() -> None:
    assert [pair for pair, (_, actions) in TABLE.items() if Action.SPAWN in actions] == [
        (State.ABSENT, Event.SPAWN_DUE)
    ]


@pytest.mark.parametrize("state", State)
def test_every_way_out_of_a_place_leads_back_to_ready(state: State) -> None:
    """No state without STOP is a trap: a worker can always be replaced by one that works."""
    if state in (State.STOPPING, State.STOPPED):
        assert State.READY not in reachable(state, Event)
    else:
        assert State.READY in reachable(state, set(Event) - {Event.STOP})


@pytest.mark.parametrize("state", State)
def test_stop_always_leads_to_stopped(state: State) -> None:
    """After STOP, whatever comes: STOPPED, or STOPPING until the process is gone."""
    stopping, actions = step(state, Event.STOP)

    assert Action.SPAWN_LATER not in actions
    for later in reachable(stopping, Event):
        assert later in (State.STOPPING, State.STOPPED)
        assert step(later, Event.LOST)[0] is State.STOPPED


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_nothing_is_started_after_a_stop(state: State, event: Event) -> None:
    for later in reachable(step(state, Event.STOP)[0], Event):
        _, actions = step(later, event)

        assert not {Action.SPAWN, Action.SPAWN_LATER, Action.LOAD, Action.OPEN} & set(actions)


def test_nothing_stops_without_a_stop() -> None:
    states = reachable(State.ABSENT, set(Event) - {Event.STOP})

    assert states == set(State) - {State.STOPPING, State.STOPPED}


@pytest.mark.parametrize("state", [State.STARTING, State.LOADING, State.STOPPING])
def test_what_takes_too_long_is_killed(state: State) -> None:
    """Killed and waited for: the state changes with the end of the process, not before."""
    assert step(state, Event.TIMED_OUT) == (state, (Action.KILL,))


@pytest.mark.parametrize("state", [State.READY, State.LEAVING, State.STOPPING])
def test_what_hangs_with_a_batch_is_killed(state: State) -> None:
    assert step(state, Event.HUNG) == (state, (Action.KILL,))


@pytest.mark.parametrize("state", [State.LOADING, State.READY])
def test_a_worker_that_leaves_is_drained_once(state: State) -> None:
    leaving, actions = step(state, Event.LEFT)

    assert leaving is State.LEAVING and actions[-1] is Action.DRAIN
    for event in (Event.LEFT, Event.STOP):
        assert Action.DRAIN not in step(leaving, event)[1]


def test_a_life_without_trouble() -> None:
    state, actions = walk([Event.SPAWN_DUE, Event.ATTACHED, Event.LOADED])
    assert (state, actions) == (State.READY, [Action.SPAWN, Action.LOAD, Action.OPEN])

    state, actions = walk([Event.STOP, Event.LOST, Event.EXITED], state)
    assert (state, actions) == (State.STOPPED, [Action.CLOSE, Action.DRAIN, Action.DETACH])


def test_a_model_that_cannot_be_loaded_ends_the_worker_and_tries_again_later() -> None:
    state, actions = walk([Event.ATTACHED, Event.LOAD_FAILED, Event.LOST, Event.EXITED])

    assert state is State.ABSENT
    assert actions == [Action.LOAD, Action.KILL, Action.CLOSE, Action.DETACH, Action.SPAWN_LATER]


def test_one_death_is_answered_once() -> None:
    """The end of the socket and the end of the process are two events about one death."""
    for events in ([Event.LOST, Event.EXITED], [Event.EXITED, Event.LOST]):
        _, actions = walk(events, State.READY)

        assert actions.count(Action.SPAWN_LATER) == 1
        assert actions.count(Action.DETACH) == 1


@settings(deadline=None, max_examples=300)
@given(EVENTS)
def test_any_walk_balances_its_actions(events: list[Event]) -> None:
    """Given any order of events, everything that was begun is ended at most once, in order."""
    state, actions = walk(events)

    assert state in State
    attached, is_open = 0, False
    for action in actions:
        if action is Action.LOAD:
            attached += 1
        elif action is Action.DETACH:
            attached -= 1
            assert not is_open
        elif action is Action.OPEN:
            assert attached == 1 and not is_open
            is_open = True
        elif action is Action.CLOSE:
            is_open = False
        assert attached in (0, 1)
    assert attached == (state in ATTACHED)
    assert is_open == (state is State.READY)


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_backoff_grows_up_to_its_bound(failures: int) -> None:
    assert BACKOFF_FIRST_S <= backoff_s(failures) <= backoff_s(failures + 1) <= BACKOFF_MAX_S


def test_backoff_doubles_and_then_stays() -> None:
    waits = [backoff_s(failures) for failures in range(10)]

    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 10])
