"""Connection limits of listeners: admission, eviction, surplus, file descriptors."""

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

from iskander.config.schema import Config, LimitsConfig, ServerConfig, TimeoutsConfig
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.gateway.transport import acceptor, connection_listener
from iskander.gateway.transport.connection_listener import ConnectionListener
from iskander.gateway.transport.limits.connection_limits import ConnectionLimits
from iskander.gateway.transport.limits.descriptors import Descriptors

WITHIN_S = 10.0
DEFAULTS = ServerConfig()
AGE_S = 100
GRACE_S = 30
_counter = itertools.count(1)


class Connection(asyncio.Protocol):
    """Protocol of a connection; idle unless a test sets `idle_since_ns` to 0."""

    transport: asyncio.Transport

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.idle_since_ns = next(_counter)
        self.unsent_bytes = 0
        self.is_evicted = self.is_aborted = False
        self.checks = self.graceful_closes = 0
        self.is_expired = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.listener.connections.add(self)

    def connection_lost(self, _: Exception | None) -> None:
        self.listener.forget(self)

    def enforce_timeouts(self, now: int) -> None:
        self.checks += 1

    def close_gracefully(self) -> None:
        self.graceful_closes += 1
        if self.idle_since_ns:
            self.transport.close()

    def close_expired(self) -> None:
        self.is_expired = True
        self.transport.close()

    def close_idle(self) -> None:
        self.is_evicted = True
        self.transport.close()

    def abort(self) -> None:
        self.is_aborted = True
        self.transport.abort()


class Listener(ConnectionListener[Connection]):
    def __init__(self, connections_max: int, limits: ConnectionLimits, slack: int = 0) -> None:
        super().__init__(connections_max, limits, slack=slack)
        self.limits = limits

    def connection(self) -> Connection:
        return Connection(self)


def run_scenario(
    scenario: Callable[[Listener], Awaitable[None]],
    connections_max: int = 8,
    percent: int = 25,
    server: ServerConfig = DEFAULTS,
) -> None:
    async def run() -> None:
        config = Config(limits=LimitsConfig(source_percent=percent), server=server)
        limits = ConnectionLimits(config)
        listener = Listener(connections_max, limits)
        try:
            await scenario(listener)
        finally:
            await listener.stop(0.1)
            limits.stop()
        assert listener not in limits.budget.holders
        assert limits.open_count == 0

    asyncio.run(asyncio.wait_for(run(), WITHIN_S))


def admit(listener: Listener, source: str, *, busy: bool = False) -> Connection | None:
    """Admits a connection without a socket; returns None if it is rejected."""
    accepted = listener.admit(source)
    if accepted is None:
        return None
    connection = cast(Connection, listener.make(accepted))
    connection.transport = cast(Any, _Transport(connection))
    listener.connections.add(connection)
    if busy:
        connection.idle_since_ns = 0
    return connection


class _Transport:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def close(self) -> None:
        asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)

    abort = close


def test_oldest_idle_connection_of_the_largest_source_is_evicted() -> None:
    async def scenario(listener: Listener) -> None:
        others = [admit(listener, f"other{number}") for number in range(3)]
        held = [admit(listener, "most") for _ in range(5)]
        assert held[0] is not None
        held[0].idle_since_ns = 0
        new = admit(listener, "new")
        assert new is not None and not any(each and each.is_evicted for each in (new, *others))
        assert [each.is_evicted for each in held if each] == [False, True, False, False, False]
        assert listener.limits.ended == {"gave_way": 1}

    # With 100% as its share, a source is limited only by eviction.
    run_scenario(scenario, percent=100)


def test_source_above_its_share_gets_no_reserved_connection() -> None:
    """Its own idle connections are evicted; other sources are admitted."""

    async def scenario(listener: Listener) -> None:
        held = [admit(listener, "most") for _ in range(7)]
        assert all(held)
        assert admit(listener, "most") is not None
        assert [each.is_evicted for each in held if each] == [True] + [False] * 6
        for connection in listener.connections:
            connection.idle_since_ns = 0
        assert admit(listener, "most") is None
        assert listener.limits.ended == {"gave_way": 1, "too_many_connections": 1}
        assert admit(listener, "another") is not None

    run_scenario(scenario)


def test_one_source_may_use_all_unreserved_connections() -> None:
    """All clients behind one proxy have the same source."""

    async def scenario(listener: Listener) -> None:
        assert all(admit(listener, "proxy", busy=True) for _ in range(7))

    run_scenario(scenario)


def test_new_connection_is_rejected_if_all_are_busy() -> None:
    async def scenario(listener: Listener) -> None:
        assert all(admit(listener, f"s{number}", busy=True) for number in range(8))
        assert admit(listener, "new") is None
        next(iter(listener.connections)).transport.close()
        await asyncio.sleep(0)
        assert admit(listener, "new") is not None

    run_scenario(scenario)


