"""Reserved ports: other processes cannot bind them, even if no gateway process listens."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from iskander.config.schema import Config, HttpConfig, InferentialConfig, ServerConfig
from iskander.errors import ConfigError
from iskander.gateway.transport.sockets import ReservedPorts, bind

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


def test_configuration_contains_the_reserved_ports(ports: ReservedPorts) -> None:
    asyncio.run(ports.hold(CONFIG))
    reserved = ports.with_reserved_ports(CONFIG)
    addresses = [*reserved.server.address, reserved.http.address]
    assert list(reserved.server.address) == ports.addresses
    assert len(set(addresses)) == 3 and ANY not in addresses
    assert ports.with_reserved_ports(CONFIG) == reserved


def test_reserved_port_cannot_be_bound_while_no_process_listens(ports: ReservedPorts) -> None:
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
def test_port_in_use_is_reported_with_its_setting(
    ports: ReservedPorts, setting: str, *, is_shared: bool
) -> None:
    """A shared port may belong to another gateway with several processes."""
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


def test_port_is_free_after_close(ports: ReservedPorts) -> None:
    asyncio.run(ports.hold(CONFIG))
    ports.close()
    listen(ports.addresses[0], is_shared=False).close()
