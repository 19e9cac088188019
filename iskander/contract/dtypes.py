"""Table of element types: Arrow, NumPy, ONNX and Open Inference Protocol names.

Pure. Imports neither pyarrow nor NumPy, so that a worker can import it before it sets its affinity.

Arrow has no bfloat16: its column is the extension type `iskander.bfloat16` over uint16. ONNX has
one string type, UTF-8; the manifest declares a column of strings as text or as bytes.

Source: ONNX `TensorProto.DataType`, Arrow columnar format 1.5, Open Inference Protocol v2.
"""

from __future__ import annotations

from typing import Final, NamedTuple

OFFSET_BYTES: Final = 4
"""String offsets are int32, as in Arrow's `utf8` and `binary`."""


class Dtype(NamedTuple):
    """One element type.

    Attributes:
        arrow: Name of the Arrow type in manifests.
        numpy: Name of the NumPy dtype with the memory layout of one element.
        onnx: Type string of a tensor in ONNX Runtime.
        oip: Datatype of the Open Inference Protocol.
        arrow_bits: Bits of one element in an Arrow buffer; Arrow packs booleans. 0 for strings,
            whose bytes have a buffer beside the offsets.
    """

    arrow: str
    numpy: str
    onnx: str
    oip: str
    arrow_bits: int

    def buffer_bytes(self, count: int) -> int:
        """Count bytes of an Arrow buffer with `count` values or the offsets of `count` strings."""
        if self.arrow_bits:
            return (count * self.arrow_bits + 7) // 8
        return (count + 1) * OFFSET_BYTES


DTYPES = (
    Dtype("bool", "bool", "tensor(bool)", "BOOL", 1),
    Dtype("int8", "int8", "tensor(int8)", "INT8", 8),
    Dtype("int16", "int16", "tensor(int16)", "INT16", 16),
    Dtype("int32", "int32", "tensor(int32)", "INT32", 32),
    Dtype("int64", "int64", "tensor(int64)", "INT64", 64),
    Dtype("uint8", "uint8", "tensor(uint8)", "UINT8", 8),
    Dtype("uint16", "uint16", "tensor(uint16)", "UINT16", 16),
    Dtype("uint32", "uint32", "tensor(uint32)", "UINT32", 32),
    Dtype("uint64", "uint64", "tensor(uint64)", "UINT64", 64),
    Dtype("float16", "float16", "tensor(float16)", "FP16", 16),
    Dtype("float32", "float32", "tensor(float)", "FP32", 32),
    Dtype("float64", "float64", "tensor(double)", "FP64", 64),
    Dtype("bfloat16", "uint16", "tensor(bfloat16)", "BF16", 16),
    Dtype("binary", "object", "tensor(string)", "BYTES", 0),
    Dtype("utf8", "object", "tensor(string)", "BYTES", 0),
)

BY_ARROW = {dtype.arrow: dtype for dtype in DTYPES}
BY_ONNX = {dtype.onnx: dtype for dtype in DTYPES}
"""`tensor(string)` maps to `utf8`."""
