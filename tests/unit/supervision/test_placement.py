"""Placement: which worker gets which cpus, what the gateway keeps, and what is said of the rest."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sysfs import make_topology, recorded_topology

from iskander.config.models import ModelConfig
from iskander.config.schema import Config, ServerConfig, WorkersConfig
from iskander.errors import ConfigError
from iskander.supervision.placement import plan
from iskander.supervision.topology import Topology, render_cpu_list
from iskander.supervision.worker import SlotPlan


def config(
    groups: Any = "auto",
    count: int = 0,
    cores: str = "",
    processes: int = 1,
    **model: int | bool | str,
) -> Config:
    return Config(
        server=ServerConfig(cores=cores, processes=processes),
        workers=WorkersConfig(groups=groups, count=count),
        models=(ModelConfig(name="m", path="p", **model),),
    )


def rows(slots: list[SlotPlan]) -> list[tuple[int, str, int, int | None]]:
    """Group, cpus, physical cores and node of each."""
    return [(each.group, render_cpu_list(each.cpus), each.cores, each.node) for each in slots]


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("1 node", [(0, "0-1", 2, None)]),
        ("1 node, SMT", [(0, "0-3", 2, None)]),
        ("1 node, no caches", [(0, "0-1", 2, None)]),
        ("2 nodes", [(0, "0-7", 8, 0), (1, "8-15", 8, 1)]),
        ("2 nodes, SMT", [(0, "0-7,16-23", 8, 0), (1, "8-15,24-31", 8, 1)]),
        (
            "8 nodes, in a cpuset",
            [(0, "0-1", 2, 0), (1, "2-3", 2, 1), (2, "5", 1, 2), (3, "6", 1, 3),
             (4, "12-13", 2, 6), (5, "14-15", 2, 7)],
        ),
        (
            "8 nodes, SMT, chiplets",
            [(node, f"{6 * node}-{6 * node + 5},{6 * node + 48}-{6 * node + 53}", 6, node)
             for node in range(8)],
        ),
    ],
)  # fmt: skip
def test_auto_is_a_worker_for_each_node(
    name: str, slots: list[tuple[int, str, int, int | None]]
) -> None:
    planned = plan(config(), recorded_topology(name))

    assert rows(planned.slots) == slots
    assert [slot.index for slot in planned.slots] == list(range(len(slots)))
    assert planned.gateway == ()
    assert planned.notes == ()


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("1 node", [(0, "0-1", 2, None)]),
        ("2 nodes, SMT", [(0, "0-7,16-23", 8, 0), (1, "8-15,24-31", 8, 1)]),
        (
            "8 nodes, SMT, chiplets",
            [(third, f"{3 * third}-{3 * third + 2},{3 * third + 48}-{3 * third + 50}", 3,
              third // 2) for third in range(16)],
        ),
        (
            "a cache across nodes",
            [(node, f"{4 * node}-{4 * node + 3}", 2, node) for node in range(16)],
        ),
    ],
)  # fmt: skip
def test_l3_is_a_worker_for_each_domain(
    name: str, slots: list[tuple[int, str, int, int | None]]
) -> None:
    planned = plan(config("l3"), recorded_topology(name))

    assert rows(planned.slots) == slots
    assert [slot.domains for slot in planned.slots] == [(each,) for each in range(len(slots))]
    assert planned.notes == ()


def test_l3_goes_by_node_where_no_cache_is_told_of_and_says_so() -> None:
    planned = plan(config("l3"), recorded_topology("8 nodes, in a cpuset"))

    assert [slot.node for slot in planned.slots] == [0, 1, 2, 3, 6, 7]
    assert [slot.domains for slot in planned.slots] == [()] * 6
    assert [note for note in planned.notes if "no L3 cache" in note] == list(planned.notes)
    assert planned.notes


@pytest.mark.parametrize(
    ("groups", "topology", "slots"),
    [
        (("0-1", "2-3"), make_topology(1, 4), [("0-1", None), ("2-3", None)]),
        (("2-3", "0"), make_topology(2, 2), [("2-3", 1), ("0", 0)]),
        (("0-3",), make_topology(2, 2), [("0-3", None)]),
        (("3,1",), make_topology(1, 4), [("1,3", None)]),
    ],
    ids=["halves", "in the order given", "over two nodes", "sorted"],
)
def test_groups_can_be_named(
    groups: tuple[str, ...], topology: Topology, slots: list[tuple[str, int | None]]
) -> None:
    planned = plan(config(groups), topology).slots

    assert [(render_cpu_list(slot.cpus), slot.node) for slot in planned] == slots
    assert [slot.group for slot in planned] == list(range(len(groups)))


def test_a_group_over_two_nodes_is_told_of() -> None:
    (note,) = plan(config(("0", "1-2")), make_topology(2, 2)).notes

    assert note.startswith("group 1 spans the NUMA nodes 0, 1:")


@pytest.mark.parametrize(
    ("topology", "count", "shares"),
    [
        (make_topology(1, 5), 1, ["0-4"]),
        (make_topology(1, 5), 2, ["0-1", "2-4"]),
        (make_topology(1, 5), 3, ["0", "1-2", "3-4"]),
        (make_topology(1, 5), 5, ["0", "1", "2", "3", "4"]),
        # Siblings are 0 and 4, 1 and 5, ...: they stay together while there are cores enough.
        (make_topology(1, 4, threads=2), 2, ["0-1,4-5", "2-3,6-7"]),
        (make_topology(1, 4, threads=2), 3, ["0,4", "1,5", "2-3,6-7"]),
        (make_topology(1, 4, threads=2), 4, ["0,4", "1,5", "2,6", "3,7"]),
        (make_topology(1, 4, threads=2), 5, ["0", "4", "1,5", "2,6", "3,7"]),
        (make_topology(1, 2, threads=2), 4, ["0", "2", "1", "3"]),
        # Neighbours by cache, not by number.
        (make_topology(1, 2, domains=2, threads=2), 2, ["0-1,4-5", "2-3,6-7"]),
    ],
)
def test_workers_of_one_group_share_its_cores(
    topology: Topology, count: int, shares: list[str]
) -> None:
    planned = plan(config(count=count), topology).slots

    assert [slot.group for slot in planned] == [0] * count
    assert [render_cpu_list(slot.cpus) for slot in planned] == shares


def test_siblings_that_were_parted_are_told_of() -> None:
    topology = make_topology(1, 4, threads=2)

    assert plan(config(count=4), topology).notes == ()
    (note,) = plan(config(count=8), topology).notes
    assert note.startswith("worker 0 and worker 1 share a physical core: its cpus are 0,4, and 3 ")
    (note,) = plan(config(("0-1", "2-3,4")), topology).notes
    assert note == "worker 0 and worker 1 share a physical core: its cpus are 0,4"


def test_an_odd_worker_goes_to_the_first_groups() -> None:
    planned = plan(config(count=5), make_topology(3, 4)).slots

    assert [slot.group for slot in planned] == [0, 0, 1, 1, 2]
    assert [slot.index for slot in planned] == [0, 1, 2, 3, 4]
    assert [slot.node for slot in planned] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("name", "gateway", "first"),
    [
        ("2 nodes", "0", "1-7"),
        ("2 nodes, SMT", "0,16", "1-7,17-23"),
        ("8 nodes, SMT of four", "0-3", "4-31"),
        ("1 node, SMT, offline cpus", "0,8", "1,3-4,6-7,9-12,15"),
    ],
)
def test_auto_keeps_one_core_for_the_gateway(name: str, gateway: str, first: str) -> None:
    planned = plan(config(cores="auto"), recorded_topology(name))

    assert render_cpu_list(planned.gateway) == gateway
    assert render_cpu_list(planned.slots[0].cpus) == first
    assert planned.notes == ()


def test_auto_takes_the_core_of_a_node_that_can_spare_it() -> None:
    """The first node has two cores that may be used, the second three."""
    topology = make_topology(2, 4).only({0, 1, 4, 5, 6})

    planned = plan(config(cores="auto"), topology)

    assert planned.gateway == (4,)
    assert [slot.cpus for slot in planned.slots] == [(0, 1), (5, 6)]


def test_auto_keeps_a_whole_core_for_each_gateway_process() -> None:
    topology = make_topology(2, 6, threads=2)

    planned = plan(config(cores="auto", processes=3), topology)

    assert len(planned.gateway) == 6
    assert len(topology.only(planned.gateway).cores) == 3
    assert not set(planned.gateway) & {cpu for slot in planned.slots for cpu in slot.cpus}
    assert plan(config(cores="auto", processes=5), topology).gateway == ()


@pytest.mark.parametrize("name", ["1 node", "1 node, SMT", "8 nodes, in a cpuset"])
def test_auto_takes_no_core_where_there_are_few_and_says_so(name: str) -> None:
    planned = plan(config(cores="auto"), recorded_topology(name))

    assert planned.gateway == ()
    assert planned.notes == (
        'the gateway has no core of its own with server.cores = "auto": no NUMA node has 3 '
        "usable physical cores or more",
    )


def test_auto_beside_named_groups_takes_a_core_that_they_leave() -> None:
    topology = make_topology(1, 4, threads=2)

    assert plan(config(("0-1,4,6",), cores="auto"), topology).gateway == (3, 7)
    left = plan(config(("0-3",), cores="auto"), topology)
    assert left.gateway == ()
    assert "workers.groups leaves no whole core free" in left.notes[0]


def test_cores_of_the_gateway_can_be_named() -> None:
    planned = plan(config(cores="4,0"), make_topology(1, 4, threads=2))

    assert planned.gateway == (0, 4)
    assert [slot.cpus for slot in planned.slots] == [(1, 2, 3, 5, 6, 7)]
    assert planned.notes == ()


def test_a_core_shared_with_the_gateway_is_told_of() -> None:
    planned = plan(config(cores="0"), make_topology(1, 4, threads=2))

    assert planned.notes == ("the gateway and worker 0 share a physical core: its cpus are 0,4",)


def test_a_worker_prefers_its_node_where_the_gateway_has_the_other() -> None:
    (slot,) = plan(config(cores="0-1"), make_topology(2, 2)).slots

    assert (slot.cpus, slot.node) == ((2, 3), 1)


@settings(deadline=None)
@given(
    st.data(),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["auto", "l3"]),
    st.sampled_from(["", "auto"]),
)
def test_every_cpu_is_in_one_place(  # noqa: PLR0917
    data: st.DataObject,
    nodes: int,
    domains: int,
    cores: int,
    threads: int,
    groups: str,
    gateway: str,
) -> None:
    """Any machine, any part of it that may be used, any number of workers that it can hold."""
    whole = make_topology(nodes, cores, domains=domains, threads=threads)
    allowed = data.draw(st.sets(st.sampled_from(sorted(whole.numbers)), min_size=1))
    topology = whole.only(allowed)
    rest = topology.only(allowed - set(plan(config(groups, cores=gateway), topology).gateway))
    parts = list((rest.nodes if groups == "auto" else rest.domains).values())
    most = min(len(cpus) for cpus in parts)
    count = len(parts) * data.draw(st.integers(1, most))

    planned = plan(config(groups, count, gateway), topology)

    held = [planned.gateway, *(slot.cpus for slot in planned.slots)]
    assert sorted(cpu for cpus in held for cpu in cpus) == sorted(allowed)
    assert len(planned.slots) == count
    assert all(slot.cpus for slot in planned.slots)
    assert all(len(topology.only(slot.cpus).nodes) == 1 for slot in planned.slots)
    for group, cpus in enumerate(parts):
        mine = [slot for slot in planned.slots if slot.group == group]
        assert {cpu for slot in mine for cpu in slot.cpus} == set(cpus)
        physical = topology.only(cpus).cores
        if len(mine) <= len(physical):
            assert all(any(set(core) <= set(slot.cpus) for slot in mine) for core in physical), (
                "siblings apart"
            )
            assert sum(slot.cores for slot in mine) == len(physical)
            assert max(p.cores for p in mine) - min(p.cores for p in mine) <= 1
        else:
            assert all(slot.cores == 1 for slot in mine), "parts of two cores"
    assert set(planned.gateway) in [set(), *map(set, topology.cores)]


REFUSED = [
    (config(("0-4",)), make_topology(1, 4), 'workers.groups[0] = "0-4"', "cpus [4]"),
    (config(("0-4",)), make_topology(1, 4), "may use 0-3", "may not use"),
    (config(("0", "9,10")), make_topology(1, 4), 'workers.groups[1] = "9,10"', "cpus [9, 10]"),
    (config(("0", "")), make_topology(1, 4), 'workers.groups[1] = ""', "an empty list"),
    (config(("0-2", "2-3")), make_topology(1, 4), 'groups[1] = "2-3"', "[2] are in another group"),
    (config(("all",)), make_topology(1, 4), 'groups[0] = "all"', "a cpu list such as 0-3,8"),
    (config(()), make_topology(1, 4), "workers.groups", "is an empty list"),
    (config(count=1), make_topology(2, 2), "workers.count = 1", "2 core groups"),
    (config("l3", 3), make_topology(2, 2, domains=2), "workers.count = 3", "4 core groups"),
    (config(count=5), make_topology(1, 4), "workers.count = 5", "5 workers on the 4 cpus of group"),
    (
        config(count=4),
        make_topology(2, 3).only({0, 3, 4, 5}),
        "count = 4",
        "2 workers on the 1 cpu",
    ),
    (config(cores="most"), make_topology(1, 4), 'server.cores = "most"', "`auto` or a cpu list"),
    (config(cores="4"), make_topology(1, 4), 'server.cores = "4"', "may not use the cpus [4]"),
    (config(cores=","), make_topology(1, 4), 'server.cores = ","', "of an empty list"),
    (config(cores="0-3"), make_topology(1, 4), 'server.cores = "0-3"', "leaves no cpu"),
    (config(("1-3",), cores="0-1"), make_topology(1, 4), 'cores = "0-1"', "[1] are in workers.gr"),
]


@pytest.mark.parametrize(
    ("config", "topology", "where", "why"), REFUSED, ids=[row[3] for row in REFUSED]
)
def test_a_plan_that_cannot_be_is_refused(
    config: Config, topology: Topology, where: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(where)) as caught:
        plan(config, topology)

    assert why in caught.value.message


def test_a_quorum_beyond_the_plan_is_refused() -> None:
    wanted = Config(workers=WorkersConfig(quorum=2), models=(ModelConfig(name="m", path="p"),))

    with pytest.raises(ConfigError, match=r"workers.quorum = 2 can never be met"):
        plan(wanted, make_topology(1, 4))


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
def test_more_threads_than_cpus_are_refused(
    accepted: dict[str, int], refused: dict[str, int]
) -> None:
    """Workers of two cores each; the threads within an operator and those of others add up."""
    topology = make_topology(1, 4)
    plan(config(count=2, **accepted), topology)

    with pytest.raises(ConfigError, match=r"models\[0\] \(`m`\)") as caught:
        plan(config(count=2, **refused), topology)

    assert "3 compute threads, and worker 0 has 2 cpus" in caught.value.message


def test_siblings_are_no_threads_unless_they_are_asked_for() -> None:
    """Two cores of two: two compute threads by themselves, with room for two more."""
    topology = make_topology(1, 2, threads=2)

    (slot,) = plan(config(inter_threads=3, parallel_execution=True), topology).slots
    assert (slot.cores, len(slot.cpus)) == (2, 4)
    plan(config(intra_threads=4), topology)
    with pytest.raises(ConfigError, match="5 compute threads, and worker 0 has 4 cpus"):
        plan(config(inter_threads=4, parallel_execution=True), topology)


def test_the_narrowest_worker_counts() -> None:
    """Five cores for two workers: the second has the third core, and the first decides."""
    with pytest.raises(ConfigError, match="worker 0 has 2 cpus"):
        plan(config(count=2, intra_threads=3), make_topology(1, 5))


def with_own(*own: dict[str, Any], count: int = 0, has_shared: bool = True) -> Config:
    """A model for the workers of all, and some with workers of their own."""
    shared = [ModelConfig(name="m", path="p", version="1")] if has_shared else []
    others = [
        ModelConfig(name=f"own{at}", path="p", version="1", backend="python", **settings)
        for at, settings in enumerate(own)
    ]
    return Config(workers=WorkersConfig(count=count), models=(*shared, *others))


def pools(slots: list[SlotPlan]) -> list[tuple[int, str, str]]:
    return [(each.index, each.pool, render_cpu_list(each.cpus)) for each in slots]


def test_workers_of_a_model_take_cores_from_the_end_and_the_others_share_the_rest() -> None:
    planned = plan(with_own({"workers": 2}, {"intra_threads": 2}), make_topology(1, 8))
    assert pools(planned.slots) == [
        (0, "", "0-3"),
        (1, "own0/1", "7"),
        (2, "own0/1", "6"),
        (3, "own1/1", "4-5"),
    ]
    assert planned.notes == ()


def test_workers_of_models_go_to_the_groups_in_turn() -> None:
    planned = plan(with_own({"workers": 3}), make_topology(2, 4))
    assert pools(planned.slots) == [
        (0, "", "0-1"),
        (1, "", "4-6"),
        (2, "own0/1", "3"),
        (3, "own0/1", "7"),
        (4, "own0/1", "2"),
    ]
    assert [each.node for each in planned.slots] == [0, 1, 0, 1, 0]


def test_too_few_cores_are_shared_and_said() -> None:
    planned = plan(with_own({"workers": 2}), make_topology(1, 2))
    assert pools(planned.slots) == [(0, "", "0"), (1, "own0/1", "1"), (2, "own0/1", "1")]
    assert planned.notes == (
        "a worker of model `own0` shares cores with others: group 0 has too few for all",
    )


def test_without_models_for_all_there_are_no_workers_of_all() -> None:
    planned = plan(with_own({}, has_shared=False), make_topology(1, 2))
    assert pools(planned.slots) == [(0, "own0/1", "1")]


def test_threads_beyond_the_cores_of_a_model_s_own_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`own0`.*make 3 compute threads, and worker 1 has 2"):
        plan(with_own({"intra_threads": 3}), make_topology(1, 2))
