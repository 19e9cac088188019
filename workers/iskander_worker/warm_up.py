"""First batches of a model, before its first caller: made up, or recorded with their results.

Batches are bodies as in an arena, so that what is warmed is what will run.

Runs on: worker main, and the process that tries a model out.

Source: NumPy's `.npz`, read without pickle.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from iskander.contract.manifest import WarmUp
from iskander.contract.paths import path_inside
from iskander.contract.strings import (
    body_to_strings,
    string_lengths,
    string_ranges,
    strings_to_body,
)
from iskander.contract.tensors import TensorSpec, body_layout
from iskander.errors import ContractError, ExecutionFailed, ManifestError
from iskander_worker.backends import Run
from iskander_worker.tensors import packed

if TYPE_CHECKING:
    from iskander_worker.session import Session

ROWS = 128
SAMPLE_BYTES_MAX = 1 << 28
SAMPLE_ROWS_MAX = 1 << 20
_BFLOAT16_SHIFT = 16
_UNREADABLE = (
    OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, MemoryError,
)  # fmt: skip
_MEMORY = re.compile("bad_alloc|allocate memory", re.IGNORECASE)


def warm(session: Session, folder: Path, plan: WarmUp, rows_max: int) -> None:
    """Compute the batches that a manifest declares, or a batch of one row and a larger one.

    A model may refuse values that were made up (an index beyond its table, a word that no
    vocabulary has) and still be right for its callers' data, so such a refusal is not one. A
    recorded sample has to be computed.

    Args:
        session: Of the model.
        folder: Of the model, where its samples are.
        plan: What the manifest says.
        rows_max: Of a batch.

    Raises:
        ManifestError: A recorded sample does not fit, is refused, or has other results.
    """
    contract = session.contract
    if plan.samples:
        _replay(session, folder, plan, contract.rows_fixed or rows_max)
        return
    sizes = {1, min(rows_max, ROWS)} if contract.rows_fixed is None else {contract.rows_fixed}
    for rows in sorted(sizes):
        try:
            compute(session, rows, made_up(contract.inputs, rows, plan))
        except (ContractError, ExecutionFailed) as error:
            if _MEMORY.search(error.message):
                raise ManifestError(
                    f"a first batch of {rows} rows takes more memory than it may: {error.message}"
                ) from None
            return


def compute(session: Session, rows: int, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Run one batch of named arrays; the body of its results, whole.

    Raises:
        ExecutionFailed: The model refused it.
    """
    inputs = to_body(session.contract.inputs, rows, arrays)
    outputs = np.zeros(body_layout(session.contract.outputs, rows)[1], np.uint8)
    session.bind(rows, inputs.ctypes.data, outputs.ctypes.data).run(Run())
    return outputs


def sample_results(session: Session, rows_max: int) -> list[bytes]:
    """What a model makes of random numbers, to hold two ways of loading it against each other.

    Nothing of a number of rows that it refuses.
    """
    fixed = session.contract.rows_fixed
    # From 1: a zero divisor of integers ends a process.
    plan = WarmUp(values="random", low=1, high=2)
    results = []
    for rows in sorted({1, min(rows_max, 3), min(rows_max, ROWS)}) if fixed is None else [fixed]:
        try:
            arrays = made_up(session.contract.inputs, rows, plan)
            results.append(compute(session, rows, arrays).tobytes())
        except (ContractError, ExecutionFailed):
            results.append(b"")
    return results


