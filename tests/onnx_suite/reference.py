"""ONNX Runtime in process, and the comparison of results with its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from support import models

from iskander.contract.processing.tolerance import mismatches
from onnx_suite.clients import BFLOAT16

Feeds = dict[str, np.ndarray]
Results = dict[str, Any]


class Reference:
    """A session with the worker's number of threads.

    Attributes:
        fixed_rows: Fixed first axes of the inputs.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        providers = ["CPUExecutionProvider"]
        self._session = ort.InferenceSession(model.SerializeToString(), options, providers)
        outputs = self._session.get_outputs()
        nodes = (*self._session.get_inputs(), *outputs)
        self._has_bfloat16 = any(node.type == "tensor(bfloat16)" for node in nodes)
        self._names = [node.name for node in outputs]
        self._declared = {node.name: node.shape for node in outputs}
        shapes = [node.shape for node in self._session.get_inputs() if node.shape]
        self.fixed_rows = {shape[0] for shape in shapes if isinstance(shape[0], int)}

    def run(self, feeds: Feeds) -> Results:
        """Run a request; raises what the runtime raises."""
        if self._has_bfloat16:
            found = models.run_with_bfloat16(self._session, feeds)
        else:
            found = self._session.run(None, feeds)
        return dict(zip(self._names, found, strict=True))

    def is_declared(self, results: Results, rows: int) -> bool:
        """Whether the results have the declared shapes, with as many rows as the request."""
        for name, array in results.items():
            shape = self._declared[name]
            if not isinstance(array, np.ndarray) or array.ndim != len(shape) or not array.ndim:
                return False
            pairs = zip(shape[1:], array.shape[1:], strict=True)
            if array.shape[0] != rows or any(isinstance(s, int) and s != n for s, n in pairs):
                return False
        return True


def alone(reference: Reference, feeds: Feeds) -> Results | None:
    """The results of a request alone; None if ONNX Runtime rejects it.

    A request with another number of rows than a fixed first axis has results if these do not depend
    on the rows beside them.
    """
    try:
        return reference.run(feeds)
    except Exception:
        if len(reference.fixed_rows) != 1 or any(not array.ndim for array in feeds.values()):
            return None
    (rows,) = reference.fixed_rows
    counts = {len(array) for array in feeds.values()}
    if len(counts) != 1 or 0 in counts:
        return None
    parts = []
    for first in range(0, counts.pop(), rows):
        cut = {name: array[first : first + rows] for name, array in feeds.items()}
        part = _padded_alone(reference, cut, rows)
        if part is None:
            return None
        parts.append(part)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _padded_alone(reference: Reference, feeds: Feeds, rows: int) -> Results | None:
    """The results of at most `rows` rows, if they are equal with all fills."""
    count = len(next(iter(feeds.values())))
    found: Results | None = None
    for fill in FILLS:
        try:
            padded = reference.run({n: _padded(a, rows, fill) for n, a in feeds.items()})
        except Exception:
            continue  # Such as zeros as divisors.
        if any(np.ndim(array) == 0 or len(array) != rows for array in padded.values()):
            return None
        results = {name: array[:count] for name, array in padded.items()}
        if found is not None and any(beyond_tolerance(results[n], found[n]) for n in found):
            return None
        found = results
    return found


FILLS: tuple[Callable[[np.ndarray], np.ndarray], ...] = (
    lambda rows: rows,
    lambda rows: rows[::-1],
    np.zeros_like,
)
"""Rows that pad a request."""


def _padded(array: np.ndarray, rows: int, fill: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    repeated = np.resize(fill(array), (rows, *array.shape[1:]))
    repeated[: len(array)] = array
    return repeated


def form_difference(found: Any, expected: Any) -> str:
    """The difference of type or shape."""
    if not isinstance(expected, np.ndarray):
        return f"a {type(expected).__name__} in process"
    if found.dtype != expected.dtype or found.shape != expected.shape:
        forms = [f"{array.dtype}{list(array.shape)}" for array in (found, expected)]
        return f"{forms[0]}, in process {forms[1]}"
    return ""


def as_declared(found: np.ndarray, expected: Any) -> Any:
    """The expected result without a last axis of one, which a contract with one axis less drops."""
    if isinstance(expected, np.ndarray) and expected.shape == (*found.shape, 1):
        return expected.reshape(found.shape)
    return expected


def bit_difference(found: Any, expected: Any) -> str:
    """The difference of two results; NaN equals NaN."""
    expected = as_declared(found, expected)
    problem = form_difference(found, expected)
    if problem:
        return problem
    if expected.dtype == object:
        return "" if found.tolist() == expected.tolist() else f"{found} in process {expected}"
    if found.tobytes() == expected.tobytes():
        return ""
    bits = f"u{expected.dtype.itemsize}"
    unequal = np.ascontiguousarray(found).view(bits) != np.ascontiguousarray(expected).view(bits)
    if expected.dtype.kind == "f" or expected.dtype == BFLOAT16:
        unequal &= ~(np.isnan(found) & np.isnan(expected))
    return _example(found, expected, unequal)


def beyond_tolerance(found: Any, expected: Any) -> str:
    """The difference of two results beyond the tolerance of combined batches."""
    expected = as_declared(found, expected)
    problem = form_difference(found, expected)
    if problem:
        return problem
    if expected.dtype == BFLOAT16:
        unequal = mismatches(found.astype(np.float32), expected.astype(np.float32), "bfloat16")
    else:
        unequal = mismatches(found, expected, expected.dtype.name)
    return _example(found, expected, np.asarray(unequal))


def _example(found: np.ndarray, expected: np.ndarray, unequal: np.ndarray) -> str:
    flat = unequal.reshape(-1)
    count = int(flat.sum())
    if not count:
        return ""
    index = int(flat.argmax())
    pair = f"{found.reshape(-1)[index]!r}, in process {expected.reshape(-1)[index]!r}"
    return f"{count} of {flat.size} differ, first [{index}]: {pair}"
