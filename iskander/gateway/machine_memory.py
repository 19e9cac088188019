"""The memory of the machine or the cgroup, and the share of it for received bytes.

Source: cgroup v2 (memory.max).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

import psutil

from iskander.config import Config

RECEIVE_SHARE: Final = 8
"""One part in so many of the memory is for received bytes, where no setting says."""
CGROUPS: Final = Path("/sys/fs/cgroup")


def receive_bytes(config: Config) -> int:
    """`limits.receive_bytes` of one of the gateway's processes, at least of two messages."""
    limits, processes = config.limits, config.server.processes
    total = limits.receive_bytes or memory_bytes() // RECEIVE_SHARE
    return max(total // processes, 2 * limits.message_bytes)


def memory_bytes(cgroups: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """The memory of the machine, or the least limit of this process's cgroups below that."""
    least: int = psutil.virtual_memory().total
    try:
        group = own.read_text().strip().rpartition("::")[2].lstrip("/")
    except OSError:
        return least
    folder = cgroups / group
    while folder.is_relative_to(cgroups):
        with contextlib.suppress(OSError, ValueError):  # No file, or `max`: there is no limit.
            least = min(least, int((folder / "memory.max").read_text()))
        folder = folder.parent
    return least
