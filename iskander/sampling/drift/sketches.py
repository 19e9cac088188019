"""Sketches of bounded size: quantiles of numbers, and counts of frequent labels.

The only module that imports the sketch library. Runs on: the observer process, the operator's tool.

Source: Apache DataSketches; Karnin, Lang and Liberty, "Optimal Quantile Approximation in Streams"
(KLL, 2016); Anderson et al., "A High-Performance Algorithm for Identifying Frequent Items in Data
Streams" (2017).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Final

import datasketches
import numpy as np

QUANTILES_K: Final = 200
"""Size of a quantile sketch: some 600 numbers, 5 kB, with the error of `rank_error`, 1.33 %."""
LABELS_LG: Final = 8
"""Logarithm of a label sketch's table. Up to 192 labels are counted exactly."""
COUNT_MAX: Final = 1 << 53
"""Values of a stored sketch, so that those of merged ones are within the library's integers."""
LABEL_CHARACTERS: Final = 64
"""Longer labels are shortened, with a hash at their end."""
_NO_FALSE_NEGATIVES: Final = datasketches.frequent_items_error_type.NO_FALSE_NEGATIVES
_DIGEST_BYTES: Final = 8
_KLL: Final = struct.Struct("<BBBBHBxQHBx")
"""Header of a quantile sketch: preamble, version, family, flags, k, m, n, least k, levels."""
_KLL_M: Final = 8
_KLL_LEVELS_MAX: Final = 60
_EMPTY: Final = bytes(datasketches.kll_doubles_sketch(QUANTILES_K).serialize())
_ONE: Final = bytes((2, 2, 15, 4)) + _EMPTY[4:]
"""Begin of a quantile sketch of one number."""
_ITEMS: Final = struct.Struct("<BBBBBBxx")
"""Header of a label sketch: preamble, version, family, log. of the greatest and own size, flags."""


class InvalidSketch(ValueError):
    """Bytes that are no sketch."""


class Quantiles:
    """Quantiles of a stream of finite numbers."""

    def __init__(self, data: bytes | None = None) -> None:
        """Create an empty sketch, or restore one from its bytes."""
        if data is None:
            self._sketch = datasketches.kll_doubles_sketch(QUANTILES_K)
            return
        _check_quantiles(data)
        try:
            self._sketch = datasketches.kll_doubles_sketch.deserialize(data)
        except Exception as error:  # The library's errors have no common class.
            raise InvalidSketch(str(error)) from None

    def __len__(self) -> int:
        return int(self._sketch.n)

    def add(self, values: np.ndarray) -> None:
        """Add finite float64 numbers."""
        self._sketch.update(values)

    def merge(self, other: Quantiles) -> None:
        """Add the stream of another sketch."""
        self._sketch.merge(other._sketch)

    def at(self, ranks: Sequence[float]) -> list[float]:
        """Return the quantiles of ranks from 0 to 1; empty for an empty sketch."""
        return list(self._sketch.get_quantiles(list(ranks))) if len(self) else []

    def shares_up_to(self, points: np.ndarray) -> np.ndarray:
        """Return the share of numbers at or below each point; the points ascend and differ."""
        if not len(self) or not len(points):
            return np.zeros(len(points))
        return np.array(self._sketch.get_cdf(points.tolist(), True)[:-1])

    def share_below(self, point: float) -> float:
        """Return the share of numbers below a point."""
        return float(self._sketch.get_rank(point)) if len(self) else 0.0

    def kept(self) -> np.ndarray:
        """Return the distinct numbers that the sketch has kept, ascending."""
        return np.unique(np.fromiter((value for value, _ in self._sketch), np.float64))

    def rank_error(self) -> float:
        """Return the error of a rank that is exceeded in 1 % of all cases."""
        if not self._sketch.is_estimation_mode():
            return 0.0
        return float(self._sketch.normalized_rank_error(False))

    def to_bytes(self) -> bytes:
        """Return the bytes from which it can be restored."""
        return bytes(self._sketch.serialize())


