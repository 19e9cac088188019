"""Client distribution against a real gateway, on platforms without the server's libraries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from support import client_copy, models
from support.processes import Gateway, running

ROWS = 20_000
"""Above the minimum of shared memory."""
SCORE = """
from pyarrow import record_batch
from iskander.client import Client
from iskander.errors import ContractError

ids = {"user_id": [1, 2] * (arguments["rows"] // 2), "item_id": [10, 20] * (arguments["rows"] // 2)}
with Client(arguments["address"]) as client:
    result = client.score("two-tower", record_batch(ids))
    try:
        client.score("two-tower", record_batch({"user_id": [1]}))
    except ContractError as error:
        column = error.column
print(json.dumps({"column": column, "score": result["score"].to_pylist()}))
"""
SHARE = """
from iskander.errors import ConfigError

table = pyarrow.table({"user_id": [1] * arguments["rows"], "item_id": [10] * arguments["rows"]})
with iskander.client.Client(arguments["address"], shared_bytes=1 << 22) as client:
    try:
        client.score("two-tower", table)
    except ConfigError as error:
        print(json.dumps(error.message))
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("distribution")
    served = [{"name": "two-tower", "path": str(models.TWO_TOWER), "intra_threads": 1}]
    with running(
        folder,
        served,
        workers={"groups": ["0"], "reattach_s": 5.0},
        shared_memory={"path": str(folder / "memory")},
    ) as ready:
        yield ready
        ready.wait_idle()


@pytest.mark.parametrize("platform", client_copy.PLATFORMS)
@pytest.mark.parametrize("rows", [2, ROWS])
def test_copy_without_server_libraries_scores_as_the_full_client(
    gateway: Gateway, tmp_path: Path, platform: str, rows: int
) -> None:
    """On Linux the server offers shared memory, which the copy cannot use."""
    client_copy.build_client().copy_sources(tmp_path)
    ids = {"user_id": [1, 2] * (rows // 2), "item_id": [10, 20] * (rows // 2)}
    with gateway.client() as client:
        expected = client.score("two-tower", pa.record_batch(ids))

    found = client_copy.run(tmp_path, platform, SCORE, address=gateway.address, rows=rows)

    assert found["score"] == pytest.approx(expected["score"].to_pylist())
    assert found["column"] == "item_id"


def test_shared_bytes_without_the_server_distribution_is_a_config_error(
    gateway: Gateway, tmp_path: Path
) -> None:
    client_copy.build_client().copy_sources(tmp_path)

    message = client_copy.run(tmp_path, "linux", SHARE, address=gateway.address, rows=ROWS)

    assert "the distribution `iskander`" in message
    assert "`shared_bytes`" in message
