"""Settings of access control and TLS, and the format of the token file."""

from __future__ import annotations

import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from iskander.config.section import Section
from iskander.decoders import thread_safe

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
        anonymous: With `tokens`: models, such as `demo-*`, for callers without a token.
            Inferential's clients have no token.
    """

    tokens: str = ""
    anonymous: tuple[str, ...] = ()


class TlsConfig(Section, frozen=True, kw_only=True):
    """TLS of `server.address` and `http.address`, except for `unix:` sockets.

    Attributes:
        certificate: PEM file of the certificate chain; reloaded when it changes. Empty: no TLS.
        key: PEM file of the private key. Empty: the key is in the certificate file.
        client_ca: PEM file of the CA of client certificates; if set, clients need a certificate.
    """

    certificate: str = ""
    key: str = ""
    client_ca: str = ""


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[[tokens]]` table.

    Attributes:
        name: The client of its requests, for fairness, limits and the log.
        sha256: Of the token, in hexadecimal. The token itself is not stored.
        models: Models that it may use, with `*` and `?`.
        manage: It may also load and unload these models.
        sources: Sources that it may read, with `*` and `?`, if it may use their models.
        expires: End of validity, with a time zone; None: never.
    """

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.@-]{1,64}\Z")]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    models: Patterns = ("*",)
    manage: bool = False
    sources: Patterns = ()
    expires: Annotated[datetime.datetime, Meta(tz=True)] | None = None


@thread_safe
class TokenFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The token file."""

    tokens: Annotated[tuple[Token, ...], Meta(max_length=TOKENS_MAX)] = ()
