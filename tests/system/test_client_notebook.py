"""The notebook docs/client.ipynb, run unchanged against the quickstart's model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models import ROOT, TWO_TOWER
from support.processes import Gateway, running

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

PATH = ROOT / "docs" / "client.ipynb"
ADDRESS = "127.0.0.1:50051"
CELL_WITHIN_S = 60
MODEL = {"name": "movielens-two-tower", "path": str(TWO_TOWER), "intra_threads": 1}


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    with running(tmp_path, [MODEL], workers={"groups": ["0"]}) as ready:
        yield ready


# The kernel's client leaves its sockets to the garbage collector.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_notebook_runs_and_shows_the_model_and_the_results(
    gateway: Gateway, tmp_path: Path
) -> None:
    notebook = nbformat.read(PATH, as_version=4)
    assert ADDRESS in notebook.cells[1].source
    notebook.cells[1].source = notebook.cells[1].source.replace(ADDRESS, gateway.address)
    runner = nbclient.NotebookClient(
        notebook,
        timeout=CELL_WITHIN_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    runner.execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert "<td>user_id</td>" in html(shown[0])
    assert "item_id" in html(shown[1])
    assert "score" in shown[2]["data"]["text/plain"]
    assert "the nearest is `itemid`" in shown[3]["data"]["text/plain"]


def test_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(PATH, as_version=4)
    assert [cell for cell in notebook.cells if cell.get("outputs")] == []


def html(output: Any) -> str:
    return str(output["data"]["text/html"])
