"""TLS contexts of the TCP ports, rebuilt when certificate, key or client CA change.

New connections use the new files; open connections are not affected. A new context has its own keys
for session tickets, so no client resumes a session that an earlier one has verified.

Runs on: gateway loop. Source: RFC 8446; RFC 7301 (ALPN).
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

from iskander.config.auth import TlsConfig
from iskander.errors import ConfigError
from iskander.foundation.clock import NS_PER_US, thread_cpu_ns
from iskander.foundation.file_watcher import FileWatcher, ReloadStatus
from iskander.foundation.logs import network as log
from iskander.gateway.transport.certificate import earliest_expiry_s

HTTP2, HTTP1 = "h2", "http/1.1"
MEASURED: Final = 3
"""Handshakes that are measured; the shortest counts."""
HANDSHAKE_NS_MIN: Final = 100 * NS_PER_US


class ServerContext(ssl.SSLContext):
    """A context of the server; `handshake_ns` is the processor time of one handshake."""

    handshake_ns = HANDSHAKE_NS_MIN


ContextSource = Callable[[], ServerContext]
"""Returns the context for a new connection: it has the files loaded last."""


class Tls:
    """TLS contexts of one server, one per protocol.

    Attributes:
        reloads: Reads of the files; None without TLS.
        expiry_s: Unix time at which the first certificate of the chain expires; 0 if unknown.
    """

    def __init__(self, config: TlsConfig) -> None:
        self._config = config
        self.reloads = ReloadStatus() if config.certificate else None
        self.expiry_s = 0.0
        self._current: dict[str, ServerContext] = {}
        files = (config.certificate, config.key, config.client_ca, config.client_crl)
        self._watcher = FileWatcher([Path(name) for name in files if name], self._reload)

    def context(self, protocol: str) -> ContextSource | None:
        """Return the source of the contexts for an ALPN protocol, or None without TLS.

        Raises:
            ConfigError: A file is invalid.
        """
        if not self._config.certificate:
            return None
        self._current[protocol] = self._create(protocol)
        return lambda: self._current[protocol]

    def start(self) -> None:
        """Start watching the files."""
        if self._config.certificate:
            self._watcher.start()

    def stop(self) -> None:
        """Stop watching the files."""
        self._watcher.stop()

    def _reload(self, has_changed: bool) -> None:
        if not has_changed:
            return
        assert self.reloads is not None
        try:
            # New contexts: an old one would keep its certificate if the key type changes.
            self._current = {protocol: self._create(protocol) for protocol in self._current}
        except ConfigError as error:
            self.reloads.record(is_valid=False)
            log.tls_rejected(reason=error.message)
        else:
            self.reloads.record(is_valid=True)
            log.tls_reloaded()

    def _create(self, protocol: str) -> ServerContext:
        config = self._config
        context = ServerContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([protocol])
        setting = "tls.certificate and tls.key"
        try:
            context.load_cert_chain(config.certificate, config.key or None, password=_no_password)
            if config.client_ca:
                setting = "tls.client_ca"
                context.load_verify_locations(config.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
                # A resumed session would outlive its certificate.
                context.num_tickets = 0
                context.options |= ssl.OP_NO_TICKET
            if config.client_crl:
                setting = "tls.client_crl"
                context.load_verify_locations(config.client_crl)
                context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
            self.expiry_s = earliest_expiry_s(Path(config.certificate).read_bytes())
        except ssl.SSLError as error:
            raise ConfigError(f"{setting}: invalid: {error.reason or 'not PEM'}") from None
        except OSError as error:
            raise ConfigError(f"{setting}: cannot be read: {error.strerror}") from None

        context.handshake_ns = _handshake_ns(context)

        def use_current(handshake: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
            handshake.context = self._current[protocol]

        # Of a handshake that began before a change; also called without a server name.
        context.sni_callback = use_current
        return context


def _handshake_ns(context: ssl.SSLContext) -> int:
    """Measure the server's part of a handshake until it waits for the client."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    hello = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLError):
        client.wrap_bio(ssl.MemoryBIO(), hello).do_handshake()
    sent = hello.read()
    costs = []
    for _ in range(MEASURED):
        received = ssl.MemoryBIO()
        received.write(sent)
        server = context.wrap_bio(received, ssl.MemoryBIO(), server_side=True)
        began_ns = thread_cpu_ns()
        with contextlib.suppress(ssl.SSLError):
            server.do_handshake()
        costs.append(thread_cpu_ns() - began_ns)
    return max(min(costs), HANDSHAKE_NS_MIN)


def _no_password() -> str:
    """Reject an encrypted key; by default OpenSSL prompts on the terminal."""
    raise ConfigError("tls.key is encrypted: expected an unencrypted key")
