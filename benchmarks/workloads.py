"""Workloads: a model, its batches, and its reference outputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pyarrow as pa

FOLDER = Path(__file__).parent
MODELS = FOLDER.parent / "configs" / "models"
GENERATED = FOLDER.parent / "build" / "benchmarks" / "models"
BATCHES_COUNT = 4
"""Different batches that a client sends in turn."""
SEED = 20260
VECTOR_SIZE, VECTORS_COUNT = 2048, 1000
STATE_SIZE, ACTION_SIZE = 64, 7
POLICY_S = 0.02
CALIBRATION_STEPS = 2000
TOLERANCE = 1e-4

Array = npt.NDArray[Any]
Columns = Callable[[np.random.Generator, int], dict[str, pa.Array]]


@dataclass(frozen=True)
class Workload:
    """A model and its input batches.

    Attributes:
        model: Name in the configuration.
        config: Configuration file of the server.
        folder: Folder of `model.onnx`.
        columns: Generates the input columns of a batch with the given number of rows.
        output: Name of the output.
    """

    model: str
    config: Path
    folder: Path
    columns: Columns
    output: str = "score"

    def batches(self, rows: int) -> list[pa.RecordBatch]:
        """The same batches every time."""
        generator = np.random.default_rng(SEED)
        return [
            pa.RecordBatch.from_pydict(self.columns(generator, rows)) for _ in range(BATCHES_COUNT)
        ]

    def open_session(self) -> ort.InferenceSession:
        """The model with the settings of every server here: one thread that never spins."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        file = self.folder / "model.onnx"
        return ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def expected(self, rows: int) -> list[Array]:
        """The model's own outputs for `batches(rows)`."""
        return [self.expected_of(batch) for batch in self.batches(rows)]

    def expected_of(self, batch: pa.RecordBatch) -> Array:
        """The model's own output for one batch."""
        return np.asarray(self.open_session().run([self.output], tensors(batch))[0])

    def prepare(self) -> None:
        """Generate the model if it is not in the repository."""
        generate = {EMBEDDING.folder: _make_embedding, POLICY.folder: _make_policy}.get(self.folder)
        if generate is not None and not (self.folder / "model.onnx").exists():
            generate(self.folder)


def tensors(batch: pa.RecordBatch) -> dict[str, Array]:
    """The columns of a batch as the model's input tensors."""
    return {name: _to_tensor(batch.column(name)) for name in batch.schema.names}


def _to_tensor(column: pa.Array) -> Array:
    if pa.types.is_fixed_size_list(column.type):
        return np.asarray(column.flatten()).reshape(len(column), column.type.list_size)
    return np.asarray(column)


def _two_tower_columns(generator: np.random.Generator, rows: int) -> dict[str, pa.Array]:
    return {
        "user_id": pa.array(generator.integers(1, 672, rows)),
        "item_id": pa.array(generator.integers(1, 10_000, rows)),
    }


def _wide_columns(generator: np.random.Generator, rows: int) -> dict[str, pa.Array]:
    values = pa.array(generator.standard_normal(rows * 64, np.float32))
    return {"features": pa.FixedSizeListArray.from_arrays(values, 64)}


def _embedding_columns(generator: np.random.Generator, rows: int) -> dict[str, pa.Array]:
    return {"id": pa.array(generator.integers(0, VECTORS_COUNT, rows))}


def _policy_columns(generator: np.random.Generator, rows: int) -> dict[str, pa.Array]:
    values = pa.array(generator.standard_normal(rows * STATE_SIZE, np.float32))
    return {"state": pa.FixedSizeListArray.from_arrays(values, STATE_SIZE)}


def _make_embedding(folder: Path) -> None:
    """A table of vectors and a lookup: almost no compute, 8 KiB of output a row."""
    from onnx import TensorProto, helper, numpy_helper

    table = np.random.default_rng(SEED).standard_normal((VECTORS_COUNT, VECTOR_SIZE), np.float32)
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "id"], ["embedding"])],
        "embedding",
        [helper.make_tensor_value_info("id", TensorProto.INT64, ["N"])],
        [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["N", VECTOR_SIZE])],
        [numpy_helper.from_array(table, "table")],
    )
    _save(graph, folder)


def _make_policy(folder: Path) -> None:
    """A recurrent policy, calibrated to 20 ms for one row or a few."""
    _save(_policy_graph(CALIBRATION_STEPS), folder)
    session = POLICY.open_session()
    (batch, *_) = POLICY.batches(1)
    times_s = []
    for _ in range(5):
        started_s = time.perf_counter()
        session.run([POLICY.output], tensors(batch))
        times_s.append(time.perf_counter() - started_s)
    _save(_policy_graph(round(CALIBRATION_STEPS * POLICY_S / min(times_s))), folder)


def _policy_graph(steps: int) -> Any:  # noqa: ANN401
    """`h = tanh(h W)`, repeated, and a projection to the actions."""
    from onnx import TensorProto, helper, numpy_helper

    def value(name: str, element: int, shape: list[str | int]) -> Any:  # noqa: ANN401
        return helper.make_tensor_value_info(name, element, shape)

    state: list[str | int] = ["N", STATE_SIZE]
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["keep"], ["keep_on"]),
            helper.make_node("MatMul", ["h", "step"], ["moved"]),
            helper.make_node("Tanh", ["moved"], ["h_next"]),
        ],
        "step",
        [
            value("i", TensorProto.INT64, []),
            value("keep", TensorProto.BOOL, []),
            value("h", TensorProto.FLOAT, state),
        ],
        [value("keep_on", TensorProto.BOOL, []), value("h_next", TensorProto.FLOAT, state)],
    )
    generator = np.random.default_rng(SEED)
    step = np.linalg.qr(generator.standard_normal((STATE_SIZE, STATE_SIZE)))[0]
    head = generator.standard_normal((STATE_SIZE, ACTION_SIZE), np.float32)
    return helper.make_graph(
        [
            helper.make_node("Loop", ["steps", "", "state"], ["last"], body=body),
            helper.make_node("MatMul", ["last", "head"], ["action"]),
        ],
        "policy",
        [value("state", TensorProto.FLOAT, state)],
        [value("action", TensorProto.FLOAT, ["N", ACTION_SIZE])],
        [
            numpy_helper.from_array(np.array(steps), "steps"),
            numpy_helper.from_array(step.astype(np.float32), "step"),
            numpy_helper.from_array(head, "head"),
        ],
    )


def _save(graph: Any, folder: Path) -> None:  # noqa: ANN401
    import onnx
    from onnx import helper

    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx")


def _configured(
    model: str, config: str, folder: Path, columns: Columns, output: str = "score"
) -> Workload:
    return Workload(model, FOLDER / "configs" / config, folder, columns, output)


TWO_TOWER = _configured(
    "movielens-two-tower",
    "two_tower.toml",
    MODELS / "movielens-two-tower" / "1",
    _two_tower_columns,
)
WIDE = _configured("wide-tabular", "wide.toml", MODELS / "wide-tabular" / "1", _wide_columns)
EMBEDDING = _configured(
    "embedding", "embedding.toml", GENERATED / "embedding" / "1", _embedding_columns, "embedding"
)
POLICY = _configured("policy", "policy.toml", GENERATED / "policy" / "1", _policy_columns, "action")
