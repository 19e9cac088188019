"""Token authentication with unmodified clients of each protocol."""

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

from iskander.client import Client
from iskander.errors import (
    IskanderError,
    ModelNotFound,
    PermissionDenied,
    Unauthenticated,
    Unsupported,
)
from iskander.gateway.auth.tokens import add_token

SERVING = "0801"
"""A HealthCheckResponse, in hexadecimal."""
REFLECTION = "grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
CLIENT_SCRIPT = str(Path(__file__).parent.parent / "support" / "access_client.py")
ROWS = pa.record_batch({"x": pa.array([1, 2, 3], pa.int64())})


class ProtectedServer:
    """A gateway whose models require a token, except `policy`."""

    def __init__(self, gateway: Gateway, folder: Path, tokens: dict[str, str]) -> None:
        self.gateway = gateway
        self.file = folder / "tokens.toml"
        self.tokens = tokens

    def client(self, token_name: str | None) -> Client:
        return Client(
            self.gateway.address, token=None if token_name is None else self.tokens[token_name]
        )

    def header(self, token_name: str | None) -> dict[str, str]:
        if token_name is None:
            return {}
        return {"authorization": f"Bearer {self.tokens.get(token_name, 'no-token-of-ours')}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProtectedServer]:
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
        yield ProtectedServer(gateway, folder, tokens)
        gateway.wait_idle()


@pytest.fixture(scope="module")
def reference() -> Iterator[ReferenceClient]:
    """grpcio clients in their own process; grpcio must not share a process with pyarrow.flight."""
    reference = ReferenceClient(CLIENT_SCRIPT)
    yield reference
    reference.close()


def test_flight_client_with_token_is_served(server: ProtectedServer) -> None:
    with server.client("scorer") as client:
        assert client.score("ids", ROWS).num_rows == 3


@pytest.mark.parametrize(
    ("token_name", "error"), [(None, Unauthenticated), ("stranger", PermissionDenied)]
)
def test_flight_client_without_permission_is_rejected(
    server: ProtectedServer, token_name: str | None, error: type[IskanderError]
) -> None:
    with server.client(token_name) as client, pytest.raises(error) as caught:
        client.score("ids", ROWS)
    assert not caught.value.retryable and caught.value.fault == "client"


def test_pyarrow_basic_auth_accepts_the_token_as_password(server: ProtectedServer) -> None:
    """Any username is accepted; the returned header authenticates the next calls."""
    with flight.connect(f"grpc://{server.gateway.address}") as client:
        pair = client.authenticate_basic_token("anybody", server.tokens["scorer"])
        assert pair == (b"authorization", f"Bearer {server.tokens['scorer']}".encode())
        options = flight.FlightCallOptions(headers=[pair], timeout=10)
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_path("ids"), options)
        with writer:
            writer.begin(ROWS.schema)
            writer.write_batch(ROWS)
            writer.done_writing()
            assert reader.read_all().num_rows == 3
        with pytest.raises(flight.FlightUnauthenticatedError, match="is unknown"):
            client.authenticate_basic_token("anybody", "wrong")


def test_pyarrow_raises_unauthenticated_and_unauthorized_errors(server: ProtectedServer) -> None:
    unknown = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer no")], timeout=10)
    stranger = [(b"authorization", f"Bearer {server.tokens['stranger']}".encode())]
    load = flight.Action("load", b'{"model": "ids"}')
    with flight.connect(f"grpc://{server.gateway.address}") as client:
        with pytest.raises(flight.FlightUnauthenticatedError):
            list(client.list_flights(options=unknown))
        with pytest.raises(flight.FlightUnauthorizedError):
            list(client.do_action(load, flight.FlightCallOptions(headers=stranger, timeout=10)))


