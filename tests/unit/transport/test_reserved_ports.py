"""Ports that are held: they stay the gateway's own, whether or not one of its processes listens."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from iskander.config.schema import Config, HttpConfig, InferentialConfig, ServerConfig
from iskander.errors import ConfigError
from iskander.transport.sockets import ReservedPorts, bind

ANY = "127.0.0.1:0"
CONFIG = Config(server=ServerConfig(address=(ANY, ANY)), http=HttpConfig(address=ANY))


@pytest.fixture
def ports() -> Iterator[ReservedPorts]:
    ports = ReservedPorts()
    yield ports
    ports.close()


def listen(address: str, *, is_shared: bool) -> socket.socket:
    (bound,) = asyncio.run(bind(address, is_shared=is_shared))
    try:
        bound.listen()
    except OSError:
        bound.close()
        raise
    return bound


def test_settings_name_the_ports_that_were_taken(ports: ReservedPorts) -> None:
    asyncio.run(ports.hold(CONFIG))
    taken = ports.with_reserved_ports(CONFIG)
    found = [*taken.server.address, taken.http.address]
    assert list(taken.server.address) == ports.addresses
    assert len(set(found)) == 3 and ANY not in found
    assert ports.with_reserved_ports(CONFIG) == taken


def test_nobody_else_gets_a_held_port_while_no_process_listens(ports: ReservedPorts) -> None:
    asyncio.run(ports.hold(CONFIG))
    for address in (*ports.addresses, ports.with_reserved_ports(CONFIG).http.address):
        with pytest.raises(OSError, match="in use"):
            listen(address, is_shared=False)
        processes = [listen(address, is_shared=True) for _ in range(2)]
        for process in processes:
            process.close()
        with pytest.raises(OSError, match="in use"):
            listen(address, is_shared=False)


@pytest.mark.parametrize("setting", ["server.address", "http.address", "inferential.address"])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_port_where_somebody_listens_is_refused_by_its_setting(
    ports: ReservedPorts, setting: str, *, is_shared: bool
) -> None:
    """Also where another gateway of several processes does."""
    with listen(ANY, is_shared=is_shared) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        config = {
            "server.address": Config(server=ServerConfig(address=(address,))),
            "http.address": Config(http=HttpConfig(address=address), server=CONFIG.server),
            "inferential.address": Config(
                inferential=InferentialConfig(address=f"tcp://{address}"), server=CONFIG.server
            ),
        }[setting]
        with pytest.raises(ConfigError, match=f"{setting} {address}: cannot listen: "):
            asyncio.run(ports.hold(config))


def test_a_port_is_free_when_it_is_let_go(ports: ReservedPorts) -> None:
    asyncio.run(ports.hold(CONFIG))
    ports.close()
    listen(ports.addresses[0], is_shared=False).close()
