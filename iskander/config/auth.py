"""Settings of access control and TLS, and the format of the token file."""

from __future__ import annotations

import datetime
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from iskander.config.section import NotNegative, Section
from iskander.foundation.decoders import thread_safe

TOKENS_MAX = 10_000
PATTERNS_MAX = 1000

Patterns = Annotated[
    tuple[Annotated[str, Meta(min_length=1, max_length=200)], ...], Meta(max_length=PATTERNS_MAX)
]


class AccessConfig(Section, frozen=True, kw_only=True):
    """Authentication and per-model authorization; see `docs/access.md`.

    Attributes:
        tokens: Token file, relative to this file; reloaded when it changes. Empty: every client may
            do everything.
        anonymous: Models, such as `demo-*`, for callers without a token; needs `tokens`.
            Inferential's clients have no token.
        audit_file: File of JSON lines with each administrative action, and numbers of failed
            authentications. Empty: the log, at the level `info`.
        allow_unprotected_network: Listeners that may be open to the network [without TLS or
            tokens](../access.md#unprotected-listeners): `server.address`, `http.address`,
            `inferential.address`, `admin.address` or `extensions.protocols.NAME`.
        allowed_hosts: Names in `Host` of requests to `http.address` and `admin.address`, such as
            `scores.example` or `*.svc`, beside those of the server itself. `*`: every name.
        allowed_origins: Origins of web pages, such as `https://ui.example`, that may send requests
            to `http.address` and `admin.address`, beside those of the same site.
    """

    restart_reason: ClassVar[str] = "the watched files and the rules are chosen at the start"

    tokens: str = ""
    anonymous: tuple[str, ...] = ()
    audit_file: str = ""
    allow_unprotected_network: tuple[str, ...] = ()
    allowed_hosts: Patterns = ()
    allowed_origins: Patterns = ()


class TlsConfig(Section, frozen=True, kw_only=True):
    """TLS of `server.address` and `http.address`, except for `unix:` sockets.

    With `admin.tls`, also of `admin.address`.

    Attributes:
        certificate: PEM file of the certificate chain; reloaded when it changes. Empty: no TLS.
        key: PEM file of the private key. Empty: the key is in the certificate file.
        client_ca: PEM file of the CA of client certificates; if set, clients need a certificate.
        client_crl: PEM file with a current revocation list of each CA of client certificates;
            reloaded when it changes. Open connections continue. Empty: no lists.
    """

    restart_reason: ClassVar[str] = "the watched files are chosen at the start"

    certificate: str = ""
    key: str = ""
    client_ca: str = ""
    client_crl: str = ""


class GrantLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of a grant, each 0 for none; those of one name are shared by all its tables.

    Attributes:
        requests_per_s: Batches with rows, averaged. Each gateway process enforces this and the
            other rates and counts divided by `server.processes`.
        burst_requests: Batches at once after a pause; 0: those of one second.
        rows_per_s: Rows, averaged, with those of one second at once.
        outstanding_rows: Rows that are admitted and not computed.
        batch_rows: Rows of one batch.
        batch_bytes: Bytes of the columns of one batch that the model reads.
    """

    requests_per_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    burst_requests: NotNegative = 0
    rows_per_s: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    outstanding_rows: NotNegative = 0
    batch_rows: NotNegative = 0
    batch_bytes: NotNegative = 0


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[[tokens]]` table, with one of `sha256`, `certificate` and `password`.

    Attributes:
        name: The client of its requests, for fairness, limits and the log.
        sha256: Of the token, in hexadecimal. The token itself is not stored.
        certificate: Name in a client certificate, as `URI:`, `DNS:` or `email:` and an alternative
            name; or as `CN:` and the common name of a certificate without these.
        password: Argon2id hash of the password of the user `name`, for HTTP Basic and the handshake
            of Flight.
        models: Models that it may use, with `*` and `?`.
        manage: The token may also load and unload these models.
        sources: Sources that it may read, with `*` and `?`, if it may use their models.
        expires: End of validity, with a time zone; None: never.
        limits: Limits of its name.
    """

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.@-]{1,64}\Z")]
    sha256: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    certificate: Annotated[
        str, Meta(max_length=2048, pattern=r"^((URI|DNS|email|CN):[^\s].*)?\Z")
    ] = ""
    password: Annotated[str, Meta(max_length=512)] = ""
    models: Patterns = ("*",)
    manage: bool = False
    sources: Patterns = ()
    expires: Annotated[datetime.datetime, Meta(tz=True)] | None = None
    limits: GrantLimits = GrantLimits()


@thread_safe
class TokenFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The token file.

    Attributes:
        tokens: Its grants.
        anonymous: Limits of all callers without a token together.
    """

    tokens: Annotated[tuple[Token, ...], Meta(max_length=TOKENS_MAX)] = ()
    anonymous: GrantLimits = GrantLimits()
