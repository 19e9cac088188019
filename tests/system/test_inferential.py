"""Inferential over ZeroMQ, tested with its own unmodified clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from inferential import AsyncConnection
from pyarrow import flight
from support.models import row_ids
from support.processes import Gateway, eventually, running, suspended
from support.robots import DTYPES, TIMEOUT_MS, address_of, ask, connected, joints, mirrors, policy

from iskander.client import Client


def points(gateway: Gateway, name: str, **labels: str) -> dict[str, Any]:
    """Returns the aggregate of a metric's recent points."""
    query = json.dumps({"name": name, "labels": labels}).encode()
    with flight.connect(f"grpc://{gateway.address}") as client:
        (response,) = client.do_action(flight.Action("metrics", query))
    aggregate: dict[str, Any] = json.loads(response.body.to_pybytes())[name]
    return aggregate


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("inferential")
    models = [
        {"name": "policy", "path": str(policy(folder / "policy"))},
        {"name": "mirrors", "path": str(mirrors(folder / "mirrors", DTYPES))},
        {"name": "ids", "path": str(row_ids(folder / "ids")), "version": 3},
    ]
    with running(
        folder,
        models,
        workers={"count": 1},
        inferential={"address": "tcp://127.0.0.1:0"},
    ) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def address(gateway: Gateway) -> str:
    return address_of(gateway)


def test_quickstart_of_the_client_package(address: str) -> None:
    """Connect, observe, and read a result by its keys."""
    with connected(address, 42, client_type="franka") as connection:
        model = connection.model("policy", latency_budget_ms=50.0)
        result = ask(model, urgency=0.5, steps_remaining=3, instruction="pick it up", **joints(3))
        assert result is not None
        assert result["actions"].tolist() == [6.0] * 7
        assert result["actions"].dtype == np.float32
        assert result["brightness"].shape == ()
        assert float(result["brightness"]) == 3.0
        assert result["model_id"] == "policy"
        assert len(result["response_id"]) == 32
        assert 0.0 <= result["inference_latency_ms"] < TIMEOUT_MS
        assert model.get_result(timeout_ms=0) is None


def test_each_protocol_counts_a_request_once(gateway: Gateway, address: str) -> None:
    """One anonymous Flight request and one Inferential request share a lane."""
    names = ("scheduling_wait_ms", "inference_latency_ms", "e2e_latency_ms")
    before = [points(gateway, name, model="ids")["count"] for name in names]
    with connected(address, "with-flight") as connection, Client(gateway.address) as client:
        assert client.score("ids", pa.record_batch({"x": [7]})).num_rows == 1
        assert ask(connection.model("ids"), x=np.array(7)) is not None
    assert [points(gateway, name, model="ids")["count"] for name in names] == [
        count + 2 for count in before
    ]
    assert [points(gateway, name, client="with-flight")["count"] for name in names] == [1, 1, 1]


def test_graph_tensor_names_are_accepted(address: str) -> None:
    with connected(address) as connection:
        observed = joints(4)
        renamed = {"joints": observed["joint_positions"], "image": observed["camera/wrist"]}
        result = ask(connection.model("policy"), **renamed)
        assert result is not None and result["actions"].tolist() == [8.0] * 7


def test_all_client_types_round_trip_bit_for_bit(address: str) -> None:
    """Includes booleans, which Arrow packs into bits."""
    sent = {f"x_{name}": np.array([0, 1, 2], name) for name in DTYPES}
    with connected(address) as connection:
        result = ask(connection.model("mirrors"), **sent)
    assert result is not None
    for name in DTYPES:
        assert result[f"y_{name}"].dtype == name
        assert np.array_equal(result[f"y_{name}"], sent[f"x_{name}"]), name


def test_tensors_with_a_row_axis_are_served_unchanged(address: str) -> None:
    observed = {name: np.stack([value] * 5) for name, value in joints(1).items()}
    with connected(address) as connection:
        result = ask(connection.model("policy"), **observed)
        assert result is not None
        assert result["actions"].shape == (5, 7)
        assert result["brightness"].tolist() == [1.0] * 5
        model = connection.model("ids/3")
        for sent in (np.int64(5), np.arange(4), np.arange(9)[:0]):
            result = ask(model, x=np.asarray(sent))
            assert result is not None and result["model_id"] == "ids/3"
            expected = 3 * np.asarray(sent) + 1
            # The client omits results without bytes.
            assert np.array_equal(result.get("y", np.zeros(0)), expected)


def test_large_observations_are_served(address: str) -> None:
    """They exceed one socket read, so the gateway reads them directly into the input arena."""
    with connected(address) as connection:
        model = connection.model("ids")
        for count in (1, 32_768, 600_000, 2):
            sent = np.arange(count) + count
            result = ask(model, x=sent)
            assert result is not None and np.array_equal(result["y"], 3 * sent + 1)


def test_pipelined_observations_are_answered_in_order(address: str) -> None:
    """The client sends 100, more than its window, before it reads the first result."""
    with connected(address) as connection:
        model = connection.model("ids")
        for number in range(100):
            model.observe(x=np.array(number), urgency=number / 100)
        for number in range(100):
            result = model.get_result(timeout_ms=TIMEOUT_MS)
            assert result is not None and result["y"] == 3 * number + 1


