"""Inferential messages: parse observations into tensors, and encode replies.

A message is an empty part, a protobuf envelope, and a payload with the concatenated tensor data.
Tensors are slices of the received payload, not copies.

Pure. Source: the protocol of the package `inferential` 1.4; scripts/protos/inferential_wire.proto.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from iskander._generated import inferential_wire_pb2 as wire
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import ContractError, IskanderError, MalformedInput, Unsupported
from iskander.gateway.protocols.tensors import Tensor, result_tensors

ENVELOPE_BYTES_MAX = 65_536
UNKNOWN_MAX = 16
"""Tensors beyond the model's inputs that are parsed, so that the error names them."""
_TYPE_NAMES = {
    wire.FLOAT16: "FP16",
    wire.FLOAT32: "FP32",
    wire.FLOAT64: "FP64",
    wire.BFLOAT16: "BF16",
    wire.UINT8: "UINT8",
    wire.INT32: "INT32",
    wire.INT64: "INT64",
    wire.BOOL: "BOOL",
}
_TYPE_NUMBERS = {name: number for number, name in _TYPE_NAMES.items()}

Part = bytes | memoryview


class Observation(NamedTuple):
    """A request: the envelope and the concatenated tensor data."""

    envelope: Any
    payload: memoryview


class InputTensors(NamedTuple):
    """Tensors of an observation, with a row axis.

    Attributes:
        is_single: They were sent without that axis, and their results have none.
    """

    tensors: list[Tensor]
    is_single: bool


class ReplyAddress(NamedTuple):
    """Addressing fields of a reply.

    Attributes:
        client: Client id as sent.
        model: Model id as sent; clients match replies by it.
        response: Unique name of the reply.
    """

    client: str
    model: str
    response: str


def read_observation(parts: Sequence[Part]) -> Observation:
    """Parse the envelope of a message; the payload may be missing.

    Raises:
        MalformedInput: The message is not an observation, or has no client or model id.
    """
    if len(parts) < 2 or parts[0]:
        raise MalformedInput(
            f"malformed message of {len(parts)} parts, expected an empty part, an envelope and a "
            "payload"
        )
    if len(parts[1]) > ENVELOPE_BYTES_MAX:
        raise MalformedInput(
            f"envelope too large: {len(parts[1])} bytes, limit {ENVELOPE_BYTES_MAX}"
        )
    try:
        envelope = wire.Observation.FromString(bytes(parts[1]))
    except DecodeError:
        raise MalformedInput("the envelope is not an Observation") from None
    if not envelope.client.id or not envelope.model_id:
        raise MalformedInput("the observation has no client id or no model id")
    return Observation(envelope, memoryview(parts[2] if len(parts) > 2 else b""))


def read_tensors(contract: Contract, observation: Observation) -> InputTensors:
    """Return the tensors, named after the contract's inputs, each with a row axis.

    A tensor is sent under the name of the input or column. Without a row axis it is one row.

    Raises:
        ContractError: Too many tensors, or an unknown type.
        MalformedInput: A tensor's data are not in the payload.
        Unsupported: A tensor is an encoded picture, or the protocol has no type for a result.
    """
    for result in contract.outputs:
        _type_number(result)
    sent = observation.envelope.tensors
    if len(sent) > len(contract.inputs) + UNKNOWN_MAX:
        raise ContractError(f"the model has {len(contract.inputs)} inputs, got {len(sent)} tensors")
    specs = {spec.column: spec for spec in contract.inputs}
    specs |= {spec.tensor: spec for spec in contract.inputs}
    tensors = []
    is_single = True
    for tensor in sent:
        spec = specs.get(tensor.key)
        shape = tuple(tensor.shape)
        if spec is not None and len(shape) == len(spec.shape):
            shape = (1, *shape)
        else:
            is_single = False
        name = tensor.key if spec is None else spec.tensor
        tensors.append(Tensor(name, _type_name(tensor), shape, _slice(tensor, observation.payload)))
    return InputTensors(tensors, is_single)


def render_results(
    address: ReplyAddress,
    contract: Contract,
    rows: int,
    body: bytes | memoryview,
    *,
    is_single: bool,
    latency_ms: float,
    wall_ns: int,
) -> list[bytes | memoryview]:
    """Encode a reply with results, named after their columns.

    Raises:
        Unsupported: The protocol has no type for a result.
    """
    envelope = _reply_envelope(address, wall_ns)
    envelope.inference_latency_ms = latency_ms
    parts: list[bytes | memoryview] = [b"", b""]
    offset = 0
    for spec, tensor in zip(contract.outputs, result_tensors(contract, rows, body), strict=True):
        envelope.tensors.add(
            key=spec.column,
            dtype=_type_number(spec),
            shape=tensor.shape[1:] if is_single else tensor.shape,
            byte_offset=offset,
            byte_length=len(tensor.data),
            encoding=wire.RAW,
        )
        offset += len(tensor.data)
        parts.append(tensor.data)
    parts[1] = envelope.SerializeToString()
    # Always three parts: some clients ignore other messages.
    return [*parts[:2], parts[2] if len(parts) == 3 else b"".join(parts[2:])]


def render_error(
    address: ReplyAddress, error: IskanderError, wall_ns: int
) -> list[bytes | memoryview]:
    """Encode a reply with the error in its metadata."""
    envelope = _reply_envelope(address, wall_ns)
    fields = error.to_wire()
    envelope.metadata["error"] = fields.pop("message")
    for key, value in fields.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        envelope.metadata[f"error_{key}"] = text
    return [b"", envelope.SerializeToString(), b""]


def _reply_envelope(address: ReplyAddress, wall_ns: int) -> Any:  # noqa: ANN401
    return wire.ModelResponse(
        client=wire.Client(id=address.client),
        response_id=address.response,
        timestamp_ns=wall_ns,
        model_id=address.model,
    )


def _type_name(tensor: Any) -> str:  # noqa: ANN401
    name = _TYPE_NAMES.get(tensor.dtype)
    if name is None:
        raise ContractError(
            f"tensor `{tensor.key[:100]}` has the unknown dtype {tensor.dtype}; supported: "
            f"{', '.join(f'{number} ({name})' for number, name in _TYPE_NAMES.items())}"
        )
    if tensor.encoding not in (wire.ENCODING_UNSPECIFIED, wire.RAW):
        raise Unsupported(
            f"tensor `{tensor.key[:100]}` has the encoding {tensor.encoding}; supported: RAW"
        )
    return name


def _type_number(spec: TensorSpec) -> int:
    name = spec.type.dtype.oip
    if name not in _TYPE_NUMBERS:
        raise Unsupported(f"result `{spec.column}` is {name}; Inferential has no such type")
    return _TYPE_NUMBERS[name]


def _slice(tensor: Any, payload: memoryview) -> memoryview:  # noqa: ANN401
    end = tensor.byte_offset + tensor.byte_length
    if end > len(payload):
        raise MalformedInput(
            f"tensor `{tensor.key[:100]}` ends at byte {end}, the payload has {len(payload)} bytes"
        )
    return payload[tensor.byte_offset : end]
