"""Tolerance of results: when two results of the same row count as equal.

A runtime adds numbers in another order, and computes the last elements of a tensor by other
instructions, when a batch has another size or more threads. So equal rows do not give equal bits.
Two results are equal within the tolerance if

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
    """The largest finite magnitude of an output, 0 without one."""
    if results.dtype.kind != "f":
        return 0.0
    magnitudes = np.abs(results.astype(np.float64))
    return float(magnitudes[np.isfinite(magnitudes)].max(initial=0.0))


def mismatches(
    found: np.ndarray, expected: np.ndarray, dtype_name: str, scale: float | None = None
) -> np.ndarray:
    """The elements that differ by more than the tolerance.

    Args:
        found: Results of any shape.
        expected: The reference, of the same shape.
        dtype_name: Element type in a contract; bfloat16 is compared as float32.
        scale: Scale of the output; by default that of `expected`.
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
    """The largest difference as a share of the scale; for other types, of unequal elements.

    1 for a difference between a finite and another number.
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
