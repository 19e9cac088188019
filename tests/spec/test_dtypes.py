"""The table of element types against those who own the names: Arrow, NumPy, ONNX, OIP."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pyarrow as pa
import pytest

from iskander.contract.dtypes import BY_ARROW, BY_ONNX, DTYPES, Dtype
from iskander.contract.tensors import ColumnType
from iskander.gateway.arrow_types import as_tensor, to_arrow

# Open Inference Protocol v2, "Tensor Data Types"; BYTES is the one that is no number.
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
}
EACH = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.arrow)


def arrow_of(dtype: Dtype) -> pa.DataType:
    return pa.type_for_alias(dtype.arrow)


def element_of(dtype: Dtype) -> int:
    """The number that ONNX gives an element type, by way of NumPy."""
    return onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype.numpy))


def test_the_table_has_every_type_of_the_protocol_once() -> None:
    assert {dtype.arrow: dtype.oip for dtype in DTYPES} == OIP
    assert len(BY_ARROW) == len(BY_ONNX) == len({dtype.oip for dtype in DTYPES}) == len(DTYPES)


@EACH
def test_arrow_knows_the_name_and_the_width(dtype: Dtype) -> None:
    assert str(arrow_of(dtype)) in (dtype.arrow, "halffloat", "float", "double")
    assert arrow_of(dtype).bit_width == dtype.arrow_bits
    assert to_arrow(ColumnType(dtype.arrow)) == arrow_of(dtype)
    assert as_tensor(arrow_of(dtype)) == ColumnType(dtype.arrow)


@EACH
def test_numpy_and_arrow_mean_the_same_element(dtype: Dtype) -> None:
    assert np.dtype(arrow_of(dtype).to_pandas_dtype()) == np.dtype(dtype.numpy)
    assert pa.from_numpy_dtype(np.dtype(dtype.numpy)) == arrow_of(dtype)


@EACH
def test_a_tensors_element_is_as_wide_as_arrows_but_for_booleans(dtype: Dtype) -> None:
    bits = 8 * np.dtype(dtype.numpy).itemsize

    assert dtype.arrow_bits == (1 if dtype.arrow == "bool" else bits)


@EACH
def test_onnx_and_numpy_mean_the_same_element(dtype: Dtype) -> None:
    element = element_of(dtype)

    assert onnx.helper.tensor_dtype_to_np_dtype(element) == np.dtype(dtype.numpy)
    assert dtype.onnx == f"tensor({onnx.TensorProto.DataType.Name(element).lower()})"


@EACH
def test_onnx_runtime_reports_the_name_of_the_table(dtype: Dtype) -> None:
    """Given a graph that takes and returns the type, as the worker reads it from a session."""
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


@EACH
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_a_buffer_is_as_long_as_arrow_makes_it(dtype: Dtype, count: int) -> None:
    """Of pyarrow's buffer, which is padded, the part that holds values."""
    array = pa.array(np.zeros(count, np.dtype(dtype.numpy)))

    assert dtype.buffer_bytes(count) == array.nbytes == -(-count * dtype.arrow_bits // 8)


@pytest.mark.parametrize("element", ["STRING", "BFLOAT16", "COMPLEX64", "FLOAT8E4M3FN", "INT4"])
def test_what_a_column_cannot_hold_is_not_in_the_table(element: str) -> None:
    assert element in onnx.TensorProto.DataType.keys()  # noqa: SIM118 - no mapping
    assert f"tensor({element.lower()})" not in BY_ONNX
