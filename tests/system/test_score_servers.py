"""`iskander score` on running servers: tokens that end, servers that drain, and memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import models
from support.processes import BIN, Gateway, eventually, running

from iskander.client import OFF, Client
from iskander.errors import RuntimeDiffers, Unauthenticated
from iskander.gateway.auth.tokens import add_token
from iskander.lake.execution import runtime_terms

ROWS = 2000
WITHIN_S = 60.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A slow model and an input of eight row groups."""
    folder = tmp_path_factory.mktemp("servers")
    models.combinable(models.looping(folder / "slow", 30_000, 0))
    table = pa.table({"x": range(ROWS)})
    pq.write_table(table, folder / "in.parquet", row_group_size=ROWS // 8)
    return folder


def begin(
    folder: Path, place: Path, gateways: list[Gateway], *words: str, token: str = ""
) -> subprocess.Popen[str]:
    """Start a job of eight units on running servers."""
    addresses = ",".join(each.address for each in gateways)
    size = (place / "in.parquet").stat().st_size // 8
    command = [
        str(BIN / "iskander"), "score", "slow", str(place / "in.parquet"), "-o", "out",
        "--server", addresses, "--batch-rows", "50", "--unit-size", str(size), "--concurrency", "2",
        "--progress", "none", *words,
    ]  # fmt: skip
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "ISKANDER_TOKEN": token, "PYTHONFAULTHANDLER": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished_units(folder: Path) -> int:
    journal = folder / "_iskander/out/journal.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def wait_for_unit(process: subprocess.Popen[str], folder: Path) -> None:
    """Wait for a finished unit; if there is none, show what the threads of the job do."""
    try:
        eventually(lambda: finished_units(folder) >= 1, what="a finished unit")
    except AssertionError:
        process.send_signal(signal.SIGABRT)
        sys.stderr.write(process.communicate(timeout=WITHIN_S)[1])
        raise


def assert_complete(folder: Path) -> None:
    table = pq.read_table(folder / "out")
    assert table["x"].to_pylist() == list(range(ROWS))
    assert set(os.listdir(folder / "out")) >= {"_SUCCESS"}


def served(folder: Path) -> list[dict[str, object]]:
    return [{"name": "slow", "path": str(folder / "slow"), "intra_threads": 1}]


@pytest.mark.slow
def test_job_whose_token_ends_fails_by_name_and_resumes_with_a_new_one(
    place: Path, tmp_path: Path
) -> None:
    server = tmp_path / "server"
    # Slower than the server, which looks at the file of tokens once a second.
    models.combinable(models.looping(server / "slow", 20000, 0))
    file = server / "tokens.toml"
    operator = add_token(file, "operator", ("*",), manage=True)
    without = file.read_text()
    token = add_token(file, "job", ("slow",))
    access = {"tokens": "tokens.toml"}
    with running(
        server, served(server), workers={"count": 1}, access=access, token=operator
    ) as gateway:
        process = begin(tmp_path, place, [gateway], token=token)
        wait_for_unit(process, tmp_path)
        file.write_text(without)
        _, error = process.communicate(timeout=WITHIN_S)
        assert process.returncode == 1
        assert "[unauthenticated]" in error and "--resume" in error
        assert not (tmp_path / "out/_SUCCESS").exists()
        done = finished_units(tmp_path)
        assert 1 <= done < 8

        renewed = add_token(file, "renewed", ("slow",))
        eventually(lambda: _accepts(gateway, renewed), what="acceptance of the new token")
        process = begin(tmp_path, place, [gateway], "--resume", "--report", "r.json", token=renewed)
        _, error = process.communicate(timeout=WITHIN_S)
        assert process.returncode == 0, error
        assert f'"units_resumed": {done}' in (tmp_path / "r.json").read_text()
    assert_complete(tmp_path)


def _accepts(gateway: Gateway, token: str) -> bool:
    try:
        with Client(gateway.address, token=token, retry=OFF) as client:
            return bool(client.model("slow"))
    except Unauthenticated:
        return False


def test_job_moves_from_a_server_that_drains(place: Path, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for each in folders:
        each.mkdir()
    with (
        running(folders[0], served(place), workers={"count": 1}) as first,
        running(folders[1], served(place), workers={"count": 1}) as second,
    ):
        process = begin(tmp_path, place, [first, second])
        wait_for_unit(process, tmp_path)
        first.signal(signal.SIGTERM)
        _, error = process.communicate(timeout=WITHIN_S)
        assert process.returncode == 0, error
    assert_complete(tmp_path)


@pytest.fixture
def unequal(place: Path, tmp_path: Path) -> Iterator[list[Gateway]]:
    """Servers of one model, with one thread and with two."""
    folders = [tmp_path / "servers" / name for name in ("one", "two")]
    for each in folders:
        each.mkdir(parents=True)
    one, two = ([{**each, "intra_threads": count} for each in served(place)] for count in (1, 2))
    workers = {"count": 1}
    with (
        running(folders[0], one, workers=workers) as first,
        running(folders[1], two, workers=workers) as second,
    ):
        yield [first, second]


def test_servers_with_other_threads_are_rejected_by_name(
    unequal: list[Gateway], place: Path, tmp_path: Path
) -> None:
    process = begin(tmp_path, place, unequal)
    _, error = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 1 and not (tmp_path / "out").exists()
    assert re.search(
        r"server \S+ runs model `slow` differently: threads was (1, is 2|2, is 1)", error
    )
    first, second = (Client(each.address, retry=OFF) for each in unequal)
    with first, second:
        described = first.model("slow").description
        terms = runtime_terms(described)
        assert re.fullmatch(
            r"ONNX Runtime [\d.]+, CPUExecutionProvider, threads 1", terms["runtimes"]
        )
        batch = pa.record_batch({"x": [1]})
        assert first.score("slow", batch, terms=terms).num_rows == 1
        with pytest.raises(
            RuntimeDiffers, match=r"runs with .* threads 2; the caller expects .* 1"
        ):
            second.score("slow", batch, terms=terms)
        assert second.score("slow", batch).num_rows == 1


def test_resume_with_another_runtime_or_batch_size_is_rejected_by_name(
    unequal: list[Gateway], place: Path, tmp_path: Path
) -> None:
    first, second = unequal
    process = begin(tmp_path, place, [first])
    wait_for_unit(process, tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=WITHIN_S) and process.returncode == 130
    for gateway, words, text in (
        (second, (), "(threads was 1, is 2)"),
        (first, ("--batch-rows", "60"), "(batch_rows was 50, is 60)"),
    ):
        process = begin(tmp_path, place, [gateway], *words, "--resume")
        _, error = process.communicate(timeout=WITHIN_S)
        assert process.returncode == 1 and text in error
    process = begin(tmp_path, place, [first], "--resume")
    _, error = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, error
    assert_complete(tmp_path)
    (file, *_) = sorted((tmp_path / "out").glob("*.parquet"))
    metadata = pq.read_schema(file).metadata
    assert metadata[b"iskander.threads"] == b"1" and metadata[b"iskander.batch_rows"] == b"50"
    assert metadata[b"iskander.providers"] == b"CPUExecutionProvider"
    assert metadata[b"iskander.runtime"].startswith(b"ONNX Runtime 1.")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    models.row_ids(tmp_path / "ids")
    yield tmp_path


def _peak(folder: Path, rows: int) -> tuple[int, int]:
    """Score a file; return the peak of the command's own memory and the bound of `--dry-run`."""
    file = folder / f"{rows}.parquet"
    random = np.random.default_rng(3)
    schema = pa.schema({"x": pa.int64(), "noise": pa.float64()})
    with pq.ParquetWriter(file, schema) as writer:
        for _ in range(rows // 500_000):
            columns = [random.integers(0, 1 << 40, 500_000), random.random(500_000)]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    command = [str(BIN / "iskander"), "score", str(folder / "ids"), str(file), "-o", f"{rows}"]
    command += ["--unit-size", "16MB", "--concurrency", "2"]
    plan = subprocess.run(
        [*command, "--dry-run"], cwd=folder, capture_output=True, text=True, check=True
    ).stdout
    (line,) = [each for each in plan.splitlines() if each.startswith("memory")]
    bound = int(line.split()[1].replace(",", ""))
    process = psutil.Popen([*command, "--progress", "none"], cwd=folder, stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        try:
            peak = max(peak, process.memory_info().rss)
        except psutil.Error:
            break
        try:
            process.wait(0.02)
        except psutil.TimeoutExpired:
            continue
    assert process.wait(WITHIN_S) == 0
    return peak, bound


@pytest.mark.slow
def test_memory_is_bounded_whatever_the_size_of_the_input(memory: Path) -> None:
    small, bound = _peak(memory, 1_000_000)
    large, same_bound = _peak(memory, 20_000_000)
    assert bound == same_bound
    # The process itself, and what Parquet decodes ahead.
    assert small < bound + 256 * MIB and large < bound + 256 * MIB, (small, large, bound)
    assert large - small < bound
