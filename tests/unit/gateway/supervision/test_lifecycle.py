"""Worker lifecycle: the transition of every state and event, and random event sequences."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_examples import up_to

from iskander.gateway.supervision import lifecycle
from iskander.gateway.supervision.lifecycle import (
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


def apply_events(events: list[Event], state: State = State.ABSENT) -> tuple[State, list[Action]]:
    performed: list[Action] = []
    for event in events:
        state, actions = step(state, event)
        performed += actions
    return state, performed


def test_tables_are_complete_and_consistent() -> None:
    validate()


def test_step_returns_the_rule_of_a_pair_or_ignores_it() -> None:
    """`validate`, which runs at each start, has checked that exactly one of both is there."""
    for state, event in PAIRS:
        assert step(state, event) == TABLE.get((state, event), (state, ()))


@pytest.mark.parametrize("pair", [next(iter(TABLE)), min(IGNORED)], ids=["rule", "ignored"])
def test_missing_pair_fails_in_step_and_validate(
    pair: tuple[State, Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no default transition."""
    monkeypatch.setattr(
        lifecycle, "TABLE", {key: rule for key, rule in TABLE.items() if key != pair}
    )
    monkeypatch.setattr(lifecycle, "IGNORED", IGNORED - {pair})
    with pytest.raises(AssertionError, match="no transition for event"):
        step(*pair)
    with pytest.raises(AssertionError):
        validate()


def test_pair_in_both_tables_fails_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "IGNORED", IGNORED | {next(iter(TABLE))})
    with pytest.raises(AssertionError, match="2 rules instead of 1"):
        validate()


