"""TLS of the ports that speak over TCP: certificate and key, and whom to believe.

A certificate that is replaced is shown to the connections that come after that; open ones go on.

Runs on: gateway loop. Source: RFC 8446; RFC 7301 (the protocol is agreed upon in the handshake).
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Any

from iskander.config_access import TlsConfig
from iskander.errors import ConfigError
from iskander.gateway.following import Following

HANDSHAKE_S = 10.0
"""How long a client may take for it."""
SHUTDOWN_S = 1.0
HTTP2, HTTP1 = "h2", "http/1.1"

log = logging.getLogger("iskander.tls")


class Tls:
    """What the ports of one server show, and want to be shown.

    Args:
        config: Where it is.

    Raises:
        ConfigError: A file cannot be read, or is not what it has to be.
    """

    def __init__(self, config: TlsConfig) -> None:
        self._config = config
        self._contexts: list[ssl.SSLContext] = []
        self._following = Following(
            [Path(name) for name in (config.certificate, config.key) if name], self._look
        )

    def context(self, protocol: str) -> ssl.SSLContext | None:
        """What a port needs that speaks a protocol; None where it speaks in the clear.

        Raises:
            ConfigError: As the class.
        """
        config = self._config
        if not config.certificate:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([protocol])
        self._load(context)
        if config.client_ca:
            try:
                context.load_verify_locations(config.client_ca)
            except OSError as error:
                raise ConfigError(f"tls.client_ca: {_why(error)}") from None
            context.verify_mode = ssl.CERT_REQUIRED
        self._contexts.append(context)
        return context

    def start(self) -> None:
        """Follow the files."""
        if self._config.certificate:
            self._following.start()

    def stop(self) -> None:
        """Follow them no more."""
        self._following.stop()

    def _look(self, has_changed: bool) -> None:
        if not has_changed:
            return
        try:
            # A pair that does not fit is seen before a port has half of it.
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            for context in self._contexts:
                self._load(context)
        except ConfigError as error:
            log.error("%s; what was there before stays in force", error.message)
        else:
            log.info("the certificate was read again")

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(
                self._config.certificate, self._config.key or None, password=_no_password
            )
        except OSError as error:
            raise ConfigError(f"tls.certificate and tls.key: {_why(error)}") from None


def options_of(context: ssl.SSLContext | None) -> dict[str, Any]:
    """How a loop's `create_server` is told."""
    if context is None:
        return {}
    return {
        "ssl": context,
        "ssl_handshake_timeout": HANDSHAKE_S,
        "ssl_shutdown_timeout": SHUTDOWN_S,
    }


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not what they have to be: {error.reason or 'no PEM'}"
    return f"cannot be read: {error.strerror}"


def _no_password() -> str:
    """Of a key that is encrypted; without it the terminal would be asked."""
    raise ConfigError("tls.key is encrypted; wanted one that is not")
