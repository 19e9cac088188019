"""Connection limits on each port of a real gateway: new connections evict idle ones."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from support import http2 as client
from support import models
from support.http2 import PREFACE, Wire, settings
from support.processes import Gateway, eventually, running
from support.robots import GREETING, Peer, ask, connected

from iskander.gateway.transport.connection_listener import CHECK_INTERVAL_S

CONNECTIONS_MAX = 16
DESCRIPTORS = 200
GET = b"GET /v2/health/live HTTP/1.1\r\nhost: a\r\n\r\n"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("connections")
    served = [{"name": "ids", "path": str(models.row_ids(folder / "ids")), "intra_threads": 1}]
    with running(
        folder,
        served,
        limits={"connections": CONNECTIONS_MAX},
        http={"address": "127.0.0.1:0", "connections": CONNECTIONS_MAX},
        inferential={"address": "tcp://127.0.0.1:0", "connections": CONNECTIONS_MAX},
    ) as ready:
        yield ready


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def connect(address: str, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(host_and_port(address), 20, source_address=(source, 0))


def http2_idle(gateway: Gateway) -> socket.socket:
    wire = connect(gateway.address, "127.0.0.9")
    wire.sendall(PREFACE + settings())
    assert wire.recv(9)
    return wire


def http1_idle(gateway: Gateway) -> socket.socket:
    wire = connect(gateway.stats()["http_address"], "127.0.0.9")
    wire.sendall(GET)
    assert wire.recv(15) == b"HTTP/1.1 200 OK"
    return wire


def zmtp_idle(gateway: Gateway) -> socket.socket:
    return Peer(gateway.stats()["inferential"]["address"], b"idle").socket


def http2_new(gateway: Gateway) -> None:
    with Wire(gateway.address) as wire:
        wire.feed(client.headers(1, client.request_fields("/grpc.health.v1.Health/Check")))
        wire.feed(client.data(1, client.message(b""), client.END_STREAM))
        assert wire.answer(1).messages == [b"\x08\x01"]


def http1_new(gateway: Gateway) -> None:
    with connect(gateway.stats()["http_address"]) as wire:
        wire.sendall(GET)
        assert wire.recv(15) == b"HTTP/1.1 200 OK"


def zmtp_new(gateway: Gateway) -> None:
    with Peer(gateway.stats()["inferential"]["address"], b"new"):
        pass


PORTS = {
    "http2": (http2_idle, http2_new),
    "http1": (http1_idle, http1_new),
    "zmtp": (zmtp_idle, zmtp_new),
}


@pytest.mark.parametrize("port", PORTS)
def test_new_connections_evict_the_oldest_idle_ones(gateway: Gateway, port: str) -> None:
    idle, new = PORTS[port]
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(idle(gateway)) for _ in range(3 * CONNECTIONS_MAX)]
        for _ in range(3):
            new(gateway)
        for each in held:
            each.settimeout(0.05)
        closed = [each for each in held if is_closed(each)]
        assert 2 * CONNECTIONS_MAX <= len(closed) < 3 * CONNECTIONS_MAX
        assert held[0] in closed and held[-1] not in closed


def is_closed(wire: socket.socket) -> bool:
    """Returns whether the server closed it; over HTTP/2, a GOAWAY frame must precede that."""
    raw = b""
    try:
        while piece := wire.recv(1 << 16):
            raw += piece
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    if raw and b"live" not in raw and b"READY" not in raw:
        # Type, flags and stream 0 of a GOAWAY frame; last stream 0, NO_ERROR.
        assert raw.endswith(b"\x07" + bytes(1 + 4 + 4 + 4) + b"idle")
    return True


def test_gateway_with_few_descriptors_keeps_serving(tmp_path: Path) -> None:
    """Connections leave some descriptors free, for example to replace a worker."""
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids")), "intra_threads": 1}]
    limit = ("prlimit", f"--nofile={DESCRIPTORS}:{DESCRIPTORS}")
    with running(tmp_path, served, prefix=limit) as gateway, contextlib.ExitStack() as stack:
        process = psutil.Process(gateway.pid)
        for count in range(3 * DESCRIPTORS):
            stack.enter_context(connect(gateway.address, f"127.0.1.{count % 250 + 1}"))
        http2_new(gateway)
        assert process.num_fds() <= DESCRIPTORS - DESCRIPTORS // 8
        killed = gateway.kill_worker()
        eventually(lambda: killed not in gateway.worker_pids() and gateway.worker_pids())
        gateway.wait_ready()
        http2_new(gateway)
        assert "accept failed" not in gateway.text()


@pytest.mark.slow
def test_zeromq_client_is_closed_only_without_pong(tmp_path: Path) -> None:
    """libzmq sends the PONG without the application."""
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids")), "intra_threads": 1}]
    with running(
        tmp_path,
        served,
        inferential={"address": "tcp://127.0.0.1:0"},
        timeouts={"idle_s": 0.5, "keepalive_s": 0.5},
    ) as gateway:
        address = gateway.stats()["inferential"]["address"]
        greeting = GREETING[:11] + b"\x01" + GREETING[12:] + Peer.ready(b"gone")
        with connected(address, "silent") as robot, connect(address) as mute:
            assert ask(robot.model("ids"), x=np.array(1))["y"] == 4
            mute.sendall(greeting)
            while mute.recv(1000):
                pass  # The last message is a PING.
            # The idle client receives PINGs too, and stays connected.
            stats = gateway.stats()["inferential"]
            assert (stats["connections_broken"], stats["clients"]) == (1, 1)
            time.sleep(CHECK_INTERVAL_S + 1)
            assert ask(robot.model("ids"), x=np.array(2))["y"] == 7