@pytest.mark.parametrize(
    ("token_name", "error"),
    [(None, Unauthenticated), ("scorer", PermissionDenied), ("operator", Unsupported)],
)
def test_unload_requires_a_token_with_manage(
    server: ProtectedServer, token_name: str | None, error: type[IskanderError]
) -> None:
    """`Unsupported` means authorized: models of the configuration cannot be unloaded."""
    with server.client(token_name) as client, pytest.raises(error):
        client.unload("ids")


def test_triton_grpc_calls_are_authorized(
    server: ProtectedServer, reference: ReferenceClient
) -> None:
    def call(name: str, token_name: str | None, **arguments: Any) -> Any:
        headers = server.header(token_name)
        address = server.gateway.address
        return reference.run("call", address=address, name=name, headers=headers, **arguments)

    for probe in ("is_server_live", "is_server_ready"):
        assert call(probe, None) is True
    for token_name, expected in (
        (None, "UNAUTHENTICATED"),
        ("nobody", "UNAUTHENTICATED"),
        ("stranger", "PERMISSION_DENIED"),
        ("scorer", "ids"),
    ):
        assert call("infer", token_name, model_name="ids") == expected
        assert call("get_model_metadata", token_name, model_name="ids") == expected
    assert call("load_model", "scorer", model_name="ids") == "PERMISSION_DENIED"
    assert call("unload_model", "operator", model_name="ids") == "UNIMPLEMENTED"


def test_request_stream_is_authorized(server: ProtectedServer, reference: ReferenceClient) -> None:
    address = server.gateway.address
    (error,) = reference.run("stream", address=address, headers=server.header("stranger"))
    assert "is not for model `ids`" in error
    assert reference.run("stream", address=address, headers=server.header("scorer")) == [""]


def test_anonymous_health_checks_do_not_reveal_models(
    server: ProtectedServer, reference: ReferenceClient
) -> None:
    responses = reference.run(
        "health", address=server.gateway.address, services=["", "policy", "ids", "no-such-model"]
    )
    assert responses == [SERVING, SERVING, "UNAUTHENTICATED", "UNAUTHENTICATED"]


def test_anonymous_probes_are_limited_in_size_and_number(
    server: ProtectedServer, reference: ReferenceClient
) -> None:
    """Anonymous probes hold little memory and take no slots from callers with tokens."""
    address = server.gateway.address
    for padding, expected in ((500, [SERVING]), (65_000, ["INVALID_ARGUMENT"])):
        assert reference.run("health", address=address, services=[""], padding=padding) == expected
    headers = [server.header(token_name) for token_name in (None, None, None, "stranger")]
    responses = reference.run("watch", address=address, headers=headers)
    assert responses == [SERVING, SERVING, "RESOURCE_EXHAUSTED", SERVING]


def test_callers_without_permission_cannot_list_a_model(
    server: ProtectedServer, reference: ReferenceClient
) -> None:
    address = server.gateway.address
    for token_name, names in (
        (None, {"policy"}),
        ("scorer", {"ids"}),
        ("operator", {"ids", "policy"}),
    ):
        with server.client(token_name) as client:
            assert {model["name"] for model in client.models()} == names
            assert set(client.health()["models"]) == names
        headers = server.header(token_name)
        header = [(name.encode(), value.encode()) for name, value in headers.items()]
        options = flight.FlightCallOptions(headers=header, timeout=10)
        with flight.connect(f"grpc://{address}") as plain:
            listed = {info.descriptor.path[0].decode() for info in plain.list_flights(b"", options)}
        assert listed == names
        for name in ("get_model_repository_index", "get_inference_statistics"):
            response = reference.run("call", address=address, name=name, headers=headers)
            assert set(response) == names
    with server.client(None) as client, pytest.raises(Unauthenticated):
        client.stats()
    with server.client("operator") as client, pytest.raises(ModelNotFound) as absent:
        client.score("no-such-model", ROWS)
    assert "policy" not in absent.value.message


