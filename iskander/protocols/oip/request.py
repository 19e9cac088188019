"""What an Open Inference Protocol request asks for: the model, the terms, the tensors in and out.

Pure. Source: Open Inference Protocol v2, `ModelInferRequest`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from iskander._generated import oip_pb2
from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import RANK_MAX
from iskander.contract.tensors import Contract
from iskander.errors import ContractError, LimitExceeded, MalformedInput, Unsupported
from iskander.protocols.oip.tensors import (
    AT_ONCE,
    AT_ONCE_BYTES,
    NOTHING,
    STRINGS,
    Described,
    are_named,
    strings_max,
    tensor_of,
)
from iskander.protocols.oip.terms import said_in
from iskander.protocols.oip.typed import are_slow, require_typed, typed_bytes, typed_tensors
from iskander.protocols.oip.wire import Scanned
from iskander.protocols.tensors import NAME_MAX, Tensor
from iskander.protocols.terms import ClientTerms

COPIES: Final = 3
"""Of tensors that are taken apart: their elements in pieces, joined, and what finds their ends."""
FINAL_WANTED: Final = "triton_enable_empty_final_response"
_REGION: Final = "shared_memory_region"
_CLASSES: Final = "classification"
_AXES_MAX: Final = RANK_MAX + 1


class ParsedRequest(NamedTuple):
    """A request but for its id and its tensors' bytes.

    Attributes:
        version: None where the highest is meant.
        said: What it says about its urgency; None where that is nothing.
        inputs: Name, datatype and shape of each.
        strings: How many its inputs have by their shapes; -1 where none is of strings.
        outputs: Those that it wants, in this order; empty for all.
        wants_final: In a stream, it wants to be told that a response is the last of its request.
    """

    model: str
    version: str | None
    said: ClientTerms | None
    inputs: list[Described]
    strings: int
    outputs: tuple[str, ...]
    wants_final: bool


def read_head(head: bytes, columns: int) -> ParsedRequest:
    """Read a request.

    Args:
        head: A serialized ModelInferRequest, as `Scanned` has it.
        columns: As many inputs, outputs and parameters it may have.

    Raises:
        MalformedInput: It is none, its inputs are raw and typed, or a parameter is not what it may
            be.
        LimitExceeded: It has more, or a tensor has more axes than any has.
        ContractError: It wants an output twice.
        Unsupported: It wants shared memory, classes or a sequence.
    """
    try:
        message = oip_pb2.ModelInferRequest.FromString(head)
    except (DecodeError, UnicodeDecodeError):
        raise MalformedInput("the message is not a ModelInferRequest") from None
    for what in ("inputs", "outputs", "parameters"):
        count = len(getattr(message, what))
        if count > columns:
            raise LimitExceeded(f"a request may have {columns} {what}, got {count}")
    parameters = plain(message.parameters)
    inputs = []
    for tensor in message.inputs:
        where = f"input `{tensor.name[:NAME_MAX]}`"
        if _REGION in tensor.parameters:
            raise Unsupported(f"{where}: this server reads no shared memory")
        if len(tensor.shape) > _AXES_MAX:
            raise LimitExceeded(f"{where} may have {_AXES_MAX} axes, got {len(tensor.shape)}")
        if tensor.HasField("contents"):
            raise MalformedInput(
                f"{where} has typed contents beside raw ones; all inputs have one form"
            )
        inputs.append((tensor.name, tensor.datatype, tuple(tensor.shape)))
    strings = [shape for _, datatype, shape in inputs if datatype == STRINGS]
    outputs = tuple(output.name for output in message.outputs)
    seen = set()
    for output in message.outputs:
        where = f"output `{output.name[:NAME_MAX]}`"
        if _REGION in output.parameters:
            raise Unsupported(f"{where}: this server writes no shared memory")
        if _CLASSES in output.parameters:
            raise Unsupported(f"{where}: classes are the client's to choose")
        if output.name in seen:
            raise ContractError(f"{where} is wanted twice")
        seen.add(output.name)
    return ParsedRequest(
        message.model_name,
        message.model_version or None,
        said_in(parameters),
        inputs,
        max(sum(prod(shape) for shape in strings), 0) if strings else -1,
        outputs,
        parameters.get(FINAL_WANTED) is True,
    )


def tensors_of(
    asked: ParsedRequest, scanned: Scanned, contract: Contract, limits: LimitsConfig
) -> list[Tensor]:
    """The request's tensors with their bytes, which are all raw or all typed.

    Args:
        asked: The request.
        scanned: With its bytes.
        contract: Of the model that it is for. What fits none of its inputs is not looked at, and
            nothing where they are not its inputs: `offered.take` says what is wrong.
        limits: Of the server.

    Raises:
        MalformedInput: They are not as many as there are inputs, or not what they may be.
        LimitExceeded: Strings or typed contents are more than is taken.
    """
    inputs, raw, typed = asked.inputs, scanned.raw, scanned.typed
    if raw and len(raw) != len(inputs):
        raise MalformedInput(
            f"{len(inputs)} inputs and {len(raw)} raw contents; wanted one for each"
        )
    if typed:
        require_typed(inputs, limits)
    has_strings = asked.strings >= 0
    if (has_strings or typed) and not are_named((name for name, _, _ in inputs), contract):
        return [Tensor(*described, NOTHING) for described in inputs]
    if typed:
        return typed_tensors(inputs, typed, contract, limits)
    most = strings_max(contract, limits) if has_strings else 0
    return [
        tensor_of(*described, raw[place] if raw else NOTHING, most)
        for place, described in enumerate(inputs)
    ]


def is_for_thread(asked: ParsedRequest, scanned: Scanned) -> bool:
    """Whether reading its tensors takes so long that others would wait for it."""
    if scanned.typed:
        return are_slow(asked.inputs, scanned.typed)
    if asked.strings < 0:
        return False
    return asked.strings > AT_ONCE or sum(map(len, scanned.raw)) > AT_ONCE_BYTES


def is_copied(asked: ParsedRequest, scanned: Scanned) -> bool:
    """Whether its tensors are read into memory of their own; others stay in the message."""
    return bool(scanned.typed) or asked.strings >= 0


def copied_bytes(asked: ParsedRequest, scanned: Scanned) -> int:
    """Memory that reading its tensors takes beside the message, at most, for a time."""
    if scanned.typed:
        return COPIES * (typed_bytes(asked.inputs) + sum(map(len, scanned.typed.values())))
    return COPIES * sum(map(len, scanned.raw))


def plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as plain values; one without a value is None."""
    read = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        read[name] = None if choice is None else getattr(parameter, choice)
    return read