def made_up(specs: tuple[TensorSpec, ...], rows: int, plan: WarmUp) -> dict[str, np.ndarray]:
    """A batch of what a manifest says: ones where it says nothing.

    Ones, since a zero divisor of integers ends a process.
    """
    random = np.random.default_rng(plan.seed)
    arrays = {}
    for spec in specs:
        shape = (rows, *spec.shape)
        array: np.ndarray
        if spec.is_string:
            array = np.full(shape, "1", np.object_)
        elif plan.values != "random":
            array = np.full(shape, float(plan.values == "ones"), np.float32)
        elif np.dtype(spec.type.dtype.numpy).kind in "biu" and not _is_bfloat16(spec):
            array = random.integers(int(plan.low), int(plan.high), shape, np.int64, endpoint=True)
        else:
            array = random.uniform(plan.low, plan.high, shape)
        arrays[spec.tensor] = array if spec.is_string else _as_stored(spec, array)
    return arrays


def to_body(
    specs: tuple[TensorSpec, ...], rows: int, arrays: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Named arrays as a body of an arena; `body_layout` says where they lie in it."""
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
            raw[:] = packed(np.ascontiguousarray(arrays[spec.tensor]))
        else:
            raw.view(spec.type.dtype.numpy)[:] = arrays[spec.tensor].reshape(-1)
    for (start, stop), (name, column) in zip(ranges, columns.items(), strict=True):
        body[start:stop] = np.frombuffer(column, np.uint8, stop - start, heads[name])
    return body


def from_body(specs: tuple[TensorSpec, ...], rows: int, body: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of a body by name; strings as objects of `bytes`, bfloat16 as float32."""
    offsets, _ = body_layout(specs, rows)
    ranges, _ = string_ranges(specs, rows, string_lengths(specs, rows, body.data, offsets), offsets)
    strings = iter(ranges)
    arrays = {}
    for spec, offset in zip(specs, offsets, strict=True):
        raw, count = body[offset : offset + spec.buffer_bytes(rows)], rows * spec.elements
        if spec.is_string:
            start, stop = next(strings)
            array = np.empty(count, np.object_)
            array[:] = body_to_strings(raw.tobytes() + body[start:stop].tobytes(), count)
        elif spec.type.dtype_name == "bool":
            array = np.unpackbits(raw, count=count, bitorder="little").view(np.bool_)
        elif _is_bfloat16(spec):
            array = (raw.view(np.uint16).astype(np.uint32) << _BFLOAT16_SHIFT).view(np.float32)
        else:
            array = raw.view(spec.type.dtype.numpy)
        arrays[spec.tensor] = array.reshape(rows, *spec.shape)
    return arrays


def _replay(session: Session, folder: Path, plan: WarmUp, rows_max: int) -> None:
    contract = session.contract
    samples = read_arrays(folder, plan.samples)
    rows = _rows_of(samples, plan.samples)
    inputs = {spec.tensor: _fitted(spec, samples, rows, plan.samples) for spec in contract.inputs}
    fixed = contract.rows_fixed
    if fixed is not None and rows % fixed:
        raise ManifestError(
            f"`{plan.samples}` has {rows} rows, and the model takes {fixed} at a time"
        )
    wanted = read_arrays(folder, plan.results) if plan.results else {}
    unknown = sorted(set(wanted) - {spec.tensor for spec in contract.outputs})
    if unknown:
        raise ManifestError(f"`{plan.results}` has `{unknown[0]}`, which is no output")
    for first in range(0, rows, rows_max):
        count = min(rows_max, rows - first)
        part = {name: array[first : first + count] for name, array in inputs.items()}
        try:
            body = compute(session, count, part)
        except (ContractError, ExecutionFailed) as error:
            raise ManifestError(f"the sample `{plan.samples}` fails: {error.message}") from None
        found = from_body(contract.outputs, count, body)
        for name in wanted:
            if wanted[name].shape[:1] != (rows,):
                raise ManifestError(f"`{plan.results}`: `{name}` has not {rows} rows")
            _require_close(name, first, found[name], wanted[name][first : first + count], plan)


def _require_close(
    name: str, first: int, found: np.ndarray, wanted: np.ndarray, plan: WarmUp
) -> None:
    """Refuse results that are not the recorded ones, and say where the first difference is."""
    if found.shape != wanted.shape:
        raise ManifestError(
            f"output `{name}` of the sample has rows of the shape {list(found.shape[1:])}, and "
            f"`{plan.results}` has {list(wanted.shape[1:])}"
        )
    if found.dtype.kind == "O":
        texts = np.empty(wanted.shape, np.object_)
        texts.flat[:] = [t if isinstance(t, bytes) else str(t).encode() for t in wanted.flat]
        is_same = found == texts
    elif found.dtype.kind == "f" and wanted.dtype.kind in "fiu":
        is_same = np.isclose(
            found.astype(np.float64),
            wanted.astype(np.float64),
            rtol=plan.relative,
            atol=plan.absolute,
            equal_nan=True,
        )
    else:
        is_same = found == wanted
    if not is_same.all():
        where = tuple(int(index) for index in np.argwhere(~is_same)[0])
        raise ManifestError(
            f"output `{name}` of the sample is not as recorded in `{plan.results}`: row "
            f"{first + where[0]}{f', element {list(where[1:])}' if where[1:] else ''}: wanted "
            f"{wanted[where]!s}, got {found[where]!s}; {int((~is_same).sum())} of {is_same.size} "
            "differ"
        )


def read_arrays(folder: Path, name: str) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` file beside a model, by name.

    Raises:
        ManifestError: It is not there, no such file, has objects in it, or is too large.
    """
    path = path_inside(folder, name)
    try:
        with zipfile.ZipFile(path) as archive:
            total = sum(member.file_size for member in archive.infolist())
        if total > SAMPLE_BYTES_MAX:
            raise ManifestError(f"`{name}` unpacks to {total} bytes, beyond {SAMPLE_BYTES_MAX}")
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except _UNREADABLE as error:
        raise ManifestError(f"`{name}` is no `.npz` file of plain arrays: {error}") from None


def _rows_of(samples: Mapping[str, np.ndarray], name: str) -> int:
    rows = {array.shape[:1] for array in samples.values()}
    if (
        len(rows) != 1
        or rows == {()}
        or not 0 < (count := int(next(iter(rows))[0])) <= SAMPLE_ROWS_MAX
    ):
        raise ManifestError(f"the arrays of `{name}` have not one number of rows, of at least 1")
    return count


def _fitted(
    spec: TensorSpec, samples: Mapping[str, np.ndarray], rows: int, name: str
) -> np.ndarray:
    array = samples.get(spec.tensor)
    if array is None:
        raise ManifestError(f"`{name}` has no array `{spec.tensor}`, which is an input")
    wanted = (rows, *spec.shape)
    if array.size != rows * spec.elements:
        raise ManifestError(
            f"`{name}`: `{spec.tensor}` has the shape {list(array.shape)}, wanted {list(wanted)}"
        )
    is_text = array.dtype.kind in "SU"
    if is_text != spec.is_string or array.dtype.kind not in "SUbiuf":
        raise ManifestError(
            f"`{name}`: `{spec.tensor}` is {array.dtype}, wanted {spec.type.dtype_name}"
        )
    if spec.is_string:
        texts = array.astype(np.object_)
        return np.vectorize(_text, [np.object_])(texts) if array.dtype.kind == "S" else texts
    return _as_stored(spec, array.reshape(wanted))


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ManifestError("a string of the warm-up sample is no UTF-8") from None


def _as_stored(spec: TensorSpec, array: np.ndarray) -> np.ndarray:
    """Numbers in the memory that a tensor's elements have."""
    if _is_bfloat16(spec):
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        return (bits >> _BFLOAT16_SHIFT).astype(np.uint16)
    dtype = np.dtype(spec.type.dtype.numpy)
    if dtype.kind in "iu":
        array = np.clip(array, np.iinfo(dtype).min, np.iinfo(dtype).max)
    return np.ascontiguousarray(array).astype(dtype)


def _is_bfloat16(spec: TensorSpec) -> bool:
    return spec.type.dtype_name == "bfloat16"
