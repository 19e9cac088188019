"""More observations than the window: deadlines, newest-wins, disconnect, heartbeats."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq
from onnx import TensorProto, helper
from support.models import row_ids, save
from support.processes import MIB, Gateway, eventually, running, suspended
from support.robots import GREETING, TIMEOUT_MS, Peer, address_of, ask, connected, observation

from iskander.gateway.protocols.inferential.session import FAILED_MAX

MANY = 30
"""Above `limits.window_batches`, which is 8 in tests."""
MESSAGE_BYTES = 20 * MIB


@pytest.fixture(scope="module", params=["silent", "metadata"])
def gateway(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("full")
    models: list[dict[str, Any]] = [
        {"name": "ids", "path": str(row_ids(folder / "ids"))},
        {"name": "bytes", "path": str(int8_result(folder / "bytes"))},
    ]
    with running(
        folder,
        models,
        workers={"count": 1, "hang_s": 60, "hang_factor": 0},
        limits={"message_bytes": MESSAGE_BYTES},
        inferential={"address": "tcp://127.0.0.1:0", "errors": request.param},
    ) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def address(gateway: Gateway) -> str:
    return address_of(gateway)


@pytest.fixture
def worker(gateway: Gateway) -> int:
    """Returns the pid of the only worker."""
    (pid,) = gateway.worker_pids()
    return pid


def int8_result(folder: Path) -> Path:
    """Saves a model with a result type that Inferential does not have."""
    return save(
        folder,
        [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.INT8)],
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["rows"])],
        [helper.make_tensor_value_info("y", TensorProto.INT8, ["rows"])],
    )


def outcomes(gateway: Gateway) -> dict[str, int]:
    counts: dict[str, int] = gateway.stats()["inferential"]["observations"]
    return counts


@contextlib.contextmanager
def busy(gateway: Gateway, address: str, worker: int) -> Iterator[None]:
    """Suspends the worker with all its credits in use."""
    with contextlib.ExitStack() as stack:
        robots = [stack.enter_context(connected(address, f"busy-{i}")) for i in range(2)]
        with suspended(worker):
            for number, robot in enumerate(robots):
                robot.model("ids").observe(x=np.array(number))
                eventually(lambda n=number: gateway.stats()["workers"][0]["in_flight"] == n + 1)
            yield
        for robot in robots:
            assert robot.model("ids").get_result(timeout_ms=TIMEOUT_MS) is not None


def answered_numbers(model: Any) -> list[int]:
    """Reads all results; returns the numbers of their observations."""
    numbers = []
    while (result := model.get_result(timeout_ms=500)) is not None:
        if "y" in result:
            numbers.append((int(result["y"]) - 1) // 3)
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize("is_in_the_worker", [True, False])
def test_late_result_is_not_sent_for_a_later_observation(
    gateway: Gateway, address: str, worker: int, is_in_the_worker: bool
) -> None:
    """The late observation is in a suspended worker, in the queue, or still unread."""
    hanging = suspended(worker) if is_in_the_worker else busy(gateway, address, worker)
    with connected(address, "robot") as robot:
        model = robot.model("ids")
        with hanging:
            for number in range(MANY):
                model.observe(x=np.array(number), deadline_ms="50")
                assert model.get_result(timeout_ms=60) is None
        eventually(lambda: gateway.stats()["workers"][0]["in_flight"] == 0)
        for number in range(MANY, 2 * MANY):
            result = ask(model, x=np.array(number))
            assert result is not None and result["y"] == 3 * number + 1


@pytest.mark.slow
def test_expired_observation_leaves_the_window_before_an_older_one(tmp_path: Path) -> None:
    """Each model has its own worker; the older observation has the later deadline."""
    path = str(row_ids(tmp_path / "ids"))
    models = [{"name": name, "path": path, "workers": 1} for name in ("late", "soon", "next")]
    with (
        running(
            tmp_path,
            models,
            workers={"count": 1, "hang_s": 60, "hang_factor": 0},
            limits={"window_batches": 2},
            inferential={"address": "tcp://127.0.0.1:0"},
        ) as gateway,
        connected(address_of(gateway), "robot") as robot,
        contextlib.ExitStack() as suspensions,
    ):
        late, soon, after = (robot.model(name) for name in ("late", "soon", "next"))
        pids = {each["pool"]: each["pid"] for each in gateway.stats()["workers"]}
        suspensions.enter_context(suspended(pids["late/1"]))
        late.observe(x=np.array(1), deadline_ms="60000")
        assert ask(soon, x=np.array(2), deadline_ms="60000") is not None
        suspensions.enter_context(suspended(pids["soon/1"]))
        soon.observe(x=np.array(3), deadline_ms="100")
        result = ask(after, x=np.array(4))
        assert result is not None and result["y"] == 13


@pytest.mark.slow
def test_unsent_error_replies_leave_the_queue_when_the_result_before_them_expires(
    tmp_path: Path,
) -> None:
    path = str(row_ids(tmp_path / "ids"))
    models = [{"name": name, "path": path, "workers": 1} for name in ("late", "next")]
    with (
        running(
            tmp_path,
            models,
            workers={"count": 1, "hang_s": 60, "hang_factor": 0},
            inferential={"address": "tcp://127.0.0.1:0", "errors": "metadata"},
        ) as gateway,
        connected(address_of(gateway), "robot") as robot,
    ):
        late, after = (robot.model(name) for name in ("late", "next"))
        pids = {each["pool"]: each["pid"] for each in gateway.stats()["workers"]}
        with suspended(pids["late/1"]):
            late.observe(x=np.array(1), deadline_ms="500")
            for _ in range(FAILED_MAX + 100):
                late.observe(unknown=np.array(1))
            result = ask(after, x=np.array(4))
        assert result is not None and result["y"] == 13


def test_time_to_live_includes_the_wait_for_a_full_window(
    gateway: Gateway, address: str, worker: int
) -> None:
    before = outcomes(gateway).get("deadline_exceeded", 0)
    with connected(address, "short-ttl") as robot:
        model = robot.model("ids")
        with busy(gateway, address, worker):
            for number in range(MANY):
                model.observe(x=np.array(number), ttl_ms="200")
            time.sleep(0.4)
        assert answered_numbers(model) == []
    assert outcomes(gateway)["deadline_exceeded"] == before + MANY


def test_newest_observation_supersedes_all_but_those_in_the_worker(
    gateway: Gateway, address: str, worker: int
) -> None:
    with connected(address, "newest") as robot:
        model = robot.model("ids")
        with suspended(worker):
            for number in range(MANY):
                model.observe(x=np.array(number), newest_wins="true")
            time.sleep(0.2)
        numbers = answered_numbers(model)
        assert numbers[-1] == MANY - 1 and len(numbers) <= 3


def test_disconnect_with_a_full_window_withdraws_the_observations(
    gateway: Gateway, address: str, worker: int
) -> None:
    def queued() -> int:
        return int(gateway.stats()["lanes"]["ids/1"]["queued"])

    with busy(gateway, address, worker):
        with Peer(address, b"disconnects") as peer:
            for number in range(MANY):
                peer.send(b"", *observation("ids", {"x": np.array(number)}))
            eventually(lambda: queued() == 8)
        eventually(lambda: queued() == 0)


def test_heartbeats_are_answered_while_the_window_is_full(
    gateway: Gateway, address: str, worker: int
) -> None:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger, dealer.routing_id = 0, b"heartbeats"
    dealer.heartbeat_ivl, dealer.heartbeat_timeout = 100, 400
    monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        dealer.connect(address)
        with busy(gateway, address, worker):
            for number in range(MANY):
                dealer.send_multipart([b"", *observation("ids", {"x": np.array(number)})])
            assert not monitor.poll(1500)
        for _ in range(MANY):
            assert dealer.poll(TIMEOUT_MS)
            dealer.recv_multipart()
    finally:
        dealer.disable_monitor()
        context.destroy(linger=0)


def test_announced_frame_takes_no_memory_until_it_arrives(gateway: Gateway, address: str) -> None:
    process = psutil.Process(gateway.pid)
    before = process.memory_info().rss
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            peer = stack.enter_context(Peer(address, is_greeted=False))
            head = b"\2" + MESSAGE_BYTES.to_bytes(8, "big")
            peer.socket.sendall(GREETING + Peer.ready(b"") + head)
            peer.read_exactly(64)
            peer.read_frame()
        with connected(address, "good") as good:
            assert ask(good.model("ids"), x=np.array(1)) is not None
        assert process.memory_info().rss < before + 5 * MESSAGE_BYTES


def test_model_with_an_unsupported_result_type_does_not_run(gateway: Gateway, address: str) -> None:
    before = outcomes(gateway).get("unsupported", 0)
    with Peer(address, b"unsupported") as peer:
        peer.send(b"", *observation("bytes", {"x": np.array([1])}))
        eventually(lambda: outcomes(gateway).get("unsupported", 0) == before + 1)
    assert not gateway.stats()["lanes"]["bytes/1"].get("batches")
