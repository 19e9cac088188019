"""Event stream of real gateways, as subscribers of other programs receive it."""

from __future__ import annotations

import json
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pyarrow as pa
import pytest
import zmq
from pyarrow import flight
from support import models
from support.processes import BIN, Gateway, eventually, running
from support.proxies import free_ports

from iskander.errors import IskanderError

ROOT = Path(__file__).resolve().parent.parent.parent
BATCH = pa.record_batch({"x": pa.array([1, 2, 3], pa.int64())})
TRACE = "0af7651916cd43dd8448eb211c80319c"
TOPIC = "completion/ids/1"
WITHIN_S = 20.0
GROWN_BYTES_MAX = 16 << 20
SUBSCRIBER_ENDED = "subscriber ended: more than 256 subscriptions"

Message = tuple[str, dict[str, Any]]


def served(folder: Path) -> list[dict[str, Any]]:
    return [{"name": "ids", "path": str(models.row_ids(folder / "ids"))}]


@contextmanager
def subscribed(address: str, *topics: str, **options: int) -> Iterator[Any]:
    """A plain SUB socket."""
    context: Any = zmq.Context()
    sub: Any = context.socket(zmq.SUB)
    sub.linger = 0
    for name, value in options.items():
        setattr(sub, name, value)
    for topic in topics or ("",):
        sub.subscribe(topic)
    sub.connect(address)
    try:
        yield sub
    finally:
        sub.close()
        context.term()


def messages(sub: Any) -> Iterator[Message]:
    """Messages until the caller has what it waits for; fails after a timeout."""
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        if sub.poll(100):
            topic, body = sub.recv_multipart()
            yield topic.decode(), msgspec.msgpack.decode(body)
    raise AssertionError(f"the expected message did not come within {WITHIN_S:g} s")


def events_until(sub: Any, is_last: Callable[[str, dict[str, Any]], bool]) -> list[Message]:
    """Events by topic, up to one that meets a condition."""
    events: list[Message] = []
    for topic, message in messages(sub):
        for event in message.get("events", ()):
            events.append((topic, event))
            if is_last(topic, event):
                return events
    return events


def wait_for_subscription(sub: Any) -> dict[str, Any]:
    """Wait for a heartbeat: the publisher knows the subscription."""
    return next(message for topic, message in messages(sub) if topic == "heartbeat")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("events")
    address = f"ipc://{folder}/events"
    with running(folder, served(folder), events={"address": address}) as gateway:
        yield gateway
    assert not (folder / "events").exists()


def address_of(gateway: Gateway) -> str:
    return f"ipc://{gateway.folder}/events"


def test_requests_are_published(gateway: Gateway) -> None:
    with subscribed(address_of(gateway), "completion/", "heartbeat") as sub:
        wait_for_subscription(sub)
        headers = ((b"traceparent", f"00-{TRACE}-b7ad6b7169203331-01".encode()),)
        options = flight.FlightCallOptions(headers=list(headers))
        with flight.connect(f"grpc://{gateway.address}") as client:
            path = flight.FlightDescriptor.for_path("ids")
            writer, reader = client.do_exchange(path, options)
            writer.begin(BATCH.schema)
            writer.write_batch(BATCH)
            reader.read_chunk()
            writer.close()
        with gateway.client() as client, pytest.raises(IskanderError):
            client.score("unknown", BATCH)
        found = events_until(sub, lambda topic, _: topic == "completion//")
        stats = gateway.stats()["events"]

    (completed,) = [event for topic, event in found if topic == TOPIC]
    assert completed["kind"] == "completion" and completed["outcome"] == "ok"
    assert (completed["model"], completed["version"], completed["rows"]) == ("ids", "1", 3)
    assert (completed["protocol"], completed["trace_id"]) == ("grpc", TRACE)
    assert 0 < completed["run_ns"] < completed["total_ns"] and completed["queue_ns"] > 0
    assert abs(completed["at_s"] - time.time()) < 600
    (refused,) = [event for topic, event in found if topic == "completion//"]
    assert (refused["outcome"], refused["rows"]) == ("model_not_found", 0)
    assert stats["address"] == address_of(gateway) and stats["dropped"] == 0


