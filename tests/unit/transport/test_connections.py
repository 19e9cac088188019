"""A listener's connections: which are taken, which give way, and what happens without descriptors.

The peers are real sockets; the protocol behind them says what it is told to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from iskander.config.schema import Config, LimitsConfig
from iskander.transport import acceptor as accepting
from iskander.transport import connection_listener as listening
from iskander.transport.connection_limits import ConnectionLimits
from iskander.transport.connection_listener import ConnectionListener
from iskander.transport.descriptors import Descriptors

WITHIN_S = 10.0
_moments = itertools.count(1)


class Connection(asyncio.Protocol):
    """Idle from its beginning, unless it is told to be busy."""

    transport: asyncio.Transport

    def __init__(self, host: Port) -> None:
        self.host = host
        self.idle_since_ns = next(_moments)
        self.unsent_bytes = 0
        self.is_left = self.is_aborted = False
        self.looks = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.host.connections.add(self)

    def connection_lost(self, _: Exception | None) -> None:
        self.host.forget(self)

    def enforce_timeouts(self, now: int) -> None:
        self.looks += 1

    def close_gracefully(self) -> None:
        self.transport.close()

    def close_idle(self) -> None:
        self.is_left = True
        self.transport.close()

    def abort(self) -> None:
        self.is_aborted = True
        self.transport.abort()


class Port(ConnectionListener[Connection]):
    def connection(self) -> Connection:
        return Connection(self)


def play(
    talk: Callable[[Port], Awaitable[None]], connections_max: int = 8, percent: int = 25
) -> None:
    async def run() -> None:
        limits = ConnectionLimits(Config(limits=LimitsConfig(source_percent=percent)))
        port = Port(connections_max, limits)
        try:
            await talk(port)
        finally:
            await port.stop(0.1)
            limits.stop()
        assert port not in limits.budget.holders
        assert limits.open_count == 0

    asyncio.run(asyncio.wait_for(run(), WITHIN_S))


def admit(port: Port, source: str, *, busy: bool = False) -> Connection | None:
    """A connection of a source that has no socket; None where it is not taken."""
    accepted = port.admit(source)
    if accepted is None:
        return None
    connection = cast(Connection, port.make(accepted))
    connection.transport = cast(Any, _Transport(connection))
    port.connections.add(connection)
    if busy:
        connection.idle_since_ns = 0
    return connection


class _Transport:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def close(self) -> None:
        asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)

    abort = close


def test_the_oldest_idle_connection_of_the_source_with_most_gives_way() -> None:
    async def talk(port: Port) -> None:
        others = [admit(port, f"other{number}") for number in range(3)]
        held = [admit(port, "most") for _ in range(5)]
        assert held[0] is not None
        held[0].idle_since_ns = 0
        new = admit(port, "new")
        assert new is not None and not any(each and each.is_left for each in (new, *others))
        assert [each.is_left for each in held if each] == [False, True, False, False, False]
        assert port._limits.ended == {"gave_way": 1}

    # Its share is all of the port, so that what counts is who has most.
    play(talk, percent=100)


def test_of_the_last_places_a_source_with_its_share_gets_none() -> None:
    """It replaces its own idle connections; others still find a place."""

    async def talk(port: Port) -> None:
        held = [admit(port, "most") for _ in range(7)]
        assert all(held)
        assert admit(port, "most") is not None
        assert [each.is_left for each in held if each] == [True] + [False] * 6
        for connection in port.connections:
            connection.idle_since_ns = 0
        assert admit(port, "most") is None
        assert port._limits.ended == {"gave_way": 1, "too_many_connections": 1}
        assert admit(port, "another") is not None

    play(talk)


def test_one_source_may_have_all_other_places() -> None:
    """As where all clients are behind one proxy."""

    async def talk(port: Port) -> None:
        assert all(admit(port, "proxy", busy=True) for _ in range(7))

    play(talk)


def test_where_all_are_busy_the_new_one_is_closed() -> None:
    async def talk(port: Port) -> None:
        assert all(admit(port, f"s{number}", busy=True) for number in range(8))
        assert admit(port, "new") is None
        next(iter(port.connections)).transport.close()
        await asyncio.sleep(0)
        assert admit(port, "new") is not None

    play(talk)


def test_a_flood_of_new_connections_leaves_no_heap_of_those_that_close() -> None:
    async def talk(port: Port) -> None:
        taken = sum(admit(port, f"s{number}") is not None for number in range(1000))
        assert taken == 8 + listening.CLOSING_MAX
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(port.connections) == 8 and admit(port, "new") is not None

    play(talk)


def test_descriptors_bound_the_connections_of_all_ports() -> None:
    async def talk(port: Port) -> None:
        port._limits.descriptors.connections_max = 3
        other = Port(8, port._limits)
        assert admit(other, "a") and admit(port, "a") and admit(port, "b")
        assert admit(port, "c") is not None
        assert port._limits.ended == {"gave_way": 1}
        await other.stop(0.1)

    play(talk)


def test_all_connections_are_looked_after_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr(listening, "CHECK_STEPS", 10)

    async def talk(port: Port) -> None:
        held = [admit(port, "a") for _ in range(1000)]
        looks = []
        for _ in range(10):
            port._check_connections()
            assert port._check_timer is not None
            port._check_timer.cancel()
            looks.append(sum(each.looks for each in held if each))
        assert looks == list(range(100, 1001, 100))

    play(talk, connections_max=2000)


def test_what_clients_do_not_read_is_charged_and_the_last_ones_are_cut() -> None:
    async def talk(port: Port) -> None:
        budget = port.budget
        budget.limit_bytes = 1 << 20
        budget.holders.add(port)
        held = [admit(port, f"s{number}", busy=True) for number in range(4)]
        for count, each in enumerate(held):
            assert each is not None
            each.unsent_bytes = 300_000 - count
            port.charge_unsent(each)
        assert [each is not None and each.is_aborted for each in held] == [True] + [False] * 3
        assert budget.used_bytes == 900_000 - 6 and port._limits.ended == {"unread_responses": 1}
        await asyncio.sleep(0)
        assert budget.used_bytes == 900_000 - 6
        budget.charge(200_000)
        assert held[1] is not None and held[1].is_aborted, "a small message finds no memory"
        budget.release(200_000)
        assert held[2] is not None
        held[2].unsent_bytes = 0
        port.charge_unsent(held[2])
        assert budget.used_bytes == 300_000 - 3
        for each in held[1:]:
            assert each is not None
            each.transport.close()
        await asyncio.sleep(0)
        assert budget.used_bytes == 0 and not port._unread

    play(talk)


# Over sockets.


async def listen(port: Port) -> tuple[str, int]:
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    await port.listen(bound)
    address: tuple[str, int] = bound.getsockname()
    return address


def test_connections_are_accepted_a_few_in_each_turn() -> None:
    async def talk(port: Port) -> None:
        address = await listen(port)
        assert port in port.budget.holders
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(socket.create_connection(address))
            counts = [0]
            while counts[-1] < 100:
                await asyncio.sleep(0)
                counts.append(port._open)
            steps = [after - before for before, after in itertools.pairwise(counts)]
            assert max(steps) <= accepting.ACCEPTS_PER_ITERATION
            await asyncio.sleep(0.05)
            assert len(port.connections) == 100
        while port.connections:
            await asyncio.sleep(0.01)

    play(talk, connections_max=1000)


def test_a_connection_that_is_closed_at_once_costs_no_place() -> None:
    async def talk(port: Port) -> None:
        address = await listen(port)
        for _ in range(50):
            socket.create_connection(address).close()
        await asyncio.sleep(0.1)
        assert port._open == 0 and not port._accepted and len(port._sources) == 0

    play(talk)


def test_a_handshake_counts_and_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peer is made, and has no transport yet."""

    async def talk(port: Port) -> None:
        accepted = port.admit("a")
        assert accepted is not None
        peer = cast(Connection, port.make(accepted))
        accepted.handshake = asyncio.create_task(asyncio.sleep(10))
        assert admit(port, "b", busy=True) is not None
        await asyncio.sleep(0)
        assert accepted.handshake.cancelled() and not peer.is_left
        port.drop(accepted)
        port.drop(accepted)
        assert port._open == 1

    play(talk, connections_max=1)


