"""Faults, reloads and invalid clients during the load, each at its own period."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from benchmarks.endurance.requests import CRASH, FRAGILE, NUMERIC
from benchmarks.endurance.server import Server
from benchmarks.hostile import wire
from iskander.client import OFF, Client
from iskander.errors import IskanderError

SUSPENDED_S = 1.0
CRASH_TIMEOUT_S = 30.0
SOCKET_TIMEOUT_S = 2.0
HALF_OPEN_MAX = 24
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of 0 s: the connection is closed by RST."""
ROWS, BATCHES = 4096, 12
FIRST_SHARE = 0.3
"""Everything happens in the warm-up: the first crash gives its model a worker of its own."""


class Disturbance(NamedTuple):
    """Something that happens again and again.

    Attributes:
        act: Does it, and returns a text for the log; empty if it was not possible.
    """

    name: str
    period_s: float
    act: Callable[[], str]


class Disturbances:
    """All disturbances of a server; `victims` starts, or kills, a client process."""

    def __init__(self, server: Server, victims: Callable[[], str], seed: int) -> None:
        self._server = server
        self._random = random.Random(seed)
        self._half_open: list[socket.socket] = []
        batches = [pa.record_batch({"x": np.arange(ROWS)})] * BATCHES
        self._messages = wire.flight_messages(NUMERIC, batches)
        reload_s = 30.0 if server.processes == 1 else 180.0
        # The first shared worker is not killed: it gets old, and is recycled.
        self._all = (
            Disturbance("kill", 40.0, self._kill),
            Disturbance("suspend", 25.0, self._suspend),
            Disturbance("crash", 60.0, self._crash),
            Disturbance("publish", 15.0, server.publish),
            Disturbance("tokens", 20.0, server.rewrite_tokens),
            Disturbance("reload", reload_s, server.reload),
            Disturbance("victim", 8.0, victims),
            Disturbance("reset", 1.0, self._reset),
            Disturbance("corrupt", 1.5, self._corrupt),
            Disturbance("half-open", 2.0, self._open_half),
            Disturbance("unread", 5.0, self._leave_unread),
        )
        now_s = time.monotonic()
        self._due_s = {
            each.name: now_s + FIRST_SHARE * self._random.uniform(0, each.period_s)
            for each in self._all
        }

    def act(self) -> list[str]:
        """Do everything that is due; returns what was done."""
        done = []
        for each in self._all:
            if time.monotonic() >= self._due_s[each.name]:
                self._due_s[each.name] = time.monotonic() + each.period_s * self._random.uniform(
                    0.7, 1.3
                )
                try:
                    text = each.act()
                except (IskanderError, OSError) as error:
                    text = f"failed: {error!r}"[:200]
                if text:
                    done.append(f"{each.name}: {text}")
        return done

    def close(self) -> None:
        """Close the connections that are held."""
        for each in self._half_open:
            each.close()
        self._half_open.clear()

    def _kill(self) -> str:
        return self._server.signal_worker(
            lambda descriptor: signal.pidfd_send_signal(descriptor, signal.SIGKILL), last=True
        )

    def _suspend(self) -> str:
        def suspend(descriptor: int) -> None:
            signal.pidfd_send_signal(descriptor, signal.SIGSTOP)
            try:
                time.sleep(SUSPENDED_S)
            finally:
                signal.pidfd_send_signal(descriptor, signal.SIGCONT)

        return self._server.signal_worker(suspend, last=False)

    def _crash(self) -> str:
        """Send a value that ends each worker that runs it."""
        with Client(self._server.address, token=self._server.token, retry=OFF) as client:
            try:
                client.score(FRAGILE, pa.table({"x": [CRASH]}), timeout_s=CRASH_TIMEOUT_S)
            except IskanderError as error:
                return error.code
        return "no error"

    def _connect(self) -> socket.socket:
        host, port = self._server.address.split(":")
        return socket.create_connection((host, int(port)), SOCKET_TIMEOUT_S)

    def _call(self, messages: list[bytes]) -> bytes:
        head = wire.request(1, wire.EXCHANGE, [("authorization", f"Bearer {self._server.token}")])
        return wire.opening() + head + b"".join(wire.data(1, wire.message(raw)) for raw in messages)

    def _reset(self) -> str:
        """Close a connection by RST in the middle of a batch."""
        raw = self._call(self._messages[:3])
        with self._connect() as connection:
            connection.sendall(raw[: self._random.randrange(len(raw) // 2, len(raw))])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        return "in a batch"

    def _corrupt(self) -> str:
        """Change bytes of an Arrow message, and read the answer."""
        messages = [bytearray(raw) for raw in self._messages[:2]]
        target = self._random.choice(messages)
        for _ in range(self._random.randint(1, 8)):
            target[self._random.randrange(min(len(target), 400))] = self._random.randrange(256)
        with self._connect() as connection:
            connection.sendall(self._call([bytes(raw) for raw in messages]))
            with contextlib.suppress(TimeoutError):
                connection.recv(65_536)
        return "message"

    def _open_half(self) -> str:
        """Keep a connection that sent a part of a call, or nothing."""
        connection = self._connect()
        raw = self._call(self._messages[:1])
        connection.sendall(raw[: self._random.randrange(len(raw))])
        self._hold(connection)
        return "connection"

    def _leave_unread(self) -> str:
        """Send batches, and read no results."""
        connection = self._connect()
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            connection.send(self._call(self._messages))
        self._hold(connection)
        return "results"

    def _hold(self, connection: socket.socket) -> None:
        self._half_open.append(connection)
        if len(self._half_open) > HALF_OPEN_MAX:
            self._half_open.pop(0).close()
