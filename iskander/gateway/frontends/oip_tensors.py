"""Tensors in the raw form of the Open Inference Protocol, and what a contract lets them be.

Pure. Source: Open Inference Protocol v2; Triton's binary tensor data.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Final, TypeAlias

from iskander.config import LimitsConfig
from iskander.contract.tensors import Contract
from iskander.errors import MalformedInput
from iskander.gateway.frontends.oip_strings import body_to_raw, raw_to_body
from iskander.gateway.offered import NAME_MAX, Tensor

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
