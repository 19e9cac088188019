"""Rows of the prediction log: omitted, hashed and plain columns."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from iskander.arrow.types import BFloat16
from iskander.config.observation import ModelLogConfig
from iskander.errors import ConfigError
from iskander.sampling.prediction_log.columns import Columns, plain
from iskander.sampling.prediction_log.hashing import hash_column
from iskander.sampling.sample import Sample

KEY = bytes(64)
SAMPLE = Sample(
    "m",
    "1",
    1_700_000_000_123_456_789,
    2,
    "ab" * 16,
    pa.record_batch(
        {"user": ["ann", "bob"], "x": pa.array([[1, 2], [3, 4]], pa.list_(pa.int8(), 2))}
    ),
    pa.record_batch({"x": [0.5, 1.5]}),
)


def rows(**settings: tuple[str, ...]) -> pa.RecordBatch:
    return Columns(SAMPLE, ModelLogConfig(**settings), KEY).rows_of(SAMPLE)


def test_rows_have_the_request_the_inputs_and_the_outputs() -> None:
    batch = rows()
    assert batch.schema.names == ["trace_id", "time", "row", "user", "x", "output.x"]
    assert batch["trace_id"].to_pylist() == ["ab" * 16] * 2
    assert batch["row"].to_pylist() == [0, 1]
    assert batch["time"].cast(pa.int64()).to_pylist() == [1_700_000_000_123_456] * 2
    assert batch["x"].to_pylist() == [[1, 2], [3, 4]]
    assert batch["output.x"].to_pylist() == [0.5, 1.5]


def test_omitted_and_hashed_columns() -> None:
    batch = rows(omit=("output.x", "x"), hash=("user",))
    assert batch.schema.names == ["trace_id", "time", "row", "user"]
    assert batch["user"] == hash_column(SAMPLE.inputs["user"], KEY)
    assert "ann" not in str(batch.to_pylist())


@pytest.mark.parametrize("setting", ["omit", "hash"])
@pytest.mark.parametrize("name", ["User", "trace_id", "y"])
def test_unknown_column_is_an_error(setting: str, name: str) -> None:
    """A misspelt name would write what it is meant to hide."""
    message = f"models.prediction_log.{setting} of m/1: there is no column `{name}`; the columns"
    with pytest.raises(ConfigError, match=message):
        rows(**{setting: (name,)})


def test_types_are_plain() -> None:
    fixed = pa.FixedSizeListArray.from_arrays(pa.array([1.5, 2.0], pa.float16()), 1)
    assert plain(fixed).type == pa.list_(pa.float32())
    assert plain(fixed[1:]).to_pylist() == [[2.0]]
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12).reshape(2, 2, 3))
    assert plain(tensor).to_pylist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    bits = (np.array([1.5, -2.0], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    brain = pa.ExtensionArray.from_storage(BFloat16(), pa.array(bits))
    assert plain(brain) == pa.array([1.5, -2.0], pa.float32())
    lists = pa.FixedSizeListArray.from_arrays(brain, 2)
    assert plain(lists).to_pylist() == [[1.5, -2.0]]
    text = pa.array(["a"])
    assert plain(text) is text
