"""What a segment's memory is to be, what it came to be, and why it is less than was asked for.

Nobody is refused a start for want of huge pages, a lock or a node: it is slower, and said.

Runs on: gateway, which makes all segments.

Source: Documentation/admin-guide/mm/hugetlbpage.rst and transhuge.rst, mlock(2), proc(5), numa(7).
"""

from __future__ import annotations

import errno
import logging
import os
import resource
from pathlib import Path
from typing import Final, NamedTuple

HUGE_PAGE_BYTES = 2 << 20
"""Of the pool that is asked; 1 GiB pages would waste most of an arena."""
MIB = 1 << 20


class BackingOptions(NamedTuple):
    """What is asked for.

    Attributes:
        node: NUMA node to take the pages from; None for the kernel's choice.
        is_huge: In huge pages: reserved ones, or those that the system puts together.
        is_locked: Never swapped out.
    """

    node: int | None = None
    is_huge: bool = False
    is_locked: bool = False


ANY_MEMORY: Final = BackingOptions()


class Backing(NamedTuple):
    """What was had.

    Attributes:
        length_bytes: Of the segment.
        huge_bytes: How much of it lies in huge pages.
        is_locked: Whether it stays in memory.
        node: Whose memory is preferred; None for no policy. What it had not is in the complaints.
        complaints: What was asked for and is not so, and why.
    """

    length_bytes: int
    huge_bytes: int = 0
    is_locked: bool = False
    node: int | None = None
    complaints: tuple[str, ...] = ()

    @property
    def locked_bytes(self) -> int:
        """How much of it stays in memory."""
        return self.length_bytes if self.is_locked else 0

    def __str__(self) -> str:
        """For a log line: `256 MiB, 256 in huge pages, locked, node 1 preferred`."""
        parts = [f"{self.length_bytes / MIB:g} MiB"]
        if self.huge_bytes:
            parts.append(f"{self.huge_bytes / MIB:g} in huge pages")
        if self.is_locked:
            parts.append("locked")
        if self.node is not None:
            parts.append(f"node {self.node} preferred")
        return ", ".join(parts)


NO_MEMORY = Backing(0)


def huge_pages_free(sysfs: Path = Path("/sys")) -> int:
    """Reserved huge pages that nobody has; 0 too where the kernel has none of that size."""
    folder = sysfs / f"kernel/mm/hugepages/hugepages-{HUGE_PAGE_BYTES >> 10}kB"
    try:
        # What is promised to a mapping and not touched yet counts as free in the first file.
        free, promised = (
            int((folder / name).read_text()) for name in ("free_hugepages", "resv_hugepages")
        )
    except (OSError, ValueError):
        return 0
    return free - promised


def transparent_rule(sysfs: Path = Path("/sys")) -> str:
    """When the system puts huge pages together for shared memory: `never`, `advise`, ..."""
    try:
        text = (sysfs / "kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return "not there"
    return text.partition("[")[2].partition("]")[0]


def lock_limit_bytes() -> int | None:
    """How much this process may lock, unless it has CAP_IPC_LOCK; None for all."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def pages_huge(length_bytes: int) -> int:
    """Huge pages that so many bytes take."""
    return -(-length_bytes // HUGE_PAGE_BYTES)


def mapped_huge_bytes(address: int) -> int:
    """How much of the shared mapping at an address lies in transparent huge pages."""
    try:
        text = Path("/proc/self/smaps").read_text()
    except OSError:
        return 0
    _, _, after = text.partition(f"\n{address:08x}-")
    _, _, size = after.partition("\nShmemPmdMapped:")
    return int(size.split(maxsplit=1)[0]) << 10 if size else 0


def mapped_node_bytes(address: int) -> dict[int, int]:
    """How much of the mapping at an address lies on each NUMA node; nothing where none is told."""
    try:
        text = "\n" + Path("/proc/self/numa_maps").read_text()
    except OSError:
        return {}
    line = text.partition(f"\n{address:08x} ")[2].partition("\n")[0]
    fields = dict(field.split("=", 1) for field in line.split() if "=" in field)
    page_bytes = int(fields.get("kernelpagesize_kB", 0)) << 10
    return {
        int(name[1:]): int(pages) * page_bytes
        for name, pages in fields.items()
        if name[0] == "N" and name[1:].isdecimal()
    }


def not_of_node(node: int, node_bytes: dict[int, int]) -> str:
    """What lies elsewhere, since the node had no more; empty where nothing does."""
    others = {other: length for other, length in sorted(node_bytes.items()) if other != node}
    if not others:
        return ""
    parts = ", ".join(f"{length / MIB:g} MiB of node {other}" for other, length in others.items())
    return f"node {node} had not enough memory of this kind: {parts} was taken"


def not_huge(length_bytes: int, huge_bytes: int, error: OSError) -> str:
    """Why a segment has no reserved huge pages, and how far the system's own ones go."""
    # Whatever touches them would be ended by SIGBUS; populating says so instead, madvise(2).
    why = "their cgroup allows fewer" if error.errno == errno.EFAULT else error.strerror
    return (
        f"no reserved huge pages, {why}: {pages_huge(length_bytes)} were needed and "
        f"{huge_pages_free()} are free (vm.nr_hugepages); {huge_bytes / MIB:g} MiB in transparent "
        f"ones (shmem_enabled is {transparent_rule()})"
    )


def not_locked(length_bytes: int, error: int) -> str:
    """Why a segment can be swapped out."""
    limit = lock_limit_bytes()
    may = "any amount" if limit is None else f"{limit / MIB:g} MiB"
    return (
        f"not locked, {os.strerror(error)}: {length_bytes / MIB:g} MiB more were asked for, and "
        f"this process may lock {may} in all (LimitMEMLOCK=, ulimit -l)"
    )


def log_backing(log: logging.Logger, name: str, backing: Backing) -> None:
    """Say what memory an arena is, and what was refused."""
    log.info("%s: %s", name, backing)
    for complaint in backing.complaints:
        log.warning("%s: %s", name, complaint)
