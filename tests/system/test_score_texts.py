"""`iskander score` on CSV files and hive folders: values are those of the text, or errors."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from onnx import TensorProto
from support import models
from support.processes import BIN

MANIFEST = """format = 1
[[inputs]]
tensor = "x"
columns = ["clicks", "tenure"]
type = "{type}"
{more}
[[outputs]]
column = "y"
type = "fixed_size_list<float32>[2]"
tensor = "y"
"""
HEAD = "clicks,tenure,id,zip\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name, type, more in (
        ("number", "number", "cast = true"),
        ("float32", "float32", ""),
        ("int32", "int32", "cast = true"),
    ):
        models.identity(folder / name, TensorProto.FLOAT, ["rows", 2])
        manifest = MANIFEST.format(type=type, more=more)
        (folder / name / "manifest.toml").write_text(manifest)
    models.identity(folder / "text", TensorProto.STRING, ["rows"], "zip")
    return folder


def score(
    place: Path, tmp_path: Path, model: str, data: str, *words: str, code: int = 0
) -> tuple[Any, str]:
    """Run the command; return the output, if there is one, and the error text."""
    result = subprocess.run(
        [BIN / "iskander", "score", place / model, data, "-o", "out", "--progress", "none", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == code, result.stderr
    table = pq.read_table(tmp_path / "out", partitioning=None) if not code else None
    return table, result.stderr


@pytest.mark.parametrize("model", ["number", "float32"])
def test_output_has_the_values_of_the_file(place: Path, tmp_path: Path, model: str) -> None:
    text = "16777216,5.123456789012345,9007199254740993,01\n3,2.5,7,1\n"
    (tmp_path / "in.csv").write_text(HEAD + text)
    table, _ = score(place, tmp_path, model, "in.csv")
    assert table["clicks"].type == pa.int64() and table["tenure"].type == pa.float64()
    assert table["clicks"].to_pylist() == [16777216, 3]
    assert table["tenure"].to_pylist() == [5.123456789012345, 2.5]
    assert table["id"].to_pylist() == [9007199254740993, 7]
    assert table["zip"].to_pylist() == ["01", "1"]
    near = float(np.float32(5.123456789012345))
    assert table["y"].to_pylist() == [[16777216.0, near], [3.0, 2.5]]


@pytest.mark.parametrize("model", ["number", "float32"])
def test_integer_that_the_tensor_cannot_represent_is_an_error_as_for_parquet(
    place: Path, tmp_path: Path, model: str
) -> None:
    (tmp_path / "in.csv").write_text(HEAD + "1,2.5,1,1\n16777217,2.5,2,2\n")
    table = pa.table({"clicks": [1, 16777217], "tenure": pa.array([2.5, 2.5], pa.float32())})
    pq.write_table(table, tmp_path / "in.parquet")
    errors = [
        score(place, tmp_path, model, f"in.{end}", "--state", end, code=1)[1].splitlines()[0]
        for end in ("csv", "parquet")
    ]
    assert errors[0] == errors[1].replace("in.parquet", "in.csv")
    assert (
        "in.csv, row 1" in errors[0]
        and "`clicks`: row 1 has 16777217" in errors[0]
        and "float32 cannot represent" in errors[0]
    )
    # Rejected rows are as for Parquet, too.
    words = ("--state", "third", "--on-error", "null")
    found, _ = score(place, tmp_path, model, "in.csv", *words)
    assert found["clicks"].to_pylist() == [1, 16777217]
    assert found["y"].to_pylist() == [[1.0, 2.5], None]


def test_text_for_a_number_is_an_error_by_file_row_and_column(place: Path, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(HEAD + "true,1,1,1\nfalse,0,2,2\n")
    table, _ = score(place, tmp_path, "number", "in.csv")
    assert table["clicks"].to_pylist() == [True, False]
    assert table["y"].to_pylist() == [[1.0, 1.0], [0.0, 0.0]]
    for row, model, wanted in (
        ("yes,1,1,1", "number", "in.csv: column 'clicks': row 1 has 'yes'; wanted float32"),
        ("1,30.5,1,1", "int32", "column `tenure`: row 1 has 30.5, which int32 cannot represent"),
    ):
        (tmp_path / "in.csv").write_text(HEAD + "1,1,1,1\n" + row + "\n")
        _, error = score(place, tmp_path, model, "in.csv", "--overwrite", "replace", code=1)
        assert wanted in error and "not a valid" not in error


@pytest.mark.parametrize("end", ["parquet", "csv"])
@pytest.mark.parametrize("model", ["number", "text"])
def test_values_of_hive_folders_are_kept(place: Path, tmp_path: Path, model: str, end: str) -> None:
    for zip in ("01", "1", "7"):
        folder = tmp_path / "in" / f"zip={zip}"
        folder.mkdir(parents=True)
        table = pa.table({"clicks": [1], "tenure": pa.array([2.5], pa.float32())})
        if end == "csv":
            pacsv.write_csv(table, folder / "a.csv")
        else:
            pq.write_table(table, folder / "a.parquet")
    table, _ = score(place, tmp_path, model, "in")
    assert table["zip"].to_pylist() == ["01", "1", "7"]
    if model == "text":
        assert table["y"].to_pylist() == ["01", "1", "7"]
