"""The snippets of docs/protocols.md, run as they stand against the quickstart's model."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models import ROOT, TWO_TOWER
from support.processes import Gateway, running

PAGE = (ROOT / "docs" / "protocols.md").read_text()
GRPC, HTTP, ZMQ = "127.0.0.1:50051", "127.0.0.1:8000", "127.0.0.1:5555"
COMMANDS = {"python": [sys.executable, "-c"], "sh": ["sh", "-c"]}
SNIPPETS = {
    f"{heading}, {language}": (language, code)
    for heading, section in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    for language, code in re.findall(r"^```(python|sh)\n(.*?)^```", section, re.M | re.S)
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("protocols")
    model = {"name": "movielens-two-tower", "path": str(TWO_TOWER), "intra_threads": 1}
    workers, http = {"groups": ["0"], "reattach_s": 5.0}, {"address": "127.0.0.1:0"}
    inferential = {"address": "tcp://127.0.0.1:0"}
    sections = {"workers": workers, "http": http, "inferential": inferential}
    shared_memory = {"path": str(folder / "memory")}
    with running(folder, [model], shared_memory=shared_memory, **sections) as ready:
        yield ready


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_runs_and_prints_scores(gateway: Gateway, name: str, tmp_path: Path) -> None:
    language, code = SNIPPETS[name]
    if code.startswith("curl") and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    stats = gateway.stats()
    asked = stats["inferential"]["address"].removeprefix("tcp://")
    assert any(address in code for address in (GRPC, HTTP, ZMQ))
    for address, real in ((GRPC, gateway.address), (HTTP, stats["http_address"]), (ZMQ, asked)):
        code = code.replace(address, real)
    done = subprocess.run(
        [*COMMANDS[language], code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d\.\d", done.stdout)


def test_there_are_snippets() -> None:
    assert {language for language, _ in SNIPPETS.values()} == set(COMMANDS)
