"""ONNX models on a GPU in a real worker, with a scripted gateway; results are those of a CPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from support import models
from support.processes import WorkerProcess
from support.scripted import ScriptedGateway, model_spec

from iskander.contract.tensors import body_layout
from iskander.interprocess.control.messages import (
    Copied,
    Done,
    Drain,
    Execute,
    Failed,
    Load,
    Loaded,
    LoadFailed,
    Notice,
    Slice,
)

COLUMNS = 16
CUDA: dict[str, Any] = {"execution_providers": ("cuda",)}
TYPES = {
    "float32": (TensorProto.FLOAT, np.dtype(np.float32)),
    "float16": (TensorProto.FLOAT16, np.dtype(np.float16)),
    "bfloat16": (TensorProto.BFLOAT16, np.dtype(ml_dtypes.bfloat16)),
    "float64": (TensorProto.DOUBLE, np.dtype(np.float64)),
}


def product(folder: Path, element: int = TensorProto.FLOAT) -> Path:
    """`y = x @ w + 1`, where w is a permutation, and `z = x`; exact in every type."""
    weight = np.roll(np.eye(COLUMNS, dtype=np.float32), 1, axis=1)
    shape = ["rows", COLUMNS]
    return models.save(
        folder,
        [
            helper.make_node("Cast", ["w"], ["wc"], to=element),
            helper.make_node("Cast", ["one"], ["c"], to=element),
            helper.make_node("MatMul", ["x", "wc"], ["m"]),
            helper.make_node("Add", ["m", "c"], ["y"]),
            helper.make_node("Identity", ["x"], ["z"]),
        ],
        [helper.make_tensor_value_info("x", element, shape)],
        [helper.make_tensor_value_info(name, element, shape) for name in ("y", "z")],
        [
            numpy_helper.from_array(weight, "w"),
            numpy_helper.from_array(np.float32([1]), "one"),
        ],
    )


def expected(x: np.ndarray) -> list[np.ndarray]:
    return [(np.roll(x, 1, axis=1) + x.dtype.type(1)).astype(x.dtype), x]


def receive(gateway: ScriptedGateway, within_s: float = 20.0) -> Any:
    """The next message but `Copied`."""
    while isinstance(message := gateway.receive(within_s), Copied):
        pass
    return message


def load(gateway: ScriptedGateway, folder: Path, key: int = 0, **changes: Any) -> Loaded:
    gateway.send(Load(model_spec(folder, key, **(CUDA | changes))))
    answer = receive(gateway, 120)
    assert isinstance(answer, Loaded), answer
    assert answer.providers[0] == "CUDAExecutionProvider"
    return answer


def place(gateway: ScriptedGateway, offset: int, values: np.ndarray) -> None:
    raw = values.tobytes()
    gateway.input.view[offset : offset + len(raw)] = raw


def read(
    gateway: ScriptedGateway, loaded: Loaded, offset: int, rows: int, dtype: np.dtype[Any]
) -> list[np.ndarray]:
    offsets, _ = body_layout(loaded.contract.outputs, rows)
    return [
        np.frombuffer(gateway.output.view, dtype, rows * spec.elements, offset + at)
        .reshape(rows, *spec.shape)
        .copy()
        for spec, at in zip(loaded.contract.outputs, offsets, strict=True)
    ]


def values(rows: int, dtype: np.dtype[Any], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 60, (rows, COLUMNS)).astype(dtype)


@pytest.mark.parametrize("name", TYPES)
def test_whole_request_is_computed_in_every_type(
    gateway: ScriptedGateway, worker: WorkerProcess, name: str
) -> None:
    element, dtype = TYPES[name]
    loaded = load(gateway, product(gateway.folder / "m", element))
    for batch_id, rows in enumerate([1, 5, 5, 64], start=1):
        x = values(rows, dtype, batch_id)
        place(gateway, 4096, x)
        gateway.send(Execute(batch_id, 0, rows, (Slice(4096, rows, 0, rows, 8192),)))
        answer = receive(gateway)
        assert isinstance(answer, Done), answer
        for found, right in zip(read(gateway, loaded, 8192, rows, dtype), expected(x), strict=True):
            np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("slices", [3, 40])
def test_batch_of_several_requests_is_padded_and_split(
    gateway: ScriptedGateway, worker: WorkerProcess, slices: int
) -> None:
    """Few slices are copied one by one, many through a stage."""
    loaded = load(gateway, product(gateway.folder / "m"))
    parts, requests = [], []
    for number in range(slices):
        x = values(4, np.dtype(np.float32), number)
        place(gateway, number * 4096, x)
        first, rows = number % 3, 1 + number % 2
        parts.append(Slice(number * 4096, 4, first, rows, number * 8192))
        requests.append(x[first : first + rows])
    rows = sum(each.rows for each in parts) + 7
    gateway.send(Execute(1, 0, rows, tuple(parts)))
    assert isinstance(receive(gateway), Done)
    for part, x in zip(parts, requests, strict=True):
        found = read(gateway, loaded, part.output_offset, part.rows, x.dtype)
        for one, right in zip(found, expected(x), strict=True):
            np.testing.assert_array_equal(one, right)


def test_batches_sent_together_are_answered_in_order(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    """Two are in flight at a time; two models share the slots."""
    loaded = load(gateway, product(gateway.folder / "m"))
    load(gateway, product(gateway.folder / "n"), key=1)
    count, rows = 12, 9
    for number in range(count):
        place(gateway, number * 4096, values(rows, np.dtype(np.float32), number))
        part = Slice(number * 4096, rows, 0, rows, number * 8192)
        gateway.send(Execute(number + 1, number % 2, rows, (part,)))
    answers = [receive(gateway) for _ in range(count)]
    assert [answer.batch_id for answer in answers] == list(range(1, count + 1))
    for number in range(count):
        right = expected(values(rows, np.dtype(np.float32), number))
        found = read(gateway, loaded, number * 8192, rows, np.dtype(np.float32))
        for one, other in zip(found, right, strict=True):
            np.testing.assert_array_equal(one, other)
    gateway.send(Drain())
    assert worker.process.wait(30) == 0


def test_graphs_of_repeated_sizes_are_replayed(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    """Sizes of `pad_to` are captured at the load; others run without a graph."""
    options = {"cuda": {"enable_cuda_graph": "true"}}
    loaded = load(gateway, product(gateway.folder / "m"), provider_options=options, pad_to=(4, 8))
    for batch_id, (used, rows) in enumerate(
        [(4, 4), (3, 4), (8, 8), (5, 8), (4, 4), (6, 6), (100, 100), (8, 8)] * 2, start=1
    ):
        x = values(used, np.dtype(np.float32), batch_id)
        place(gateway, 0, x)
        gateway.send(Execute(batch_id, 0, rows, (Slice(0, used, 0, used, 0),)))
        answer = receive(gateway)
        assert isinstance(answer, Done), answer
        found = read(gateway, loaded, 0, used, x.dtype)
        for one, right in zip(found, expected(x), strict=True):
            np.testing.assert_array_equal(one, right)


def test_graphs_without_repeated_sizes_are_reported(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    options = {"cuda": {"enable_cuda_graph": "true"}}
    folder = product(gateway.folder / "m")
    gateway.send(Load(model_spec(folder, provider_options=options, **CUDA)))
    notice = receive(gateway, 120)
    assert isinstance(notice, Notice) and "enable_cuda_graph has no effect" in notice.text
    assert isinstance(receive(gateway), Loaded)


def test_booleans_are_converted_on_the_host(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    folder = models.save(
        gateway.folder / "m",
        [helper.make_node("Not", ["x"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.BOOL, ["rows", 8])],
        [helper.make_tensor_value_info("y", TensorProto.BOOL, ["rows", 8])],
    )
    load(gateway, folder)
    gateway.input.view[:2] = bytes([0b10110001, 0b00000000])
    gateway.send(Execute(1, 0, 2, (Slice(0, 2, 0, 2, 0),)))
    assert isinstance(receive(gateway), Done)
    assert bytes(gateway.output.view[:2]) == bytes([0b01001110, 0b11111111])


def test_outputs_of_unknown_shape_are_copied_from_the_runtime(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    """The manifest declares the shape, which the graph does not."""
    folder = models.save(
        gateway.folder / "m",
        [
            helper.make_node("Shape", ["x"], ["s"]),
            helper.make_node("Reshape", ["x", "s"], ["r"]),
            helper.make_node("Add", ["r", "r"], ["y"]),
        ],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", COLUMNS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["a", "b"])],
    )
    (folder / "manifest.toml").write_text(
        f"""
