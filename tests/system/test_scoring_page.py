"""The commands of docs/scoring.md, run as printed."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from onnx import TensorProto, helper
from support import models
from support.models import ROOT
from support.processes import BIN

PAGE = (ROOT / "docs" / "scoring.md").read_text("utf-8")
ROWS = 1000
COUNTRIES = ["FR", "DE", "PL"]


def commands() -> list[str]:
    (block,) = re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S)
    return [line for line in block.splitlines() if line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's model and data, in which its commands have run."""
    folder = tmp_path_factory.mktemp("page")
    ages = helper.make_tensor_value_info("user_age", TensorProto.INT64, ["rows"])
    scores = helper.make_tensor_value_info("score", TensorProto.INT64, ["rows"])
    double = helper.make_node("Add", ["user_age", "user_age"], ["score"])
    models.save(folder / "models" / "churn", [double], [ages], [scores])
    (folder / "data").mkdir()
    for number in range(2):
        age = np.arange(ROWS) % 90
        columns = {
            "id": np.arange(ROWS) + number * ROWS,
            "age": age,
            "user_age": age,
            "country": [COUNTRIES[row % 3] for row in range(ROWS)],
        }
        pq.write_table(pa.table(columns), folder / "data" / f"{number}.parquet")
    for command in commands():
        name, *arguments = shlex.split(command)
        assert name == "iskander"
        result = subprocess.run(
            [BIN / name, *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == 0, (command, result.stderr)
    return folder


def test_folder_contains_every_row_with_its_result(folder: Path) -> None:
    table = ds.dataset(folder / "scored", format="parquet").to_table().sort_by("id")
    assert table["id"].to_pylist() == list(range(2 * ROWS))
    assert table["score"].to_pylist() == [2 * age for age in table["age"].to_pylist()]
    assert (folder / "scored" / "_SUCCESS").exists()


def test_file_contains_the_kept_columns_of_the_filtered_rows(folder: Path) -> None:
    table = pq.read_table(folder / "again.parquet")
    assert table.column_names == ["id", "score"]
    ages = [row % 90 for _ in range(2) for row in range(ROWS)]
    assert len(table) == sum(age > 30 for age in ages)


def test_partitions_are_hive_folders(folder: Path) -> None:
    parts = {each.name for each in (folder / "parts").iterdir() if each.is_dir()}
    assert {f"country={country}" for country in COUNTRIES} <= parts


def test_dry_run_writes_nothing(folder: Path) -> None:
    assert not (folder / "planned").exists()
    assert (folder / "checked" / "_SUCCESS").exists()


def shape(line: str) -> str:
    """A line without its numbers, its names and the length of its bar."""
    line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip()
    line = re.sub(r"[━╸╺]+", "BAR", line)
    # A job of few rows ends before it has a rate.
    line = re.sub(r"(rows) +([\d,]+ rows/s )?(\d:|-)", r"\1 \3", line)
    line = re.sub(r"(model +)[\w-]+", r"\1NAME", line)
    return re.sub(r" +", " ", re.sub(r"\d[\d,.:]*", "N", line))


def test_terminal_shows_the_bar_and_the_report_of_the_page(folder: Path) -> None:
    running, ended = re.findall(r"^```text\n(.*?)^```", PAGE, re.M | re.S)
    terminal, end = pty.openpty()
    words = [*shlex.split(commands()[0])[1:], "--overwrite", "replace"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        [BIN / "iskander", *words], cwd=folder, env=environment, stdout=end, stderr=end
    )
    os.close(end)
    text = b""
    # At the end of the process, a read of a terminal is an error.
    with contextlib.suppress(OSError), open(terminal, "rb", buffering=0) as file:
        while data := file.read(65536):
            text += data
    assert process.wait(60) == 0
    shown = [shape(line) for line in re.split(r"[\r\n]+", text.decode())]
    expected = [shape(line) for line in ended.splitlines()]
    assert [line for line in shown if line][-len(expected) :] == expected
    assert shape(running) == expected[0]


def test_help_fits_a_screen_and_names_the_exit_codes_of_the_page() -> None:
    result = subprocess.run(
        [BIN / "iskander", "score", "--help"], capture_output=True, text=True, check=True
    )
    assert len(result.stdout.splitlines()) <= 60
    assert re.findall(r"^\| (\d+) \|", PAGE, re.M) == ["0", "1", "2", "3", "130"]
