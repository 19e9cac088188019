"""Facts of the machine and of one process, read from /proc and /sys.

A file may be missing: a virtual machine has no cpufreq, a container no sysctl of the network, an
old kernel no setting of a new one. Its fact is then None or empty, and no check fails.

Runs on: the operator's tool. Source: proc(5), Documentation/admin-guide/sysctl,
Documentation/admin-guide/pm/{cpufreq,cpuidle}.rst and ABI/testing/sysfs-devices-system-cpu of the
Linux kernel.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from iskander.cli.doctor.cgroup import Cgroup, Mount, read_cgroup, read_mounts
from iskander.cli.doctor.tree import Tree
from iskander.gateway.supervision.placement.topology import Topology, parse_cpu_list, read_topology
from iskander.interprocess.memory.backing import huge_pages_free, transparent_setting

_LIMITS = {"Max open files": "files", "Max locked memory": "locked_bytes", "Max processes": "tasks"}
_CAP_IPC_LOCK = 14


class IdleState(NamedTuple):
    """A sleep state of a cpu that is enabled, and its exit latency in microseconds."""

    name: str
    latency_us: int


class Cpus(NamedTuple):
    """Cpus that the process may use.

    Attributes:
        governors: Frequency governors in use; empty without cpufreq.
        driver: Driver of the frequency, such as `intel_pstate`.
        preferences: Energy preferences in use, of drivers that have them.
        idle_states: Enabled idle states of the first cpu.
        is_balancing: The kernel moves pages between NUMA nodes; None if it cannot.
    """

    topology: Topology
    governors: tuple[str, ...] = ()
    driver: str = ""
    preferences: tuple[str, ...] = ()
    idle_states: tuple[IdleState, ...] = ()
    is_balancing: bool | None = None

    @property
    def total(self) -> int:
        return len(self.topology.cpus)


class Memory(NamedTuple):
    """Memory of the machine, in bytes.

    Attributes:
        overcommit: `vm.overcommit_memory`; 2 is strict accounting.
        uncommitted: Bytes that strict accounting still grants.
        huge_pages: Reserved pages of 2 MiB (`vm.nr_hugepages`).
        huge_pages_free: Free ones among them.
        transparent: Rule of transparent huge pages for shared memory.
    """

    total: int = 0
    available: int = 0
    swap: int = 0
    overcommit: int = 0
    uncommitted: int = 0
    huge_pages: int = 0
    huge_pages_free: int = 0
    transparent: str = ""


class Limits(NamedTuple):
    """Hard limits of the process; None: unlimited."""

    files: int | None = None
    locked_bytes: int | None = None
    tasks: int | None = None


class Kernel(NamedTuple):
    """Version and settings of the kernel.

    Attributes:
        clock_sources: Available clock sources.
        somaxconn: Most connections that wait for `accept`; None in a container without it.
        tcp_ranges: Least, first and most bytes of TCP's receive and send buffers; empty in a
            container without them.
    """

    version: tuple[int, int] = (0, 0)
    release: str = ""
    clock_source: str = ""
    clock_sources: tuple[str, ...] = ()
    somaxconn: int | None = None
    tcp_ranges: tuple[tuple[int, ...], ...] = ()


class MachineFacts(NamedTuple):
    """All facts.

    Attributes:
        has_lock_capability: CAP_IPC_LOCK: the process may lock any amount of memory.
        environment: Environment of the process; empty if it belongs to another user.
    """

    cpus: Cpus
    memory: Memory = Memory()
    limits: Limits = Limits()
    kernel: Kernel = Kernel()
    cgroup: Cgroup = Cgroup()
    mounts: tuple[Mount, ...] = ()
    uid: int = 0
    has_lock_capability: bool = False
    environment: tuple[tuple[str, str], ...] = ()


def read_facts(root: Path = Path("/"), process: str = "self") -> MachineFacts:
    """Read the facts of a machine and of a process; `root` has its `proc` and `sys`."""
    tree = Tree(root)
    status = tree.fields(f"proc/{process}/status")
    mounts = read_mounts(tree)
    return MachineFacts(
        cpus=_read_cpus(tree, status.get("Cpus_allowed_list", "")),
        memory=_read_memory(tree),
        limits=_read_limits(tree.text(f"proc/{process}/limits")),
        kernel=_read_kernel(tree),
        cgroup=read_cgroup(tree, process, mounts),
        mounts=mounts,
        uid=int(status.get("Uid", "0").split()[0]),
        has_lock_capability=bool(int(status.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1),
        environment=_read_environment(tree.text(f"proc/{process}/environ")),
    )


def _read_cpus(tree: Tree, allowed: str) -> Cpus:
    topology = read_topology(parse_cpu_list(allowed) or (0,), tree.root / "sys")
    folders = [f"sys/devices/system/cpu/cpu{cpu.number}" for cpu in topology.cpus]

    def values(name: str) -> tuple[str, ...]:
        found = {tree.text(f"{folder}/cpufreq/{name}") for folder in folders}
        return tuple(sorted(found - {""}))

    balancing = tree.number("proc/sys/kernel/numa_balancing")
    return Cpus(
        topology=topology,
        governors=values("scaling_governor"),
        driver=", ".join(values("scaling_driver")),
        preferences=values("energy_performance_preference"),
        idle_states=_read_idle_states(tree, f"{folders[0]}/cpuidle"),
        is_balancing=None if balancing is None else bool(balancing),
    )


def _read_idle_states(tree: Tree, folder: str) -> tuple[IdleState, ...]:
    states = [
        IdleState(tree.text(f"{folder}/{name}/name"), tree.number(f"{folder}/{name}/latency") or 0)
        for name in tree.names(folder)
        if tree.number(f"{folder}/{name}/disable") == 0
    ]
    return tuple(sorted(states, key=lambda state: state.latency_us))


def _read_memory(tree: Tree) -> Memory:
    fields = tree.fields("proc/meminfo")

    def size(name: str) -> int:
        return int(fields.get(name, "0").split()[0]) << 10

    sysfs = tree.root / "sys"
    return Memory(
        total=size("MemTotal"),
        available=size("MemAvailable"),
        swap=size("SwapTotal"),
        overcommit=tree.number("proc/sys/vm/overcommit_memory") or 0,
        uncommitted=size("CommitLimit") - size("Committed_AS"),
        huge_pages=tree.number("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages") or 0,
        huge_pages_free=huge_pages_free(sysfs),
        transparent=transparent_setting(sysfs),
    )


def _read_limits(text: str) -> Limits:
    """Parse `/proc/PID/limits`: name, soft limit, hard limit, unit."""
    found: dict[str, int | None] = {}
    for line in text.splitlines():
        name, *values = re.split(r"\s{2,}", line.strip())
        if name in _LIMITS and len(values) >= 2:
            found[_LIMITS[name]] = None if values[1] == "unlimited" else int(values[1])
    return Limits(**found)


def _read_kernel(tree: Tree) -> Kernel:
    release = tree.text("proc/sys/kernel/osrelease")
    version = re.match(r"(\d+)\.(\d+)", release)
    clock = "sys/devices/system/clocksource/clocksource0"
    ranges = (tree.text(f"proc/sys/net/ipv4/tcp_{name}mem").split() for name in "rw")
    return Kernel(
        version=(int(version[1]), int(version[2])) if version else (0, 0),
        release=release,
        clock_source=tree.text(f"{clock}/current_clocksource"),
        clock_sources=tuple(tree.text(f"{clock}/available_clocksource").split()),
        somaxconn=tree.number("proc/sys/net/core/somaxconn"),
        tcp_ranges=tuple(tuple(map(int, each)) for each in ranges if len(each) == 3),
    )


def _read_environment(text: str) -> tuple[tuple[str, str], ...]:
    pairs = (entry.partition("=") for entry in text.split("\0") if "=" in entry)
    return tuple((name, value) for name, _, value in pairs)
