"""Server without the `http` extra: no HTTP ports, and errors name the package to install."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest
from support import models
from support.processes import BIN, Gateway

from iskander.config.schema import AdminConfig

QUICKSTART = models.ROOT / "configs" / "quickstart.toml"
INSTALL = "`pip install 'iskander[http]'`"


@pytest.fixture(params=["h11", "starlette"])
def missing(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def path(tmp_path: Path, missing: str) -> str:
    """Returns a folder for PYTHONPATH that hides the package."""
    folder = tmp_path / "hidden"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules[{missing!r}] = None\n")
    return str(folder)


def run(path: str, *command: object, code: int) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_default_admin_port_is_omitted_with_a_warning(
    tmp_path: Path, path: str, missing: str, processes: int
) -> None:
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    gateway = Gateway(
        tmp_path,
        served,
        server={"processes": processes},
        workers={"groups": ["0"], "count": 1},
        admin={"address": AdminConfig().address},
    )
    try:
        gateway.start(PYTHONPATH=path)
        batch = pa.RecordBatch.from_pydict({"x": pa.array([7, 8], pa.int64())})
        with gateway.client() as client:
            assert client.score("ids", batch).to_pydict() == {"y": [22, 25]}
            assert client.stats()["admin_address"] == ""
    finally:
        gateway.end()
    warning = f"no admin port: {missing} is not installed: {INSTALL}"
    assert gateway.text().count(warning) == 1
    assert "Traceback" not in gateway.text()


@pytest.mark.parametrize("setting", ["admin.address", "http.address"])
def test_configured_port_is_a_start_error(path: str, missing: str, setting: str) -> None:
    words = f"{setting} 127.0.0.1:0: {missing} is not installed: {INSTALL}"
    change = ("--set", f"{setting}=127.0.0.1:0")
    text = run(path, BIN / "iskander", "check", QUICKSTART, *change, code=78)
    assert words in text and "Traceback" not in text
    text = run(
        path, BIN / "iskander-gateway", "--config", QUICKSTART, *change,
        "--set", "server.address=127.0.0.1:0", code=78,
    )  # fmt: skip
    assert words in text and "Traceback" not in text


def test_check_omits_the_unavailable_admin_port(path: str, missing: str) -> None:
    text = run(path, BIN / "iskander", "check", QUICKSTART, code=0)
    assert f"no admin port: {missing} is not installed" in text
    assert AdminConfig().address not in text
