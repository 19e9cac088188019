"""Requests and answers of the Open Inference Protocol as HTTP bodies.

A body is JSON, followed by the binary tensors in the order of the JSON. The header
`Inference-Header-Content-Length` gives the length of the JSON; with 0 the body is one tensor.

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
from iskander.gateway.protocols.oip.http.json_bounds import CHECKED_BYTES, require_members
from iskander.gateway.protocols.oip.http.json_values import read_data, require_json_form, write_data
from iskander.gateway.protocols.oip.request import require_columns
from iskander.gateway.protocols.oip.tensors import (
    NOTHING,
    STRINGS,
    has_input_names,
    raw_strings,
    raw_tensor,
    read_tensor,
    strings_max,
)
from iskander.gateway.protocols.tensors import NAME_MAX, Tensor


def plain(message: Any) -> dict[str, Any]:  # noqa: ANN401
    """Convert a message to plain values, without unset messages in it."""
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
_Parameters = dict[str, bool | int | float | str | None]
"""Values of parameters are scalars in the protocol; containers could cost 20 times their bytes."""


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
    """A requested output and its form."""

    name: str
    is_binary: bool


class ParsedRequest(NamedTuple):
    """A request; `outputs` is None for all, `is_binary` the default form of outputs."""

    tensors: list[Tensor]
    id: str = ""
    parameters: Mapping[str, Any] = MappingProxyType({})
    outputs: list[RequestedOutput] | None = None
    is_binary: bool = False


def read_request(
    body: memoryview, json_bytes: int | None, contract: Contract, limits: LimitsConfig
) -> ParsedRequest:
    """Read a body that begins with `json_bytes` of JSON; None if all of it is JSON.

    Raises:
        MalformedInput: The JSON is invalid, or a binary tensor has another length.
        ContractError: A tensor's data has another type or shape.
        LimitExceeded: There are too many tensors.
        Unsupported: A parameter requests an unsupported feature.
    """
    text = body if json_bytes is None else body[:json_bytes]
    if len(text) > CHECKED_BYTES:
        require_members(text, limits.columns)
    head = _read_json(text)
    require_columns("inputs", len(head.inputs), limits.columns)
    require_columns("outputs", len(head.outputs or ()), limits.columns)
    most = strings_max(contract, limits)
    has_names = has_input_names((entry.name for entry in head.inputs), contract)
    tensors, offset = [], len(body) if json_bytes is None else json_bytes
    for entry in head.inputs:
        length = _binary_bytes(entry)
        raw = body[offset : offset + (length or 0)]
        if length is not None and len(raw) < length:
            raise _malformed(
                entry, f"`binary_data_size` is {length}, but the body ends after {len(raw)} bytes"
            )
        offset += len(raw)
        described = entry.name, entry.datatype, entry.shape
        if not has_names:  # `read_inputs` rejects them by name.
            tensors.append(Tensor(*described, NOTHING))
        elif length is not None:
            tensors.append(read_tensor(*described, raw, most))
        else:
            assert isinstance(entry.data, Raw)
            tensors.append(Tensor(*described, memoryview(read_data(*described, entry.data))))
    if offset != len(body):
        raise MalformedInput(f"{len(body) - offset} bytes follow after the body's tensors")
    parameters = _with_value(head.parameters)
    is_binary = _flag(parameters, "binary_data_output", "the request", default=False)
    outputs = [_requested(output, is_binary) for output in head.outputs or ()] or None
    return ParsedRequest(tensors, head.id or "", parameters, outputs, is_binary)


def read_raw(contract: Contract, body: memoryview) -> ParsedRequest:
    """Read a body that is one tensor, the model's only input; all results will be binary."""
    if len(contract.inputs) != 1:
        raise ContractError(
            f"a body without JSON is one tensor, and the model has {len(contract.inputs)} inputs"
        )
    spec = contract.inputs[0]
    dtype, shape = spec.type.dtype, (1, *spec.shape)
    if dtype.oip == STRINGS and spec.elements == 1:
        # Here the string has no length prefix: its length is the body's.
        body = memoryview(raw_strings([bytes(body)]))
    else:
        row_bytes = spec.elements * max(dtype.arrow_bits // 8, 1)
        rows, rest = divmod(len(body), row_bytes)
        if rest or dtype.oip == STRINGS:
            raise ContractError(
                f"input `{spec.tensor}` needs {row_bytes} bytes a row, got {len(body)} bytes",
                tensor=spec.tensor,
            )
        shape = (rows, *spec.shape)
    tensor = read_tensor(spec.tensor, dtype.oip, shape, body, most=1)
    return ParsedRequest([tensor], is_binary=True)


def select_outputs(
    contract: Contract, parsed: ParsedRequest, rows: int, json_bytes_max: int
) -> list[RequestedOutput]:
    """Choose and check the outputs to answer, in the requested order, before the model runs."""
    specs = {spec.tensor: spec for spec in contract.outputs}
    chosen = parsed.outputs or [RequestedOutput(name, parsed.is_binary) for name in specs]
    seen: set[str] = set()
    json_bytes = 0
    for name, is_binary in chosen:
        spec = specs.get(name)
        if spec is None:
            raise ContractError(
                f"`{name[:NAME_MAX]}` is not an output of the model; it has {', '.join(specs)}",
                tensor=name,
            )
        if name in seen:
            raise ContractError(f"output `{name}` is requested twice", tensor=name)
        seen.add(name)
        if not is_binary:
            require_json_form(name, spec.type.dtype.oip)
            json_bytes += spec.buffer_bytes(rows)
    _require_json_bytes(json_bytes, json_bytes_max)
    return chosen


def write_answer(
    model: tuple[str, str],
    parsed: ParsedRequest,
    results: Sequence[Tensor],
    chosen: Sequence[RequestedOutput],
    json_bytes_max: int,
) -> tuple[list[bytes | memoryview], int | None]:
    """Write the answer to a request; `model` is name and version, `chosen` are the outputs.

    Returns:
        The body in parts, and the length of its JSON if binary tensors follow.

    Raises:
        ContractError: A result has no JSON form.
        LimitExceeded: Strings, whose length is known only now, are too long for JSON.
    """
    by_name = {tensor.name: tensor for tensor in results}
    json_bytes = sum(len(by_name[name].data) for name, is_binary in chosen if not is_binary)
    _require_json_bytes(json_bytes, json_bytes_max)
    outputs, parts = [], []
    for name, is_binary in chosen:
        tensor = by_name[name]
        output: dict[str, Any] = {"name": name, "datatype": tensor.datatype, "shape": tensor.shape}
        if is_binary:
            raw = raw_tensor(tensor)
            output["parameters"] = {"binary_data_size": len(raw)}
            parts.append(raw)
        else:
            output["data"] = write_data(tensor)
        outputs.append(output)
    names = {"model_name": model[0], "model_version": model[1]}
    request_id = {"id": parsed.id} if parsed.id else {}
    head = msgspec.json.encode(names | request_id | {"outputs": outputs})
    return [head, *parts], len(head) if parts else None


def _require_json_bytes(count: int, most: int) -> None:
    if count > most:
        raise LimitExceeded(
            f"results too large for JSON: {count} bytes, limit {most} (`http.json_bytes`): request "
            "binary data",
            wanted=most,
        )


def _read_json(raw: memoryview) -> _Request:
    try:
        return _decode(raw)
    except msgspec.ValidationError as error:
        raise MalformedInput(f"invalid JSON of the request: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = ""
        if any(word in bytes(raw) for word in (b"NaN", b"Infinity")):
            hint = ' (NaN and Infinity are not JSON: write them as "NaN", or send binary data)'
        raise MalformedInput(f"the request's JSON cannot be read: {error}{hint}") from None


def _malformed(entry: _Input, what: str) -> MalformedInput:
    return MalformedInput(f"input `{entry.name}`: {what}", tensor=entry.name)


def _binary_bytes(entry: _Input) -> int | None:
    """Return the length of an input's binary data; None if its data is in the JSON."""
    parameters = _with_value(entry.parameters)
    if "shared_memory_region" in parameters:
        raise Unsupported(f"input `{entry.name}`: the server does not read shared memory")
    length = parameters.get("binary_data_size")
    has_data = entry.data is not UNSET and entry.data != _NULL
    if length is None and has_data:
        return None
    if length is None:
        raise _malformed(entry, "needs `data` or `binary_data_size`")
    if has_data:
        raise _malformed(entry, "has both `data` and `binary_data_size`")
    if type(length) is not int or not 0 <= length <= _SIZE_MAX:
        raise _malformed(entry, "`binary_data_size` is not a number of bytes")
    return length


def _requested(output: _Output, is_binary: bool) -> RequestedOutput:
    parameters, where = _with_value(output.parameters), f"output `{output.name}`"
    if "shared_memory_region" in parameters:
        raise Unsupported(f"{where}: the server does not write shared memory")
    if parameters.get("classification"):
        raise Unsupported(f"{where}: classification is not supported")
    return RequestedOutput(output.name, _flag(parameters, "binary_data", where, default=is_binary))


def _with_value(parameters: _Parameters | None) -> _Parameters:
    """Drop null parameters; many clients send null for unset ones."""
    return {name: value for name, value in (parameters or {}).items() if value is not None}


def _flag(parameters: _Parameters, name: str, where: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise MalformedInput(f"{where}: `{name}` must be true or false")
    return value