def test_number_of_closing_connections_is_limited() -> None:
    async def scenario(listener: Listener) -> None:
        admitted = sum(admit(listener, f"s{number}") is not None for number in range(1000))
        assert admitted == 8 + connection_listener.CLOSING_MAX
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(listener.connections) == 8 and admit(listener, "new") is not None

    run_scenario(scenario)


def test_descriptors_limit_the_connections_of_all_listeners() -> None:
    async def scenario(listener: Listener) -> None:
        listener.limits.descriptors.connections_max = 3
        other = Listener(8, listener.limits)
        assert admit(other, "a") and admit(listener, "a") and admit(listener, "b")
        assert admit(listener, "c") is not None
        assert listener.limits.ended == {"gave_way": 1}
        await other.stop(0.1)

    run_scenario(scenario)


def test_timeout_checks_are_spread_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_listener, "CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr(connection_listener, "CHECK_STEPS", 10)

    async def scenario(listener: Listener) -> None:
        held = [admit(listener, "a") for _ in range(1000)]
        checks = []
        for _ in range(10):
            listener._check_connections()
            assert listener._check_timer is not None
            listener._check_timer.cancel()
            checks.append(sum(each.checks for each in held if each))
        assert checks == list(range(100, 1001, 100))

    run_scenario(scenario, connections_max=2000)


def check_at(listener: Listener, second: float) -> None:
    """Checks all connections as `second` seconds from now."""
    for connection in list(listener.connections):
        listener._enforce_age(connection, now_ns() + int(second * NS_PER_S))


def test_connection_has_no_maximum_age_by_default() -> None:
    async def scenario(listener: Listener) -> None:
        held = admit(listener, "a", busy=True)
        check_at(listener, 1e6)
        assert held is not None and not held.graceful_closes and not held.is_expired

    run_scenario(scenario)


def test_new_limit_of_connections_applies_to_the_next_one() -> None:
    async def scenario(listener: Listener) -> None:
        held = [admit(listener, "a", busy=True) for _ in range(4)]
        listener.connections_max = 2
        assert admit(listener, "b") is None
        assert all(held) and not any(each.is_evicted for each in held if each)
        listener.connections_max = 6
        assert admit(listener, "b", busy=True) is not None

    run_scenario(scenario, connections_max=4, percent=100)


def test_new_connection_replaces_an_idle_one_far_above_a_lower_limit() -> None:
    async def scenario(listener: Listener) -> None:
        held = [admit(listener, f"s{number}") for number in range(200)]
        listener.connections_max = 10
        assert admit(listener, "new") is not None
        assert sum(each.is_evicted for each in held if each) == 1
        assert listener.limits.ended == {"gave_way": 1}

    run_scenario(scenario, connections_max=200)


def test_new_share_of_a_source_applies_to_its_next_connection() -> None:
    async def scenario(listener: Listener) -> None:
        held = [admit(listener, "most", busy=True) for _ in range(7)]
        assert all(held) and admit(listener, "most", busy=True) is None
        listener.limits.configure(Config(limits=LimitsConfig(source_percent=100)))
        assert admit(listener, "most", busy=True) is not None

    run_scenario(scenario)


def test_new_age_applies_to_new_connections_and_new_grace_to_all() -> None:
    async def scenario(listener: Listener) -> None:
        first, second = (AGE_S, GRACE_S), (10 * AGE_S, 10 * GRACE_S)
        held = []
        for age_s, grace_s in (first, second):
            server = ServerConfig(max_connection_age_s=age_s, max_connection_age_grace_s=grace_s)
            listener.limits.configure(Config(server=server))
            held.append(admit(listener, "a", busy=True))
        old, new = (each for each in held if each is not None)
        check_at(listener, 1.1 * AGE_S + 1)
        assert (old.graceful_closes, new.graceful_closes) == (1, 0)
        check_at(listener, 1.1 * AGE_S + GRACE_S + 2)
        assert not old.is_expired
        check_at(listener, 1.1 * AGE_S + 10 * GRACE_S + 2)
        assert old.is_expired and not new.graceful_closes

    run_scenario(scenario)


def test_new_timeouts_apply_to_open_connections() -> None:
    async def scenario(listener: Listener) -> None:
        timeouts = TimeoutsConfig(idle_s=1.0)
        held = admit(listener, "a")
        listener.limits.configure(Config(timeouts=timeouts))
        assert held is not None and held.listener.timeouts is timeouts

    run_scenario(scenario)


def test_received_bytes_suffice_for_two_messages_of_open_calls() -> None:
    """A call that was opened before a reload keeps its higher limit of a message."""

    async def scenario(listener: Listener) -> None:
        large, small = 40 << 20, 20 << 20
        for message_bytes in (large, small):
            limits = LimitsConfig(message_bytes=message_bytes, receive_bytes=2 * message_bytes)
            listener.limits.configure(Config(limits=limits))
        assert listener.budget.limit_bytes >= 2 * large

    run_scenario(scenario)


