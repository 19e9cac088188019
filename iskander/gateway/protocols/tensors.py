"""Named tensors checked against a contract: request inputs, and results from a body.

For the tensor protocols; Flight uses `flight/plan.py` and `flight/codec.py`. The elements of a
tensor are row-major and little-endian, a boolean has one byte, and strings are one buffer in the
format of `strings_to_body`.

Runs on: gateway loop.
"""

from __future__ import annotations

from builtins import memoryview  # Where mypyc looks for the types of fields.
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from typing import Final

import msgspec
import numpy as np

from iskander.arrow.utf8 import require_string_bytes, require_strings
from iskander.config.schema import LimitsConfig
from iskander.contract.dtypes import OFFSET_BYTES
from iskander.contract.processing.buckets import bucketed_tensors, buckets_of, contracts_of_buckets
from iskander.contract.processing.strings import string_lengths, string_ranges
from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.errors import ContractError, LimitExceeded, MalformedInput

PROBLEMS_MAX: Final = 8
"""Limit of names in one error; a client may send thousands of wrong names."""
NAME_MAX: Final = 100


class Tensor(msgspec.Struct, frozen=True):
    """One tensor as it is on the wire."""

    name: str
    datatype: str  # Of the Open Inference Protocol.
    shape: tuple[int, ...]  # The first axis is the rows.
    data: memoryview  # The elements, as single bytes.


class RequestTensors:
    """Input tensors of a request.

    Args:
        rows: Rows of each tensor.
        tensors: Arrow buffer of each of the contract's inputs, in its order (for strings: the
            offsets); then the string bytes of each string input.
        bucket: Index of the bucket of the tensors' lengths.
    """

    __slots__ = ("bucket", "rows", "tensors")

    def __init__(self, rows: int, tensors: list[memoryview], bucket: int = 0) -> None:
        self.rows = rows
        self.tensors = tensors
        self.bucket = bucket

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(map(len, self.tensors))


class InputMatch:
    """Mapping from the raw tensors of a request to the contract's inputs.

    Valid for every request with the same tensor descriptions and lengths. `order` has the index of
    each input's raw tensor.
    """

    __slots__ = ("_bucket", "_lengths", "_order", "_rows", "contract")

    def __init__(
        self, contract: Contract, lengths: list[int], order: list[int], inputs: RequestTensors
    ) -> None:
        self.contract = contract
        self._lengths = lengths
        self._order = order
        self._rows = inputs.rows
        self._bucket = inputs.bucket

    def offered(self, raw: list[memoryview]) -> RequestTensors | None:
        """Map raw tensors to inputs; None if their lengths differ."""
        if len(raw) != len(self._lengths):
            return None
        for index, length in enumerate(self._lengths):
            if len(raw[index]) != length:
                return None
        return RequestTensors(self._rows, [raw[index] for index in self._order], self._bucket)


def match_inputs(
    contract: Contract, raw: list[memoryview], inputs: RequestTensors
) -> InputMatch | None:
    """Return the mapping from raw tensors to inputs; None if an input was converted."""
    indices = {id(tensor): index for index, tensor in enumerate(raw)}
    order = [indices[id(tensor)] for tensor in inputs.tensors if id(tensor) in indices]
    if len(order) < len(inputs.tensors):
        return None
    return InputMatch(contract, list(map(len, raw)), order, inputs)


