"""Tolerance of results: when two results of the same row count as equal.

The size of a batch and the number of threads change the order in which a runtime adds numbers, and
the instructions for the last elements of a tensor. So equal rows do not always give equal bits. Two
results are equal within the tolerance if

    |a - b| <= RELATIVE * |b| + ABSOLUTE * scale,     scale = the largest |b| of the output

with the constants of the element type. NaN equals NaN, and infinities equal themselves. Integers,
booleans and strings have no tolerance.

Pure.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Tolerance(NamedTuple):
    """Constants of an element type: relative to the value, and to the scale of the output."""

    relative: float
    absolute: float


TOLERANCES = {
    "float64": Tolerance(1e-9, 1e-10),
    "float32": Tolerance(1e-4, 1e-5),
    "float16": Tolerance(1e-2, 1e-3),
    "bfloat16": Tolerance(5e-2, 1e-2),
}
"""By the name of the element type; types without an entry have no tolerance."""


def scale_of(results: np.ndarray) -> float:
    """Return the largest finite magnitude of an output; 0 if no value is finite."""
    if results.dtype.kind != "f":
        return 0.0
    magnitudes = np.abs(results.astype(np.float64))
    return float(magnitudes[np.isfinite(magnitudes)].max(initial=0.0))


def mismatches(
    found: np.ndarray, expected: np.ndarray, dtype_name: str, scale: float | None = None
) -> np.ndarray:
    """Return a mask of the elements that differ by more than the tolerance.

    Args:
        found: Results of any shape.
        expected: Reference results of the same shape.
        dtype_name: Element type in a contract; bfloat16 is compared as float32.
        scale: Scale of the output; by default, the scale of `expected`.
    """
    tolerance = TOLERANCES.get(dtype_name)
    if tolerance is None or expected.dtype.kind != "f":
        unequal: np.ndarray = np.asarray(found != expected)
        return unequal
    one, other = found.astype(np.float64), expected.astype(np.float64)
    size = scale_of(expected) if scale is None else scale
    with np.errstate(all="ignore"):
        is_close = np.abs(one - other) <= (
            tolerance.relative * np.abs(other) + tolerance.absolute * size
        )
    is_same = (one == other) | (np.isnan(one) & np.isnan(other))
    differs: np.ndarray = ~(is_same | (is_close & np.isfinite(other)))
    return differs


def difference(found: np.ndarray, expected: np.ndarray, scale: float | None = None) -> float:
    """Return the largest difference between floats as a share of the scale, at most 1.

    It is 1 if an unequal element is NaN or infinite. For other types, the result is the share of
    unequal elements.
    """
    if not expected.size:
        return 0.0
    if expected.dtype.kind != "f":
        return float(np.mean(np.asarray(found != expected)))
    one, other = found.astype(np.float64), expected.astype(np.float64)
    is_same = (one == other) | (np.isnan(one) & np.isnan(other))
    if is_same.all():
        return 0.0
    if not (np.isfinite(one) | is_same).all() or not (np.isfinite(other) | is_same).all():
        return 1.0
    size = scale_of(expected) if scale is None else scale
    with np.errstate(all="ignore"):
        largest = float(np.where(is_same, 0.0, np.abs(one - other)).max())
    return min(largest / size, 1.0) if size else 1.0