@pytest.mark.parametrize("grace_s", [0, GRACE_S])
def test_connection_closes_gracefully_at_its_age_and_finally_after_the_grace(grace_s: int) -> None:
    async def scenario(listener: Listener) -> None:
        held = admit(listener, "a", busy=True)
        assert held is not None
        check_at(listener, 0.9 * AGE_S - 1)
        assert not held.graceful_closes
        for second in (1.1 * AGE_S + 1, 1.1 * AGE_S + GRACE_S):
            check_at(listener, second)
            assert (held.graceful_closes, held.is_expired) == (1, False)
        for second in (1.1 * AGE_S + GRACE_S + 2, 1e6):
            check_at(listener, second)
            assert (held.graceful_closes, held.is_expired) == (1, bool(grace_s))
        counts = {"max_age": 1} | ({"max_age_grace": 1} if grace_s else {})
        assert listener.limits.ended == counts

    server = ServerConfig(max_connection_age_s=AGE_S, max_connection_age_grace_s=grace_s)
    run_scenario(scenario, server=server)


def test_connections_reach_their_age_at_different_times() -> None:
    """200 ages are within 10 % of the setting, and cover most of that range."""

    async def scenario(listener: Listener) -> None:
        for _ in range(200):
            assert admit(listener, "a") is not None
        accepted = listener._accepted.values()
        ages_s = [(each.expires_ns - each.accepted_ns) / NS_PER_S for each in accepted]
        assert 90 <= min(ages_s) < 95 and 105 < max(ages_s) <= 110

    server = ServerConfig(max_connection_age_s=AGE_S)
    run_scenario(scenario, connections_max=400, percent=100, server=server)


def test_listener_without_an_age_ignores_the_setting() -> None:
    """ZeroMQ peers would lose their queued messages."""

    async def scenario(listener: Listener) -> None:
        listener.has_max_age = False  # type: ignore[misc]
        held = admit(listener, "a", busy=True)
        check_at(listener, 1e6)
        assert held is not None and not held.graceful_closes

    run_scenario(scenario, server=ServerConfig(max_connection_age_s=AGE_S))


def test_timeout_check_enforces_the_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_listener, "CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr(connection_listener, "CHECK_STEPS", 1)

    async def scenario(listener: Listener) -> None:
        held = admit(listener, "a")
        assert held is not None
        listener._accepted[held].expires_ns = 0
        listener._check_connections()
        assert listener._check_timer is not None
        listener._check_timer.cancel()
        assert held.graceful_closes == 1

    run_scenario(scenario, server=ServerConfig(max_connection_age_s=AGE_S))


def test_unsent_bytes_are_charged_and_largest_are_aborted_above_the_limit() -> None:
    async def scenario(listener: Listener) -> None:
        budget = listener.budget
        budget.limit_bytes = 1 << 20
        budget.holders.add(listener)
        held = [admit(listener, f"s{number}", busy=True) for number in range(4)]
        for count, each in enumerate(held):
            assert each is not None
            each.unsent_bytes = 300_000 - count
            listener.charge_unsent(each)
        assert [each is not None and each.is_aborted for each in held] == [True] + [False] * 3
        assert budget.used_bytes == 900_000 - 6
        assert listener.limits.ended == {"unread_responses": 1}
        await asyncio.sleep(0)
        assert budget.used_bytes == 900_000 - 6
        budget.charge(200_000)
        assert held[1] is not None and held[1].is_aborted, "no memory is left for a small message"
        budget.release(200_000)
        assert held[2] is not None
        held[2].unsent_bytes = 0
        listener.charge_unsent(held[2])
        assert budget.used_bytes == 300_000 - 3
        for each in held[1:]:
            assert each is not None
            each.transport.close()
        await asyncio.sleep(0)
        assert budget.used_bytes == 0 and not listener._unread

    run_scenario(scenario)


async def listen(listener: Listener) -> tuple[str, int]:
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    await listener.listen(bound)
    address: tuple[str, int] = bound.getsockname()
    return address


def test_accepts_per_loop_iteration_are_limited() -> None:
    async def scenario(listener: Listener) -> None:
        address = await listen(listener)
        assert listener in listener.budget.holders
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(socket.create_connection(address))
            counts = [0]
            while counts[-1] < 100:
                await asyncio.sleep(0)
                counts.append(listener._open)
            steps = [after - before for before, after in itertools.pairwise(counts)]
            assert max(steps) <= acceptor.ACCEPTS_PER_ITERATION
            await asyncio.sleep(0.05)
            assert len(listener.connections) == 100
        while listener.connections:
            await asyncio.sleep(0.01)

    run_scenario(scenario, connections_max=1000)