def test_a_connection_that_just_came_is_busy_where_it_says_so() -> None:
    """Its handshake is over, and the task of that is not."""

    async def talk(port: Port) -> None:
        accepted = port.admit("a")
        assert accepted is not None
        peer = cast(Connection, port.make(accepted))
        peer.transport = cast(Any, _Transport(peer))
        accepted.handshake = asyncio.create_task(asyncio.sleep(10))
        port.connections.add(peer)
        peer.idle_since_ns = 0
        assert admit(port, "b") is None
        accepted.handshake.cancel()

    play(talk, connections_max=1)


class Surplus(Port):
    def __init__(self, limits: ConnectionLimits) -> None:
        ConnectionListener.__init__(self, 1, limits, slack=2)


def test_a_surplus_connection_has_a_place_once_there_is_one() -> None:
    async def talk(port: Port) -> None:
        surplus = Surplus(port._limits)
        first, second, third = (admit(surplus, "a", busy=True) for _ in range(3))
        assert first and second and third and admit(surplus, "a") is None
        assert [surplus.is_surplus(each) for each in (first, second, third)] == [False, True, True]
        first.transport.close()
        await asyncio.sleep(0)
        assert not surplus.is_surplus(third) and surplus.is_surplus(second)
        third.idle_since_ns = 1
        second.idle_since_ns = 0
        assert not surplus.is_surplus(second) and third.is_left
        await asyncio.sleep(0)
        assert surplus._surplus == 0 and len(surplus.connections) == 1
        await surplus.stop(0.1)

    play(talk)