def test_long_subscription_ends_only_its_connection(gateway: Gateway) -> None:
    """The limit is that of ZMTP frames, which the gateway would buffer."""
    address = address_of(gateway)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(52, b"\0")
    ready = b"\x05READY\x0bSocket-Type" + (3).to_bytes(4, "big") + b"SUB"
    with subscribed(address) as other, socket.socket(socket.AF_UNIX) as hostile:
        hostile.settimeout(WITHIN_S)
        hostile.connect(address.removeprefix("ipc://"))
        hostile.sendall(greeting + bytes((4, len(ready))) + ready)
        hostile.sendall(b"\x02" + (1 << 24).to_bytes(8, "big") + b"\x01topic")
        while hostile.recv(1024):
            pass
        wait_for_subscription(other)


def test_subscriptions_without_end_take_bounded_memory_and_others_go_on(gateway: Gateway) -> None:
    """A SUB socket that connects again after each end of its connection."""
    process = psutil.Process(gateway.pid)
    topics = [secrets.token_hex(8) for _ in range(200_000)]
    with subscribed(address_of(gateway), "completion/ids/", "heartbeat") as honest:
        wait_for_subscription(honest)
        before = process.memory_info().rss

        def grown_bytes() -> int:
            return int(process.memory_info().rss) - before

        with subscribed(address_of(gateway), *topics, sndhwm=0), gateway.client() as client:

            def is_over() -> bool:
                client.score("ids", BATCH)  # ZeroMQ's PUB reads subscriptions when it sends.
                return grown_bytes() > GROWN_BYTES_MAX or SUBSCRIBER_ENDED in gateway.text()

            eventually(is_over)
            assert events_until(honest, lambda topic, _: topic == TOPIC)
            wait_for_subscription(honest)
            assert grown_bytes() < GROWN_BYTES_MAX
            assert SUBSCRIBER_ENDED in gateway.text()


