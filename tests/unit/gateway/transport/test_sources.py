"""Sources of connections."""

from __future__ import annotations

import socket

import pytest

from iskander.gateway.transport.sources import source_of


@pytest.mark.parametrize(
    ("family", "address", "source"),
    [
        (socket.AF_UNIX, "", "unix"),
        (socket.AF_INET, ("10.1.2.3", 5), "10.1.2.3"),
        (socket.AF_INET6, ("2001:db8:1:2:3:4:5:6", 5, 0, 0), "2001:db8:1:2::"),
        (socket.AF_INET6, ("2001:db8:1:2::9", 5, 0, 0), "2001:db8:1:2::"),
        (socket.AF_INET6, ("::ffff:10.1.2.3", 5, 0, 0), "10.1.2.3"),
        (socket.AF_INET6, ("fe80::1%eth0", 5, 0, 2), "fe80::"),
    ],
)
def test_source_of_an_address(family: int, address: object, source: str) -> None:
    assert source_of(family, address) == source
