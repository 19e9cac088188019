"""CPU affinity of the processes, and a start in a sandbox that denies system calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support import models, sandbox
from support.processes import BIN, Gateway, eventually, running

CPUS = sorted(os.sched_getaffinity(0))
SEVERAL_CPUS = pytest.mark.skipif(len(CPUS) < 2, reason="one cpu")


def served(folder: Path) -> list[dict[str, Any]]:
    return [{"name": "ids", "path": str(models.row_ids(folder / "ids"))}]


def affinities(pid: int) -> set[frozenset[int]]:
    """CPU sets of all threads of a process."""
    threads = map(int, os.listdir(f"/proc/{pid}/task"))
    return {frozenset(os.sched_getaffinity(thread)) for thread in threads}


def require_results(gateway: Gateway) -> None:
    with gateway.client() as client:
        assert client.score("ids", pa.record_batch({"x": [1, 2]}))["y"].to_pylist() == [4, 7]


@SEVERAL_CPUS
def test_gateway_and_workers_share_no_cpu(tmp_path: Path) -> None:
    """Checks all threads; the gateway's affinity does not limit its children."""
    server = {"cores": str(CPUS[0])}
    with running(tmp_path, served(tmp_path), server=server, workers={"count": 1}) as gateway:
        require_results(gateway)
        (worker,) = gateway.stats()["workers"]
        assert affinities(gateway.pid) == {frozenset(CPUS[:1])}
        assert affinities(worker["pid"]) == {frozenset(CPUS[1:])}
        assert worker["cpus"] == CPUS[1:]
        assert worker["notices"] == []
        before = gateway.kill_worker()
        eventually(lambda: gateway.worker_pids() not in ([], [before]), what="the new worker")
        assert affinities(gateway.worker_pids()[0]) == {frozenset(CPUS[1:])}
    assert f"runs on the cpus {CPUS[0]}, the workers on others" in gateway.text()


@SEVERAL_CPUS
def test_placement_plan_uses_only_allowed_cpus(tmp_path: Path) -> None:
    """Started on the last cpu, as by a service manager or in a container."""
    prefix = ("taskset", "-c", str(CPUS[-1]))
    with running(tmp_path, served(tmp_path), prefix=prefix) as gateway:
        (worker,) = gateway.stats()["workers"]
        assert worker["cpus"] == CPUS[-1:]
        assert affinities(worker["pid"]) == affinities(gateway.pid) == {frozenset(CPUS[-1:])}


def test_server_starts_where_system_calls_are_denied(tmp_path: Path) -> None:
    """Log and stats name each denied call; results are unaffected."""
    prefix = (sys.executable, sandbox.__file__, "--lock", "65536")
    prefix += ("--refuse", "mbind", "--refuse", "set_mempolicy", "--refuse", "sched_setaffinity")
    server = {"cores": str(CPUS[0])} if len(CPUS) > 1 else {}
    arena = {"huge_pages": True, "lock": True}
    with running(tmp_path, served(tmp_path), prefix=prefix, server=server, arena=arena) as gateway:
        require_results(gateway)
        stats = gateway.stats()
        (worker,) = stats["workers"]
        assert worker["notices"][-1].startswith("not pinned to the cpus")
        assert any(text.startswith("output arena: not locked") for text in worker["notices"])
        assert any(text.startswith("not locked") for text in stats["input_arena"]["notices"])
        assert not worker["output_locked"] and not stats["input_arena"]["locked"]
        assert frozenset(CPUS) in affinities(worker["pid"])
    log = gateway.text()
    for words in (
        "input arena: 24 MiB",
        "input arena: not locked",
        "output arena of worker 0: not locked",
        "worker 0: not pinned to the cpus",
    ):
        assert words in log, words
    assert not server or f"not pinned to the cpus {CPUS[0]}: Operation not permitted" in log


def test_check_prints_the_placement_plan_and_its_notes() -> None:
    quickstart = models.ROOT / "configs" / "quickstart.toml"
    changes = ("server.cores=auto", "workers.groups=l3", "arena.huge_pages=true", "arena.lock=true")
    command = [str(BIN / "iskander"), "check", str(quickstart)]
    for change in changes:
        command += ["--set", change]
    one_cpu = ["taskset", "-c", str(CPUS[0])]
    text = subprocess.run(
        [*one_cpu, *command], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    lines = [line.split() for line in text.splitlines()]
    assert ["process", "group", "cpus", "cores", "node", "L3"] in lines
    assert ["gateway", "-", "any", "-", "-", "-"] in lines
    assert [line[:5] for line in lines if line[:1] == ["worker"]] == [
        ["worker", "0", "0", str(CPUS[0]), "1"]
    ]
    assert 'note: the gateway has no core of its own with server.cores = "auto": no NUMA' in text
    assert "huge pages: 160 needed, " in text
