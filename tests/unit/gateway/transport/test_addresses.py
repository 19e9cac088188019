"""Addresses in the configuration."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.gateway.transport.addresses import is_host_port, require_addresses, zmq_address


@pytest.mark.parametrize(
    "address", ["127.0.0.1:0", "localhost:65535", "[::1]:80", "[fe80::1%eth0]:80", "a-b_c.d:1"]
)
def test_valid_address(address: str) -> None:
    assert is_host_port(address)


INVALID = ["", "host", ":1", "host:", "host:65536", "host:123456", "h:1\n", "h:\u0663", "::1:80"]
INVALID += ["[]:1", "[::1]", "[host]:1", "[1.2.3.4]:1", "[::1%a/b]:1", "[::1]]:1", "u@h:1", "h:1/x"]


@pytest.mark.parametrize("address", INVALID)
def test_invalid_address(address: str) -> None:
    assert not is_host_port(address)


@pytest.mark.parametrize(
    ("address", "converted"),
    [
        ("tcp://*:5555", "0.0.0.0:5555"),
        ("tcp://[::1]:5555", "[::1]:5555"),
        ("tcp://[h]:5555", None),
        ("ipc:///run/x", Path("/run/x")),
        ("ipc://", None),
        ("udp://h:1", None),
    ],
)
def test_zmq_address(address: str, converted: str | Path | None) -> None:
    assert zmq_address(address) == converted


@pytest.mark.parametrize(
    ("address", "processes", "expected"),
    [
        ("udp://127.0.0.1:1", 1, "events.address"),
        ("tcp://127.0.0.1", 1, "expected tcp://HOST:PORT or ipc://PATH"),
        ("tcp://127.0.0.1:50051", 1, "port already used by this server"),
        ("tcp://127.0.0.1:0", 2, "port 0 not allowed with server.processes > 1"),
        ("ipc://relative", 1, "expected an absolute path in an existing folder"),
        ("tcp://0.0.0.0:50054", 1, "is open to the network without TLS and tokens"),
    ],
)
def test_invalid_address_of_the_event_stream(address: str, processes: int, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        require_addresses(config_of(address, processes))


@pytest.mark.parametrize(
    ("address", "processes"),
    [("", 1), ("tcp://127.0.0.1:0", 1), ("tcp://[::1]:50054", 2), ("ipc:///tmp/e", 2)],
)
def test_valid_address_of_the_event_stream(address: str, processes: int) -> None:
    require_addresses(config_of(address, processes))


def config_of(address: str, processes: int) -> Config:
    sections = {"events": {"address": address}, "server": {"processes": processes}}
    return msgspec.convert(sections, Config)
