"""`iskander score` as a command: files, streams, rejected rows, signals and lost servers."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deltalake
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from onnx import TensorProto, helper
from support import models
from support.processes import BIN, Gateway, eventually, running
from support.repositories import Folder

ROWS = 4000
FILES = 4
UNITS = 8
WITHIN_S = 60.0


def dense(folder: Path) -> Path:
    """`y = relu(x w)` on rows of four floats."""
    weights = np.random.default_rng(5).standard_normal((4, 2)).astype(np.float32)
    return models.save(
        folder,
        [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Relu", ["m"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 2])],
        [helper.make_tensor("w", TensorProto.FLOAT, [4, 2], weights.ravel())],
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and inputs of all tests."""
    folder = tmp_path_factory.mktemp("score")
    models.row_ids(folder / "ids")
    models.looping(folder / "slow", 400, 0)
    dense(folder / "dense")
    (folder / "in").mkdir()
    each = ROWS // FILES
    for index in range(FILES):
        x = list(range(index * each, (index + 1) * each))
        table = pa.table({"x": x, "label": [f"r{value % 7}" for value in x]})
        pq.write_table(table, folder / f"in/f{index}.parquet", row_group_size=each // 2)
    return folder


@pytest.fixture(scope="module")
def gateway(place: Path) -> Iterator[Gateway]:
    paths = {name: str(place / name) for name in ("ids", "dense")}
    served = [{"name": name, "path": path} for name, path in paths.items()]
    folder = place / "server"
    folder.mkdir()
    with running(folder, served, workers={"count": 1}) as gateway:
        yield gateway


def command(*words: str | Path) -> list[str]:
    return [str(BIN / "iskander"), "score", *map(str, words)]


def begin(tmp_path: Path, *words: str | Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start the command, with its private server's files below `tmp_path`."""
    environment = dict(os.environ, TMPDIR=str(tmp_path))
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command(*words), env=environment, cwd=tmp_path, **streams)


def score(
    tmp_path: Path, *words: str | Path, code: int = 0, data: bytes | None = None
) -> tuple[bytes, str]:
    """Run the command; return its output and its error text."""
    process = begin(tmp_path, *words, stdin=subprocess.DEVNULL if data is None else subprocess.PIPE)
    out, error = process.communicate(data, timeout=WITHIN_S)
    assert process.returncode == code, error.decode()
    return out, error.decode()


def files(folder: Path) -> dict[str, bytes]:
    """Contents of all files below a folder."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def slow_words(place: Path, output: Path) -> list[str | Path]:
    """A job of eight units with several batches each."""
    size = (place / "in/f0.parquet").stat().st_size // 2
    return [
        place / "slow", place / "in", "-o", output, "--batch-rows", "50", "--unit-size", str(size),
        "--concurrency", "2", "--keep", "label", "--progress", "none",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> dict[str, bytes]:
    """Files of the slow job, whose output has the same path in each test's own folder."""
    folder = place / "undisturbed"
    folder.mkdir()
    score(folder, *slow_words(place, Path("out")))
    assert sum(name.startswith("part-") for name in files(folder / "out")) == UNITS
    return files(folder / "out")


def finished_units(folder: Path) -> int:
    journal = folder / "_iskander/out/journal.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def children(pid: int, text: str) -> list[psutil.Process]:
    """Processes below the command with a text in their command line."""
    try:
        found = psutil.Process(pid).children(recursive=True)
        return [each for each in found if text in " ".join(each.cmdline())]
    except psutil.Error:
        return []


# -- Inputs, outputs and columns


def test_parquet_folder_equals_onnx_runtime_in_process(
    gateway: Gateway, place: Path, tmp_path: Path
) -> None:
    features = np.random.default_rng(1).standard_normal((1000, 4)).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), 4)
    pq.write_table(pa.table({"id": list(range(1000)), "x": column}), tmp_path / "in.parquet")
    score(
        tmp_path, "dense", "in.parquet", "-o", "out", "--server", gateway.address, "--keep", "id",
        "--batch-rows", "100",
    )  # fmt: skip
    result = pq.read_table(tmp_path / "out")
    assert result["id"].to_pylist() == list(range(1000))
    expected = np.concatenate(
        [
            models.in_process(place / "dense", {"x": features[start : start + 100]})[0]
            for start in range(0, 1000, 100)
        ]
    )
    got = np.array(result["y"].to_pylist(), np.float32)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_private_server_scores_a_folder_and_ends(place: Path, tmp_path: Path) -> None:
    _, text = score(tmp_path, place / "ids", place / "in", "-o", "out", "--report", "report.json")
    result = pq.read_table(tmp_path / "out")
    assert result.column_names == ["x", "label", "y"]
    assert result["x"].to_pylist() == list(range(ROWS))
    assert result["y"].to_pylist() == [3 * x + 1 for x in range(ROWS)]
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["rows_in"], report["rows_out"], report["state"]) == (ROWS, ROWS, "done")
    assert f"{ROWS:,} in" in text
    assert {path.name for path in tmp_path.iterdir()} == {"out", "report.json"}


