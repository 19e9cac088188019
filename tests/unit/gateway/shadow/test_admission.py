"""Limits of shadow batches: time, rows, pauses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.lanes import MS, cost_of

from iskander.gateway.scheduling.lanes.cost import CostModel
from iskander.gateway.shadow.admission import (
    BURST_NS,
    FIRST_ROWS,
    PAUSE_MAX_S,
    Pauses,
    TimeBudget,
    rows_of_batch,
)

S = 1000 * MS


@given(
    share=st.floats(0.001, 1.0),
    steps=st.lists(st.tuples(st.integers(0, 10 * S), st.integers(0, S)), max_size=50),
)
def test_budget_is_never_exceeded_by_more_than_one_use(
    share: float, steps: list[tuple[int, int]]
) -> None:
    """A use begins only within the budget: a share of the time since the start, and the burst."""
    budget, now, spent = TimeBudget(share), 0, 0
    for pause_ns, use_ns in steps:
        now += pause_ns
        if budget.ready_ns(now) <= now:
            assert spent <= share * now + BURST_NS + 1
            now += use_ns
            budget.spend(use_ns, now)
            spent += use_ns


def test_budget_is_ready_when_its_debt_is_paid() -> None:
    budget = TimeBudget(0.1)
    budget.spend(BURST_NS + MS, 0)
    assert budget.ready_ns(0) == 10 * MS
    assert budget.ready_ns(4 * MS) == 10 * MS
    assert budget.ready_ns(11 * MS) == 11 * MS


def test_unused_time_is_not_saved_beyond_the_burst() -> None:
    budget = TimeBudget(0.5)
    budget.spend(2 * BURST_NS, 1000 * S)
    assert budget.ready_ns(1000 * S) == 1000 * S + 2 * BURST_NS


def test_run_is_short_beside_the_latency_of_the_served_version() -> None:
    """10 ms and 150 us are the latency: a batch may take a sixteenth, or twice its fixed cost."""
    served, candidate = cost_of(10_000, 0), cost_of(1000, 10_000)
    assert rows_of_batch(candidate, served, 1000, is_odd=False) == 624
    assert rows_of_batch(candidate, served, 1000, is_odd=True) == 312
    large = cost_of(1000, 20 * MS)
    assert rows_of_batch(large, served, 1000, is_odd=False) == 20_000
    slow = cost_of(MS, 0)
    assert rows_of_batch(slow, served, 1, is_odd=False) == 1


def test_rows_grow_until_the_cost_is_learned() -> None:
    candidate, rows = CostModel(), []
    for _ in range(4):
        rows.append(rows_of_batch(candidate, CostModel(), 1000, is_odd=False))
        candidate.observe(rows[-1], 1000 * rows[-1] + 5000)
    assert rows == [FIRST_ROWS, 2 * FIRST_ROWS, 4 * FIRST_ROWS, 8 * FIRST_ROWS]


def test_pauses_double_and_are_bounded() -> None:
    pauses = Pauses()
    lengths = []
    for _ in range(12):
        pauses.on_failure("failed", 0)
        lengths.append(pauses.until_ns / S)
    assert lengths[:4] == [2, 4, 8, 16] and lengths[-1] == PAUSE_MAX_S
    assert pauses.reason == "failed"


def test_pause_after_a_week_of_failures_is_not_longer() -> None:
    """2.0 ** 1024 is no float."""
    pauses = Pauses()
    for _ in range(1100):
        pauses.on_failure("failed", 0)
    assert pauses.until_ns == PAUSE_MAX_S * S


def test_success_shortens_the_next_pause_and_a_death_lengthens_it() -> None:
    pauses = Pauses()
    pauses.on_failure("failed", 0)
    pauses.on_success()
    pauses.on_failure("failed", 0)
    assert pauses.until_ns == 2 * S
    pauses.on_failure("died", 0, was_loss=True)
    assert pauses.until_ns == 64 * S
