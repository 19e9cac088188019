"""Summary of one column: counts, moments, extremes, quantiles and labels.

Pure; a summary has a bounded size and can be merged with others.

Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances" (1979), for the merge of mean and variance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np

from iskander.foundation.decoders import thread_safe
from iskander.sampling.drift.sketches import InvalidSketch, Labels, Quantiles

INTEGER_LABELS_MAX: Final = 64
"""Distinct values up to which integers are also counted as labels."""


class NumberValues(msgspec.Struct, frozen=True):
    """Values of a numeric column.

    Attributes:
        values: Values that are not null, as float64.
        nulls: Number of nulls.
        is_integer: Whether the column has an integer type.
    """

    values: np.ndarray
    nulls: int = 0
    is_integer: bool = False


class LabelValues(msgspec.Struct, frozen=True):
    """Values of a column of text, bytes or booleans.

    Attributes:
        counts: Number of values for each label.
        nulls: Number of nulls.
    """

    counts: Mapping[str, int]
    nulls: int = 0


Values = NumberValues | LabelValues


@thread_safe
class StoredSummary(msgspec.Struct, frozen=True):
    """A summary as stored in a file; the fields are those of `Summary`."""

    nulls: int
    nans: int
    infinities: int
    mean: float
    squares: float
    minimum: float
    maximum: float
    quantiles: bytes
    labels: bytes | None


class Summary:
    """Summary of a stream of values.

    Attributes:
        nulls: Number of nulls.
        nans: Number of NaNs.
        infinities: Number of infinite values.
        mean: Mean of the finite numbers.
        squares: Sum of the squared deviations from the mean.
        minimum: Least finite number; infinity without one.
        maximum: Greatest finite number; -infinity without one.
        quantiles: Sketch of the finite numbers.
        labels: Sketch of the labels; None for floats, and for integers with too many distinct
            values.
    """

    def __init__(self) -> None:
        self.nulls = self.nans = self.infinities = 0
        self.mean = self.squares = 0.0
        self.minimum, self.maximum = math.inf, -math.inf
        self.quantiles = Quantiles()
        self.labels: Labels | None = Labels()

    @property
    def numbers(self) -> int:
        """Number of finite numbers."""
        return len(self.quantiles)

    @property
    def is_labels(self) -> bool:
        """Whether the values are labels: text, booleans, or integers with few distinct values."""
        return self.labels is not None and len(self.labels) > 0

    @property
    def known(self) -> int:
        """Number of values that are neither null nor NaN nor infinite."""
        return len(self.labels) if self.labels is not None and self.is_labels else self.numbers

    @property
    def total(self) -> int:
        """Number of values."""
        return self.known + self.nulls + self.nans + self.infinities

    @property
    def missing_share(self) -> float:
        """Share of values that are null, NaN or infinite."""
        return 1 - self.known / self.total if self.total else 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation of the finite numbers."""
        return math.sqrt(self.squares / self.numbers) if self.numbers else 0.0

    def add(self, values: Values) -> None:
        """Add the values of a batch."""
        self.nulls += values.nulls
        if isinstance(values, NumberValues):
            self._add_numbers(values)
        elif self.labels is not None:
            self.labels.add(values.counts)

    def merge(self, other: Summary) -> None:
        """Add the stream of another summary."""
        self.nulls += other.nulls
        self.nans += other.nans
        self.infinities += other.infinities
        self._merge_moments(other.numbers, other.mean, other.squares)
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)
        self.quantiles.merge(other.quantiles)
        if self.labels is not None:
            if other.labels is None:
                self.labels = None
            else:
                self.labels.merge(other.labels)
                self._limit_integer_labels()

    def to_stored(self) -> StoredSummary:
        """Return the form for a file."""
        return StoredSummary(
            self.nulls,
            self.nans,
            self.infinities,
            self.mean,
            self.squares,
            self.minimum,
            self.maximum,
            self.quantiles.to_bytes(),
            None if self.labels is None else self.labels.to_bytes(),
        )

    @staticmethod
    def from_stored(stored: StoredSummary) -> Summary:
        """Restore a summary.

        Raises:
            InvalidSketch: A sketch of it is damaged, or a number has no meaning.
        """
        if min(stored.nulls, stored.nans, stored.infinities) < 0 or stored.squares < 0:
            raise InvalidSketch("a negative count")
        summary = Summary()
        summary.nulls, summary.nans = stored.nulls, stored.nans
        summary.infinities = stored.infinities
        summary.mean, summary.squares = stored.mean, stored.squares
        summary.minimum, summary.maximum = stored.minimum, stored.maximum
        summary.quantiles = Quantiles(stored.quantiles)
        summary.labels = None if stored.labels is None else Labels(stored.labels)
        if summary.numbers and not stored.minimum <= stored.maximum:
            raise InvalidSketch("a minimum above the maximum")
        return summary

    def _add_numbers(self, batch: NumberValues) -> None:
        values = batch.values
        finite = values[np.isfinite(values)]
        nans = int(np.isnan(values).sum())
        self.nans += nans
        self.infinities += len(values) - len(finite) - nans
        if not len(finite):
            return
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(finite.mean())
            squares = float(np.square(finite - mean).sum())
        self._merge_moments(len(finite), mean, squares)
        self.minimum = min(self.minimum, float(finite.min()))
        self.maximum = max(self.maximum, float(finite.max()))
        self.quantiles.add(finite)
        if not batch.is_integer:
            self.labels = None
        elif self.labels is not None:
            found, counts = np.unique(finite, return_counts=True)
            if len(found) > INTEGER_LABELS_MAX:
                self.labels = None
                return
            names = (str(int(value)) for value in found)
            self.labels.add(dict(zip(names, counts.tolist(), strict=True)))
            self._limit_integer_labels()

    def _limit_integer_labels(self) -> None:
        labels = self.labels
        if labels is not None and self.numbers and len(labels.counts()) > INTEGER_LABELS_MAX:
            self.labels = None

    def _merge_moments(self, count: int, mean: float, squares: float) -> None:
        """Merge the moments of numbers that the quantile sketch does not contain yet."""
        total = self.numbers + count
        if not count:
            return
        difference = mean - self.mean
        self.mean += difference * count / total
        self.squares += squares + difference * difference * self.numbers * count / total
