"""The settings of who may ask and how that is kept secret, and what a file of tokens says."""

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
    """Who may ask for what; see `docs/access.md`."""

    tokens: Annotated[
        str,
        Meta(
            description="File of tokens, relative to this file; read again when it changes. Empty: "
            "whoever reaches a port may do everything."
        ),
    ] = ""
    anonymous: Annotated[
        tuple[str, ...],
        Meta(
            description="With `tokens`: models, such as `demo-*`, that callers without a token may "
            "ask. Inferential's clients have none."
        ),
    ] = ()


class TlsConfig(Section, frozen=True, kw_only=True):
    """TLS of `server.address` and `http.address`, where they are no `unix:` sockets."""

    certificate: Annotated[
        str,
        Meta(
            description="PEM file of the certificate, with those that lead to its root; read again "
            "when it changes. Empty: the ports speak in the clear."
        ),
    ] = ""
    key: Annotated[
        str, Meta(description="PEM file of its key. Empty: it is in the certificate's file.")
    ] = ""
    client_ca: Annotated[
        str,
        Meta(description="PEM file of who signs the certificates that clients have to show."),
    ] = ""


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[[tokens]]` table.

    Attributes:
        name: Whose it is: the client of its requests, for fairness, limits and the log.
        sha256: Of the token, in hexadecimal; the token itself is nowhere.
        models: Models that it may ask, with `*` and `?`.
        manage: It may load and unload them too.
        expires: From when on it is not valid, with a time zone; None: never.
    """

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.@-]{1,64}\Z")]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    models: Patterns = ("*",)
    manage: bool = False
    expires: Annotated[datetime.datetime, Meta(tz=True)] | None = None


@thread_safe
class TokenFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    tokens: Annotated[tuple[Token, ...], Meta(max_length=TOKENS_MAX)] = ()
