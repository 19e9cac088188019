"""Pipelines on a running server: three steps with a Python tokeniser, and two ONNX graphs."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from onnx import TensorProto, helper
from support import models
from support.processes import Gateway, running
from support.python_models import write

from iskander.errors import ExecutionFailed

WORDS, LENGTH, WIDTH = 16, 4, 3
TABLE = np.random.default_rng(7).normal(size=(WORDS, WIDTH)).astype(np.float32)

TOKENISE = f"""
class Model(Base):
    def predict(self, batch):
        rows = []
        for text in batch.column("text").to_pylist():
            if text == "boom":
                raise ValueError("no such word")
            ids = [sum(word.encode()) % {WORDS} for word in text.split()][:{LENGTH}]
            rows.append(ids + [0] * ({LENGTH} - len(ids)))
        return pa.record_batch({{"ids": pa.array(rows, pa.list_(pa.int64(), {LENGTH}))}})
"""
TOKENISE_MANIFEST = f"""
format = 1
[[inputs]]
column = "text"
type = "utf8"
tensor = "text"
[[outputs]]
tensor = "ids"
column = "ids"
type = "fixed_size_list<int64>[{LENGTH}]"
"""
STEPS = """
format = 1
passthrough = "all"
[[steps]]
name = "tokenise"
model = "tokenise"
backend = "python"
[[steps]]
name = "embed"
model = "embed.onnx"
inputs = { input_ids = "ids" }
[[steps]]
name = "normalise"
model = "normalise/model.onnx"
inputs = { x = "mean" }
outputs = { y = "embedding" }
"""
COLUMNS = f"""
[[inputs]]
column = "text"
type = "utf8"
tensor = "text"
[[outputs]]
tensor = "embedding"
column = "embedding"
type = "fixed_size_list<float32>[{WIDTH}]"
"""


def embed(folder: Path) -> Path:
    """Mean of the table rows with the given ids."""
    return models.save(
        folder,
        [
            helper.make_node("Gather", ["table", "input_ids"], ["lines"]),
            helper.make_node("ReduceMean", ["lines"], ["mean"], axes=[1], keepdims=0),
        ],
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", LENGTH])],
        [helper.make_tensor_value_info("mean", TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor("table", TensorProto.FLOAT, [WORDS, WIDTH], TABLE.reshape(-1))],
    )


def normalise(folder: Path) -> Path:
    return models.save(
        folder,
        [helper.make_node("LpNormalization", ["x"], ["y"], axis=1, p=2)],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", WIDTH])],
    )


def text_pipeline(folder: Path, **settings: Any) -> dict[str, Any]:
    write(folder / "tokenise", TOKENISE, TOKENISE_MANIFEST)
    (embed(folder / "embed") / "model.onnx").rename(folder / "embed.onnx")
    normalise(folder / "normalise")
    (folder / "manifest.toml").write_text(STEPS + COLUMNS)
    return {"name": folder.name, "path": str(folder), "backend": "pipeline", **settings}


def embedding_of(text: str) -> np.ndarray:
    ids = [sum(word.encode()) % WORDS for word in text.split()][:LENGTH]
    mean = TABLE[ids + [0] * (LENGTH - len(ids))].mean(axis=0)
    return np.asarray(mean / np.linalg.norm(mean))


def metric(gateway: Gateway, line: str) -> float:
    url = f"http://{gateway.stats()['admin_address']}/metrics"
    with urllib.request.urlopen(url, timeout=20) as response:
        lines = response.read().decode().splitlines()
    return float(next(each.rpartition(" ")[2] for each in lines if each.startswith(line)))


def test_pipeline_computes_embeddings_in_one_worker_and_times_each_step(tmp_path: Path) -> None:
    sentences = ["a b c", "", "one two three four five", "ä ö"]
    with running(tmp_path, [text_pipeline(tmp_path / "texts", workers=1)]) as gateway:
        batch = pa.record_batch({"id": [1, 2, 3, 4], "text": sentences})
        with gateway.client() as client:
            result = client.score("texts", batch)
            with pytest.raises(ExecutionFailed, match="step `tokenise`: ValueError: no such word"):
                client.score("texts", pa.record_batch({"text": ["boom"]}))
        expected_rows = np.stack([embedding_of(each) for each in sentences])
        np.testing.assert_allclose(result["embedding"].to_pylist(), expected_rows, rtol=1e-5)
        assert result["id"].to_pylist() == [1, 2, 3, 4]
        (worker,) = gateway.stats()["workers"]
        assert worker["pool"] == "texts/1"
        for step in ("tokenise", "embed", "normalise"):
            labels = f'{{model="texts",step="{step}",version="1"}}'
            count = metric(gateway, f"iskander_step_seconds_count{labels}")
            assert count == 1
            assert gateway.stats()["lanes"]["texts/1"]["steps_ms"][step]["count"] == 1


def test_pipeline_of_graphs_shares_workers_with_other_models(tmp_path: Path) -> None:
    """y = 3 * (3 * x + 1) + 1; the intermediate result is an output too."""
    folder = tmp_path / "twice"
    for name in ("first", "second"):
        models.row_ids(folder / name)
    (folder / "manifest.toml").write_text("""
format = 1
[[steps]]
name = "first"
model = "first"
outputs = { y = "once" }
[[steps]]
name = "second"
model = "second"
inputs = { x = "once" }
outputs = { y = "twice" }
[[inputs]]
column = "x"
type = "int64"
tensor = "x"
[[outputs]]
tensor = "twice"
column = "twice"
type = "int64"
[[outputs]]
tensor = "once"
column = "once"
type = "int64"
""")
    ids = {"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}
    twice = {"name": "twice", "path": str(folder), "backend": "pipeline"}
    with running(tmp_path, [ids, twice]) as gateway, gateway.client() as client:
        assert len(gateway.stats()["workers"]) == 1
        batches = [pa.record_batch({"x": [at, at + 1]}) for at in range(50)]
        results = [each.to_pydict() for each in client.stream("twice", batches)]
    for at, result in enumerate(results):
        assert result == {
            "twice": [9 * at + 4, 9 * at + 13],
            "once": [3 * at + 1, 3 * at + 4],
        }


def test_python_step_requires_dedicated_workers(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, [text_pipeline(tmp_path / "texts")])
    try:
        gateway.start(is_ready=False)
        assert gateway.wait() == 78
    finally:
        gateway.end()
    message = "step `tokenise`: the backend `python` needs workers of its own: set workers = 1"
    assert message in gateway.text()
