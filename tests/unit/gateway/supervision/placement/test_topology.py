"""CPU topology, read from the sysfs trees of recorded machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sysfs import MACHINES, Machine, make_topology, recorded_topology, write_sysfs

from iskander.gateway.supervision.placement.topology import (
    Topology,
    parse_cpu_list,
    read_topology,
    render_cpu_list,
)


def read(machine: Machine, folder: Path, allowed: str = "") -> Topology:
    return read_topology(parse_cpu_list(allowed or machine.allowed), write_sysfs(machine, folder))


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("", ()),
        ("0", (0,)),
        ("0-3", (0, 1, 2, 3)),
        ("0-3,8", (0, 1, 2, 3, 8)),
        ("8,0-1", (0, 1, 8)),
        ("1,1,0-1", (0, 1)),
        ("5-5", (5,)),
        ("65535", (65535,)),
        ("0-1,", (0, 1)),
    ],
)
def test_cpu_list_of_the_kernel_is_parsed(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize(
    "text",
    ["a", "-1", "3-1", "1-2-3", "0x1", "1;2", "65536", "0-99999999999", "1.5", "0-3 8", "2-"],
)
def test_invalid_cpu_list_is_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        parse_cpu_list(text)


@settings(deadline=None)
@given(st.sets(st.integers(0, 300)))
def test_cpu_list_round_trip(cpus: set[int]) -> None:
    assert parse_cpu_list(render_cpu_list(cpus)) == tuple(sorted(cpus))


@pytest.mark.parametrize(
    ("cpus", "text"),
    [((), ""), ((3,), "3"), ((1, 0), "0-1"), ((0, 1, 2, 8, 10, 11), "0-2,8,10-11")],
)
def test_cpu_list_is_written_as_ranges(cpus: tuple[int, ...], text: str) -> None:
    assert render_cpu_list(cpus) == text


@pytest.mark.parametrize("name", MACHINES)
def test_topology_has_every_allowed_cpu_once_and_no_other(name: str) -> None:
    allowed = parse_cpu_list(MACHINES[name].allowed)

    topology = recorded_topology(name)

    for parts in (topology.nodes.values(), topology.domains.values(), topology.cores):
        assert tuple(sorted(cpu for cpus in parts for cpu in cpus)) == allowed
    for smaller, larger in (
        (topology.cores, topology.domains.values()),
        (topology.domains.values(), topology.nodes.values()),
    ):
        assert all(any(set(inner) <= set(outer) for outer in larger) for inner in smaller)


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        ("1 node", {0: "0-1"}),
        ("1 node, SMT", {0: "0-3"}),
        ("1 node, no caches", {0: "0-1"}),
        ("2 nodes", {0: "0-7", 1: "8-15"}),
        ("2 nodes, SMT", {0: "0-7,16-23", 1: "8-15,24-31"}),
        ("8 nodes, in a cpuset", {0: "0-1", 1: "2-3", 2: "5", 3: "6", 6: "12-13", 7: "14-15"}),
        ("cpus of every node", {0: "0-7"}),
    ],
)
def test_nodes_are_those_with_allowed_cpus(name: str, nodes: dict[int, str]) -> None:
    """No memory-only nodes, and none outside the cpuset; each cpu has one node."""
    topology = recorded_topology(name)

    assert {node: render_cpu_list(cpus) for node, cpus in topology.nodes.items()} == nodes


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        ("8 nodes with gaps", [0, 1, 2, 33, 34, 45, 72, 73]),
        ("8 nodes, SMT, chiplets", list(range(8))),
        ("8 nodes, SMT of four", [0, 1, 4, 5, 8, 9, 12, 13]),
        ("nodes of memory only", [0, 1, 2, 3]),
    ],
)
def test_nodes_are_ordered_by_number(name: str, nodes: list[int]) -> None:
    assert list(recorded_topology(name).nodes) == nodes


@pytest.mark.parametrize(
    ("name", "domains"),
    [
        ("1 node", ["0-1"]),
        ("1 node, SMT", ["0-3"]),
        ("2 nodes, SMT", ["0-7,16-23", "8-15,24-31"]),
        ("1 node, SMT, offline cpus", ["0,4,8,12", "1,9", "3,7,11,15", "6,10"]),
        # Without an L3 cache a node is a domain.
        ("1 node, no caches", ["0-1"]),
        ("8 nodes, in a cpuset", ["0-1", "2-3", "5", "6", "12-13", "14-15"]),
        # A cache that spans two nodes is a domain in each.
        ("a cache across nodes", [f"{first}-{first + 3}" for first in range(0, 64, 4)]),
    ],
)
def test_l3_domain_is_the_cpus_of_a_node_that_share_a_cache(name: str, domains: list[str]) -> None:
    topology = recorded_topology(name)

    assert list(map(render_cpu_list, topology.domains.values())) == domains
    assert list(topology.domains) == list(range(len(domains)))
    assert topology.has_l3 is bool(MACHINES[name].domains)


def test_chiplet_node_has_several_domains() -> None:
    topology = recorded_topology("8 nodes, SMT, chiplets")

    assert topology.nodes[0] == parse_cpu_list("0-5,48-53")
    assert [*map(render_cpu_list, topology.domains.values())][:2] == ["0-2,48-50", "3-5,51-53"]
    assert len(topology.domains) == 16
    assert topology.cores[:3] == [(0, 48), (1, 49), (2, 50)]


@pytest.mark.parametrize(
    ("name", "cores"),
    [
        ("1 node", [(0,), (1,)]),
        ("1 node, SMT", [(0, 2), (1, 3)]),
        ("2 nodes", [(cpu,) for cpu in range(16)]),
        ("2 nodes, SMT", [(cpu, cpu + 16) for cpu in range(16)]),
        ("8 nodes, SMT of four", [tuple(range(cpu, cpu + 4)) for cpu in range(0, 256, 4)]),
        ("1 node, SMT, offline cpus", [(0, 8), (4, 12), (1, 9), (3, 11), (7, 15), (6,), (10,)]),
    ],
)
def test_smt_siblings_form_a_core(name: str, cores: list[tuple[int, ...]]) -> None:
    assert recorded_topology(name).cores == cores


@pytest.mark.parametrize("siblings", ["core_cpus_list", "thread_siblings_list"])
def test_both_sysfs_names_of_siblings_are_read(siblings: str, tmp_path: Path) -> None:
    machine = MACHINES["1 node, SMT"]._replace(siblings=siblings)

    assert read(machine, tmp_path).cores == [(0, 2), (1, 3)]


def test_cpuset_with_some_of_the_siblings(tmp_path: Path) -> None:
    """A cpuset over both nodes: one sibling of core 0, both siblings of core 1."""
    topology = read(MACHINES["2 nodes, SMT"], tmp_path, allowed="1,16-17,24")

    assert topology.nodes == {0: (1, 16, 17), 1: (24,)}
    assert topology.cores == [(16,), (1, 17), (24,)]


def test_machine_without_sysfs_is_one_node_and_one_domain(tmp_path: Path) -> None:
    """A sandbox may have no sysfs; each cpu is then a core."""
    topology = read_topology({1, 3}, tmp_path)

    assert topology.nodes == topology.domains == {0: (1, 3)}
    assert topology.cores == [(1,), (3,)]
    assert not topology.has_l3


def test_incomplete_node_lists_are_ignored(tmp_path: Path) -> None:
    machine = Machine({1: "0-1"}, "0-3", [], [])

    assert read(machine, tmp_path).nodes == {0: (0, 1, 2, 3)}


@pytest.mark.parametrize("name", ["cpulist", "shared_cpu_list", "thread_siblings_list"])
def test_malformed_file_is_treated_as_missing(name: str, tmp_path: Path) -> None:
    folder = write_sysfs(MACHINES["2 nodes"], tmp_path)
    for path in folder.rglob(name):
        path.write_text("0-\n")

    topology = read_topology(range(16), folder)

    assert topology.numbers == set(range(16))
    assert len(topology.cores) == 16


def test_subset_keeps_node_and_domain_numbers() -> None:
    topology = make_topology(2, 2, domains=2, threads=2)

    subset = topology.only({4, 5, 12, 13})

    assert (subset.nodes, subset.domains) == ({1: (4, 5, 12, 13)}, {2: (4, 5, 12, 13)})
    assert subset.cores == [(4, 12), (5, 13)]


def test_topology_of_the_test_machine() -> None:
    """Reads the real sysfs tree."""
    allowed = os.sched_getaffinity(0)
    topology = read_topology(allowed)

    assert topology.numbers == allowed
    assert sum(map(len, topology.nodes.values())) == len(allowed)
