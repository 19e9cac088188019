"""Warm-up: runs a model's first batches, generated, or recorded with expected results.

Batches have the layout of an arena, so they run like batches of requests.

Runs on: worker main, and the process of a sandboxed load.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from iskander.contract.bfloat16 import round_to_bfloat16
from iskander.contract.formats.samples import read_arrays
from iskander.contract.manifest import WarmUp
from iskander.contract.processing.strings import string_lengths, string_ranges, strings_to_body
from iskander.contract.tensors import TensorSpec, body_layout
from iskander.errors import ContractError, ExecutionFailed, ManifestError
from iskander_worker.backends import Run
from iskander_worker.batches.arrays import read_body
from iskander_worker.batches.tensors import pack_booleans

if TYPE_CHECKING:
    from iskander_worker.session import Session

WARM_UP_ROWS = 128
SAMPLE_ROWS_MAX = 1 << 20
_BFLOAT16_SHIFT = 16
_OUT_OF_MEMORY = re.compile(
    "bad_alloc|allocate memory|device memory|smaller than requested|out of memory", re.IGNORECASE
)


def run_warm_up(
    session: Session, folder: Path, plan: WarmUp, rows_max: int, graph_rows: tuple[int, ...] = ()
) -> None:
    """Run the recorded sample; without one, generated batches of several sizes.

    The sizes are one row, up to `WARM_UP_ROWS`, and those of `graph_rows`: the numbers of rows for
    which the session records a CUDA graph.

    A generated batch may fail, as its values may be invalid (an index beyond a table). A failed
    sample, or too little memory, is a `ManifestError`.
    """
    contract = session.contract
    if plan.samples:
        _run_sample(session, folder, plan, contract.rows_fixed or rows_max)
        return
    sizes = (
        {1, min(rows_max, WARM_UP_ROWS)} if contract.rows_fixed is None else {contract.rows_fixed}
    )
    for rows in sorted(sizes.union(graph_rows)):
        try:
            compute_body(session, rows, generate_inputs(contract.inputs, rows, plan))
        except (ContractError, ExecutionFailed) as error:
            if is_out_of_memory(error.message):
                raise ManifestError(
                    f"not enough memory for a warm-up batch of {rows} rows: {error.message}"
                ) from None
            return


def is_out_of_memory(text: str) -> bool:
    """Whether the text of an error says that there was too little memory."""
    return _OUT_OF_MEMORY.search(text) is not None


def compute_body(
    session: Session, rows: int, arrays: Mapping[str, np.ndarray], run: Run | None = None
) -> np.ndarray:
    """Run one batch of named arrays; return the body with its results."""
    inputs = to_body(session.contract.inputs, rows, arrays)
    outputs = np.zeros(body_layout(session.contract.outputs, rows)[1], np.uint8)
    session.bind(rows, inputs.ctypes.data, outputs.ctypes.data).run(run or Run())
    return outputs


def random_results(session: Session, rows_max: int) -> list[bytes]:
    """Return the body of each random batch's results, empty for one that fails.

    Equal results show that two sessions compute the same.
    """
    fixed = session.contract.rows_fixed
    # From 1: an integer division by zero ends the process.
    plan = WarmUp(values="random", low=1, high=2)
    results = []
    for rows in (
        sorted({1, min(rows_max, 3), min(rows_max, WARM_UP_ROWS)}) if fixed is None else [fixed]
    ):
        try:
            arrays = generate_inputs(session.contract.inputs, rows, plan)
            results.append(compute_body(session, rows, arrays).tobytes())
        except (ContractError, ExecutionFailed):
            results.append(b"")
    return results


def generate_inputs(
    specs: tuple[TensorSpec, ...], rows: int, plan: WarmUp
) -> dict[str, np.ndarray]:
    """Generate the inputs of a batch; each string is `1`."""
    random = np.random.default_rng(plan.seed)
    arrays = {}
    for spec in specs:
        shape = (rows, *spec.shape)
        array: np.ndarray
        if spec.is_string:
            arrays[spec.tensor] = np.full(shape, "1", np.object_)
            continue
        if plan.values != "random":
            array = np.full(shape, float(plan.values == "ones"), np.float32)
        elif np.dtype(spec.type.dtype.numpy).kind in "biu" and not is_bfloat16(spec):
            array = random.integers(int(plan.low), int(plan.high), shape, np.int64, endpoint=True)
        else:
            array = random.uniform(plan.low, plan.high, shape)
        arrays[spec.tensor] = to_element_type(spec, array)
    return arrays


def to_body(
    specs: tuple[TensorSpec, ...], rows: int, arrays: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Write named arrays to a new body, in the order of `body_layout`."""
    offsets, _ = body_layout(specs, rows)
    columns = {
        spec.tensor: strings_to_body([str(text).encode() for text in arrays[spec.tensor].flat])
        for spec in specs
        if spec.is_string
    }
    heads = {spec.tensor: spec.buffer_bytes(rows) for spec in specs}
    lengths = [len(column) - heads[name] for name, column in columns.items()]
    ranges, end = string_ranges(specs, rows, lengths, offsets)
    body = np.zeros(end + 64, np.uint8)
    for spec, offset in zip(specs, offsets, strict=True):
        raw = body[offset : offset + heads[spec.tensor]]
        if spec.is_string:
            raw[:] = np.frombuffer(columns[spec.tensor], np.uint8, len(raw))
        elif spec.type.dtype_name == "bool":
            raw[:] = pack_booleans(np.ascontiguousarray(arrays[spec.tensor]))
        else:
            raw.view(spec.type.dtype.numpy)[:] = arrays[spec.tensor].reshape(-1)
    for (start, stop), (name, column) in zip(ranges, columns.items(), strict=True):
        body[start:stop] = np.frombuffer(column, np.uint8, stop - start, heads[name])
    return body


