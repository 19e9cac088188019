"""TLS of the ports that speak over TCP: certificate and key, and whom to believe.

What is replaced is shown to the connections that come after that; open ones go on.

Runs on: gateway loop. Source: RFC 8446; RFC 7301 (the protocol is agreed upon in the handshake).
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from iskander.config.auth import TlsConfig
from iskander.errors import ConfigError
from iskander.file_watcher import FileWatcher

HTTP2, HTTP1 = "h2", "http/1.1"

log = logging.getLogger("iskander.tls")


class Tls:
    """What the ports of one server show, and want to be shown.

    Args:
        config: Where it is.
    """

    def __init__(self, config: TlsConfig) -> None:
        self._config = config
        self._current: dict[str, ssl.SSLContext] = {}
        files = (config.certificate, config.key, config.client_ca)
        self._following = FileWatcher([Path(name) for name in files if name], self._look)

    def context(self, protocol: str) -> ssl.SSLContext | None:
        """What a port needs that speaks a protocol; None where it speaks in the clear.

        Raises:
            ConfigError: A file cannot be read, or is not what it has to be.
        """
        if not self._config.certificate:
            return None
        context = self._current[protocol] = self._made(protocol)

        def choose(handshake: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
            handshake.context = self._current[protocol]

        # Called in each handshake, also where the client names no server.
        context.sni_callback = choose
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
            # Anew and whole: a context keeps the certificate of another kind of key.
            self._current = {protocol: self._made(protocol) for protocol in self._current}
        except ConfigError as error:
            log.error("%s; what was there before stays in force", error.message)
        else:
            log.info("certificate and key were read again")

    def _made(self, protocol: str) -> ssl.SSLContext:
        config = self._config
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([protocol])
        try:
            context.load_cert_chain(config.certificate, config.key or None, password=_no_password)
        except OSError as error:
            raise ConfigError(f"tls.certificate and tls.key: {_why(error)}") from None
        if config.client_ca:
            try:
                context.load_verify_locations(config.client_ca)
            except OSError as error:
                raise ConfigError(f"tls.client_ca: {_why(error)}") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not what they have to be: {error.reason or 'no PEM'}"
    return f"cannot be read: {error.strerror}"


def _no_password() -> str:
    """Of a key that is encrypted; without it the terminal would be asked."""
    raise ConfigError("tls.key is encrypted; wanted one that is not")
