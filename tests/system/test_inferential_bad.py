"""What Inferential's own server gets wrong: bad, greedy and slow clients cost only themselves."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from support.models import row_ids
from support.processes import MIB, Gateway, eventually, running, suspended
from support.robots import (
    GREETING,
    PATIENCE_MS,
    Peer,
    address_of,
    ask,
    connected,
    joints,
    observation,
    policy,
    response,
)

FIVE = np.arange(5)
WINDOW = 8
"""limits.window_batches"""


@pytest.fixture(scope="module", params=["silent", "metadata"])
def gateway(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("inferential")
    few = {"queue_requests": 2, "overflow": "drop_lowest_priority"}
    models: list[dict[str, Any]] = [
        {"name": "policy", "path": str(policy(folder / "policy"))},
        {"name": "ids", "path": str(row_ids(folder / "ids"))},
        {"name": "few", "path": str(row_ids(folder / "few")), "lane": few},
    ]
    with running(
        folder,
        models,
        workers={"count": 1},
        inferential={"address": "tcp://127.0.0.1:0", "errors": request.param},
    ) as gateway:
        yield gateway


@pytest.fixture
def is_told(request: pytest.FixtureRequest) -> bool:
    """Whether a refusal is answered."""
    return bool(request.node.callspec.params["gateway"] == "metadata")


@pytest.fixture(scope="module")
def address(gateway: Gateway) -> str:
    return address_of(gateway)


@pytest.fixture
def worker(gateway: Gateway) -> int:
    """The pid of the only worker."""
    (pid,) = gateway.worker_pids()
    return pid


def outcomes(gateway: Gateway) -> dict[str, int]:
    found: dict[str, int] = gateway.stats()["inferential"]["observations"]
    return found


def lane(gateway: Gateway, name: str) -> dict[str, Any]:
    """Its stats; what has not happened yet is not in them, and counts as 0."""
    return defaultdict(int, gateway.stats()["lanes"][f"{name}/1"])


def is_served(address: str) -> bool:
    """Whether a client that does nothing wrong gets its answer."""
    with connected(address, "good") as connection:
        result = ask(connection.model("policy"), **joints(1))
        return result is not None and result["actions"].tolist() == [2.0] * 7


BAD = {
    "bytes that are not the shape's": ("ids", {"tensor__byte_length": 36}, "malformed"),
    "a shape that is not the bytes'": ("ids", {"tensor__shape": [7]}, "malformed"),
    "bytes beyond the payload": ("ids", {"tensor__byte_offset": 1}, "malformed"),
    "bytes far beyond it": ("ids", {"tensor__byte_offset": 2**64 - 1}, "malformed"),
    "a model that is not there": ("poliCy", {}, "model_not_found"),
    "a version that is not there": ("ids/9", {}, "model_not_found"),
    "no type": ("ids", {"tensor__dtype": 0}, "contract"),
    "a type that no client sends": ("ids", {"tensor__dtype": 4}, "contract"),
    "a type that is not there": ("ids", {"tensor__dtype": 999}, "contract"),
    "another type": ("ids", {"tensor__dtype": 3}, "contract"),
    "a picture": ("ids", {"tensor__encoding": 2}, "unsupported"),
    "an encoding that is not there": ("ids", {"tensor__encoding": 99}, "unsupported"),
    "another name": ("ids", {"tensor__key": "z"}, "contract"),
    "another model's": ("policy", {}, "contract"),
    "axes too many": ("ids", {"tensor__shape": [1, 1, 5]}, "contract"),
    "an axis below nothing": ("ids", {"tensor__shape": [-5]}, "malformed"),
    "a deadline that is none": ("ids", {"metadata": {"deadline_ms": "soon"}}, "malformed"),
    "a time to live below 0": ("ids", {"metadata": {"ttl_ms": "-1"}}, "malformed"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_observation_is_refused_by_name(
    gateway: Gateway, address: str, is_told: bool, case: str
) -> None:
    """And the next one on the same connection is served: one reply for each, or none."""
    model, fields, code = BAD[case]
    before = outcomes(gateway).get(code, 0)
    with Peer(address, b"bad") as peer:
        peer.send(b"", *observation(model, {"x": FIVE}, **fields))
        peer.send(b"", *observation("ids", {"x": FIVE}))
        if is_told:
            refusal = response(peer.read())
            assert (refusal.model_id, refusal.client.id) == (model, "peer")
            assert refusal.metadata["error_code"] == code
            assert refusal.metadata["error"] and not refusal.tensors
            assert refusal.metadata["error_retryable"] == "false"
            assert refusal.metadata["error_fault"] == "client"
        answer = peer.read()
        assert response(answer).model_id == "ids"
        assert np.frombuffer(answer[2], np.int64).tolist() == [1, 4, 7, 10, 13]
    assert outcomes(gateway)[code] == before + 1
    assert is_served(address)


NOBODYS = {
    "no delimiter": observation("ids", {"x": FIVE}),
    "no envelope": (b"",),
    "bytes that are no envelope": (b"", b"\xff\xff\xff", b""),
    "an empty envelope": (b"", b"", b""),
    "no client": (b"", *observation("ids", {"x": FIVE}, client="")),
    "no model": (b"", *observation("", {"x": FIVE})),
    "an envelope too large": (b"", *observation("m" * 70_000, {"x": FIVE})),
}


@pytest.mark.parametrize("case", NOBODYS)
def test_a_message_that_nobody_could_be_answered_for_is_counted(
    gateway: Gateway, address: str, case: str
) -> None:
    before = outcomes(gateway).get("malformed", 0)
    with Peer(address) as peer:
        peer.send(*NOBODYS[case])
        peer.send(b"", *observation("ids", {"x": FIVE}), b"a part too many")
        assert np.frombuffer(peer.read()[2], np.int64)[1] == 4
    assert outcomes(gateway)["malformed"] == before + 1
    assert gateway.stats()["inferential"]["last_error"]


READY = Peer.ready(b"cut off")
LARGE_PART = b"\x03" + (8 * MIB).to_bytes(8, "big")
CUT_OFF = {
    "another protocol": b"GET / HTTP/1.1\r\nhost: robots\r\n\r\n",
    "an old version": GREETING[:10] + b"\x01" + GREETING[11:],
    "security": GREETING.replace(b"NULL\0", b"PLAIN"),
    "another socket": GREETING + Peer.ready(b"", kind=b"SUB"),
    "no name": GREETING + Peer.message(b"", b""),
    "READY cut off": GREETING + READY[:1] + bytes((len(READY) - 3,)) + READY[2:-1],
    "flags that are not there": GREETING + READY + b"\xff\x00",
    "a part too large": GREETING + READY + b"\x03" + (21 * MIB).to_bytes(8, "big"),
    "a message too large": GREETING + READY + (LARGE_PART + bytes(8 * MIB)) * 3,
    "a message that does not end": GREETING + READY + b"\x01\x00" * 1000,
    "a command too large": GREETING + READY + b"\x06" + MIB.to_bytes(8, "big") + bytes(9000),
}  # fmt: skip


@pytest.mark.parametrize("case", CUT_OFF)
def test_a_peer_that_speaks_something_else_is_cut_off(
    gateway: Gateway, address: str, case: str
) -> None:
    before = gateway.stats()["inferential"]["connections_broken"]
    with Peer(address, is_greeted=False) as peer:
        with contextlib.suppress(ConnectionError):
            peer.socket.sendall(CUT_OFF[case])
        assert peer.is_closed()
    assert gateway.stats()["inferential"]["connections_broken"] == before + 1
    assert is_served(address)


def test_a_peer_that_asks_whether_anybody_is_there_is_told(address: str) -> None:
    """PING and PONG, also between the parts of a message."""
    ping = b"\x04\x0c\x04PING\x00\x0aheart"
    whole = Peer.message(b"", *observation("ids", {"x": FIVE}))
    with Peer(address) as peer:
        peer.socket.sendall(ping + whole[:9] + ping + whole[9:])
        for _ in range(2):
            assert peer.read_frame() == (4, b"\x04PONGheart")
        assert np.frombuffer(peer.read()[2], np.int64)[4] == 13


@pytest.mark.parametrize("is_bad", [True, False])
def test_a_flood_costs_nobody_else_anything(gateway: Gateway, address: str, is_bad: bool) -> None:
    """One client sends without end and reads nothing; others get every answer meanwhile."""
    one = Peer.message(b"", *observation("nobody" if is_bad else "ids", {"x": FIVE}))
    is_over = threading.Event()

    def flood() -> None:
        with Peer(address, b"flood") as peer, contextlib.suppress(OSError):
            peer.socket.settimeout(0.2)
            while not is_over.is_set():
                with contextlib.suppress(TimeoutError):
                    peer.socket.sendall(one * 100)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        for number in range(3):
            with connected(address, f"good-{number}") as connection:
                model = connection.model("ids")
                for value in range(50):
                    result = ask(model, x=np.array(value))
                    assert result is not None and result["y"] == 3 * value + 1
                    if value % 10 == 0:
                        assert lane(gateway, "ids")["queued"] <= WINDOW + 1
    finally:
        is_over.set()
        thread.join()
    eventually(lambda: gateway.stats()["inferential"]["clients"] == 0, what="no clients")
    gateway.wait_idle()


def test_a_client_that_does_not_read_stalls_only_itself(gateway: Gateway, address: str) -> None:
    """What it does not take is bounded, and all of it is there, in order, when it does.

    It sends more than both ends' sockets may hold, which the system lets grow to 32 MiB each.
    """
    rows, count = 100_000, 150
    large = np.zeros(rows, np.int64)
    sent = threading.Event()

    def send(peer: Peer) -> None:
        for number in range(count):
            large[0] = number
            peer.send(b"", *observation("ids", {"x": large}))
        sent.set()

    with Peer(address, b"deaf") as peer:
        thread = threading.Thread(target=send, args=(peer,))
        thread.start()

        def is_still() -> bool:
            before = lane(gateway, "ids")["requests"]
            threading.Event().wait(0.3)
            return bool(before == lane(gateway, "ids")["requests"] and before)

        eventually(is_still, what="a client that stalls")
        assert not sent.is_set(), "it was taken more than there is room for"
        resident = gateway.stats()["resident_bytes"]
        assert is_served(address)
        assert resident < 400 * MIB
        for number in range(count):
            answer = peer.read()
            results = np.frombuffer(answer[2], np.int64)
            assert len(results) == rows and results[0] == 3 * number + 1
        thread.join()
    gateway.wait_idle()


def test_two_clients_of_one_name_are_two_clients(address: str) -> None:
    with connected(address, "twin") as first, contextlib.ExitStack() as stack:
        second = stack.enter_context(connected(address, "twin"))
        for value in range(10):
            for number, twin in enumerate((first, second)):
                result = ask(twin.model("ids"), x=np.array(value + 100 * number))
                assert result is not None and result["y"] == 3 * (value + 100 * number) + 1
        stack.close()
        result = ask(first.model("ids"), x=np.array(7))
        assert result is not None and result["y"] == 22
        with connected(address, "twin") as third:
            for twin in (third, first):
                assert ask(twin.model("ids"), x=np.array(7)) is not None


def test_an_answer_that_comes_too_late_is_not_the_next_ones(
    gateway: Gateway, address: str, worker: int
) -> None:
    """Replies have no numbers: one that came late would be taken for that of the next."""
    before = outcomes(gateway).get("late", 0)
    with connected(address, "late") as connection:
        model = connection.model("ids")
        with suspended(worker):
            model.observe(x=np.array(1), deadline_ms="100")
            assert model.get_result(timeout_ms=300) is None
        eventually(lambda: outcomes(gateway).get("late", 0) == before + 1)
        result = ask(model, x=np.array(2))
        assert result is not None and result["y"] == 7
        assert model.get_result(timeout_ms=0) is None


@contextlib.contextmanager
def busy(gateway: Gateway, address: str, worker: int, model: str) -> Iterator[None]:
    """What is asked in the block waits: the worker does nothing, and has all that it takes."""
    with contextlib.ExitStack() as stack:
        robots = [stack.enter_context(connected(address, f"busy-{i}")) for i in range(2)]
        with suspended(worker):
            for number, robot in enumerate(robots):
                robot.model(model).observe(x=np.array(number))
                eventually(lambda n=number: gateway.stats()["workers"][0]["in_flight"] == n + 1)
            yield
        for number, robot in enumerate(robots):
            result = robot.model(model).get_result(timeout_ms=PATIENCE_MS)
            assert result is not None and result["y"] == 3 * number + 1


def test_what_has_waited_its_time_does_not_run(
    gateway: Gateway, address: str, worker: int, is_told: bool
) -> None:
    before, batches = outcomes(gateway).get("deadline_exceeded", 0), lane(gateway, "ids")["batches"]
    with connected(address, "brief") as brief:
        model = brief.model("ids")
        with busy(gateway, address, worker, "ids"):
            model.observe(x=np.array(9), ttl_ms="50")
            eventually(lambda: outcomes(gateway).get("deadline_exceeded", 0) == before + 1)
        if is_told:
            refusal = model.get_result(timeout_ms=PATIENCE_MS)
            assert refusal is not None and refusal["error_code"] == "deadline_exceeded"
        assert ask(model, x=np.array(4))["y"] == 13
    assert lane(gateway, "ids")["batches"] == batches + 3


def test_what_is_urgent_does_not_give_way_to_what_is_not(
    gateway: Gateway, address: str, worker: int, is_told: bool
) -> None:
    """A queue of two: the least important gives way, or is not let in."""
    before = outcomes(gateway)
    with contextlib.ExitStack() as stack:
        robots = [stack.enter_context(connected(address, f"tier-{i}")) for i in range(5)]
        models = [robot.model("few") for robot in robots]

        def observe(number: int, priority: int) -> None:
            models[number].observe(x=np.array(number), priority=priority)

        with busy(gateway, address, worker, "few"):
            for number, priority in enumerate((7, 0)):
                observe(number, priority)
                eventually(lambda n=number: lane(gateway, "few")["queued"] == n + 1)
            observe(2, 0)  # In the place of the first.
            eventually(lambda: outcomes(gateway).get("dropped", 0) == before.get("dropped", 0) + 1)
            for number, count in ((3, 1), (4, 2)):
                observe(number, 7)
                full = before.get("queue_full", 0) + count
                eventually(lambda full=full: outcomes(gateway).get("queue_full", 0) == full)
        for number in (1, 2):
            result = models[number].get_result(timeout_ms=PATIENCE_MS)
            assert result is not None and result["y"] == 3 * number + 1
        for number, code in ((0, "dropped"), (3, "queue_full"), (4, "queue_full")):
            if not is_told:
                assert models[number].get_result(timeout_ms=0) is None
            else:
                refusal = models[number].get_result(timeout_ms=PATIENCE_MS)
                assert refusal is not None and refusal["error_code"] == code
                assert refusal["error_retryable"] == "true"


def test_only_the_newest_waits_where_that_is_wanted(
    gateway: Gateway, address: str, worker: int, is_told: bool
) -> None:
    """Of one client: another of the same name is not in its way."""
    before = outcomes(gateway).get("superseded", 0)
    with connected(address, "newest") as robot, connected(address, "newest") as other:
        with busy(gateway, address, worker, "ids"):
            other.model("ids").observe(x=np.array(50), newest_wins="true")
            for number in range(5):
                robot.model("ids").observe(x=np.array(number), newest_wins="true")
            eventually(lambda: outcomes(gateway).get("superseded", 0) == before + 4)
        if is_told:
            for _ in range(4):
                refusal = robot.model("ids").get_result(timeout_ms=PATIENCE_MS)
                assert refusal is not None and refusal["error_code"] == "superseded"
        result = robot.model("ids").get_result(timeout_ms=PATIENCE_MS)
        assert result is not None and result["y"] == 13
        result = other.model("ids").get_result(timeout_ms=PATIENCE_MS)
        assert result is not None and result["y"] == 151


def test_a_client_that_leaves_is_waited_for_by_nobody(
    gateway: Gateway, address: str, worker: int
) -> None:
    before = lane(gateway, "ids")["requests"]
    withdrawn = lane(gateway, "ids")["withdrawn"]
    with busy(gateway, address, worker, "ids"):
        with connected(address, "leaves") as robot:
            for number in range(3):
                robot.model("ids").observe(x=np.array(number))
            eventually(lambda: lane(gateway, "ids")["requests"] == before + 5)
        eventually(lambda: lane(gateway, "ids")["withdrawn"] == withdrawn + 3)
        assert lane(gateway, "ids")["queued"] == 0
    gateway.wait_idle()


@pytest.mark.slow
def test_a_server_that_has_nothing_to_do_does_nothing(gateway: Gateway, address: str) -> None:
    """Less than a hundredth of a core, with clients that are connected and silent."""
    window_s = 8.0
    with contextlib.ExitStack() as stack:
        for number in range(8):
            robot = stack.enter_context(connected(address, f"idle-{number}"))
            assert ask(robot.model("ids"), x=np.array(number)) is not None
        processes = [psutil.Process(pid) for pid in (gateway.pid, *gateway.worker_pids())]

        def used_s() -> float:
            begun = [process.cpu_times() for process in processes]
            threading.Event().wait(window_s)
            ended = [process.cpu_times() for process in processes]
            return sum(
                after.user - before.user + after.system - before.system
                for before, after in zip(begun, ended, strict=True)
            )

        # What comes of the clients' farewells and greetings may fall into one look, not into two.
        assert min(used_s() for _ in range(2)) < window_s / 100