def test_async_client_is_served(address: str) -> None:
    async def robot(number: int) -> list[Any]:
        async with AsyncConnection(server=address, client_id=f"async-{number}") as connection:
            policy, ids = connection.model("policy"), connection.model("ids")
            results = []
            for turn in range(20):
                value = 100 * number + turn
                await policy.observe(urgency=0.1, **joints(value))
                await ids.observe(x=np.array(value))
                first = await ids.get_result(timeout_ms=TIMEOUT_MS)
                second = await policy.get_result(timeout_ms=TIMEOUT_MS)
                assert first is not None and second is not None
                results.append([int(first["y"]), float(second["actions"][0])])
            return results

    async def fleet() -> list[list[Any]]:
        return await asyncio.gather(*map(robot, range(4)))

    for number, results in enumerate(asyncio.run(fleet())):
        values = [100 * number + turn for turn in range(20)]
        assert results == [[3 * value + 1, 2.0 * value] for value in values]


ROBOT = """
import sys
import numpy as np
from inferential import Connection

connection = Connection(server=sys.argv[1], client_id=sys.argv[2])
model = connection.model("ids")
for turn in range(40):
    sent = int(sys.argv[3]) + turn
    model.observe(x=np.array(sent))
    result = model.get_result(timeout_ms=20_000)
    assert result is not None and result["y"] == 3 * sent + 1, (turn, result)
connection.close()
"""


def test_client_threads_and_processes_get_their_own_results(address: str) -> None:
    wrong: list[str] = []

    def robot(number: int) -> None:
        with connected(address, f"thread-{number}") as connection:
            model = connection.model("policy")
            for turn in range(40):
                result = ask(model, **joints(1000 * number + turn))
                if result is None or result["actions"][0] != 2 * (1000 * number + turn):
                    wrong.append(f"robot {number}, turn {turn}: {result}")

    threads = [threading.Thread(target=robot, args=(number,)) for number in range(8)]
    arguments = [[address, f"process-{number}", str(10_000 * number)] for number in range(3)]
    processes = [subprocess.Popen([sys.executable, "-c", ROBOT, *each]) for each in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert not wrong


def test_observations_of_several_clients_run_in_one_batch(gateway: Gateway, address: str) -> None:
    """They queue while the worker is suspended."""
    lane = "policy/1"
    (pid,) = gateway.worker_pids()
    before = gateway.stats()["lanes"][lane]
    with contextlib.ExitStack() as stack:
        robots = [stack.enter_context(connected(address, f"together-{i}")) for i in range(12)]
        models = [robot.model("policy") for robot in robots]
        with suspended(pid):
            for number, model in enumerate(models):
                model.observe(**joints(number))
            expected = before.get("requests", 0) + len(models)
            eventually(lambda: gateway.stats()["lanes"][lane]["requests"] == expected)
        results = [model.get_result(timeout_ms=TIMEOUT_MS) for model in models]
        for number, result in enumerate(results):
            assert result is not None and result["actions"].tolist() == [2.0 * number] * 7
    after = gateway.stats()["lanes"][lane]
    # Two batches may have been sent to the worker before the others arrived.
    assert after["batches"] - before.get("batches", 0) <= 3


def test_stats_and_metrics_of_an_observation(gateway: Gateway, address: str) -> None:
    with connected(address, "counted") as connection:
        before = gateway.stats()["inferential"]["observations"].get("answered", 0)
        result = ask(connection.model("policy"), **joints(0))
        assert result is not None
        stats = gateway.stats()["inferential"]
        assert stats["observations"]["answered"] == before + 1
        assert stats["address"] == address
        assert stats["clients"] >= 1
        sizes = points(gateway, "payload_size_bytes", client="counted")
        assert sizes["count"] == 1 and sizes["latest"] == 7 * 4 + 48
        for name in ("scheduling_wait_ms", "inference_latency_ms", "e2e_latency_ms"):
            assert points(gateway, name, client="counted", model="policy")["count"] == 1, name
        total, run = (
            points(gateway, name, client="counted")["latest"]
            for name in ("e2e_latency_ms", "inference_latency_ms")
        )
        assert 0 < run < total
        assert result["inference_latency_ms"] == pytest.approx(run)
    eventually(lambda: gateway.stats()["inferential"]["clients"] == 0, what="no connected clients")
    gateway.wait_idle()


def test_observation_of_a_killed_worker_is_retried_and_counted(
    tmp_path: Path,
) -> None:
    models = [{"name": "policy", "path": str(policy(tmp_path / "policy"))}]
    inferential = {"address": "tcp://127.0.0.1:0"}
    with running(tmp_path, models, workers={"count": 1}, inferential=inferential) as gateway:
        (pid,) = gateway.worker_pids()
        with connected(address_of(gateway), "retried") as connection:
            model = connection.model("policy")
            with suspended(pid):
                model.observe(**joints(6))
                eventually(lambda: gateway.stats()["workers"][0]["in_flight"], what="a batch")
                gateway.kill_worker()
            result = model.get_result(timeout_ms=TIMEOUT_MS)
            assert result is not None and result["actions"].tolist() == [12.0] * 7
            labels = {"client": "retried", "model": "policy"}
            assert points(gateway, "dispatch_retries", **labels)["count"] == 1
            assert points(gateway, "e2e_latency_ms", **labels)["count"] == 1
