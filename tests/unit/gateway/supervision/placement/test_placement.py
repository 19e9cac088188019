"""Placement plan: cpus of each worker and of the gateway, and notes."""

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
from iskander.gateway.supervision.placement.plan import plan
from iskander.gateway.supervision.placement.topology import Topology, render_cpu_list
from iskander.gateway.supervision.worker import SlotPlan


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
    """Returns group, cpus, physical cores and node of each slot."""
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
def test_auto_plans_a_worker_for_each_node(
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
def test_l3_plans_a_worker_for_each_domain(
    name: str, slots: list[tuple[int, str, int, int | None]]
) -> None:
    planned = plan(config("l3"), recorded_topology(name))

    assert rows(planned.slots) == slots
    assert [slot.domains for slot in planned.slots] == [(each,) for each in range(len(slots))]
    assert planned.notes == ()


def test_l3_without_cache_information_uses_nodes_with_a_note() -> None:
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
def test_groups_can_be_listed(
    groups: tuple[str, ...], topology: Topology, slots: list[tuple[str, int | None]]
) -> None:
    planned = plan(config(groups), topology).slots

    assert [(render_cpu_list(slot.cpus), slot.node) for slot in planned] == slots
    assert [slot.group for slot in planned] == list(range(len(groups)))


def test_group_over_two_nodes_has_a_note() -> None:
    (note,) = plan(config(("0", "1-2")), make_topology(2, 2)).notes

    assert note.startswith("group 1 spans the NUMA nodes 0, 1:")


@pytest.mark.parametrize(
    ("topology", "count", "shares"),
    [
        (make_topology(1, 5), 1, ["0-4"]),
        (make_topology(1, 5), 2, ["0-1", "2-4"]),
        (make_topology(1, 5), 3, ["0", "1-2", "3-4"]),
        (make_topology(1, 5), 5, ["0", "1", "2", "3", "4"]),
        # SMT siblings (0 and 4, 1 and 5, ...) stay together while there are enough cores.
        (make_topology(1, 4, threads=2), 2, ["0-1,4-5", "2-3,6-7"]),
        (make_topology(1, 4, threads=2), 3, ["0,4", "1,5", "2-3,6-7"]),
        (make_topology(1, 4, threads=2), 4, ["0,4", "1,5", "2,6", "3,7"]),
        (make_topology(1, 4, threads=2), 5, ["0", "4", "1,5", "2,6", "3,7"]),
        (make_topology(1, 2, threads=2), 4, ["0", "2", "1", "3"]),
        # Cores of one L3 domain stay together.
        (make_topology(1, 2, domains=2, threads=2), 2, ["0-1,4-5", "2-3,6-7"]),
    ],
)
def test_workers_of_one_group_share_its_cores(
    topology: Topology, count: int, shares: list[str]
) -> None:
    planned = plan(config(count=count), topology).slots

    assert [slot.group for slot in planned] == [0] * count
    assert [render_cpu_list(slot.cpus) for slot in planned] == shares


def test_split_smt_siblings_have_a_note() -> None:
    topology = make_topology(1, 4, threads=2)

    assert plan(config(count=4), topology).notes == ()
    (note,) = plan(config(count=8), topology).notes
    assert note.startswith("worker 0 and worker 1 share a physical core: its cpus are 0,4, and 3 ")
    (note,) = plan(config(("0-1", "2-3,4")), topology).notes
    assert note == "worker 0 and worker 1 share a physical core: its cpus are 0,4"


def test_extra_workers_are_in_the_first_groups() -> None:
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
def test_auto_reserves_one_core_for_the_gateway(name: str, gateway: str, first: str) -> None:
    planned = plan(config(cores="auto"), recorded_topology(name))

    assert render_cpu_list(planned.gateway) == gateway
    assert render_cpu_list(planned.slots[0].cpus) == first
    assert planned.notes == ()


def test_auto_reserves_a_core_on_a_node_with_enough_cores() -> None:
    """The first node has two usable cores, the second three."""
    topology = make_topology(2, 4).only({0, 1, 4, 5, 6})

    planned = plan(config(cores="auto"), topology)

    assert planned.gateway == (4,)
    assert [slot.cpus for slot in planned.slots] == [(0, 1), (5, 6)]


def test_auto_reserves_a_core_for_each_gateway_process() -> None:
    topology = make_topology(2, 6, threads=2)

    planned = plan(config(cores="auto", processes=3), topology)

    assert len(planned.gateway) == 6
    assert len(topology.only(planned.gateway).cores) == 3
    assert not set(planned.gateway) & {cpu for slot in planned.slots for cpu in slot.cpus}
    assert plan(config(cores="auto", processes=5), topology).gateway == ()


@pytest.mark.parametrize("name", ["1 node", "1 node, SMT", "8 nodes, in a cpuset"])
def test_auto_reserves_no_core_on_a_small_machine_with_a_note(name: str) -> None:
    planned = plan(config(cores="auto"), recorded_topology(name))

    assert planned.gateway == ()
    assert planned.notes == (
        'the gateway has no core of its own with server.cores = "auto": no NUMA node has 3 '
        "usable physical cores or more",
    )


def test_auto_with_listed_groups_reserves_an_unused_core() -> None:
    topology = make_topology(1, 4, threads=2)

    assert plan(config(("0-1,4,6",), cores="auto"), topology).gateway == (3, 7)
    left = plan(config(("0-3",), cores="auto"), topology)
    assert left.gateway == ()
    assert "workers.groups leaves no whole core free" in left.notes[0]


def test_gateway_cores_can_be_listed() -> None:
    planned = plan(config(cores="4,0"), make_topology(1, 4, threads=2))

    assert planned.gateway == (0, 4)
    assert [slot.cpus for slot in planned.slots] == [(1, 2, 3, 5, 6, 7)]
    assert planned.notes == ()


def test_core_shared_with_the_gateway_has_a_note() -> None:
    planned = plan(config(cores="0"), make_topology(1, 4, threads=2))

    assert planned.notes == ("the gateway and worker 0 share a physical core: its cpus are 0,4",)


def test_worker_has_its_node_when_the_gateway_has_the_other() -> None:
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
def test_every_allowed_cpu_is_assigned_once(  # noqa: PLR0917
    data: st.DataObject,
    nodes: int,
    domains: int,
    cores: int,
    threads: int,
    groups: str,
    gateway: str,
) -> None:
    """Any machine, any allowed cpus, any number of workers that fits."""
    machine = make_topology(nodes, cores, domains=domains, threads=threads)
    allowed = data.draw(st.sets(st.sampled_from(sorted(machine.numbers)), min_size=1))
    topology = machine.only(allowed)
    rest = topology.only(allowed - set(plan(config(groups, cores=gateway), topology).gateway))
    parts = list((rest.nodes if groups == "auto" else rest.domains).values())
    most = min(len(cpus) for cpus in parts)
    count = len(parts) * data.draw(st.integers(1, most))

    planned = plan(config(groups, count, gateway), topology)

    assigned = [planned.gateway, *(slot.cpus for slot in planned.slots)]
    assert sorted(cpu for cpus in assigned for cpu in cpus) == sorted(allowed)
    assert len(planned.slots) == count
    assert all(slot.cpus for slot in planned.slots)
    assert all(len(topology.only(slot.cpus).nodes) == 1 for slot in planned.slots)
    for group, cpus in enumerate(parts):
        group_slots = [slot for slot in planned.slots if slot.group == group]
        assert {cpu for slot in group_slots for cpu in slot.cpus} == set(cpus)
        physical = topology.only(cpus).cores
        if len(group_slots) <= len(physical):
            assert all(
                any(set(core) <= set(slot.cpus) for slot in group_slots) for core in physical
            ), "split siblings"
            assert sum(slot.cores for slot in group_slots) == len(physical)
            assert max(p.cores for p in group_slots) - min(p.cores for p in group_slots) <= 1
        else:
            assert all(slot.cores == 1 for slot in group_slots), "cpus of two cores"
    assert set(planned.gateway) in [set(), *map(set, topology.cores)]


INVALID = [
    (config(("0-4",)), make_topology(1, 4), 'workers.groups[0] = "0-4"', "cpus [4]"),
    (config(("0-4",)), make_topology(1, 4), "may use 0-3", "may not use"),
    (config(("0", "9,10")), make_topology(1, 4), 'workers.groups[1] = "9,10"', "cpus [9, 10]"),
    (config(("0", "")), make_topology(1, 4), 'workers.groups[1] = ""', "the cpu list is empty"),
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
    (config(cores=","), make_topology(1, 4), 'server.cores = ","', "the cpu list is empty"),
    (config(cores="0-3"), make_topology(1, 4), 'server.cores = "0-3"', "leaves no cpu"),
    (config(("1-3",), cores="0-1"), make_topology(1, 4), 'cores = "0-1"', "[1] are in workers.gr"),
]


@pytest.mark.parametrize(
    ("config", "topology", "setting", "reason"), INVALID, ids=[row[3] for row in INVALID]
)
def test_impossible_plan_is_rejected(
    config: Config, topology: Topology, setting: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(setting)) as caught:
        plan(config, topology)

    assert reason in caught.value.message


def test_quorum_above_the_worker_count_is_rejected() -> None:
    with_quorum = Config(workers=WorkersConfig(quorum=2), models=(ModelConfig(name="m", path="p"),))

    with pytest.raises(ConfigError, match=r"workers.quorum = 2 can never be met"):
        plan(with_quorum, make_topology(1, 4))


@pytest.mark.parametrize(
    ("accepted", "rejected"),
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
def test_more_threads_than_cpus_are_rejected(
    accepted: dict[str, int], rejected: dict[str, int]
) -> None:
    """Each worker has two cores. Intra-op and inter-op threads add up."""
    topology = make_topology(1, 4)
    plan(config(count=2, **accepted), topology)

    with pytest.raises(ConfigError, match=r"models\[0\] \(`m`\)") as caught:
        plan(config(count=2, **rejected), topology)

    assert "3 compute threads, and worker 0 has 2 cpus" in caught.value.message


def test_default_threads_are_one_for_each_core() -> None:
    """Two cores with two cpus each: two compute threads by default, four at most."""
    topology = make_topology(1, 2, threads=2)

    (slot,) = plan(config(inter_threads=3, parallel_execution=True), topology).slots
    assert (slot.cores, len(slot.cpus)) == (2, 4)
    plan(config(intra_threads=4), topology)
    with pytest.raises(ConfigError, match="5 compute threads, and worker 0 has 4 cpus"):
        plan(config(inter_threads=4, parallel_execution=True), topology)


def test_smallest_worker_limits_the_threads() -> None:
    """Five cores for two workers: the first has two, the second three."""
    with pytest.raises(ConfigError, match="worker 0 has 2 cpus"):
        plan(config(count=2, intra_threads=3), make_topology(1, 5))


def config_with_own_workers(
    *own: dict[str, Any], count: int = 0, has_shared: bool = True
) -> Config:
    """A model for the shared workers, and models with workers of their own."""
    shared = [ModelConfig(name="m", path="p", version="1")] if has_shared else []
    others = [
        ModelConfig(name=f"own{at}", path="p", version="1", backend="python", **settings)
        for at, settings in enumerate(own)
    ]
    return Config(workers=WorkersConfig(count=count), models=(*shared, *others))


def pools(slots: list[SlotPlan]) -> list[tuple[int, str, str]]:
    return [(each.index, each.pool, render_cpu_list(each.cpus)) for each in slots]


def test_own_workers_take_the_last_cores_and_shared_workers_the_rest() -> None:
    planned = plan(
        config_with_own_workers({"workers": 2}, {"intra_threads": 2}), make_topology(1, 8)
    )
    assert pools(planned.slots) == [
        (0, "", "0-3"),
        (1, "own0/1", "7"),
        (2, "own0/1", "6"),
        (3, "own1/1", "4-5"),
    ]
    assert planned.notes == ()


def test_own_workers_are_distributed_over_groups_in_turn() -> None:
    planned = plan(config_with_own_workers({"workers": 3}), make_topology(2, 4))
    assert pools(planned.slots) == [
        (0, "", "0-1"),
        (1, "", "4-6"),
        (2, "own0/1", "3"),
        (3, "own0/1", "7"),
        (4, "own0/1", "2"),
    ]
    assert [each.node for each in planned.slots] == [0, 1, 0, 1, 0]


def test_too_few_cores_are_shared_with_a_note() -> None:
    planned = plan(config_with_own_workers({"workers": 2}), make_topology(1, 2))
    assert pools(planned.slots) == [(0, "", "0"), (1, "own0/1", "1"), (2, "own0/1", "1")]
    assert planned.notes == (
        "a worker of model `own0` shares cores with others: group 0 has too few for all",
    )


def test_no_shared_workers_without_shared_models() -> None:
    planned = plan(config_with_own_workers({}, has_shared=False), make_topology(1, 2))
    assert pools(planned.slots) == [(0, "own0/1", "1")]


def test_more_threads_than_cpus_of_own_workers_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"`own0`.*make 3 compute threads, and worker 1 has 2"):
        plan(config_with_own_workers({"intra_threads": 3}), make_topology(1, 2))


def test_workers_of_remote_models_take_no_cores() -> None:
    far = ModelConfig(name="far", path="p", version="1", backend="remote", workers=3)
    found = config_with_own_workers({"workers": 1})
    without = plan(found, make_topology(2, 4))
    planned = plan(Config(models=(*found.models, far)), make_topology(2, 4))
    assert pools(planned.slots[:-3]) == pools(without.slots)
    assert pools(planned.slots[-3:]) == [
        (3, "far/1", "0-3"),
        (4, "far/1", "4-7"),
        (5, "far/1", "0-3"),
    ]
    assert planned.notes == without.notes == ()


def test_many_workers_of_a_remote_model_alone() -> None:
    far = ModelConfig(name="far", path="p", version="1", backend="remote", workers=9)
    planned = plan(Config(models=(far,)), make_topology(1, 2))
    assert pools(planned.slots) == [(at, "far/1", "0-1") for at in range(9)]
    assert planned.notes == ()
