"""Tokens, by unmodified clients of every protocol that can show one, and by one that cannot."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tritonclient.http as triton_http
from pyarrow import flight
from support import http2
from support.dealt import by_process, client_of
from support.models import row_ids
from support.processes import BIN, Gateway, eventually, running
from support.reference_client import ReferenceClient
from support.robots import address_of, ask, connected, joints, policy
from tritonclient.utils import InferenceServerException

from iskander.auth.tokens import add_token
from iskander.client import Client
from iskander.errors import (
    IskanderError,
    ModelNotFound,
    PermissionDenied,
    Unauthenticated,
    Unsupported,
)

SERVING = "0801"
"""A HealthCheckResponse."""
REFLECTION = "grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
JUDGE = str(Path(__file__).parent.parent / "support" / "access_client.py")
ROWS = pa.record_batch({"x": pa.array([1, 2, 3], pa.int64())})


class Served:
    """A gateway whose models want tokens, but for `policy`."""

    def __init__(self, gateway: Gateway, folder: Path, tokens: dict[str, str]) -> None:
        self.gateway = gateway
        self.file = folder / "tokens.toml"
        self.tokens = tokens

    def client(self, whose: str | None) -> Client:
        return Client(self.gateway.address, token=None if whose is None else self.tokens[whose])

    def header(self, whose: str | None) -> dict[str, str]:
        if whose is None:
            return {}
        return {"authorization": f"Bearer {self.tokens.get(whose, 'no-token-of-ours')}"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("access")
    file = folder / "tokens.toml"
    tokens = {
        "scorer": add_token(file, "scorer", ("ids*",)),
        "stranger": add_token(file, "stranger", ("something-else",)),
        "operator": add_token(file, "operator", ("*",), manage=True),
    }
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
        inferential={"address": "tcp://127.0.0.1:0"},
        token=tokens["operator"],
        limits={"streams": 8},
    ) as gateway:
        yield Served(gateway, folder, tokens)
        gateway.wait_idle()


@pytest.fixture(scope="module")
def reference() -> Iterator[ReferenceClient]:
    """Clients with grpcio, which cannot be where pyarrow.flight is."""
    reference = ReferenceClient(JUDGE)
    yield reference
    reference.close()


def test_a_flight_client_with_a_token_is_served(served: Served) -> None:
    with served.client("scorer") as client:
        assert client.score("ids", ROWS).num_rows == 3


@pytest.mark.parametrize(
    ("whose", "error"), [(None, Unauthenticated), ("stranger", PermissionDenied)]
)
def test_a_flight_client_without_is_not(
    served: Served, whose: str | None, error: type[IskanderError]
) -> None:
    with served.client(whose) as client, pytest.raises(error) as refused:
        client.score("ids", ROWS)
    assert not refused.value.retryable and refused.value.fault == "client"


def test_pyarrow_logs_in_with_a_name_and_the_token(served: Served) -> None:
    """The password of whatever name; what it gets back is shown with the other calls."""
    with flight.connect(f"grpc://{served.gateway.address}") as client:
        pair = client.authenticate_basic_token("anybody", served.tokens["scorer"])
        assert pair == (b"authorization", f"Bearer {served.tokens['scorer']}".encode())
        options = flight.FlightCallOptions(headers=[pair], timeout=10)
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_path("ids"), options)
        with writer:
            writer.begin(ROWS.schema)
            writer.write_batch(ROWS)
            writer.done_writing()
            assert reader.read_all().num_rows == 3
        with pytest.raises(flight.FlightUnauthenticatedError, match="is unknown"):
            client.authenticate_basic_token("anybody", "wrong")


def test_pyarrow_shows_the_two_statuses_by_name(served: Served) -> None:
    wrong = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer no")], timeout=10)
    stranger = [(b"authorization", f"Bearer {served.tokens['stranger']}".encode())]
    load = flight.Action("load", b'{"model": "ids"}')
    with flight.connect(f"grpc://{served.gateway.address}") as client:
        with pytest.raises(flight.FlightUnauthenticatedError):
            list(client.list_flights(options=wrong))
        with pytest.raises(flight.FlightUnauthorizedError):
            list(client.do_action(load, flight.FlightCallOptions(headers=stranger, timeout=10)))


@pytest.mark.parametrize(
    ("whose", "error"),
    [(None, Unauthenticated), ("scorer", PermissionDenied), ("operator", Unsupported)],
)
def test_to_unload_takes_a_token_for_that(
    served: Served, whose: str | None, error: type[IskanderError]
) -> None:
    """The last is what a model of the configuration answers to those who may ask for it."""
    with served.client(whose) as client, pytest.raises(error):
        client.unload("ids")


def test_triton_clients_over_grpc(served: Served, reference: ReferenceClient) -> None:
    def call(name: str, whose: str | None, **arguments: Any) -> Any:
        headers = served.header(whose)
        address = served.gateway.address
        return reference.run("call", address=address, name=name, headers=headers, **arguments)

    for probe in ("is_server_live", "is_server_ready"):
        assert call(probe, None) is True
    for whose, found in (
        (None, "UNAUTHENTICATED"),
        ("nobody", "UNAUTHENTICATED"),
        ("stranger", "PERMISSION_DENIED"),
        ("scorer", "ids"),
    ):
        assert call("infer", whose, model_name="ids") == found
        assert call("get_model_metadata", whose, model_name="ids") == found
    assert call("load_model", "scorer", model_name="ids") == "PERMISSION_DENIED"
    assert call("unload_model", "operator", model_name="ids") == "UNIMPLEMENTED"


def test_a_stream_of_requests_is_for_those_who_may(
    served: Served, reference: ReferenceClient
) -> None:
    address = served.gateway.address
    (error,) = reference.run("stream", address=address, headers=served.header("stranger"))
    assert "is not for model `ids`" in error
    assert reference.run("stream", address=address, headers=served.header("scorer")) == [""]


def test_health_checks_show_nothing(served: Served, reference: ReferenceClient) -> None:
    found = reference.run(
        "health", address=served.gateway.address, services=["", "policy", "ids", "no-such-model"]
    )
    assert found == [SERVING, SERVING, "UNAUTHENTICATED", "UNAUTHENTICATED"]


def test_probes_are_small_and_few(served: Served, reference: ReferenceClient) -> None:
    """Who shows nothing keeps nothing of the server, and no place from those who show something."""
    address = served.gateway.address
    for padding, found in ((500, [SERVING]), (65_000, ["INVALID_ARGUMENT"])):
        assert reference.run("health", address=address, services=[""], padding=padding) == found
    shown = [served.header(whose) for whose in (None, None, None, "stranger")]
    found = reference.run("watch", address=address, headers=shown)
    assert found == [SERVING, SERVING, "RESOURCE_EXHAUSTED", SERVING]


def test_who_may_not_ask_a_model_is_not_told_of_it(
    served: Served, reference: ReferenceClient
) -> None:
    address = served.gateway.address
    for whose, names in ((None, {"policy"}), ("scorer", {"ids"}), ("operator", {"ids", "policy"})):
        with served.client(whose) as client:
            assert {model["name"] for model in client.models()} == names
            assert set(client.health()["models"]) == names
        headers = served.header(whose)
        header = [(name.encode(), said.encode()) for name, said in headers.items()]
        options = flight.FlightCallOptions(headers=header, timeout=10)
        with flight.connect(f"grpc://{address}") as plain:
            listed = {info.descriptor.path[0].decode() for info in plain.list_flights(b"", options)}
        assert listed == names
        for name in ("get_model_repository_index", "get_inference_statistics"):
            told = reference.run("call", address=address, name=name, headers=headers)
            assert set(told) == names
    with served.client(None) as client, pytest.raises(Unauthenticated):
        client.stats()
    with served.client("operator") as client, pytest.raises(ModelNotFound) as absent:
        client.score("no-such-model", ROWS)
    assert "policy" not in absent.value.message


def test_a_header_that_is_no_credentials_is_one_that_is_not_known(served: Served) -> None:
    """And costs no line of the log."""
    host, port = served.gateway.stats()["http_address"].split(":")
    before = len(served.gateway.text())
    for said in (b"Basic \xe9", b"Basic", b"Bearer \xff\xfe", b"\xe9" * 4000):
        connection = http.client.HTTPConnection(host, int(port), timeout=20)
        connection.putrequest("GET", "/v2")
        connection.putheader("Authorization", said)
        connection.endheaders()
        assert connection.getresponse().status == 401
        connection.close()
    assert len(served.gateway.text()) == before


def test_triton_clients_over_http(served: Served) -> None:
    client = triton_http.InferenceServerClient(served.gateway.stats()["http_address"])
    tensor = triton_http.InferInput("x", [3], "INT64")
    tensor.set_data_from_numpy(np.array([1, 2, 3]))
    try:
        assert client.is_server_live() and client.is_server_ready()
        client.infer("ids", [tensor], headers=served.header("scorer"))
        for headers, status in (({}, "401"), (served.header("stranger"), "403")):
            with pytest.raises(InferenceServerException) as refused:
                client.infer("ids", [tensor], headers=headers)
            assert refused.value.status() == status
        for whose, status in (("scorer", "403"), ("operator", "501")):
            with pytest.raises(InferenceServerException) as refused:
                client.unload_model("ids", headers=served.header(whose))
            assert refused.value.status() == status
    finally:
        client.close()


def test_http_says_what_it_wants(served: Served) -> None:
    """Also to a client that is still sending a large body."""
    host, port = served.gateway.stats()["http_address"].split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    for body in (b"{}", b"x" * (1 << 20)):
        connection.request("POST", "/v2/models/ids/infer", body, {"Authorization": "Bearer no"})
        answer = connection.getresponse()
        said = json.loads(answer.read())
        assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert said["code"] == "unauthenticated" and not said["retryable"]
        connection.close()


def test_robots_ask_what_is_for_everybody(served: Served) -> None:
    """Their clients show no token, and have no answer where they may not ask."""

    def refused() -> int:
        return int(served.gateway.stats()["access"]["refused"].get("unauthenticated", 0))

    with connected(address_of(served.gateway), 1) as connection:
        assert ask(connection.model("policy"), **joints(1)) is not None
        before = refused()
        connection.model("ids").observe(urgency=0.5, x=np.array([1]))
        eventually(lambda: refused() == before + 1, what="the refusal")
        assert ask(connection.model("policy"), **joints(2)) is not None


def test_the_operators_tool_shows_the_token_of_its_environment(served: Served) -> None:
    command = [BIN / "iskander", "models", "--address", served.gateway.address]
    without = {name: value for name, value in os.environ.items() if name != "ISKANDER_TOKEN"}
    for token, code, words in (
        (served.tokens["operator"], 0, "policy"),
        ("wrong", 1, "the token is unknown"),
    ):
        done = subprocess.run(
            command,
            env=without | {"ISKANDER_TOKEN": token},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code and words in done.stdout + done.stderr


def test_the_operators_tool_makes_tokens(served: Served) -> None:
    """A running server takes what was added, and a stream ends when its token is taken back."""
    before = served.file.read_text()
    command = [BIN / "iskander", "token", "visitor", "--file", served.file, "--model", "i*"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    served.tokens["visitor"] = made.stdout.strip()

    def is_served() -> bool:
        try:
            with served.client("visitor") as client:
                return client.score("ids", ROWS).num_rows == 3
        except Unauthenticated:
            return False

    try:
        eventually(is_served, what="a token that was added")
        with served.client("visitor") as client, served.client("scorer") as other:
            streams = [each.stream("ids", endless(served)) for each in (client, other)]
            assert [next(stream).num_rows for stream in streams] == [3, 3]
            served.file.write_text(before)
            with pytest.raises(Unauthenticated, match="expired or was revoked"):
                for _ in range(1_000_000):
                    next(streams[0])
            assert next(streams[1]).num_rows == 3
            for stream in streams:
                stream.close()
    finally:
        served.file.write_text(before)


@pytest.mark.slow
def test_streams_that_say_nothing_end_with_their_token(
    served: Served, reference: ReferenceClient
) -> None:
    before = served.file.read_text()
    token = served.tokens["leaver"] = add_token(served.file, "leaver", ("*",))
    header = [(b"authorization", f"Bearer {token}".encode())]
    descriptor = flight.FlightDescriptor.for_path("ids")
    options = flight.FlightCallOptions(headers=header)

    def is_known() -> bool:
        with served.client("leaver") as client:
            try:
                return client.health()["ready"] is not None
            except Unauthenticated:
                return False

    try:
        eventually(is_known, what="a token that was added")
        with flight.connect(f"grpc://{served.gateway.address}") as client:
            writer, reader = client.do_exchange(descriptor, options)
            writer.begin(ROWS.schema)
            writer.write_batch(ROWS)
            assert reader.read_chunk().data.num_rows == 3
            reference.begin("stay", address=served.gateway.address, headers=served.header("leaver"))
            assert reference.facts() is True  # It was answered.
            served.file.write_text(before)
            with pytest.raises(flight.FlightUnauthenticatedError, match="expired or was revoked"):
                reader.read_chunk()
            assert reference.facts() == "UNAUTHENTICATED"
            with pytest.raises(flight.FlightUnauthenticatedError):
                writer.close()
    finally:
        served.file.write_text(before)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["grpc.health.v1.Health/Watch", REFLECTION])
def test_streams_that_only_listen_end_with_their_token(served: Served, path: str) -> None:
    before = served.file.read_text()
    token = served.tokens["leaver"] = add_token(served.file, "leaver", ("*",))
    body = http2.message(b"" if path.endswith("Watch") else b"\x3a\x01*")
    fields = http2.request_fields(f"/{path}", [("authorization", f"Bearer {token}")])

    def is_answered(wire: http2.Wire) -> bool:
        wire.say(http2.headers(1, fields), http2.data(1, body))
        wire.until(lambda: wire.heard(http2.HEADERS))
        return not wire.heard(http2.HEADERS)[0].flags & http2.END_STREAM

    def connect() -> http2.Wire | None:
        wire = http2.Wire(served.gateway.address)
        if is_answered(wire):
            return wire
        wire.socket.close()
        return None

    try:
        with eventually(connect, what="a token that was added") as wire:
            wire.until(lambda: wire.heard(http2.DATA))
            served.file.write_text(before)
            assert wire.answer(1).status == 16
    finally:
        served.file.write_text(before)


def test_every_process_of_a_gateway_asks_for_tokens(tmp_path: Path) -> None:
    """And processes are not replaced by such as could not start."""
    file = tmp_path / "tokens.toml"
    token = add_token(file, "scorer", ("*",))
    good = file.read_text()
    with running(
        tmp_path,
        [{"name": "ids", "path": str(row_ids(tmp_path / "ids"))}],
        server={"processes": 2},
        workers={"groups": ["0"], "count": 1, "reattach_s": 10.0},
        access={"tokens": "tokens.toml"},
        token=token,
    ) as gateway:
        before = {stats["pid"] for stats in by_process(gateway, 2).values()}
        for number in range(2):
            with client_of(gateway, number) as client:
                assert client.score("ids", ROWS).num_rows == 3
        for _ in range(20):
            with Client(gateway.address) as client, pytest.raises(Unauthenticated):
                client.score("ids", ROWS)
        file.write_text("[")
        gateway.signal(signal.SIGHUP)
        eventually(lambda: "the processes stay as they are" in gateway.text(), what="the complaint")
        assert {stats["pid"] for stats in by_process(gateway, 2).values()} == before
        file.write_text(good)


def endless(served: Served) -> Iterator[pa.RecordBatch]:
    while served.gateway.process is not None:
        yield ROWS


def test_what_is_refused_is_counted(served: Served) -> None:
    with served.client(None) as client, pytest.raises(Unauthenticated):
        client.score("ids", ROWS)
    stats = served.gateway.stats()
    assert stats["access"]["tokens"] == 3 and stats["access"]["refused"]["unauthenticated"] > 0
    host, port = stats["admin_address"].split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    assert 'iskander_access_refusals_total{code="unauthenticated"}' in page
