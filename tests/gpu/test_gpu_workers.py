"""A gateway with a real card: inventory, placement, visibility, budgets, and readings of NVML."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support import models, python_models
from support.processes import Gateway, eventually, running

from iskander.gateway.supervision.gpus.device import Gpu
from iskander.gateway.supervision.gpus.query import ask_nvml, read_devices

MIB, GIB = 1 << 20, 1 << 30
BATCH = pa.record_batch({"x": [1, 2, 3]})
CUDA = {"execution_providers": ["cuda", "cpu"]}


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    """The first device that this process may use."""
    report = ask_nvml()
    if report.error:
        pytest.skip(f"NVML: {report.error}")
    return read_devices().gpus[0]


def served(folder: Path, name: str, **fields: Any) -> dict[str, Any]:
    path = str(models.row_ids(folder / name))
    return {"name": name, "path": path, "intra_threads": 1} | fields


def environment_of(pid: int) -> dict[str, str]:
    raw = Path(f"/proc/{pid}/environ").read_bytes().decode()
    return dict(entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)


def opens_gpu(pid: int) -> bool:
    """Whether a process has a descriptor of the driver."""
    links = (os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink())
    return any(link.startswith("/dev/nvidia") for link in links)


def scored(gateway: Gateway, name: str) -> list[int]:
    with gateway.client() as client:
        return list(client.score(name, BATCH)["y"].to_pylist())


def test_inventory_agrees_with_nvidia_smi(gpu: Gpu) -> None:
    command = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id,memory.total"]
    done = subprocess.run(
        [*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip("nvidia-smi does not run")
    lines = [line.split(", ") for line in done.stdout.splitlines()]
    found = {line[1]: line for line in lines}
    index, _, address, memory_mib = found[gpu.parent or gpu.uuid]
    assert gpu.index == int(index) and gpu.pci.endswith(address.lower()[-10:])
    if not gpu.parent:
        assert abs(gpu.memory_bytes - int(memory_mib) * MIB) < MIB
    assert gpu.cpus and gpu.name
    if Path("/proc/driver/nvidia/gpus").exists():
        assert gpu.minor is not None and Path(f"/dev/nvidia{gpu.minor}").exists()


def test_models_are_on_workers_that_see_one_card_or_none(tmp_path: Path, gpu: Gpu) -> None:
    entries = [
        served(tmp_path, "card", gpu_memory_bytes=GIB, **CUDA),
        served(tmp_path, "both", gpu_memory_bytes=GIB, placement="any", **CUDA),
        served(tmp_path, "plain"),
    ]
    groups = ["auto", f"gpu:{gpu.uuid}"]
    with running(tmp_path, entries, workers={"groups": groups}) as gateway:
        workers = gateway.stats()["workers"]
        (own,) = (worker for worker in workers if worker["gpu"])
        others = [worker for worker in workers if not worker["gpu"]]
        assert others and own["gpu"] == gpu.number
        assert set(own["cpus"]) == os.sched_getaffinity(own["pid"])
        assert not set(own["cpus"]) & {cpu for worker in others for cpu in worker["cpus"]}
        variables = environment_of(own["pid"])
        assert variables["CUDA_VISIBLE_DEVICES"] == gpu.uuid
        assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert {environment_of(w["pid"])["CUDA_VISIBLE_DEVICES"] for w in others} == {""}
        for name in ("card", "both", "plain"):
            assert scored(gateway, name) == [4, 7, 10]
        lanes = gateway.stats()["lanes"]
        count = {name.split("/")[0]: lane["workers"] for name, lane in lanes.items()}
        assert count == {"card": 1, "both": 1 + len(others), "plain": len(others)}
        assert opens_gpu(own["pid"])
        assert not any(opens_gpu(pid) for pid in (gateway.pid, *(w["pid"] for w in others)))


def test_readings_of_nvml_are_in_stats_and_metrics(tmp_path: Path, gpu: Gpu) -> None:
    entries = [served(tmp_path, "card", gpu_memory_bytes=GIB, **CUDA)]
    with running(tmp_path, entries, workers={"groups": [f"gpu:{gpu.number}"]}) as gateway:
        assert scored(gateway, "card") == [4, 7, 10]

        def card() -> dict[str, Any] | None:
            (found,) = gateway.stats()["gpus"]
            return found if found["memory_used_bytes"] else None

        found = eventually(card, what="a reading")
        assert found["uuid"] == gpu.uuid and found["state"] in ("ok", "throttled")
        assert found["memory_used_bytes"] > 100 * MIB  # The context of CUDA.
        assert found["temperature_c"] > 0
        if not gpu.parent:
            assert 0 <= found["utilization"] <= 1
        address = gateway.stats()["admin_address"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            page = response.read().decode()
        label = f'iskander_gpu_memory_total_bytes{{gpu="{gpu.number}",uuid="{gpu.uuid}"}}'
        assert label in page
        assert f'iskander_gpu_reading_age_seconds{{gpu="{gpu.number}"' in page


def test_model_that_exceeds_the_card_is_refused_at_the_plan(tmp_path: Path, gpu: Gpu) -> None:
    entries = [served(tmp_path, "card", gpu_memory_bytes=gpu.memory_bytes, **CUDA)]
    gateway = Gateway(tmp_path, entries, workers={"groups": [f"gpu:{gpu.number}"]})
    try:
        gateway.start(is_ready=False)
        assert gateway.wait() == 78
        assert (
            "GiB available; models may use the device's memory minus workers.gpu_reserve_bytes"
            in gateway.text()
        )
    finally:
        gateway.end()


def test_check_loads_a_model_on_the_card(tmp_path: Path, gpu: Gpu) -> None:
    entries = [served(tmp_path, "card", gpu_memory_bytes=GIB, **CUDA)]
    gateway = Gateway(tmp_path, entries, workers={"groups": [f"gpu:{gpu.number}"]})
    tool = "from iskander.cli.main import main; main()"
    command = [sys.executable, "-c", tool, "check", str(gateway.config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert gpu.uuid in done.stdout and "CUDAExecutionProvider" in done.stdout


def test_each_device_has_a_worker_that_sees_it_alone(tmp_path: Path, gpu: Gpu) -> None:
    """Cards, and the slices of divided ones."""
    gpus = read_devices().gpus
    if len(gpus) < 2:
        pytest.skip("one device: this test needs several cards or MIG slices")
    entries = [served(tmp_path, "card", gpu_memory_bytes=GIB, **CUDA)]
    with running(tmp_path, entries, workers={"groups": ["gpu:auto"]}) as gateway:
        workers = gateway.stats()["workers"]
        assert [worker["gpu"] for worker in workers] == [each.number for each in gpus]
        seen = [environment_of(worker["pid"])["CUDA_VISIBLE_DEVICES"] for worker in workers]
        assert seen == [each.uuid for each in gpus]

        def have_all_computed() -> bool:
            with gateway.client() as client, ThreadPoolExecutor(4 * len(gpus)) as threads:
                calls = [threads.submit(client.score, "card", BATCH) for _ in range(256)]
                assert all(call.result()["y"].to_pylist() == [4, 7, 10] for call in calls)
            return all(worker["batches"] for worker in gateway.stats()["workers"])

        eventually(have_all_computed, what="a batch of each device")


def test_worker_of_a_python_model_has_its_own_process_on_the_card(tmp_path: Path, gpu: Gpu) -> None:
    source = """
import ctypes
class Model(Base):
    def predict(self, batch):
        count = ctypes.c_int()
        driver = ctypes.CDLL("libcuda.so.1")
        assert driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
        return pa.record_batch({"y": pa.array([count.value] * len(batch), pa.int64())})
"""
    own = python_models.entry(tmp_path / "own", source, placement="gpu", gpu_memory_bytes=GIB)
    entries = [own, served(tmp_path, "card", gpu_memory_bytes=GIB, **CUDA)]
    with running(tmp_path, entries, workers={"groups": ["gpu:auto"]}) as gateway:
        assert scored(gateway, "own") == [1, 1, 1]
        workers = gateway.stats()["workers"]
        assert {worker["pool"] for worker in workers} == {"", "own/1"}