class Labels:
    """Counts of the most frequent labels of a stream."""

    def __init__(self, data: bytes | None = None) -> None:
        """Create an empty sketch, or restore one from its bytes."""
        if data is None:
            self._sketch = datasketches.frequent_strings_sketch(LABELS_LG)
            return
        _check_labels(data)
        try:
            self._sketch = datasketches.frequent_strings_sketch.deserialize(data)
            found = self._sketch.get_frequent_items(_NO_FALSE_NEGATIVES, 0)
        except Exception as error:  # The library's errors have no common class.
            raise InvalidSketch(str(error)) from None
        total = int(self._sketch.total_weight)
        if total > COUNT_MAX:
            raise InvalidSketch("too many labels")
        if bool(total) != bool(found):
            raise InvalidSketch("all labels are missing")
        if any(estimate > total for _, estimate, *_ in found):
            raise InvalidSketch("a label is more frequent than all")
        if sum(least for _, _, least, _ in found) > total:
            raise InvalidSketch("the labels are more frequent than all")

    def __len__(self) -> int:
        return int(self._sketch.total_weight)

    def add(self, counts: Mapping[str, int]) -> None:
        """Add labels with their counts."""
        for label, count in counts.items():
            self._sketch.update(_short(label), count)

    def merge(self, other: Labels) -> None:
        """Add the stream of another sketch."""
        self._sketch.merge(other._sketch)

    def counts(self) -> dict[str, int]:
        """Return the kept labels with their estimated counts, the most frequent first."""
        found = self._sketch.get_frequent_items(_NO_FALSE_NEGATIVES, 0)
        return {label: estimate for label, estimate, *_ in sorted(found, key=_by_frequency)}

    @property
    def is_exact(self) -> bool:
        """Whether all labels are kept with their exact counts."""
        found = self._sketch.get_frequent_items(_NO_FALSE_NEGATIVES, 0)
        return bool(sum(least for _, _, least, _ in found) == len(self))

    def to_bytes(self) -> bytes:
        """Return the bytes from which it can be restored."""
        return bytes(self._sketch.serialize())


def _check_quantiles(data: bytes) -> None:
    """Check a serialized sketch: the library reads beyond its memory if its levels are damaged.

    Layout:
        empty         the first 8 bytes of the header
        one number    the first 8 bytes of the header | number
        else          header | begin of each level (4 bytes each) | least, greatest | numbers

    A number of level i stands for 2**i numbers; those of level 0 have any order.
    """
    if data == _EMPTY or (len(data) == len(_ONE) + 8 and data[: len(_ONE)] == _ONE):
        if not np.isfinite(np.frombuffer(data, np.float64, -1, len(_EMPTY))).all():
            raise InvalidSketch("a quantile is not finite")
        return
    if len(data) < _KLL.size:
        raise InvalidSketch("truncated quantiles")
    _, _, _, _, k, m, n, _, levels = _KLL.unpack_from(data)
    if (k, m) != (QUANTILES_K, _KLL_M) or not 0 < levels <= _KLL_LEVELS_MAX:
        raise InvalidSketch("quantiles of another size")
    start = _KLL.size + 4 * levels
    if len(data) < start + 16 or (len(data) - start) % 8:
        raise InvalidSketch("truncated quantiles")
    if n > COUNT_MAX:
        raise InvalidSketch("too many numbers")
    begins = np.frombuffer(data, "<u4", levels, _KLL.size).astype(np.int64)
    least, greatest, *_ = numbers = np.frombuffer(data, "<f8", -1, start)
    numbers = numbers[2:]
    ends = np.append(begins[1:], begins[0] + len(numbers))
    sizes = ends - begins
    if (sizes < 0).any() or sum(int(size) << at for at, size in enumerate(sizes)) != n:
        raise InvalidSketch("levels of quantiles do not fit")
    if not (np.isfinite(numbers).all() and ((least <= numbers) & (numbers <= greatest)).all()):
        raise InvalidSketch("a quantile is out of range")
    for begin, end in zip(begins[1:] - begins[0], ends[1:] - begins[0], strict=True):
        if (np.diff(numbers[begin:end]) < 0).any():
            raise InvalidSketch("quantiles descend")


def _check_labels(data: bytes) -> None:
    """Check the sizes of a serialized sketch, for which the library allocates memory."""
    if len(data) < _ITEMS.size:
        raise InvalidSketch("truncated labels")
    _, _, _, greatest, own, _ = _ITEMS.unpack_from(data)
    if greatest != LABELS_LG or own > LABELS_LG:
        raise InvalidSketch("labels of another size")


def _by_frequency(item: tuple[str, int, int, int]) -> tuple[int, str]:
    return -item[1], item[0]


def _short(label: str) -> str:
    if len(label) <= LABEL_CHARACTERS:
        return label
    digest = hashlib.blake2b(label.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES)
    return f"{label[: LABEL_CHARACTERS - 2 * _DIGEST_BYTES]}{digest.hexdigest()}"
