"""Invalid, flooding and slow Inferential clients do not affect other clients."""

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
    TIMEOUT_MS,
    Peer,
    address_of,
    ask,
    connected,
    joints,
    observation,
    policy,
    response,
)

FIVE_ROWS = np.arange(5)
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
def sends_errors(request: pytest.FixtureRequest) -> bool:
    """Returns whether the server sends error replies (`inferential.errors`)."""
    return bool(request.node.callspec.params["gateway"] == "metadata")


@pytest.fixture(scope="module")
def address(gateway: Gateway) -> str:
    return address_of(gateway)


@pytest.fixture
def worker(gateway: Gateway) -> int:
    """Returns the pid of the only worker."""
    (pid,) = gateway.worker_pids()
    return pid


def outcomes(gateway: Gateway) -> dict[str, int]:
    counts: dict[str, int] = gateway.stats()["inferential"]["observations"]
    return counts


def lane(gateway: Gateway, name: str) -> dict[str, Any]:
    """Returns the lane's stats; counters that are not in them yet are 0."""
    return defaultdict(int, gateway.stats()["lanes"][f"{name}/1"])


def is_served(address: str) -> bool:
    """Returns whether a valid client gets its result."""
    with connected(address, "good") as connection:
        result = ask(connection.model("policy"), **joints(1))
        return result is not None and result["actions"].tolist() == [2.0] * 7


