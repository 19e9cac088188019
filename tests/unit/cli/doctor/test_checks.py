"""Findings of the checks on machines of several kinds."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import machine_trees as trees

from iskander.cli.doctor.checks.subject import Subject
from iskander.cli.doctor.demand import demand_of
from iskander.cli.doctor.diagnosis import CHECKS, diagnose
from iskander.cli.doctor.facts import read_facts
from iskander.cli.doctor.finding import Finding, State
from iskander.cli.doctor.probes import Folder, Probes
from iskander.cli.doctor.runtimes import Gpu, Runtimes
from iskander.config.models import ModelConfig
from iskander.config.schema import Config

Diagnose = Callable[..., dict[str, Finding]]
MACHINES = {
    "laptop": trees.LAPTOP,
    "server": trees.SERVER,
    "container": trees.CONTAINER,
    "powersave": trees.POWERSAVE,
    "cgroup v1": trees.CGROUP_V1,
    "empty": {},
}
GOOD = Probes(
    runtime=Folder("/run/iskander", is_there=True, uid=1000, kind="tmpfs"),
    cache=Folder("/cache", is_there=True, uid=1000, kind="ext4", free_bytes=1 << 36),
    runtimes=Runtimes("1.27.0"),
)
MODEL = {"name": "m", "path": "/m", "version": "1"}


@pytest.fixture
def findings(tmp_path: Path) -> Diagnose:
    def of(files: trees.Files, probes: Probes = GOOD, **sections: Any) -> dict[str, Finding]:
        sections.setdefault("models", [MODEL])
        facts = read_facts(trees.write_tree(files, tmp_path))
        demand = demand_of(msgspec.convert(sections, Config), facts.cpus.topology)
        found = diagnose(Subject(facts, probes, demand))
        for each in found:
            assert_complete(each)
        return {each.check: each for each in found}

    return of


def assert_complete(finding: Finding) -> None:
    """A finding that is not ok says why it matters, how to correct it, and how to undo that."""
    assert finding.found and not re.search(r"[:,;] *$", finding.found), finding
    if finding.state != State.OK:
        assert finding.why.endswith(".") and finding.why.count(". ") <= 1, finding
        assert finding.fix and finding.undo, finding


@pytest.mark.parametrize("name", MACHINES)
def test_every_finding_is_complete(findings: Diagnose, name: str) -> None:
    """Of all checks, on machines that lack what the configuration asks for."""
    found = findings(
        MACHINES[name],
        arena={"huge_pages": True, "lock": True},
        server={"address": "0.0.0.0:50051"},
    )
    assert len(found) >= len(CHECKS)


def states(found: dict[str, Finding]) -> dict[str, str]:
    return {name: str(each.state) for name, each in found.items() if each.state != State.OK}


def test_laptop(findings: Diagnose) -> None:
    found = findings(trees.LAPTOP)
    assert states(found) == {
        "swap": "note", "governor": "note", "idle_states": "note",
    }  # fmt: skip
    assert "balance_performance" in found["governor"].found
    assert "performance | tee" in found["governor"].fix
    assert "balance_performance | tee" in found["governor"].undo
    assert "C10, exit latency 890 us" in found["idle_states"].found


def test_server(findings: Diagnose) -> None:
    found = findings(trees.SERVER, server={"cores": "auto"}, arena={"huge_pages": True})
    assert states(found) == {"numa": "warning"}
    assert found["numa"].fix == "sysctl -w kernel.numa_balancing=0"
    assert found["numa"].undo == "sysctl -w kernel.numa_balancing=1"
    # 256 MiB and two workers of 64 MiB.
    assert found["huge_pages"].found == "192 needed, 384 reserved and free"
    assert found["systemd"].found.startswith("iskander-gateway.service: notifications, watchdog 60")


def test_container(findings: Diagnose) -> None:
    found = findings(trees.CONTAINER)
    assert states(found) == {
        "memory": "warning", "cpu_quota": "warning", "threads": "problem", "backlog": "warning",
    }  # fmt: skip
    assert "2 cpus of time on 16 cpus; used up in 40 periods, 2.5 s lost" in (
        found["cpu_quota"].found
    )
    assert 'set workers.groups = ["0-1"]' in found["cpu_quota"].fix
    assert "61 left of the control group" in found["threads"].found


def test_a_quota_of_all_cpus_is_ok(findings: Diagnose) -> None:
    files = trees.CONTAINER | {"sys/fs/cgroup/cpu.max": "1600000 100000"}
    files["sys/fs/cgroup/cpu.stat"] = "nr_throttled 0"
    assert findings(files)["cpu_quota"].state == State.OK


def test_powersave(findings: Diagnose) -> None:
    found = findings(trees.POWERSAVE)
    assert states(found)["governor"] == "warning"
    assert found["governor"].undo.startswith("echo powersave | tee ")
    assert states(found)["clock"] == "warning"
    assert found["clock"].undo.startswith("echo hpet > ")
    assert states(found)["kernel"] == "problem" and "5.14 needed" in found["kernel"].found


def test_a_slow_clock_without_an_alternative(findings: Diagnose) -> None:
    files = trees.POWERSAVE | {f"{trees.CLOCK}/available_clocksource": "hpet acpi_pm\n"}
    found = findings(files)["clock"]
    assert found.state == State.WARNING and found.found == "hpet; available: hpet, acpi_pm"


def test_notes_of_the_plan(findings: Diagnose) -> None:
    found = findings(trees.LAPTOP, workers={"groups": "l3"})["placement"]
    assert found.state == State.NOTE and "the kernel reports no L3 cache" in found.found


def test_strict_accounting(findings: Diagnose) -> None:
    found = findings(trees.POWERSAVE)["overcommit"]
    assert found.state == State.NOTE and found.undo == "sysctl -w vm.overcommit_memory=2"
    found = findings(trees.POWERSAVE, arena={"input_bytes": 512 << 20})["overcommit"]
    assert found.state == State.PROBLEM and "384 MiB left, arenas 576 MiB" in found.found


def test_arenas_above_the_limit_are_a_problem(findings: Diagnose) -> None:
    found = findings(trees.CONTAINER, arena={"input_bytes": 1 << 30})["memory"]
    assert found.state == State.PROBLEM and "control group's limit is 512 MiB" in found.found
    assert found.fix.startswith("systemctl set-property iskander-gateway MemoryMax=")
    found = findings(trees.LAPTOP, arena={"input_bytes": 32 << 30})["memory"]
    assert found.state == State.PROBLEM and "lower arena.input_bytes" in found.fix


def test_processes_multiply_the_demand(findings: Diagnose) -> None:
    settings = {"arena": {"huge_pages": True}, "server": {"processes": 3}}
    found = findings(trees.LAPTOP, **settings)["huge_pages"]
    assert found.found.startswith("480 needed")
    assert found.fix == "sysctl -w vm.nr_hugepages=480" and found.undo.endswith("=0")


def test_huge_pages_count_the_used_ones(findings: Diagnose) -> None:
    """`nr_hugepages` is a total: pages in use stay in it."""
    settings = {"arena": {"huge_pages": True, "input_bytes": 1 << 30}}
    found = findings(trees.SERVER, **settings)["huge_pages"]
    assert found.found == "576 needed, 384 reserved and free"
    assert found.fix == "sysctl -w vm.nr_hugepages=704"


def test_locked_memory(findings: Diagnose) -> None:
    settings = {"arena": {"lock": True}}
    found = findings(trees.LAPTOP, **settings)["locked_memory"]
    assert found.state == State.WARNING and found.found == "320 MiB needed, 8 MiB allowed"
    assert findings(trees.SERVER, **settings)["locked_memory"].state == State.OK
    able = trees.LAPTOP["proc/self/status"].replace("0000000000000000", "0000000000004000")
    found = findings(trees.LAPTOP | {"proc/self/status": able}, **settings)["locked_memory"]
    assert found.state == State.OK and "any amount" in found.found


def test_open_files(findings: Diagnose) -> None:
    text = trees.LAPTOP["proc/self/limits"].replace("1048576", "4096")
    found = findings(trees.LAPTOP | {"proc/self/limits": text})["open_files"]
    assert found.state == State.WARNING and "about 3,840 connections" in found.found
    assert "LimitNOFILE=10384" in found.fix


def test_tcp_buffers_matter_for_other_machines_only(findings: Diagnose) -> None:
    files = trees.LAPTOP | {"proc/sys/net/ipv4/tcp_rmem": "4096 87380 212992"}
    assert findings(files)["tcp_buffers"].state == State.OK
    found = findings(files, server={"address": "0.0.0.0:50051"})["tcp_buffers"]
    assert found.state == State.NOTE
    assert found.undo.startswith("sysctl -w net.ipv4.tcp_rmem='4096 87380 212992' && ")


def test_denied_system_calls(findings: Diagnose) -> None:
    bad = GOOD._replace(segment="denied", pidfd="denied", memory_policy="mbind was refused")
    found = findings(trees.SERVER, bad)
    assert found["memfd"].state == found["pidfd"].state == State.PROBLEM
    assert found["memory_policy"].state == State.WARNING
    # A memory policy has no effect on one node.
    assert "memory_policy" not in findings(trees.LAPTOP | trees.CONTAINER, bad)


@pytest.mark.parametrize(
    ("folder", "state", "words"),
    [
        ({"is_there": False}, "ok", "created at startup"),
        ({"uid": 0}, "problem", "the process has user 1000"),
        ({"mode": 0o777}, "warning", "mode 0777"),
    ],
)
def test_runtime_directory(
    findings: Diagnose, folder: dict[str, Any], state: str, words: str
) -> None:
    probes = GOOD._replace(runtime=GOOD.runtime._replace(**folder))
    found = findings(trees.LAPTOP, probes)["runtime_directory"]
    assert found.state == state and words in found.found


@pytest.mark.parametrize(
    ("folder", "state"),
    [
        ({"kind": "nfs4"}, "warning"),
        ({"kind": "fuse.sshfs"}, "warning"),
        ({"kind": "tmpfs"}, "note"),
        ({"mode": 0o775}, "warning"),
        ({"path": ""}, "warning"),
    ],
)
def test_cache(findings: Diagnose, folder: dict[str, Any], state: str) -> None:
    probes = GOOD._replace(cache=GOOD.cache._replace(**folder))
    assert findings(trees.LAPTOP, probes)["cache"].state == state
    unused = findings(trees.LAPTOP, probes, loading={"share_weights": False})["cache"]
    assert unused.state == State.OK


def test_execution_providers(findings: Diagnose) -> None:
    models = [MODEL | {"execution_providers": ["cuda", "cpu"]}]
    missing = Runtimes("1.27.0", (("cuda", "libcublasLt.so.12: cannot open"),))
    found = findings(trees.SERVER, GOOD._replace(runtimes=missing), models=models)
    assert found["providers"].state == State.PROBLEM and "libcublasLt" in found["providers"].found
    assert "iskander[gpu]" in found["providers"].fix
    assert found["gpus"].state == State.NOTE
    missing = Runtimes("1.27.0", (("tensorrt", "libnvinfer.so.10: cannot open"),))
    found = findings(trees.SERVER, GOOD._replace(runtimes=missing), models=models)
    assert "tensorrt-cu13-libs" in found["providers"].fix
    there = Runtimes("1.27.0", (("cuda", ""),), "570.1", (Gpu("H100", 80 << 30),))
    found = findings(trees.SERVER, GOOD._replace(runtimes=there), models=models)
    assert found["providers"].state == State.OK
    assert found["gpus"].found == "H100 with 81,920 MiB; driver 570.1"


@pytest.mark.parametrize(
    ("version", "state"), [("", "problem"), ("1.9.1", "problem"), ("2.0", "ok")]
)
def test_runtime_version(findings: Diagnose, version: str, state: str) -> None:
    probes = GOOD._replace(runtimes=Runtimes(version))
    assert findings(trees.LAPTOP, probes)["onnx_runtime"].state == state


def test_providers_of_all_models_are_demanded() -> None:
    from support.sysfs import make_topology

    models = tuple(
        ModelConfig(name=f"m{index}", path="/m", version="1", execution_providers=providers)
        for index, providers in enumerate([("cuda", "cpu"), ("cpu",), ("tensorrt",)])
    )
    config = msgspec.structs.replace(Config(), models=models)
    assert demand_of(config, make_topology(1, 4)).providers == ["cuda", "cpu", "tensorrt"]