def test_malformed_credentials_are_rejected_and_not_logged(server: ProtectedServer) -> None:
    host, port = server.gateway.stats()["http_address"].split(":")
    before = len(server.gateway.text())
    for value in (b"Basic \xe9", b"Basic", b"Bearer \xff\xfe", b"\xe9" * 4000):
        connection = http.client.HTTPConnection(host, int(port), timeout=20)
        connection.putrequest("GET", "/v2")
        connection.putheader("Authorization", value)
        connection.endheaders()
        assert connection.getresponse().status == 401
        connection.close()
    assert len(server.gateway.text()) == before


def test_triton_http_calls_are_authorized(server: ProtectedServer) -> None:
    client = triton_http.InferenceServerClient(server.gateway.stats()["http_address"])
    tensor = triton_http.InferInput("x", [3], "INT64")
    tensor.set_data_from_numpy(np.array([1, 2, 3]))
    try:
        assert client.is_server_live() and client.is_server_ready()
        client.infer("ids", [tensor], headers=server.header("scorer"))
        for headers, status in (({}, "401"), (server.header("stranger"), "403")):
            with pytest.raises(InferenceServerException) as caught:
                client.infer("ids", [tensor], headers=headers)
            assert caught.value.status() == status
        for token_name, status in (("scorer", "403"), ("operator", "501")):
            with pytest.raises(InferenceServerException) as caught:
                client.unload_model("ids", headers=server.header(token_name))
            assert caught.value.status() == status
    finally:
        client.close()


def test_http_401_requests_a_bearer_token(server: ProtectedServer) -> None:
    """The response also reaches a client that is still sending a large body."""
    host, port = server.gateway.stats()["http_address"].split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    for body in (b"{}", b"x" * (1 << 20)):
        connection.request("POST", "/v2/models/ids/infer", body, {"Authorization": "Bearer no"})
        response = connection.getresponse()
        error = json.loads(response.read())
        assert response.status == 401 and response.headers["www-authenticate"] == "Bearer"
        assert error["code"] == "unauthenticated" and not error["retryable"]
        connection.close()


def test_inferential_clients_reach_only_anonymous_models(server: ProtectedServer) -> None:
    """Their protocol has no token, and a rejected observation has no response."""

    def rejections() -> int:
        return int(server.gateway.stats()["access"]["refused"].get("unauthenticated", 0))

    with connected(address_of(server.gateway), 1) as connection:
        assert ask(connection.model("policy"), **joints(1)) is not None
        before = rejections()
        connection.model("ids").observe(urgency=0.5, x=np.array([1]))
        eventually(lambda: rejections() == before + 1, what="the rejection")
        assert ask(connection.model("policy"), **joints(2)) is not None


