"""Batches as named arrays: for models that bind no memory, and for tensors that cannot be bound.

    ArrayBatch  one batch: arrays in by name, arrays out by name, written where the results belong
    ArrayStage  a batch of several requests: put together in memory of its own for one run

Strings are such tensors: they are made anew for every batch. All others are views of the body.

Runs on: worker main.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from iskander.contract.rows import RowCopier, Rows
from iskander.contract.strings import split_strings, string_lengths, string_ranges, strings_to_body
from iskander.contract.tensors import TensorSpec
from iskander.control.messages import Slice
from iskander.errors import ExecutionFailed
from iskander_worker.backends import Arrays, Run
from iskander_worker.tensors import memory, packed

if TYPE_CHECKING:
    from iskander_worker.session import Session

Compute = Callable[[Arrays, Sequence[str], Run], Arrays]
"""As `Model.compute`: arrays by name and the outputs that are wanted to those outputs."""

UNFIT = (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError)
"""What Python and NumPy raise of values that are not as they should be. What a model makes of a
caller's rows is not known before, so that is a failure of the run; an assertion is none."""


class ArrayBatch:
    """One batch whose inputs and results lie in two bodies.

    Args:
        compute: What computes it.
        inputs: Columns of the inputs' body.
        outputs: Columns of the results' body.
        rows: Of the batch.
        input_address: Where the inputs' body begins, checked to be whole.
        output_address: Where the results' body is to begin.
    """

    own_bytes = 0

    def __init__(
        self,
        compute: Compute,
        inputs: RowCopier,
        outputs: RowCopier,
        *,
        rows: int,
        input_address: int,
        output_address: int,
    ) -> None:
        self._compute = compute
        self._inputs = inputs
        self._outputs = outputs
        self._rows = rows
        self._input_address = input_address
        self._output_address = output_address

    def run(self, run: Run) -> None:
        """Compute the batch.

        Args:
            run: This one, for the model to see whether it was given up.

        Raises:
            ExecutionFailed: The model refused, or an output is not as the contract says.
        """
        arrays = self._arrays()
        try:
            self._write(self._compute(arrays, [spec.tensor for spec in self._outputs.specs], run))
        except UNFIT as error:
            raise ExecutionFailed(
                f"what the model made of this batch made no results: {type(error).__name__}: "
                f"{error}"
            ) from None

    def _write(self, arrays: Arrays) -> None:
        """Write the outputs where the results belong."""
        specs = self._outputs.specs
        offsets, length = self._outputs.layout(self._rows)
        body = memory(self._output_address, length)
        columns = []
        for spec, offset in zip(specs, offsets, strict=True):
            tensor = self._checked(spec, arrays)
            target = body[offset : offset + spec.buffer_bytes(self._rows)]
            if spec.is_string:
                column = np.frombuffer(_column(spec, tensor), np.uint8)
                columns.append(column[len(target) :])
                target[:] = column[: len(target)]
            elif spec.type.dtype_name == "bool":
                target[:] = packed(np.ascontiguousarray(tensor))
            else:
                target.view(tensor.dtype).reshape(tensor.shape)[...] = tensor
        lengths = [len(column) for column in columns]
        ranges, _ = string_ranges(specs, self._rows, lengths, offsets)
        for (start, stop), column in zip(ranges, columns, strict=True):
            body[start:stop] = column

    def _checked(self, spec: TensorSpec, arrays: Arrays) -> np.ndarray:
        """An output that is as the contract says."""
        tensor = arrays.get(spec.tensor)
        if tensor is None:
            raise ExecutionFailed(f"output `{spec.tensor}` did not come")
        wanted = (self._rows, *spec.shape)
        if tensor.shape != wanted:
            raise ExecutionFailed(
                f"output `{spec.tensor}` has the shape {list(tensor.shape)} for this batch, "
                f"and the contract says {list(wanted)}"
            )
        if tensor.dtype != spec.type.dtype.numpy:
            raise ExecutionFailed(
                f"output `{spec.tensor}` came as {tensor.dtype}, and the contract says "
                f"{spec.type.dtype_name}"
            )
        return tensor

    def _arrays(self) -> dict[str, np.ndarray]:
        """The inputs by name."""
        rows = self._rows
        specs = self._inputs.specs
        offsets, length = self._inputs.layout(rows)
        lengths = string_lengths(specs, rows, memory(self._input_address, length).data, offsets)
        ranges, end = string_ranges(specs, rows, lengths, offsets)
        body = memory(self._input_address, end)
        body.flags.writeable = False
        strings = iter(ranges)
        arrays: dict[str, np.ndarray] = {}
        for spec, offset in zip(specs, offsets, strict=True):
            raw, shape = body[offset : offset + spec.buffer_bytes(rows)], (rows, *spec.shape)
            count = rows * spec.elements
            if spec.is_string:
                start, stop = next(strings)
                tensor = _strings(raw.data, body[start:stop].data, count)
            elif spec.type.dtype_name == "bool":
                tensor = np.unpackbits(raw, count=count, bitorder="little").view(np.bool_)
            else:
                tensor = raw.view(spec.type.dtype.numpy)
            arrays[spec.tensor] = tensor.reshape(shape)
        return arrays


class ArrayStage:
    """Puts a batch together, and hands its results out.

    Attributes:
        rows: It has room for any number.
        input_address: Of the batch that was gathered last.
        output_address: Of its results.
    """

    rows = 1 << 62

    def __init__(self, session: Session) -> None:
        self._inputs = session.inputs
        self._outputs = session.outputs
        self._input = self._output = np.empty(0, np.uint8)

    @property
    def input_address(self) -> int:
        """Where the batch lies."""
        return self._input.ctypes.data

    @property
    def output_address(self) -> int:
        """Where its results belong."""
        return self._output.ctypes.data

    def gather(self, source: memoryview, slices: tuple[Slice, ...], rows: int) -> None:
        """Copy the slices' rows one after the other, and fill up to `rows` with the last one."""
        parts = [
            (each.rows, Rows(source[each.input_offset :], each.request_rows, each.first))
            for each in slices
        ]
        count, end = parts[-1]
        last = Rows(end.body, end.laid_out, end.first + count - 1)
        missing = rows - sum(each.rows for each in slices)
        self._input = np.asarray(_whole(self._inputs.join(parts + missing * [(1, last)])))
        self._output = np.zeros(self._outputs.layout(rows)[1], np.uint8)

    def scatter(self, target: memoryview, slices: tuple[Slice, ...], rows: int) -> None:
        """Copy to every slice its own results."""
        at = 0
        for each in slices:
            part = (each.rows, Rows(self._output.data, rows, at))
            body = _whole(self._outputs.join([part]))
            target[each.output_offset : each.output_offset + len(body)] = body
            at += each.rows


def _column(spec: TensorSpec, tensor: np.ndarray) -> bytes:
    """A tensor of strings as a column of a body, each found to have room."""
    strings = [text.encode() for text in tensor.reshape(-1)]
    longest = max(map(len, strings), default=0)
    if longest > spec.string_bytes:
        raise ExecutionFailed(
            f"output `{spec.tensor}` has a string of {longest} bytes, and result_string_bytes of "
            f"the model is {spec.string_bytes}: raise it"
        )
    return strings_to_body(strings)


def _strings(offsets: memoryview, joined: memoryview, count: int) -> np.ndarray:
    tensor = np.empty(count, np.object_)
    tensor[:] = [text.decode() for text in split_strings(offsets, joined, count)]
    return tensor


def _whole(steps: Generator[None, None, memoryview]) -> memoryview:
    """Take every step; nobody else has a turn here."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            body: memoryview = end.value
            return body
