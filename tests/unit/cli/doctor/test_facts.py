"""Facts read from trees of /proc and /sys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import machine_trees as trees

from iskander.cli.doctor.facts import IdleState, MachineFacts, read_facts

Read = Callable[..., MachineFacts]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def of(files: trees.Files, process: str = "self") -> MachineFacts:
        return read_facts(trees.write_tree(files, tmp_path), process)

    return of


def test_laptop(read: Read) -> None:
    facts = read(trees.LAPTOP)
    assert facts.cpus.total == 8 and len(facts.cpus.topology.nodes) == 1
    assert facts.cpus.governors == ("powersave",) and facts.cpus.driver == "intel_pstate"
    assert facts.cpus.preferences == ("balance_performance",)
    assert facts.cpus.idle_states[-1] == IdleState("C10", 890)
    assert facts.memory.swap == 8 << 30 and facts.memory.transparent == "never"
    assert facts.limits == (1_048_576, 8_388_608, 31_000)
    assert facts.kernel.version == (6, 8) and facts.kernel.clock_sources[0] == "tsc"
    assert facts.kernel.tcp_ranges == ((4096, 131_072, 6_291_456), (4096, 16_384, 4_194_304))
    assert facts.uid == 1000 and not facts.has_lock_capability
    assert dict(facts.environment)["HOME"] == "/home/ada"
    assert facts.cgroup.memory_bytes is None and facts.cgroup.cpus is None


def test_server_in_a_systemd_service(read: Read) -> None:
    facts = read(trees.SERVER)
    assert len(facts.cpus.topology.nodes) == 2 and facts.cpus.is_balancing
    # Disabled states are left out.
    assert [state.name for state in facts.cpus.idle_states] == ["POLL", "C1"]
    assert facts.limits == (65_536, None, None)
    assert facts.cgroup.path == trees.SERVICE and facts.cgroup.version == 2
    assert facts.cgroup.memory_bytes == 64 << 30
    assert (facts.cgroup.tasks, facts.cgroup.tasks_used) == (4915, 60)
    assert (facts.memory.huge_pages, facts.memory.huge_pages_free) == (512, 384)


def test_container_with_a_quota(read: Read) -> None:
    group = read(trees.CONTAINER).cgroup
    assert (group.cpus, group.throttled, group.throttled_us) == (2.0, 40, 2_500_000)
    assert (group.memory_bytes, group.tasks) == (512 << 20, 64)


def test_cgroup_v1_without_a_namespace(read: Read) -> None:
    """The mount's root is the group itself, as Docker mounts it."""
    group = read(trees.CGROUP_V1).cgroup
    assert group.version == 1 and group.path == trees.DOCKER
    assert (group.cpus, group.throttled, group.throttled_us) == (4.0, 7, 3000)
    assert group.memory_bytes == 4 << 30 and group.tasks is None


def test_the_limit_of_a_parent_group_applies(read: Read) -> None:
    files = trees.SERVER | {
        "sys/fs/cgroup/system.slice/memory.max": f"{8 << 30}",
        "sys/fs/cgroup/system.slice/cpu.max": "50000 100000",
    }
    group = read(files).cgroup
    assert group.memory_bytes == 8 << 30 and group.cpus == 0.5


def test_unlimited_memory_of_version_1_is_no_limit(read: Read) -> None:
    path = "sys/fs/cgroup/memory/memory.limit_in_bytes"
    assert read(trees.CGROUP_V1 | {path: "9223372036854771712"}).cgroup.memory_bytes is None


def test_another_process(read: Read) -> None:
    files = trees.LAPTOP | {
        "proc/7/status": "Uid:\t5\t5\t5\t5\nCapEff:\t0000000000004000\nCpus_allowed_list:\t2-3\n",
        "proc/7/limits": "Max open files            10      20      files\n",
    }
    facts = read(files, "7")
    assert (facts.uid, facts.has_lock_capability, facts.cpus.total) == (5, True, 2)
    assert facts.limits.files == 20 and facts.environment == ()


def test_an_empty_tree_has_empty_facts(read: Read) -> None:
    facts = read({})
    assert facts.cpus.total == 1 and facts.memory.total == 0 and facts.mounts == ()
