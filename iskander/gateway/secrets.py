"""Check of the token file and TLS files before a start."""

from __future__ import annotations

from iskander.config.schema import Config
from iskander.gateway.auth.grants import Authenticator
from iskander.gateway.transport.tls import HTTP2, Tls


def require_secrets(config: Config) -> None:
    """Load the files of `access` and `tls`; raise ConfigError if one is invalid."""
    Authenticator(config.access, lambda: None)
    Tls(config.tls).context(HTTP2)