def test_cli_sends_the_token_from_its_environment(server: ProtectedServer) -> None:
    command = [BIN / "iskander", "models", "--address", server.gateway.address]
    without = {name: value for name, value in os.environ.items() if name != "ISKANDER_TOKEN"}
    for token, code, text in (
        (server.tokens["operator"], 0, "policy"),
        ("wrong", 77, "the token is unknown"),
    ):
        done = subprocess.run(
            command,
            env=without | {"ISKANDER_TOKEN": token},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code and text in done.stdout + done.stderr


def test_cli_adds_a_token_to_a_running_server(server: ProtectedServer) -> None:
    """A stream ends when its token is revoked."""
    before = server.file.read_text()
    command = [BIN / "iskander", "token", "visitor", "--file", server.file, "--model", "i*"]
    command += ["--source", "clicks", "--source", "a*"]
    created = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    server.tokens["visitor"] = created.stdout.strip()
    assert 'sources = ["clicks","a*"]' in server.file.read_text()

    def is_served() -> bool:
        try:
            with server.client("visitor") as client:
                return client.score("ids", ROWS).num_rows == 3
        except Unauthenticated:
            return False

    try:
        eventually(is_served, what="acceptance of the new token")
        with server.client("visitor") as client, server.client("scorer") as other:
            streams = [each.stream("ids", endless_batches(server)) for each in (client, other)]
            assert [next(stream).num_rows for stream in streams] == [3, 3]
            server.file.write_text(before)
            with pytest.raises(Unauthenticated, match="expired or was revoked"):
                for _ in range(1_000_000):
                    next(streams[0])
            assert next(streams[1]).num_rows == 3
            for stream in streams:
                stream.close()
    finally:
        server.file.write_text(before)


@pytest.mark.slow
def test_idle_streams_end_when_their_token_is_revoked(
    server: ProtectedServer, reference: ReferenceClient
) -> None:
    before = server.file.read_text()
    token = server.tokens["leaver"] = add_token(server.file, "leaver", ("*",))
    header = [(b"authorization", f"Bearer {token}".encode())]
    descriptor = flight.FlightDescriptor.for_path("ids")
    options = flight.FlightCallOptions(headers=header)

    def is_known() -> bool:
        with server.client("leaver") as client:
            try:
                return client.health()["ready"] is not None
            except Unauthenticated:
                return False

    try:
        eventually(is_known, what="acceptance of the new token")
        with flight.connect(f"grpc://{server.gateway.address}") as client:
            writer, reader = client.do_exchange(descriptor, options)
            writer.begin(ROWS.schema)
            writer.write_batch(ROWS)
            assert reader.read_chunk().data.num_rows == 3
            reference.begin("stay", address=server.gateway.address, headers=server.header("leaver"))
            assert reference.result() is True  # The first response arrived.
            server.file.write_text(before)
            with pytest.raises(flight.FlightUnauthenticatedError, match="expired or was revoked"):
                reader.read_chunk()
            assert reference.result() == "UNAUTHENTICATED"
            with pytest.raises(flight.FlightUnauthenticatedError):
                writer.close()
    finally:
        server.file.write_text(before)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["grpc.health.v1.Health/Watch", REFLECTION])
def test_server_streams_end_when_their_token_is_revoked(server: ProtectedServer, path: str) -> None:
    before = server.file.read_text()
    token = server.tokens["leaver"] = add_token(server.file, "leaver", ("*",))
    body = http2.message(b"" if path.endswith("Watch") else b"\x3a\x01*")
    fields = http2.request_fields(f"/{path}", [("authorization", f"Bearer {token}")])

    def is_answered(wire: http2.Wire) -> bool:
        wire.feed(http2.headers(1, fields), http2.data(1, body))
        wire.until(lambda: wire.frames_of(http2.HEADERS))
        return not wire.frames_of(http2.HEADERS)[0].flags & http2.END_STREAM

    def connect() -> http2.Wire | None:
        wire = http2.Wire(server.gateway.address)
        if is_answered(wire):
            return wire
        wire.socket.close()
        return None

    try:
        with eventually(connect, what="acceptance of the new token") as wire:
            wire.until(lambda: wire.frames_of(http2.DATA))
            server.file.write_text(before)
            assert wire.answer(1).status == 16
    finally:
        server.file.write_text(before)


@pytest.mark.slow
def test_every_gateway_process_requires_tokens(tmp_path: Path) -> None:
    """A reload with an invalid token file keeps the running processes."""
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
        eventually(lambda: "reload rejected" in gateway.text(), what="the warning")
        assert {stats["pid"] for stats in by_process(gateway, 2).values()} == before
        file.write_text(good)


def endless_batches(server: ProtectedServer) -> Iterator[pa.RecordBatch]:
    while server.gateway.process is not None:
        yield ROWS


def test_rejections_are_counted(server: ProtectedServer) -> None:
    with server.client(None) as client, pytest.raises(Unauthenticated):
        client.score("ids", ROWS)
    stats = server.gateway.stats()
    assert stats["access"]["tokens"] == 3 and stats["access"]["refused"]["unauthenticated"] > 0
    host, port = stats["admin_address"].split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    assert 'iskander_access_refusals_total{code="unauthenticated"}' in page
