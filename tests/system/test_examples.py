"""Examples, served as in their READMEs and compared with their source libraries."""

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
def test_example_has_its_files_and_readme_commands(name: str) -> None:
    folder = examples.EXAMPLES / name
    readme = (folder / "README.md").read_text()
    assert f"python configs/examples/{name}/make_model.py" in readme
    assert f"iskander-gateway --config configs/examples/{name}/config.toml" in readme
    assert (folder / "1" / "manifest.toml").is_file()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tabular_matches_scikit_learn(tmp_path: Path, reference: ReferenceClient) -> None:
    """The whole table over Flight, nine rows over the Open Inference Protocol."""
    pytest.importorskip("skl2onnx")
    datasets = pytest.importorskip("sklearn.datasets")
    example = examples.module("tabular")
    rows = datasets.load_breast_cancer().data[:, : len(example.FEATURES)].astype(np.float32)
    expected = example.train().predict_proba(rows)[:, 0]
    names = ["malignant" if share > 0.5 else "benign" for share in expected]
    columns = {name: pa.array(rows[:, index]) for index, name in enumerate(example.FEATURES)}
    ids = pa.array([f"cell {n}" for n in range(len(rows))])
    with examples.served("tabular", tmp_path) as gateway:
        with gateway.client() as client:
            result = client.score("tabular", pa.record_batch({"entity_id": ids} | columns))
        inputs = {
            name: ["float32", rows[:9, index, None].tolist()]
            for index, name in enumerate(example.FEATURES)
        }
        response = reference.run("infer", address=gateway.address, model="tabular", inputs=inputs)
    assert result.schema.names == ["entity_id", "score", "label"]
    assert result["entity_id"].to_pylist() == ids.to_pylist()
    np.testing.assert_allclose(result["score"].to_numpy(), expected, atol=1e-4)
    assert result["label"].to_pylist() == names
    assert response["label"] == ["BYTES", names[:9]]
    np.testing.assert_allclose(np.ravel(response["score"][1]), expected[:9], atol=1e-4)


@pytest.mark.slow
def test_image_matches_onnx_runtime(tmp_path: Path) -> None:
    """Each row has the five best classes of ONNX Runtime's scores."""
    random = np.random.default_rng(3)
    images = random.integers(0, 256, (3, 224, 224, 3), np.uint8)
    images[1] //= 3
    images[2, :112] = 0
    kind = pa.fixed_shape_tensor(pa.uint8(), [224, 224, 3])
    storage = pa.FixedSizeListArray.from_arrays(pa.array(images.reshape(-1)), 224 * 224 * 3)
    column = pa.ExtensionArray.from_storage(kind, storage)
    batch = pa.record_batch({"name": pa.array(["a", "b", "c"]), "image": column})
    with examples.served("image", tmp_path) as gateway, gateway.client() as client:
        result = client.score("image", batch)
        os.environ["ORT_DISABLE_TELEMETRY"] = "1"
        import onnxruntime as ort

        model = tmp_path / "image" / "1" / "model.onnx"
        session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
        (scores,) = session.run(None, {"image": images})
    assert result.schema.names == ["name", "top"]
    top: list[list[dict[str, Any]]] = result["top"].to_pylist()
    for classes, row in zip(top, scores, strict=True):
        best = np.argsort(-row, kind="stable")[:5]
        assert [each["label"] for each in classes] == [f"class {n}" for n in best]
        np.testing.assert_allclose([each["score"] for each in classes], row[best], rtol=1e-3)
    assert len({classes[0]["score"] for classes in top}) == 3


def test_recommendation_ranks_items_for_each_user(
    tmp_path: Path, reference: ReferenceClient
) -> None:
    """Scores match the model's formula; ranks count within each user's rows."""
    example = examples.module("recommendation")
    random = np.random.default_rng(1)
    rows = 300
    users, items = random.integers(0, 7, rows), random.integers(0, example.ITEMS, rows)
    features = random.standard_normal((rows, len(example.FEATURES)), np.float32)
    fields = [pa.array(features[:, index]) for index in range(len(example.FEATURES))]
    struct = pa.StructArray.from_arrays(fields, example.FEATURES)
    batch = pa.record_batch({"user_id": users, "item_id": items, "features": struct})
    expected = example.score(users, items, features)
    with examples.served("recommendation", tmp_path) as gateway:
        with gateway.client() as client:
            result = client.score("recommendation", batch)
        inputs = {
            "user": ["int64", users[:5].tolist()],
            "item": ["int64", items[:5].tolist()],
            "features": ["float32", features[:5].tolist()],
        }
        response = reference.run(
            "infer", address=gateway.address, model="recommendation", inputs=inputs
        )
    assert result.schema.names == ["user_id", "item_id", "relevance_score", "rank"]
    assert result["user_id"].to_pylist() == users.tolist()
    assert result["item_id"].to_pylist() == items.tolist()
    scores = result["relevance_score"].to_numpy()
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)
    for user, score, rank in zip(users, scores, result["rank"].to_pylist(), strict=True):
        assert rank == 1 + (scores[users == user] > score).sum()
    assert list(response) == ["relevance"]
    np.testing.assert_allclose(response["relevance"][1], expected[:5], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_text_embedding_matches_tokenizers(tmp_path: Path, reference: ReferenceClient) -> None:
    """The tokens are those of the `tokenizers` package, independent of the rest of the batch."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("onnxruntime_extensions")
    texts = ["The river was high", "ünïcode 🦎 and\nnew  lines", "", "the doors of the shop " * 9]
    batch = pa.record_batch({"id": pa.array([3, 1, 4, 1]), "text": pa.array(texts)})
    with examples.served("text-embedding", tmp_path) as gateway:
        model = onnx.load(tmp_path / "text-embedding" / "1" / "model.onnx")
        with gateway.client() as client:
            result = client.score("text-embedding", batch)
        inputs = {"text": ["str", texts]}
        response = reference.run(
            "infer", address=gateway.address, model="text-embedding", inputs=inputs
        )
    assert result.schema.names == ["id", "embedding"]
    assert result["id"].to_pylist() == [3, 1, 4, 1]
    attributes = model.graph.node[0].attribute
    values = {each.name: onnx.helper.get_attribute_value(each) for each in attributes}
    merges = [tuple(line.split(" ")) for line in values["merges"].decode().splitlines()]
    tokenizer = tokenizers.ByteLevelBPETokenizer(json.loads(values["vocab"]), merges)
    table = onnx.numpy_helper.to_array(model.graph.initializer[0])
    for text, embedding in zip(texts, result["embedding"].to_pylist(), strict=True):
        total = table[tokenizer.encode(text).ids].sum(axis=0, dtype=np.float64)
        length = np.sqrt(np.square(total).sum())
        np.testing.assert_allclose(embedding, total / (length or 1), atol=1e-5)
    assert response["embedding"] == ["FP32", result["embedding"].to_pylist()]
