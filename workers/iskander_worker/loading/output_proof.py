"""Proof that a run writes every byte of a model's results.

The memory of a result still has the bytes of earlier results, of other callers and other models.
ONNX Runtime does not write a graph output that is also an input or a constant to the memory that is
bound to it, and a program may return memory that it never wrote. So a load fills memory with one of
two patterns before each run, and compares the results of a batch:

    bound memory had 0x55  ==  bound memory had 0xAA  ==  result in the runtime's own memory
        if not, the output is not bound, and is copied from the runtime's memory
    result in the runtime's own memory, after memory with 0x55 was freed
        ==  the same after memory with 0xAA was freed
        if not, and the bytes are those patterns, the model does not write its result: a load error

Runs on: worker main, and the process of a sandboxed load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np

from iskander.contract.graph import Graph
from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.errors import ContractError, ExecutionFailed, ManifestError
from iskander_worker.backends import Arrays, Bound, Run
from iskander_worker.batches.tensors import fits_rows
from iskander_worker.warm_up import from_body, to_body

PATTERNS = (0x55, 0xAA)
STAINS = 8
"""Allocations of each result's size that are filled and freed, so that a run reuses the memory."""
STAIN_BYTES_MAX = 1 << 26
REPEATS = 2
"""Rounds in which an element must have the patterns: a value may equal a pattern by chance."""

Batch = tuple[int, Mapping[str, np.ndarray]]
"""Number of rows, and the arrays of the contract's inputs by tensor."""


class _FoundShape(NamedTuple):
    """The shape of an output in a batch of `rows` rows; `text` describes it in errors."""

    rows: int
    is_expected: bool
    text: str


class ProvedModel(Protocol):
    """The part of a `Session` that a proof uses."""

    contract: Contract
    graph: Graph

    @property
    def is_bound(self) -> bool:
        """As `Session.is_bound`."""

    @property
    def is_exact(self) -> bool:
        """As `Session.is_exact`."""

    def stain(self, lengths: Sequence[int], pattern: int) -> None:
        """As `Session.stain`."""

    def bind(self, rows: int, input_address: int, output_address: int) -> Bound:
        """As `Session.bind`."""

    def compute(self, arrays: Arrays, outputs: Sequence[str], run: Run) -> Arrays:
        """As `Session.compute`: the results, whose shapes are not checked."""


def unbound_outputs(
    model: ProvedModel, batches: Sequence[Batch], *, may_differ: bool = False
) -> tuple[int, ...]:
    """Return the indices of the bound outputs that must be copied instead; check their shapes.

    A model that binds no outputs has none.

    `may_differ`: the manifest accepts that batches of some sizes have results of another shape.

    Raises:
        ManifestError: An output has another shape than its declaration in every batch that runs, or
            in every batch of several rows.
    """
    specs = model.contract.outputs
    names = [spec.tensor for spec in specs]
    given = {tensor.name for tensor in model.graph.inputs}
    unbound = {name for name in names if name in given}  # An input is not written as an output.
    shapes: dict[str, list[_FoundShape]] = {name: [] for name in names}
    ran: list[tuple[Batch, Arrays | None]] = []  # Batches with the results in the model's memory.
    for rows, arrays in batches:
        own: Arrays | None = None
        # Generated values may be invalid, and the runtime cannot return bfloat16.
        with suppress(ContractError, ExecutionFailed):
            own = model.compute(arrays, names, Run())
        ran.append(((rows, arrays), own))
        for spec in specs if own is not None else ():
            assert own is not None
            shape = own[spec.tensor].shape
            if shape != (rows, *spec.shape):
                unbound.add(spec.tensor)
            shapes[spec.tensor].append(
                _FoundShape(
                    rows,
                    fits_rows(shape, rows, spec.shape),
                    f"{list(shape)} for {rows} rows, expected {[rows, *spec.shape]}",
                )
            )
    if not may_differ:
        _require_shapes(shapes)
    if not model.is_bound:
        return ()
    for (rows, arrays), own in ran:
        left = tuple(spec for spec in specs if spec.is_bound and spec.tensor not in unbound)
        if left:
            unbound |= _not_written(model, rows, arrays, own, left)
    return tuple(index for index, name in enumerate(names) if name in unbound)


def require_written(model: ProvedModel, batches: Iterable[Batch]) -> None:
    """Raise a `ManifestError` if a model returns memory that it has not written."""
    names = [spec.tensor for spec in model.contract.outputs]
    for rows, arrays in batches:
        suspect: dict[str, np.ndarray] = {}
        for round_number in range(REPEATS):
            found = [_own_after_stain(model, rows, arrays, names, pattern) for pattern in PATTERNS]
            if found[0] is None or found[1] is None:
                break
            stained = _pattern_masks(found[0], found[1])
            if round_number:  # Suspect are the elements that follow the pattern in each round.
                names_left = stained.keys() & suspect.keys()
                stained = {name: stained[name] & suspect[name] for name in names_left}
            suspect = {name: mask for name, mask in stained.items() if mask.any()}
            if not suspect:
                break
        for name, mask in suspect.items():
            raise ManifestError(
                f"output `{name}`: the model does not write {int(mask.sum())} of {mask.size} "
                f"elements of its result for {rows} rows, which would return earlier data"
            )


