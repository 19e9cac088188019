"""Workers with a GPU: their environment, the loss and return of a card, budgets, and `check`.

NVML is scripted, and the models use no GPU: a Python model that reads its environment, and an ONNX
model that runs anywhere. The tests of real cards are those of `tests/gpu`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from support import models, python_models
from support.gpus import ScriptedNvml, scripted_card, uuid_of
from support.processes import BIN, Gateway, eventually, running

from iskander.errors import NotReady

pytestmark = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")

GIB = 1 << 30
DEVICES = """
import os
class Model(Base):
    def predict(self, batch):
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
        number = int(seen[4:12], 16) if seen.startswith("GPU-") else -1
        return pa.record_batch({"y": pa.array([number] * len(batch), pa.int64())})
"""
BATCH = pa.record_batch({"x": [1, 2, 3]})


def served(folder: Path) -> list[dict[str, Any]]:
    ids = {"name": "ids", "path": str(models.row_ids(folder / "ids")), "intra_threads": 1}
    own = {"placement": "gpu", "gpu_memory_bytes": GIB}
    return [
        ids | {"placement": "any", "gpu_memory_bytes": GIB},
        python_models.entry(folder / "seen", DEVICES, **own),
        python_models.entry(folder / "hidden", DEVICES),
    ]


@contextlib.contextmanager
def with_cards(folder: Path, nvml: ScriptedNvml, **workers: Any) -> Iterator[Gateway]:
    variables = [f"{name}={value}" for name, value in nvml.environment.items()]
    workers = {"groups": ["0", "gpu:auto"]} | workers
    with running(folder, served(folder), prefix=("env", *variables), workers=workers) as gateway:
        yield gateway


def states(gateway: Gateway) -> dict[str, str]:
    """State of each worker by its GPU and pool."""
    return {
        f"{worker['gpu'] or '-'} {worker['pool']}".strip(): worker["state"]
        for worker in gateway.stats()["workers"]
    }


def scored(gateway: Gateway, name: str) -> list[int]:
    with gateway.client() as client:
        return list(client.score(name, BATCH)["y"].to_pylist())


def page(gateway: Gateway, path: str) -> str:
    address = gateway.stats()["admin_address"]
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as response:
        return str(response.read().decode())


@pytest.mark.slow
def test_lost_card_takes_its_workers_out_of_service_and_returns(tmp_path: Path) -> None:
    nvml = ScriptedNvml(tmp_path, scripted_card(5))
    with with_cards(tmp_path, nvml) as gateway:
        ready = {"-": "ready", "0": "ready", "0 seen/1": "ready", "- hidden/1": "ready"}
        assert states(gateway) == ready
        assert scored(gateway, "seen") == [5, 5, 5]
        assert scored(gateway, "hidden") == [-1, -1, -1]
        before = {worker["pid"] for worker in gateway.stats()["workers"] if worker["gpu"]}
        lost = threading.Event()
        failures: list[Exception] = []

        def load() -> None:
            """Scores all the time: no request of a model with another worker may fail."""
            with gateway.client() as client:
                while not lost.is_set():
                    try:
                        assert client.score("ids", BATCH)["y"].to_pylist() == [4, 7, 10]
                    except Exception as error:
                        failures.append(error)
                        return

        thread = threading.Thread(target=load)
        thread.start()
        nvml.change(0, error=15)
        out = ready | {"0": "out of service", "0 seen/1": "out of service"}
        eventually(lambda: states(gateway) == out, what="the loss")
        assert scored(gateway, "ids") == [4, 7, 10]
        lost.set()
        thread.join()
        assert failures == []
        with pytest.raises(NotReady, match=r"gpu lost: GPU 0 \(NVIDIA H100.*GPU is lost"):
            scored(gateway, "seen")
        (card,) = gateway.stats()["gpus"]
        assert (card["state"], card["uuid"]) == ("lost", uuid_of(5))
        reasons = gateway.stats()["reasons"]
        assert [each for each in reasons if each.startswith("model `seen/1`: worker")]
        eventually(lambda: not any(map(psutil.pid_exists, before)), 5, "the end of its processes")
        metrics = page(gateway, "/metrics")
        assert f'iskander_gpu_state{{gpu="0",state="lost",uuid="{uuid_of(5)}"}} 1.0' in metrics
        status = json.loads(page(gateway, "/status.json"))
        assert status["gpus"][0]["state"] == "lost"
        assert "out of service" in page(gateway, "/")
        nvml.change(0, error=0)
        eventually(lambda: states(gateway) == ready, what="the return")
        assert scored(gateway, "seen") == [5, 5, 5]
        assert not any(lane.get("worker_deaths") for lane in gateway.stats()["lanes"].values())
        ends = {w["gpu"]: w["ends"] for w in gateway.stats()["workers"] if not w["pool"]}
        assert ends == {None: {}, "0": {"device_lost": 1}}
        assert "gpu_lost" in gateway.text() or "is lost" in gateway.text()


@pytest.mark.slow
def test_values_of_a_card_are_in_stats_metrics_page_and_top(tmp_path: Path) -> None:
    nvml = ScriptedNvml(tmp_path, scripted_card(0, throttle=0x40, ecc=[3, 1], xids=[31]))
    with with_cards(tmp_path, nvml) as gateway:

        def is_read() -> bool:
            (card,) = gateway.stats()["gpus"]
            return bool(card["xids"])

        eventually(is_read, what="a reading")
        (card,) = gateway.stats()["gpus"]
        assert card["state"] == "throttled" and card["throttles"] == ["hardware thermal"]
        assert (card["utilization"], card["memory_used_bytes"]) == (0.37, 500 << 20)
        metrics = page(gateway, "/metrics")
        labels = f'gpu="0",uuid="{uuid_of(0)}"'
        for line in (
            f"iskander_gpu_utilization_ratio{{{labels}}} 0.37",
            f"iskander_gpu_temperature_celsius{{{labels}}} 41.0",
            f"iskander_gpu_power_watts{{{labels}}} 71.5",
            f'iskander_gpu_throttled{{gpu="0",reason="hardware thermal",uuid="{uuid_of(0)}"}} 1.0',
            f'iskander_gpu_ecc_errors_total{{gpu="0",kind="uncorrected",uuid="{uuid_of(0)}"}} 1.0',
            f'iskander_gpu_xid_errors_total{{gpu="0",uuid="{uuid_of(0)}",xid="31"}} 1.0',
            f"iskander_gpu_memory_used_bytes{{{labels}}} 5.24288e+08",
        ):
            assert line in metrics, line
        html = page(gateway, "/")
        assert "NVIDIA H100 80GB HBM3" in html and "hardware thermal" in html
        command = [BIN / "iskander", "top", "--once", "--json", "--address", gateway.address]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        workers = {row["gpu"]: row for row in json.loads(done.stdout)["workers"]}
        assert workers["0"]["gpu_percent"] == 37.0 and workers["0"]["gpu_bytes"] == 500 << 20


def run_check(folder: Path, nvml: ScriptedNvml, *lines: str) -> subprocess.CompletedProcess[str]:
    file = folder / "check.toml"
    model = models.row_ids(folder / "model")
    file.write_text(
        f'[workers]\ngroups = ["0", "gpu:0"]\n[loading]\nsandbox = false\n[[models]]\n'
        f'name = "ids"\npath = "{model}"\nplacement = "any"\n' + "\n".join(lines)
    )
    command = [BIN / "iskander", "check", file]
    environment = os.environ | nvml.environment
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_check_prints_the_devices_and_refuses_a_model_that_is_too_large(tmp_path: Path) -> None:
    nvml = ScriptedNvml(tmp_path)
    done = run_check(tmp_path, nvml)
    assert done.returncode == 0, done.stderr
    assert uuid_of(0) in done.stdout and "79.65 GiB" in done.stdout
    (tmp_path / "large").mkdir()
    done = run_check(tmp_path / "large", nvml, f"gpu_memory_bytes = {79 * GIB}")
    assert done.returncode == 78
    assert "GPU 0 (NVIDIA H100 80GB HBM3, 79.65 GiB): 79 GiB needed" in done.stderr
