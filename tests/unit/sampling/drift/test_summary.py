"""Summaries against NumPy: moments, extremes, quantiles within the sketch's error, labels."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iskander.sampling.drift.sketches import LABEL_CHARACTERS, InvalidSketch, Labels, Quantiles
from iskander.sampling.drift.summary import INTEGER_LABELS_MAX, LabelValues, NumberValues, Summary

FLOATS = st.floats(-1e6, 1e6, width=32) | st.sampled_from((math.nan, math.inf, -math.inf))
BATCHES = st.lists(st.lists(FLOATS, max_size=30), max_size=8)


def summary_of(batches: list[list[float]]) -> Summary:
    summary = Summary()
    for batch in batches:
        summary.add(NumberValues(np.array(batch, np.float64)))
    return summary


def test_sums_beyond_the_range_of_floats_are_infinite() -> None:
    """Without a warning, which this repository's tests and operators see as an error."""
    summary = summary_of([[1.7e308, 1.7e308], [-1.7e308, 1.0]])
    assert summary.numbers == 4 and not math.isfinite(summary.mean)
    assert summary.minimum == -1.7e308 and summary.quantiles.at([0.5])


def assert_equals(summary: Summary, values: np.ndarray) -> None:
    finite = values[np.isfinite(values)]
    assert summary.numbers == summary.known == len(finite)
    assert summary.nans == np.isnan(values).sum()
    assert summary.infinities == np.isinf(values).sum()
    assert summary.total == len(values)
    if len(values):
        assert summary.missing_share == pytest.approx(1 - len(finite) / len(values))
    if len(finite):
        assert summary.minimum == finite.min() and summary.maximum == finite.max()
        assert summary.mean == pytest.approx(finite.mean(), rel=1e-9, abs=1e-6)
        assert summary.deviation == pytest.approx(finite.std(), rel=1e-6, abs=1e-4)


@given(BATCHES)
def test_numbers_in_batches(batches: list[list[float]]) -> None:
    assert_equals(summary_of(batches), np.array([v for batch in batches for v in batch]))


@given(BATCHES, BATCHES)
def test_merge_and_file_keep_all_values(one: list[list[float]], other: list[list[float]]) -> None:
    merged = summary_of(one)
    merged.merge(summary_of(other))
    values = np.array([v for batch in one + other for v in batch])
    assert_equals(merged, values)
    restored = Summary.from_stored(merged.to_stored())
    assert_equals(restored, values)
    restored.add(NumberValues(np.array([5.0])))
    assert_equals(restored, np.append(values, 5.0))


@pytest.mark.parametrize("shape", ["normal", "lognormal", "uniform"])
def test_quantiles_are_within_the_stated_error(shape: str) -> None:
    """The error of all ranks is below the stated one for 99 % of sketches."""
    random = np.random.default_rng(1)
    within = 0
    for _ in range(30):
        values = getattr(random, shape)(size=20_000)
        parts = [Quantiles() for _ in range(6)]
        for part, chunk in zip(parts, np.array_split(values, 6), strict=True):
            for batch in np.array_split(chunk, 20):
                part.add(batch)
            if part is not parts[0]:
                parts[0].merge(part)
        ordered = np.sort(values)
        points = ordered[::100]
        exact = np.searchsorted(ordered, points, "right") / len(ordered)
        error = np.abs(parts[0].shares_up_to(points) - exact).max()
        within += error <= parts[0].rank_error()
        median = parts[0].at((0.5,))[0]
        rank = np.searchsorted(ordered, median) / len(ordered)
        assert abs(rank - 0.5) < 2 * parts[0].rank_error()
    assert within >= 25
    assert 0 < parts[0].rank_error() < 0.014


def test_size_is_bounded() -> None:
    summary = Summary()
    random = np.random.default_rng(2)
    for _ in range(100):
        summary.add(NumberValues(random.normal(size=10_000)))
    stored = summary.to_stored()
    assert len(stored.quantiles) < 6000
    text = Summary()
    for start in range(0, 20_000, 1000):
        text.add(LabelValues({f"{index:0100}": 1 for index in range(start, start + 1000)}))
    labels = text.to_stored().labels
    assert labels is not None and len(labels) < 25_000
    assert text.labels is not None and not text.labels.is_exact
    assert text.total == 20_000


@given(st.lists(st.dictionaries(st.text(max_size=5), st.integers(1, 9), max_size=30), max_size=6))
def test_few_labels_are_exact(batches: list[dict[str, int]]) -> None:
    one, other = Summary(), Summary()
    for index, batch in enumerate(batches):
        (one if index % 2 else other).add(LabelValues(batch, nulls=1))
    one.merge(other)
    expected: Counter[str] = Counter()
    for batch in batches:
        expected.update(batch)
    restored = Summary.from_stored(one.to_stored())
    for summary in (one, restored):
        assert summary.labels is not None
        assert summary.labels.counts() == dict(expected)
        assert summary.labels.is_exact
        assert summary.known == expected.total() and summary.nulls == len(batches)


