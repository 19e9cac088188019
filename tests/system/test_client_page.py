"""The snippets of docs/client.md, run unchanged against the quickstart's model."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models import ROOT, TWO_TOWER
from support.processes import Gateway, running

PAGE = (ROOT / "docs" / "client.md").read_text()
ADDRESSES = ("127.0.0.1:50051", "127.0.0.1:50052")
MODEL = {"name": "movielens-two-tower", "path": str(TWO_TOWER), "intra_threads": 1}
SECTIONS = re.findall(r"^##+ (.+?)\n(.*?)(?=^##|\Z)", PAGE, re.M | re.S)
SNIPPETS = {
    heading: re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", section, re.M | re.S)
    for heading, section in SECTIONS
    if "```" in section
}
RECIPES = ["Polars", "DuckDB", "ADBC"]


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Gateway]]:
    first, second = (tmp_path_factory.mktemp(name) for name in ("first", "second"))
    sections: dict[str, Any] = {"workers": {"groups": ["0"]}}
    shared_memory = {"path": str(first / "memory")}
    with (
        running(first, [MODEL], shared_memory=shared_memory, **sections) as one,
        running(second, [MODEL], workers={"groups": ["0"]}) as other,
    ):
        yield [one, other]


@pytest.mark.parametrize("heading", SNIPPETS)
def test_snippet_prints_the_output_below_it(
    gateways: list[Gateway], heading: str, tmp_path: Path
) -> None:
    ((code, output),) = SNIPPETS[heading]
    assert ADDRESSES[0] in code
    for address, gateway in zip(ADDRESSES, gateways, strict=True):
        code = code.replace(address, gateway.address)
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == output


def test_every_code_block_is_a_snippet_with_its_output() -> None:
    assert PAGE.count("```") == 4 * sum(map(len, SNIPPETS.values()))
    assert [heading for heading in RECIPES if heading not in SNIPPETS] == []
