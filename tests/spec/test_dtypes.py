"""Table of element types, compared with Arrow, NumPy, ONNX and OIP."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pyarrow as pa
import pytest

from iskander.arrow.types import BFloat16, as_tensor, to_arrow
from iskander.contract.column_types import ColumnType
from iskander.contract.dtypes import BY_ARROW, BY_ONNX, DTYPES, Dtype

# Open Inference Protocol v2, "Tensor Data Types", and BF16, an extension of Triton's clients.
OIP = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "bfloat16": "BF16",
    "utf8": "BYTES",
    "binary": "BYTES",
}
EACH = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.arrow)
NUMBERS = [dtype for dtype in DTYPES if dtype.oip not in ("BF16", "BYTES")]
EACH_NUMBER = pytest.mark.parametrize("dtype", NUMBERS, ids=lambda dtype: dtype.arrow)


def arrow_of(dtype: Dtype) -> pa.DataType:
    return BFloat16() if dtype.arrow == "bfloat16" else pa.type_for_alias(dtype.arrow)


def element_of(dtype: Dtype) -> int:
    """Returns the number of an element type in ONNX, through NumPy if possible."""
    others = {"BF16": onnx.TensorProto.BFLOAT16, "BYTES": onnx.TensorProto.STRING}
    return others.get(dtype.oip) or onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype.numpy))


def test_table_has_each_protocol_type_once() -> None:
    assert {dtype.arrow: dtype.oip for dtype in DTYPES} == OIP
    assert len(BY_ARROW) == len(DTYPES)
    # ONNX and the protocol have one string type for text and bytes.
    assert len(BY_ONNX) == len({dtype.oip for dtype in DTYPES}) == len(DTYPES) - 1
    assert BY_ONNX["tensor(string)"].arrow == "utf8"


@EACH_NUMBER
def test_name_and_width_match_arrow(dtype: Dtype) -> None:
    assert str(arrow_of(dtype)) in (dtype.arrow, "halffloat", "float", "double")
    assert arrow_of(dtype).bit_width == dtype.arrow_bits


@EACH
def test_arrow_type_round_trip(dtype: Dtype) -> None:
    assert to_arrow(ColumnType(dtype.arrow)) == arrow_of(dtype)
    assert as_tensor(arrow_of(dtype)) == ColumnType(dtype.arrow)


def test_bfloat16_is_an_extension_type_of_two_bytes() -> None:
    stored = arrow_of(BY_ARROW["bfloat16"])

    assert (stored.extension_name, stored.storage_type) == ("iskander.bfloat16", pa.uint16())
    assert stored.storage_type.bit_width == BY_ARROW["bfloat16"].arrow_bits
    assert np.dtype(BY_ARROW["bfloat16"].numpy) == np.uint16


@EACH_NUMBER
def test_element_types_of_numpy_and_arrow_match(dtype: Dtype) -> None:
    assert np.dtype(arrow_of(dtype).to_pandas_dtype()) == np.dtype(dtype.numpy)
    assert pa.from_numpy_dtype(np.dtype(dtype.numpy)) == arrow_of(dtype)


@EACH_NUMBER
def test_element_widths_of_tensor_and_arrow_match_except_bool(dtype: Dtype) -> None:
    bits = 8 * np.dtype(dtype.numpy).itemsize

    assert dtype.arrow_bits == (1 if dtype.arrow == "bool" else bits)


@EACH_NUMBER
def test_element_types_of_onnx_and_numpy_match(dtype: Dtype) -> None:
    element = element_of(dtype)

    assert onnx.helper.tensor_dtype_to_np_dtype(element) == np.dtype(dtype.numpy)
    assert dtype.onnx == f"tensor({onnx.TensorProto.DataType.Name(element).lower()})"


@EACH
def test_onnx_runtime_reports_the_name_in_the_table(dtype: Dtype) -> None:
    """A worker reads the types of a graph from its session."""
    values = [onnx.helper.make_tensor_value_info(n, element_of(dtype), ["N"]) for n in ("x", "y")]
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "g", values[:1], values[1:])
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    )

    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )

    assert [node.type for node in (*session.get_inputs(), *session.get_outputs())] == [
        dtype.onnx,
        dtype.onnx,
    ]


@EACH_NUMBER
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_buffer_length_matches_arrow(dtype: Dtype, count: int) -> None:
    """Padding of pyarrow's buffer is not counted."""
    array = pa.array(np.zeros(count, np.dtype(dtype.numpy)))

    assert dtype.buffer_bytes(count) == array.nbytes == -(-count * dtype.arrow_bits // 8)


@pytest.mark.parametrize("count", [1, 7, 1000])
@pytest.mark.parametrize("name", ["utf8", "binary"])
def test_offsets_match_arrow(name: str, count: int) -> None:
    """There is one more offset than strings."""
    array = pa.array(["é"] * count, pa.type_for_alias(name))
    offsets = np.frombuffer(array.buffers()[1], np.int32)[: count + 1]

    assert BY_ARROW[name].buffer_bytes(count) == offsets.nbytes
    assert offsets.tolist() == list(range(0, 2 * count + 1, 2))


@pytest.mark.parametrize("element", ["COMPLEX64", "FLOAT8E4M3FN", "INT4"])
def test_unsupported_element_types_are_not_in_the_table(element: str) -> None:
    assert element in onnx.TensorProto.DataType.keys()  # noqa: SIM118 - no mapping
    assert f"tensor({element.lower()})" not in BY_ONNX
