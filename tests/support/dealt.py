"""Connections to one of several gateway processes: the kernel deals them, so many are asked for."""

from __future__ import annotations

import contextlib
from typing import Any

from pyarrow import flight

from iskander.client import Client
from iskander.errors import IskanderError
from support.processes import Gateway

CONNECTIONS = 200
"""Enough to be dealt to each of four processes, but for one time in 10**24."""


def by_process(gateway: Gateway, count: int) -> dict[int, dict[str, Any]]:
    """What each process says of itself, each asked over connections of its own."""
    found: dict[int, dict[str, Any]] = {}
    for _ in range(CONNECTIONS):
        if len(found) == count:
            break
        with contextlib.suppress(flight.FlightUnavailableError, IskanderError):
            stats = gateway.stats()
            found[stats["process"]] = stats
    assert sorted(found) == list(range(count))
    return found


def client_of(gateway: Gateway, number: int) -> Client:
    """A client whose connection is that process's."""
    for _ in range(CONNECTIONS):
        client = gateway.client()
        if client.stats()["process"] == number:
            return client
        client.close()
    raise AssertionError(f"no connection was dealt to process {number}")