@pytest.mark.parametrize(
    ("pair", "rule", "message"),
    [
        ((State.READY, Event.LOST), (State.ABSENT, (Action.SPAWN_LATER,)), "stop sending batches"),
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
        ((State.STOPPING, Event.LOST), (State.STOPPING, (Action.KILL,)), "not lead to stopped"),
        ((State.ABSENT, Event.CRASH_LOOP), (State.ABSENT, ()), "transition without effect"),
        ((State.LOADING, Event.LOADED), (State.READY, ()), "start sending batches"),
    ],
)
def test_validation_rejects_an_inconsistent_rule(
    pair: tuple[State, Event],
    rule: tuple[State, tuple[Action, ...]],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(TABLE, pair, rule)
    with pytest.raises(AssertionError, match=message):
        validate()


def test_every_action_is_used() -> None:
    assert {action for _, actions in TABLE.values() for action in actions} == set(Action)


def test_every_state_is_reachable() -> None:
    assert reachable(State.ABSENT, Event) == set(State)


@pytest.mark.parametrize("state", sorted(ATTACHED))
def test_loss_of_an_attached_worker_detaches_it(state: State) -> None:
    """DETACH fails its batches and unmaps its memory."""
    following, actions = step(state, Event.LOST)

    assert Action.DETACH in actions
    assert following in (State.ABSENT, State.STOPPED)


@pytest.mark.parametrize("state", sorted(set(State) - set(ATTACHED)))
def test_loss_without_an_attached_process_is_ignored(state: State) -> None:
    assert step(state, Event.LOST) == (state, ())


def test_crash_closes_then_detaches_then_spawns() -> None:
    """CLOSE is first: reclaimed batches must not be sent to the same worker again."""
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
def test_exit_before_load_is_a_boot_failure_and_later_a_crash(
    state: State, event: Event, count: Action | None
) -> None:
    """A requested exit counts as neither and has no backoff."""
    _, actions = step(state, event)

    assert COUNTS & set(actions) == ({count} if count else set())
    assert (Action.SPAWN_LATER in actions) == (count is not None)
    assert (Action.SPAWN_NEXT in actions) == (state is State.LEAVING)


def test_slot_in_crash_loop_starts_a_worker_like_an_absent_one() -> None:
    state, actions = apply_events([Event.CRASH_LOOP, Event.SPAWN_DUE, Event.ATTACHED, Event.LOADED])
    assert state is State.READY and Action.OPEN in actions
    assert step(State.LOOPING, Event.ATTACHED) == step(State.ABSENT, Event.ATTACHED)
    assert step(State.READY, Event.STEADY) == (State.READY, (Action.RESET_FAILURES,))


def test_open_only_on_entry_to_ready_and_close_only_on_exit() -> None:
    for (state, _), (following, actions) in TABLE.items():
        assert (Action.OPEN in actions) == (state is not following is State.READY)
        if state is State.READY is not following:
            assert (actions[1] if actions[0] is Action.KEEP_OPEN else actions[0]) is Action.CLOSE


def test_spawn_only_in_slots_without_a_process() -> None:
    assert [pair for pair, (_, actions) in TABLE.items() if Action.SPAWN in actions] == [
        (State.ABSENT, Event.SPAWN_DUE),
        (State.LOOPING, Event.SPAWN_DUE),
    ]


@pytest.mark.parametrize("state", State)
def test_ready_is_reachable_from_every_state_before_a_stop(state: State) -> None:
    if state in ENDING:
        assert State.READY not in reachable(state, Event)
    else:
        assert State.READY in reachable(state, set(Event) - {Event.STOP})


@pytest.mark.parametrize("state", State)
def test_stop_always_leads_to_stopped(state: State) -> None:
    """STOPPING lasts until the process has exited."""
    stopping, actions = step(state, Event.STOP)

    assert not STARTS & set(actions)
    for later in reachable(stopping, Event):
        assert later in ENDING
        assert step(later, Event.LOST)[0] is State.STOPPED


@pytest.mark.parametrize("state", State)
def test_no_start_after_a_stop(state: State) -> None:
    for later, event in itertools.product(reachable(step(state, Event.STOP)[0], Event), Event):
        _, actions = step(later, event)

        assert not {Action.SPAWN, Action.LOAD, Action.OPEN, *STARTS} & set(actions)


def test_ending_states_need_a_stop() -> None:
    states = reachable(State.ABSENT, set(Event) - {Event.STOP})

    assert states == set(State) - ENDING


@pytest.mark.parametrize("state", [State.STARTING, State.LOADING, State.STOPPING])
def test_timeout_kills_the_process(state: State) -> None:
    """The state changes when the process has exited, not at the kill."""
    assert step(state, Event.TIMED_OUT) == (state, (Action.KILL,))


def test_hung_worker_is_closed_aborted_once_and_then_killed() -> None:
    """CLOSE is first: the worker must get no more batches."""
    state, actions = apply_events(
        [Event.HUNG, Event.HUNG, Event.DRAIN_REQUESTED, Event.TIMED_OUT], State.READY
    )

    assert state is State.HUNG
    assert actions == [Action.CLOSE, Action.ABORT, Action.KILL]


@pytest.mark.parametrize("state", [State.LEAVING, State.STOPPING])
def test_worker_that_hangs_during_drain_is_aborted_and_killed(state: State) -> None:
    _, actions = apply_events([Event.HUNG, Event.TIMED_OUT], state)

    assert actions == [Action.ABORT, Action.KILL]


@pytest.mark.parametrize("event", [Event.DRAIN_REQUESTED, Event.RECYCLE_DUE])
def test_recycled_worker_is_drained_once(event: Event) -> None:
    """KEEP_OPEN is before CLOSE: no request is rejected in between."""
    leaving, actions = step(State.READY, event)

    assert leaving is State.LEAVING
    assert actions == (Action.KEEP_OPEN, Action.CLOSE, Action.DRAIN)
    for later in (Event.DRAIN_REQUESTED, Event.RECYCLE_DUE, Event.STOP):
        assert Action.DRAIN not in step(leaving, later)[1]
    assert step(State.LOADING, Event.DRAIN_REQUESTED) == (State.LEAVING, (Action.DRAIN,))


def test_lifecycle_without_failures() -> None:
    state, actions = apply_events([Event.SPAWN_DUE, Event.ATTACHED, Event.LOADED])
    assert (state, actions) == (State.READY, [Action.SPAWN, Action.LOAD, Action.OPEN])

    state, actions = apply_events([Event.STOP, Event.LOST, Event.EXITED], state)
    assert (state, actions) == (State.STOPPED, [Action.CLOSE, Action.DRAIN, Action.DETACH])


def test_failed_load_kills_the_worker_and_restarts_it_after_a_backoff() -> None:
    state, actions = apply_events([Event.ATTACHED, Event.LOAD_FAILED, Event.LOST, Event.EXITED])

    assert state is State.ABSENT
    assert actions == [
        Action.LOAD,
        Action.KILL,
        Action.DETACH,
        Action.COUNT_BOOT,
        Action.SPAWN_LATER,
    ]


def test_death_reported_by_two_events_is_handled_once() -> None:
    """LOST is the end of the socket, EXITED the end of the process."""
    for events in ([Event.LOST, Event.EXITED], [Event.EXITED, Event.LOST]):
        _, actions = apply_events(events, State.READY)

        assert actions.count(Action.SPAWN_LATER) == 1
        assert actions.count(Action.DETACH) == 1


@settings(deadline=None, max_examples=up_to(300))
@given(EVENTS)
def test_actions_balance_in_any_event_sequence(events: list[Event]) -> None:
    """Each LOAD and each OPEN is undone at most once, in order."""
    state, actions = apply_events(events)

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
def test_backoff_is_monotonic_and_bounded(deaths: int) -> None:
    assert BACKOFF_FIRST_S <= backoff_s(deaths) <= backoff_s(deaths + 1) <= BACKOFF_MAX_S


def test_backoff_doubles_up_to_its_maximum() -> None:
    backoffs = [backoff_s(deaths) for deaths in range(1, 11)]

    assert backoffs == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 10])
