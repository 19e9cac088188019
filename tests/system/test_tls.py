"""TLS with unmodified clients: server and client certificates, and their replacement."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
import tritonclient.http as triton_http
import trustme
from cryptography.hazmat.primitives import serialization
from pyarrow import flight
from support.models import ROOT, identity, row_ids
from support.processes import BIN, MIB, Gateway, eventually, running
from support.reference_client import ReferenceClient

from iskander.client import Client, Tls
from iskander.errors import NotReady
from iskander.gateway.transport.acceptor import HANDSHAKES_MAX

ROWS = pa.record_batch({"x": pa.array([1, 2, 3], pa.int64())})
FLOAT, ELEMENTS = 1, 1024
REFERENCE = str(ROOT / "tests" / "support" / "access_client.py")
FILES = {"certificate": "chain.pem", "key": "key.pem"}


def sign(
    folder: Path, authority: trustme.CA, kind: trustme.KeyType = trustme.KeyType.ECDSA
) -> None:
    """Writes a certificate and its key to the configured paths, each by a rename."""
    issued = authority.issue_cert("127.0.0.1", "localhost", key_type=kind)
    for name, pem in (
        ("chain.pem", b"".join(each.bytes() for each in issued.cert_chain_pems)),
        ("key.pem", issued.private_key_pem.bytes()),
    ):
        (folder / f".{name}").write_bytes(pem)
        (folder / f".{name}").replace(folder / name)


def roots_of(folder: Path, authority: trustme.CA, name: str = "roots.pem") -> Path:
    path = folder / name
    authority.cert_pem.write_to_path(str(path))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def roots(folder: Path) -> Path:
    authority = trustme.CA()
    sign(folder, authority)
    return roots_of(folder, authority)


@pytest.fixture(scope="module")
def gateway(folder: Path, roots: Path) -> Iterator[Gateway]:
    models: list[dict[str, Any]] = [
        {"name": "ids", "path": str(row_ids(folder / "ids"))},
        {
            "name": "same",
            "path": str(identity(folder / "same", FLOAT, ["rows", ELEMENTS])),
            "max_batch_rows": 2048,
        },
    ]
    with running(
        folder,
        models,
        secrecy=Tls(roots),
        workers={"count": 1},
        http={"address": "127.0.0.1:0"},
        server={"address": ["127.0.0.1:0", f"unix:{folder}/plain.sock"]},
        tls=FILES,
    ) as ready:
        yield ready
        ready.wait_idle()


def test_large_batches_are_returned_unchanged(gateway: Gateway) -> None:
    values = np.random.default_rng(7).random((2048, ELEMENTS), np.float32)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), ELEMENTS)
    batch = pa.record_batch({"x": rows})
    assert batch.nbytes >= 8 * MIB
    with gateway.client() as client:
        for result in client.stream("same", [batch] * 4):
            received = result.column(0).flatten().to_numpy()
            assert np.array_equal(received, values.ravel())


def test_pyarrow_verifies_the_certificate(gateway: Gateway, roots: Path, folder: Path) -> None:
    address = f"grpc+tls://{gateway.address}"
    with flight.connect(address, tls_root_certs=roots.read_bytes()) as client:
        assert len(list(client.list_flights())) == 2
    others = roots_of(folder, trustme.CA(), "others.pem")
    with (
        flight.connect(address, tls_root_certs=others.read_bytes()) as client,
        pytest.raises(flight.FlightUnavailableError),
    ):
        list(client.list_flights(options=flight.FlightCallOptions(timeout=10)))


def test_triton_clients(gateway: Gateway, roots: Path) -> None:
    reference = ReferenceClient(REFERENCE)
    over_grpc = {"address": gateway.address, "name": "infer", "model_name": "ids"}
    try:
        assert reference.run("call", **over_grpc, roots=str(roots)) == "ids"
        assert reference.run("call", **over_grpc) == "UNAVAILABLE"
    finally:
        reference.close()
    context = ssl.create_default_context(cafile=str(roots))
    over_http = triton_http.InferenceServerClient(
        gateway.stats()["http_address"], ssl=True, ssl_context_factory=lambda: context
    )
    tensor = triton_http.InferInput("x", [3], "INT64")
    tensor.set_data_from_numpy(np.array([1, 2, 3]))
    assert over_http.infer("ids", [tensor]).get_response()["model_name"] == "ids"
    over_http.close()


def test_unix_socket_stays_without_tls(gateway: Gateway, folder: Path) -> None:
    with Client(f"unix:{folder}/plain.sock") as client:
        assert client.score("ids", ROWS).num_rows == 3


def test_plaintext_clients_are_rejected(gateway: Gateway) -> None:
    with Client(gateway.address, timeout_s=5) as client, pytest.raises(NotReady):
        client.stats()
    address = gateway.stats()["http_address"]
    connection = http.client.HTTPConnection(*host_and_port(address), timeout=20)
    connection.request("GET", "/v2")
    with pytest.raises((http.client.BadStatusLine, ConnectionError)):
        connection.getresponse()
    connection.close()


@pytest.mark.parametrize("raw", [b"\x16\x03\x01\x02\x00", os.urandom(4096), b"GET / "])
def test_invalid_handshake_does_not_affect_other_clients(gateway: Gateway, raw: bytes) -> None:
    """The connection is closed without a log line."""
    before = len(gateway.text())
    with socket.create_connection(host_and_port(gateway.address), timeout=20) as peer:
        peer.sendall(raw)
        with gateway.client() as client:
            assert client.score("ids", ROWS).num_rows == 3
        peer.shutdown(socket.SHUT_WR)
        peer.settimeout(20)
        while peer.recv(4096):  # An alert, then the end of the connection.
            pass
    assert len(gateway.text()) == before


def test_unfinished_handshakes_are_limited(gateway: Gateway) -> None:
    """Unfinished handshakes at both ports; complete ones succeed meanwhile."""
    process = psutil.Process(gateway.pid)
    before = process.num_fds()
    ports = (gateway.address, gateway.stats()["http_address"])
    silent: list[socket.socket] = []
    # The oldest handshake, but from another source than most of them.
    slow = socket.create_connection(host_and_port(ports[1]), 20, source_address=("127.0.0.2", 0))
    try:
        for _ in range(2 * HANDSHAKES_MAX):
            silent += (socket.create_connection(host_and_port(port), timeout=20) for port in ports)
            if len(silent) % 64 == 0:
                with Client(gateway.address, tls=gateway.secrecy, timeout_s=10) as client:
                    assert client.stats()["ready"]
        eventually(
            lambda: process.num_fds() < before + 2 * HANDSHAKES_MAX + 16,
            what="the limit of open handshakes",
        )
        slow.setblocking(False)
        with pytest.raises(BlockingIOError):
            slow.recv(1)
    finally:
        for peer in (*silent, slow):
            peer.close()
    eventually(lambda: process.num_fds() < before + 16, what="the end of the handshakes")


def host_and_port(address: str) -> tuple[str, int]:
    host, port = address.split(":")
    return host, int(port)


def test_insecure_tls_versions_are_rejected(gateway: Gateway, roots: Path) -> None:
    for version, is_accepted in (
        (ssl.TLSVersion.TLSv1_1, False),
        (ssl.TLSVersion.TLSv1_2, True),
        (ssl.TLSVersion.TLSv1_3, True),
    ):
        context = ssl.create_default_context(cafile=str(roots))
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = context.maximum_version = version
        context.set_alpn_protocols(["h2"])
        with socket.create_connection(host_and_port(gateway.address), timeout=20) as plain:
            if not is_accepted:
                with pytest.raises(ssl.SSLError):
                    context.wrap_socket(plain, server_hostname="localhost")
                continue
            with context.wrap_socket(plain, server_hostname="localhost") as peer:
                assert peer.selected_alpn_protocol() == "h2"


def test_iskander_command(gateway: Gateway, roots: Path) -> None:
    command = [BIN / "iskander", "stats", "--json", "--address", gateway.address]
    done = subprocess.run(
        [*command, "--tls-roots", roots], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout)["pid"] == gateway.pid
    for wrong, code, words in (
        (["--tls"], 69, "no gateway answers"),
        (["--tls-roots", "no.pem"], 78, "no.pem"),
    ):
        done = subprocess.run(
            [*command, *wrong], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == code and words in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_replaced_certificate_is_used_for_new_connections(
    gateway: Gateway, roots: Path, folder: Path
) -> None:
    """Open connections continue; a mismatched pair is ignored; any key type is accepted."""
    authority = trustme.CA()
    new_roots = roots_of(folder, authority, "new.pem")
    http_address = gateway.stats()["http_address"]
    old = [(folder / name).read_bytes() for name in FILES.values()]

    def is_trusted() -> bool:
        with Client(gateway.address, tls=Tls(new_roots), timeout_s=5) as client:
            try:
                return bool(client.stats()["ready"])
            except NotReady:
                return False

    with gateway.client() as open_client:
        open_client.stats()
        assert not is_trusted()
        try:
            (folder / "key.pem").write_bytes(b"no key")
            eventually(lambda: "stay in use" in gateway.text(), what="the log line")
            assert gateway.stats()["ready"]
            sign(folder, authority, trustme.KeyType.RSA)
            eventually(is_trusted, what="the new certificate")
            assert open_client.score("ids", ROWS).num_rows == 3
            context = ssl.create_default_context(cafile=str(new_roots))
            over_http = http.client.HTTPSConnection(
                *host_and_port(http_address), timeout=20, context=context
            )
            over_http.request("GET", "/v2/health/live")
            assert over_http.getresponse().status == 200
            over_http.close()
        finally:
            for name, raw in zip(FILES.values(), old, strict=True):
                (folder / name).write_bytes(raw)
    eventually(lambda: not is_trusted(), what="the old certificate")


def test_client_certificate_is_required_with_client_ca(tmp_path: Path) -> None:
    authority, clients = trustme.CA(), trustme.CA()
    sign(tmp_path, authority)
    roots = roots_of(tmp_path, authority)
    roots_of(tmp_path, clients, "clients.pem")
    trusted = clients.issue_cert("robot-7")
    other_clients = trustme.CA()
    untrusted = other_clients.issue_cert("robot-7")
    for name, issued in (("trusted", trusted), ("untrusted", untrusted)):
        issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / f"{name}.pem"))
    secrecy = Tls(roots, tmp_path / "trusted.pem", tmp_path / "trusted.pem")
    with running(
        tmp_path,
        [{"name": "ids", "path": str(row_ids(tmp_path / "ids"))}],
        secrecy=secrecy,
        workers={"count": 1},
        tls=FILES | {"client_ca": "clients.pem"},
    ) as gateway:
        with gateway.client() as client:
            assert client.score("ids", ROWS).num_rows == 3
        other = tmp_path / "untrusted.pem"
        untrusted_tls = Tls(roots, other, other)
        for wrong in (Tls(roots), untrusted_tls):
            with (
                Client(gateway.address, tls=wrong, timeout_s=5) as client,
                pytest.raises(NotReady),
            ):
                client.stats()

        roots_of(tmp_path, other_clients, "clients.pem")

        def is_accepted() -> bool:
            with Client(gateway.address, tls=untrusted_tls, timeout_s=5) as client:
                try:
                    return bool(client.stats()["ready"])
                except NotReady:
                    return False

        eventually(is_accepted, what="the new client CA")


@pytest.mark.slow
def test_invalid_tls_settings_are_rejected_at_the_start(tmp_path: Path) -> None:
    """`check` and the start report the same errors."""
    authority = trustme.CA()
    sign(tmp_path, authority)
    key = serialization.load_pem_private_key((tmp_path / "key.pem").read_bytes(), None)
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (tmp_path / "secret.pem").write_bytes(secret)
    (tmp_path / "none.pem").write_text("no PEM\n")
    roots_of(tmp_path, authority)
    quickstart = (ROOT / "configs" / "quickstart.toml").read_text()
    file = tmp_path / "iskander.toml"
    file.write_text(quickstart.replace('path = "', f'path = "{ROOT}/configs/'))
    for settings, words in (
        ({"certificate": "nowhere.pem"}, "No such file"),
        ({"certificate": "none.pem"}, "invalid: "),
        ({"certificate": "chain.pem"}, "invalid: "),
        ({"certificate": "chain.pem", "key": "roots.pem"}, "invalid: "),
        ({"certificate": "chain.pem", "key": "secret.pem"}, "tls.key is encrypted"),
        (FILES | {"client_ca": "none.pem"}, "tls.client_ca: invalid: "),
        ({"key": "key.pem"}, "no effect without tls.certificate"),
    ):
        changes = ["--set", "server.address=127.0.0.1:0"]
        changes += ["--set", f"server.runtime_directory={tmp_path / 'run'}"]
        for name, value in settings.items():
            changes += ["--set", f"tls.{name}={value}"]
        for command, code in (
            ([BIN / "iskander", "check", file], 78),
            ([BIN / "iskander-gateway", "--config", file], 78),
        ):
            done = subprocess.run(
                [*command, *changes], capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == code and words in done.stderr, done.stderr
            assert "Traceback" not in done.stderr
            assert not (tmp_path / "run" / "attach.sock").exists()
