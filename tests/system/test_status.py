"""Page of the admin port and `/status.json` of real gateways, of one and of several processes."""

from __future__ import annotations

import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from support import models
from support.processes import Gateway, eventually, running
from support.proxies import free_ports

from iskander.gateway.telemetry.status.document import Status

BATCH = pa.RecordBatch.from_pydict({"x": pa.array(range(7), pa.int64())})
OPTIONS: dict[str, Any] = {
    "workers": {"groups": ["0"], "count": 1},
    "admin": {"address": "127.0.0.1:0"},
}
CLIENTS = 6


def served(folder: Path) -> list[dict[str, Any]]:
    return [{"name": "ids", "path": str(models.row_ids(folder))}]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("status")
    with running(folder, served(folder), **OPTIONS) as gateway:
        yield gateway


def get(address: str, path: str, host: str = "localhost") -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://{address}{path}", headers={"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def read(address: str) -> Status:
    code, body = get(address, "/status.json")
    assert code == 200
    return msgspec.json.decode(body, type=Status)


def score(gateway: Gateway, count: int = 1) -> None:
    with gateway.client() as client:
        for _ in range(count):
            client.score("ids", BATCH)


def test_model_has_rates_of_the_last_samples(gateway: Gateway) -> None:
    address = gateway.stats()["admin_address"]

    def measured() -> Status | None:
        score(gateway, 5)
        status = read(address)
        return status if status.models[0].total_p99_ms is not None else None

    status: Status = eventually(measured, what="a sample with requests")

    (model,) = status.models
    assert (model.name, model.version, model.state, model.workers) == ("ids", "1", "serving", 1)
    assert model.requests_per_s is not None
    assert model.rows_per_s == pytest.approx(7 * model.requests_per_s, rel=0.01)
    assert model.batch_rows == 7
    eventually(
        lambda: any(read(address).models[0].series["requests_per_s"]), what="a sample in the series"
    )
    page = get(address, "/")[1].decode()
    assert ">serving</td>" in page
    assert page.count("<svg") == 5


def test_page_is_for_local_hosts(gateway: Gateway) -> None:
    address = gateway.stats()["admin_address"]

    assert get(address, "/", "rebound.example")[0] == 421
    assert get(address, "/metrics", "rebound.example")[0] == 421
    assert get(address, "/livez", "rebound.example")[0] == 200


def test_replaced_worker_is_an_event(tmp_path: Path) -> None:
    with running(tmp_path, served(tmp_path), **OPTIONS) as gateway:
        address = gateway.stats()["admin_address"]
        before = read(address).workers[0]
        gateway.kill_worker()

        def after() -> Status | None:
            status = read(address)
            worker = status.workers[0]
            return status if worker.starts > before.starts and worker.state == "ready" else None

        status: Status = eventually(after, what="the next worker")

    worker = status.workers[0]
    assert worker.incarnation > before.incarnation
    assert worker.ends == {"crash": 1}
    assert worker.resident_bytes > 1 << 20
    assert worker.heartbeat_s is not None
    texts = [event.text for event in status.events]
    assert any(text.startswith("worker 0: lost, was ready") for text in texts), texts
    assert any(text.startswith("ready on ") for text in texts)
    assert [event.at_s for event in status.events] == sorted(
        (event.at_s for event in status.events), reverse=True
    )


def test_page_can_be_disabled(tmp_path: Path) -> None:
    options = OPTIONS | {"admin": {"address": "127.0.0.1:0", "page": False}}
    with running(tmp_path, served(tmp_path), **options) as gateway:
        address = gateway.stats()["admin_address"]
        assert [get(address, path)[0] for path in ("/", "/status.json")] == [404, 404]
        assert get(address, "/readyz")[0] == 200


def test_several_processes_have_one_page(tmp_path: Path) -> None:
    """Rates are sums, the processes are listed, and one that ends is named."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    options = OPTIONS | {
        "server": {"address": "127.0.0.1:0", "processes": 2},
        "admin": {"address": address},
    }
    with running(tmp_path, served(tmp_path), **options) as gateway:

        def batches() -> bool:
            score(gateway)
            return read(address).models[0].batches >= CLIENTS

        eventually(batches, what="batches of the processes")
        status = read(address)
        assert [(each.process, each.state) for each in status.processes] == [
            (0, "ready"),
            (1, "ready"),
        ]
        assert status.ready
        assert [worker.index for worker in status.workers] == [0]
        assert {each.process for each in status.memory} == {0, 1}
        assert {event.process for event in status.events} == {None, 0, 1}
        assert ">no answer</td>" not in get(address, "/")[1].decode()

        gateway.signal(signal.SIGHUP)
        eventually(
            lambda: any(event.text == "process 0 is replaced" for event in read(address).events),
            what="the events of a roll",
        )
        assert [each.starts for each in read(address).processes] == [2, 2]
