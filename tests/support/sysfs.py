"""Recorded and generated machines, as sysfs trees.

The facts are of recordings of hwloc 2.9.0 (tests/hwloc/linux) and util-linux 2.38 (tests/ts/lscpu),
and of the development machine. Lists have the kernel's format, for the files that are read.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import NamedTuple

from iskander.gateway.supervision.placement.topology import (
    Cpu,
    Topology,
    parse_cpu_list,
    read_topology,
)


class Machine(NamedTuple):
    """A recording.

    Attributes:
        nodes: The cpus of each NUMA node, as in its `cpulist`.
        allowed: The cpus of `sched_getaffinity`.
        cores: SMT siblings; a cpu in none of them has no `topology` folder.
        domains: Cpus with a shared L3 cache; a cpu in none of them has no such cache.
        siblings: The file of the SMT siblings.
    """

    nodes: dict[int, str]
    allowed: str
    cores: list[str]
    domains: list[str]
    siblings: str = "core_cpus_list"


MACHINES = {
    # util-linux, x86_64-dell_e4310: a notebook.
    "1 node, SMT": Machine({0: "0-3"}, "0-3", ["0,2", "1,3"], ["0-3"], "thread_siblings_list"),
    # A virtual machine of Firecracker on an EPYC, Linux 6.18.
    "1 node": Machine({0: "0-1"}, "0-1", ["0", "1"], ["0-1"]),
    # util-linux, vbox-win.
    "1 node, no caches": Machine({0: "0-1"}, "0-1", ["0", "1"], [], "thread_siblings_list"),
    # hwloc, 16em64t-4s2c2t-offlines: cpus 2, 5, 13 and 14 are offline and still in the node.
    "1 node, SMT, offline cpus": Machine(
        {0: "0-15"},
        "0-1,3-4,6-12,15",
        ["0,8", "1,9", "10", "3,11", "4,12", "6", "7,15"],
        ["0,4,8,12", "1,9", "3,7,11,15", "6,10"],
        "thread_siblings_list",
    ),
    # hwloc, 32em64t-2n8c+1mic.
    "2 nodes": Machine(
        {0: "0-7", 1: "8-15"},
        "0-15",
        [f"{cpu}" for cpu in range(16)],
        ["0-7", "8-15"],
        "thread_siblings_list",
    ),
    # hwloc, 32intel64-2p8co2t+8ve.
    "2 nodes, SMT": Machine(
        {0: "0-7,16-23", 1: "8-15,24-31"},
        "0-31",
        [f"{cpu},{cpu + 16}" for cpu in range(16)],
        ["0-7,16-23", "8-15,24-31"],
    ),
    # hwloc, 40intel64-2g2n4c+pci: adjacent cpu numbers are on different nodes.
    "4 nodes, interleaved": Machine(
        {node: ",".join(map(str, range(node, 40, 4))) for node in range(4)},
        "0-39",
        [f"{cpu}" for cpu in range(40)],
        [",".join(map(str, range(node, 40, 4))) for node in range(4)],
        "thread_siblings_list",
    ),
    # hwloc, 16amd64-8n2c-cpusets: a cpuset of 0-6 and 12-15, and cpu 4 is offline.
    "8 nodes, in a cpuset": Machine(
        {node: f"{2 * node}-{2 * node + 1}" for node in range(8)},
        "0-3,5-6,12-15",
        [f"{cpu}" for cpu in range(16)],
        [],
        "thread_siblings_list",
    ),
    # hwloc, 48amd64-4d2n6c-sparse.
    "8 nodes with gaps": Machine(
        {0: "0-5", 1: "6-11", 2: "12-17", 33: "18-23", 34: "24-29", 45: "30-35", 72: "36-41",
         73: "42-47"},
        "0-47",
        [f"{cpu}" for cpu in range(48)],
        [f"{first}-{first + 5}" for first in range(0, 48, 6)],
        "thread_siblings_list",
    ),
    # util-linux, x86_64-epyc_7451: two sockets of four dies, each with two L3 caches.
    "8 nodes, SMT, chiplets": Machine(
        {node: f"{6 * node}-{6 * node + 5},{6 * node + 48}-{6 * node + 53}" for node in range(8)},
        "0-95",
        [f"{cpu},{cpu + 48}" for cpu in range(48)],
        [f"{first}-{first + 2},{first + 48}-{first + 50}" for first in range(0, 48, 3)],
        "thread_siblings_list",
    ),
    # hwloc, 256ppc-8n8s4t: four threads a core, and an L3 cache for each core.
    "8 nodes, SMT of four": Machine(
        {node: f"{32 * place}-{32 * place + 31}"
         for place, node in enumerate((0, 1, 4, 5, 8, 9, 12, 13))},
        "0-255",
        [f"{first}-{first + 3}" for first in range(0, 256, 4)],
        [f"{first}-{first + 3}" for first in range(0, 256, 4)],
        "thread_siblings_list",
    ),
    # hwloc, 64intel64-fakeKNL-SNC4-hybrid: nodes 4 to 7 are memory on the package.
    "nodes of memory only": Machine(
        {node: ",".join(f"{first}-{first + 3}" for first in range(4 * node, 64, 16))
         if node < 4 else "" for node in range(8)},
        "0-63",
        [",".join(map(str, range(cpu, 64, 16))) for cpu in range(16)],
        [],
        "thread_siblings_list",
    ),
    # hwloc, fakecpuid1f-64intel64-2p4d2n2c2t: a cache of two nodes.
    "a cache across nodes": Machine(
        {node: f"{4 * node}-{4 * node + 3}" for node in range(16)},
        "0-63",
        [f"{first}-{first + 1}" for first in range(0, 64, 2)],
        [f"{first}-{first + 7}" for first in range(0, 64, 8)],
    ),
    # hwloc, 8em64t-2s2ca2c-buggynuma: firmware that lists every cpu in every node.
    "cpus of every node": Machine(
        dict.fromkeys(range(8), "0-7"),
        "0-7",
        [f"{cpu}" for cpu in range(8)],
        [],
        "thread_siblings_list",
    ),
}  # fmt: skip


def write_sysfs(machine: Machine, folder: Path) -> Path:
    """Write a tree with the files that are read, and some other ones."""
    for node, cpus in machine.nodes.items():
        _write(folder / f"devices/system/node/node{node}/cpulist", cpus)
    _write(folder / "devices/system/node/online", "0")
    (folder / "devices/system/node/power").mkdir()
    for cpu in (cpu for cpus in machine.nodes.values() for cpu in parse_cpu_list(cpus)):
        _write(folder / f"devices/system/cpu/cpu{cpu}/online", "1")
    for siblings in machine.cores:
        for cpu in parse_cpu_list(siblings):
            home = folder / f"devices/system/cpu/cpu{cpu}"
            _write(home / "topology" / machine.siblings, siblings)
            _write(home / "cache/index2/level", "2")
            _write(home / "cache/index2/shared_cpu_list", siblings)
    for sharers in machine.domains:
        for cpu in parse_cpu_list(sharers):
            home = folder / f"devices/system/cpu/cpu{cpu}"
            _write(home / "cache/index3/level", "3")
            _write(home / "cache/index3/shared_cpu_list", sharers)
    return folder


@functools.cache
def recorded_topology(name: str) -> Topology:
    """The topology of one of `MACHINES`, for a process with the recorded affinity."""
    with tempfile.TemporaryDirectory(prefix="isk-sysfs-") as folder:
        machine = MACHINES[name]
        return read_topology(parse_cpu_list(machine.allowed), write_sysfs(machine, Path(folder)))


def make_topology(nodes: int, cores: int, *, domains: int = 1, threads: int = 1) -> Topology:
    """A regular machine: `cores` of each node's `domains`; second threads are numbered last."""
    whole = nodes * domains * cores
    cpus = [
        Cpu(core // (domains * cores), core // cores, core, core + thread * whole)
        for core in range(whole)
        for thread in range(threads)
    ]
    return Topology(tuple(sorted(cpus)))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