def test_connection_closed_at_once_is_not_counted() -> None:
    async def scenario(listener: Listener) -> None:
        address = await listen(listener)
        for _ in range(50):
            socket.create_connection(address).close()
        await asyncio.sleep(0.1)
        assert listener._open == 0 and not listener._accepted and len(listener._sources) == 0

    run_scenario(scenario)


def test_handshake_is_counted_and_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer exists, without a transport."""

    async def scenario(listener: Listener) -> None:
        accepted = listener.admit("a")
        assert accepted is not None
        peer = cast(Connection, listener.make(accepted))
        accepted.handshake = asyncio.create_task(asyncio.sleep(10))
        assert admit(listener, "b", busy=True) is not None
        await asyncio.sleep(0)
        assert accepted.handshake.cancelled() and not peer.is_evicted
        listener.drop(accepted)
        listener.drop(accepted)
        assert listener._open == 1

    run_scenario(scenario, connections_max=1)


def test_busy_connection_is_not_evicted_while_its_handshake_task_runs() -> None:
    """The task ends one iteration after the handshake."""

    async def scenario(listener: Listener) -> None:
        accepted = listener.admit("a")
        assert accepted is not None
        peer = cast(Connection, listener.make(accepted))
        peer.transport = cast(Any, _Transport(peer))
        accepted.handshake = asyncio.create_task(asyncio.sleep(10))
        listener.connections.add(peer)
        peer.idle_since_ns = 0
        assert admit(listener, "b") is None
        accepted.handshake.cancel()

    run_scenario(scenario, connections_max=1)


def test_surplus_connection_is_counted_when_capacity_is_free() -> None:
    async def scenario(listener: Listener) -> None:
        surplus = Listener(1, listener.limits, slack=2)
        first, second, third = (admit(surplus, "a", busy=True) for _ in range(3))
        assert first and second and third and admit(surplus, "a") is None
        assert [surplus.is_surplus(each) for each in (first, second, third)] == [False, True, True]
        first.transport.close()
        await asyncio.sleep(0)
        assert not surplus.is_surplus(third) and surplus.is_surplus(second)
        third.idle_since_ns = 1
        second.idle_since_ns = 0
        assert not surplus.is_surplus(second) and third.is_evicted
        await asyncio.sleep(0)
        assert surplus._surplus == 0 and len(surplus.connections) == 1
        await surplus.stop(0.1)

    run_scenario(scenario)


class FailingSocket(socket.socket):
    """Listening socket whose `accept` fails with ENOMEM."""

    accepts = 0

    def accept(self) -> Any:
        self.accepts += 1
        raise OSError(errno.ENOMEM, "no memory")


def test_accept_pauses_after_an_error() -> None:
    async def scenario(listener: Listener) -> None:
        bound = FailingSocket()
        bound.bind(("127.0.0.1", 0))
        await listener.listen(bound)
        with socket.create_connection(bound.getsockname()):
            await asyncio.sleep(2.5 * acceptor.ACCEPT_PAUSE_S)
        assert 1 < bound.accepts <= 4

    run_scenario(scenario)


def test_accept_errors_are_logged_at_a_limited_rate(caplog: pytest.LogCaptureFixture) -> None:
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
from test_connections import Listener, listen, ConnectionLimits, Config

async def main():
    limits = ConnectionLimits(Config())
    listener = Listener(1000, limits)
    address = await listen(listener)
    # Below the limit of connections, descriptors are free.
    first = [socket.create_connection(address) for _ in range(20)]
    await asyncio.sleep(0.1)
    assert len(listener.connections) == 20, len(listener.connections)
    duplicates = []
    late = socket.socket(), socket.socket()
    try:
        while True:
            duplicates.append(os.dup(0))
    except OSError:
        pass
    for connection in listener.connections:
        connection.idle_since_ns = 0
    late[0].connect(address)
    began, cpu = time.monotonic(), time.process_time()
    await asyncio.sleep(1.0)
    used = time.process_time() - cpu
    late[0].settimeout(1)
    # Closed: the process keeps a reserve descriptor for this.
    assert late[0].recv(1) == b""
    assert used < 0.3, used
    for each in duplicates:
        os.close(each)
    late[1].connect(address)
    await asyncio.sleep(0.3)
    assert len(listener.connections) == 21, len(listener.connections)
    assert limits.ended == {"too_many_connections": 1}, limits.ended
    print("ok", flush=True)
    await listener.stop(0.1)

uvloop.run(main())
"""


@pytest.mark.long
def test_process_without_free_descriptors_rejects_connections_and_recovers() -> None:
    folder = os.path.dirname(__file__)
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.stdout == "ok\n", process.stderr
    assert process.stderr.count("accept failed") == 1
