"""What a service manager is told: ready, stopping, and a line of status.

One datagram each; nothing happens where no manager asked to be told. Source: sd_notify(3).
"""

from __future__ import annotations

import contextlib
import os
import socket


def notify(**fields: str) -> None:
    """Tell the service manager, such as `notify(READY="1", STATUS="serving")`."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    datagram = "\n".join(f"{key}={value}" for key, value in fields.items())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.settimeout(1.0)
        with contextlib.suppress(OSError):
            channel.sendto(datagram.encode(), address)