def from_body(specs: tuple[TensorSpec, ...], rows: int, body: np.ndarray) -> dict[str, np.ndarray]:
    """Return the arrays of a body by name; strings as `bytes`, bfloat16 as float32."""
    offsets, _ = body_layout(specs, rows)
    ranges, _ = string_ranges(specs, rows, string_lengths(specs, rows, body.data, offsets), offsets)
    arrays = read_body(specs, rows, offsets, ranges, body, bytes)
    for spec in filter(is_bfloat16, specs):
        bits = arrays[spec.tensor].view(np.uint16).astype(np.uint32)
        arrays[spec.tensor] = (bits << _BFLOAT16_SHIFT).view(np.float32)
    return arrays


def sample_inputs(
    specs: tuple[TensorSpec, ...], folder: Path, name: str
) -> tuple[int, dict[str, np.ndarray]]:
    """Return the number of rows of a recorded sample, and its inputs by tensor."""
    samples = read_arrays(folder, name)
    rows = _row_count(samples, name)
    return rows, {spec.tensor: _sample_tensor(spec, samples, rows, name) for spec in specs}


def _run_sample(session: Session, folder: Path, plan: WarmUp, rows_max: int) -> None:
    contract = session.contract
    rows, inputs = sample_inputs(contract.inputs, folder, plan.samples)
    fixed = contract.rows_fixed
    if fixed is not None and rows % fixed:
        raise ManifestError(
            f"`{plan.samples}` has {rows} rows, which is no multiple of the model's batch size "
            f"{fixed}"
        )
    expected = read_arrays(folder, plan.results) if plan.results else {}
    unknown = sorted(set(expected) - {spec.tensor for spec in contract.outputs})
    if unknown:
        raise ManifestError(f"`{plan.results}` has `{unknown[0]}`, which is no output")
    for first in range(0, rows, rows_max):
        count = min(rows_max, rows - first)
        part = {name: array[first : first + count] for name, array in inputs.items()}
        try:
            body = compute_body(session, count, part)
        except (ContractError, ExecutionFailed) as error:
            raise ManifestError(f"the sample `{plan.samples}` fails: {error.message}") from None
        found = from_body(contract.outputs, count, body)
        for name in expected:
            if expected[name].shape[:1] != (rows,):
                raise ManifestError(f"`{plan.results}`: `{name}` does not have {rows} rows")
            _require_close(name, first, found[name], expected[name][first : first + count], plan)