INVALID = {
    "byte length below the shape": ("ids", {"tensor__byte_length": 36}, "malformed"),
    "shape above the byte length": ("ids", {"tensor__shape": [7]}, "malformed"),
    "offset beyond the payload": ("ids", {"tensor__byte_offset": 1}, "malformed"),
    "offset of 2**64 - 1": ("ids", {"tensor__byte_offset": 2**64 - 1}, "malformed"),
    "unknown model": ("poliCy", {}, "model_not_found"),
    "unknown version": ("ids/9", {}, "model_not_found"),
    "no type": ("ids", {"tensor__dtype": 0}, "contract"),
    "type that no client sends": ("ids", {"tensor__dtype": 4}, "contract"),
    "unknown type": ("ids", {"tensor__dtype": 999}, "contract"),
    "wrong type": ("ids", {"tensor__dtype": 3}, "contract"),
    "image encoding": ("ids", {"tensor__encoding": 2}, "unsupported"),
    "unknown encoding": ("ids", {"tensor__encoding": 99}, "unsupported"),
    "wrong tensor name": ("ids", {"tensor__key": "z"}, "contract"),
    "tensors of another model": ("policy", {}, "contract"),
    "too many axes": ("ids", {"tensor__shape": [1, 1, 5]}, "contract"),
    "negative axis": ("ids", {"tensor__shape": [-5]}, "malformed"),
    "invalid deadline": ("ids", {"metadata": {"deadline_ms": "soon"}}, "malformed"),
    "negative time to live": ("ids", {"metadata": {"ttl_ms": "-1"}}, "malformed"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_observation_gets_its_error_code(
    gateway: Gateway, address: str, sends_errors: bool, case: str
) -> None:
    """The next observation on the same connection is served."""
    model, fields, code = INVALID[case]
    before = outcomes(gateway).get(code, 0)
    with Peer(address, b"bad") as peer:
        peer.send(b"", *observation(model, {"x": FIVE_ROWS}, **fields))
        peer.send(b"", *observation("ids", {"x": FIVE_ROWS}))
        if sends_errors:
            error = response(peer.read())
            assert (error.model_id, error.client.id) == (model, "peer")
            assert error.metadata["error_code"] == code
            assert error.metadata["error"] and not error.tensors
            assert error.metadata["error_retryable"] == "false"
            assert error.metadata["error_fault"] == "client"
        reply = peer.read()
        assert response(reply).model_id == "ids"
        assert np.frombuffer(reply[2], np.int64).tolist() == [1, 4, 7, 10, 13]
    assert outcomes(gateway)[code] == before + 1
    assert is_served(address)


UNANSWERABLE = {
    "no delimiter": observation("ids", {"x": FIVE_ROWS}),
    "no envelope": (b"",),
    "invalid envelope": (b"", b"\xff\xff\xff", b""),
    "empty envelope": (b"", b"", b""),
    "no client": (b"", *observation("ids", {"x": FIVE_ROWS}, client="")),
    "no model": (b"", *observation("", {"x": FIVE_ROWS})),
    "too large envelope": (b"", *observation("m" * 70_000, {"x": FIVE_ROWS})),
}


@pytest.mark.parametrize("case", UNANSWERABLE)
def test_message_without_a_reply_address_is_counted(
    gateway: Gateway, address: str, case: str
) -> None:
    before = outcomes(gateway).get("malformed", 0)
    with Peer(address) as peer:
        peer.send(*UNANSWERABLE[case])
        peer.send(b"", *observation("ids", {"x": FIVE_ROWS}), b"an extra part")
        assert np.frombuffer(peer.read()[2], np.int64)[1] == 4
    assert outcomes(gateway)["malformed"] == before + 1
    assert gateway.stats()["inferential"]["last_error"]


READY = Peer.ready(b"cut off")
LARGE_PART = b"\x03" + (8 * MIB).to_bytes(8, "big")
PROTOCOL_ERRORS = {
    "HTTP": b"GET / HTTP/1.1\r\nhost: robots\r\n\r\n",
    "old version": GREETING[:10] + b"\x01" + GREETING[11:],
    "security mechanism": GREETING.replace(b"NULL\0", b"PLAIN"),
    "wrong socket type": GREETING + Peer.ready(b"", kind=b"SUB"),
    "message before READY": GREETING + Peer.message(b"", b""),
    "truncated READY": GREETING + READY[:1] + bytes((len(READY) - 3,)) + READY[2:-1],
    "unknown flags": GREETING + READY + b"\xff\x00",
    "too large part": GREETING + READY + b"\x03" + (21 * MIB).to_bytes(8, "big"),
    "too large message": GREETING + READY + (LARGE_PART + bytes(8 * MIB)) * 3,
    "endless message": GREETING + READY + b"\x01\x00" * 1000,
    "too large command": GREETING + READY + b"\x06" + MIB.to_bytes(8, "big") + bytes(9000),
}  # fmt: skip


@pytest.mark.parametrize("case", PROTOCOL_ERRORS)
def test_protocol_error_closes_the_connection(gateway: Gateway, address: str, case: str) -> None:
    before = gateway.stats()["inferential"]["connections_broken"]
    with Peer(address, is_greeted=False) as peer:
        with contextlib.suppress(ConnectionError):
            peer.socket.sendall(PROTOCOL_ERRORS[case])
        assert peer.is_closed()
    assert gateway.stats()["inferential"]["connections_broken"] == before + 1
    assert is_served(address)


def test_ping_is_answered_between_and_inside_messages(address: str) -> None:
    ping = b"\x04\x0c\x04PING\x00\x0aheart"
    message = Peer.message(b"", *observation("ids", {"x": FIVE_ROWS}))
    with Peer(address) as peer:
        peer.socket.sendall(ping + message[:9] + ping + message[9:])
        for _ in range(2):
            assert peer.read_frame() == (4, b"\x04PONGheart")
        assert np.frombuffer(peer.read()[2], np.int64)[4] == 13


@pytest.mark.parametrize("is_bad", [True, False])
def test_flood_does_not_affect_other_clients(gateway: Gateway, address: str, is_bad: bool) -> None:
    """One client sends without a pause and reads nothing."""
    message = Peer.message(b"", *observation("unknown" if is_bad else "ids", {"x": FIVE_ROWS}))
    stopped = threading.Event()

    def flood() -> None:
        with Peer(address, b"flood") as peer, contextlib.suppress(OSError):
            peer.socket.settimeout(0.2)
            while not stopped.is_set():
                with contextlib.suppress(TimeoutError):
                    peer.socket.sendall(message * 100)

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
        stopped.set()
        thread.join()
    eventually(lambda: gateway.stats()["inferential"]["clients"] == 0, what="no connected clients")
    gateway.wait_idle()


def test_client_that_does_not_read_stalls_only_itself(gateway: Gateway, address: str) -> None:
    """Its unread results are bounded, and it can read all of them later, in order.

    It sends more than the socket buffers of both ends hold; each can grow to 32 MiB.
    """
    rows, count = 100_000, 150
    large = np.zeros(rows, np.int64)
    sent = threading.Event()

    def send(peer: Peer) -> None:
        for number in range(count):
            large[0] = number
            peer.send(b"", *observation("ids", {"x": large}))
        sent.set()

    with Peer(address, b"slow-reader") as peer:
        thread = threading.Thread(target=send, args=(peer,))
        thread.start()

        def is_stalled() -> bool:
            before = lane(gateway, "ids")["requests"]
            threading.Event().wait(0.3)
            return bool(before == lane(gateway, "ids")["requests"] and before)

        eventually(is_stalled, what="a stalled client")
        assert not sent.is_set(), "the server read more than it can buffer"
        resident = gateway.stats()["resident_bytes"]
        assert is_served(address)
        assert resident < 400 * MIB
        for number in range(count):
            reply = peer.read()
            results = np.frombuffer(reply[2], np.int64)
            assert len(results) == rows and results[0] == 3 * number + 1
        thread.join()
    gateway.wait_idle()


def test_clients_with_the_same_name_get_their_own_results(address: str) -> None:
    with connected(address, "same-name") as first, contextlib.ExitStack() as stack:
        second = stack.enter_context(connected(address, "same-name"))
        for value in range(10):
            for number, client in enumerate((first, second)):
                result = ask(client.model("ids"), x=np.array(value + 100 * number))
                assert result is not None and result["y"] == 3 * (value + 100 * number) + 1
        stack.close()
        result = ask(first.model("ids"), x=np.array(7))
        assert result is not None and result["y"] == 22
        with connected(address, "same-name") as third:
            for client in (third, first):
                assert ask(client.model("ids"), x=np.array(7)) is not None


def test_result_after_its_deadline_is_not_sent(gateway: Gateway, address: str, worker: int) -> None:
    """Replies have no numbers, so the client would match a late reply to its next observation."""
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
    """Suspends the worker with all its credits in use, so that requests in the block queue."""
    with contextlib.ExitStack() as stack:
        robots = [stack.enter_context(connected(address, f"busy-{i}")) for i in range(2)]
        with suspended(worker):
            for number, robot in enumerate(robots):
                robot.model(model).observe(x=np.array(number))
                eventually(lambda n=number: gateway.stats()["workers"][0]["in_flight"] == n + 1)
            yield
        for number, robot in enumerate(robots):
            result = robot.model(model).get_result(timeout_ms=TIMEOUT_MS)
            assert result is not None and result["y"] == 3 * number + 1


def test_observation_above_its_time_to_live_does_not_run(
    gateway: Gateway, address: str, worker: int, sends_errors: bool
) -> None:
    before, batches = outcomes(gateway).get("deadline_exceeded", 0), lane(gateway, "ids")["batches"]
    with connected(address, "short-ttl") as robot:
        model = robot.model("ids")
        with busy(gateway, address, worker, "ids"):
            model.observe(x=np.array(9), ttl_ms="50")
            eventually(lambda: outcomes(gateway).get("deadline_exceeded", 0) == before + 1)
        if sends_errors:
            error = model.get_result(timeout_ms=TIMEOUT_MS)
            assert error is not None and error["error_code"] == "deadline_exceeded"
        assert ask(model, x=np.array(4))["y"] == 13
    assert lane(gateway, "ids")["batches"] == batches + 3


def test_full_queue_drops_the_lowest_priority(
    gateway: Gateway, address: str, worker: int, sends_errors: bool
) -> None:
    """The queue holds two: the lowest priority is dropped from it, or not admitted."""
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
            observe(2, 0)  # Replaces the first request.
            eventually(lambda: outcomes(gateway).get("dropped", 0) == before.get("dropped", 0) + 1)
            for number, count in ((3, 1), (4, 2)):
                observe(number, 7)
                full = before.get("queue_full", 0) + count
                eventually(lambda full=full: outcomes(gateway).get("queue_full", 0) == full)
        for number in (1, 2):
            result = models[number].get_result(timeout_ms=TIMEOUT_MS)
            assert result is not None and result["y"] == 3 * number + 1
        for number, code in ((0, "dropped"), (3, "queue_full"), (4, "queue_full")):
            if not sends_errors:
                assert models[number].get_result(timeout_ms=0) is None
            else:
                error = models[number].get_result(timeout_ms=TIMEOUT_MS)
                assert error is not None and error["error_code"] == code
                assert error["error_retryable"] == "true"


def test_newest_wins_supersedes_older_observations_of_the_client(
    gateway: Gateway, address: str, worker: int, sends_errors: bool
) -> None:
    """It does not supersede those of another client with the same name."""
    before = outcomes(gateway).get("superseded", 0)
    with connected(address, "newest") as robot, connected(address, "newest") as other:
        with busy(gateway, address, worker, "ids"):
            other.model("ids").observe(x=np.array(50), newest_wins="true")
            for number in range(5):
                robot.model("ids").observe(x=np.array(number), newest_wins="true")
            eventually(lambda: outcomes(gateway).get("superseded", 0) == before + 4)
        if sends_errors:
            for _ in range(4):
                error = robot.model("ids").get_result(timeout_ms=TIMEOUT_MS)
                assert error is not None and error["error_code"] == "superseded"
        result = robot.model("ids").get_result(timeout_ms=TIMEOUT_MS)
        assert result is not None and result["y"] == 13
        result = other.model("ids").get_result(timeout_ms=TIMEOUT_MS)
        assert result is not None and result["y"] == 151


def test_disconnect_withdraws_queued_observations(
    gateway: Gateway, address: str, worker: int
) -> None:
    before = lane(gateway, "ids")["requests"]
    withdrawn = lane(gateway, "ids")["withdrawn"]
    with busy(gateway, address, worker, "ids"):
        with connected(address, "disconnects") as robot:
            for number in range(3):
                robot.model("ids").observe(x=np.array(number))
            eventually(lambda: lane(gateway, "ids")["requests"] == before + 5)
        eventually(lambda: lane(gateway, "ids")["withdrawn"] == withdrawn + 3)
        assert lane(gateway, "ids")["queued"] == 0
    gateway.wait_idle()


@pytest.mark.slow
def test_idle_server_uses_less_than_one_percent_of_a_core(gateway: Gateway, address: str) -> None:
    """The clients are connected and send nothing."""
    window_s = 8.0
    with contextlib.ExitStack() as stack:
        for number in range(8):
            robot = stack.enter_context(connected(address, f"idle-{number}"))
            assert ask(robot.model("ids"), x=np.array(number)) is not None
        processes = [psutil.Process(pid) for pid in (gateway.pid, *gateway.worker_pids())]

        def used_s() -> float:
            start = [process.cpu_times() for process in processes]
            threading.Event().wait(window_s)
            end = [process.cpu_times() for process in processes]
            return sum(
                after.user - before.user + after.system - before.system
                for before, after in zip(start, end, strict=True)
            )

        # Clients of earlier tests may still disconnect in the first interval, but not in both.
        assert min(used_s() for _ in range(2)) < window_s / 100
