"""Admin HTTP port and `iskander stats` of a running server."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse
from support import models
from support.processes import BIN, Gateway, eventually, running

ONE = {"groups": ["0"], "count": 1}
ANY_PORT = {"address": "127.0.0.1:0"}


def served(folder: Path) -> list[dict[str, Any]]:
    return [{"name": "ids", "path": str(models.row_ids(folder))}]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("admin")
    with running(folder, served(folder), workers=dict(ONE), admin=dict(ANY_PORT)) as gateway:
        yield gateway


def get(gateway: Gateway, path: str) -> tuple[int, str]:
    address = gateway.stats()["admin_address"]
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def samples(gateway: Gateway, name: str) -> list[tuple[dict[str, str], float]]:
    page = get(gateway, "/metrics")[1]
    return [
        (sample.labels, sample.value)
        for family in parse(page)
        for sample in family.samples
        if sample.name == f"iskander_{name}"
    ]


def score(gateway: Gateway, rows: int) -> None:
    with gateway.client() as client:
        client.score("ids", pa.RecordBatch.from_pydict({"x": pa.array(range(rows), pa.int64())}))


def stats(*arguments: str) -> str:
    command = [str(BIN / "iskander"), "stats", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_ready_server_reports_live_and_ready(gateway: Gateway) -> None:
    assert get(gateway, "/livez") == (200, "ok\n")
    assert get(gateway, "/readyz") == (200, "ready\n")
    assert get(gateway, "/other")[0] == 404


def test_metrics_count_scored_rows(gateway: Gateway) -> None:
    before = gateway.stats()["lanes"]["ids/1"].get("rows", 0)

    score(gateway, 7)

    lane = {"model": "ids", "version": "1"}
    eventually(
        lambda: samples(gateway, "rows_total") == [(lane, before + 7)], what="seven more rows"
    )
    assert samples(gateway, "request_seconds_count")[0][1] > 0
    assert samples(gateway, "worker_batches_total")[0][1] > 0


def test_stats_prints_a_table_or_json(gateway: Gateway) -> None:
    score(gateway, 3)

    table = stats("--address", gateway.address)
    report: dict[str, Any] = json.loads(stats("--address", gateway.address, "--json"))

    assert max(map(len, table.splitlines())) <= 100
    assert re.search(r"^ids/1 +yes +1 ", table, re.MULTILINE)
    assert re.search(r"^0 +ready ", table, re.MULTILINE)
    assert report["lanes"]["ids/1"]["latency_ms"]["total"]["p99"] > 0


def test_server_is_live_but_not_ready_while_a_model_has_no_worker(tmp_path: Path) -> None:
    with running(tmp_path, served(tmp_path), workers=dict(ONE), admin=dict(ANY_PORT)) as gateway:
        pid = gateway.worker_pids()[0]
        gateway.kill_worker()

        status, reasons = eventually(
            lambda: (response := get(gateway, "/readyz"))[0] == 503 and response, what="503"
        )

        assert (status, reasons[: len("model `ids/1`: ")]) == (503, "model `ids/1`: ")
        assert get(gateway, "/livez")[0] == 200
        eventually(lambda: get(gateway, "/readyz")[0] == 200, what="readiness")
        assert gateway.worker_pids() != [pid]
        exits = {labels["how"]: count for labels, count in samples(gateway, "worker_ends_total")}
        assert exits["crash"] == 1


def test_admin_port_in_use_is_a_start_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        gateway = Gateway(tmp_path, served(tmp_path), workers=dict(ONE), admin={"address": address})
        try:
            gateway.start(is_ready=False)
            assert gateway.wait() == 78
        finally:
            gateway.end()
    assert f"admin.address {address}: Address already in use" in gateway.text()
    assert "Traceback" not in gateway.text()


def test_empty_address_disables_the_admin_port(tmp_path: Path) -> None:
    with running(tmp_path, served(tmp_path), workers=dict(ONE), admin={"address": ""}) as gateway:
        assert gateway.stats()["admin_address"] == ""


def test_sigint_drains_with_an_admin_port(tmp_path: Path) -> None:
    """The HTTP server must not replace the gateway's signal handlers."""
    gateway = Gateway(tmp_path, served(tmp_path), workers=dict(ONE), admin=dict(ANY_PORT))
    try:
        gateway.start()
        gateway.signal(signal.SIGINT)
        assert gateway.wait() == 0
    finally:
        gateway.end()
