"""Addresses in the configuration."""

from __future__ import annotations

import importlib.util
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


def test_tls_of_the_admin_port_needs_a_certificate() -> None:
    sections: dict[str, object] = {"admin": {"tls": True}}
    with pytest.raises(ConfigError, match=r"admin\.tls needs tls\.certificate"):
        require_addresses(msgspec.convert(sections, Config))
    sections["tls"] = {"certificate": "server.pem"}
    require_addresses(msgspec.convert(sections, Config))


def test_events_need_the_admin_port(monkeypatch: pytest.MonkeyPatch) -> None:
    sections = {"events": {"enabled": True}, "admin": {"address": ""}}
    with pytest.raises(ConfigError, match=r"at admin\.address, which is empty"):
        require_addresses(msgspec.convert(sections, Config))
    del sections["admin"]
    require_addresses(msgspec.convert(sections, Config))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"admin\.address, h11 is not installed: `pip install"):
        require_addresses(msgspec.convert(sections, Config))
