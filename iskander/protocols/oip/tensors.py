"""Tensors in the raw form of the Open Inference Protocol, and what a contract lets them be.

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
from iskander.protocols.tensors import NAME_MAX, Tensor

AT_ONCE: Final = 16_384
"""So many strings take a few milliseconds; more are for a thread."""
AT_ONCE_BYTES: Final = 1 << 20
"""The same of their bytes."""
LENGTH_BYTES: Final = 4


def raw_strings(values: Iterable[bytes]) -> bytes:
    """Strings in the raw form."""
    return b"".join(chain.from_iterable((struct.pack("<I", len(each)), each) for each in values))


def raw_to_body(raw: memoryview, count: int) -> memoryview:
    """As `strings_to_body`, of strings in the raw form; 0.3 us of CPU for each.

    Args:
        raw: In single bytes.
        count: How many there are by the tensor's shape.

    Raises:
        MalformedInput: There are more or fewer, or the last one is cut short.
    """
    end = len(raw)
    if count < 0:
        raise MalformedInput(f"a shape of {count} strings")
    if count * LENGTH_BYTES > end:
        raise MalformedInput(f"{count} strings take more than {end} bytes")
    # Of the bytes as whole numbers, beginning at each of the four places of one.
    numbers = [
        raw[shift : shift + max(end - shift, 0) // LENGTH_BYTES * LENGTH_BYTES].cast("I")
        for shift in range(LENGTH_BYTES)
    ]
    stops, at = array("I"), 0
    for _ in range(count):
        if at + LENGTH_BYTES > end:
            raise MalformedInput(f"wanted {count} strings, the bytes end after {len(stops)}")
        at += LENGTH_BYTES + numbers[at % LENGTH_BYTES][at // LENGTH_BYTES]
        if at > end:
            raise MalformedInput(f"string {len(stops)} of {count} is cut short")
        stops.append(at)
    if at != end:
        raise MalformedInput(f"{end - at} bytes are left after {count} strings")
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
        for place in range(LENGTH_BYTES):
            is_text[starts + place] = False
        texts[offsets[first] : offsets[last]] = piece[is_text]
        begin = int(ends[-1])
    return body.data


def body_to_raw(body: memoryview, count: int) -> memoryview:
    """The raw form of so many strings in the form of `strings_to_body`."""
    if not count:
        return memoryview(b"")
    begin = (count + 1) * OFFSET_BYTES
    offsets = np.frombuffer(body[:begin], np.int32).astype(np.int64)
    texts = np.frombuffer(body[begin:], np.uint8)[: offsets[-1]]
    raw = np.empty(count * LENGTH_BYTES + len(texts), np.uint8)
    is_text = np.ones(len(raw), np.bool_)
    starts = offsets[:-1] + np.arange(count) * LENGTH_BYTES
    lengths = np.diff(offsets).astype(np.uint32).view(np.uint8).reshape(count, LENGTH_BYTES)
    for place in range(LENGTH_BYTES):
        is_text[starts + place] = False
        raw[starts + place] = lengths[:, place]
    raw[is_text] = texts
    return raw.data


STRINGS: Final = "BYTES"
NOTHING: Final = memoryview(b"")

Described: TypeAlias = tuple[str, str, tuple[int, ...]]
"""Name, datatype and shape of a tensor."""


def are_named(names: Iterable[str], contract: Contract) -> bool:
    """Whether these are the contract's inputs, each once: if not, no element is worth a look."""
    got = list(names)
    return len(got) == len(contract.inputs) and set(got) == {
        spec.tensor for spec in contract.inputs
    }


def strings_max(contract: Contract, limits: LimitsConfig) -> int:
    """How many strings a tensor may have that some input of the contract could take."""
    elements = [spec.elements for spec in contract.inputs if spec.is_string]
    return limits.rows * max(elements, default=0)


def tensor_of(
    name: str, datatype: str, shape: tuple[int, ...], raw: memoryview, most: int
) -> Tensor:
    """A tensor whose elements came in the raw form.

    Args:
        name: Of the tensor.
        datatype: As the protocol names it.
        shape: As it was said.
        raw: Its elements.
        most: `strings_max`. One with more strings is left as it came, since it fits no contract.

    Raises:
        MalformedInput: It is of strings, and they are not as many as the shape says.
    """
    if datatype == STRINGS and prod(shape) <= most:
        try:
            raw = raw_to_body(raw, prod(shape))
        except MalformedInput as error:
            raise MalformedInput(f"tensor `{name[:NAME_MAX]}`: {error.message}") from None
    return Tensor(name, datatype, shape, raw)


def raw_tensor(tensor: Tensor) -> memoryview:
    """A tensor's elements in the raw form."""
    if tensor.datatype == STRINGS:
        return body_to_raw(tensor.data, prod(tensor.shape))
    return tensor.data
