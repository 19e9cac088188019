"""`iskander manifest` and `iskander check --sample`, and a server with their manifest."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx import TensorProto, helper
from support import models
from support.processes import BIN, render_config, running


def iskander(*arguments: object) -> tuple[int, str]:
    result = subprocess.run(
        [BIN / "iskander", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return result.returncode, result.stdout + result.stderr


@pytest.mark.slow
def test_sample_is_checked_and_a_manifest_generated_from_it(tmp_path: Path) -> None:
    """A table of other types fails the check; the generated manifest makes the table valid."""
    folder = models.save(
        tmp_path / "m",
        [helper.make_node("ReduceSum", ["features", "axis"], ["total"], keepdims=0)],
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["rows", 3])],
        [helper.make_tensor_value_info("total", TensorProto.FLOAT, ["rows"])],
        [helper.make_tensor("axis", TensorProto.INT64, [1], [1])],
    )
    table = pa.table({"id": ["p", "q"], "a": [1, 2], "b": [0.5, 1.5], "c": [True, False]})
    sample = tmp_path / "data.parquet"
    pq.write_table(table, sample)
    served = [{"name": "sum", "path": str(folder)}]
    config = tmp_path / "check.toml"
    config.write_text(render_config(models=served))

    code, text = iskander("check", config, "--sample", sample)
    assert code == 1
    (line,) = [line for line in text.splitlines() if line.startswith("features ")]
    assert " is missing: wanted fixed_size_list<float32>[3]" in line
    assert any(
        line.startswith("a ") and "neither an input nor passed through" in line
        for line in text.splitlines()
    )
    code, manifest = iskander("manifest", folder, "--sample", sample)
    assert code == 0, manifest
    (folder / "manifest.toml").write_text(manifest)
    code, text = iskander("check", config, "--sample", sample)
    assert code == 0 and text.count(" fits") == 4, text
    with running(tmp_path, served) as gateway, gateway.client() as client:
        (batch,) = table.to_batches()
        scored = client.score("sum", batch)
    assert np.allclose(scored["total"].to_numpy(), [2.5, 3.5])
    assert scored["id"].to_pylist() == ["p", "q"]


def test_manifest_can_be_written_beside_its_model(tmp_path: Path) -> None:
    """The shell empties `manifest.toml` before the command reads the folder."""
    folder = models.row_ids(tmp_path / "m")
    expected = iskander("manifest", folder)
    (folder / "manifest.toml").touch()
    assert iskander("manifest", folder) == expected
    assert expected[0] == 0
    (folder / "manifest.toml").write_text("inputs = []")
    assert iskander("manifest", folder)[0] == 78


def test_sample_with_other_columns_than_the_input_has_values(tmp_path: Path) -> None:
    """The error has both numbers, the columns, and what to do."""
    sample = tmp_path / "wide.parquet"
    pq.write_table(pa.table({name: [1.0, 2.0] for name in "abcd"}), sample)
    code, text = iskander("manifest", models.row_ids(tmp_path / "m"), "--sample", sample)
    assert code == 78
    assert "4 numeric columns where a row of `x` has 0 values: a, b, c, d" in text


def test_manifest_is_generated_from_an_mlflow_signature(tmp_path: Path) -> None:
    file = tmp_path / "MLmodel"
    file.write_text(
        "flavors:\n  onnx: {data: model.onnx}\nsignature:\n"
        """  inputs: '[{"type": "long", "name": "x"}]'\n"""
        """  outputs: '[{"type": "long", "name": "y"}]'\n"""
    )
    code, manifest = iskander("manifest", file)
    assert code == 0, manifest
    folder = models.row_ids(tmp_path / "m")
    (folder / "manifest.toml").write_text(manifest)
    assert iskander("manifest", folder)[0] == 0
    (tmp_path / "none.json").write_text("{}")
    assert "there is no signature" in iskander("manifest", tmp_path / "none.json")[1]


def test_schema_equals_the_documented_one() -> None:
    code, text = iskander("manifest", "--schema")
    documented = models.ROOT / "docs" / "reference" / "manifest.schema.json"

    assert code == 0 and json.loads(text) == json.loads(documented.read_text())
