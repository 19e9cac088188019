"""Placement: topologies of machines that are not here, and which worker gets which cores."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iskander.config import Config, ModelConfig, WorkersConfig
from iskander.errors import ConfigError
from iskander.gateway.supervision.placement import Topology, parse_cpu_list, plan, read_topology
from iskander.gateway.supervision.workers import Place


def config(
    groups: str | tuple[str, ...] = "auto", count: int = 0, **model: int | bool | str
) -> Config:
    return Config(
        workers=WorkersConfig(groups=groups, count=count),
        models=(ModelConfig(name="m", path="p", **model),),
    )


def machine(nodes: int, cores: int) -> Topology:
    """A machine of equal nodes with their cores in order."""
    return Topology({node: tuple(range(node * cores, (node + 1) * cores)) for node in range(nodes)})


def sysfs(folder: Path, cpu_lists: dict[str, str]) -> Path:
    """A tree with the only files of it that are read."""
    for name, cpu_list in cpu_lists.items():
        node = folder / "devices/system/node" / name
        node.mkdir(parents=True)
        (node / "cpulist").write_text(cpu_list + "\n")
    return folder


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
def test_a_cpu_list_is_read_as_the_kernel_writes_it(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize(
    "text",
    ["a", "-1", "3-1", "1-2-3", "0x1", "1;2", "65536", "0-99999999999", "1.5", "0-3 8", "2-"],
)
def test_what_is_no_cpu_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_cpu_list(text)


@settings(deadline=None)
@given(st.sets(st.integers(0, 300)))
def test_a_cpu_list_read_back_is_the_same_cores(cpus: set[int]) -> None:
    """Written with every run of cores as one range, as the kernel does."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    text = ",".join(f"{low}-{high}" if high > low else f"{low}" for low, high in runs)

    assert parse_cpu_list(text) == tuple(sorted(cpus))


TREES = [
    pytest.param({"node0": "0-3"}, range(4), {0: (0, 1, 2, 3)}, id="one node"),
    pytest.param(
        {"node0": "0-1", "node1": "2-3"}, range(4), {0: (0, 1), 1: (2, 3)}, id="two nodes"
    ),
    pytest.param(
        {"node0": "0,2", "node1": "1,3"}, range(4), {0: (0, 2), 1: (1, 3)}, id="interleaved"
    ),
    pytest.param(
        {f"node{node}": f"{2 * node}-{2 * node + 1}" for node in range(8)},
        range(16),
        {node: (2 * node, 2 * node + 1) for node in range(8)},
        id="eight nodes",
    ),
    pytest.param(
        {"node10": "4-7", "node2": "0-3"},
        range(8),
        {2: (0, 1, 2, 3), 10: (4, 5, 6, 7)},
        id="nodes in the order of their numbers",
    ),
    pytest.param(
        {"node0": "0-3", "node1": ""}, range(4), {0: (0, 1, 2, 3)}, id="a node of memory only"
    ),
    pytest.param(
        {"node0": "0-3", "node1": "4-7"}, {1, 2, 6}, {0: (1, 2), 1: (6,)}, id="a mask over both"
    ),
    pytest.param({"node0": "0-3", "node1": "4-7"}, {4, 5}, {1: (4, 5)}, id="a mask over one"),
    pytest.param({}, {1, 3}, {0: (1, 3)}, id="no nodes"),
    pytest.param({"node0": "0-1"}, range(4), {0: (0, 1, 2, 3)}, id="nodes without some cores"),
]


@pytest.mark.parametrize(("tree", "allowed", "nodes"), TREES)
def test_the_topology_is_what_this_process_may_use(
    tree: dict[str, str],
    allowed: range | set[int],
    nodes: dict[int, tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed))

    topology = read_topology(sysfs(tmp_path, tree))

    assert topology.nodes == nodes
    assert list(topology.nodes) == list(nodes)
    assert topology.cpus == set(allowed)


def test_files_beside_the_nodes_are_no_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    root = sysfs(tmp_path, {"node0": "0-1"})
    (root / "devices/system/node/online").write_text("0\n")
    (root / "devices/system/node/power").mkdir()

    assert read_topology(root).nodes == {0: (0, 1)}


def test_the_machine_that_runs_this_has_a_topology() -> None:
    """The real tree, which no fake one can stand for."""
    topology = read_topology()

    assert topology.cpus == os.sched_getaffinity(0)
    assert sum(map(len, topology.nodes.values())) == len(topology.cpus)


@pytest.mark.parametrize(
    ("topology", "places"),
    [
        (machine(1, 4), [Place(0, 0, (0, 1, 2, 3), None)]),
        (machine(2, 2), [Place(0, 0, (0, 1), 0), Place(1, 1, (2, 3), 1)]),
        (machine(8, 1), [Place(node, node, (node,), node) for node in range(8)]),
        (Topology({2: (5,), 7: (6, 9)}), [Place(0, 0, (5,), 2), Place(1, 1, (6, 9), 7)]),
    ],
    ids=["one node", "two nodes", "eight nodes", "odd numbers"],
)
def test_auto_is_a_worker_for_each_node(topology: Topology, places: list[Place]) -> None:
    assert plan(config(), topology) == places


