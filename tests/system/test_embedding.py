"""Gateway embedded in a program with a policy and a metrics callback."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.models import row_ids
from support.processes import eventually, render_config, running, suspended
from support.robots import TIMEOUT_MS, address_of, connected

PROGRAM = """
import json
import sys

from iskander.embed import on_metric, register_policy, serve

points = open(sys.argv[1], "w", buffering=1)


@register_policy("longest_plan_first")
def longest_plan_first(request):
    return request.steps_remaining or 0


@on_metric
def write(name, value, labels):
    points.write(json.dumps([name, value, dict(labels)]) + "\\n")


serve(sys.argv[-1])
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_program_registers_a_policy_and_a_metrics_callback(tmp_path: Path, program: Path) -> None:
    """Queued requests run in the order of the policy's scores."""
    points_path = tmp_path / "points"
    models = [{"name": "ids", "path": str(row_ids(tmp_path / "ids")), "max_batch_rows": 1}]
    with running(
        tmp_path,
        models,
        prefix=(sys.executable, str(program), str(points_path)),
        workers={"count": 1},
        lanes={"policy": "longest_plan_first", "patience_ms": 60_000},
        inferential={"address": "tcp://127.0.0.1:0"},
    ) as gateway:
        address = address_of(gateway)
        (worker,) = gateway.worker_pids()
        with contextlib.ExitStack() as stack:
            robots = [stack.enter_context(connected(address, f"{i}")) for i in range(6)]
            with suspended(worker):
                for number, robot in enumerate(robots):
                    robot.model("ids").observe(x=np.array(number), steps_remaining=number)
                    eventually(lambda n=number: requests(gateway.stats()) == n + 1)
            for robot in robots:
                assert robot.model("ids").get_result(timeout_ms=TIMEOUT_MS) is not None
        eventually(lambda: gateway.stats()["inferential"]["clients"] == 0, what="no clients")
    points = [json.loads(line) for line in points_path.read_text().splitlines()]
    # The worker already had the first two.
    finished = [labels["client"] for name, _, labels in points if name == "e2e_latency_ms"]
    assert finished == ["0", "1", "5", "4", "3", "2"]
    assert {name for name, _, _ in points} == {
        "active_clients",
        "batch_size",
        "client_disconnected",
        "e2e_latency_ms",
        "inference_latency_ms",
        "observation_staleness_ms",
        "payload_size_bytes",
        "queue_depth",
        "scheduling_wait_ms",
    }


def requests(stats: dict[str, dict[str, dict[str, int]]]) -> int:
    return stats["lanes"]["ids/1"].get("requests", 0)


def test_embedded_gateway_rejects_several_processes(tmp_path: Path, program: Path) -> None:
    config = tmp_path / "iskander.toml"
    models = [{"name": "ids", "path": str(row_ids(tmp_path / "ids"))}]
    config.write_text(render_config(models=models, server={"processes": 2}))
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "points"), str(config)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "ConfigError: server.processes above 1" in done.stderr