def test_map_keep_filter_and_limit(gateway: Gateway, tmp_path: Path) -> None:
    table = pa.table({"number": list(range(500)), "b": ["x", "y"] * 250, "c": [1.5] * 500})
    pq.write_table(table, tmp_path / "in.parquet")
    score(
        tmp_path, "ids", "in.parquet", "-o", "out.parquet", "--server", gateway.address,
        "--map", "x=number", "--keep", "b,number", "--limit", "20", "--batch-rows", "7",
        "--filter", "number > 100 and b == 'x'",
    )  # fmt: skip
    result = pq.read_table(tmp_path / "out.parquet")
    assert result.column_names == ["b", "number", "y"]
    wanted = list(range(102, 142, 2))
    assert result["number"].to_pylist() == wanted
    assert result["y"].to_pylist() == [3 * x + 1 for x in wanted]


def test_csv_in_and_out(gateway: Gateway, tmp_path: Path) -> None:
    pacsv.write_csv(pa.table({"x": list(range(300))}), tmp_path / "in.csv")
    score(tmp_path, "ids", "in.csv", "-o", "out.csv", "--server", gateway.address)
    assert pacsv.read_csv(tmp_path / "out.csv")["y"].to_pylist() == [3 * x + 1 for x in range(300)]


def test_arrow_stream_in_and_out(gateway: Gateway, tmp_path: Path) -> None:
    sink = pa.BufferOutputStream()
    table = pa.table({"x": list(range(1000))})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=90)
    words = ("ids", "-", "-o", "-", "--server", gateway.address, "--progress", "none")
    out, _ = score(tmp_path, *words, data=sink.getvalue().to_pybytes())
    assert pa.ipc.open_stream(out).read_all()["y"].to_pylist() == [3 * x + 1 for x in range(1000)]
    assert not list(tmp_path.iterdir())


