"""Raw tensors of the Open Inference Protocol: string conversion and limits of a contract.

Pure. Source: Open Inference Protocol v2; Triton's binary tensor data.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from itertools import chain
from math import prod
from typing import Final, TypeAlias

import numpy as np

from iskander.config.schema import LimitsConfig
from iskander.contract.dtypes import OFFSET_BYTES
from iskander.contract.tensors import Contract
from iskander.errors import MalformedInput
from iskander.gateway.protocols.tensors import NAME_MAX, Tensor

AT_ONCE: Final = 16_384
"""Strings that the event loop converts in a few milliseconds; more go to a thread."""
AT_ONCE_BYTES: Final = 1 << 20
"""The same limit in bytes."""
LENGTH_BYTES: Final = 4
STRINGS: Final = "BYTES"
NOTHING: Final = memoryview(b"")

Described: TypeAlias = tuple[str, str, tuple[int, ...]]
"""Name, datatype and shape of a tensor."""


def raw_strings(values: Iterable[bytes]) -> bytes:
    """Encode strings in the raw form: each one after its length, four bytes, little-endian."""
    return b"".join(chain.from_iterable((struct.pack("<I", len(each)), each) for each in values))


def raw_to_body(raw: memoryview, count: int) -> memoryview:
    """Convert `count` raw strings to Arrow's form: `count + 1` offsets (int32), then all texts.

    Costs 0.3 us of CPU for each string. Raises MalformedInput unless there are exactly `count`.
    """
    end = len(raw)
    if count < 0:
        raise MalformedInput(f"a shape of {count} strings is negative")
    if count * LENGTH_BYTES > end:
        raise MalformedInput(f"{count} strings need more than {end} bytes")
    # The bytes as integers, one view for each of the four alignments.
    numbers = [
        raw[shift : shift + max(end - shift, 0) // LENGTH_BYTES * LENGTH_BYTES].cast("I")
        for shift in range(LENGTH_BYTES)
    ]
    stops, at = array("I"), 0
    for _ in range(count):
        if at + LENGTH_BYTES > end:
            raise MalformedInput(f"expected {count} strings, the bytes end after {len(stops)}")
        at += LENGTH_BYTES + numbers[at % LENGTH_BYTES][at // LENGTH_BYTES]
        if at > end:
            raise MalformedInput(f"string {len(stops)} of {count} is truncated")
        stops.append(at)
    if at != end:
        raise MalformedInput(f"{end - at} bytes follow after {count} strings")
    offsets_bytes = (count + 1) * OFFSET_BYTES
    body = np.empty(offsets_bytes + end - count * LENGTH_BYTES, np.uint8)
    offsets, texts = body[:offsets_bytes].view(np.int32), body[offsets_bytes:]
    offsets[0] = 0
    data, begin = np.frombuffer(raw, np.uint8), 0
    for first in range(0, count, AT_ONCE):
        ends = np.frombuffer(stops, np.uint32)[first : first + AT_ONCE].astype(np.int64)
        last = first + len(ends)
        offsets[first + 1 : last + 1] = ends - np.arange(first + 1, last + 1) * LENGTH_BYTES
        starts = np.concatenate(([begin], ends[:-1])) - begin
        piece = data[begin : ends[-1]]
        is_text = np.ones(len(piece), np.bool_)
        for index in range(LENGTH_BYTES):
            is_text[starts + index] = False
        texts[offsets[first] : offsets[last]] = piece[is_text]
        begin = int(ends[-1])
    return body.data


def body_to_raw(body: memoryview, count: int) -> memoryview:
    """Convert `count` strings from Arrow's form, offsets and texts, to the raw form."""
    if not count:
        return NOTHING
    begin = (count + 1) * OFFSET_BYTES
    offsets = np.frombuffer(body[:begin], np.int32).astype(np.int64)
    texts = np.frombuffer(body[begin:], np.uint8)[: offsets[-1]]
    raw = np.empty(count * LENGTH_BYTES + len(texts), np.uint8)
    is_text = np.ones(len(raw), np.bool_)
    starts = offsets[:-1] + np.arange(count) * LENGTH_BYTES
    lengths = np.diff(offsets).astype(np.uint32).view(np.uint8).reshape(count, LENGTH_BYTES)
    for index in range(LENGTH_BYTES):
        is_text[starts + index] = False
        raw[starts + index] = lengths[:, index]
    raw[is_text] = texts
    return raw.data


def has_input_names(names: Iterable[str], contract: Contract) -> bool:
    """Return whether the names are the contract's inputs, each once."""
    return sorted(names) == sorted(spec.tensor for spec in contract.inputs)


def strings_max(contract: Contract, limits: LimitsConfig) -> int:
    """Return the most strings that a tensor of the contract's inputs may have."""
    elements = [spec.elements for spec in contract.inputs if spec.is_string]
    return limits.rows * max(elements, default=0)


def read_tensor(
    name: str, datatype: str, shape: tuple[int, ...], raw: memoryview, most: int
) -> Tensor:
    """Read a tensor in the raw form.

    A tensor with more strings than `most`, from `strings_max`, fits no contract: its elements are
    not converted.
    """
    if datatype == STRINGS and prod(shape) <= most:
        try:
            raw = raw_to_body(raw, prod(shape))
        except MalformedInput as error:
            raise MalformedInput(f"tensor `{name[:NAME_MAX]}`: {error.message}") from None
    return Tensor(name, datatype, shape, raw)


def raw_tensor(tensor: Tensor) -> memoryview:
    """Return a tensor's elements in the raw form."""
    if tensor.datatype == STRINGS:
        return body_to_raw(tensor.data, prod(tensor.shape))
    return tensor.data
