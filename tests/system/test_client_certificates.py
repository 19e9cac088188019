"""Client certificates as identities: unmodified clients, precedence, and revocation."""

from __future__ import annotations

import datetime
import http.client
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pyarrow import flight
from support.http2 import PREFACE, settings
from support.models import row_ids
from support.processes import Gateway, eventually, running
from support.reference_client import ReferenceClient

from iskander.client import Client, Tls
from iskander.errors import IskanderError, NotReady, PermissionDenied, Unauthenticated
from iskander.gateway.auth.tokens import digest

CLIENT_SCRIPT = str(Path(__file__).parent.parent / "support" / "access_client.py")
ROWS = pa.record_batch({"x": pa.array([1, 2, 3], pa.int64())})
SPIFFE = "spiffe://example.org/scorer"
NOW = datetime.datetime.now(datetime.UTC)


class Authority:
    """A CA of client certificates, with a revocation list."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ca = folder, trustme.CA()
        self._ca.cert_pem.write_to_path(str(folder / "clients.pem"))
        self.revoke()

    def issue(self, file: str, *names: str, common_name: str | None = None) -> int:
        """Write a certificate and its key; return its serial number."""
        key = self._key()
        alternatives: list[x509.GeneralName] = [
            x509.UniformResourceIdentifier(name) if "://" in name else x509.DNSName(name)
            for name in names
        ]
        attributes = [x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, "robots")]
        if common_name is not None:
            attributes.append(x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name))
        issuer = x509.load_pem_x509_certificate(self._ca.cert_pem.bytes())
        leaf = ec.generate_private_key(ec.SECP256R1())
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name(attributes))
            .issuer_name(issuer.subject)
            .public_key(leaf.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - datetime.timedelta(days=1))
            .not_valid_after(NOW + datetime.timedelta(days=1))
        )
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), False)
        signed = builder.sign(key, hashes.SHA256())
        raw = leaf.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        (self._folder / file).write_bytes(raw + signed.public_bytes(serialization.Encoding.PEM))
        return signed.serial_number

    def revoke(self, *numbers: int) -> None:
        """Write the list of revoked certificates."""
        issuer = x509.load_pem_x509_certificate(self._ca.cert_pem.bytes())
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(issuer.subject)
            .last_update(NOW - datetime.timedelta(days=1))
            .next_update(NOW + datetime.timedelta(days=1))
        )
        for number in numbers:
            revoked = x509.RevokedCertificateBuilder().serial_number(number).revocation_date(NOW)
            builder = builder.add_revoked_certificate(revoked.build())
        crl = builder.sign(self._key(), hashes.SHA256())
        temporary = self._folder / ".crl.pem"
        temporary.write_bytes(crl.public_bytes(serialization.Encoding.PEM))
        temporary.replace(self._folder / "crl.pem")

    def _key(self) -> x509.base.CertificateIssuerPrivateKeyTypes:
        raw = self._ca.private_key_pem.bytes()
        return serialization.load_pem_private_key(raw, None)  # type: ignore[return-value]


class CertificateServer:
    """A gateway whose grants are certificates, and one token."""

    def __init__(self, gateway: Gateway, folder: Path, authority: Authority) -> None:
        self.gateway, self.folder, self.authority = gateway, folder, authority

    def tls(self, file: str) -> Tls:
        return Tls(self.folder / "roots.pem", self.folder / file, self.folder / file)

    def client(self, file: str, token: str | None = None) -> Client:
        return Client(self.gateway.address, tls=self.tls(file), token=token, timeout_s=20)

    def outcome(self, file: str, token: str | None = None) -> type[IskanderError] | int:
        """Rows of an answer, or the class of the error."""
        with self.client(file, token) as client:
            try:
                return client.score("ids", ROWS).num_rows
            except IskanderError as error:
                return type(error)


def grants(**changes: str) -> str:
    """The token file; a change of a name to an empty text removes its table."""
    tables = {
        "spiffe": f'certificate = "URI:{SPIFFE}"\nmodels = ["ids"]',
        "host": 'certificate = "DNS:Robot-7.example"',
        "common": 'certificate = "CN:robot 8"',
        "stranger": f'sha256 = "{digest("stranger")}"\nmodels = ["other"]',
        "operator": f'sha256 = "{digest("operator")}"\nmanage = true',
    } | changes
    return "".join(f'[[tokens]]\nname = "{n}"\n{text}\n' for n, text in tables.items() if text)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CertificateServer]:
    folder = tmp_path_factory.mktemp("mtls")
    servers = trustme.CA()
    servers.cert_pem.write_to_path(str(folder / "roots.pem"))
    own = servers.issue_cert("127.0.0.1", "localhost")
    own.private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
    authority = Authority(folder)
    authority.issue("spiffe.pem", SPIFFE)
    authority.issue("host.pem", "robot-7.EXAMPLE", common_name="robot 8")
    authority.issue("common.pem", common_name="robot 8")
    authority.issue("both.pem", SPIFFE, "robot-7.example")
    authority.issue("unknown.pem", "spiffe://example.org/other")
    authority.issue("lookalike.pem", f"dns.{SPIFFE.removeprefix('spiffe://').replace('/', '.')}")
    authority.issue("imitated.pem", common_name=f"URI:{SPIFFE}")
    (folder / "tokens.toml").write_text(grants())
    with running(
        folder,
        [{"name": "ids", "path": str(row_ids(folder / "ids"))}],
        secrecy=Tls(folder / "roots.pem", folder / "spiffe.pem", folder / "spiffe.pem"),
        token="operator",
        workers={"count": 1},
        http={"address": "127.0.0.1:0"},
        access={"tokens": "tokens.toml"},
        tls={
            "certificate": "server.pem",
            "client_ca": "clients.pem",
            "client_crl": "crl.pem",
        },
    ) as gateway:
        yield CertificateServer(gateway, folder, authority)
        gateway.wait_idle()


@pytest.mark.parametrize(
    ("file", "outcome"),
    [
        ("spiffe.pem", 3),
        ("host.pem", 3),
        ("common.pem", 3),
        ("both.pem", Unauthenticated),
        ("unknown.pem", Unauthenticated),
        ("lookalike.pem", Unauthenticated),
        ("imitated.pem", Unauthenticated),
    ],
)
def test_names_of_a_certificate_map_to_grants(
    server: CertificateServer, file: str, outcome: object
) -> None:
    """The common name of `host.pem` does not count: it has another name."""
    assert server.outcome(file) == outcome


def test_certificate_of_several_grants_is_ambiguous(server: CertificateServer) -> None:
    with (
        server.client("both.pem") as client,
        pytest.raises(Unauthenticated, match="names of several grants: `spiffe`, `host`"),
    ):
        client.score("ids", ROWS)


def test_token_takes_precedence_over_the_certificate(server: CertificateServer) -> None:
    """It can have less permission, and an invalid one is not replaced by the certificate."""
    assert server.outcome("spiffe.pem", "stranger") is PermissionDenied
    assert server.outcome("spiffe.pem", "unknown") is Unauthenticated
    assert server.outcome("unknown.pem", "operator") == 3


def test_pyarrow_and_grpc_clients(server: CertificateServer) -> None:
    tls = server.tls("spiffe.pem")
    pem = (server.folder / "spiffe.pem").read_bytes()
    with flight.connect(
        f"grpc+tls://{server.gateway.address}",
        tls_root_certs=(server.folder / "roots.pem").read_bytes(),
        cert_chain=pem,
        private_key=pem,
    ) as client:
        listed = client.list_flights(options=flight.FlightCallOptions(timeout=20))
        assert [info.descriptor.path for info in listed] == [[b"ids", b"1"]]
        load = flight.Action("load", b'{"model": "ids"}')
        with pytest.raises(flight.FlightUnauthorizedError, match="may not load"):
            list(client.do_action(load, flight.FlightCallOptions(timeout=20)))
    reference = ReferenceClient(CLIENT_SCRIPT)
    try:
        for file, expected in (("spiffe.pem", "ids"), ("unknown.pem", "UNAUTHENTICATED")):
            certificate = str(server.folder / file)
            answer = reference.run(
                "call",
                address=server.gateway.address,
                name="infer",
                roots=str(tls.roots),
                certificate=certificate,
                model_name="ids",
            )
            assert answer == expected
    finally:
        reference.close()


@pytest.mark.parametrize(("file", "status"), [("spiffe.pem", 200), ("unknown.pem", 401)])
def test_http_client(server: CertificateServer, file: str, status: int) -> None:
    context = ssl.create_default_context(cafile=str(server.folder / "roots.pem"))
    context.load_cert_chain(server.folder / file)
    with server.client("spiffe.pem", "operator") as client:
        host, port = client.stats()["http_address"].split(":")
    connection = http.client.HTTPSConnection(host, int(port), timeout=20, context=context)
    connection.request("GET", "/v2/models/ids")
    assert connection.getresponse().status == status
    connection.close()


def test_client_name_has_the_name_of_the_grant(server: CertificateServer) -> None:
    with server.client("host.pem") as client:
        client.score("ids", ROWS, terms={"client": "arm"})
    text = server.gateway.stats()
    assert text["access"]["tokens"] == 5


def test_removed_mapping_ends_open_streams(server: CertificateServer) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        while True:
            yield ROWS

    try:
        with server.client("common.pem") as client:
            results = client.stream("ids", batches())
            assert next(results).num_rows == 3
            (server.folder / "tokens.toml").write_text(grants(common=""))
            with pytest.raises(Unauthenticated):
                for _ in results:
                    pass
        assert server.outcome("common.pem") is Unauthenticated
    finally:
        (server.folder / "tokens.toml").write_text(grants())


@pytest.mark.slow
def test_revoked_certificate_is_rejected(server: CertificateServer) -> None:
    number = server.authority.issue("revoked.pem", SPIFFE)
    assert server.outcome("revoked.pem") == 3
    server.authority.revoke(number)

    def is_rejected() -> bool:
        with Client(server.gateway.address, tls=server.tls("revoked.pem"), timeout_s=5) as client:
            try:
                client.score("ids", ROWS)
            except NotReady:
                return True
            return False

    eventually(is_rejected, what="the revocation")
    assert server.outcome("spiffe.pem") == 3


@pytest.mark.slow
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_session_of_a_revoked_certificate_is_not_resumed(
    server: CertificateServer, version: ssl.TLSVersion
) -> None:
    number = server.authority.issue("resumed.pem", SPIFFE)
    context = ssl.create_default_context(cafile=str(server.folder / "roots.pem"))
    context.load_cert_chain(server.folder / "resumed.pem")
    context.minimum_version = context.maximum_version = version
    host, _, port = server.gateway.address.rpartition(":")

    def connect(session: ssl.SSLSession | None) -> ssl.SSLSession | None:
        """Connect, and read the settings of the server, after its tickets; return the session."""
        with (
            socket.create_connection((host, int(port)), timeout=10) as raw,
            context.wrap_socket(raw, server_hostname=host, session=session) as secure,
        ):
            secure.sendall(PREFACE + settings())
            if not secure.recv(1):
                raise ConnectionError("closed by the server")
            return secure.session

    session = connect(None)
    server.authority.revoke(number)

    def is_rejected() -> bool:
        try:
            connect(session)
        except OSError:
            return True
        return False

    eventually(is_rejected, what="the revocation")
