"""Inferential's port: drained, shared by processes, as a path, and refused where it cannot be."""

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
    PATIENCE_MS,
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
    """A socket of libzmq's own."""
    context = zmq.Context()
    made = context.socket(kind)
    made.linger, made.rcvtimeo = 0, PATIENCE_MS
    if identity:
        made.routing_id = identity
    made.connect(address)
    try:
        yield made
    finally:
        made.close()
        context.term()


def test_what_was_accepted_is_answered_before_it_goes(
    tmp_path: Path, models: list[dict[str, Any]]
) -> None:
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
                result = robot.model("ids").get_result(timeout_ms=PATIENCE_MS)
                assert result is not None and result["y"] == 3 * number + 1
            assert gateway.wait() == 0


def test_what_was_accepted_is_sent_before_it_goes_however_slowly_it_is_read(
    tmp_path: Path,
) -> None:
    models = [{"name": "wide", "path": str(wide(tmp_path / "wide")), "max_batch_rows": ROWS}]
    with running(tmp_path, models, inferential={"address": "tcp://127.0.0.1:0"}) as gateway:
        with Peer(address_of(gateway), b"slow") as peer:
            peer.send(b"", *observation("wide", {"x": np.arange(ROWS)}))
            answered = {"answered": 1}
            eventually(lambda: gateway.stats()["inferential"]["observations"] == answered)
            gateway.signal(signal.SIGTERM)
            time.sleep(2.0)
            body = peer.read()[2]
        assert np.frombuffer(body, np.float32)[::WIDTH].tolist() == list(range(ROWS))
        assert gateway.wait() == 0


def wide(folder: Path) -> Path:
    """`y` is `x` over and over: more than sockets keep."""
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


def test_clients_go_on_when_the_server_comes_back(
    tmp_path: Path, models: list[dict[str, Any]]
) -> None:
    """They connect again by themselves, to the same port."""
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

            eventually(is_answered, what="an answer")
        assert gateway.stop() == 0
    finally:
        gateway.end()


def test_several_processes_share_the_port(tmp_path: Path, models: list[dict[str, Any]]) -> None:
    """Connections are dealt out among them, and each is served where it came."""
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

        def is_from_both() -> bool:
            stats = gateway.stats()
            served[stats["process"]] = stats["inferential"]["observations"].get("answered", 0)
            return len(served) == 2

        eventually(is_from_both, what="stats of both")
        assert sum(served.values()) == 16 * 20


def test_a_path_and_libzmqs_own_sockets(tmp_path: Path, models: list[dict[str, Any]]) -> None:
    """DEALER and REQ; with a name, and with none, as the async client in Rust has it."""
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
        with zmq_socket(zmq.REQ, address) as asking:
            for _ in range(3):
                asking.send_multipart([envelope, payload])
                parts = asking.recv_multipart()
                assert response([b"", *parts]).model_id == "ids"
        assert gateway.stats()["inferential"]["connections_broken"] == 0
    assert not path.exists()


BAD = {
    "robots:5555": "expected tcp://",
    "tcp://127.0.0.1": "expected tcp://",
    "inproc://robots": "expected tcp://",
    "ipc://robots.sock": "absolute path",
    "tcp://127.0.0.1:50052": "needs its own port",
    "tcp://192.0.2.1:5555": "cannot listen there",
}


@pytest.mark.parametrize("address", BAD)
def test_an_address_where_nobody_could_listen(
    tmp_path: Path, models: list[dict[str, Any]], address: str
) -> None:
    config = tmp_path / "iskander.toml"
    server = {"address": "127.0.0.1:0", "runtime_directory": str(tmp_path / "run")}
    config.write_text(render_config(models=models, server=server, inferential={"address": address}))
    commands = [["iskander", "check", str(config)], ["iskander-gateway", "--config", str(config)]]
    # Whether an address is this machine's is only known when it is taken.
    for name, *arguments in commands[address.startswith("tcp://192") :]:
        done = subprocess.run(
            [str(BIN / name), *arguments], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode in (1, 78)
        assert "inferential.address" in done.stderr and BAD[address] in done.stderr


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "ipc:///tmp/robots.sock"])
def test_what_several_processes_cannot_share(
    tmp_path: Path, models: list[dict[str, Any]], address: str
) -> None:
    config = tmp_path / "iskander.toml"
    config.write_text(
        render_config(models=models, server={"processes": 2}, inferential={"address": address})
    )
    check = [str(BIN / "iskander"), "check", str(config)]
    done = subprocess.run(check, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "with server.processes > 1" in done.stderr


def test_only_the_newest_waits_where_the_server_says_so(
    tmp_path: Path, models: list[dict[str, Any]]
) -> None:
    """Of clients that say nothing of it."""
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
            found: list[int] = []
            while not found or found[-1] != 22:
                result = model.get_result(timeout_ms=PATIENCE_MS)
                assert result is not None
                found.append(int(result["y"]))
            assert len(found) <= 3
            assert model.get_result(timeout_ms=200) is None


def test_a_configuration_of_inferentials_own_server_is_taken_over(
    tmp_path: Path, models: list[dict[str, Any]]
) -> None:
    """What the command prints runs here, and says what it left out."""
    theirs = tmp_path / "robots.json"
    transport = {"bind": "tcp://127.0.0.1:6123", "recv_hwm": 7}
    theirs.write_text(json.dumps({"transport": transport}))

    def importing() -> subprocess.CompletedProcess[str]:
        command = [str(BIN / "iskander"), "config", "import-inferential", str(theirs)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    done = importing()
    assert done.returncode == 0 and done.stderr == ""
    assert "transport.recv_hwm" in done.stdout
    config = tmp_path / "iskander.toml"
    config.write_text(render_config(models=models) + done.stdout)
    check = [str(BIN / "iskander"), "check", str(config)]
    assert subprocess.run(check, check=False, timeout=60).returncode == 0
    assert load_config(config, environment={}).config.inferential.address == transport["bind"]

    theirs.write_text('{"transport": "zmq"}')
    done = importing()
    assert done.returncode == 1 and done.stdout == ""
    assert 'transport = "zmq": expected a table' in done.stderr


def test_it_costs_nothing_where_it_is_not_served(
    tmp_path: Path, models: list[dict[str, Any]]
) -> None:
    """No port, and no library of its own in the gateway, not even where it is served."""
    with running(tmp_path, models) as gateway:
        assert gateway.stats()["inferential"] == {}
    program = "import sys, iskander.gateway.server; print('zmq' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    assert said.split() == [b"False"]
