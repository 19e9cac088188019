"""Parsed ModelInferRequest: model, terms, inputs and requested outputs.

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
from iskander.gateway.protocols.oip.tensors import (
    AT_ONCE,
    AT_ONCE_BYTES,
    NOTHING,
    STRINGS,
    Described,
    has_input_names,
    read_tensor,
    strings_max,
)
from iskander.gateway.protocols.oip.terms import parse_terms
from iskander.gateway.protocols.oip.typed import are_slow, require_typed, typed_bytes, typed_tensors
from iskander.gateway.protocols.oip.wire import Scanned
from iskander.gateway.protocols.tensors import NAME_MAX, Tensor
from iskander.gateway.protocols.terms import ClientTerms

COPIES: Final = 3
"""Peak memory of a conversion in copies: separate elements, joined elements, and their offsets."""
FINAL_FLAG: Final = "triton_enable_empty_final_response"
_REGION: Final = "shared_memory_region"
_CLASSES: Final = "classification"
_AXES_MAX: Final = RANK_MAX + 1


class ParsedRequest(NamedTuple):
    """A request without its id and its tensors' bytes.

    Attributes:
        version: None for the default version.
        terms: The terms in its parameters; None if there are none.
        inputs: Name, datatype and shape of each.
        strings: Strings in its inputs by their shapes; -1 if no input has strings.
        outputs: The requested outputs, in this order; empty for all.
        needs_final_flag: In a stream, each final response must be flagged as final.
    """

    model: str
    version: str | None
    terms: ClientTerms | None
    inputs: list[Described]
    strings: int
    outputs: tuple[str, ...]
    needs_final_flag: bool


def read_head(head: bytes, columns: int) -> ParsedRequest:
    """Parse the `head` of `Scanned`, with at most `columns` inputs, outputs and parameters.

    Raises:
        MalformedInput: The message is invalid, or mixes raw and typed contents.
        LimitExceeded: It has too many inputs, outputs or parameters, or a tensor too many axes.
        ContractError: It requests an output twice.
        Unsupported: It requests shared memory, classification or a sequence.
    """
    try:
        message = oip_pb2.ModelInferRequest.FromString(head)
    except (DecodeError, UnicodeDecodeError):
        raise MalformedInput("the message is not a ModelInferRequest") from None
    for what in ("inputs", "outputs", "parameters"):
        require_columns(what, len(getattr(message, what)), columns)
    parameters = plain(message.parameters)
    inputs = []
    for tensor in message.inputs:
        where = f"input `{tensor.name[:NAME_MAX]}`"
        if _REGION in tensor.parameters:
            raise Unsupported(f"{where}: the server does not read shared memory")
        if len(tensor.shape) > _AXES_MAX:
            raise LimitExceeded(f"{where} has {len(tensor.shape)} axes, limit {_AXES_MAX}")
        if tensor.HasField("contents"):
            raise MalformedInput(
                f"{where} has typed contents beside raw ones; all inputs need the same form"
            )
        inputs.append((tensor.name, tensor.datatype, tuple(tensor.shape)))
    strings = [shape for _, datatype, shape in inputs if datatype == STRINGS]
    outputs: dict[str, None] = {}
    for output in message.outputs:
        where = f"output `{output.name[:NAME_MAX]}`"
        if _REGION in output.parameters:
            raise Unsupported(f"{where}: the server does not write shared memory")
        if _CLASSES in output.parameters:
            raise Unsupported(f"{where}: classification is not supported")
        if output.name in outputs:
            raise ContractError(f"{where} is requested twice")
        outputs[output.name] = None
    return ParsedRequest(
        message.model_name,
        message.model_version or None,
        parse_terms(parameters),
        inputs,
        max(sum(prod(shape) for shape in strings), 0) if strings else -1,
        tuple(outputs),
        parameters.get(FINAL_FLAG) is True,
    )


def require_columns(what: str, count: int, columns: int) -> None:
    """Raise LimitExceeded if a request has more inputs, outputs or parameters than columns."""
    if count > columns:
        raise LimitExceeded(f"request has {count} {what}, limit {columns} (`limits.columns`)")


def tensors_of(
    parsed: ParsedRequest, scanned: Scanned, contract: Contract, limits: LimitsConfig
) -> list[Tensor]:
    """Return the request's tensors with their bytes, which are all raw or all typed.

    Tensors that fit no input of the contract get no elements: `read_inputs` rejects them.
    """
    inputs, raw, typed = parsed.inputs, scanned.raw, scanned.typed
    if raw and len(raw) != len(inputs):
        raise MalformedInput(f"{len(raw)} raw contents for {len(inputs)} inputs, expected one each")
    if typed:
        require_typed(inputs, limits)
    has_strings = parsed.strings >= 0
    if (has_strings or typed) and not has_input_names((name for name, _, _ in inputs), contract):
        return [Tensor(*described, NOTHING) for described in inputs]
    if typed:
        return typed_tensors(inputs, typed, contract, limits)
    most = strings_max(contract, limits) if has_strings else 0
    return [
        read_tensor(*described, raw[index] if raw else NOTHING, most)
        for index, described in enumerate(inputs)
    ]


def is_for_thread(parsed: ParsedRequest, scanned: Scanned) -> bool:
    """Return whether reading the tensors would block the event loop for too long."""
    if scanned.typed:
        return are_slow(parsed.inputs, scanned.typed)
    if parsed.strings < 0:
        return False
    return parsed.strings > AT_ONCE or sum(map(len, scanned.raw)) > AT_ONCE_BYTES


def copied_bytes(parsed: ParsedRequest, scanned: Scanned) -> int:
    """Return the peak memory for reading the tensors, beside the message."""
    if scanned.typed:
        return COPIES * (typed_bytes(parsed.inputs) + sum(map(len, scanned.typed.values())))
    return COPIES * sum(map(len, scanned.raw))


def plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Convert parameters to plain values; one without a value is None."""
    values = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        values[name] = None if choice is None else getattr(parameter, choice)
    return values
