"""CPU topology: cpus by physical core, L3 domain and NUMA node, read from sysfs.

Entries may be missing: a virtual machine has no caches, a kernel no nodes, a container no sysfs.
The defaults are one node, one domain for each node, and one core for each cpu.

Source: Documentation/admin-guide/cputopology.rst, ABI/stable/sysfs-devices-node and
ABI/stable/sysfs-devices-system-cpu (cache/index*) of the Linux kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

_SIBLINGS = ("core_cpus_list", "thread_siblings_list")
"""The current file name, and the name before Linux 5.3."""


class Cpu(NamedTuple):
    """A logical cpu: with SMT one of the hardware threads of a core.

    Attributes:
        domain: L3 domain, counted from 0 in the order of nodes and cpus.
        core: The lowest cpu of its siblings.
    """

    node: int
    domain: int
    core: int
    number: int


class Topology(NamedTuple):
    """Usable cpus, sorted by node, domain and core; without L3 caches each node is a domain."""

    cpus: tuple[Cpu, ...]
    has_l3: bool = True

    @property
    def numbers(self) -> set[int]:
        return {cpu.number for cpu in self.cpus}

    @property
    def nodes(self) -> dict[int, tuple[int, ...]]:
        return {node: _numbers(cpus) for node, cpus in groupby(self.cpus, lambda cpu: cpu.node)}

    @property
    def domains(self) -> dict[int, tuple[int, ...]]:
        """The cpus of each L3 domain; none spans nodes."""
        return {each: _numbers(cpus) for each, cpus in groupby(self.cpus, lambda cpu: cpu.domain)}

    @property
    def cores(self) -> list[tuple[int, ...]]:
        return [_numbers(cpus) for _, cpus in groupby(self.cpus, lambda cpu: cpu.core)]

    def only(self, numbers: Collection[int]) -> Topology:
        """Restrict the topology to the given cpus."""
        selected = set(numbers)
        return self._replace(cpus=tuple(cpu for cpu in self.cpus if cpu.number in selected))


def read_topology(allowed: Collection[int], sysfs: Path = Path("/sys")) -> Topology:
    """Read the topology of the cpus `allowed`, the result of `sched_getaffinity`."""
    node_of = _nodes(sysfs)
    if not node_of.keys() >= set(allowed):
        node_of = dict.fromkeys(allowed, 0)
    folders = {number: sysfs / f"devices/system/cpu/cpu{number}" for number in sorted(allowed)}
    l3_of = _lowest(folders, _l3_sharers)
    core_of = _lowest(folders, _siblings)
    # Nodes of one socket can share a cache; a domain never spans nodes.
    keys = {number: (node_of[number], l3_of.get(number, -1)) for number in folders}
    order = {key: domain for domain, key in enumerate(sorted(set(keys.values())))}
    cpus = [Cpu(node_of[n], order[keys[n]], core_of.get(n, n), n) for n in folders]
    return Topology(tuple(sorted(cpus)), has_l3=bool(l3_of))


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parse a kernel cpu list such as `0-3,8`; raise a `ValueError` for any other text."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, dash, last = part.partition("-")
        low, high = int(first), int(last if dash else first)
        if not 0 <= low <= high < 1 << 16:
            raise ValueError(text)
        cpus.update(range(low, high + 1))
    return tuple(sorted(cpus))


def render_cpu_list(cpus: Collection[int]) -> str:
    """Format cpus as a kernel cpu list."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)


def _numbers(cpus: Iterable[Cpu]) -> tuple[int, ...]:
    return tuple(sorted(cpu.number for cpu in cpus))


def _nodes(sysfs: Path) -> dict[int, int]:
    """Return the node of each cpu, the lowest if firmware lists a cpu in several."""
    node_of: dict[int, int] = {}
    folders = (sysfs / "devices/system/node").glob("node[0-9]*")
    for node, folder in sorted((int(each.name.removeprefix("node")), each) for each in folders):
        for cpu in _read_list(folder / "cpulist"):
            node_of.setdefault(cpu, node)
    return node_of


def _lowest(folders: dict[int, Path], sharers: Callable[[Path], tuple[int, ...]]) -> dict[int, int]:
    """Map each cpu to the lowest cpu of its core or cache; one file is read for all its sharers."""
    lowest: dict[int, int] = {}
    for number, folder in folders.items():
        if number not in lowest:
            shared = sharers(folder)
            for other in shared:
                lowest.setdefault(other, shared[0])
    return lowest


def _l3_sharers(folder: Path) -> tuple[int, ...]:
    for cache in folder.glob("cache/index[0-9]*"):
        if _read(cache / "level") == "3":
            return _read_list(cache / "shared_cpu_list")
    return ()


def _siblings(folder: Path) -> tuple[int, ...]:
    lists = (_read_list(folder / "topology" / name) for name in _SIBLINGS)
    return next(filter(None, lists), ())


def _read_list(path: Path) -> tuple[int, ...]:
    try:
        return parse_cpu_list(_read(path))
    except ValueError:
        return ()


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
