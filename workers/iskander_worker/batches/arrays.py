"""Batches as named arrays, for models and tensors that cannot be bound to memory.

    ArrayBatch  one batch: arrays in by name, arrays out by name, copied to the output address
    ArrayStage  a batch of several requests, gathered in memory of its own for one run

Strings and booleans are decoded into new arrays for every batch. All other arrays are views of the
body.

Runs on: worker main.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from iskander.contract.processing.rows import RowCopier, Rows
from iskander.contract.processing.strings import (
    split_strings,
    string_lengths,
    string_ranges,
    strings_to_body,
)
from iskander.contract.tensors import TensorSpec
from iskander.errors import ExecutionFailed
from iskander.interprocess.control.messages import Slice
from iskander_worker.backends import Arrays, Run
from iskander_worker.batches.tensors import fits_rows, memory_at, pack_booleans, shape_error

if TYPE_CHECKING:
    from iskander_worker.session import Session

Compute = Callable[[Arrays, Sequence[str], Run], Arrays]
"""Signature of `Model.compute`: input arrays and requested output names to output arrays."""

DATA_ERRORS = (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError)
"""Errors of Python and NumPy for unexpected values. A caller's rows can cause them, so they fail
the run; an assertion does not."""


@dataclass(slots=True)
class ArrayBatch:
    """One batch of arrays: read from the body at one address, computed, written to another body.

    The caller has checked that the input body is inside its arena.
    """

    compute: Compute
    inputs: RowCopier
    outputs: RowCopier
    rows: int
    input_address: int
    output_address: int
    own_bytes = 0

    def run(self, run: Run) -> None:
        """Compute the batch; raise `ExecutionFailed` if an output differs from the contract."""
        names = [spec.tensor for spec in self.outputs.specs]
        try:
            self._write(self.compute(self._read(), names, run))
        except DATA_ERRORS as error:
            raise ExecutionFailed(
                f"computing this batch failed: {type(error).__name__}: {error}"
            ) from None

    def _read(self) -> dict[str, np.ndarray]:
        rows, specs = self.rows, self.inputs.specs
        offsets, length = self.inputs.layout(rows)
        lengths = string_lengths(specs, rows, memory_at(self.input_address, length).data, offsets)
        ranges, end = string_ranges(specs, rows, lengths, offsets)
        body = memory_at(self.input_address, end)
        body.flags.writeable = False
        return read_body(specs, rows, offsets, ranges, body, bytes.decode)

    def _write(self, arrays: Arrays) -> None:
        specs = self.outputs.specs
        offsets, length = self.outputs.layout(self.rows)
        body = memory_at(self.output_address, length)
        columns = []
        for spec, offset in zip(specs, offsets, strict=True):
            tensor = self._declared_output(spec, arrays)
            target = body[offset : offset + spec.buffer_bytes(self.rows)]
            if spec.is_string:
                column = np.frombuffer(_string_column(spec, tensor), np.uint8)
                columns.append(column[len(target) :])
                target[:] = column[: len(target)]
            elif spec.type.dtype_name == "bool":
                target[:] = pack_booleans(np.ascontiguousarray(tensor))
            else:
                target.view(tensor.dtype).reshape(tensor.shape)[...] = tensor
        lengths = [len(column) for column in columns]
        ranges, _ = string_ranges(specs, self.rows, lengths, offsets)
        for (start, stop), column in zip(ranges, columns, strict=True):
            body[start:stop] = column

    def _declared_output(self, spec: TensorSpec, arrays: Arrays) -> np.ndarray:
        """Return an output, or raise `ExecutionFailed` if it differs from its declaration."""
        tensor = arrays.get(spec.tensor)
        if tensor is None:
            raise ExecutionFailed(f"output `{spec.tensor}` is missing")
        shape = (self.rows, *spec.shape)
        if tensor.shape != shape:
            if not fits_rows(tensor.shape, self.rows, spec.shape):
                raise shape_error(spec.tensor, tensor.shape, shape)
            tensor = tensor.reshape(shape)
        if tensor.dtype != spec.type.dtype.numpy:
            raise ExecutionFailed(
                f"output `{spec.tensor}` has dtype {tensor.dtype}, expected "
                f"{spec.type.dtype_name} by the contract"
            )
        return tensor


class ArrayStage:
    """Gathers a batch of any number of requests and rows, and scatters its results."""

    rows = 1 << 62
    """A stage has a maximum of rows; this one allocates memory for every batch, so it has none."""

    def __init__(self, session: Session) -> None:
        self._inputs = session.inputs
        self._outputs = session.outputs
        self._input = self._output = np.empty(0, np.uint8)
        self.input_address = self.output_address = 0

    def gather(self, source: memoryview, slices: tuple[Slice, ...], rows: int) -> None:
        """Concatenate the rows of the slices; repeat the last row up to `rows` rows."""
        parts = [
            (part.rows, Rows(source[part.input_offset :], part.request_rows, part.first))
            for part in slices
        ]
        count, end = parts[-1]
        last = Rows(end.body, end.layout_rows, end.first + count - 1)
        missing = rows - sum(part.rows for part in slices)
        self._input = np.asarray(_run_to_end(self._inputs.join(parts + missing * [(1, last)])))
        self._output = np.zeros(self._outputs.layout(rows)[1], np.uint8)
        self.input_address = self._input.ctypes.data
        self.output_address = self._output.ctypes.data

    def scatter(self, target: memoryview, slices: tuple[Slice, ...], rows: int) -> None:
        """Copy the results of each slice to its output offset."""
        at = 0
        for part in slices:
            results = (part.rows, Rows(self._output.data, rows, at))
            body = _run_to_end(self._outputs.join([results]))
            target[part.output_offset : part.output_offset + len(body)] = body
            at += part.rows


def read_body(
    specs: tuple[TensorSpec, ...],
    rows: int,
    offsets: list[int],
    ranges: list[tuple[int, int]],
    body: np.ndarray,
    decode: Callable[[bytes], object],
) -> dict[str, np.ndarray]:
    """Return the arrays of a body by name: views, except for booleans and strings.

    `decode` converts the bytes of a string.
    """
    strings = iter(ranges)
    arrays: dict[str, np.ndarray] = {}
    for spec, offset in zip(specs, offsets, strict=True):
        raw, count = body[offset : offset + spec.buffer_bytes(rows)], rows * spec.elements
        tensor: np.ndarray
        if spec.is_string:
            start, stop = next(strings)
            tensor = np.empty(count, np.object_)
            texts = split_strings(raw.data, body[start:stop].data, count)
            tensor[:] = [decode(text) for text in texts]
        elif spec.type.dtype_name == "bool":
            tensor = np.unpackbits(raw, count=count, bitorder="little").view(np.bool_)
        else:
            tensor = raw.view(spec.type.dtype.numpy)
        arrays[spec.tensor] = tensor.reshape(rows, *spec.shape)
    return arrays


def _string_column(spec: TensorSpec, tensor: np.ndarray) -> bytes:
    """Encode an output of strings, or raise `ExecutionFailed` if one is too long."""
    strings = [text.encode() for text in tensor.reshape(-1)]
    longest = max(map(len, strings), default=0)
    if longest > spec.string_bytes:
        raise ExecutionFailed(
            f"output `{spec.tensor}` has a string of {longest} bytes, limit {spec.string_bytes} "
            "(result_string_bytes of the model)"
        )
    return strings_to_body(strings)


def _run_to_end(steps: Generator[None, None, memoryview]) -> memoryview:
    """Run a generator without its pauses; return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            body: memoryview = end.value
            return body
