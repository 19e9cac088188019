"""Cost model learned from runs: noise, outliers, a single batch size, lasting changes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iskander.gateway.scheduling.lanes.cost import HANG_SAMPLES, LEARNED_SAMPLES, CostModel

SIZES = (1, 4, 16, 64, 256)
ROW_NS, BASE_NS = 2_000, 150_000


def runs(
    seed: int, *, factor: float = 1.0, noise: float = 0.1, outliers: float = 0.0
) -> Iterator[tuple[int, int]]:
    """Endless runs of mixed sizes."""
    rng = random.Random(seed)
    while True:
        rows = rng.choice(SIZES)
        run_ns = factor * (ROW_NS * rows + BASE_NS) * rng.uniform(1 - noise, 1 + noise)
        yield rows, int(run_ns * (50 if rng.random() < outliers else 1))


def learned(seed: int, count: int = 100) -> CostModel:
    cost = CostModel()
    for _, run in zip(range(count), runs(seed), strict=False):
        cost.observe(*run)
    return cost


def test_prediction_is_zero_before_the_first_run() -> None:
    cost = CostModel()

    assert (cost.predict_ns(1), cost.predict_ns(1000), cost.samples) == (0, 0, 0)


def test_first_run_is_the_first_prediction() -> None:
    """A part of it is the fixed cost: more rows cost more, but less than in proportion."""
    cost = CostModel()
    cost.observe(10, 1_000_000)

    assert cost.predict_ns(10) == 1_000_000
    assert 1_000_000 < cost.predict_ns(20) < 2_000_000
    assert 0 < cost.predict_ns(1) < 1_000_000


def test_exact_runs_of_two_sizes_give_both_parts() -> None:
    cost = CostModel()
    for rows in (1, 100, 1, 100, 1, 100):
        cost.observe(rows, ROW_NS * rows + BASE_NS)

    assert cost.row_ns == pytest.approx(ROW_NS, rel=1e-6)
    assert cost.base_ns == pytest.approx(BASE_NS, rel=1e-6)


@pytest.mark.parametrize("seed", range(10))
def test_both_parts_are_learned_from_noisy_runs(seed: int) -> None:
    cost = learned(seed, 200)

    assert cost.row_ns == pytest.approx(ROW_NS, rel=0.15)
    assert cost.base_ns == pytest.approx(BASE_NS, rel=0.15)
    for rows in SIZES:
        assert cost.predict_ns(rows) == pytest.approx(ROW_NS * rows + BASE_NS, rel=0.1)


@given(st.integers(1, 5000), st.integers(1, 10**9), st.integers(1, 80))
def test_single_size_predicts_the_mean(rows: int, run_ns: int, count: int) -> None:
    cost = CostModel()
    for _ in range(count):
        cost.observe(rows, run_ns)

    assert cost.predict_ns(rows) == pytest.approx(run_ns, abs=2, rel=1e-6)
    assert cost.row_ns * rows == pytest.approx(cost.base_ns, rel=1e-6)


def ratios(seed: int, *, runs_before: int) -> list[float]:
    """Predictions divided by costs, while one run in twenty takes fifty times as long."""
    cost, source, observed_ratios = (
        learned(seed, runs_before),
        runs(seed, noise=0.0, outliers=0.05),
        [],
    )
    for count in range(1000):
        cost.observe(*next(source))
        if count >= 20:
            observed_ratios.append(cost.predict_ns(16) / (ROW_NS * 16 + BASE_NS))
    return observed_ratios


@pytest.mark.parametrize("seed", range(10))
def test_outliers_change_the_prediction_little(seed: int) -> None:
    """Predictions stay below twice the cost, and below 1.5 times on average."""
    observed_ratios = ratios(seed, runs_before=20)

    assert min(observed_ratios) > 0.8 and max(observed_ratios) < 2.0
    assert sum(observed_ratios) / len(observed_ratios) < 1.5


def test_early_outliers_change_the_prediction_little() -> None:
    for seed in range(20):
        observed_ratios = ratios(seed, runs_before=0)
        assert max(observed_ratios) < 2.0 and sum(observed_ratios) / len(observed_ratios) < 1.5, (
            seed
        )


def test_slow_first_run_is_soon_forgotten() -> None:
    """Page faults and compilation can make it fifty times slower."""
    cost = CostModel()
    cost.observe(1, 50_000_000)
    for _ in range(5):
        cost.observe(1, 1_000_000)

    assert cost.predict_ns(1) == pytest.approx(1_000_000, rel=0.1)


@pytest.mark.parametrize("factor", [0.5, 2, 5])
def test_lasting_change_is_learned_within_thirty_runs(factor: float) -> None:
    """To within a quarter. Example: another process loads the machine."""
    cost = learned(1)
    for _, run in zip(range(30), runs(2, factor=factor), strict=False):
        cost.observe(*run)

    expected = factor * (ROW_NS * 16 + BASE_NS)
    assert cost.predict_ns(16) == pytest.approx(expected, rel=0.25)


@pytest.mark.parametrize("factor", [0.1, 0.5, 2, 5, 10])
def test_lasting_change_is_learned(factor: float) -> None:
    cost = learned(1)
    for _, run in zip(range(600), runs(2, factor=factor), strict=False):
        cost.observe(*run)

    assert cost.predict_ns(16) == pytest.approx(factor * (ROW_NS * 16 + BASE_NS), rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.integers(-5, 1 << 45)), min_size=1))
def test_cost_is_never_negative(observed: list[tuple[int, int]]) -> None:
    """It does not decrease with the rows, and each run counts."""
    cost = CostModel()
    for rows, run_ns in observed:
        cost.observe(rows, run_ns)
        assert cost.row_ns >= 0 and cost.base_ns >= 0
        assert 0 <= cost.predict_ns(1) <= cost.predict_ns(1 << 20)

    assert cost.samples == len(observed)


def test_faster_large_batches_give_no_negative_slope() -> None:
    cost = CostModel()
    for _ in range(LEARNED_SAMPLES + 1):
        cost.observe(1, 1_000_000)
        cost.observe(100, 500_000)

    assert cost.row_ns == 0
    assert cost.base_ns > 0


def test_repr_shows_both_parts() -> None:
    cost = CostModel()
    cost.observe(10, 1000)

    assert repr(cost) == "<CostModel 50 ns x rows + 500 ns>"


def test_slowest_run_is_known_after_enough_runs_and_forgotten_slowly() -> None:
    cost = CostModel()
    for _ in range(HANG_SAMPLES - 1):
        cost.observe(4, 1000)
    assert cost.slowest_ns(4) == 0
    cost.observe(4, 1000)
    assert cost.slowest_ns(4) == pytest.approx(1000, rel=0.01)
    cost.observe(4, 50_000)
    assert cost.slowest_ns(4) >= 50_000
    before = cost.slowest
    for _ in range(100):
        cost.observe(4, 1000)
    assert before / 2 < cost.slowest < before
