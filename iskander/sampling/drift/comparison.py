"""Comparison of a column's recent summary with its reference.

Each measure has a limit: that of the settings, or a higher one that chance alone exceeds in at most
one of 10,000 comparisons of independent rows. So few rows or many columns cause no false verdict.

Pure.

Source: Siddiqi, "Credit Risk Scorecards" (2006), for the population stability index; Yurdakul and
Naranjo, "Statistical properties of the population stability index" (Journal of Risk Model
Validation, 2020), for its distribution; Smirnov (1948) for the distance of two samples; Good, "The
population frequencies of species" (1953), for labels that a reference has not seen; Wilson and
Hilferty, "The Distribution of Chi-Square" (1931).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from iskander.config.drift import DriftConfig
from iskander.sampling.drift.sketches import Labels, Quantiles
from iskander.sampling.drift.summary import Summary

DECILES: Final = tuple(tenth / 10 for tenth in range(1, 10))
LABELS_MAX: Final = 20
"""Most frequent labels of a reference that the index compares; all others are one more."""
PSEUDOCOUNT: Final = 0.5
"""Added to the count of each bin, because the index has no value for an empty one."""
CHANCE: Final = 1e-4
"""Probability with which chance alone exceeds the limit of a measure."""
_IS_INTEGER: Final = re.compile(r"-?\d+\Z").match
_CHANCE_Z: Final = 3.719
"""Quantile of the standard normal distribution at 1 - CHANCE."""


class Measure(NamedTuple):
    """A difference between recent values and the reference, and the limit for it."""

    value: float
    limit: float

    @property
    def severity(self) -> float:
        """The value in units of the limit; above 1 it is drift."""
        return self.value / self.limit


def compare(recent: Summary, reference: Summary, limits: DriftConfig) -> dict[str, Measure]:
    """Compare a column's recent values with its reference.

    Returns:
        The measures that apply to the column, by name: `psi`, `ks`, `missing`, `out_of_range`,
        `new_labels`; empty if one side has too few values (`drift.rows_min`).
    """
    measures: dict[str, Measure] = {}
    if min(recent.total, reference.total) < limits.rows_min:
        return measures
    shares = recent.missing_share, reference.missing_share
    measures["missing"] = Measure(
        abs(shares[0] - shares[1]),
        max(limits.missing, share_chance(*shares, recent.total, reference.total)),
    )
    if min(recent.known, reference.known) < limits.rows_min:
        return measures
    if reference.labels is not None and reference.is_labels:
        measures |= _compare_labels(recent, reference.labels, limits)
    else:
        measures |= _compare_numbers(recent, reference, limits)
    return measures


def _compare_numbers(
    recent: Summary, reference: Summary, limits: DriftConfig
) -> dict[str, Measure]:
    counts = recent.numbers, reference.numbers
    if not min(counts):
        return {}
    edges = np.unique(reference.quantiles.at(DECILES))
    expected = bin_shares(reference.quantiles, edges)
    found = bin_shares(recent.quantiles, edges)
    rank_error = recent.quantiles.rank_error() + reference.quantiles.rank_error()
    outside = recent.quantiles.share_below(reference.minimum)
    outside += 1 - float(recent.quantiles.shares_up_to(np.array([reference.maximum]))[0])
    return {
        "psi": Measure(
            stability_index(expected, found), max(limits.psi, psi_chance(len(expected), *counts))
        ),
        "ks": Measure(
            distance(recent.quantiles, reference.quantiles),
            max(limits.ks, distance_chance(*counts) + rank_error),
        ),
        "out_of_range": Measure(
            outside, max(limits.out_of_range, share_chance(outside, 0.0, *counts))
        ),
    }


def _compare_labels(recent: Summary, reference: Labels, limits: DriftConfig) -> dict[str, Measure]:
    known = reference.counts()
    labels = recent.labels.counts() if recent.labels is not None else _integers(recent, known)
    counts = recent.known, len(reference)
    names = list(known)[:LABELS_MAX]
    expected = label_shares(known, names, counts[1])
    found = label_shares(labels, names, counts[0])
    measures = {
        "psi": Measure(
            stability_index(expected, found), max(limits.psi, psi_chance(len(expected), *counts))
        )
    }
    if reference.is_exact:
        seen = min(sum(labels.get(name, 0) for name in known) / counts[0], 1.0)
        unseen = sum(count == 1 for count in known.values()) / counts[1]
        new = max(1 - seen - unseen, 0.0)
        limit = max(limits.new_labels, share_chance(1 - seen, unseen, *counts))
        measures["new_labels"] = Measure(new, limit)
    return measures


def _integers(recent: Summary, known: Mapping[str, int]) -> dict[str, int]:
    """Estimate the counts of the reference's labels among integers with many distinct values."""
    total, counts = recent.numbers, {}
    for name in filter(_IS_INTEGER, known):
        value = float(name)
        share = float(recent.quantiles.shares_up_to(np.array([value]))[0])
        counts[name] = round(total * (share - recent.quantiles.share_below(value)))
    return counts


def bin_shares(quantiles: Quantiles, edges: np.ndarray) -> np.ndarray:
    """Return the share of numbers in each bin; an edge is the upper, inclusive end of its bin."""
    shares = np.diff(np.concatenate(([0.0], quantiles.shares_up_to(edges), [1.0])))
    return _without_zeros(shares, len(quantiles))


def label_shares(counts: Mapping[str, int], names: list[str], total: int) -> np.ndarray:
    """Return the share of each named label, and that of all others."""
    shares = [min(counts.get(name, 0) / total, 1.0) for name in names]
    return _without_zeros(np.array([*shares, max(1 - sum(shares), 0.0)]), total)


def _without_zeros(shares: np.ndarray, total: int) -> np.ndarray:
    return (shares * total + PSEUDOCOUNT) / (total + PSEUDOCOUNT * len(shares))


def stability_index(expected: np.ndarray, found: np.ndarray) -> float:
    """Return the population stability index of two distributions over the same bins."""
    return float(((found - expected) * np.log(found / expected)).sum())


def distance(one: Quantiles, other: Quantiles) -> float:
    """Return the Kolmogorov-Smirnov distance: the greatest difference of two distributions."""
    points = np.union1d(one.kept(), other.kept())
    return float(np.abs(one.shares_up_to(points) - other.shares_up_to(points)).max(initial=0.0))


def psi_chance(bins: int, count: int, other_count: int) -> float:
    """Return the index that chance exceeds rarely: (1/n + 1/m) times a chi-square quantile."""
    if bins < 2:
        return 0.0
    freedom = bins - 1
    spread = 2 / (9 * freedom)
    quantile = freedom * (1 - spread + _CHANCE_Z * math.sqrt(spread)) ** 3
    return quantile * (1 / count + 1 / other_count)


def distance_chance(count: int, other_count: int) -> float:
    """Return the distance that chance exceeds rarely."""
    return math.sqrt(-math.log(CHANCE / 2) / 2 * (1 / count + 1 / other_count))


def share_chance(share: float, other_share: float, count: int, other_count: int) -> float:
    """Return the difference of two shares that chance exceeds rarely, for a common true share."""
    pooled = (share * count + other_share * other_count) / (count + other_count)
    return _CHANCE_Z * math.sqrt(max(pooled * (1 - pooled), 0.0) * (1 / count + 1 / other_count))
