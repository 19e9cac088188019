"""Requests and answers of the Open Inference Protocol as HTTP bodies.

A body is JSON, and behind it, where the header `Inference-Header-Content-Length` says where that
ends, the tensors that are not in it, in its order. With the header at 0 the body is one tensor.

Source: Open Inference Protocol v2 and its binary tensor data extension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import RANK_MAX
from iskander.contract.tensors import Contract
from iskander.errors import ContractError, LimitExceeded, MalformedInput, Unsupported
from iskander.protocols.oip.http.json_values import read_data, require_json_form, write_data
from iskander.protocols.oip.tensors import (
    STRINGS,
    are_named,
    raw_strings,
    raw_tensor,
    strings_max,
    tensor_of,
)
from iskander.protocols.tensors import NAME_MAX, Tensor


def plain(message: Any) -> dict[str, Any]:  # noqa: ANN401
    """A message as plain values; a message within it that was not set is left out."""
    return {
        field.name: _value(getattr(message, field.name), field)
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _value(value: Any, field: Any) -> Any:  # noqa: ANN401
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        entry = kind.fields_by_name["value"]
        return {key: _single(each, entry) for key, each in value.items()}
    return [_single(each, field) for each in value] if field.is_repeated else _single(value, field)


def _single(value: Any, field: Any) -> Any:  # noqa: ANN401
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value


HEADER_LENGTH = "inference-header-content-length"
_SIZE_MAX = 2**63 - 1
_NULL = Raw(b"null")

_Size = Annotated[int, Meta(ge=0, le=_SIZE_MAX)]
_Parameters = dict[str, Any]


class _Input(msgspec.Struct):
    name: str
    datatype: str
    shape: Annotated[tuple[_Size, ...], Meta(max_length=RANK_MAX + 1)]
    parameters: _Parameters | None = None
    data: Raw | UnsetType = UNSET


class _Output(msgspec.Struct):
    name: str
    parameters: _Parameters | None = None


class _Request(msgspec.Struct):
    inputs: tuple[_Input, ...]
    outputs: tuple[_Output, ...] | None = None
    id: str | None = None
    parameters: _Parameters | None = None


_decode = msgspec.json.Decoder(_Request).decode


class RequestedOutput(NamedTuple):
    """An output that a client asks for, and in which form."""

    name: str
    is_binary: bool


class ParsedRequest(NamedTuple):
    """A request as it came.

    Attributes:
        id: Its client's name for it.
        parameters: Of the request, by name, as JSON has them.
        outputs: None for all.
        is_binary: The form of an output for which the request does not say.
    """

    tensors: list[Tensor]
    id: str = ""
    parameters: Mapping[str, Any] = MappingProxyType({})
    outputs: list[RequestedOutput] | None = None
    is_binary: bool = False


def read_request(
    body: memoryview, json_bytes: int | None, contract: Contract, limits: LimitsConfig
) -> ParsedRequest:
    """Read a body that has JSON.

    Args:
        body: The whole of it.
        json_bytes: Where the JSON ends; None where there is nothing else.
        contract: Of the model that it is for.
        limits: Of the server.

    Raises:
        MalformedInput: The JSON cannot be read, or the tensors behind it are not as long as it
            says.
        ContractError: The data of a tensor are not of its type or shape.
        LimitExceeded: There are too many tensors.
        Unsupported: A parameter asks for what is not offered here.
    """
    head = _read_json(body if json_bytes is None else body[:json_bytes])
    for what, named in (("inputs", head.inputs), ("outputs", head.outputs or ())):
        if len(named) > limits.columns:
            raise LimitExceeded(f"a request may have {limits.columns} {what}, got {len(named)}")
    most = strings_max(contract, limits)
    is_named = are_named((given.name for given in head.inputs), contract)
    tensors, offset = [], len(body) if json_bytes is None else json_bytes
    for given in head.inputs:
        length = _binary_bytes(given)
        raw = body[offset : offset + (length or 0)]
        if length is not None and len(raw) < length:
            raise MalformedInput(
                f"input `{given.name}` has {length} bytes by its `binary_data_size`, and the "
                f"body ends after {len(raw)} of them",
                tensor=given.name,
            )
        offset += len(raw)
        described = given.name, given.datatype, given.shape
        if not is_named:  # `offered.take` says what is wrong, and looks at none of them.
            tensors.append(Tensor(*described, memoryview(b"")))
        elif length is not None:
            tensors.append(tensor_of(*described, raw, most))
        else:
            assert isinstance(given.data, Raw)
            tensors.append(Tensor(*described, memoryview(read_data(*described, given.data))))
    if offset != len(body):
        raise MalformedInput(f"the body goes on for {len(body) - offset} bytes behind its tensors")
    parameters = _set(head.parameters)
    is_binary = _flag(parameters, "binary_data_output", "the request", otherwise=False)
    outputs = [_wanted(output, is_binary) for output in head.outputs or ()] or None
    return ParsedRequest(tensors, head.id or "", parameters, outputs, is_binary)


def read_raw(contract: Contract, body: memoryview) -> ParsedRequest:
    """Read a body that is one tensor: the model's only input, its elements one after the other.

    All results go back in binary form.

    Raises:
        ContractError: The model has several inputs, or the bytes are not those of whole rows.
    """
    if len(contract.inputs) != 1:
        raise ContractError(
            f"the model has {len(contract.inputs)} inputs; a body without JSON is one tensor"
        )
    spec = contract.inputs[0]
    dtype, shape = spec.type.dtype, (1, *spec.shape)
    if dtype.oip == STRINGS and spec.elements == 1:
        # The length that every other binary form has before a string is the body's own here.
        body = memoryview(raw_strings([bytes(body)]))
    else:
        row_bytes = spec.elements * max(dtype.arrow_bits // 8, 1)
        rows, rest = divmod(len(body), row_bytes)
        if rest or dtype.oip == STRINGS:
            raise ContractError(
                f"input `{spec.tensor}` has {row_bytes} bytes a row, got {len(body)} bytes",
                tensor=spec.tensor,
            )
        shape = (rows, *spec.shape)
    tensor = tensor_of(spec.tensor, dtype.oip, shape, body, most=1)
    return ParsedRequest([tensor], is_binary=True)


def choose(
    contract: Contract, asked: ParsedRequest, rows: int, json_bytes_max: int
) -> list[RequestedOutput]:
    """The outputs to answer, in the order asked for; decided before anything is computed.

    Raises:
        ContractError: One is not the model's, is there twice, or has no form as asked.
        LimitExceeded: They would be too long as JSON.
    """
    specs = {spec.tensor: spec for spec in contract.outputs}
    chosen = asked.outputs
    if chosen is None:
        chosen = [RequestedOutput(name, asked.is_binary) for name in specs]
    seen: set[str] = set()
    json_bytes = 0
    for name, is_binary in chosen:
        spec = specs.get(name)
        if spec is None:
            raise ContractError(
                f"`{name[:NAME_MAX]}` is no output of the model, which has {', '.join(specs)}",
                tensor=name,
            )
        if name in seen:
            raise ContractError(f"output `{name}` is asked for twice", tensor=name)
        seen.add(name)
        if not is_binary:
            require_json_form(name, spec.type.dtype.oip)
            json_bytes += spec.buffer_bytes(rows)
    _require_json_room(json_bytes, json_bytes_max)
    return chosen


def write_answer(
    model: tuple[str, str],
    asked: ParsedRequest,
    given: Sequence[Tensor],
    chosen: Sequence[RequestedOutput],
    json_bytes_max: int,
) -> tuple[list[bytes | memoryview], int | None]:
    """The answer to a request.

    Args:
        model: Its name and version.
        asked: The request.
        given: All of the model's results.
        chosen: Those to answer.
        json_bytes_max: Bytes of results that may be put into JSON.

    Returns:
        The body in parts, and how long its JSON is where there is more than that.

    Raises:
        ContractError: A result cannot be written as JSON.
        LimitExceeded: Strings are too long for it; only now is it known how long they are.
    """
    by_name = {tensor.name: tensor for tensor in given}
    _require_json_room(
        sum(len(by_name[name].data) for name, is_binary in chosen if not is_binary), json_bytes_max
    )
    outputs, parts = [], []
    for wanted, is_binary in chosen:
        tensor = by_name[wanted]
        output: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
        }
        if is_binary:
            raw = raw_tensor(tensor)
            output["parameters"] = {"binary_data_size": len(raw)}
            parts.append(raw)
        else:
            output["data"] = write_data(tensor)
        outputs.append(output)
    answer: dict[str, Any] = dict(zip(("model_name", "model_version"), model, strict=True))
    if asked.id:
        answer["id"] = asked.id
    head = msgspec.json.encode(answer | {"outputs": outputs})
    return [head, *parts], len(head) if parts else None


def _require_json_room(count: int, most: int) -> None:
    if count > most:
        raise LimitExceeded(
            f"the results have {count} bytes and may have {most} as JSON: ask for binary data",
            wanted=most,
        )


def _read_json(raw: memoryview) -> _Request:
    """What is null in a request is as if it were not there."""
    try:
        return _decode(raw)
    except msgspec.ValidationError as error:
        raise MalformedInput(f"the request's JSON: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = ""
        if any(word in bytes(raw) for word in (b"NaN", b"Infinity")):
            hint = ' (NaN and Infinity are no JSON: write them as "NaN", or send binary data)'
        raise MalformedInput(f"the request's JSON cannot be read: {error}{hint}") from None


def _binary_bytes(given: _Input) -> int | None:
    """How many bytes behind the JSON are this input's; None where it has them in the JSON."""
    parameters = _set(given.parameters)
    if "shared_memory_region" in parameters:
        raise Unsupported(f"input `{given.name}`: shared memory of clients is not taken here")
    length = parameters.get("binary_data_size")
    has_data = given.data is not UNSET and given.data != _NULL
    if length is None:
        if not has_data:
            raise MalformedInput(
                f"input `{given.name}` has neither `data` nor `binary_data_size`", tensor=given.name
            )
        return None
    if has_data:
        raise MalformedInput(
            f"input `{given.name}` has `data` and `binary_data_size`", tensor=given.name
        )
    if type(length) is not int or not 0 <= length <= _SIZE_MAX:
        raise MalformedInput(
            f"input `{given.name}`: `binary_data_size` is no number of bytes", tensor=given.name
        )
    return length


def _wanted(output: _Output, is_binary: bool) -> RequestedOutput:
    parameters = _set(output.parameters)
    if "shared_memory_region" in parameters:
        raise Unsupported(f"output `{output.name}`: shared memory of clients is not written here")
    if parameters.get("classification"):
        raise Unsupported(f"output `{output.name}`: classification is not offered")
    where = f"output `{output.name}`"
    return RequestedOutput(
        output.name, _flag(parameters, "binary_data", where, otherwise=is_binary)
    )


def _set(parameters: _Parameters | None) -> _Parameters:
    """Those that have a value; many clients write null for what they leave open."""
    return {name: value for name, value in (parameters or {}).items() if value is not None}


def _flag(parameters: _Parameters, name: str, where: str, *, otherwise: bool) -> bool:
    value = parameters.get(name, otherwise)
    if not isinstance(value, bool):
        raise MalformedInput(f"{where}: `{name}` is true or false")
    return value
