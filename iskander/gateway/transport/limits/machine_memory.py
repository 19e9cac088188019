"""Memory of the machine or cgroup, its share for received bytes, and the count of OOM kills.

Source: sysconf(3) (_SC_PHYS_PAGES); cgroup v2 (memory.max).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from iskander.config.schema import Config

RECEIVE_SHARE: Final = 8
"""Default of `limits.receive_bytes`: memory / 8."""
CGROUPS: Final = Path("/sys/fs/cgroup")
VMSTAT: Final = Path("/proc/vmstat")


def receive_bytes(config: Config, message_bytes: int) -> int:
    """Return the share of one gateway process in `limits.receive_bytes`, at least two messages."""
    total = config.limits.receive_bytes or memory_bytes() // RECEIVE_SHARE
    return max(total // config.server.processes, 2 * message_bytes)


def oom_kills(counters: Path = VMSTAT) -> int:
    """Return the OOM kills on this machine since boot. Source: proc(5), `/proc/vmstat`."""
    with contextlib.suppress(OSError, ValueError):
        for line in counters.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def memory_bytes(cgroups: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the memory of the machine, or the lowest cgroup limit of this process if less."""
    least = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        group = own.read_text().strip().rpartition("::")[2].lstrip("/")
    except OSError:
        return least
    folder = cgroups / group
    while folder.is_relative_to(cgroups):
        with contextlib.suppress(OSError, ValueError):  # No file, or `max`: no limit.
            least = min(least, int((folder / "memory.max").read_text()))
        folder = folder.parent
    return least
