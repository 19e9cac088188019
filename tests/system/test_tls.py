"""TLS, by unmodified clients: certificates of server and clients, and one that is replaced."""

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
from iskander.transport.acceptor import HANDSHAKES_MAX

ROWS = pa.record_batch({"x": pa.array([1, 2, 3], pa.int64())})
FLOAT, ELEMENTS = 1, 1024
JUDGE = str(ROOT / "tests" / "support" / "access_client.py")
FILES = {"certificate": "chain.pem", "key": "key.pem"}


def sign(
    folder: Path, authority: trustme.CA, kind: trustme.KeyType = trustme.KeyType.ECDSA
) -> None:
    """Put a certificate and its key where the server looks for them, each as a whole."""
    made = authority.issue_cert("127.0.0.1", "localhost", key_type=kind)
    for name, pem in (
        ("chain.pem", b"".join(each.bytes() for each in made.cert_chain_pems)),
        ("key.pem", made.private_key_pem.bytes()),
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


def test_batches_of_megabytes_come_and_go_as_they_are(gateway: Gateway) -> None:
    values = np.random.default_rng(7).random((2048, ELEMENTS), np.float32)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), ELEMENTS)
    batch = pa.record_batch({"x": rows})
    assert batch.nbytes >= 8 * MIB
    with gateway.client() as client:
        for result in client.stream("same", [batch] * 4):
            found = result.column(0).flatten().to_numpy()
            assert np.array_equal(found, values.ravel())


def test_pyarrow_believes_who_signed(gateway: Gateway, roots: Path, folder: Path) -> None:
    address = f"grpc+tls://{gateway.address}"
    with flight.connect(address, tls_root_certs=roots.read_bytes()) as client:
        assert len(list(client.list_flights())) == 2
    others = roots_of(folder, trustme.CA(), "others.pem")
    with (
        flight.connect(address, tls_root_certs=others.read_bytes()) as client,
        pytest.raises(flight.FlightUnavailableError),
    ):
        list(client.list_flights(options=flight.FlightCallOptions(timeout=10)))


def test_tritons_clients(gateway: Gateway, roots: Path) -> None:
    reference = ReferenceClient(JUDGE)
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


def test_a_socket_of_the_machine_stays_as_it_is(gateway: Gateway, folder: Path) -> None:
    with Client(f"unix:{folder}/plain.sock") as client:
        assert client.score("ids", ROWS).num_rows == 3


def test_who_speaks_in_the_clear_is_not_heard(gateway: Gateway) -> None:
    with Client(gateway.address, timeout_s=5) as client, pytest.raises(NotReady):
        client.stats()
    address = gateway.stats()["http_address"]
    connection = http.client.HTTPConnection(*where(address), timeout=20)
    connection.request("GET", "/v2")
    with pytest.raises((http.client.BadStatusLine, ConnectionError)):
        connection.getresponse()
    connection.close()


@pytest.mark.parametrize("said", [b"\x16\x03\x01\x02\x00", os.urandom(4096), b"GET / "])
def test_what_is_no_handshake_costs_nobody_else_anything(gateway: Gateway, said: bytes) -> None:
    """Its connection is closed, and nothing is logged."""
    before = len(gateway.text())
    with socket.create_connection(where(gateway.address), timeout=20) as peer:
        peer.sendall(said)
        with gateway.client() as client:
            assert client.score("ids", ROWS).num_rows == 3
        peer.shutdown(socket.SHUT_WR)
        peer.settimeout(20)
        while peer.recv(4096):  # An alert, and the end.
            pass
    assert len(gateway.text()) == before


def test_handshakes_that_go_nowhere_hold_so_many_places_and_no_more(gateway: Gateway) -> None:
    """Of both ports; who means it gets in meanwhile."""
    process = psutil.Process(gateway.pid)
    before = process.num_fds()
    ports = (gateway.address, gateway.stats()["http_address"])
    silent: list[socket.socket] = []
    # The oldest, but not of the source with most of them.
    slow = socket.create_connection(where(ports[1]), 20, source_address=("127.0.0.2", 0))
    try:
        for _ in range(2 * HANDSHAKES_MAX):
            silent += (socket.create_connection(where(port), timeout=20) for port in ports)
            if len(silent) % 64 == 0:
                with Client(gateway.address, tls=gateway.secrecy, timeout_s=10) as client:
                    assert client.stats()["ready"]
        eventually(
            lambda: process.num_fds() < before + 2 * HANDSHAKES_MAX + 16, what="a bound of them"
        )
        slow.setblocking(False)
        with pytest.raises(BlockingIOError):
            slow.recv(1)
    finally:
        for peer in (*silent, slow):
            peer.close()
    eventually(lambda: process.num_fds() < before + 16, what="their end")


def where(address: str) -> tuple[str, int]:
    host, port = address.split(":")
    return host, int(port)


