"""Messages of the Open Inference Protocol as the backend `remote` writes and reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from iskander_worker.remote.messages import decode_response, encode_request, graph_of
from iskander_worker.remote.tensors import array_of, raw_of

from iskander._generated import oip_pb2
from iskander.contract.dtypes import BY_ARROW, DTYPES
from iskander.contract.graph import Graph, GraphTensor

NUMERIC = [dtype for dtype in DTYPES if dtype.arrow_bits]
X = GraphTensor("x", "tensor(float)", ("rows", 2))
Y = Graph((X,), (GraphTensor("y", "tensor(double)", ("rows",)),))


def response(**fields: Any) -> bytes:
    raw: bytes = oip_pb2.ModelInferResponse(**fields).SerializeToString()
    return raw


def output(name: str = "y", datatype: str = "FP64", shape: Any = (2,)) -> Any:
    kind = oip_pb2.ModelInferResponse.InferOutputTensor
    return kind(name=name, datatype=datatype, shape=shape)


@pytest.mark.parametrize("dtype", NUMERIC, ids=lambda dtype: dtype.arrow)
def test_numbers_round_trip_as_the_protocol_lays_them_out(dtype: Any) -> None:
    array = np.arange(6, dtype=np.uint8).astype(dtype.numpy).reshape(3, 2)
    raw = bytes(raw_of(array))
    assert raw == array.tobytes()
    assert len(raw) == 6 * (max(dtype.arrow_bits, 8) // 8)
    assert (array_of(raw, dtype, (3, 2)) == array).all()


def test_numbers_are_a_view_of_the_array() -> None:
    array = np.arange(4, dtype=np.float32)
    assert np.shares_memory(np.frombuffer(raw_of(array), np.float32), array)


@given(st.lists(st.text(max_size=20), max_size=8))
def test_strings_round_trip(texts: list[str]) -> None:
    array = np.array(texts, np.object_).reshape(len(texts))
    raw = raw_of(array)
    assert array_of(raw, BY_ARROW["utf8"], (len(texts),)).tolist() == texts
    assert len(raw) == sum(4 + len(text.encode()) for text in texts)


@pytest.mark.parametrize(
    "raw",
    [b"\x01\0\0", b"\x05\0\0\0abc", b"\x01\0\0\0a" * 3, b"\x01\0\0\0a", b"\x01\0\0\0\xff" * 2],
    ids=["length", "text", "too many", "too few", "no UTF-8"],
)
def test_invalid_strings_are_a_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError):
        array_of(raw, BY_ARROW["utf8"], (2,))


def test_request_is_what_protobuf_reads() -> None:
    arrays = {"x": np.ones((3, 2), np.float32), "s": np.array(["a", "bc", ""], np.object_)}
    inputs = [X, GraphTensor("s", "tensor(string)", ("rows",))]
    request = oip_pb2.ModelInferRequest.FromString(encode_request("m", "7", inputs, arrays, ["y"]))
    assert (request.model_name, request.model_version) == ("m", "7")
    assert [(each.name, each.datatype, list(each.shape)) for each in request.inputs] == [
        ("x", "FP32", [3, 2]),
        ("s", "BYTES", [3]),
    ]
    assert [each.name for each in request.outputs] == ["y"]
    strings = b"\1\0\0\0a\2\0\0\0bc\0\0\0\0"
    assert list(request.raw_input_contents) == [arrays["x"].tobytes(), strings]


def test_raw_contents_are_slices_of_the_response() -> None:
    y = np.array([1.0, 2.0])
    raw = response(outputs=[output("z"), output()], raw_output_contents=[b"?" * 16, y.tobytes()])
    found = decode_response(raw, ["y"], Y, 2)["y"]
    assert found.tolist() == [1.0, 2.0]
    assert np.shares_memory(found, np.frombuffer(raw, np.uint8))


TYPED: list[tuple[str, str, list[Any]]] = [
    ("BOOL", "bool_contents", [True, False]),
    ("INT8", "int_contents", [-1, 2]),
    ("UINT64", "uint64_contents", [2**63, 1]),
    ("FP32", "fp32_contents", [0.5, 1.5]),
    ("BYTES", "bytes_contents", [b"a", b""]),
]


@pytest.mark.parametrize(("datatype", "field", "values"), TYPED)
def test_typed_contents(datatype: str, field: str, values: list[Any]) -> None:
    element = next(dtype.onnx for dtype in reversed(DTYPES) if dtype.oip == datatype)
    graph = Graph((X,), (GraphTensor("y", element, ("rows",)),))
    tensor = output(datatype=datatype)
    getattr(tensor.contents, field).extend(values)
    texts = [each.decode() if isinstance(each, bytes) else each for each in values]
    assert decode_response(response(outputs=[tensor]), ["y"], graph, 2)["y"].tolist() == texts


SMALL = Graph((X,), (GraphTensor("y", "tensor(int8)", ("rows",)),))
LONG_TAG = b"\xb2\x80\x80\x80\x80\x80\x00\x10"
"""Of `raw_output_contents` with a length of 16, in more bytes than a tag may have."""
INVALID = {
    "no ModelInferResponse": b"\x32\x05ab",
    "output `y` is missing; it has z": response(outputs=[output("z")]),
    "datatype INT8, expected FP64": response(outputs=[output(datatype="INT8")]),
    "datatype none": response(outputs=[output(datatype="")]),
    "the shape [3] for a batch of 2 rows": response(outputs=[output(shape=(3,))]),
    "the shape [2, 1]": response(outputs=[output(shape=(2, 1))]),
    "the shape []": response(outputs=[output(shape=())]),
    "has 15 bytes, and its shape needs 16": response(
        outputs=[output()], raw_output_contents=[b"?" * 15]
    ),
    "no raw contents": response(outputs=[output("z"), output()], raw_output_contents=[b"?" * 16]),
    "0 values, and its shape needs 2": response(outputs=[output()]),
}


@pytest.mark.parametrize("text", INVALID)
def test_invalid_answers_name_the_difference(text: str) -> None:
    with pytest.raises(ValueError) as raised:
        decode_response(INVALID[text], ["y"], Y, 2)
    assert text in str(raised.value)


def test_typed_value_outside_its_datatype_is_a_value_error() -> None:
    tensor = output(datatype="INT8")
    tensor.contents.int_contents.extend([1, 300])
    with pytest.raises(ValueError, match="300 out of bounds"):
        decode_response(response(outputs=[tensor]), ["y"], SMALL, 2)


def test_tag_of_more_than_five_bytes_is_a_value_error() -> None:
    """As protobuf requires; a proxy could read another answer."""
    with pytest.raises(ValueError, match="no ModelInferResponse"):
        decode_response(response(outputs=[output()]) + LONG_TAG + bytes(16), ["y"], Y, 2)


@given(st.binary(max_size=60))
def test_any_bytes_are_an_answer_or_a_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError):
        decode_response(raw, ["y"], Y, 2)


def metadata(*inputs: tuple[str, str, list[int]]) -> Any:
    kind = oip_pb2.ModelMetadataResponse
    tensors = [kind.TensorMetadata(name=n, datatype=d, shape=s) for n, d, s in inputs]
    return kind(inputs=tensors)


def test_metadata_is_a_graph_and_missing_sides_are_declared() -> None:
    found = graph_of(metadata(("x", "FP32", [-1, 2]), ("s", "TYPE_STRING", [-1, -1])), Y)
    assert found.inputs == (X, GraphTensor("s", "tensor(string)", ("rows", None)))
    assert found.outputs == Y.outputs


def test_unknown_datatype_of_the_metadata() -> None:
    with pytest.raises(ValueError, match="tensor `x` has the datatype FP8"):
        graph_of(metadata(("x", "FP8", [-1])), Y)
