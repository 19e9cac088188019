"""HTTP port of the Open Inference Protocol.

Imported only if the port is configured, because it imports h11 and starlette.

Runs on: gateway loop.
"""

from __future__ import annotations

from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.gateway.protocols.extension import Services
from iskander.gateway.protocols.oip.http.app import PROBES, OipHttp
from iskander.gateway.protocols.oip.http.body import BodyQuota
from iskander.gateway.protocols.oip.http.infer import HttpInference
from iskander.gateway.protocols.oip.service import OipService
from iskander.gateway.transport.http1.listener import Http1Listener
from iskander.gateway.transport.http1.sites import SitePolicy
from iskander.gateway.transport.sockets import bind, with_port
from iskander.gateway.transport.tls import HTTP1


class OipHttpServer:
    """The listener and its application."""

    def __init__(self, services: Services, service: OipService, settings: Config) -> None:
        config, access = settings.http, settings.access
        self._address = config.address
        limits, models = services.connection_limits, services.models
        self._quota = quota = BodyQuota(
            config.bodies_bytes, limits.budget, limits.timeouts.message_s, limits.count_ended
        )
        self._infer = HttpInference(models, services.submitter, config, quota)
        counts = limits.calls_ended
        app = OipHttp(models, service, self._infer, services.authenticator, quota, counts).app()
        tls = services.tls.context(HTTP1)
        has_tokens = bool(access.tokens)
        sites = SitePolicy(access, config.address, has_tokens=has_tokens, probes=PROBES)
        self._listener = Http1Listener(app, config.connections, limits, tls, sites=sites)

    @property
    def unsent(self) -> int:
        """Number of connections with unread responses."""
        return self._listener.unsent

    def configure(self, config: Config) -> None:
        """Apply the live settings, to requests in progress too."""
        self._infer.config = config.http
        self._quota.bytes_max = config.http.bodies_bytes
        self._quota.message_s = config.timeouts.message_s
        self._listener.connections_max = config.http.connections

    async def start(self, *, is_shared: bool = False) -> str:
        """Listen and return the address with its port; `is_shared`: other processes use it too."""
        try:
            sockets = await bind(self._address, is_shared=is_shared)
            for bound in sockets:
                await self._listener.listen(bound)
        except OSError as error:
            raise ConfigError(
                f"http.address {self._address}: cannot listen there: {error.strerror}"
            ) from None
        return with_port(self._address, sockets[0])

    def stop_accepting(self) -> None:
        """Accept no more connections; open ones continue."""
        self._listener.stop_accepting()

    async def stop(self, grace_s: float) -> None:
        """Stop listening, and close open connections after `grace_s`."""
        await self._listener.stop(grace_s)
