"""Cases of `test_ray.py`: `iskander score --engine ray` on a cluster that loses a node."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray.cluster_utils import Cluster
from support import models
from support.processes import eventually

ROWS, FILES = 24_000, 24
BATCH_ROWS = 250
WITHIN_S = 120.0
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A slow model, its input, and the output of a job without Ray in `here/out`."""
    folder = tmp_path_factory.mktemp("score")
    models.combinable(models.looping(folder / "slow", 20_000, 0))
    (folder / "in").mkdir()
    rows = ROWS // FILES
    for index in range(FILES):
        table = pa.table({"x": range(index * rows, (index + 1) * rows)})
        pq.write_table(table, folder / "in" / f"{index:03}.parquet")
    (folder / "here").mkdir()
    process = begin(folder, folder / "here")
    assert process.wait(WITHIN_S) == 0
    return folder


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    started = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    for _ in range(2):
        started.add_node(num_cpus=1)
    yield started
    started.shutdown()


def begin(place: Path, folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start the command, with one unit for each file."""
    size = str((place / "in/000.parquet").stat().st_size)
    command = [
        BIN / "iskander", "score", place / "slow", place / "in", "-o", "out", "--unit-size", size,
        "--batch-rows", str(BATCH_ROWS), "--progress", "none", *words,
    ]  # fmt: skip
    return subprocess.Popen([str(each) for each in command], cwd=folder)


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def finished_units(folder: Path) -> int:
    journal = folder / "_iskander/out/journal.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def test_output_is_byte_for_byte_that_of_a_job_without_ray_after_the_loss_of_a_node(
    place: Path, nodes: Cluster
) -> None:
    folder = place / "lost"
    folder.mkdir()
    process = begin(place, folder, "--engine", "ray", "--ray-address", nodes.address)
    eventually(lambda: finished_units(folder) >= 3, within_s=WITHIN_S, what="three finished units")
    nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
    assert finished_units(folder) < FILES
    assert process.wait(WITHIN_S) == 0
    assert files(folder / "out") == files(place / "here/out")
    assert sum(name.startswith("part-") for name in files(folder / "out")) == FILES


def test_killed_command_is_resumed(place: Path, nodes: Cluster) -> None:
    folder = place / "killed"
    folder.mkdir()
    words = ("--engine", "ray", "--ray-address", nodes.address)
    process = begin(place, folder, *words)
    eventually(lambda: finished_units(folder) >= 3, within_s=WITHIN_S, what="three finished units")
    process.kill()
    process.wait(WITHIN_S)
    assert finished_units(folder) < FILES
    process = begin(place, folder, *words, "--resume")
    assert process.wait(WITHIN_S) == 0
    assert files(folder / "out") == files(place / "here/out")
