"""Limits of a process's control groups, version 1 and 2, and the mounted file systems.

The lowest limit of the group and its parents applies. Without a cgroup namespace, a container sees
the path of the host in /proc/PID/cgroup and only its own group in the mount, whose root says so.

Runs on: the operator's tool. Source: cgroups(7), Documentation/admin-guide/cgroup-v2.rst and
cgroup-v1/ of the Linux kernel, proc(5) (mountinfo).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from iskander.cli.doctor.tree import Tree
from iskander.foundation.clock import NS_PER_US

_UNLIMITED = 1 << 62
"""Version 1 has no word for "unlimited"; it is the largest multiple of a page."""


class Mount(NamedTuple):
    """A mounted file system.

    Attributes:
        root: Path in the file system that is mounted.
        options: Options of the file system; for version 1 they name the controllers.
    """

    point: str
    kind: str
    root: str = "/"
    options: tuple[str, ...] = ()


class Cgroup(NamedTuple):
    """Limits of the groups of a process; None: unlimited.

    Attributes:
        path: Path of the group, such as `/system.slice/iskander-gateway.service`.
        cpus: Quota of cpu time, in cpus.
        throttled: Periods in which the quota was used up.
        throttled_us: Time for which threads did not run because of that.
        huge_bytes: Limit of reserved huge pages of 2 MiB.
    """

    version: int = 2
    path: str = ""
    cpus: float | None = None
    throttled: int = 0
    throttled_us: int = 0
    memory_bytes: int | None = None
    tasks: int | None = None
    tasks_used: int = 0
    huge_bytes: int | None = None


class _Controller(NamedTuple):
    """Folder of a process's group for one controller, and its parents."""

    tree: Tree
    folders: tuple[str, ...]

    def least(self, read: Callable[[str], float | None]) -> float | None:
        """Lowest limit of the group and its parents."""
        found = [limit for each in self.folders if (limit := read(each)) is not None]
        return min(found, default=None)

    def limit(self, name: str) -> int | None:
        """Lowest integer limit in the files of this name."""
        found = self.least(lambda folder: self.tree.number(f"{folder}/{name}"))
        return None if found is None or found >= _UNLIMITED else int(found)

    def own(self, name: str) -> str:
        return f"{self.folders[0]}/{name}" if self.folders else name


def read_mounts(tree: Tree) -> tuple[Mount, ...]:
    """The mounted file systems in the order of mounting."""
    mounts = []
    for line in tree.lines("proc/self/mountinfo"):
        first, _, second = line.partition(" - ")
        own, other = first.split(), second.split()
        if len(own) >= 5 and len(other) >= 3:
            mounts.append(
                Mount(_unescape(own[4]), other[0], _unescape(own[3]), tuple(other[2].split(",")))
            )
    return tuple(mounts)


def read_cgroup(tree: Tree, process: str, mounts: tuple[Mount, ...]) -> Cgroup:
    """Read the limits of a process's groups."""
    paths: dict[str, str] = {}
    for line in tree.lines(f"proc/{process}/cgroup"):
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)

    def controller(name: str) -> _Controller:
        return _Controller(tree, tuple(_folders(name if name in paths else "", paths, mounts)))

    memory, cpu, pids = controller("memory"), controller("cpu"), controller("pids")
    huge = controller("hugetlb")
    is_old = "memory" in paths
    statistics = tree.fields(cpu.own("cpu.stat"))
    throttled_us = int(statistics.get("throttled_usec", "0"))
    throttled_us += int(statistics.get("throttled_time", "0")) // NS_PER_US
    return Cgroup(
        version=1 if is_old else 2,
        path=paths.get("name=systemd", paths.get("", "")) if is_old else paths.get("", ""),
        cpus=cpu.least(lambda folder: _quota(tree, folder)),
        throttled=int(statistics.get("nr_throttled", "0")),
        throttled_us=throttled_us,
        memory_bytes=memory.limit("memory.limit_in_bytes" if is_old else "memory.max"),
        tasks=pids.limit("pids.max"),
        tasks_used=tree.number(pids.own("pids.current")) or 0,
        huge_bytes=huge.limit("hugetlb.2MB.limit_in_bytes" if is_old else "hugetlb.2MB.max"),
    )


def _folders(controller: str, paths: dict[str, str], mounts: tuple[Mount, ...]) -> Iterator[str]:
    """Folders of a group and its parents, the group first; `controller` is empty for version 2."""
    kind = "cgroup" if controller else "cgroup2"
    for mount in mounts:
        if mount.kind == kind and (not controller or controller in mount.options):
            path = PurePosixPath(paths.get(controller, "/"))
            root = PurePosixPath(mount.root)
            below = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()
            folder = PurePosixPath(mount.point.lstrip("/"))
            for each in (below, *below.parents) if below.parts else (below,):
                yield str(folder / each)
            return


def _quota(tree: Tree, folder: str) -> float | None:
    """Quota of one group in cpus."""
    quota, _, period = tree.text(f"{folder}/cpu.max").partition(" ")
    if not period:
        quota = tree.text(f"{folder}/cpu.cfs_quota_us")
        period = tree.text(f"{folder}/cpu.cfs_period_us")
    if quota.isdecimal() and period.isdecimal() and int(period):
        return int(quota) / int(period)
    return None


def _unescape(text: str) -> str:
    """Undo the octal escapes of mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
