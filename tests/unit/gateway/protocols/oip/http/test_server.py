"""New limits of the HTTP port."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from iskander.config.schema import Config, HttpConfig, LimitsConfig, TimeoutsConfig
from iskander.errors import Overloaded
from iskander.gateway.protocols.oip.http.body import ReceivedBody
from iskander.gateway.protocols.oip.http.server import OipHttpServer
from iskander.gateway.transport.limits.connection_limits import ConnectionLimits


def test_new_limits_apply_to_bodies_and_connections() -> None:
    async def run() -> None:
        limits = ConnectionLimits(Config())
        services: Any = SimpleNamespace(
            models=None,
            submitter=SimpleNamespace(limits=LimitsConfig()),
            authenticator=None,
            tls=SimpleNamespace(context=lambda protocol: None),
            connection_limits=limits,
        )
        service: Any = SimpleNamespace()
        config = Config(http=HttpConfig(bodies_bytes=100, connections=3))
        server = OipHttpServer(services, service, config)
        with ReceivedBody(server._quota) as received:
            received.grow(100)
            for bodies_bytes in (101, 102):
                changed = HttpConfig(bodies_bytes=bodies_bytes, connections=bodies_bytes)
                server.configure(Config(http=changed, timeouts=TimeoutsConfig(message_s=7.0)))
                received.grow(1)
                with pytest.raises(Overloaded, match=rf"limit {bodies_bytes} "):
                    received.grow(1)
        assert server._quota.message_s == 7.0
        assert server._listener.connections_max == 102
        limits.stop()

    asyncio.run(run())
