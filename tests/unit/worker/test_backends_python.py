"""The files of a model and the columns of a class: what is found in them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from iskander_worker.backends import Run, python
from iskander_worker.loading.weight_files import inspect_safetensors, load_safetensors
from iskander_worker.record_batches import from_batch, to_batch
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


def test_arrays_become_columns_and_come_back() -> None:
    batch = to_batch(ARRAYS)
    assert batch.schema.types == [
        pa.list_(pa.float32(), 2),
        pa.list_(pa.list_(pa.int8(), 2), 2),
        pa.float16(),
        pa.bool_(),
        pa.utf8(),
        pa.list_(pa.uint64(), 1),
    ]
    back = from_batch(batch, list(ARRAYS))
    for name, array in ARRAYS.items():
        assert back[name].dtype == array.dtype
        assert back[name].tolist() == array.tolist()


def test_numbers_are_not_copied_on_either_way() -> None:
    batch = to_batch(ARRAYS)
    address = ARRAYS["f"].ctypes.data
    assert batch.column("f").flatten().buffers()[1].address == address
    assert from_batch(batch, ["f"])["f"].ctypes.data == address


def test_a_sliced_batch_and_a_tensor_column_are_taken() -> None:
    batch = to_batch(ARRAYS).slice(1, 2)
    assert from_batch(batch, ["deep"])["deep"].tolist() == ARRAYS["deep"][1:].tolist()
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(ARRAYS["deep"])
    batch = pa.record_batch({"t": tensors})
    assert from_batch(batch, ["t"])["t"].tolist() == ARRAYS["deep"].tolist()


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"y": 1}, "returned a dict"),
        (pa.record_batch({"z": [1]}), "the columns z, expected y once"),
        (pa.record_batch([[1], [2]], ["y", "y"]), "expected y once"),
        (pa.record_batch({"y": pa.array([[1], None], pa.list_(pa.int8(), 1))}), "has nulls"),
        (pa.record_batch({"y": pa.array([[None]], pa.list_(pa.int8(), 1))}), "has nulls"),
        (pa.record_batch({"y": pa.array([[1]])}), r"list<item: int64>, which is no tensor"),
    ],
)
def test_what_is_no_tensor_is_refused(batch: Any, told: str) -> None:
    with pytest.raises(ExecutionFailed, match=told):
        from_batch(batch, ["y"])


def test_weights_are_read_as_safetensors_wrote_them(tmp_path: Path) -> None:
    weights = {"w": ARRAYS["f"], "empty": np.zeros((0, 4), np.int64), "h": ARRAYS["h"]}
    save_file(weights, tmp_path / "w.safetensors", metadata={"from": "a test"})
    read = load_safetensors(tmp_path / "w.safetensors")
    assert sorted(read) == sorted(weights)
    for name, array in weights.items():
        assert (read[name].dtype, read[name].tolist()) == (array.dtype, array.tolist())
        assert not read[name].flags.writeable


def stored(path: Path, header: Any, data: bytes = bytes(16)) -> Path:
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
def test_weights_that_say_what_cannot_be_are_refused(tmp_path: Path, header: Any) -> None:
    with pytest.raises(ManifestError, match=r"`w.bin`"):
        inspect_safetensors(stored(tmp_path / "w.bin", header))


@pytest.mark.parametrize("raw", [b"", b"123", (2**60).to_bytes(8, "little"), b"\x20" + bytes(9)])
def test_a_file_that_is_no_weights_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "w.bin").write_bytes(raw)
    with pytest.raises(ManifestError, match="no safetensors file"):
        inspect_safetensors(tmp_path / "w.bin")


def test_whatever_a_class_raises_is_the_models_failure(tmp_path: Path) -> None:
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