def _require_shapes(shapes: Mapping[str, Sequence[_FoundShape]]) -> None:
    """Require that an output has its declared shape in some batch, if possible of several rows."""
    for name, found in shapes.items():
        several = [shape for shape in found if shape.rows > 1] or found
        if several and not any(shape.is_expected for shape in several):
            raise ManifestError(
                f"output `{name}` has the shape {several[0].text} by its declaration: every "
                "request would fail"
            )


def _not_written(
    model: ProvedModel,
    rows: int,
    arrays: Mapping[str, np.ndarray],
    own: Arrays | None,
    specs: tuple[TensorSpec, ...],
) -> set[str]:
    """Return the outputs whose bound memory depends on its pattern, or differs from `own`.

    `own` are the results in the runtime's own memory; None if that run failed.
    """
    found = [_bound_results(model, rows, arrays, pattern) for pattern in PATTERNS]
    different: set[str] = set()
    if found[0] is None or found[1] is None:
        return different
    for spec in specs:
        one, other = found[0][spec.tensor], found[1][spec.tensor]
        is_repeated = _equal(one, other, is_exact=model.is_exact)
        if not is_repeated and not _has_patterns(one, other):
            continue  # Two runs of one batch differ, as with random numbers.
        is_own = own is None or _equal(
            one, own[spec.tensor].reshape(one.shape), is_exact=model.is_exact
        )
        if not is_repeated or not is_own:
            different.add(spec.tensor)
    return different


def _bound_results(
    model: ProvedModel, rows: int, arrays: Mapping[str, np.ndarray], pattern: int
) -> dict[str, np.ndarray] | None:
    """Return the results of a bound run over memory with a pattern; None if the run fails."""
    specs = model.contract.outputs
    inputs = to_body(model.contract.inputs, rows, arrays)
    outputs = np.full(body_layout(specs, rows)[1] + 64, pattern, np.uint8)
    try:
        bound = model.bind(rows, inputs.ctypes.data, outputs.ctypes.data)
        fill = getattr(bound, "fill", None)  # Only a binding has it.
        if fill is not None:
            fill(pattern)
        bound.run(Run())
    except (ContractError, ExecutionFailed):
        return None
    return from_body(specs, rows, outputs)


def _own_after_stain(
    model: ProvedModel,
    rows: int,
    arrays: Mapping[str, np.ndarray],
    names: Sequence[str],
    pattern: int,
) -> dict[str, np.ndarray] | None:
    """Return results in the model's own memory, after memory of their sizes was filled and freed.

    None if the run fails.
    """
    lengths = [spec.buffer_bytes(rows) for spec in model.contract.outputs if not spec.is_string]
    sizes = [length for length in lengths if 0 < length <= STAIN_BYTES_MAX]
    model.stain(sizes, pattern)
    try:
        results = model.compute(arrays, names, Run())
    except (ContractError, ExecutionFailed):
        return None
    return {name: np.array(results[name]) for name in names}


def stain_memory(lengths: Sequence[int], pattern: int) -> None:
    """Fill memory of these lengths in bytes with a pattern, and free it."""
    for length in lengths:
        kept = [np.full(length, pattern, np.uint8) for _ in range(STAINS)]
        kept.clear()


def _pattern_masks(
    first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return masks of the elements with the first pattern in `first` and the second in `second`."""
    found = {}
    for name, one in first.items():
        other = second[name]
        if one.dtype.kind == "O" or one.shape != other.shape or not one.size:
            continue
        pair = [
            np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(one.size, -1)
            for array in (one, other)
        ]
        masks = [(raw == pattern).all(axis=1) for raw, pattern in zip(pair, PATTERNS, strict=True)]
        found[name] = masks[0] & masks[1]
    return found


def _has_patterns(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether an element has the first pattern in `one` and the second pattern in `other`."""
    if one.dtype == np.bool_:  # A boolean is one bit, in which no pattern can be recognized.
        return True
    return any(bool(mask.any()) for mask in _pattern_masks({"": one}, {"": other}).values())


def _equal(one: np.ndarray, other: np.ndarray, *, is_exact: bool) -> bool:
    """Whether results are equal, or equal within the rounding of a GPU unless `is_exact`.

    NaN equals NaN.
    """
    if one.dtype.kind != "f":
        return bool(np.array_equal(one, other))
    if is_exact:
        return bool(np.array_equal(one, other, equal_nan=True))
    return bool(np.allclose(one, other, rtol=1e-2, atol=1e-3, equal_nan=True))
