"""Limits of a token by unmodified clients of each protocol, their reload, and their metrics."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight
from support.models import row_ids
from support.processes import Gateway, eventually, running
from support.reference_client import ReferenceClient
from support.robots import address_of, ask, connected, joints, policy

from iskander.client import OFF, Client
from iskander.errors import RateLimited
from iskander.gateway.auth.tokens import digest

CLIENT_SCRIPT = str(Path(__file__).parent.parent / "support" / "access_client.py")
ROWS = pa.record_batch({"x": pa.array([1, 2, 3], pa.int64())})
TWICE = "{requests_per_s = 0.001, burst_requests = 2}"
GRANTS = {
    "flight": TWICE,
    "grpc": TWICE,
    "http": TWICE,
    "narrow": "{batch_rows = 2}",
    "free": "{}",
}


def write(file: Path, grants: dict[str, str], anonymous: str) -> None:
    lines = []
    for name, limits in grants.items():
        lines += ["[[tokens]]", f'name = "{name}"', f'sha256 = "{digest(name)}"']
        lines += ["manage = true"] * (name == "free") + [f"limits = {limits}"]
    file.write_text("\n".join([*lines, "[anonymous]", anonymous]) + "\n")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("quotas")
    write(folder / "tokens.toml", GRANTS, "requests_per_s = 0.001\nburst_requests = 2")
    models = [
        {"name": "ids", "path": str(row_ids(folder / "ids"))},
        {"name": "policy", "path": str(policy(folder / "policy"))},
    ]
    with running(
        folder,
        models,
        workers={"count": 1},
        access={"tokens": "tokens.toml", "anonymous": ["policy"]},
        http={"address": "127.0.0.1:0"},
        inferential={"address": "tcp://127.0.0.1:0", "errors": "silent"},
        token="free",
    ) as gateway:
        yield gateway
        gateway.wait_idle()


def client_of(gateway: Gateway, token: str) -> Client:
    return Client(gateway.address, token=token, retry=OFF, shared_bytes=0)


def test_flight_rejects_the_third_batch(gateway: Gateway) -> None:
    with client_of(gateway, "flight") as client:
        results = client.stream("ids", [ROWS] * 3)
        assert [next(results).num_rows for _ in range(2)] == [3, 3]
        with pytest.raises(RateLimited, match=r"more than 0\.001 requests/s") as caught:
            next(results)
    assert caught.value.retryable and caught.value.fault == "client"
    assert 900_000 < (caught.value.retry_after_ms or 0) <= 1_000_000


def test_grpc_rejects_the_third_call(gateway: Gateway) -> None:
    reference = ReferenceClient(CLIENT_SCRIPT)
    headers = {"authorization": "Bearer grpc"}
    arguments = {"address": gateway.address, "name": "infer", "model_name": "ids"}
    try:
        answers = [reference.run("call", **arguments, headers=headers) for _ in range(3)]
    finally:
        reference.close()
    assert answers == ["ids", "ids", "RESOURCE_EXHAUSTED"]


def test_http_rejects_the_third_call_with_retry_after(gateway: Gateway) -> None:
    tensor = {"name": "x", "datatype": "INT64", "shape": [3], "data": [1, 2, 3]}
    request = urllib.request.Request(
        f"http://{gateway.stats()['http_address']}/v2/models/ids/infer",
        json.dumps({"inputs": [tensor]}).encode(),
        {"Authorization": "Bearer http"},
    )
    for _ in range(2):
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=20)
    with caught.value as answer:
        error = json.loads(answer.read())
        assert answer.code == 429 and int(answer.headers["retry-after"]) > 900
    assert error["code"] == "rate_limited" and error["fault"] == "client" and error["retryable"]


def test_inferential_clients_share_the_limits_of_anonymous_callers(gateway: Gateway) -> None:
    """Two observations of two clients are answered; the third of either is not."""
    with connected(address_of(gateway), 1) as first, connected(address_of(gateway), 2) as second:
        for connection in (first, second):
            assert ask(connection.model("policy"), **joints(1)) is not None
        first.model("policy").observe(**joints(2))

        def is_rejected() -> bool:
            outcomes: dict[str, Any] = gateway.stats()["inferential"]["observations"]
            return outcomes.get("rate_limited") == 1

        eventually(is_rejected, what="the rejection")


def test_batch_size_is_limited_and_known_to_clients(gateway: Gateway) -> None:
    """A plain client gets an error; the Python client cuts its table."""
    with client_of(gateway, "narrow") as client:
        assert client.score("ids", pa.table({"x": [1, 2, 3, 4, 5]})).num_rows == 5
    header = [(b"authorization", b"Bearer narrow")]
    with flight.connect(f"grpc://{gateway.address}") as plain:
        options = flight.FlightCallOptions(headers=header, timeout=20)
        writer, reader = plain.do_exchange(flight.FlightDescriptor.for_path("ids"), options)
        writer.begin(ROWS.schema)
        writer.write_batch(ROWS)
        with pytest.raises(pa.ArrowInvalid, match=r"batch of 3 rows, limit 2 .*batch_rows"):
            reader.read_chunk()
        with pytest.raises(pa.ArrowInvalid):
            writer.close()


def test_metrics_are_counted_by_grant(gateway: Gateway) -> None:
    with urllib.request.urlopen(
        f"http://{gateway.stats()['admin_address']}/metrics", timeout=20
    ) as answer:
        text = answer.read().decode()
    refused = re.findall(r"grant_refusals_total\{([^}]*)\} 1\.0", text)
    names = {re.search(r'grant="([^"]*)"', labels)[1] for labels in refused}  # type: ignore[index]
    assert names == {"flight", "grpc", "http", "narrow", "(anonymous)"}
    assert 'iskander_grant_requests_total{grant="http"} 2.0' in text
    assert 'iskander_grant_rows_total{grant="flight"} 6.0' in text
    assert 'iskander_grant_outstanding_rows{grant="http"} 0.0' in text
    assert 'grant="free"' not in text


def test_changed_limits_apply_to_an_open_stream(gateway: Gateway) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        while True:
            yield ROWS

    with client_of(gateway, "free") as client:
        results = client.stream("ids", batches())
        assert next(results).num_rows == 3
        write(gateway.folder / "tokens.toml", GRANTS | {"free": TWICE}, "")
        with pytest.raises(RateLimited, match="token of `free`"):
            for _ in results:
                pass