class Failing(socket.socket):
    """A listening socket of a system that has no memory for connections."""

    accepts = 0

    def accept(self) -> Any:
        self.accepts += 1
        raise OSError(errno.ENOMEM, "no memory")


def test_a_socket_that_cannot_accept_is_not_asked_in_each_turn() -> None:
    async def talk(port: Port) -> None:
        bound = Failing()
        bound.bind(("127.0.0.1", 0))
        await port.listen(bound)
        with socket.create_connection(bound.getsockname()):
            await asyncio.sleep(2.5 * accepting.ACCEPT_PAUSE_S)
        assert 1 < bound.accepts <= 4

    play(talk)


def test_errors_of_accept_are_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    descriptors = Descriptors()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        clients = [socket.create_connection(server.getsockname()) for _ in range(2)]
        with caplog.at_level(logging.ERROR):
            for _ in range(100):
                descriptors.refuse(server, OSError(24, "Too many open files"))
        for client in clients:
            assert client.recv(1) == b""
            client.close()
    descriptors.close()
    assert len(caplog.records) == 1 and "RLIMIT_NOFILE" in caplog.text


SCRIPT = """
import asyncio, os, resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
import logging; logging.basicConfig()
import uvloop
sys.path.insert(0, sys.argv[1])
from test_connections import Port, listen, ConnectionLimits, Config

async def main():
    limits = ConnectionLimits(Config())
    port = Port(1000, limits)
    address = await listen(port)
    # Connections alone do not use up the descriptors.
    first = [socket.create_connection(address) for _ in range(20)]
    await asyncio.sleep(0.1)
    assert len(port.connections) == 20, len(port.connections)
    taken = []
    late = socket.socket(), socket.socket()
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        pass
    for connection in port.connections:
        connection.idle_since_ns = 0
    late[0].connect(address)
    began, cpu = time.monotonic(), time.process_time()
    await asyncio.sleep(1.0)
    used = time.process_time() - cpu
    late[0].settimeout(1)
    # Closed: there is a reserve to say so with.
    assert late[0].recv(1) == b""
    assert used < 0.3, used
    for each in taken:
        os.close(each)
    late[1].connect(address)
    await asyncio.sleep(0.3)
    assert len(port.connections) == 21, len(port.connections)
    assert limits.ended == {"too_many_connections": 1}, limits.ended
    print("ok", flush=True)
    await port.stop(0.1)

uvloop.run(main())
"""


def test_a_process_without_descriptors_refuses_and_goes_on() -> None:
    folder = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "ok\n", done.stderr
    assert done.stderr.count("accept failed") == 1
