"""Samples of the server's processes from /proc: memory, descriptors, threads."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Any

import psutil

KIB = 1024
NAME_PREFIX = "isk-"
"""Of the server's processes; its clients have paths of the folder in their command lines, too."""
UNJUDGED = ("isk-sandbox",)
"""Processes that start and exit as models are loaded."""


def processes_of(folder: Path) -> list[psutil.Process]:
    """The processes with a path in this folder in their command line.

    A replaced gateway process leaves its workers to init, so they are no children of the server.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(folder) in part for part in process.cmdline()):
                found.append(process)
    return found


def sample_processes(folder: Path) -> list[dict[str, Any]]:
    """One record for each process of a server; those that exit meanwhile are left out."""
    found = []
    for process in processes_of(folder):
        try:
            found.append(_sample(process))
        except (psutil.NoSuchProcess, OSError):
            continue
    return [each for each in found if each["name"].startswith(NAME_PREFIX)]


def _sample(process: psutil.Process) -> dict[str, Any]:
    folder = Path(f"/proc/{process.pid}")
    rollup = dict(re.findall(r"^(\w+):\s+(\d+) kB", (folder / "smaps_rollup").read_text(), re.M))
    targets = []
    for entry in (folder / "fd").iterdir():
        try:
            targets.append(os.readlink(entry))
        except FileNotFoundError:  # Closed since the listing.
            continue
    return {
        "name": (folder / "comm").read_text().strip(),
        "pid": process.pid,
        "started_s": process.create_time(),
        "age_s": round(time.time() - process.create_time(), 1),
        "pss_bytes": KIB * int(rollup["Pss"]),
        "private_bytes": KIB * int(rollup["Pss_Anon"]),
        "shared_bytes": KIB * int(rollup["Pss_Shmem"]),
        "descriptors": len(targets),
        "sockets": sum(target.startswith("socket:") for target in targets),
        "memfds": sum(target.startswith("/memfd:") for target in targets),
        "threads": process.num_threads(),
    }
