"""Passwords by unmodified clients of each protocol, and while wrong ones flood the server."""

from __future__ import annotations

import base64
import json
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import flight
from support.models import row_ids
from support.processes import BIN, Gateway, running
from support.reference_client import ReferenceClient

from iskander.gateway.auth.tokens import add_token

CLIENT_SCRIPT = str(Path(__file__).parent.parent / "support" / "access_client.py")
ROWS = pa.record_batch({"x": pa.array([1, 2, 3], pa.int64())})


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("passwords")
    file = folder / "tokens.toml"
    operator = add_token(file, "operator", ("*",), manage=True)
    command = [BIN / "iskander", "token", "robot", "--file", file, "--password"]
    done = subprocess.run(
        command, input="correct horse\n", capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "added the password of robot\n" and "horse" not in file.read_text()
    with running(
        folder,
        [{"name": "ids", "path": str(row_ids(folder / "ids"))}],
        workers={"count": 1},
        access={"tokens": "tokens.toml"},
        http={"address": "127.0.0.1:0"},
        token=operator,
    ) as gateway:
        yield gateway
        gateway.wait_idle()


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"robot:{password}".encode()).decode()


def test_flight_handshake(gateway: Gateway) -> None:
    with flight.connect(f"grpc://{gateway.address}") as client:
        with pytest.raises(flight.FlightUnauthenticatedError, match="is wrong"):
            client.authenticate_basic_token("robot", "wrong")
        shown = client.authenticate_basic_token("robot", "correct horse")
        options = flight.FlightCallOptions(headers=[shown], timeout=20)
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_path("ids"), options)
        with writer:
            writer.begin(ROWS.schema)
            writer.write_batch(ROWS)
            writer.done_writing()
            assert reader.read_all().num_rows == 3


def test_grpc_and_http_clients(gateway: Gateway) -> None:
    reference = ReferenceClient(CLIENT_SCRIPT)
    arguments = {"address": gateway.address, "name": "infer", "model_name": "ids"}
    try:
        for password, expected in (("correct horse", "ids"), ("wrong", "UNAUTHENTICATED")):
            headers = {"authorization": basic(password)}
            assert reference.run("call", **arguments, headers=headers) == expected
    finally:
        reference.close()
    url = f"http://{gateway.stats()['http_address']}/v2/models/ids"
    request = urllib.request.Request(url, headers={"Authorization": basic("correct horse")})
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert json.loads(answer.read())["name"] == "ids"
    request = urllib.request.Request(url, headers={"Authorization": basic("wrong")})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=20)
    with caught.value:
        assert caught.value.code == 401


@pytest.mark.slow
def test_flood_of_wrong_passwords_does_not_stop_the_service(gateway: Gateway) -> None:
    """Calls with a token, and with a verified password, are answered meanwhile."""
    url = f"http://{gateway.stats()['http_address']}/v2/models/ids"
    right = urllib.request.Request(url, headers={"Authorization": basic("correct horse")})
    urllib.request.urlopen(right, timeout=20).close()
    statuses: list[int] = []
    over = threading.Event()

    def flood(number: int) -> None:
        while not over.is_set():
            wrong = urllib.request.Request(url, headers={"Authorization": basic(f"{number}")})
            try:
                urllib.request.urlopen(wrong, timeout=20).close()
            except urllib.error.HTTPError as error:
                with error:
                    statuses.append(error.code)

    threads = [threading.Thread(target=flood, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            with urllib.request.urlopen(right, timeout=20) as answer:
                assert answer.status == 200
            assert gateway.stats()["ready"]
    finally:
        over.set()
        for thread in threads:
            thread.join(20)
    assert set(statuses) == {401, 503}
