"""What a service manager is told: ready, stopping, a line of status, and that the loop turns.

One datagram each, which is never waited for: one that the manager's socket has no room for is sent
again later, in order. Nothing happens where no manager asked to be told.

Runs on: the parent's or the gateway's loop. Source: sd_notify(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket

from iskander.clock import NS_PER_US, now_ns

AGAIN_S = 0.25
"""After which a datagram that was not taken is sent again."""
_US_PER_S = 1_000_000


class _Channel:
    """The way to the manager, and what it has not taken yet."""

    def __init__(self) -> None:
        self._unsent: list[dict[str, str]] = []
        self._told: dict[str, str] = {}
        self._timer: asyncio.TimerHandle | None = None

    def tell(self, fields: dict[str, str]) -> None:
        """Send fields, behind those that wait; what is newer takes the place of the same."""
        self._told |= fields
        if self._unsent and self._unsent[-1].keys() == fields.keys():
            self._unsent.pop()
        self._unsent.append(fields)
        if self._timer is None:
            self._send()

    def tell_changes(self, fields: dict[str, str]) -> None:
        """Send fields, where one is not as it was said last."""
        if fields.items() - self._told.items():
            self.tell(fields)

    def _send(self) -> None:
        self._timer = None
        while self._unsent:
            if not _is_taken(self._unsent[0]):
                self._timer = asyncio.get_running_loop().call_later(AGAIN_S, self._send)
                return
            del self._unsent[0]


_channel = _Channel()


def notify(**fields: str) -> None:
    """Tell the service manager, such as `notify(READY="1", STATUS="serving")`."""
    _channel.tell(fields)


def notify_changes(**fields: str) -> None:
    """As `notify`, where it was not told so last."""
    _channel.tell_changes(fields)


def notify_reloading() -> None:
    """Tell it that settings are read anew; `notify(READY="1")` is the end of that."""
    notify(RELOADING="1", MONOTONIC_USEC=str(now_ns() // NS_PER_US))


def keep_alive() -> None:
    """Say from now on that the running loop turns, where the manager watches for that."""
    every_s = _watchdog_s() / 2
    if every_s:
        _is_taken({"WATCHDOG": "1"})
        asyncio.get_running_loop().call_later(every_s, keep_alive)


def _watchdog_s() -> float:
    """How long this process may be silent; 0 where nobody minds."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    with contextlib.suppress(ValueError):
        return max(int(os.environ.get("WATCHDOG_USEC", "0")), 0) / _US_PER_S
    return 0.0


def _is_taken(fields: dict[str, str]) -> bool:
    """Send a datagram; False where there is no room for it now."""
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