@pytest.mark.slow
def test_changes_are_published(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/events"
    with (
        running(tmp_path, served(tmp_path), events={"address": address}) as gateway,
        subscribed(address, "worker", "heartbeat") as sub,
    ):
        wait_for_subscription(sub)
        gateway.kill_worker()
        found = events_until(
            sub, lambda _, event: event.get("fields", {}).get("change") == "loaded"
        )
        gateway.wait_ready()

    assert {topic for topic, _ in found} == {"worker"}
    changes = [event["fields"].get("change", event["event"]) for _, event in found]
    for name in ("worker_process_exited", "worker_loaded_model"):
        changes.remove(name)
    assert changes == ["lost", "spawn due", "attached", "loaded"]


@pytest.mark.slow
def test_slow_subscriber_loses_events_and_can_count_them(tmp_path: Path) -> None:
    address, sent = f"ipc://{tmp_path}/events", 4000
    options = {"address": address, "subscriber_messages": 1}
    with (
        running(tmp_path, served(tmp_path), events=options) as gateway,
        subscribed(address, "completion/ids/", "heartbeat", rcvhwm=1) as sub,
    ):
        wait_for_subscription(sub)
        with gateway.client() as client:
            for _ in client.stream("ids", (BATCH for _ in range(sent))):
                pass
        eventually(lambda: gateway.stats()["events"]["published"] >= sent)

        received = lost = following = 0
        for topic, message in messages(sub):
            first = message["next"].get(TOPIC, 0) if topic == "heartbeat" else message["first"]
            count = len(message.get("events", ()))
            lost, received, following = lost + first - following, received + count, first + count
            assert message["dropped"] == 0
            if following == sent:
                break

    assert received and lost and received + lost == sent


@pytest.mark.slow
def test_events_that_the_server_drops_are_counted(tmp_path: Path) -> None:
    address, sent = f"ipc://{tmp_path}/events", 300
    options = {"address": address, "queue": 2}
    with (
        running(tmp_path, served(tmp_path), events=options) as gateway,
        subscribed(address, "completion/ids/", "heartbeat") as sub,
    ):
        before = wait_for_subscription(sub)["dropped"]
        with gateway.client() as client:
            for _ in client.stream("ids", (BATCH for _ in range(sent))):
                pass
        received = dropped = 0
        for topic, message in messages(sub):
            received += len(message.get("events", ()))
            dropped = message["dropped"] - before
            if topic == "heartbeat" and message["next"].get(TOPIC, 0) + dropped == sent:
                break

    assert received and dropped and received + dropped == sent


@pytest.mark.slow
def test_several_processes_have_one_address(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    address = f"tcp://127.0.0.1:{port}"
    with subscribed(address, reconnect_ivl=10) as sub:
        with running(
            tmp_path, served(tmp_path), events={"address": address}, server={"processes": 2}
        ) as gateway:
            found = events_until(sub, lambda _, event: event.get("event") == "processes_ready")
            assert gateway.stats()["events"]["address"] == address
            with gateway.client() as client:
                for _ in range(5):
                    client.score("ids", BATCH)
            scored: dict[int | None, int] = {}
            for topic, message in messages(sub):
                if topic == TOPIC:
                    scored.setdefault(message["process"], 0)
                    scored[message["process"]] += len(message["events"])
                if sum(scored.values()) == 5:
                    break
            assert scored.keys() <= {0, 1}
        last = events_until(sub, lambda _, event: event.get("event") == "stopped")
    assert [event["event"] for topic, event in found if topic == "gateway"][-1] == "processes_ready"
    assert last


@pytest.mark.slow
def test_address_in_use_is_a_configuration_error(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/events"
    with running(tmp_path, served(tmp_path), events={"address": address}):
        other = Gateway(tmp_path, served(tmp_path / "other"), events={"address": address},
                        server={"runtime_directory": str(tmp_path / "other-run")})  # fmt: skip
        other.log = tmp_path / "other.log"
        other.start(is_ready=False)
        assert other.wait() == 78
        assert "another process listens on this path" in other.log.read_text()


def test_command_prints_events(gateway: Gateway) -> None:
    words = ["--topic", "completion/ids/", "--count", "3"]
    asking = start("iskander", "events", "--address", gateway.address, "--json", *words)
    direct = start("iskander", "events", "--address", address_of(gateway), *words)
    with gateway.client() as client:
        eventually(
            lambda: client.score("ids", BATCH) and {asking.poll(), direct.poll()} == {0},
            what="the end of both",
        )
    (out, errors), (text, _) = asking.communicate(), direct.communicate()
    events = [json.loads(line) for line in out.splitlines()]
    expected = [(TOPIC, "ok", 3)] * 3
    assert [(event["topic"], event["outcome"], event["rows"]) for event in events] == expected
    assert "0 events lost, 0 dropped by the server" in errors
    assert re.match(r"\d\d:\d\d:\d\d completion/ids/1 ok: 3 rows, queue \d+\.\d\d ms, run ", text)


@pytest.mark.slow
def test_command_explains_a_server_without_a_stream(tmp_path: Path) -> None:
    with running(tmp_path, served(tmp_path)) as gateway:
        assert gateway.stats()["events"] == {}
        done = start("iskander", "events", "--address", gateway.address)
        _, errors = done.communicate(timeout=60)
    assert done.returncode == 2 and "has no event stream (`events.address`)" in errors


def test_example_of_the_documentation(gateway: Gateway) -> None:
    page = (ROOT / "docs" / "events.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    program = subprocess.Popen(
        [sys.executable, "-c", example, address_of(gateway)], stdout=subprocess.PIPE, text=True
    )
    try:
        with gateway.client() as client:
            eventually(lambda: client.score("ids", BATCH) and _has_line(program))
        assert program.stdout is not None
        assert re.match(r"completion/ids/1 ok 3 \d+\n", program.stdout.readline())
    finally:
        program.kill()
        program.communicate()


def _has_line(program: subprocess.Popen[str]) -> bool:
    poller = zmq.Poller()
    assert program.stdout is not None
    poller.register(program.stdout.fileno(), zmq.POLLIN)
    return bool(poller.poll(20))


def start(command: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(BIN / command), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
