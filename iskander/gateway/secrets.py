"""What callers show and are shown, looked at before a start depends on it."""

from __future__ import annotations

from iskander.auth.grants import Authenticator
from iskander.config.schema import Config
from iskander.transport.tls import HTTP2, Tls


def require_secrets(config: Config) -> None:
    """See to it that a start with a configuration finds what it shows and wants to be shown.

    Raises:
        ConfigError: A file of `access` or `tls` is not what it has to be.
    """
    Authenticator(config.access, lambda: None)
    Tls(config.tls).context(HTTP2)
