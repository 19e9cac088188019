"""Dedicated workers of one model: placement, replacement, reattachment, manual start."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support import models
from support.processes import BIN, Gateway, WorkerProcess, eventually, running
from support.python_models import entry

from iskander.errors import IskanderError

PLAIN = "class Model(Base): pass\n"
BATCH = pa.record_batch({"x": [1, 2, 3]})
SEVERAL = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one cpu")


def served(folder: Path, source: str = PLAIN, **settings: Any) -> list[dict[str, Any]]:
    ids = {"name": "ids", "path": str(models.row_ids(folder / "ids")), "intra_threads": 1}
    return [ids, entry(folder / "own", source, **settings)]


def are_served(gateway: Gateway) -> bool:
    """Returns whether both models return results."""
    try:
        with gateway.client() as client:
            return all(
                client.score(name, BATCH)["y"].to_pylist() == [4, 7, 10] for name in ("ids", "own")
            )
    except (IskanderError, pa.ArrowException):
        return False


def pids(gateway: Gateway) -> dict[str, int]:
    return {worker["pool"]: worker["pid"] for worker in gateway.stats()["workers"]}


def check(gateway: Gateway) -> subprocess.CompletedProcess[str]:
    command = [BIN / "iskander", "check", gateway.config]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
@SEVERAL
def test_check_prints_the_placement_that_workers_have(tmp_path: Path) -> None:
    with running(tmp_path, served(tmp_path)) as gateway:
        planned = check(gateway)
        assert planned.returncode == 0, planned.stderr
        rows = re.findall(r"^(worker \d+(?: of \S+)?) +\d+ +(\S+)", planned.stdout, re.MULTILINE)
        assert [name for name, _ in rows] == ["worker 0", "worker 1 of own/1"]
        for (_, cpus), worker in zip(rows, gateway.stats()["workers"], strict=True):
            affinity = os.sched_getaffinity(worker["pid"])
            assert affinity == set(worker["cpus"])
            assert min(affinity) == int(re.split("[-,]", cpus)[0])
        first, second = (set(worker["cpus"]) for worker in gateway.stats()["workers"])
        assert not first & second


def test_check_ignores_output_of_the_model(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, served(tmp_path, PLAIN + "print('hello')\n"))
    checked = check(gateway)
    assert checked.returncode == 0, checked.stderr
    assert "hello" not in checked.stdout
    assert re.search(r"^own/1 +Python ", checked.stdout, re.MULTILINE)


def test_check_reports_the_load_error(tmp_path: Path) -> None:
    checked = check(Gateway(tmp_path, served(tmp_path, "class Other(Base): pass\n")))
    assert checked.returncode == 78
    assert "model `own/1`: no class `Model` in `model.py`" in checked.stderr


@pytest.mark.over_zmq
def test_killed_dedicated_worker_is_replaced_and_others_stay(tmp_path: Path) -> None:
    with running(tmp_path, served(tmp_path)) as gateway:
        before = pids(gateway)
        gateway.kill_worker(1)
        eventually(lambda: pids(gateway)["own/1"] not in (0, before["own/1"]), what="a new worker")
        eventually(lambda: are_served(gateway), what="results of both models")
        assert pids(gateway)[""] == before[""]


@pytest.mark.slow
def test_dedicated_worker_is_recycled_after_its_batches(tmp_path: Path) -> None:
    with running(tmp_path, served(tmp_path), workers={"recycle_batches": 10}) as gateway:
        before = pids(gateway)["own/1"]
        with gateway.client() as client:
            for _ in range(12):
                assert client.score("own", BATCH)["y"].to_pylist() == [4, 7, 10]
        eventually(lambda: pids(gateway)["own/1"] not in (0, before), what="a new worker")


@pytest.mark.over_zmq
def test_workers_reattach_to_their_slots_after_gateway_death(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, served(tmp_path), workers={"reattach_s": 20.0})
    try:
        gateway.start()
        gateway.wait_full()
        before = pids(gateway)
        assert gateway.process is not None
        gateway.process.kill()
        gateway.process.wait()
        gateway.start()
        gateway.wait_full()
        assert pids(gateway) == before
        assert are_served(gateway)
        assert gateway.stop() == 0
    finally:
        gateway.end()


@pytest.mark.over_zmq
@pytest.mark.slow
def test_several_gateway_processes_share_dedicated_workers(tmp_path: Path) -> None:
    with running(tmp_path, served(tmp_path), server={"processes": 2}) as gateway:
        pids_by_process = {}
        attempts = iter(range(200))
        while len(pids_by_process) < 2 and next(attempts, None) is not None:
            stats = gateway.stats()
            pids_by_process[stats["process"]] = stats["workers"][1]["pid"]
        assert len(set(pids_by_process.values())) == 1
        for _ in range(10):
            assert are_served(gateway)


@pytest.mark.slow
def test_manually_started_worker_gets_a_slot_of_its_pool(tmp_path: Path) -> None:
    """A shared worker does not get the slot of a dedicated worker."""
    with running(tmp_path, served(tmp_path), workers={"spawn": False}) as gateway:
        shared = WorkerProcess(gateway.attach_socket, tmp_path)
        other = WorkerProcess(gateway.attach_socket, tmp_path, "--wait-s", "5")
        own = WorkerProcess(gateway.attach_socket, tmp_path, "--pool", "own/1")
        try:
            eventually(lambda: are_served(gateway), what="results of both models")
            rejected = eventually(
                lambda: [each for each in (shared, other) if each.process.poll() is not None],
                what="the rejection of one worker",
            )
            assert [each.process.returncode for each in rejected] == [76]
            assert pids(gateway)["own/1"] == own.pid
        finally:
            for worker in (shared, other, own):
                worker.end()
