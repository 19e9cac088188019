"""Measures against SciPy, and verdicts on equal and on different distributions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from iskander.config.drift import DriftConfig
from iskander.sampling.drift.comparison import (
    CHANCE,
    compare,
    distance,
    distance_chance,
    psi_chance,
    share_chance,
    stability_index,
)
from iskander.sampling.drift.sketches import Quantiles
from iskander.sampling.drift.summary import LabelValues, NumberValues, Summary

LIMITS = DriftConfig()


def numbers(values: np.ndarray, nulls: int = 0, *, is_integer: bool = False) -> Summary:
    summary = Summary()
    for batch in np.array_split(values.astype(np.float64), 10):
        summary.add(NumberValues(batch, is_integer=is_integer))
    summary.nulls += nulls
    return summary


def labels(counts: dict[str, int]) -> Summary:
    summary = Summary()
    summary.add(LabelValues(counts))
    return summary


def drifting(recent: Summary, reference: Summary, limits: DriftConfig = LIMITS) -> set[str]:
    measures = compare(recent, reference, limits)
    return {name for name, measure in measures.items() if measure.severity > 1}


SAMPLES = st.lists(st.integers(-50, 50).map(float), min_size=2, max_size=150)


@given(SAMPLES, SAMPLES)
def test_distance_of_exact_sketches(one: list[float], other: list[float]) -> None:
    sketches = Quantiles(), Quantiles()
    for sketch, values in zip(sketches, (one, other), strict=True):
        sketch.add(np.array(values))
        assert sketch.rank_error() == 0
    expected = stats.ks_2samp(one, other, method="asymp").statistic
    assert distance(*sketches) == pytest.approx(expected, abs=1e-9)


def test_distance_of_large_samples() -> None:
    random = np.random.default_rng(0)
    one, other = random.normal(size=50_000), random.normal(0.5, 1.5, size=50_000)
    sketches = Quantiles(), Quantiles()
    sketches[0].add(one)
    sketches[1].add(other)
    expected = stats.ks_2samp(one, other, method="asymp").statistic
    assert distance(*sketches) == pytest.approx(expected, abs=2 * sketches[0].rank_error())


def test_index_is_the_symmetric_relative_entropy() -> None:
    one, other = np.array([0.2, 0.3, 0.5]), np.array([0.4, 0.4, 0.2])
    expected = stats.entropy(one, other) + stats.entropy(other, one)
    assert stability_index(one, other) == pytest.approx(expected)
    assert stability_index(one, one) == 0


@pytest.mark.parametrize("bins", [2, 5, 10, 21])
def test_limits_of_chance(bins: int) -> None:
    quantile = stats.chi2.isf(CHANCE, bins - 1)
    assert psi_chance(bins, 500, 1000) == pytest.approx(quantile * 0.003, rel=0.08)
    assert distance_chance(500, 1000) == pytest.approx(
        stats.kstwobign.isf(CHANCE) * np.sqrt(0.003), rel=0.01
    )
    assert share_chance(0.3, 0.3, 500, 1000) == pytest.approx(
        stats.norm.isf(CHANCE) * np.sqrt(0.21 * 0.003), rel=0.01
    )


@pytest.mark.parametrize("rows", [50, 500, 5000])
@pytest.mark.parametrize("shape", ["normal", "lognormal", "standard_cauchy", "random"])
def test_equal_distributions_do_not_drift(shape: str, rows: int) -> None:
    """Also with the fewest rows that can be set."""
    random = np.random.default_rng(3)
    limits = DriftConfig(rows_min=50)
    draw = getattr(random, shape)
    for _ in range(20):
        assert not drifting(numbers(draw(size=rows)), numbers(draw(size=2 * rows)), limits)


@pytest.mark.parametrize(
    ("changed", "measures"),
    [
        (lambda values: values + 1, {"psi", "ks", "out_of_range"} - {"out_of_range"}),
        (lambda values: values * 3, {"psi", "out_of_range"}),
        (lambda values: values + 100, {"psi", "ks", "out_of_range"}),
        (lambda values: np.where(np.arange(len(values)) % 5 == 0, np.nan, values), {"missing"}),
        (lambda values: np.where(np.arange(len(values)) % 5 == 0, np.inf, values), {"missing"}),
    ],
)
def test_changed_numbers_drift(changed: object, measures: set[str]) -> None:
    random = np.random.default_rng(4)
    reference = numbers(random.normal(size=5000))
    recent = numbers(changed(random.normal(size=5000)))  # type: ignore[operator]
    assert drifting(recent, reference) >= measures
    if measures == {"missing"}:
        assert drifting(recent, reference) == measures


def test_constant_column() -> None:
    reference = numbers(np.full(1000, 7.0))
    assert not drifting(numbers(np.full(1000, 7.0)), reference)
    assert drifting(numbers(np.full(1000, 8.0)), reference) == {"psi", "ks", "out_of_range"}
    assert drifting(numbers(np.full(1000, 6.0)), reference) >= {"ks", "out_of_range"}


def test_shares_of_nulls() -> None:
    values = np.random.default_rng(5).normal(size=2000)
    reference = numbers(values, nulls=20)
    assert not drifting(numbers(values, nulls=30), reference)
    assert drifting(numbers(values, nulls=200), reference) == {"missing"}


def test_labels() -> None:
    reference = labels({"a": 500, "b": 300, "c": 200})
    assert not drifting(labels({"a": 480, "b": 320, "c": 200}), reference)
    assert drifting(labels({"a": 200, "b": 300, "c": 500}), reference) == {"psi"}
    assert "new_labels" in drifting(labels({"a": 450, "b": 300, "c": 150, "d": 100}), reference)


def test_rare_labels_that_a_reference_has_not_seen_are_expected() -> None:
    """A fifth of all rows has a label of 5000; the reference has seen some of them once."""
    random = np.random.default_rng(6)

    def draw(rows: int) -> Summary:
        rare = random.random(rows) < 0.12
        found = np.where(rare, random.integers(1, 5000, rows), 0)
        names, counts = np.unique(found, return_counts=True)
        return labels({str(name): int(count) for name, count in zip(names, counts, strict=True)})

    reference = draw(1000)
    assert reference.labels is not None and reference.labels.is_exact
    assert not drifting(draw(1000), reference)


def test_labels_without_an_exact_reference_have_no_measure_of_new_ones() -> None:
    many = labels({f"{index}": 1 for index in range(3000)})
    assert "new_labels" not in compare(many, many, LIMITS)


def test_integers_are_compared_as_labels_if_the_reference_has_few() -> None:
    random = np.random.default_rng(7)
    reference = numbers(random.integers(0, 3, 2000), is_integer=True)
    same = numbers(random.integers(0, 3, 2000), is_integer=True)
    assert set(compare(same, reference, LIMITS)) == {"missing", "psi", "new_labels"}
    assert not drifting(same, reference)
    many = numbers(random.integers(0, 1000, 2000), is_integer=True)
    assert many.labels is None
    assert drifting(many, reference) == {"psi", "new_labels"}
    assert set(compare(same, many, LIMITS)) == {"missing", "psi", "ks", "out_of_range"}


def test_few_values_are_not_compared() -> None:
    some = numbers(np.arange(LIMITS.rows_min - 1))
    more = numbers(np.arange(LIMITS.rows_min))
    assert not compare(some, more, LIMITS) and not compare(more, some, LIMITS)
    assert compare(more, more, LIMITS)
    hollow = numbers(np.full(LIMITS.rows_min, np.nan))
    assert set(compare(hollow, more, LIMITS)) == {"missing"}
    assert drifting(hollow, more) == {"missing"}
    porous = numbers(np.append(np.arange(LIMITS.rows_min - 1), np.nan))
    assert set(compare(porous, more, LIMITS)) == {"missing"}


def test_changed_type_of_a_column() -> None:
    text, more = labels({"true": 300, "false": 300}), numbers(np.arange(600.0))
    assert drifting(more, text) == {"psi", "new_labels"}
    assert set(compare(text, more, LIMITS)) == {"missing"}