def read_inputs(contract: Contract, tensors: list[Tensor], limits: LimitsConfig) -> RequestTensors:
    """Match tensors to the contract's inputs and check their types, shapes and sizes.

    Raises:
        ContractError: A tensor is missing, unknown, duplicated, or has the wrong type or shape.
        MalformedInput: A tensor's data do not fit its shape, or its rows are negative.
        LimitExceeded: Too many rows or bytes.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    bucket = 0
    if contract.sources:
        bucket, contract = _of_bucket(contract, by_name)
    if len(by_name) < len(tensors) or len(by_name) != len(contract.inputs):
        raise _name_error(contract, tensors)
    rows = -1
    buffers = []
    strings: list[memoryview] = []
    for spec in contract.inputs:
        tensor = by_name.get(spec.tensor)
        if tensor is None:
            raise _name_error(contract, tensors)
        if rows < 0 and tensor.shape:
            rows = tensor.shape[0]
            _require_limits(rows, tensors, limits)
        dtype = spec.type.dtype
        bits = dtype.arrow_bits
        if tensor.shape != (rows, *spec.shape) or tensor.datatype != dtype.oip:
            raise _type_error(spec, tensor, rows)
        if not bits:
            buffers.append(_offsets(spec, tensor))
            strings.append(tensor.data[len(buffers[-1]) :])
            continue
        length = rows * spec.elements * max(bits // 8, 1)
        if len(tensor.data) != length:
            wanted = f"of shape {list(tensor.shape)} has {length} bytes as {tensor.datatype}"
            message = f"input `{spec.tensor}` {wanted}, got {len(tensor.data)}"
            raise MalformedInput(message, tensor=spec.tensor)
        if bits == 1:
            values = np.frombuffer(tensor.data, np.bool_)
            buffers.append(np.packbits(values, bitorder="little").data)
        else:
            buffers.append(tensor.data)
    if strings:
        require_string_bytes(sum(map(len, strings)), limits)
    return RequestTensors(rows, buffers + strings, bucket)


def result_ranges(contract: Contract, rows: int) -> list[tuple[int, int]] | None:
    """Return the range of each result in a body; None if a result needs conversion."""
    if any(spec.type.dtype.arrow_bits <= 1 for spec in contract.outputs):
        return None
    offsets = body_layout(contract.outputs, rows)[0]
    pairs = zip(contract.outputs, offsets, strict=True)
    return [(offset, offset + spec.buffer_bytes(rows)) for spec, offset in pairs]


def result_tensors(contract: Contract, rows: int, body: bytes | memoryview) -> list[Tensor]:
    """Return the results in a body as tensors; copies booleans and strings only."""
    view = memoryview(body)
    results = []
    offsets = body_layout(contract.outputs, rows)[0]
    strings: Iterator[tuple[int, int]] | None = None
    for spec, offset in zip(contract.outputs, offsets, strict=True):
        data = view[offset : offset + spec.buffer_bytes(rows)]
        dtype = spec.type.dtype
        if not dtype.arrow_bits and rows:
            if strings is None:
                lengths = string_lengths(contract.outputs, rows, view, offsets)
                strings = iter(string_ranges(contract.outputs, rows, lengths, offsets)[0])
            start, stop = next(strings)
            data = memoryview(b"".join((data, view[start:stop])))
        elif dtype.arrow_bits == 1:
            bits, count = np.frombuffer(data, np.uint8), rows * spec.elements
            data = np.unpackbits(bits, count=count, bitorder="little").data
        results.append(Tensor(spec.tensor, dtype.oip, (rows, *spec.shape), data))
    return results


def _of_bucket(contract: Contract, tensors: dict[str, Tensor]) -> tuple[int, Contract]:
    """Select the bucket by the tensors' length, and its contract; the last if none matches."""
    buckets = buckets_of(contract)
    shapes = [tensors[name].shape for name in bucketed_tensors(contract) if name in tensors]
    length = next((shape[1] for shape in shapes if len(shape) > 1), 0)
    index = buckets.index(length) if length in buckets else max(len(buckets) - 1, 0)
    return index, contracts_of_buckets(contract)[index]


def _offsets(spec: TensorSpec, tensor: Tensor) -> memoryview:
    """Check the strings of a tensor and return their offsets."""
    data, count = tensor.data, tensor.shape[0] * spec.elements
    offsets = data[: (count + 1) * OFFSET_BYTES]
    joined = data[len(offsets) :]
    if int.from_bytes(offsets[count * OFFSET_BYTES :], "little") != len(joined):
        wanted = f"the {count} strings of shape {list(tensor.shape)}"
        message = f"input `{spec.tensor}`: the data are not {wanted}"
        raise MalformedInput(message, tensor=spec.tensor)
    require_strings(f"input `{spec.tensor}`", count, offsets, joined)
    return offsets


def _name_error(contract: Contract, tensors: list[Tensor]) -> ContractError:
    inputs = {spec.tensor: None for spec in contract.inputs}
    got = Counter(tensor.name for tensor in tensors)
    problems = chain(
        (f"input `{name}` is missing" for name in inputs if name not in got),
        (f"`{name[:NAME_MAX]}` is not a model input" for name in got if name not in inputs),
        (f"input `{name[:NAME_MAX]}` is sent twice" for name in got if got[name] > 1),
    )
    return ContractError("; ".join(islice(problems, PROBLEMS_MAX)))


def _require_limits(rows: int, tensors: list[Tensor], limits: LimitsConfig) -> None:
    if rows < 0:
        raise MalformedInput(f"the first axis of a tensor is its rows, got {rows}")
    if rows > limits.rows:
        message = f"too many rows: {rows}, limit {limits.rows} (`limits.rows`)"
        raise LimitExceeded(message, wanted=limits.rows)
    total = sum(len(tensor.data) for tensor in tensors)
    if total > limits.bytes:
        limit = f"limit {limits.bytes} (`limits.bytes`)"
        raise LimitExceeded(f"batch too large: {total} bytes, {limit}")


def _type_error(spec: TensorSpec, tensor: Tensor, rows: int) -> ContractError:
    wanted = f"{spec.type.dtype.oip} {_listed(['rows' if rows < 0 else rows, *spec.shape])}"
    got = f"{tensor.datatype[:20]} {_listed(list(tensor.shape))}"
    return ContractError(f"input `{spec.tensor}`: wanted {wanted}, got {got}", tensor=spec.tensor)


def _listed(shape: list[int | str] | list[int]) -> str:
    return "[" + ", ".join(map(str, shape[:20])) + "]"
