"""The HTTP port of the Open Inference Protocol: where it listens, and how it stops.

Whoever imports this file late pays for uvicorn and starlette only where there is such a port.

Runs on: gateway loop.
"""

from __future__ import annotations

from iskander.auth.grants import Authenticator
from iskander.config.schema import HttpConfig
from iskander.errors import ConfigError
from iskander.protocols.oip.http.app import OipHttp
from iskander.protocols.oip.http.body import BodyQuota
from iskander.protocols.oip.http.infer import HttpInference
from iskander.protocols.oip.service import OipService
from iskander.protocols.submit import RequestSubmitter
from iskander.repository.models import Models
from iskander.transport.connection_limits import ConnectionLimits
from iskander.transport.http1.listener import Http1Listener
from iskander.transport.sockets import bind, with_port
from iskander.transport.tls import HTTP1, Tls


class OipHttpServer:
    """The port.

    Args:
        models: What is served.
        service: What is told of it.
        desk: Has rows computed.
        access: Knows what a caller may ask.
        tls: Of the server.
        config: Of the port; it has an address.
        limits: Over the connections of all listeners.
    """

    def __init__(
        self,
        models: Models,
        service: OipService,
        desk: RequestSubmitter,
        access: Authenticator,
        tls: Tls,
        config: HttpConfig,
        *,
        limits: ConnectionLimits,
    ) -> None:
        self._address = config.address
        room = BodyQuota(
            config.bodies_bytes,
            limits.budget,
            limits.timeouts.message_s,
            limits.count_ended,
        )
        infer = HttpInference(models, desk, config, room)
        app = OipHttp(models, service, infer, access, room).app()
        self._port = Http1Listener(app, config.connections, limits, tls.context(HTTP1))

    @property
    def unsent(self) -> int:
        """Connections whose clients have not read all of their answers."""
        return self._port.unsent

    async def start(self, *, is_shared: bool = False) -> str:
        """Listen; the address with the port that was taken.

        Args:
            is_shared: Other processes of this gateway listen there too.

        Raises:
            ConfigError: Nobody can listen there; says why.
        """
        try:
            sockets = await bind(self._address, is_shared=is_shared)
            for bound in sockets:
                await self._port.listen(bound)
        except OSError as error:
            raise ConfigError(
                f"http.address {self._address}: cannot listen there: {error.strerror}"
            ) from None
        return with_port(self._address, sockets[0])

    def close_door(self) -> None:
        """Take no more connections; those that are open go on."""
        self._port.close_door()

    async def stop(self, grace_s: float) -> None:
        """Stop listening, and end what is still open after `grace_s`."""
        await self._port.stop(grace_s)