def test_dry_run_shows_the_plan_and_writes_nothing(
    gateway: Gateway, place: Path, tmp_path: Path
) -> None:
    table = pa.table({"number": pa.array(range(100), pa.int32())})
    pq.write_table(table, tmp_path / "in.parquet")
    before = files(tmp_path)
    out, _ = score(
        tmp_path, "ids", "in.parquet", "-o", "out", "--server", gateway.address,
        "--map", "x=number", "--dry-run",
    )  # fmt: skip
    text = out.decode()
    assert "1 units, 100 rows" in text
    assert "x <- number: int32" in text
    assert "no earlier run" in text
    assert files(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == {"in.parquet"}


def test_plan_and_report_as_json(gateway: Gateway, place: Path, tmp_path: Path) -> None:
    """Standard output is one JSON value; with results on it, the option is wrong usage."""
    table = pa.table({"number": pa.array(range(100), pa.int32())})
    pq.write_table(table, tmp_path / "in.parquet")
    words = ("ids", "in.parquet", "--server", gateway.address, "--map", "x=number", "--json")
    plan = json.loads(score(tmp_path, *words, "-o", "out", "--dry-run")[0])
    assert (plan["units"], plan["rows"], plan["earlier"]["state"]) == (1, 100, "none")
    assert plan["columns"] == [
        {"input": "x", "column": "number", "given": "int32", "sent": "int64"}
    ]
    assert plan["estimate"]["rows"] == 100
    report = json.loads(score(tmp_path, *words, "-o", "out")[0])
    assert (report["state"], report["rows_in"], report["rows_out"]) == ("done", 100, 100)
    assert "--report" in score(tmp_path, *words, "-o", "-", code=2)[1]


# -- Errors and exit codes


def test_files_of_a_table_are_rejected_unless_they_are_asked_for(
    gateway: Gateway, tmp_path: Path
) -> None:
    for numbers in ([1, 2, 3, 4], [1, 2]):
        data = pa.table({"x": numbers, "p": ["b"] * len(numbers)})
        deltalake.write_deltalake(
            str(tmp_path / "lake/t"), data, partition_by=["p"], mode="overwrite"
        )
    server = ("--server", gateway.address, "--keep", "x")
    for given in ("lake", "lake/t/p=b", "lake/t/*/*.parquet"):
        _, text = score(tmp_path, "ids", given, "-o", "out", *server, code=1)
        assert f"the Delta table {tmp_path}/lake/t" in text and "--plain-files" in text
    assert not (tmp_path / "out").exists() and not (tmp_path / "_iskander").exists()
    score(tmp_path, "ids", "lake/t", "-o", "table.parquet", *server)
    assert pq.read_table(tmp_path / "table.parquet")["x"].to_pylist() == [1, 2]
    score(tmp_path, "ids", "lake/t/p=b", "-o", "all.parquet", *server, "--plain-files")
    assert sorted(pq.read_table(tmp_path / "all.parquet")["x"].to_pylist()) == [1, 1, 2, 2, 3, 4]


def test_existing_output_is_refused(gateway: Gateway, place: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/data.parquet").write_bytes(b"kept")
    words = ("ids", place / "in", "-o", "out", "--server", gateway.address)
    _, text = score(tmp_path, *words, code=1)
    assert "out" in text and "--overwrite" in text
    assert files(tmp_path) == {"out/data.parquet": b"kept"}


@pytest.fixture
def with_nulls(tmp_path: Path) -> Path:
    x: list[int | None] = list(range(300))
    x[17] = x[18] = x[250] = None
    path = tmp_path / "nulls.parquet"
    pq.write_table(pa.table({"x": x, "id": list(range(300))}), path)
    return path


def test_rejected_row_fails_the_job(gateway: Gateway, with_nulls: Path, tmp_path: Path) -> None:
    words = ("ids", with_nulls, "-o", "out", "--server", gateway.address)
    _, text = score(tmp_path, *words, code=1)
    assert f"input {with_nulls}, row 17 (from 0): column `x` has 3 nulls" in text
    # The same job would fail again.
    assert "change the data or the options" in text and "--on-error null" in text
    assert "--resume" not in text
    assert not list(tmp_path.glob("out/part-*"))


def test_error_of_a_batch_names_the_file_and_its_row(gateway: Gateway, tmp_path: Path) -> None:
    """Batches and units join small files, and the filter removes rows before the bad one."""
    (tmp_path / "in").mkdir()
    for index in range(3):
        x: list[int | None] = list(range(1000))
        if index == 1:
            x[517] = None
        table = pa.table({"x": x, "id": list(range(1000))})
        pq.write_table(table, tmp_path / f"in/{index}.parquet", row_group_size=300)
    words = ("-o", "out", "--server", gateway.address, "--batch-rows", "256", "--restart")
    one = ("in/1.parquet", "--filter", "id > 510", "--dry-run")
    for more in (("in",), ("in", "--filter", "id > 500"), one):
        _, text = score(tmp_path, "ids", *more, *words, code=1)
        assert "in/1.parquet, row 517 (from 0): column `x` has 1 nulls" in text


def test_folder_with_versions_is_its_newest_one(place: Path, tmp_path: Path) -> None:
    for version in (1, 9, 10):
        models.row_ids(tmp_path / f"churn/{version}")
    (tmp_path / "churn/11").mkdir()  # Without a model yet.
    words = ("churn", place / "in", "-o", "out")
    out, _ = score(tmp_path, *words, "--dry-run")
    assert b"model     churn, version 10" in out
    score(tmp_path, *words)
    assert pq.read_table(tmp_path / "out").num_rows == ROWS


def test_missing_column_is_answered_with_the_option_to_map(
    gateway: Gateway, tmp_path: Path
) -> None:
    for name, option in (("X1", "--map x=X1"), ("other", "--map x=COLUMN")):
        pq.write_table(pa.table({name: [1], "id": [1]}), tmp_path / "in.parquet")
        words = ("ids", "in.parquet", "-o", "out", "--server", gateway.address)
        _, text = score(tmp_path, *words, code=1)
        assert "column `x` is missing" in text and option in text
        assert f"the input has `{name}`, `id`" in text
        assert ("the nearest is `X1`" in text) == (name == "X1")


def test_rejected_rows_are_null(gateway: Gateway, with_nulls: Path, tmp_path: Path) -> None:
    words = ("ids", with_nulls, "-o", "out", "--server", gateway.address, "--batch-rows", "64")
    score(tmp_path, *words, "--on-error", "null")
    result = pq.read_table(tmp_path / "out")
    assert result["id"].to_pylist() == list(range(300))
    bad = (17, 18, 250)
    assert result["y"].to_pylist() == [None if i in bad else 3 * i + 1 for i in range(300)]


def test_rejected_rows_are_quarantined(gateway: Gateway, with_nulls: Path, tmp_path: Path) -> None:
    words = ("ids", with_nulls, "-o", "out", "--server", gateway.address, "--batch-rows", "64")
    score(tmp_path, *words, "--on-error", "quarantine=bad", "--keep", "id", code=3)
    good = [i for i in range(300) if i not in (17, 18, 250)]
    result = pq.read_table(tmp_path / "out")
    assert result["id"].to_pylist() == good
    assert result["y"].to_pylist() == [3 * i + 1 for i in good]
    bad = pq.read_table(tmp_path / "bad")
    assert bad["id"].to_pylist() == [17, 18, 250]
    assert bad["error_code"].to_pylist() == ["contract"] * 3


@pytest.mark.parametrize("how", [pytest.param("null", marks=pytest.mark.slow), "quarantine=bad"])
def test_row_that_ends_the_runtime_is_a_rejected_row(tmp_path: Path, how: str) -> None:
    """An integer division of the least value by -1 ends the worker by a signal."""
    models.fragile(tmp_path / "fragile")
    x = list(range(1000))
    x[423] = -(2**63)
    pq.write_table(pa.table({"x": x, "id": list(range(1000))}), tmp_path / "in.parquet")
    words = ("fragile", "in.parquet", "-o", "out", "--on-error", how, "--keep", "id")
    score(tmp_path, *words, code=3 if "=" in how else 0)
    result = pq.read_table(tmp_path / "out")
    expected: list[int | None] = [-each for each in range(1000)]
    if how == "null":
        expected[423] = None
    else:
        del expected[423]
        bad = pq.read_table(tmp_path / "bad")
        assert bad["id"].to_pylist() == [423] and bad["error_code"].to_pylist() == ["poisoned"]
    assert result["y"].to_pylist() == expected


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("ids", "in", "-o", "out", "--batch-rows", "0"), 2, "batch_rows"),
        (("ids", "in", "-o", "out", "--filter", "__import__('os')"), 2, "filter"),
        (("none", "in", "-o", "out"), 2, "none"),
        (("ids",), 2, "usage"),
    ],
)
def test_wrong_usage_exits_with_2(
    place: Path, tmp_path: Path, words: tuple[str, ...], code: int, expected: str
) -> None:
    given = [place / word if word in ("ids", "in") else word for word in words]
    _, text = score(tmp_path, *given, code=code)
    assert expected in text
    assert not list(tmp_path.iterdir())