def test_versions_that_are_broken_are_not_spoken(gateway: Gateway, roots: Path) -> None:
    for most, is_spoken in (
        (ssl.TLSVersion.TLSv1_1, False),
        (ssl.TLSVersion.TLSv1_2, True),
        (ssl.TLSVersion.TLSv1_3, True),
    ):
        context = ssl.create_default_context(cafile=str(roots))
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = context.maximum_version = most
        context.set_alpn_protocols(["h2"])
        with socket.create_connection(where(gateway.address), timeout=20) as plain:
            if not is_spoken:
                with pytest.raises(ssl.SSLError):
                    context.wrap_socket(plain, server_hostname="localhost")
                continue
            with context.wrap_socket(plain, server_hostname="localhost") as peer:
                assert peer.selected_alpn_protocol() == "h2"


def test_the_operators_tool(gateway: Gateway, roots: Path) -> None:
    command = [BIN / "iskander", "stats", "--json", "--address", gateway.address]
    done = subprocess.run(
        [*command, "--tls-roots", roots], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout)["pid"] == gateway.pid
    for wrong, words in ((["--tls"], "no gateway answers"), (["--tls-roots", "no.pem"], "no.pem")):
        done = subprocess.run(
            [*command, *wrong], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 1 and words in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_certificate_that_is_replaced_is_shown_from_then_on(
    gateway: Gateway, roots: Path, folder: Path
) -> None:
    """Connections that are open go on; a pair that does not fit is not taken; any kind of it is."""
    authority = trustme.CA()
    new_roots = roots_of(folder, authority, "new.pem")
    http_address = gateway.stats()["http_address"]
    old = [(folder / name).read_bytes() for name in FILES.values()]

    def is_believed() -> bool:
        with Client(gateway.address, tls=Tls(new_roots), timeout_s=5) as client:
            try:
                return bool(client.stats()["ready"])
            except NotReady:
                return False

    with gateway.client() as open_before:
        open_before.stats()
        assert not is_believed()
        try:
            (folder / "key.pem").write_bytes(b"no key")
            eventually(lambda: "stay in use" in gateway.text(), what="the complaint")
            assert gateway.stats()["ready"]
            sign(folder, authority, trustme.KeyType.RSA)
            eventually(is_believed, what="the new certificate")
            assert open_before.score("ids", ROWS).num_rows == 3
            context = ssl.create_default_context(cafile=str(new_roots))
            over_http = http.client.HTTPSConnection(
                *where(http_address), timeout=20, context=context
            )
            over_http.request("GET", "/v2/health/live")
            assert over_http.getresponse().status == 200
            over_http.close()
        finally:
            for name, raw in zip(FILES.values(), old, strict=True):
                (folder / name).write_bytes(raw)
    eventually(lambda: not is_believed(), what="the old certificate")


def test_clients_show_a_certificate_where_that_is_wanted(tmp_path: Path) -> None:
    authority, clients = trustme.CA(), trustme.CA()
    sign(tmp_path, authority)
    roots = roots_of(tmp_path, authority)
    roots_of(tmp_path, clients, "clients.pem")
    shown = clients.issue_cert("robot-7")
    strangers = trustme.CA()
    strange = strangers.issue_cert("robot-7")
    for name, made in (("shown", shown), ("strange", strange)):
        made.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / f"{name}.pem"))
    secrecy = Tls(roots, tmp_path / "shown.pem", tmp_path / "shown.pem")
    with running(
        tmp_path,
        [{"name": "ids", "path": str(row_ids(tmp_path / "ids"))}],
        secrecy=secrecy,
        workers={"count": 1},
        tls=FILES | {"client_ca": "clients.pem"},
    ) as gateway:
        with gateway.client() as client:
            assert client.score("ids", ROWS).num_rows == 3
        other = tmp_path / "strange.pem"
        stranger = Tls(roots, other, other)
        for wrong in (Tls(roots), stranger):
            with (
                Client(gateway.address, tls=wrong, timeout_s=5) as client,
                pytest.raises(NotReady),
            ):
                client.stats()

        roots_of(tmp_path, strangers, "clients.pem")

        def is_let_in() -> bool:
            with Client(gateway.address, tls=stranger, timeout_s=5) as client:
                try:
                    return bool(client.stats()["ready"])
                except NotReady:
                    return False

        eventually(is_let_in, what="those that are believed now")


@pytest.mark.slow
def test_a_start_that_cannot_speak_it_says_why(tmp_path: Path) -> None:
    """`check` and start refuse the same, with the same words."""
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
            ([BIN / "iskander", "check", file], 1),
            ([BIN / "iskander-gateway", "--config", file], 78),
        ):
            done = subprocess.run(
                [*command, *changes], capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == code and words in done.stderr, done.stderr
            assert "Traceback" not in done.stderr
            assert not (tmp_path / "run" / "attach.sock").exists()
