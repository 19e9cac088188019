"""Inferential's listener: drain, several processes, Unix sockets, and invalid addresses."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from onnx import TensorProto, helper
from support.models import row_ids, save
from support.processes import BIN, Gateway, eventually, render_config, running, suspended
from support.robots import (
    TIMEOUT_MS,
    Peer,
    address_of,
    ask,
    connected,
    observation,
    response,
)

from iskander.config.loader import load_config

ROWS, WIDTH = 256, 8192


@pytest.fixture
def models(tmp_path: Path) -> list[dict[str, Any]]:
    return [{"name": "ids", "path": str(row_ids(tmp_path / "ids"))}]


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@contextlib.contextmanager
def zmq_socket(kind: int, address: str, identity: bytes = b"") -> Iterator[zmq.Socket[bytes]]:
    """Opens a libzmq socket."""
    context = zmq.Context()
    opened = context.socket(kind)
    opened.linger, opened.rcvtimeo = 0, TIMEOUT_MS
    if identity:
        opened.routing_id = identity
    opened.connect(address)
    try:
        yield opened
    finally:
        opened.close()
        context.term()


def test_drain_answers_accepted_observations(tmp_path: Path, models: list[dict[str, Any]]) -> None:
    with running(
        tmp_path, models, workers={"count": 1}, inferential={"address": "tcp://127.0.0.1:0"}
    ) as gateway:
        address = address_of(gateway)
        (worker,) = gateway.worker_pids()
        with contextlib.ExitStack() as stack:
            robots = [stack.enter_context(connected(address, f"robot-{i}")) for i in range(4)]
            with suspended(worker):
                for number, robot in enumerate(robots):
                    robot.model("ids").observe(x=np.array(number))
                eventually(lambda: gateway.stats()["lanes"]["ids/1"].get("requests") == 4)
                gateway.signal(signal.SIGTERM)
                eventually(lambda: "draining" in gateway.text())
            for number, robot in enumerate(robots):
                result = robot.model("ids").get_result(timeout_ms=TIMEOUT_MS)
                assert result is not None and result["y"] == 3 * number + 1
            assert gateway.wait() == 0


@pytest.mark.slow
def test_drain_sends_all_bytes_of_a_reply_to_a_slow_reader(tmp_path: Path) -> None:
    models = [{"name": "wide", "path": str(wide(tmp_path / "wide")), "max_batch_rows": ROWS}]
    with running(tmp_path, models, inferential={"address": "tcp://127.0.0.1:0"}) as gateway:
        with Peer(address_of(gateway), b"slow") as peer:
            peer.send(b"", *observation("wide", {"x": np.arange(ROWS)}))
            outcomes = {"answered": 1}
            eventually(lambda: gateway.stats()["inferential"]["observations"] == outcomes)
            gateway.signal(signal.SIGTERM)
            time.sleep(2.0)
            body = peer.read()[2]
        assert np.frombuffer(body, np.float32)[::WIDTH].tolist() == list(range(ROWS))
        assert gateway.wait() == 0


def wide(folder: Path) -> Path:
    """Saves a model that repeats `x` in each row of `y`: more than socket buffers hold."""
    return save(
        folder,
        [
            helper.make_node("Cast", ["x"], ["column"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["column", "axis"], ["narrow"]),
            helper.make_node("Mul", ["narrow", "ones"], ["y"]),
        ],
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["rows"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", WIDTH])],
        [
            helper.make_tensor("axis", TensorProto.INT64, [1], [1]),
            helper.make_tensor("ones", TensorProto.FLOAT, [1, WIDTH], [1.0] * WIDTH),
        ],
    )


@pytest.mark.slow
def test_clients_reconnect_after_a_restart(tmp_path: Path, models: list[dict[str, Any]]) -> None:
    gateway = Gateway(tmp_path, models, inferential={"address": f"tcp://127.0.0.1:{free_port()}"})
    try:
        gateway.start()
        with connected(address_of(gateway), reconnect_max_ms=100) as connection:
            model = connection.model("ids")
            assert ask(model, x=np.array(1)) is not None
            assert gateway.stop() == 0
            gateway.start()

            def is_answered() -> bool:
                model.observe(x=np.array(2))
                result = model.get_result(timeout_ms=500)
                return result is not None and bool(result["y"] == 7)

            eventually(is_answered, what="a result")
        assert gateway.stop() == 0
    finally:
        gateway.end()


@pytest.mark.slow
def test_several_processes_share_the_port(tmp_path: Path, models: list[dict[str, Any]]) -> None:
    """Linux distributes the connections; the process that accepts one serves it."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with running(
        tmp_path, models, server={"processes": 2}, inferential={"address": address}
    ) as gateway:
        wrong: list[Any] = []

        def robot(number: int) -> None:
            with connected(address, f"robot-{number}") as connection:
                model = connection.model("ids")
                for value in range(20):
                    result = ask(model, x=np.array(value))
                    if result is None or result["y"] != 3 * value + 1:
                        wrong.append((number, value, result))

        threads = [threading.Thread(target=robot, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        served: dict[int, int] = {}

        def has_stats_of_both() -> bool:
            stats = gateway.stats()
            served[stats["process"]] = stats["inferential"]["observations"].get("answered", 0)
            return len(served) == 2

        eventually(has_stats_of_both, what="stats of both processes")
        assert sum(served.values()) == 16 * 20


def test_unix_socket_serves_libzmq_sockets(tmp_path: Path, models: list[dict[str, Any]]) -> None:
    """DEALER and REQ; the async client in Rust sends no identity."""
    path = tmp_path / "robots.sock"
    address = f"ipc://{path}"
    with running(
        tmp_path, models, server={"unix_mode": "0600"}, inferential={"address": address}
    ) as gateway:
        assert path.stat().st_mode & 0o777 == 0o600
        envelope, payload = observation("ids", {"x": np.arange(3)})
        for identity in (b"", b"\x80\x01\x02\x03\xff", b"robot"):
            with zmq_socket(zmq.DEALER, address, identity) as dealer:
                dealer.send_multipart([b"", envelope, payload])
                assert np.frombuffer(dealer.recv_multipart()[2], np.int64).tolist() == [1, 4, 7]
        with zmq_socket(zmq.REQ, address) as requester:
            for _ in range(3):
                requester.send_multipart([envelope, payload])
                parts = requester.recv_multipart()
                assert response([b"", *parts]).model_id == "ids"
        assert gateway.stats()["inferential"]["connections_broken"] == 0
    assert not path.exists()


INVALID = {
    "robots:5555": "expected tcp://",
    "tcp://127.0.0.1": "expected tcp://",
    "inproc://robots": "expected tcp://",
    "ipc://robots.sock": "absolute path",
    "tcp://127.0.0.1:50052": "needs its own port",
    "tcp://192.0.2.1:5555": "is open to the network",
}


@pytest.mark.parametrize("address", INVALID)
def test_invalid_address_is_rejected(
    tmp_path: Path, models: list[dict[str, Any]], address: str
) -> None:
    config = tmp_path / "iskander.toml"
    server = {"address": "127.0.0.1:0", "runtime_directory": str(tmp_path / "run")}
    config.write_text(render_config(models=models, server=server, inferential={"address": address}))
    commands = [["iskander", "check", str(config)], ["iskander-gateway", "--config", str(config)]]
    for name, *arguments in commands:
        result = subprocess.run(
            [str(BIN / name), *arguments], capture_output=True, text=True, check=False, timeout=60
        )
        assert result.returncode in (1, 78)
        assert "inferential.address" in result.stderr and INVALID[address] in result.stderr


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "ipc:///tmp/robots.sock"])
def test_random_port_and_path_are_rejected_with_several_processes(
    tmp_path: Path, models: list[dict[str, Any]], address: str
) -> None:
    config = tmp_path / "iskander.toml"
    config.write_text(
        render_config(models=models, server={"processes": 2}, inferential={"address": address})
    )
    check = [str(BIN / "iskander"), "check", str(config)]
    result = subprocess.run(check, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 78
    assert "with server.processes > 1" in result.stderr


def test_newest_wins_of_the_server_applies_to_clients_without_the_option(
    tmp_path: Path, models: list[dict[str, Any]]
) -> None:
    inferential = {"address": "tcp://127.0.0.1:0", "newest_wins": True}
    with running(tmp_path, models, workers={"count": 1}, inferential=inferential) as gateway:
        (pid,) = gateway.worker_pids()
        with connected(address_of(gateway), "robot") as robot:
            model = robot.model("ids")
            with suspended(pid):
                for number in range(8):
                    model.observe(x=np.array(number))
                eventually(
                    lambda: gateway.stats()["inferential"]["observations"].get("superseded", 0) >= 5
                )
            values: list[int] = []
            while not values or values[-1] != 22:
                result = model.get_result(timeout_ms=TIMEOUT_MS)
                assert result is not None
                values.append(int(result["y"]))
            assert len(values) <= 3
            assert model.get_result(timeout_ms=200) is None


def test_import_inferential_converts_a_configuration(
    tmp_path: Path, models: list[dict[str, Any]]
) -> None:
    """The printed configuration is valid and lists the omitted settings."""
    source = tmp_path / "robots.json"
    transport = {"bind": "tcp://127.0.0.1:6123", "recv_hwm": 7}
    source.write_text(json.dumps({"transport": transport}))

    def import_source() -> subprocess.CompletedProcess[str]:
        command = [str(BIN / "iskander"), "config", "import-inferential", str(source)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    result = import_source()
    assert result.returncode == 0 and result.stderr == ""
    assert "transport.recv_hwm" in result.stdout
    config = tmp_path / "iskander.toml"
    config.write_text(render_config(models=models) + result.stdout)
    check = [str(BIN / "iskander"), "check", str(config)]
    assert subprocess.run(check, check=False, timeout=60).returncode == 0
    assert load_config(config, environment={}).config.inferential.address == transport["bind"]

    source.write_text('{"transport": "zmq"}')
    result = import_source()
    assert result.returncode == 78 and result.stdout == ""
    assert 'transport = "zmq": expected a table' in result.stderr


@pytest.mark.slow
def test_gateway_does_not_listen_by_default_and_never_imports_zmq(
    tmp_path: Path, models: list[dict[str, Any]]
) -> None:
    with running(tmp_path, models) as gateway:
        assert gateway.stats()["inferential"] == {}
    program = "import sys, iskander.gateway.server; print('zmq' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    assert output.split() == [b"False"]
