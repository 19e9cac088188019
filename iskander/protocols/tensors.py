"""Tensors by name, held against a contract: a request's rows going in, results going out.

What clients of tensor protocols send; record batches come by `flight_plan` and `flight_codec`.
A tensor's elements lie row by row, little-endian, a boolean in a byte of its own; strings in one
piece, as `strings_to_body` makes it.

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
from iskander.contract.buckets import bucketed_tensors, buckets_of, variants
from iskander.contract.dtypes import OFFSET_BYTES
from iskander.contract.strings import string_lengths, string_ranges
from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.errors import ContractError, LimitExceeded, MalformedInput

PROBLEMS_MAX: Final = 8
"""Names in one error; a client may send thousands that are wrong."""
NAME_MAX: Final = 100


class Tensor(msgspec.Struct, frozen=True):
    """One tensor as it is on the wire.

    Attributes:
        datatype: As the Open Inference Protocol names it.
        shape: With the axis of the rows before the others.
        data: Its elements, in single bytes.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview


class RequestTensors:
    """What a request wants computed.

    Args:
        rows: Of each tensor.
        tensors: Bytes of each of the contract's inputs, in its order, as Arrow buffers have them;
            then the bytes of each that is strings, whose first buffer has the offsets.
        bucket: Number of the bucket whose lengths they have.
    """

    __slots__ = ("bucket", "rows", "tensors")

    def __init__(self, rows: int, tensors: list[memoryview], bucket: int = 0) -> None:
        self.rows = rows
        self.tensors = tensors
        self.bucket = bucket

    @property
    def size(self) -> int:
        """Bytes of all its tensors."""
        return sum(map(len, self.tensors))


class InputMatch:
    """How the raw tensors of one request became what it offered.

    It is as true of every other that says the same of its tensors, and has as many bytes.

    Args:
        contract: That they were held against.
        lengths: Bytes of each raw tensor.
        order: Number of the raw tensor that each input is.
        offered: What came of them.
    """

    __slots__ = ("_bucket", "_lengths", "_order", "_rows", "contract")

    def __init__(
        self, contract: Contract, lengths: list[int], order: list[int], offered: RequestTensors
    ) -> None:
        self.contract = contract
        self._lengths = lengths
        self._order = order
        self._rows = offered.rows
        self._bucket = offered.bucket

    def offered(self, raw: list[memoryview]) -> RequestTensors | None:
        """What a request offers with these tensors; None where they are not of the same length."""
        if len(raw) != len(self._lengths):
            return None
        for number, length in enumerate(self._lengths):
            if len(raw[number]) != length:
                return None
        return RequestTensors(self._rows, [raw[number] for number in self._order], self._bucket)


def match_inputs(
    contract: Contract, raw: list[memoryview], offered: RequestTensors
) -> InputMatch | None:
    """How raw tensors fitted; None where some did not become an input as they were."""
    numbers = {id(tensor): number for number, tensor in enumerate(raw)}
    order = [numbers[id(tensor)] for tensor in offered.tensors if id(tensor) in numbers]
    if len(order) < len(offered.tensors):
        return None
    return InputMatch(contract, list(map(len, raw)), order, offered)


