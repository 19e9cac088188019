"""The snippets of docs/protocols.md, run as they stand against the quickstart's model."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models import ROOT, TWO_TOWER
from support.processes import Gateway, running

PAGE = (ROOT / "docs" / "protocols.md").read_text()
ADDRESS, ZMQ_ADDRESS = "127.0.0.1:50051", "127.0.0.1:5555"
SNIPPETS = {
    heading: code
    for heading, section in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    for code in re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("protocols")
    model = {"name": "movielens-two-tower", "path": str(TWO_TOWER), "intra_threads": 1}
    workers = {"groups": ["0"], "reattach_s": 5.0}
    inferential = {"address": "tcp://127.0.0.1:0"}
    with running(folder, [model], workers=workers, inferential=inferential) as ready:
        yield ready


@pytest.mark.parametrize("heading", SNIPPETS)
def test_a_snippet_runs_and_prints_scores(gateway: Gateway, heading: str, tmp_path: Path) -> None:
    code = SNIPPETS[heading]
    assert ADDRESS in code or ZMQ_ADDRESS in code
    asked = gateway.stats()["inferential"]["address"].removeprefix("tcp://")
    code = code.replace(ADDRESS, gateway.address).replace(ZMQ_ADDRESS, asked)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d\.\d", done.stdout)


def test_there_are_snippets() -> None:
    assert SNIPPETS
