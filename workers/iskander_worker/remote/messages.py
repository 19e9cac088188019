"""ModelInfer messages as bytes, and the tensors of a model's metadata.

A protobuf runtime would copy every tensor twice. Here a request is joined from an encoded head and
the tensors, which copies them from shared memory once. A response is scanned, not parsed, and its
tensors are slices of it.

Pure. Source: Open Inference Protocol v2, `ModelInferRequest`, `ModelInferResponse`,
`ModelMetadataResponse`; protobuf encoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from iskander._generated import oip_pb2
from iskander.contract.dtypes import BY_ONNX
from iskander.contract.graph import Dimension, Graph, GraphTensor
from iskander.contract.validation import shape_text
from iskander.foundation.varint import encode_varint, read_varint
from iskander_worker.remote.tensors import BY_OIP, array_of, array_of_typed, raw_of

_RAW_INPUT: Final = b"\x3a"
_RAW_OUTPUT: Final = 6 << 3 | 2
_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5
_FIXED_BYTES: Final = {_I64: 8, _I32: 4}
_TAG_BYTES_MAX: Final = 5
_TEXT_MAX: Final = 100


def encode_request(
    model: str,
    version: str,
    inputs: Sequence[GraphTensor],
    arrays: Mapping[str, np.ndarray],
    outputs: Iterable[str],
) -> bytes:
    """Return a ModelInferRequest with the arrays of `inputs`."""
    kind = oip_pb2.ModelInferRequest
    head = kind(
        model_name=model,
        model_version=version,
        inputs=[
            kind.InferInputTensor(
                name=tensor.name,
                datatype=BY_ONNX[tensor.element].oip,
                shape=arrays[tensor.name].shape,
            )
            for tensor in inputs
        ],
        outputs=[kind.InferRequestedOutputTensor(name=name) for name in outputs],
    )
    parts: list[bytes | memoryview] = [head.SerializeToString()]
    for tensor in inputs:
        raw = raw_of(arrays[tensor.name])
        parts += (_RAW_INPUT + encode_varint(len(raw)), raw)
    return b"".join(parts)


def decode_response(
    raw: bytes, outputs: Sequence[str], graph: Graph, rows: int
) -> dict[str, np.ndarray]:
    """Return the requested outputs of a ModelInferResponse by name.

    Raises:
        ValueError: The response is malformed, or an output is missing or differs from its
            declaration.
    """
    head, contents = _split_raw_contents(raw)
    response = parse(oip_pb2.ModelInferResponse, head)
    found = {tensor.name: index for index, tensor in enumerate(response.outputs)}
    expected = {tensor.name: tensor for tensor in graph.outputs}
    arrays = {}
    for name in outputs:
        if name not in found:
            names = ", ".join(found)[:_TEXT_MAX] or "none"
            raise ValueError(f"output `{name}` is missing; it has {names}")
        index = found[name]
        tensor = response.outputs[index]
        dtype = BY_OIP.get(tensor.datatype)
        if dtype is None or dtype.onnx != expected[name].element:
            raise ValueError(
                f"output `{name}` has the datatype {tensor.datatype[:_TEXT_MAX] or 'none'}, "
                f"expected {BY_ONNX[expected[name].element].oip}"
            )
        shape = tuple(tensor.shape)
        if not _has_declared_shape(shape, (rows, *expected[name].shape[1:])):
            raise ValueError(
                f"output `{name}` has the shape {list(shape)} for a batch of {rows} rows, expected "
                f"{shape_text(expected[name].shape)}"
            )
        try:
            if contents:
                if index >= len(contents):
                    raise ValueError("it has no raw contents")
                arrays[name] = array_of(contents[index], dtype, shape)
            else:
                arrays[name] = array_of_typed(tensor.contents, dtype, shape)
        except ValueError as error:
            raise ValueError(f"output `{name}`: {error}") from None
    return arrays


def parse(kind: Any, raw: bytes) -> Any:  # noqa: ANN401
    """Parse a message; raises ValueError if it is malformed."""
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise ValueError(f"it is no {kind.DESCRIPTOR.name}") from None


def graph_of(metadata: Any, declared: Graph) -> Graph:  # noqa: ANN401
    """Return the tensors of a ModelMetadataResponse; those of `declared` if it has none.

    A size of -1 is unknown; as the first size it stands for the rows of a batch.

    Raises:
        ValueError: A datatype is unknown.
    """
    return Graph(
        tuple(map(_tensor_of, metadata.inputs)) or declared.inputs,
        tuple(map(_tensor_of, metadata.outputs)) or declared.outputs,
    )


def _has_declared_shape(shape: tuple[int, ...], declared: tuple[Dimension, ...]) -> bool:
    return len(shape) == len(declared) and all(
        got == size if isinstance(size, int) else got >= 0
        for got, size in zip(shape, declared, strict=True)
    )


def _tensor_of(tensor: Any) -> GraphTensor:  # noqa: ANN401
    # Model configurations, and some servers in metadata too, have Triton's own names.
    name = tensor.datatype.removeprefix("TYPE_")
    dtype = BY_OIP.get("BYTES" if name == "STRING" else name)
    if dtype is None:
        raise ValueError(f"tensor `{tensor.name}` has the datatype {tensor.datatype[:_TEXT_MAX]}")
    sizes: list[Dimension] = [size if size >= 0 else None for size in tensor.shape]
    if sizes and sizes[0] is None:
        sizes[0] = "rows"
    return GraphTensor(tensor.name, dtype.onnx, tuple(sizes))


def _split_raw_contents(raw: bytes) -> tuple[bytes, list[memoryview]]:
    """Split a ModelInferResponse into the message without raw contents, and the raw contents."""
    view, kept, contents = memoryview(raw), [], []
    at = 0
    try:
        while at < len(view):
            start = at
            key, at = read_varint(view, at)
            if at - start > _TAG_BYTES_MAX:
                raise IndexError
            begin, kind = at, key & 7
            if kind == _LEN:
                length, begin = read_varint(view, at)
                at = begin + length
            elif kind == _VARINT:
                _, at = read_varint(view, at)
            else:
                at += _FIXED_BYTES[kind]
            if at > len(view):
                raise IndexError
            if key == _RAW_OUTPUT:
                contents.append(view[begin:at])
            else:
                kept.append(view[start:at])
    except (IndexError, KeyError):
        raise ValueError("it is no ModelInferResponse") from None
    return b"".join(kept), contents