format = 1
[[inputs]]
column = "x"
type = "fixed_size_list<float32>[{COLUMNS}]"
tensor = "x"
[[outputs]]
tensor = "y"
column = "y"
type = "fixed_size_list<float32>[{COLUMNS}]"
"""
    )
    loaded = load(gateway, folder)
    for batch_id, rows in enumerate([3, 8, 3], start=1):
        x = values(rows, np.dtype(np.float32), batch_id)
        place(gateway, 0, x)
        gateway.send(Execute(batch_id, 0, rows, (Slice(0, rows, 0, rows, 0),)))
        assert isinstance(receive(gateway), Done)
        np.testing.assert_array_equal(read(gateway, loaded, 0, rows, x.dtype)[0], 2 * x)


def test_failing_batch_fails_alone(gateway: ScriptedGateway, worker: WorkerProcess) -> None:
    """Other numbers of rows than `most` cannot be reshaped."""
    most = 4
    folder = models.save(
        gateway.folder / "m",
        [
            helper.make_node("Reshape", ["x", "flat"], ["r"]),
            helper.make_node("Shape", ["x"], ["s"]),
            helper.make_node("Reshape", ["r", "s"], ["b"]),
            helper.make_node("Add", ["b", "b"], ["y"]),
        ],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", COLUMNS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", COLUMNS])],
        [numpy_helper.from_array(np.array([most * COLUMNS]), "flat")],
    )
    loaded = load(gateway, folder)
    for batch_id, rows in enumerate([most, most + 1, most, most + 2, most], start=1):
        x = values(rows, np.dtype(np.float32), batch_id)
        place(gateway, batch_id * 4096, x)
        part = Slice(batch_id * 4096, rows, 0, rows, batch_id * 4096)
        gateway.send(Execute(batch_id, 0, rows, (part,)))
    kinds = {}
    for _ in range(5):
        answer = receive(gateway)
        kinds[answer.batch_id] = type(answer)
    assert kinds == {1: Done, 2: Failed, 3: Done, 4: Failed, 5: Done}
    x = values(most, np.dtype(np.float32), 5)
    np.testing.assert_array_equal(read(gateway, loaded, 5 * 4096, most, x.dtype)[0], 2 * x)


def test_model_that_exceeds_its_memory_is_not_loaded(
    gateway: ScriptedGateway, worker: WorkerProcess
) -> None:
    rows = 1 << 16
    width = math.isqrt((256 << 20) // 4)
    folder = models.save(
        gateway.folder / "m",
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", width])],
        [numpy_helper.from_array(np.ones((width, width), np.float32), "w")],
    )
    options = {"cuda": {"gpu_mem_limit": str(64 << 20)}}
    gateway.send(Load(model_spec(folder, provider_options=options, rows_max=rows, **CUDA)))
    answer = receive(gateway, 120)
    assert isinstance(answer, LoadFailed)
    assert "smaller than requested" in answer.message


def test_unknown_device_is_rejected(gateway: ScriptedGateway, worker: WorkerProcess) -> None:
    options = {"cuda": {"device_id": "77"}}
    folder = product(gateway.folder / "m")
    gateway.send(Load(model_spec(folder, provider_options=options, **CUDA)))
    answer = receive(gateway, 120)
    assert isinstance(answer, LoadFailed)
    assert "the CPU is not used instead" in answer.message and "101" in answer.message
