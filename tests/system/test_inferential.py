"""Inferential over ZeroMQ, by its own unmodified clients."""

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
from support.robots import DTYPES, PATIENCE_MS, address_of, ask, connected, joints, mirrors, policy

from iskander.client import Client


def points(gateway: Gateway, name: str, **labels: str) -> dict[str, Any]:
    """What the last points of a measure come to."""
    question = json.dumps({"name": name, "labels": labels}).encode()
    with flight.connect(f"grpc://{gateway.address}") as client:
        (answer,) = client.do_action(flight.Action("metrics", question))
    found: dict[str, Any] = json.loads(answer.body.to_pybytes())[name]
    return found


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


def test_the_clients_first_steps(address: str) -> None:
    """What the package's page shows: connect, observe, get a result by its keys."""
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
        assert 0.0 <= result["inference_latency_ms"] < PATIENCE_MS
        assert model.get_result(timeout_ms=0) is None


def test_a_request_is_counted_once_whatever_it_came_by(gateway: Gateway, address: str) -> None:
    """One of Flight without a name, and one of Inferential, in the same lane."""
    names = ("scheduling_wait_ms", "inference_latency_ms", "e2e_latency_ms")
    before = [points(gateway, name, model="ids")["count"] for name in names]
    with connected(address, "beside-flight") as connection, Client(gateway.address) as client:
        assert client.score("ids", pa.record_batch({"x": [7]})).num_rows == 1
        assert ask(connection.model("ids"), x=np.array(7)) is not None
    assert [points(gateway, name, model="ids")["count"] for name in names] == [
        count + 2 for count in before
    ]
    assert [points(gateway, name, client="beside-flight")["count"] for name in names] == [1, 1, 1]


def test_tensors_are_named_as_the_graph_names_them_too(address: str) -> None:
    with connected(address) as connection:
        observed = joints(4)
        renamed = {"joints": observed["joint_positions"], "image": observed["camera/wrist"]}
        result = ask(connection.model("policy"), **renamed)
        assert result is not None and result["actions"].tolist() == [8.0] * 7


def test_every_type_that_the_client_has(address: str) -> None:
    """There and back, and bit for bit; booleans too, which Arrow packs."""
    sent = {f"x_{name}": np.array([0, 1, 2], name) for name in DTYPES}
    with connected(address) as connection:
        result = ask(connection.model("mirrors"), **sent)
    assert result is not None
    for name in DTYPES:
        assert result[f"y_{name}"].dtype == name
        assert np.array_equal(result[f"y_{name}"], sent[f"x_{name}"]), name


def test_a_tensor_that_has_rows_is_served_as_it_is(address: str) -> None:
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
            wanted = 3 * np.asarray(sent) + 1
            # The client leaves out results without a byte.
            assert np.array_equal(result.get("y", np.zeros(0)), wanted)


def test_large_observations(address: str) -> None:
    """Larger than what a socket gives at once, so that they are read straight into their place."""
    with connected(address) as connection:
        model = connection.model("ids")
        for count in (1, 32_768, 600_000, 2):
            sent = np.arange(count) + count
            result = ask(model, x=sent)
            assert result is not None and np.array_equal(result["y"], 3 * sent + 1)


def test_many_observations_at_once_are_answered_in_order(address: str) -> None:
    """A hundred before the first is fetched: more than are in work at once."""
    with connected(address) as connection:
        model = connection.model("ids")
        for number in range(100):
            model.observe(x=np.array(number), urgency=number / 100)
        for number in range(100):
            result = model.get_result(timeout_ms=PATIENCE_MS)
            assert result is not None and result["y"] == 3 * number + 1


def test_the_async_client(address: str) -> None:
    async def robot(number: int) -> list[Any]:
        async with AsyncConnection(server=address, client_id=f"async-{number}") as connection:
            policy, ids = connection.model("policy"), connection.model("ids")
            got = []
            for turn in range(20):
                value = 100 * number + turn
                await policy.observe(urgency=0.1, **joints(value))
                await ids.observe(x=np.array(value))
                first = await ids.get_result(timeout_ms=PATIENCE_MS)
                second = await policy.get_result(timeout_ms=PATIENCE_MS)
                assert first is not None and second is not None
                got.append([int(first["y"]), float(second["actions"][0])])
            return got

    async def fleet() -> list[list[Any]]:
        return await asyncio.gather(*map(robot, range(4)))

    for number, got in enumerate(asyncio.run(fleet())):
        values = [100 * number + turn for turn in range(20)]
        assert got == [[3 * value + 1, 2.0 * value] for value in values]


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


def test_threads_and_processes_of_clients_get_each_their_own(address: str) -> None:
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


def test_observations_of_many_clients_run_in_one_batch(gateway: Gateway, address: str) -> None:
    """While the worker is stopped they wait, and then those that have waited run together."""
    lane = "policy/1"
    (pid,) = gateway.worker_pids()
    before = gateway.stats()["lanes"][lane]
    with contextlib.ExitStack() as stack:
        robots = [stack.enter_context(connected(address, f"together-{i}")) for i in range(12)]
        models = [robot.model("policy") for robot in robots]
        with suspended(pid):
            for number, model in enumerate(models):
                model.observe(**joints(number))
            wanted = before.get("requests", 0) + len(models)
            eventually(lambda: gateway.stats()["lanes"][lane]["requests"] == wanted)
        results = [model.get_result(timeout_ms=PATIENCE_MS) for model in models]
        for number, result in enumerate(results):
            assert result is not None and result["actions"].tolist() == [2.0 * number] * 7
    after = gateway.stats()["lanes"][lane]
    # Two batches may have been on their way before the others came.
    assert after["batches"] - before.get("batches", 0) <= 3


def test_what_is_counted(gateway: Gateway, address: str) -> None:
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
    eventually(lambda: gateway.stats()["inferential"]["clients"] == 0, what="no clients")
    gateway.wait_idle()


def test_an_observation_whose_worker_dies_is_answered_and_its_retry_is_counted(
    tmp_path: Path,
) -> None:
    models = [{"name": "policy", "path": str(policy(tmp_path / "policy"))}]
    inferential = {"address": "tcp://127.0.0.1:0"}
    with running(tmp_path, models, workers={"count": 1}, inferential=inferential) as gateway:
        (pid,) = gateway.worker_pids()
        with connected(address_of(gateway), "bereft") as connection:
            model = connection.model("policy")
            with suspended(pid):
                model.observe(**joints(6))
                eventually(lambda: gateway.stats()["workers"][0]["in_flight"], what="a batch")
                gateway.kill_worker()
            result = model.get_result(timeout_ms=PATIENCE_MS)
            assert result is not None and result["actions"].tolist() == [12.0] * 7
            of = {"client": "bereft", "model": "policy"}
            assert points(gateway, "dispatch_retries", **of)["count"] == 1
            assert points(gateway, "e2e_latency_ms", **of)["count"] == 1
