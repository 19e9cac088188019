"""Sources read with Arrow's C++ Flight client, by the calls that databases in C++ make.

ClickHouse's `arrowFlight` is this client. The builds of it on PyPI (chdb) have no Flight, so its
calls are made here: GetSchema and GetFlightInfo with a path, and DoGet with each ticket.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import models
from support.processes import Gateway, running
from support.toolchains import built_cpp

ROWS = 3000
WITHIN_S = 60.0


@pytest.fixture(scope="module", params=["connection", "locations"])
def gateway(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A gateway with a source, with and without a location in its endpoints."""
    folder = tmp_path_factory.mktemp("sources")
    models.row_ids(folder / "ids")
    table = pa.table({"x": range(ROWS), "label": [f"r{each}" for each in range(ROWS)]})
    pq.write_table(table, folder / "data.parquet", row_group_size=ROWS // 3)
    reads: dict[str, object] = {"idle_s": 0.2}
    address = ["127.0.0.1:0"]
    if request.param == "locations":
        address.append(f"unix:{folder}/g.sock")
        reads["locations"] = [f"grpc+unix://{folder}/g.sock"]
    source = {"name": "rows", "path": "data.parquet", "model": "ids", "unit_rows": ROWS // 3}
    with running(
        folder,
        [{"name": "ids", "path": str(folder / "ids")}],
        workers={"count": 1},
        server={"address": address},
        sources=[source],
        source_reads=reads,
    ) as gateway:
        yield gateway


def test_reader_in_cpp_reads_each_row_once(gateway: Gateway, tmp_path: Path) -> None:
    program, environment = built_cpp("flight_get_cpp")
    done = subprocess.run(
        [str(program), gateway.address, "rows", str(tmp_path / "out.arrows")],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3"
    with pa.ipc.open_stream(tmp_path / "out.arrows") as stream:
        table = stream.read_all()
    assert table["x"].to_pylist() == list(range(ROWS))
    assert table["label"][7].as_py() == "r7"
    assert table["y"].to_pylist() == [3 * x + 1 for x in range(ROWS)]


def test_reader_in_cpp_gets_the_text_of_an_error(gateway: Gateway, tmp_path: Path) -> None:
    program, environment = built_cpp("flight_get_cpp")
    done = subprocess.run(
        [str(program), gateway.address, "none", str(tmp_path / "out.arrows")],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 1
    assert "there is no model `none`" in done.stderr