def test_unknown_model_exits_with_1(gateway: Gateway, place: Path, tmp_path: Path) -> None:
    words = ("nothing", place / "in", "-o", "out", "--server", gateway.address)
    _, text = score(tmp_path, *words, code=1)
    assert "nothing" in text


def test_unattended_job_drops_failed_work_and_appends_an_input_once(
    gateway: Gateway, with_nulls: Path, tmp_path: Path
) -> None:
    words = ("ids", with_nulls, "-o", "delta://out", "--server", gateway.address)
    words += ("--overwrite", "append")

    def written() -> list[int]:
        return sorted(DeltaTable(tmp_path / "out").to_pyarrow_table()["id"].to_pylist())

    score(tmp_path, *words, "--unattended", code=1)
    pq.write_table(pa.table({"x": range(300), "id": range(300)}), with_nulls)
    assert "--restart" in score(tmp_path, *words, code=1)[1]
    for _ in range(2):
        score(tmp_path, *words, "--unattended")
        assert written() == list(range(300))
    assert "nothing is appended twice" in score(tmp_path, *words, code=1)[1]


# -- Signals and lost processes


def test_sigint_prints_the_command_that_resumes_to_equal_bytes(
    place: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    process = begin(tmp_path, *slow_words(place, Path("out")), start_new_session=True)
    eventually(lambda: finished_units(tmp_path) >= 2, what="two finished units")
    # The server is in a group of its own, so that it can finish the units in flight.
    (server,) = children(process.pid, "iskander.gateway")
    assert os.getpgid(server.pid) != process.pid
    # As a terminal does: every process of the command's group gets the signal.
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 130, error.decode()
    assert 2 <= finished_units(tmp_path) < UNITS
    line = error.decode().splitlines()[-1].strip()
    words = shlex.split(line)
    assert words[:2] == ["iskander", "score"] and words[-1] == "--resume"
    assert not list(tmp_path.glob("out/part-*"))
    score(tmp_path, *words[2:])
    assert files(tmp_path / "out") == undisturbed
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 20))]
)
def test_sigkill_at_a_random_moment_then_resume_gives_equal_bytes(
    place: Path, tmp_path: Path, undisturbed: dict[str, bytes], seed: int
) -> None:
    chance = random.Random(seed)
    words = slow_words(place, Path("out"))
    process = begin(tmp_path, *words)
    count = chance.randrange(UNITS)
    has_units = lambda: finished_units(tmp_path) >= count or process.poll() is not None  # noqa: E731
    eventually(has_units, what=f"{count} finished units")
    try:
        process.wait(chance.uniform(0, 0.2))
    except subprocess.TimeoutExpired:
        process.kill()
    process.communicate(timeout=WITHIN_S)
    has_plan = (tmp_path / "_iskander/out/plan.json").exists()
    # Without a plan, either nothing was begun, or the output is complete.
    if has_plan or not (tmp_path / "out/_SUCCESS").exists():
        score(tmp_path, *words, *(["--resume"] if has_plan else []))
    assert files(tmp_path / "out") == undisturbed


