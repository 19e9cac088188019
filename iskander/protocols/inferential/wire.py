"""Inferential's envelopes: an observation read and held against a contract, a reply made.

A message is an empty part, a protobuf envelope, and a payload with the tensors' bytes one after the
other. Tensors are slices of the payload as it came; only the contract says what they must be.

Pure. Source: the protocol of the package `inferential` 1.4; scripts/protos/inferential_wire.proto.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from iskander._generated import inferential_wire_pb2 as wire
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import ContractError, IskanderError, MalformedInput, Unsupported
from iskander.protocols.tensors import Tensor, give

ENVELOPE_BYTES_MAX = 65_536
UNKNOWN_MAX = 16
"""Tensors beyond those of the model; up to here an error names them."""
_DATATYPES = {
    wire.FLOAT16: "FP16",
    wire.FLOAT32: "FP32",
    wire.FLOAT64: "FP64",
    wire.BFLOAT16: "BF16",
    wire.UINT8: "UINT8",
    wire.INT32: "INT32",
    wire.INT64: "INT64",
    wire.BOOL: "BOOL",
}
_DTYPES = {name: number for number, name in _DATATYPES.items()}

Part = bytes | memoryview


class Observation(NamedTuple):
    """What a client observed, and wants an answer to.

    Attributes:
        envelope: As it came.
        payload: The tensors' bytes.
    """

    envelope: Any
    payload: memoryview


class Question(NamedTuple):
    """An observation's tensors, with the axis of the rows.

    Attributes:
        is_single: They came without that axis, and so the results go back.
    """

    tensors: list[Tensor]
    is_single: bool


class Address(NamedTuple):
    """What a reply says about whom it is for.

    Attributes:
        client: As the client says it.
        model: As the client says it; by this it knows which of its calls a reply is for.
        response: A name for the reply that no other has.
    """

    client: str
    model: str
    response: str


def read_observation(parts: Sequence[Part]) -> Observation:
    """Find the envelope of a message; a payload that is not there is empty.

    Raises:
        MalformedInput: It is no observation, or does not say whose and for which model.
    """
    if len(parts) < 2 or parts[0]:
        raise MalformedInput("a message is an empty part, an envelope and a payload")
    if len(parts[1]) > ENVELOPE_BYTES_MAX:
        raise MalformedInput(
            f"an envelope may have {ENVELOPE_BYTES_MAX} bytes, got {len(parts[1])}"
        )
    try:
        envelope = wire.Observation.FromString(bytes(parts[1]))
    except DecodeError:
        raise MalformedInput("the envelope is not an Observation") from None
    if not envelope.client.id or not envelope.model_id:
        raise MalformedInput("an observation needs a client's id and a model's id")
    return Observation(envelope, memoryview(parts[2] if len(parts) > 2 else b""))


def read_question(contract: Contract, observation: Observation) -> Question:
    """The tensors under the names of the contract's inputs, each with an axis of the rows.

    A tensor is named after the input or its column. One that has the shape of a row is one row.

    Raises:
        ContractError: Too many tensors, a type that there is not, or that no client sends.
        MalformedInput: A tensor's bytes are not in the payload.
        Unsupported: A tensor is an encoded picture, or a result of a type that there is not.
    """
    for result in contract.outputs:
        _dtype(result)
    sent = observation.envelope.tensors
    if len(sent) > len(contract.inputs) + UNKNOWN_MAX:
        raise ContractError(f"the model has {len(contract.inputs)} inputs, got {len(sent)} tensors")
    names = {spec.column: spec for spec in contract.inputs}
    names |= {spec.tensor: spec for spec in contract.inputs}
    tensors = []
    is_single = True
    for tensor in sent:
        spec = names.get(tensor.key)
        shape = tuple(tensor.shape)
        if spec is not None and len(shape) == len(spec.shape):
            shape = (1, *shape)
        else:
            is_single = False
        name = tensor.key if spec is None else spec.tensor
        tensors.append(Tensor(name, _datatype(tensor), shape, _data(tensor, observation.payload)))
    return Question(tensors, is_single)


def render_results(
    address: Address,
    contract: Contract,
    rows: int,
    body: bytes | memoryview,
    *,
    is_single: bool,
    latency_ms: float,
    wall_ns: int,
) -> list[bytes | memoryview]:
    """A reply with results, each under the name of its column.

    Raises:
        Unsupported: A result is of a type that the protocol has not.
    """
    envelope = _envelope(address, wall_ns)
    envelope.inference_latency_ms = latency_ms
    parts: list[bytes | memoryview] = [b"", b""]
    offset = 0
    for spec, tensor in zip(contract.outputs, give(contract, rows, body), strict=True):
        envelope.tensors.add(
            key=spec.column,
            dtype=_dtype(spec),
            shape=tensor.shape[1:] if is_single else tensor.shape,
            byte_offset=offset,
            byte_length=len(tensor.data),
            encoding=wire.RAW,
        )
        offset += len(tensor.data)
        parts.append(tensor.data)
    parts[1] = envelope.SerializeToString()
    # Always three parts, or some clients would not look at them.
    return [*parts[:2], parts[2] if len(parts) == 3 else b"".join(parts[2:])]


def render_error(address: Address, error: IskanderError, wall_ns: int) -> list[bytes | memoryview]:
    """A reply that says in its metadata why there are no results."""
    envelope = _envelope(address, wall_ns)
    said = error.to_wire()
    envelope.metadata["error"] = said.pop("message")
    for key, value in said.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        envelope.metadata[f"error_{key}"] = text
    return [b"", envelope.SerializeToString(), b""]


def _envelope(address: Address, wall_ns: int) -> Any:  # noqa: ANN401
    return wire.ModelResponse(
        client=wire.Client(id=address.client),
        response_id=address.response,
        timestamp_ns=wall_ns,
        model_id=address.model,
    )


def _datatype(tensor: Any) -> str:  # noqa: ANN401
    datatype = _DATATYPES.get(tensor.dtype)
    if datatype is None:
        raise ContractError(
            f"tensor `{tensor.key[:100]}` has the dtype {tensor.dtype}; there are "
            f"{', '.join(f'{number} ({name})' for number, name in _DATATYPES.items())}"
        )
    if tensor.encoding not in (wire.ENCODING_UNSPECIFIED, wire.RAW):
        raise Unsupported(
            f"tensor `{tensor.key[:100]}` has the encoding {tensor.encoding}; only RAW is taken"
        )
    return datatype


def _dtype(spec: TensorSpec) -> int:
    datatype = spec.type.dtype.oip
    if datatype not in _DTYPES:
        raise Unsupported(
            f"result `{spec.column}` is {datatype}, which Inferential has no type for"
        )
    return _DTYPES[datatype]


def _data(tensor: Any, payload: memoryview) -> memoryview:  # noqa: ANN401
    end = tensor.byte_offset + tensor.byte_length
    if end > len(payload):
        raise MalformedInput(
            f"tensor `{tensor.key[:100]}` ends at byte {end} of a payload of {len(payload)}"
        )
    return payload[tensor.byte_offset : end]
