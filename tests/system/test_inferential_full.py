"""More observations than a client may have in work: what counts is heard, and nothing is late."""

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
from support.robots import GREETING, PATIENCE_MS, Peer, address_of, ask, connected, observation

from iskander.protocols.inferential.session import FAILED_MAX

MANY = 30
"""More than `limits.window_batches`, which are 8 in tests."""
MESSAGE_BYTES = 20 * MIB


@pytest.fixture(scope="module", params=["silent", "metadata"])
def gateway(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("full")
    models: list[dict[str, Any]] = [
        {"name": "ids", "path": str(row_ids(folder / "ids"))},
        {"name": "bytes", "path": str(halves(folder / "bytes"))},
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
    """The pid of the only worker."""
    (pid,) = gateway.worker_pids()
    return pid


def halves(folder: Path) -> Path:
    """A model with a result of a type that Inferential has not."""
    return save(
        folder,
        [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.INT8)],
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["rows"])],
        [helper.make_tensor_value_info("y", TensorProto.INT8, ["rows"])],
    )


def outcomes(gateway: Gateway) -> dict[str, int]:
    found: dict[str, int] = gateway.stats()["inferential"]["observations"]
    return found


@contextlib.contextmanager
def busy(gateway: Gateway, address: str, worker: int) -> Iterator[None]:
    """The worker stands still with all the batches that it takes at once, and goes on after."""
    with contextlib.ExitStack() as stack:
        robots = [stack.enter_context(connected(address, f"busy-{i}")) for i in range(2)]
        with suspended(worker):
            for number, robot in enumerate(robots):
                robot.model("ids").observe(x=np.array(number))
                eventually(lambda n=number: gateway.stats()["workers"][0]["in_flight"] == n + 1)
            yield
        for robot in robots:
            assert robot.model("ids").get_result(timeout_ms=PATIENCE_MS) is not None


def answers(model: Any) -> list[int]:
    """The numbers of the observations that are answered with results, until none comes."""
    found = []
    while (result := model.get_result(timeout_ms=500)) is not None:
        if "y" in result:
            found.append((int(result["y"]) - 1) // 3)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("is_with_the_worker", [True, False])
def test_a_late_answer_is_never_the_next_ones(
    gateway: Gateway, address: str, worker: int, is_with_the_worker: bool
) -> None:
    """Whether its observation is with a worker that hangs, or waits, or waits to be read."""
    hanging = suspended(worker) if is_with_the_worker else busy(gateway, address, worker)
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


def test_one_that_is_due_soon_makes_room_before_one_that_is_due_late(tmp_path: Path) -> None:
    """Each waits for a worker of its own; the later deadline was there first."""
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
        contextlib.ExitStack() as hanging,
    ):
        late, soon, after = (robot.model(name) for name in ("late", "soon", "next"))
        pids = {each["pool"]: each["pid"] for each in gateway.stats()["workers"]}
        hanging.enter_context(suspended(pids["late/1"]))
        late.observe(x=np.array(1), deadline_ms="60000")
        assert ask(soon, x=np.array(2), deadline_ms="60000") is not None
        hanging.enter_context(suspended(pids["soon/1"]))
        soon.observe(x=np.array(3), deadline_ms="100")
        result = ask(after, x=np.array(4))
        assert result is not None and result["y"] == 13


def test_failures_that_nobody_was_told_of_make_room_when_what_they_wait_for_is_late(
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


def test_what_came_while_the_window_was_full_has_waited_since_it_came(
    gateway: Gateway, address: str, worker: int
) -> None:
    before = outcomes(gateway).get("deadline_exceeded", 0)
    with connected(address, "patient") as robot:
        model = robot.model("ids")
        with busy(gateway, address, worker):
            for number in range(MANY):
                model.observe(x=np.array(number), ttl_ms="200")
            time.sleep(0.4)
        assert answers(model) == []
    assert outcomes(gateway)["deadline_exceeded"] == before + MANY


def test_the_newest_of_many_takes_the_place_of_all_others(
    gateway: Gateway, address: str, worker: int
) -> None:
    """But of those that the worker has."""
    with connected(address, "newest") as robot:
        model = robot.model("ids")
        with suspended(worker):
            for number in range(MANY):
                model.observe(x=np.array(number), newest_wins="true")
            time.sleep(0.2)
        found = answers(model)
        assert found[-1] == MANY - 1 and len(found) <= 3


def test_a_client_that_leaves_with_a_full_window_is_waited_for_by_nobody(
    gateway: Gateway, address: str, worker: int
) -> None:
    def queued() -> int:
        return int(gateway.stats()["lanes"]["ids/1"]["queued"])

    with busy(gateway, address, worker):
        with Peer(address, b"leaver") as peer:
            for number in range(MANY):
                peer.send(b"", *observation("ids", {"x": np.array(number)}))
            eventually(lambda: queued() == 8)
        eventually(lambda: queued() == 0)


def test_heartbeats_are_answered_while_the_window_is_full(
    gateway: Gateway, address: str, worker: int
) -> None:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger, dealer.routing_id = 0, b"beating"
    dealer.heartbeat_ivl, dealer.heartbeat_timeout = 100, 400
    monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        dealer.connect(address)
        with busy(gateway, address, worker):
            for number in range(MANY):
                dealer.send_multipart([b"", *observation("ids", {"x": np.array(number)})])
            assert not monitor.poll(1500)
        for _ in range(MANY):
            assert dealer.poll(PATIENCE_MS)
            dealer.recv_multipart()
    finally:
        dealer.disable_monitor()
        context.destroy(linger=0)


def test_a_frame_that_is_announced_takes_no_memory_until_it_comes(
    gateway: Gateway, address: str
) -> None:
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


def test_a_model_that_could_not_be_answered_for_is_not_run(gateway: Gateway, address: str) -> None:
    before = outcomes(gateway).get("unsupported", 0)
    with Peer(address, b"in vain") as peer:
        peer.send(b"", *observation("bytes", {"x": np.array([1])}))
        eventually(lambda: outcomes(gateway).get("unsupported", 0) == before + 1)
    assert not gateway.stats()["lanes"]["bytes/1"].get("batches")
