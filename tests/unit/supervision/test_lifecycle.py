"""The life of a worker, as a table: every pair of state and event, and every walk through it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iskander.supervision import lifecycle
from iskander.supervision.lifecycle import (
    ATTACHED,
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    ENDING,
    IGNORED,
    TABLE,
    Action,
    Event,
    State,
    backoff_s,
    reachable,
    step,
    validate,
)

PAIRS = list(itertools.product(State, Event))
EVENTS = st.lists(st.sampled_from(Event), max_size=60)
COUNTS = {Action.COUNT_BOOT, Action.COUNT_CRASH}
STARTS = {Action.SPAWN_LATER, Action.SPAWN_NEXT}


def walk(events: list[Event], state: State = State.ABSENT) -> tuple[State, list[Action]]:
    done: list[Action] = []
    for event in events:
        state, actions = step(state, event)
        done += actions
    return state, done


def test_the_tables_are_whole() -> None:
    validate()


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_every_pair_is_in_the_table_or_ignored(state: State, event: Event) -> None:
    """In exactly one of the two, and `step` says what is there."""
    assert ((state, event) in TABLE) is not ((state, event) in IGNORED)
    assert step(state, event) == TABLE.get((state, event), (state, ()))


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_a_pair_that_nothing_is_said_of_is_a_mistake(
    state: State, event: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken out of the tables, any pair makes both `step` and `validate` fail: no default."""
    pair = (state, event)
    monkeypatch.setattr(
        lifecycle, "TABLE", {key: line for key, line in TABLE.items() if key != pair}
    )
    monkeypatch.setattr(lifecycle, "IGNORED", IGNORED - {pair})
    with pytest.raises(AssertionError, match="no transition for event"):
        step(state, event)
    with pytest.raises(AssertionError):
        validate()


