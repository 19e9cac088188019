"""`iskander bench` against a running server."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.models import row_ids
from support.processes import BIN, Gateway, eventually, running

SHORT = ("--duration-s", "0.4", "--warm-up-s", "0.1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("bench")
    served = [{"name": "ids", "path": str(row_ids(folder / "ids")), "max_batch_rows": 64}]
    with running(folder, served, limits={"rows": 64}) as gateway:
        yield gateway


def bench(server: Gateway, *words: object, code: int = 0) -> str:
    done = subprocess.run(
        [BIN / "iskander", "bench", "ids", "--address", server.address, *map(str, words)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def test_closed_loops(server: Gateway) -> None:
    before = server.stats()["lanes"]["ids/1"].get("requests", 0)
    text = bench(server, "--concurrency", "1,3", "--rows", "4", "--json", *SHORT)
    first, second = json.loads(text)["points"]
    assert (first["title"], second["title"]) == ("1 clients", "3 clients")
    assert first["requests"] > 5 and first["errors"] == second["errors"] == {}
    assert first["rows_per_s"] == pytest.approx(4 * first["completed"])
    assert 0 < first["p50"] <= first["p90"] <= first["p99"] <= first["max"]
    # The server has answered as many, and those of the warm-ups.
    answered = server.stats()["lanes"]["ids/1"].get("requests", 0) - before
    assert answered >= first["requests"] + second["requests"]


def test_open_loop_writes_files(server: Gateway, tmp_path: Path) -> None:
    file = tmp_path / "out.csv"
    words = ("--rate", "50,100", "--clients", "4", "--arrivals", "constant", "--csv", file)
    text = bench(server, *words, "--plot", "-", *SHORT)
    assert "50/s" in text and "p99  #" in text
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row["title"] for row in rows] == ["50/s", "100/s"]
    assert [int(row["requests"]) for row in rows] == [20, 40]


def test_plot_by_matplotlib(server: Gateway, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench(server, "--plot", tmp_path / "out.svg", *SHORT)
    assert "<svg" in (tmp_path / "out.svg").read_text()


def test_real_rows(server: Gateway, tmp_path: Path) -> None:
    """Columns are matched with the model's, as `Client.score` does."""
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": pa.array([1, 2, 3], pa.int32()), "other": ["a", "b", "c"]}), file)
    point = json.loads(bench(server, "--data", file, "--rows", "2", "--json", *SHORT))["points"][0]
    assert point["completed"] > 0 and point["errors"] == {}


def test_failed_requests_are_counted_by_code(server: Gateway) -> None:
    text = bench(server, "--rows", "65", *SHORT, code=1)
    assert "requests failed with limit" in text


def test_interruption_prints_the_figures_until_then(server: Gateway) -> None:
    process = subprocess.Popen(
        [BIN / "iskander", "bench", "ids", "--address", server.address, "--duration-s", "60",
         "--warm-up-s", "0", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    before = server.stats()["lanes"]["ids/1"].get("requests", 0)
    eventually(lambda: server.stats()["lanes"]["ids/1"].get("requests", 0) > before + 10)
    process.send_signal(signal.SIGINT)
    text, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert json.loads(text)["points"][0]["requests"] > 5 and "Traceback" not in errors


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--rate", "1", "--concurrency", "1"), 2, "not allowed with"),
        (("--rate", "x"), 2, "--rate x: expected numbers"),
        (("--rate", "0"), 2, "--rate 0: expected a value from 0.001"),
        (("--concurrency", "4000"), 2, "--concurrency 4000: expected a value from 1 to 1024"),
        (("--concurrency", "nan"), 2, "--concurrency nan: expected a value from 1 to 1024"),
        (("--concurrency", "1,inf"), 2, "--concurrency inf: expected a value from 1 to 1024"),
        (("--plot", "out.txt"), 2, "--plot out.txt: expected a name with"),
        (("--data", "none.parquet"), 78, "cannot be read as Parquet or Arrow"),
    ],
)
def test_wrong_usage(server: Gateway, words: tuple[str, ...], code: int, text: str) -> None:
    assert text in bench(server, *words, code=code)
