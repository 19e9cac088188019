"""Addresses in configurations, commands and manifests, with `urllib` and `ipaddress` as references.

An input is a text. The port of an accepted address is a number up to 65,535, and its host is one
that `urllib` finds too.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

import msgspec

from fuzz import mutation
from iskander.client.calls.targets import _is_name, _require_addresses
from iskander.contract.backend_manifest import Address
from iskander.errors import ConfigError
from iskander.gateway.auth.grants import bearer_token
from iskander.gateway.supervision.placement.topology import parse_cpu_list, render_cpu_list
from iskander.gateway.transport.addresses import is_host_port, unix_path, zmq_address

ITERATIONS = 3000
WORDS = [
    "[::1]", "[", "]", ":", "::", "0", "65535", "65536", "99999", "00080", "unix:", "tcp://", "/",
    "ipc://", "*", "%eth0", "@", " ", "\n", "\0", "٣", "é", "-", ".", "localhost", "fe80::1", "#",
    "?", ",", "0-3", "Basic ", "Bearer ", "YTpi", "=",
]  # fmt: skip


def seeds() -> list[bytes]:
    return [
        each.encode()
        for each in (
            "127.0.0.1:50051", "[::1]:80", "localhost:0", "unix:/run/x.sock", "tcp://*:5555",
            "ipc:///tmp/x", "host:00080", "a.b-c_d:1", "0-3,7", "Basic dXNlcjppc2tfeA==",
            "Bearer isk_x", "[fe80::1%eth0]:9",
        )
    ]  # fmt: skip


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    if not random.randrange(3):
        return mutation.flip(raw, other, random)
    text = raw.decode(errors="replace")
    at = random.randrange(len(text) + 1)
    end = min(at + random.choice((0, 0, 1, 2, 5)), len(text))
    return (text[:at] + random.choice(WORDS) + text[end:]).encode(errors="replace")


def run(raw: bytes) -> None:
    text = raw.decode(errors="replace")
    check_server(text)
    check_client(text)
    check_manifest(text)
    check_cpus(text)
    token = bearer_token(text)
    assert token == token.strip() or text.lower().startswith("basic")


def check_server(text: str) -> None:
    if is_host_port(text):
        check_host_port(text)
    address = zmq_address(text)
    if isinstance(address, Path):
        assert text.startswith("ipc://")
    elif address is not None:
        check_host_port(address)
    path = unix_path(text)
    assert (path is not None) == text.startswith("unix:")


def check_client(text: str) -> None:
    try:
        _require_addresses(text, None)
    except ConfigError:
        return
    if not text.startswith("unix:"):
        assert 0 < int(text.rpartition(":")[2]) <= 65_535
        assert _is_name(text) == (not is_ip_address(text.rpartition(":")[0].strip("[]")))


def check_manifest(text: str) -> None:
    try:
        msgspec.convert(text, Address)
    except msgspec.ValidationError:
        return
    if not text.startswith("unix:"):
        assert text.rpartition(":")[2].isdigit()


def check_host_port(text: str) -> None:
    """Checks host and port of an accepted address."""
    split = urlsplit(f"//{text}")
    assert split.port is not None and split.port == int(text.rpartition(":")[2])
    assert split.hostname and not split.path and not split.query and split.username is None
    if text.startswith("["):
        ipaddress.IPv6Address(split.hostname)


def is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_cpus(text: str) -> None:
    try:
        cpus = parse_cpu_list(text)
    except ValueError:
        return
    assert list(cpus) == sorted(set(cpus))
    assert parse_cpu_list(render_cpu_list(cpus)) == cpus