@pytest.mark.parametrize("pair", TABLE, ids=lambda pair: f"{pair[0]}, {pair[1]}")
def test_no_line_of_the_table_can_be_spared(
    pair: tuple[State, Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that also stands in IGNORED is a contradiction that `validate` finds."""
    monkeypatch.setattr(lifecycle, "IGNORED", IGNORED | {pair})
    with pytest.raises(AssertionError, match="2 rules instead of 1"):
        validate()


@pytest.mark.parametrize(
    ("pair", "line", "words"),
    [
        ((State.READY, Event.LOST), (State.ABSENT, (Action.SPAWN_LATER,)), "close for work"),
        (
            (State.HUNG, Event.LOST),
            (State.ABSENT, (Action.COUNT_CRASH, Action.DETACH, Action.SPAWN_LATER)),
            "out of order",
        ),
        (
            (State.HUNG, Event.LOST),
            (State.ABSENT, (Action.DETACH, Action.SPAWN_LATER)),
            "a backoff after each failure",
        ),
        ((State.HUNG, Event.LOST), (State.ABSENT, (Action.DETACH,)), "one start after each end"),
        ((State.HUNG, Event.LOST), (State.HUNG, (Action.KILL,)), "no way back to ready"),
        ((State.STOPPING, Event.LOST), (State.STOPPING, (Action.KILL,)), "does not stop"),
        ((State.ABSENT, Event.LOOPED), (State.ABSENT, ()), "transition without effect"),
        ((State.LOADING, Event.LOADED), (State.READY, ()), "open for work"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(
    pair: tuple[State, Event],
    line: tuple[State, tuple[Action, ...]],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(TABLE, pair, line)
    with pytest.raises(AssertionError, match=words):
        validate()


def test_every_action_is_used() -> None:
    assert {action for _, actions in TABLE.values() for action in actions} == set(Action)


def test_every_state_can_be_reached() -> None:
    assert reachable(State.ABSENT, Event) == set(State)


@pytest.mark.parametrize("state", sorted(ATTACHED))
def test_a_loss_always_detaches(state: State) -> None:
    """Whatever a process was doing, its batches fail and its memory is unmapped."""
    following, actions = step(state, Event.LOST)

    assert Action.DETACH in actions
    assert following in (State.ABSENT, State.STOPPED)


@pytest.mark.parametrize("state", sorted(set(State) - set(ATTACHED)))
def test_nobody_is_lost_who_is_not_there(state: State) -> None:
    assert step(state, Event.LOST) == (state, ())


def test_a_crash_closes_before_it_detaches_and_spawns_after() -> None:
    """Closed first, so that the batches that come back cannot be sent to the same worker again."""
    assert step(State.READY, Event.LOST) == (
        State.ABSENT,
        (Action.CLOSE, Action.DETACH, Action.COUNT_CRASH, Action.SPAWN_LATER),
    )


@pytest.mark.parametrize(
    ("state", "event", "count"),
    [
        (State.STARTING, Event.EXITED, Action.COUNT_BOOT),
        (State.LOADING, Event.LOST, Action.COUNT_BOOT),
        (State.READY, Event.LOST, Action.COUNT_CRASH),
        (State.HUNG, Event.LOST, Action.COUNT_CRASH),
        (State.LEAVING, Event.LOST, None),
        (State.STOPPING, Event.LOST, None),
    ],
)
def test_an_end_before_the_models_are_loaded_is_a_boot_failure(
    state: State, event: Event, count: Action | None
) -> None:
    """And one after it a crash; an end that was asked for is neither, and needs no pause."""
    _, actions = step(state, event)

    assert COUNTS & set(actions) == ({count} if count else set())
    assert (Action.SPAWN_LATER in actions) == (count is not None)
    assert (Action.SPAWN_NEXT in actions) == (state is State.LEAVING)


def test_a_place_in_a_crash_loop_is_filled_like_any_other() -> None:
    state, actions = walk([Event.LOOPED, Event.SPAWN_DUE, Event.ATTACHED, Event.LOADED])
    assert state is State.READY and Action.OPEN in actions
    assert step(State.LOOPING, Event.ATTACHED) == step(State.ABSENT, Event.ATTACHED)
    assert step(State.READY, Event.STEADY) == (State.READY, (Action.RESET_FAILURES,))


def test_only_a_ready_worker_was_opened_and_is_closed_when_it_goes() -> None:
    """Open and closed as the two sides of one edge: into READY opens, out of it closes."""
    for (state, _), (following, actions) in TABLE.items():
        assert (Action.OPEN in actions) == (state is not following is State.READY)
        if state is State.READY is not following:
            assert (actions[1] if actions[0] is Action.KEEP_OPEN else actions[0]) is Action.CLOSE


def test_only_absent_places_are_filled() -> None:
    assert [pair for pair, (_, actions) in TABLE.items() if Action.SPAWN in actions] == [
        (State.ABSENT, Event.SPAWN_DUE),
        (State.LOOPING, Event.SPAWN_DUE),
    ]


@pytest.mark.parametrize("state", State)
def test_every_way_out_of_a_place_leads_back_to_ready(state: State) -> None:
    """No state without STOP is a trap: a worker can always be replaced by one that works."""
    if state in ENDING:
        assert State.READY not in reachable(state, Event)
    else:
        assert State.READY in reachable(state, set(Event) - {Event.STOP})


@pytest.mark.parametrize("state", State)
def test_stop_always_leads_to_stopped(state: State) -> None:
    """After STOP, whatever comes: STOPPED, or STOPPING until the process is gone."""
    stopping, actions = step(state, Event.STOP)

    assert not STARTS & set(actions)
    for later in reachable(stopping, Event):
        assert later in ENDING
        assert step(later, Event.LOST)[0] is State.STOPPED


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_nothing_is_started_after_a_stop(state: State, event: Event) -> None:
    for later in reachable(step(state, Event.STOP)[0], Event):
        _, actions = step(later, event)

        assert not {Action.SPAWN, Action.LOAD, Action.OPEN, *STARTS} & set(actions)


def test_nothing_stops_without_a_stop() -> None:
    states = reachable(State.ABSENT, set(Event) - {Event.STOP})

    assert states == set(State) - ENDING


@pytest.mark.parametrize("state", [State.STARTING, State.LOADING, State.STOPPING])
def test_what_takes_too_long_is_killed(state: State) -> None:
    """Killed and waited for: the state changes with the end of the process, not before."""
    assert step(state, Event.TIMED_OUT) == (state, (Action.KILL,))


def test_what_hangs_with_a_batch_is_aborted_and_then_killed() -> None:
    """Closed first, so that it gets no more; told once, whatever it does after that."""
    state, actions = walk([Event.HUNG, Event.HUNG, Event.LEFT, Event.TIMED_OUT], State.READY)

    assert state is State.HUNG
    assert actions == [Action.CLOSE, Action.ABORT, Action.KILL]


@pytest.mark.parametrize("state", [State.LEAVING, State.STOPPING])
def test_a_worker_that_hangs_while_it_drains_is_ended_too(state: State) -> None:
    _, actions = walk([Event.HUNG, Event.TIMED_OUT], state)

    assert actions == [Action.ABORT, Action.KILL]


@pytest.mark.parametrize("event", [Event.LEFT, Event.RECYCLE_DUE])
def test_a_worker_that_is_replaced_in_order_is_drained_once(event: Event) -> None:
    """Requests may wait before it is closed, so that none finds neither a worker nor a promise."""
    leaving, actions = step(State.READY, event)

    assert leaving is State.LEAVING
    assert actions == (Action.KEEP_OPEN, Action.CLOSE, Action.DRAIN)
    for later in (Event.LEFT, Event.RECYCLE_DUE, Event.STOP):
        assert Action.DRAIN not in step(leaving, later)[1]
    assert step(State.LOADING, Event.LEFT) == (State.LEAVING, (Action.DRAIN,))


def test_a_life_without_trouble() -> None:
    state, actions = walk([Event.SPAWN_DUE, Event.ATTACHED, Event.LOADED])
    assert (state, actions) == (State.READY, [Action.SPAWN, Action.LOAD, Action.OPEN])

    state, actions = walk([Event.STOP, Event.LOST, Event.EXITED], state)
    assert (state, actions) == (State.STOPPED, [Action.CLOSE, Action.DRAIN, Action.DETACH])


def test_a_model_that_cannot_be_loaded_ends_the_worker_and_tries_again_later() -> None:
    state, actions = walk([Event.ATTACHED, Event.LOAD_FAILED, Event.LOST, Event.EXITED])

    assert state is State.ABSENT
    assert actions == [
        Action.LOAD,
        Action.KILL,
        Action.DETACH,
        Action.COUNT_BOOT,
        Action.SPAWN_LATER,
    ]


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
def test_backoff_grows_up_to_its_bound(deaths: int) -> None:
    assert BACKOFF_FIRST_S <= backoff_s(deaths) <= backoff_s(deaths + 1) <= BACKOFF_MAX_S


def test_backoff_doubles_and_then_stays() -> None:
    waits = [backoff_s(deaths) for deaths in range(1, 11)]

    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 10])
