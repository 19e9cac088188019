"""Memory of the machine or of the control group of this process, and the count of OOM kills.

Source: sysconf(3) (_SC_PHYS_PAGES); proc(5); cgroup v2 (memory.max, memory.current).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
MEMINFO: Final = Path("/proc/meminfo")
OWN: Final = Path("/proc/self/cgroup")
VMSTAT: Final = Path("/proc/vmstat")


def memory_bytes(cgroups: Path = CGROUPS, own: Path = OWN) -> int:
    """Return the memory of the machine, or the lowest limit of the groups if it is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in _limits(cgroups, own))])


def available_bytes(cgroups: Path = CGROUPS, own: Path = OWN, meminfo: Path = MEMINFO) -> int:
    """Return the free memory of the machine, or the least of the groups if it is less."""
    machine = _counter(meminfo, "MemAvailable:") * 1024 or memory_bytes(cgroups, own)
    return min([machine, *(max(limit - used, 0) for limit, used in _limits(cgroups, own))])


def oom_kills(counters: Path = VMSTAT) -> int:
    """Return the OOM kills on this machine since boot; 0 if the kernel does not count them."""
    return _counter(counters, "oom_kill")


def _limits(cgroups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of each group with a limit: that of this process, and its parents."""
    try:
        folder = cgroups / own.read_text().strip().rpartition("::")[2].lstrip("/")
    except OSError:
        return
    while folder.is_relative_to(cgroups):
        with contextlib.suppress(OSError, ValueError):  # No file, or `max`: no limit.
            limit = int((folder / "memory.max").read_text())
            yield limit, int((folder / "memory.current").read_text())
        folder = folder.parent


def _counter(file: Path, name: str) -> int:
    """Return the number behind a name in a file of counters; 0 if there is none."""
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            words = line.split()
            if len(words) > 1 and words[0] == name:
                return int(words[1])
    return 0
