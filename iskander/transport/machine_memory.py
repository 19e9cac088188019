"""The memory of the machine or the cgroup, the share of it for received bytes, and OOM kills.

Source: cgroup v2 (memory.max).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

import psutil

from iskander.config.schema import Config

RECEIVE_SHARE: Final = 8
"""One part in so many of the memory is for received bytes, where no setting says."""
CGROUPS: Final = Path("/sys/fs/cgroup")
VMSTAT: Final = Path("/proc/vmstat")


def receive_bytes(config: Config) -> int:
    """`limits.receive_bytes` of one of the gateway's processes, at least of two messages."""
    limits, processes = config.limits, config.server.processes
    total = limits.receive_bytes or memory_bytes() // RECEIVE_SHARE
    return max(total // processes, 2 * limits.message_bytes)


def oom_kills(counters: Path = VMSTAT) -> int:
    """Processes that the kernel ended for want of memory, on this machine since it started.

    Source: proc(5), `/proc/vmstat`.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in counters.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


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
