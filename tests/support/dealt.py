"""Connections to one of several gateway processes, by repeated connection attempts."""

from __future__ import annotations

import contextlib
from typing import Any

from iskander.client import Client
from iskander.errors import IskanderError
from support.processes import Gateway

CONNECTIONS = 200
"""The kernel distributes them over four processes; one is missed in one case of 10**24."""


def by_process(gateway: Gateway, count: int) -> dict[int, dict[str, Any]]:
    """The stats of each process, each over its own connection."""
    found: dict[int, dict[str, Any]] = {}
    for _ in range(CONNECTIONS):
        if len(found) == count:
            break
        with contextlib.suppress(IskanderError):
            stats = gateway.stats()
            found[stats["process"]] = stats
    assert sorted(found) == list(range(count))
    return found


def client_of(gateway: Gateway, number: int) -> Client:
    """A client connected to a given process."""
    for _ in range(CONNECTIONS):
        client = gateway.client()
        if client.stats()["process"] == number:
            return client
        client.close()
    raise AssertionError(f"no connection was dealt to process {number}")
