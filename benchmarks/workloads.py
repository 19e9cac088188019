"""What is served and sent: a model, its configuration, batches for it, and the model without us."""

from __future__ import annotations

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
BATCHES_COUNT = 4
"""Different batches that a stream sends in turn."""
SEED = 20260


@dataclass(frozen=True)
class Workload:
    """One model and what is sent to it.

    Attributes:
        model: Its name, as the configuration says it.
        config: The configuration file that serves it.
        columns: Makes one batch's input columns of so many rows.
    """

    model: str
    config: Path
    columns: Callable[[np.random.Generator, int], dict[str, pa.Array]]

    def batches(self, rows: int) -> list[pa.RecordBatch]:
        """The same batches every time."""
        generator = np.random.default_rng(SEED)
        return [
            pa.RecordBatch.from_pydict(self.columns(generator, rows)) for _ in range(BATCHES_COUNT)
        ]

    def open_session(self) -> ort.InferenceSession:
        """The model as a worker of the configuration opens it: one thread that never spins."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        file = MODELS / self.model / "1" / "model.onnx"
        return ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def bind(self, session: ort.InferenceSession, rows: int) -> Callable[[], None]:
        """A call that computes the first batch over buffers that stay bound."""
        binding = session.io_binding()
        batch = self.batches(rows)[0]
        kept = []
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            value = ort.OrtValue.ortvalue_from_numpy(to_tensor(column))
            binding.bind_ortvalue_input(name, value)
            kept.append(value)
        score = ort.OrtValue.ortvalue_from_shape_and_type([rows], np.float32)
        binding.bind_ortvalue_output("score", score)
        kept.append(score)

        def run(kept: list[ort.OrtValue] = kept) -> None:
            session.run_with_iobinding(binding)

        return run

    def scores(self, batch: pa.RecordBatch) -> npt.NDArray[Any]:
        """What the model says of a batch, without any server."""
        inputs = {name: to_tensor(batch.column(name)) for name in batch.schema.names}
        return np.asarray(self.open_session().run(["score"], inputs)[0])


def to_tensor(column: pa.Array) -> npt.NDArray[Any]:
    """A column as the tensor that the model takes."""
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


TWO_TOWER = Workload(
    "movielens-two-tower", FOLDER / "configs" / "two_tower.toml", _two_tower_columns
)
WIDE = Workload("wide-tabular", FOLDER / "configs" / "wide.toml", _wide_columns)