@pytest.mark.parametrize(
    "text", [pytest.param("iskander_worker", marks=pytest.mark.slow), "iskander.gateway"]
)
def test_killed_process_of_the_private_server_changes_no_byte(
    place: Path, tmp_path: Path, undisturbed: dict[str, bytes], text: str
) -> None:
    process = begin(tmp_path, *slow_words(place, Path("out")))
    eventually(lambda: finished_units(tmp_path) >= 1, what="a finished unit")
    victim = children(process.pid, text)[0]
    victim.kill()
    _, error = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, error.decode()
    assert files(tmp_path / "out") == undisturbed


def test_model_replaced_during_a_job_ends_it_by_name(tmp_path: Path) -> None:
    repository = Folder(tmp_path / "models")
    repository.put("m", 1, 2)
    settings = {"path": str(repository.root), "control": "explicit", "load": ["m"]}
    with running(tmp_path, [], repository=settings, workers={"count": 1}) as gateway:
        process = begin(
            tmp_path, "m", "-", "-o", "-", "--server", gateway.address, "--batch-rows", "10",
            stdin=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        batch = pa.record_batch({"x": list(range(10))})
        writer = pa.ipc.new_stream(process.stdin, batch.schema)
        writer.write_batch(batch)
        writer.write_batch(batch)
        process.stdin.flush()
        results = pa.ipc.open_stream(process.stdout)
        assert results.read_next_batch()["y"].to_pylist() == [2 * x for x in range(10)]
        # The contract stays the same.
        repository.put("m", 1, 3)
        with gateway.client() as client:
            client.load("m")
        writer.write_batch(batch)
        writer.close()
        process.stdin.close()
        assert process.wait(WITHIN_S) == 1
        error = process.stderr.read().decode() if process.stderr is not None else ""
        assert "m/1" in error and "replaced" in error
        process.stdout.close()
        assert process.stderr is not None
        process.stderr.close()
