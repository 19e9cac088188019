"""Backing of a segment: requested and actual huge pages, locking and NUMA node.

A missing huge page, lock or node never prevents a start: it costs speed and is reported.

Runs on: gateway, which makes all segments. Source: Documentation/admin-guide/mm/hugetlbpage.rst and
transhuge.rst, mlock(2), proc(5), numa(7).
"""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Final, NamedTuple

HUGE_PAGE_BYTES = 2 << 20
"""Size of the huge pages in use; pages of 1 GiB would waste most of an arena."""
MIB = 1 << 20


class BackingOptions(NamedTuple):
    """Backing that is requested for a segment.

    Attributes:
        node: Preferred NUMA node; None for the kernel's choice.
        is_huge: Whether to use huge pages, reserved or transparent.
        is_locked: Whether to prevent swapping.
    """

    node: int | None = None
    is_huge: bool = False
    is_locked: bool = False


ANY_MEMORY: Final = BackingOptions()


class Backing(NamedTuple):
    """Backing that a segment has got.

    Attributes:
        is_locked: Whether the segment is never swapped out.
        node: Preferred NUMA node; None if there is no policy.
        notices: Requested properties that the segment does not have, and why.
    """

    length_bytes: int
    huge_bytes: int = 0
    is_locked: bool = False
    node: int | None = None
    notices: tuple[str, ...] = ()

    @property
    def locked_bytes(self) -> int:
        """Bytes that are never swapped out."""
        return self.length_bytes if self.is_locked else 0

    def __str__(self) -> str:
        """Return text for a log line: `256 MiB, 256 in huge pages, locked, node 1 preferred`."""
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
    """Return the number of free reserved huge pages.

    0 also without kernel support for this size.
    """
    folder = sysfs / f"kernel/mm/hugepages/hugepages-{HUGE_PAGE_BYTES >> 10}kB"
    try:
        # The first file also counts pages reserved by a mapping and not touched yet.
        free, reserved = (
            int((folder / name).read_text()) for name in ("free_hugepages", "resv_hugepages")
        )
    except (OSError, ValueError):
        return 0
    return free - reserved


def transparent_setting(sysfs: Path = Path("/sys")) -> str:
    """Return the kernel's setting for transparent huge pages of shared memory: `never`, ..."""
    try:
        text = (sysfs / "kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return "not there"
    return text.partition("[")[2].partition("]")[0]


def lock_limit_bytes() -> int | None:
    """Return the bytes that this process may lock without CAP_IPC_LOCK; None: unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def huge_pages_needed(length_bytes: int) -> int:
    """Return the number of huge pages for a length."""
    return -(-length_bytes // HUGE_PAGE_BYTES)


def mapped_huge_bytes(address: int) -> int:
    """Return the bytes in transparent huge pages of the shared mapping at an address."""
    try:
        text = Path("/proc/self/smaps").read_text()
    except OSError:
        return 0
    _, _, after = text.partition(f"\n{address:08x}-")
    _, _, size = after.partition("\nShmemPmdMapped:")
    return int(size.split(maxsplit=1)[0]) << 10 if size else 0


def mapped_node_bytes(address: int) -> dict[int, int]:
    """Return the bytes on each NUMA node of the mapping at an address; empty if not reported."""
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


def node_notice(node: int, node_bytes: dict[int, int]) -> str:
    """Return a notice about pages on other nodes than the preferred node.

    Empty if there are none.
    """
    others = {other: length for other, length in sorted(node_bytes.items()) if other != node}
    if not others:
        return ""
    parts = ", ".join(f"{length / MIB:g} MiB of node {other}" for other, length in others.items())
    return f"not enough memory of this kind on node {node}: {parts} was used"


def huge_pages_notice(length_bytes: int, huge_bytes: int, error: OSError) -> str:
    """Return the notice about missing reserved huge pages."""
    # EFAULT: access would raise SIGBUS, which populating reports instead, madvise(2).
    why = "their cgroup allows fewer" if error.errno == errno.EFAULT else error.strerror
    return (
        f"no reserved huge pages, {why}: {huge_pages_needed(length_bytes)} needed, "
        f"{huge_pages_free()} free (vm.nr_hugepages); {huge_bytes / MIB:g} MiB in transparent "
        f"ones (shmem_enabled is {transparent_setting()})"
    )


def lock_notice(length_bytes: int, error: int) -> str:
    """Return the notice about a segment that can be swapped out."""
    limit = lock_limit_bytes()
    may = "any amount" if limit is None else f"{limit / MIB:g} MiB"
    return (
        f"not locked, {os.strerror(error)}: {length_bytes / MIB:g} MiB more requested, "
        f"this process may lock {may} in all (LimitMEMLOCK=, ulimit -l)"
    )
