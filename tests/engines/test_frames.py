"""Blocks of docs/scaling.md for Dask and Daft, each as a program with servers of a model.

Skipped without the library. Daft needs another pyarrow than the rest.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import models
from support.processes import running
from support.scaling_page import block

ROWS = 20_000
DASK = """
import dask.dataframe
import pandas
from dask.distributed import Client as Cluster, LocalCluster
cluster = Cluster(LocalCluster(processes=False, dashboard_address=None))
frame = pandas.DataFrame({{"x": range({rows}), "label": "a"}})
df, target = dask.dataframe.from_pandas(frame, npartitions=8), {target}
"""
DAFT = """
import daft
df, target = daft.from_pydict({{"x": list(range({rows}))}}).into_partitions(8), {target}
"""
CHECK = """
found = {found}
assert list(found["x"]) == list(range({rows}))
assert list(found["y"]) == [3 * x + 1 for x in range({rows})]
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("servers")
    served = [{"name": "fraud", "path": str(models.row_ids(folder / "fraud"))}]
    for name in ("a", "b"):
        (folder / name).mkdir()
    with running(folder / "a", served) as first, running(folder / "b", served) as second:
        yield [first.address, second.address]


def run(setup: str, code: str, found: str, target: list[str], folder: Path) -> None:
    """Run a block after its setup, and check what it found."""
    values = {"rows": ROWS, "target": target, "found": found}
    path = folder / "program.py"
    path.write_text(setup.format(**values) + code + CHECK.format(**values))
    result = subprocess.run(
        [sys.executable, path], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr


def test_dask(target: list[str], tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    pytest.importorskip("dask.dataframe")
    run(DASK, block("Dask"), 'scored.compute().sort_values("x")', target, tmp_path)


def test_daft(target: list[str], tmp_path: Path) -> None:
    pytest.importorskip("daft")
    run(DAFT, block("Daft"), 'scored.sort("x").to_pydict()', target, tmp_path)