def _require_close(
    name: str, first: int, found: np.ndarray, expected: np.ndarray, plan: WarmUp
) -> None:
    """Require that results are close to the recorded ones; the error names the first difference."""
    if found.shape != expected.shape:
        raise ManifestError(
            f"output `{name}` of the sample has rows of shape {list(found.shape[1:])}, expected "
            f"{list(expected.shape[1:])} by `{plan.results}`"
        )
    if found.dtype.kind == "O":
        texts = np.empty(expected.shape, np.object_)
        texts.flat[:] = [t if isinstance(t, bytes) else str(t).encode() for t in expected.flat]
        is_same = found == texts
    elif found.dtype.kind == "f" and expected.dtype.kind in "fiu":
        wide = found.astype(np.float64), expected.astype(np.float64)
        is_same = np.isclose(*wide, plan.relative, plan.absolute, equal_nan=True)
    else:
        is_same = found == expected
    if not is_same.all():
        at = tuple(int(index) for index in np.argwhere(~is_same)[0])
        raise ManifestError(
            f"output `{name}` of the sample differs from `{plan.results}`: row "
            f"{first + at[0]}{f', element {list(at[1:])}' if at[1:] else ''}: {found[at]!s}, "
            f"expected {expected[at]!s}; {int((~is_same).sum())} of {is_same.size} differ"
        )


def _row_count(samples: Mapping[str, np.ndarray], name: str) -> int:
    lengths = {array.shape[0] if array.ndim else 0 for array in samples.values()}
    if len(lengths) != 1 or not 0 < (rows := lengths.pop()) <= SAMPLE_ROWS_MAX:
        raise ManifestError(
            f"the arrays of `{name}` do not have the same number of rows, from 1 to "
            f"{SAMPLE_ROWS_MAX}"
        )
    return rows


def _sample_tensor(
    spec: TensorSpec, samples: Mapping[str, np.ndarray], rows: int, name: str
) -> np.ndarray:
    array = samples.get(spec.tensor)
    if array is None:
        raise ManifestError(f"`{name}` has no array for the input `{spec.tensor}`")
    shape = (rows, *spec.shape)
    if array.size != rows * spec.elements:
        raise ManifestError(
            f"`{name}`: `{spec.tensor}` has shape {list(array.shape)}, expected {list(shape)}"
        )
    is_text = array.dtype.kind in "SU"
    if is_text != spec.is_string or array.dtype.kind not in "SUbiuf":
        raise ManifestError(
            f"`{name}`: `{spec.tensor}` has dtype {array.dtype}, expected {spec.type.dtype_name}"
        )
    if not spec.is_string:
        return to_element_type(spec, array.reshape(shape))
    try:
        texts = np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array
    except UnicodeDecodeError:
        raise ManifestError(f"`{name}`: `{spec.tensor}` has a string that is no UTF-8") from None
    return texts.astype(np.object_)


def to_element_type(spec: TensorSpec, array: np.ndarray) -> np.ndarray:
    """Convert an array to the element type of a tensor; clip integers to its range."""
    if is_bfloat16(spec):
        return round_to_bfloat16(array)
    dtype = np.dtype(spec.type.dtype.numpy)
    if dtype.kind in "iu":
        array = np.clip(array, np.iinfo(dtype).min, np.iinfo(dtype).max)
    return np.ascontiguousarray(array).astype(dtype)


def is_bfloat16(spec: TensorSpec) -> bool:
    """Whether the elements are bfloat16, a type that NumPy lacks."""
    return spec.type.dtype_name == "bfloat16"
