"""Cases of `test_ray.py`: the blocks of docs/scaling.md for Ray, as programs of their own."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from ray.cluster_utils import Cluster
from support import models
from support.processes import Gateway, eventually, running
from support.scaling_page import block

ROWS, FILES = 20_000, 20
WITHIN_S = 180.0
BIN = Path(sys.executable).parent
RESUMED = """
import time
import ray
from iskander.ray import score
ray.init({address!r})
{checkpoint}
def slow(table):
    time.sleep(0.3)
    return table
rows = ray.data.read_parquet({source!r}).repartition(target_num_rows_per_block={block_rows})
rows = rows.map_batches(slow, batch_format="pyarrow", batch_size=None)
score(rows, "churn", {target!r}, keep=["id"], block_rows=None).write_parquet({output!r})
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, and files with its input `x` and the column `id`."""
    folder = tmp_path_factory.mktemp("page")
    models.row_ids(folder / "churn")
    (folder / "customers").mkdir()
    rows = ROWS // FILES
    for index in range(FILES):
        ids = range(index * rows, (index + 1) * rows)
        pq.write_table(pa.table({"id": ids, "x": ids}), folder / f"customers/{index:03}.parquet")
    return folder


@pytest.fixture(scope="module")
def gateways(place: Path) -> Iterator[list[Gateway]]:
    served = [{"name": "churn", "path": str(place / "churn")}]
    for name in ("a", "b"):
        (place / name).mkdir()
    with running(place / "a", served) as first, running(place / "b", served) as second:
        yield [first, second]


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    started = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    yield started
    started.shutdown()


def begin(folder: Path, program: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", program], cwd=folder)


def require_each_row_once(folder: Path) -> None:
    table = ds.dataset(folder, format="parquet").to_table().sort_by("id")
    assert table["id"].to_pylist() == list(range(ROWS))
    assert table["y"].to_pylist() == [3 * x + 1 for x in range(ROWS)]


def requests(gateways: list[Gateway]) -> int:
    lanes = [each.stats()["lanes"]["churn/1"] for each in gateways]
    return sum(int(lane.get("requests", 0)) for lane in lanes)


def test_program_with_a_fleet_then_with_servers_that_run(
    place: Path, gateways: list[Gateway]
) -> None:
    """The second block goes on after the first one, and its rows are counted."""
    replaced = {
        "/models/churn": str(place / "churn"),
        "/data/customers": str(place / "customers"),
        "/data/scored": str(place / "scored"),
    }
    first, second = (each.address for each in gateways)
    servers = {"10.0.0.1:50051": first, "10.0.0.2:50051": second}
    code = block("Ray", replaced) + block("Servers that run already", servers)
    program = begin(place, f"{code}\nassert scored.count() == {ROWS}\n")
    assert program.wait(WITHIN_S) == 0
    require_each_row_once(place / "scored")


def test_driver_that_was_killed_scores_the_missing_rows(
    place: Path, gateways: list[Gateway], nodes: Cluster
) -> None:
    folder = place / "resumed"
    folder.mkdir()
    checkpoint = folder / "checkpoint"
    program = RESUMED.format(
        address=nodes.address,
        checkpoint=block("Resume after the driver", {"/data/checkpoint": str(checkpoint)}),
        source=str(place / "customers"),
        block_rows=ROWS // FILES,
        target=[each.address for each in gateways],
        output=str(folder / "out"),
    )
    driver = begin(folder, program)

    def done() -> int:
        names = [path.name for path in checkpoint.glob("*.parquet")]
        return sum("pending" not in name for name in names)

    def has_three() -> bool:
        assert driver.poll() is None, "the job has ended"
        return done() >= 3

    eventually(has_three, within_s=WITHIN_S, what="three written blocks")
    driver.send_signal(signal.SIGKILL)
    driver.wait(WITHIN_S)
    written = ds.dataset(folder / "out", format="parquet").to_table(["id"])
    assert 0 < written.num_rows < ROWS
    before = requests(gateways)
    assert begin(folder, program).wait(WITHIN_S) == 0
    require_each_row_once(folder / "out")
    # One for each block of the first run.
    assert 0 < requests(gateways) - before < FILES


def test_command(place: Path, nodes: Cluster) -> None:
    command = block(
        "Files and tables",
        {
            "/models/churn": str(place / "churn"),
            "/data/customers": str(place / "customers"),
            "/data/scored": str(place / "scored-files"),
            "10.0.0.1:6379": nodes.address,
        },
    )
    name, *words = shlex.split(command.removeprefix("$ ").replace("\\\n", " "))
    assert name == "iskander"
    result = subprocess.run([BIN / name, *words], cwd=place, timeout=WITHIN_S, check=False)
    assert result.returncode == 0
    require_each_row_once(place / "scored-files")