@pytest.mark.parametrize(
    ("groups", "topology", "places"),
    [
        (("0-1", "2-3"), machine(1, 4), [((0, 1), None), ((2, 3), None)]),
        (("2-3", "0"), machine(2, 2), [((2, 3), 1), ((0,), 0)]),
        (("0-3",), machine(2, 2), [((0, 1, 2, 3), None)]),
        (("3,1",), machine(1, 4), [((1, 3), None)]),
    ],
    ids=["halves", "in the order given", "over two nodes", "sorted"],
)
def test_groups_can_be_named(
    groups: tuple[str, ...],
    topology: Topology,
    places: list[tuple[tuple[int, ...], int | None]],
) -> None:
    planned = plan(config(groups), topology)

    assert [(place.cpus, place.node) for place in planned] == places
    assert [place.group for place in planned] == list(range(len(groups)))


@pytest.mark.parametrize(
    ("count", "shares"),
    [
        (1, [(0, (0, 1, 2, 3, 4))]),
        (2, [(0, (0, 1)), (0, (2, 3, 4))]),
        (3, [(0, (0,)), (0, (1, 2)), (0, (3, 4))]),
        (5, [(0, (cpu,)) for cpu in range(5)]),
    ],
)
def test_workers_of_one_group_share_its_cores(
    count: int, shares: list[tuple[int, tuple[int, ...]]]
) -> None:
    planned = plan(config(count=count), machine(1, 5))

    assert [(place.group, place.cpus) for place in planned] == shares


def test_an_odd_worker_goes_to_the_first_groups() -> None:
    planned = plan(config(count=5), machine(3, 4))

    assert [place.group for place in planned] == [0, 0, 1, 1, 2]
    assert [place.index for place in planned] == [0, 1, 2, 3, 4]
    assert [place.node for place in planned] == [0, 0, 1, 1, 2]


@settings(deadline=None)
@given(st.data(), st.integers(1, 8), st.integers(1, 16))
def test_a_plan_uses_every_core_once(data: st.DataObject, nodes: int, cores: int) -> None:
    """Any machine, any number of workers that it can hold."""
    count = data.draw(st.integers(nodes, nodes * cores))
    topology = machine(nodes, cores)

    planned = plan(config(count=count), topology)

    assert len(planned) == count
    assert sorted(cpu for place in planned for cpu in place.cpus) == sorted(topology.cpus)
    assert all(place.cpus for place in planned)
    widths = [len(place.cpus) for place in planned if place.group == 0]
    assert max(widths) - min(widths) <= 1


REFUSED = [
    (("0-4",), 0, machine(1, 4), 'workers.groups[0] = "0-4"', "cores [4]"),
    (("0", "9,10"), 0, machine(1, 4), 'workers.groups[1] = "9,10"', "cores [9, 10]"),
    (("0", ""), 0, machine(1, 4), 'workers.groups[1] = ""', "empty list"),
    (("0-2", "2-3"), 0, machine(1, 4), 'workers.groups[1] = "2-3"', "[2] are in another group"),
    (("all",), 0, machine(1, 4), 'workers.groups[0] = "all"', "a cpu list such as 0-3,8"),
    ((), 0, machine(1, 4), "workers.groups", "empty list"),
    ("auto", 1, machine(2, 2), "workers.count = 1", "2 core groups"),
    ("auto", 5, machine(1, 4), "workers.count = 5", "5 workers on the 4 cores of group 0"),
    ("auto", 4, Topology({0: (0,), 1: (1, 2, 3)}), "workers.count = 4", "2 workers on the 1 cores"),
]


@pytest.mark.parametrize(
    ("groups", "count", "topology", "where", "why"), REFUSED, ids=[row[4] for row in REFUSED]
)
def test_a_plan_that_cannot_be_is_refused(
    groups: str | tuple[str, ...], count: int, topology: Topology, where: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(where)) as caught:
        plan(config(groups, count), topology)

    assert why in caught.value.message


@pytest.mark.parametrize(
    ("accepted", "refused"),
    [
        ({"intra_threads": 2}, {"intra_threads": 3}),
        (
            {"intra_threads": 1, "inter_threads": 2, "parallel_execution": True},
            {"intra_threads": 2, "inter_threads": 2, "parallel_execution": True},
        ),
        (
            {"intra_threads": 2, "inter_threads": 1, "parallel_execution": True},
            {"intra_threads": 0, "inter_threads": 2, "parallel_execution": True},
        ),
    ],
)
def test_more_threads_than_cores_are_refused(
    accepted: dict[str, int], refused: dict[str, int]
) -> None:
    """Workers of two cores each; the threads within an operator and those of others add up."""
    topology = machine(1, 4)
    plan(config(count=2, **accepted), topology)

    with pytest.raises(ConfigError, match=r"models\[0\] \(`m`\)") as caught:
        plan(config(count=2, **refused), topology)

    assert "3 compute threads, and worker 0 has 2 cores" in caught.value.message


def test_the_narrowest_worker_counts() -> None:
    """Five cores for two workers: the second has the third core, and the first decides."""
    with pytest.raises(ConfigError, match="worker 0 has 2 cores"):
        plan(config(count=2, intra_threads=3), machine(1, 5))
