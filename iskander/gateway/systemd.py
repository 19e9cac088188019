"""Service manager notifications: readiness, status, watchdog heartbeat.

Each is one datagram, sent without blocking. If the manager's socket buffer is full, it is sent
again later, in order. Without a manager, nothing is sent.

Runs on: the parent's or the gateway's loop. Source: sd_notify(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket

from iskander.foundation.clock import NS_PER_US, now_ns

RESEND_S = 0.25
HEARTBEATS = 3
"""Heartbeats in a watchdog period: one that a busy loop sends late is still in time."""
_US_PER_S = 1_000_000


class _Channel:
    """Queue of notifications that are not sent yet, and the last value of each field."""

    def __init__(self) -> None:
        self.last: dict[str, str] = {}
        self._unsent: list[dict[str, str]] = []
        self._timer: asyncio.TimerHandle | None = None

    def send(self, fields: dict[str, str]) -> None:
        # Replaces the same fields at the end of the queue.
        self.last |= fields
        if self._unsent and self._unsent[-1].keys() == fields.keys():
            self._unsent.pop()
        self._unsent.append(fields)
        if self._timer is None:
            self._flush()

    def _flush(self) -> None:
        self._timer = None
        while self._unsent:
            if not _send_datagram(self._unsent[0]):
                self._timer = asyncio.get_running_loop().call_later(RESEND_S, self._flush)
                return
            del self._unsent[0]


_channel = _Channel()


def notify(**fields: str) -> None:
    """Notify the service manager, such as `notify(READY="1", STATUS="serving")`."""
    _channel.send(fields)


def notify_changes(**fields: str) -> None:
    """Notify the service manager if a field differs from its last value."""
    if fields.items() - _channel.last.items():
        _channel.send(fields)


def notify_reloading() -> None:
    """Announce a reload, which `notify(READY="1")` ends."""
    notify(RELOADING="1", MONOTONIC_USEC=str(now_ns() // NS_PER_US))


def keep_alive() -> None:
    """Send watchdog heartbeats from the running loop if the manager expects them."""
    pid = str(os.getpid())
    if os.environ.get("WATCHDOG_PID", pid) != pid:
        return
    with contextlib.suppress(ValueError):
        period_us = int(os.environ.get("WATCHDOG_USEC", "0"))
        if period_us > 0:
            _send_datagram({"WATCHDOG": "1"})
            asyncio.get_running_loop().call_later(period_us / HEARTBEATS / _US_PER_S, keep_alive)


def _send_datagram(fields: dict[str, str]) -> bool:
    """Send a datagram; return False if the socket buffer is full."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return True
    if address.startswith("@"):
        address = "\0" + address[1:]
    lines = (f"{key}={' '.join(value.splitlines())}" for key, value in fields.items())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        try:
            channel.sendto("\n".join(lines).encode(), socket.MSG_DONTWAIT, address)
        except OSError as error:
            return error.errno not in (errno.EAGAIN, errno.ENOBUFS)
    return True
