"""The snippets of docs/protocols/, run unchanged against the quickstart's model."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import ROOT, TWO_TOWER
from support.processes import Gateway, running
from support.robots import address_of, ask, connected

PAGES = sorted((ROOT / "docs" / "protocols").glob("*.md"))
PAGE = "\n".join(path.read_text() for path in PAGES)
EMBEDDING = (ROOT / "docs" / "extending.md").read_text()
GRPC, HTTP, ZMQ = "127.0.0.1:50051", "127.0.0.1:8000", "127.0.0.1:5555"
KSERVE_PYTHON = os.environ.get("KSERVE_PYTHON", "")
"""KServe's client needs its own environment: see test_oip_kserve.py."""
MODEL = {"name": "movielens-two-tower", "path": str(TWO_TOWER), "intra_threads": 1}
WORKERS: dict[str, Any] = {"groups": ["0"], "reattach_s": 5.0}
SNIPPETS = {
    f"{heading}, {number}": (language, code)
    for heading, section in re.findall(r"^##* (.+?)\n(.*?)(?=^#|\Z)", PAGE, re.M | re.S)
    for number, (language, code) in enumerate(
        re.findall(r"^```(python|sh)\n(.*?)^```", section, re.M | re.S), 1
    )
}
CLIENTS = {
    "from pyarrow import flight",
    "import tritonclient.grpc as triton",
    "start_stream",
    "service_pb2_grpc.GRPCInferenceServiceStub",
    "from kserve",
    "curl",
    "import tritonclient.http as triton",
    "from inferential import Connection",
    "from inferential import AsyncConnection",
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("protocols")
    http = {"address": "127.0.0.1:0"}
    inferential = {"address": "tcp://127.0.0.1:0"}
    sections = {"workers": WORKERS, "http": http, "inferential": inferential}
    shared_memory = {"path": str(folder / "memory")}
    (folder / "ratings.csv").write_text("user_id,item_id\n1,50\n42,181\n42,50\n")
    source = {"name": "ratings", "path": "ratings.csv", "model": MODEL["name"]}
    sections |= {"sources": [source], "source_reads": {"idle_s": 0.2}}
    with running(folder, [MODEL], shared_memory=shared_memory, **sections) as ready:
        yield ready


def command_of(language: str, code: str) -> list[str]:
    if language == "sh":
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        return ["sh", "-c", code]
    if "kserve" not in code:
        return [sys.executable, "-c", code]
    if not KSERVE_PYTHON:
        pytest.skip("KSERVE_PYTHON is not set to a Python with KServe's client")
    return [KSERVE_PYTHON, "-c", code]


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippet_runs_and_prints_scores(gateway: Gateway, name: str, tmp_path: Path) -> None:
    language, code = SNIPPETS[name]
    stats = gateway.stats()
    zmq_address = stats["inferential"]["address"].removeprefix("tcp://")
    assert any(address in code for address in (GRPC, HTTP, ZMQ))
    for address, real in (
        (GRPC, gateway.address),
        (HTTP, stats["http_address"]),
        (ZMQ, zmq_address),
    ):
        code = code.replace(address, real)
    result = subprocess.run(
        command_of(language, code),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"\d\.\d", result.stdout)
    assert "rror" not in result.stdout


def test_every_client_has_a_snippet() -> None:
    code = [snippet for _, snippet in SNIPPETS.values()]
    assert [mark for mark in CLIENTS if not any(mark in each for each in code)] == []


@pytest.mark.slow
def test_program_that_embeds_the_gateway_serves_and_prints_measurements(
    tmp_path: Path,
) -> None:
    (code,) = re.findall(r"^```py\n(.*?)^```", EMBEDDING, re.M | re.S)
    program = tmp_path / "program.py"
    program.write_text(code.replace('"iskander.toml"', "__import__('sys').argv[-1]"))
    with (
        running(
            tmp_path,
            [MODEL],
            prefix=(sys.executable, str(program)),
            workers=WORKERS,
            lanes={"policy": "shortest_plan_first"},
            inferential={"address": "tcp://127.0.0.1:0"},
        ) as gateway,
        connected(address_of(gateway), "robot-7") as robot,
    ):
        model = robot.model("movielens-two-tower")
        response = ask(model, user_id=np.array(1), item_id=np.array(50), steps_remaining=3)
        assert response is not None
    log = gateway.log.read_text()
    assert re.search(r"^e2e_latency_ms \d+\.\d+ \{.*'client': 'robot-7'", log, re.M)
