"""Python backend: weight files, tensors as columns, and errors of model classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from iskander_worker.backends import Run, python
from iskander_worker.batches.record_batches import from_batch, to_batch
from iskander_worker.loading.weight_files import inspect_safetensors, load_safetensors
from safetensors.numpy import save_file
from support.scripted import model_spec

from iskander.errors import ExecutionFailed, ManifestError

ARRAYS = {
    "f": np.arange(6, dtype=np.float32).reshape(3, 2),
    "deep": np.arange(12, dtype=np.int8).reshape(3, 2, 2),
    "h": np.arange(3, dtype=np.float16),
    "b": np.array([True, False, True]),
    "s": np.array(["a", "", "ä"], object),
    "rows of one": np.arange(3, dtype=np.uint64).reshape(3, 1),
}


def test_arrays_round_trip_through_columns() -> None:
    batch = to_batch(ARRAYS)
    assert batch.schema.types == [
        pa.list_(pa.float32(), 2),
        pa.list_(pa.list_(pa.int8(), 2), 2),
        pa.float16(),
        pa.bool_(),
        pa.utf8(),
        pa.list_(pa.uint64(), 1),
    ]
    restored = from_batch(batch, list(ARRAYS))
    for name, array in ARRAYS.items():
        assert restored[name].dtype == array.dtype
        assert restored[name].tolist() == array.tolist()


def test_numeric_arrays_are_not_copied() -> None:
    batch = to_batch(ARRAYS)
    address = ARRAYS["f"].ctypes.data
    assert batch.column("f").flatten().buffers()[1].address == address
    assert from_batch(batch, ["f"])["f"].ctypes.data == address


def test_sliced_batches_and_tensor_columns_are_accepted() -> None:
    batch = to_batch(ARRAYS).slice(1, 2)
    assert from_batch(batch, ["deep"])["deep"].tolist() == ARRAYS["deep"][1:].tolist()
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(ARRAYS["deep"])
    batch = pa.record_batch({"t": tensors})
    assert from_batch(batch, ["t"])["t"].tolist() == ARRAYS["deep"].tolist()


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 2, 1)])
def test_transposed_tensor_column_is_read_in_its_logical_order(axes: tuple[int, ...]) -> None:
    array = np.arange(54).reshape(2, 3, 3, 3).transpose(axes)
    batch = pa.record_batch({"t": pa.FixedShapeTensorArray.from_numpy_ndarray(array)})
    assert from_batch(batch.slice(1), ["t"])["t"].tolist() == array[1:].tolist()


def test_tensor_column_with_an_ambiguous_permutation_is_rejected() -> None:
    array = np.arange(54).reshape(2, 3, 3, 3).transpose(0, 2, 3, 1)
    batch = pa.record_batch({"t": pa.FixedShapeTensorArray.from_numpy_ndarray(array)})
    with pytest.raises(ExecutionFailed, match=r"permutation \[2, 0, 1\].*contiguous"):
        from_batch(batch, ["t"])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"y": 1}, "returned a dict"),
        (pa.record_batch({"z": [1]}), "the columns z, expected y once"),
        (pa.record_batch([[1], [2]], ["y", "y"]), "expected y once"),
        (pa.record_batch({"y": pa.array([[1], None], pa.list_(pa.int8(), 1))}), "has nulls"),
        (pa.record_batch({"y": pa.array([[None]], pa.list_(pa.int8(), 1))}), "has nulls"),
        (pa.record_batch({"y": pa.array([[1]])}), r"list<item: int64>, which is no tensor"),
    ],
)
def test_invalid_result_batch_is_rejected(batch: Any, message: str) -> None:
    with pytest.raises(ExecutionFailed, match=message):
        from_batch(batch, ["y"])


def test_weights_of_safetensors_are_read(tmp_path: Path) -> None:
    weights = {"w": ARRAYS["f"], "empty": np.zeros((0, 4), np.int64), "h": ARRAYS["h"]}
    save_file(weights, tmp_path / "w.safetensors", metadata={"from": "a test"})
    read = load_safetensors(tmp_path / "w.safetensors")
    assert sorted(read) == sorted(weights)
    for name, array in weights.items():
        assert (read[name].dtype, read[name].tolist()) == (array.dtype, array.tolist())
        assert not read[name].flags.writeable


def write_weights(path: Path, header: Any, data: bytes = bytes(16)) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def tensor(kind: str, shape: list[int], first: int, last: int) -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b"\xff",
        {"w": {"dtype": "F32"}},
        {"w": tensor("F32", [2], 0, 4)},
        {"w": tensor("F32", [5], 0, 20)},
        {"w": tensor("F32", [-1], 0, 4)},
        {"w": tensor("F32", [1], -4, 0)},
        {"w": tensor("Q7", [4], 0, 4)},
        {"w": tensor("F32", [2**40, 2**40], 0, 16)},
        {"w": tensor("U8", [1] * 17, 0, 1)},
        {"w": tensor("F32", [2], 0, 8), "v": tensor("F32", [2], 4, 12)},
    ],
)
def test_inconsistent_weights_header_is_rejected(tmp_path: Path, header: Any) -> None:
    with pytest.raises(ManifestError, match=r"`w.bin`"):
        inspect_safetensors(write_weights(tmp_path / "w.bin", header))


DEEP = b'{"w": ' + b"[" * 5000


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"123",
        (2**60).to_bytes(8, "little"),
        b"\x20" + bytes(9),
        len(DEEP).to_bytes(8, "little") + DEEP,
    ],
)
def test_invalid_weights_file_is_rejected(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "w.bin").write_bytes(raw)
    with pytest.raises(ManifestError, match="no safetensors file"):
        inspect_safetensors(tmp_path / "w.bin")


def test_any_exception_of_a_model_class_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "manifest.toml").write_text(
        "format = 1\ninputs = []\noutputs = []\n"
        '[graph.inputs]\nx = "float32"\n[graph.outputs]\ny = "float32"\n'
    )
    (tmp_path / "model.py").write_text(
        "class Panic(BaseException): pass\n"
        "class Model:\n"
        "    def load(self, context):\n"
        "        if context.version == 'bad': raise Panic('in load')\n"
        "    def predict(self, batch): raise Panic('in predict')\n"
    )
    spec = msgspec.structs.replace(
        model_spec(tmp_path), path=str(tmp_path / "manifest.toml"), pool="own"
    )

    with pytest.raises(ManifestError, match="Panic: in load"):
        python.load(msgspec.structs.replace(spec, version="bad"), 1)
    model = python.load(spec, 1)
    with pytest.raises(ExecutionFailed, match="Panic: in predict"):
        model.compute({"x": np.ones(3, np.float32)}, ["y"], Run())


def test_parts_may_use_the_same_memory_again() -> None:
    buffer = np.empty(2, np.int64)

    def parts() -> Any:
        for first in (0, 2):
            buffer[:] = (first, first + 1)
            yield pa.record_batch({"y": pa.array(buffer)})

    model = object.__new__(python.PythonModel)
    merged = model._concatenate(parts(), ["y"], 4, Run())
    assert merged["y"].tolist() == [0, 1, 2, 3]