def test_frequent_labels_survive_many_rare_ones() -> None:
    labels = Labels()
    for index in range(300):
        labels.add({"often": 30, "sometimes": 10} | {f"{index}-{each}": 1 for each in range(20)})
    counts = labels.counts()
    assert list(counts)[:2] == ["often", "sometimes"]
    assert counts["often"] == pytest.approx(9000, rel=0.05)


def test_long_labels_differ_at_their_end() -> None:
    labels = Labels()
    labels.add({"x" * 1000 + "a": 1, "x" * 1000 + "b": 2})
    assert sorted(labels.counts().values()) == [1, 2]
    assert all(len(label) == LABEL_CHARACTERS for label in labels.counts())


def test_integers_with_few_values_are_labels_too() -> None:
    summary = Summary()
    summary.add(NumberValues(np.array([1.0, 1.0, -2.0]), is_integer=True))
    assert summary.labels is not None
    assert summary.labels.counts() == {"1": 2, "-2": 1}
    assert summary.is_labels and summary.total == 3 and summary.mean == 0.0
    other = Summary()
    other.add(NumberValues(np.arange(2.0, 2 + INTEGER_LABELS_MAX), is_integer=True))
    assert other.is_labels
    summary.merge(other)
    assert not summary.is_labels and summary.known == 3 + INTEGER_LABELS_MAX


def test_integers_with_many_values_in_one_batch_are_no_labels() -> None:
    """A label sketch would keep only some of them."""
    summary = Summary()
    summary.add(NumberValues(np.arange(100_000.0), is_integer=True))
    assert summary.labels is None and summary.known == 100_000


@pytest.mark.parametrize("data", [b"", b"abc", b"\xff" * 64])
def test_damaged_bytes(data: bytes) -> None:
    with pytest.raises(InvalidSketch):
        Labels(data)
    with pytest.raises(InvalidSketch):
        Quantiles(data)


def quantiles_of(count: int) -> bytes:
    quantiles = Quantiles()
    quantiles.add(np.arange(float(count)))
    return quantiles.to_bytes()


@pytest.mark.parametrize(
    ("count", "at", "damage", "problem"),
    [
        (5000, 4, b"\xff\xff", "another size"),
        (5000, 6, b"\x7f", "another size"),
        (5000, 18, b"\xff", "another size"),
        (5000, 24, b"\xf0\xff\xff\x7f", "do not fit"),
        (5000, 8, b"\0", "do not fit"),
        (5000, 8, b"\xff" * 8, "too many"),
        (5000, 40, np.float64(4000.0).tobytes(), "out of range"),
        (5000, 48, np.float64(10.0).tobytes(), "out of range"),
        (5000, -8, np.float64(np.nan).tobytes(), "out of range"),
        (5000, -8, np.float64(1.0).tobytes(), "descend"),
        (1, -8, np.float64(np.inf).tobytes(), "not finite"),
    ],
)
def test_damaged_quantiles(count: int, at: int, damage: bytes, problem: str) -> None:
    """The library reads beyond its memory for some of them."""
    data = bytearray(quantiles_of(count))
    at %= len(data)
    data[at : at + len(damage)] = damage
    with pytest.raises(InvalidSketch, match=problem):
        Quantiles(bytes(data))


def test_truncated_quantiles() -> None:
    data = quantiles_of(5000)
    for size in range(0, len(data), 7):
        with pytest.raises(InvalidSketch):
            Quantiles(data[:size])


@pytest.mark.parametrize("count", [0, 1, 2, 199, 201, 100_000])
def test_quantiles_of_any_size_are_restored(count: int) -> None:
    data = quantiles_of(count)
    assert len(Quantiles(data)) == count and Quantiles(data).to_bytes() == data


@pytest.mark.parametrize(
    ("at", "damage", "problem"),
    [
        (3, b"\x1b\x1b", "another size"),
        (8, b"\0", "missing"),
        (16, b"\1", "more frequent than all"),
        (24, b"\xff", "a label is more frequent"),
        (16, b"\xff" * 8, "too many"),
        (-1, b"\xff", "bad_cast"),
    ],
)
def test_damaged_labels(at: int, damage: bytes, problem: str) -> None:
    """A table of 2**27 entries would take a gigabyte."""
    labels = Labels()
    labels.add({"a": 3, "b": 4})
    data = bytearray(labels.to_bytes())
    at %= len(data)
    data[at : at + len(damage)] = damage
    with pytest.raises(InvalidSketch, match=problem):
        Labels(bytes(data))


@pytest.mark.parametrize(
    "damage", [{"nulls": -1}, {"squares": -1.0}, {"minimum": math.nan}, {"maximum": -5.0}]
)
def test_numbers_without_a_meaning(damage: dict[str, float]) -> None:
    stored = summary_of([[1.0, 2.0]]).to_stored()
    with pytest.raises(InvalidSketch):
        Summary.from_stored(msgspec.structs.replace(stored, **damage))


def test_empty_sketches() -> None:
    assert Labels().counts() == {} and Labels().is_exact
    assert Quantiles().at((0.5,)) == [] and Quantiles().share_below(1.0) == 0.0
    assert not len(Quantiles().kept())