def take(contract: Contract, tensors: list[Tensor], limits: LimitsConfig) -> RequestTensors:
    """Find each of the contract's inputs among the tensors; all of them have the same rows.

    Raises:
        ContractError: One is missing, not an input, there twice, or of another type or shape.
        MalformedInput: One has not the bytes that its shape says, or a negative number of rows.
        LimitExceeded: Rows or bytes.
    """
    offered = {tensor.name: tensor for tensor in tensors}
    bucket = 0
    if contract.sources:
        bucket, contract = _of_bucket(contract, offered)
    if len(offered) < len(tensors) or len(offered) != len(contract.inputs):
        raise _misnamed(contract, tensors)
    rows = -1
    buffers = []
    strings: list[memoryview] = []
    for spec in contract.inputs:
        tensor = offered.get(spec.tensor)
        if tensor is None:
            raise _misnamed(contract, tensors)
        if rows < 0 and tensor.shape:
            rows = tensor.shape[0]
            _require_limits(rows, tensors, limits)
        dtype = spec.type.dtype
        bits = dtype.arrow_bits
        if tensor.shape != (rows, *spec.shape) or tensor.datatype != dtype.oip:
            raise _misfit(spec, tensor, rows)
        if not bits:
            buffers.append(_offsets(spec, tensor))
            strings.append(tensor.data[len(buffers[-1]) :])
            continue
        wanted = rows * spec.elements * max(bits // 8, 1)
        if len(tensor.data) != wanted:
            raise MalformedInput(
                f"input `{spec.tensor}` of the shape {list(tensor.shape)} has {wanted} bytes as "
                f"{tensor.datatype}, got {len(tensor.data)}",
                tensor=spec.tensor,
            )
        buffers.append(_packed(tensor.data) if bits == 1 else tensor.data)
    if strings:
        require_string_bytes(sum(map(len, strings)), limits)
    return RequestTensors(rows, buffers + strings, bucket)


def places(contract: Contract, rows: int) -> list[tuple[int, int]] | None:
    """Where each result begins and ends in a body; None where `give` makes some of them first."""
    if any(spec.type.dtype.arrow_bits <= 1 for spec in contract.outputs):
        return None
    offsets = body_layout(contract.outputs, rows)[0]
    return [
        (offset, offset + spec.buffer_bytes(rows))
        for spec, offset in zip(contract.outputs, offsets, strict=True)
    ]


def give(contract: Contract, rows: int, body: bytes | memoryview) -> list[Tensor]:
    """The results in a body, each under its tensor's name; a copy of booleans and strings only."""
    view = memoryview(body)
    given = []
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
            data = _unpacked(data, rows * spec.elements)
        given.append(Tensor(spec.tensor, dtype.oip, (rows, *spec.shape), data))
    return given


def _of_bucket(contract: Contract, offered: dict[str, Tensor]) -> tuple[int, Contract]:
    """The bucket that tensors are as long as, and its contract; of no bucket's length, the last."""
    buckets, long = buckets_of(contract), bucketed_tensors(contract)
    shapes = [offered[name].shape for name in long if name in offered]
    length = next((shape[1] for shape in shapes if len(shape) > 1), 0)
    number = buckets.index(length) if length in buckets else max(len(buckets) - 1, 0)
    return number, variants(contract)[number]


def _offsets(spec: TensorSpec, tensor: Tensor) -> memoryview:
    """The offsets of a tensor of strings, which have been found to be true of its bytes.

    Raises:
        MalformedInput: It has not the offsets and bytes that its shape says.
        ContractError: A string is not UTF-8.
    """
    data, count = tensor.data, tensor.shape[0] * spec.elements
    offsets = data[: (count + 1) * OFFSET_BYTES]
    joined = data[len(offsets) :]
    if int.from_bytes(offsets[count * OFFSET_BYTES :], "little") != len(joined):
        raise MalformedInput(
            f"input `{spec.tensor}` has not the {count} strings of the shape {list(tensor.shape)}",
            tensor=spec.tensor,
        )
    require_strings(f"input `{spec.tensor}`", count, offsets, joined)
    return offsets


def _packed(data: memoryview) -> memoryview:
    return np.packbits(np.frombuffer(data, np.bool_), bitorder="little").data


def _unpacked(data: memoryview, count: int) -> memoryview:
    return np.unpackbits(np.frombuffer(data, np.uint8), count=count, bitorder="little").data


def _misnamed(contract: Contract, tensors: list[Tensor]) -> ContractError:
    """What is wrong with the tensors' names: the first of it."""
    wanted = {spec.tensor: None for spec in contract.inputs}
    got = Counter(tensor.name for tensor in tensors)
    problems = chain(
        (f"input `{name}` is missing" for name in wanted if name not in got),
        (f"`{name[:NAME_MAX]}` is no input of the model" for name in got if name not in wanted),
        (f"input `{name[:NAME_MAX]}` is there twice" for name in got if got[name] > 1),
    )
    return ContractError("; ".join(islice(problems, PROBLEMS_MAX)))


def _require_limits(rows: int, tensors: list[Tensor], limits: LimitsConfig) -> None:
    if rows < 0:
        raise MalformedInput(f"a tensor's first axis is its rows, got {rows}")
    if rows > limits.rows:
        raise LimitExceeded(f"a batch may have {limits.rows} rows, got {rows}", wanted=limits.rows)
    total = sum(len(tensor.data) for tensor in tensors)
    if total > limits.bytes:
        raise LimitExceeded(f"a batch may have {limits.bytes} bytes, got {total}")


def _misfit(spec: TensorSpec, tensor: Tensor, rows: int) -> ContractError:
    wanted = ["rows" if rows < 0 else rows, *spec.shape]
    return ContractError(
        f"input `{spec.tensor}`: wanted {spec.type.dtype.oip} {_listed(wanted)}, got "
        f"{tensor.datatype[:20]} {_listed(list(tensor.shape))}",
        tensor=spec.tensor,
    )


def _listed(shape: list[int | str] | list[int]) -> str:
    return "[" + ", ".join(map(str, shape[:20])) + "]"
