"""The examples, made and served as their READMEs say: figures are those of where they come from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pytest
from support import examples, models
from support.reference_client import ReferenceClient

SCRIPT = str(Path(models.__file__).with_name("outputs_client.py"))


@pytest.fixture
def reference() -> Iterator[ReferenceClient]:
    reference = ReferenceClient(SCRIPT)
    yield reference
    reference.close()


@pytest.mark.parametrize("name", sorted(path.name for path in examples.EXAMPLES.iterdir()))
def test_an_example_is_whole(name: str) -> None:
    """Its files are there, and its README names the commands that make and serve it."""
    folder = examples.EXAMPLES / name
    readme = (folder / "README.md").read_text()
    assert f"python configs/examples/{name}/make_model.py" in readme
    assert f"iskander-gateway --config configs/examples/{name}/config.toml" in readme
    assert (folder / "1" / "manifest.toml").is_file()


@pytest.mark.filterwarnings("ignore")
def test_tabular_gives_scikit_learns_figures(tmp_path: Path, reference: ReferenceClient) -> None:
    """The whole table, by both protocols."""
    pytest.importorskip("skl2onnx")
    datasets = pytest.importorskip("sklearn.datasets")
    made = examples.module("tabular")
    rows = datasets.load_breast_cancer().data[:, : len(made.FEATURES)].astype(np.float32)
    wanted = made.train().predict_proba(rows)[:, 0]
    names = ["malignant" if share > 0.5 else "benign" for share in wanted]
    columns = {name: pa.array(rows[:, index]) for index, name in enumerate(made.FEATURES)}
    ids = pa.array([f"cell {n}" for n in range(len(rows))])
    with examples.served("tabular", tmp_path) as gateway:
        with gateway.client() as client:
            answer = client.score("tabular", pa.record_batch({"entity_id": ids} | columns))
        inputs = {
            name: ["float32", rows[:9, index, None].tolist()]
            for index, name in enumerate(made.FEATURES)
        }
        found = reference.run("infer", address=gateway.address, model="tabular", inputs=inputs)
    assert answer.schema.names == ["entity_id", "score", "label"]
    assert answer["entity_id"].to_pylist() == ids.to_pylist()
    np.testing.assert_allclose(answer["score"].to_numpy(), wanted, atol=1e-4)
    assert answer["label"].to_pylist() == names
    assert found["label"] == ["BYTES", names[:9]]
    np.testing.assert_allclose(np.ravel(found["score"][1]), wanted[:9], atol=1e-4)


@pytest.mark.slow
def test_image_gives_the_runtimes_figures(tmp_path: Path) -> None:
    """Each row the five best of what the runtime makes by itself."""
    random = np.random.default_rng(3)
    images = random.integers(0, 256, (3, 224, 224, 3), np.uint8)
    images[1] //= 3
    images[2, :112] = 0
    kind = pa.fixed_shape_tensor(pa.uint8(), [224, 224, 3])
    storage = pa.FixedSizeListArray.from_arrays(pa.array(images.reshape(-1)), 224 * 224 * 3)
    column = pa.ExtensionArray.from_storage(kind, storage)
    batch = pa.record_batch({"name": pa.array(["a", "b", "c"]), "image": column})
    with examples.served("image", tmp_path) as gateway, gateway.client() as client:
        answer = client.score("image", batch)
        os.environ["ORT_DISABLE_TELEMETRY"] = "1"
        import onnxruntime as ort

        model = tmp_path / "image" / "1" / "model.onnx"
        session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
        (scores,) = session.run(None, {"image": images})
    assert answer.schema.names == ["name", "top"]
    found: list[list[dict[str, Any]]] = answer["top"].to_pylist()
    for got, row in zip(found, scores, strict=True):
        best = np.argsort(-row, kind="stable")[:5]
        assert [each["label"] for each in got] == [f"class {n}" for n in best]
        np.testing.assert_allclose([each["score"] for each in got], row[best], rtol=1e-3)
    assert len({got[0]["score"] for got in found}) == 3


def test_recommendation_ranks_items_for_each_user(
    tmp_path: Path, reference: ReferenceClient
) -> None:
    """Scores by the formula that the model was written from, and places among each user's rows."""
    made = examples.module("recommendation")
    random = np.random.default_rng(1)
    rows = 300
    users, items = random.integers(0, 7, rows), random.integers(0, made.ITEMS, rows)
    features = random.standard_normal((rows, len(made.FEATURES)), np.float32)
    fields = [pa.array(features[:, index]) for index in range(len(made.FEATURES))]
    struct = pa.StructArray.from_arrays(fields, made.FEATURES)
    batch = pa.record_batch({"user_id": users, "item_id": items, "features": struct})
    wanted = made.score(users, items, features)
    with examples.served("recommendation", tmp_path) as gateway:
        with gateway.client() as client:
            answer = client.score("recommendation", batch)
        inputs = {
            "user": ["int64", users[:5].tolist()],
            "item": ["int64", items[:5].tolist()],
            "features": ["float32", features[:5].tolist()],
        }
        found = reference.run(
            "infer", address=gateway.address, model="recommendation", inputs=inputs
        )
    assert answer.schema.names == ["user_id", "item_id", "relevance_score", "rank"]
    assert answer["user_id"].to_pylist() == users.tolist()
    assert answer["item_id"].to_pylist() == items.tolist()
    scores = answer["relevance_score"].to_numpy()
    np.testing.assert_allclose(scores, wanted, rtol=1e-4, atol=1e-5)
    for user, score, rank in zip(users, scores, answer["rank"].to_pylist(), strict=True):
        assert rank == 1 + (scores[users == user] > score).sum()
    assert list(found) == ["relevance"]
    np.testing.assert_allclose(found["relevance"][1], wanted[:5], rtol=1e-4, atol=1e-5)


def test_text_embedding_gives_the_tokenizers_figures(
    tmp_path: Path, reference: ReferenceClient
) -> None:
    """The tokens are those of the `tokenizers` package, whatever else is in the batch."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("onnxruntime_extensions")
    texts = ["The river was high", "ünïcode 🦎 and\nnew  lines", "", "the doors of the shop " * 9]
    batch = pa.record_batch({"id": pa.array([3, 1, 4, 1]), "text": pa.array(texts)})
    with examples.served("text-embedding", tmp_path) as gateway:
        model = onnx.load(tmp_path / "text-embedding" / "1" / "model.onnx")
        with gateway.client() as client:
            answer = client.score("text-embedding", batch)
        inputs = {"text": ["str", texts]}
        found = reference.run(
            "infer", address=gateway.address, model="text-embedding", inputs=inputs
        )
    assert answer.schema.names == ["id", "embedding"]
    assert answer["id"].to_pylist() == [3, 1, 4, 1]
    attributes = model.graph.node[0].attribute
    said = {each.name: onnx.helper.get_attribute_value(each) for each in attributes}
    merges = [tuple(line.split(" ")) for line in said["merges"].decode().splitlines()]
    tokenizer = tokenizers.ByteLevelBPETokenizer(json.loads(said["vocab"]), merges)
    table = onnx.numpy_helper.to_array(model.graph.initializer[0])
    for text, got in zip(texts, answer["embedding"].to_pylist(), strict=True):
        total = table[tokenizer.encode(text).ids].sum(axis=0, dtype=np.float64)
        length = np.sqrt(np.square(total).sum())
        np.testing.assert_allclose(got, total / (length or 1), atol=1e-5)
    assert found["embedding"] == ["FP32", answer["embedding"].to_pylist()]
