"""Turns of connections with unprocessed input: order, shares, pauses and read bursts."""

from __future__ import annotations

import asyncio

import pytest
from support.input_arena import in_loop

from iskander.foundation.clock import NS_PER_US
from iskander.gateway.transport.limits import turn_scheduler as turns
from iskander.gateway.transport.limits.turn_scheduler import (
    GAP_NS,
    LARGE_READ_BYTES,
    QUANTUM_NS,
    TURN_NS,
    WASTED_NS_MAX,
    ReadBurst,
    TurnScheduler,
)


class Clock:
    """A clock that advances only during the steps of a connection."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 0
        monkeypatch.setattr(turns, "now_ns", lambda: self.ns)
        monkeypatch.setattr(turns, "thread_cpu_ns", lambda: self.ns)


class FakeConnection:
    """A connection with unprocessed steps of work.

    Attributes:
        log: Name of each connection that had a turn.
        used_ns: CPU time that the scheduler charged.
    """

    deficit_ns = wasted_ns = 0

    def __init__(self, clock: Clock, log: list[str], name: str, steps: int, step_ns: int) -> None:
        self.clock, self.log, self.name = clock, log, name
        self.steps, self.step_ns = steps, step_ns
        self.used_ns: list[int] = []
        self.is_ended = False

    def take_turn(self, until_ns: int) -> bool:
        self.log.append(self.name)
        while self.steps and self.clock.ns < until_ns:
            self.steps -= 1
            self.clock.ns += self.step_ns
        return self.steps > 0

    def note_cpu(self, used_ns: int) -> bool:
        self.used_ns.append(used_ns)
        return not self.is_ended


def test_connections_take_turns_until_their_input_is_processed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @in_loop
    async def run() -> None:
        clock, log = Clock(monkeypatch), list[str]()
        scheduler = TurnScheduler(asyncio.get_running_loop())
        for name in "abc":
            scheduler.wait(FakeConnection(clock, log, name, 3, QUANTUM_NS))
        while scheduler._waiting:
            await asyncio.sleep(0)
        assert sorted(log) == list("aaabbbccc")
        assert log[:3] == list("abc")

    run()


def test_turns_per_loop_iteration_are_limited_by_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    @in_loop
    async def run() -> None:
        clock, log = Clock(monkeypatch), list[str]()
        scheduler = TurnScheduler(asyncio.get_running_loop())
        for number in range(10):
            scheduler.wait(FakeConnection(clock, log, str(number), 20, QUANTUM_NS // 2))
        counts = []
        while scheduler._waiting:
            before = len(log)
            await asyncio.sleep(0)
            counts.append(len(log) - before)
        assert max(counts) <= TURN_NS // QUANTUM_NS + 1
        assert all(log.count(str(number)) == 10 for number in range(10))

    run()


def test_connection_with_long_steps_gets_fewer_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @in_loop
    async def run() -> None:
        clock, log = Clock(monkeypatch), list[str]()
        scheduler = TurnScheduler(asyncio.get_running_loop())
        long = FakeConnection(clock, log, "long", 100, 10 * QUANTUM_NS)
        short = FakeConnection(clock, log, "short", 100, QUANTUM_NS)
        scheduler.wait(long)
        scheduler.wait(short)
        while len(log) < 60:
            await asyncio.sleep(0)
        assert 3 <= log.count("long") <= 8
        assert log.count("short") == 60 - log.count("long")

    run()


def test_single_connection_gets_a_turn_in_each_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    @in_loop
    async def run() -> None:
        clock, log = Clock(monkeypatch), list[str]()
        scheduler = TurnScheduler(asyncio.get_running_loop())
        scheduler.wait(FakeConnection(clock, log, "a", 5, 10 * QUANTUM_NS))
        for _ in range(5):
            await asyncio.sleep(0)
        assert log == ["a"] * 5 and not scheduler._waiting

    run()


def test_cpu_time_is_charged_and_ended_connection_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @in_loop
    async def run() -> None:
        clock, log = Clock(monkeypatch), list[str]()
        scheduler = TurnScheduler(asyncio.get_running_loop())
        connection = FakeConnection(clock, log, "a", 100, QUANTUM_NS)
        scheduler.wait(connection)
        await asyncio.sleep(0)
        connection.is_ended = True
        await asyncio.sleep(0)
        assert connection.used_ns == [QUANTUM_NS, QUANTUM_NS]
        assert not scheduler._waiting

    run()


@in_loop
async def test_wasted_cpu_time_is_followed_by_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pause also applies to a single connection: others may send at any time."""
    loop, log = asyncio.get_running_loop(), list[str]()
    scheduler = TurnScheduler(loop)
    connection = FakeConnection(Clock(monkeypatch), log, "a", 2, 10 * QUANTUM_NS)
    connection.wasted_ns = 20 * WASTED_NS_MAX
    started_s = loop.time()
    scheduler.wait(connection)
    await asyncio.sleep(0)
    assert log == ["a"] and not scheduler._waiting
    while len(log) < 2:
        await asyncio.sleep(0.001)
    assert loop.time() - started_s >= 0.019


@in_loop
async def test_reads_close_together_are_one_burst() -> None:
    """libuv reads one socket several times in one loop iteration."""
    burst = ReadBurst(TurnScheduler(asyncio.get_running_loop()))
    at_ns, long_after = GAP_NS * 10, 0
    for number in range(20):
        if burst.is_long(at_ns, at_ns + 100, 0, 1000):
            long_after = number
            break
        at_ns += 100 + 100
    # Above half of the limit, loop iterations are counted, and the burst may end with one.
    assert 5 <= long_after <= 8
    at_ns += GAP_NS + 101
    assert not burst.is_long(at_ns, at_ns + 100, 0, 1000)


@in_loop
async def test_reads_of_different_iterations_are_no_burst() -> None:
    """An iteration of a busy loop takes a few microseconds."""
    burst = ReadBurst(TurnScheduler(asyncio.get_running_loop()))
    at_ns = GAP_NS * 10
    for _ in range(100):
        assert not burst.is_long(at_ns, at_ns + 100, 0, 1000)
        at_ns += 100 + 100
        await asyncio.sleep(0)


@in_loop
async def test_large_reads_of_one_iteration_are_one_burst_at_any_duration() -> None:
    """A read into newly allocated memory takes milliseconds."""
    burst, size = ReadBurst(TurnScheduler(asyncio.get_running_loop())), LARGE_READ_BYTES
    at_ns = GAP_NS * 10
    assert not burst.is_long(at_ns, at_ns + 10, size, QUANTUM_NS)
    at_ns += 10 * QUANTUM_NS
    assert burst.is_long(at_ns, at_ns + 10, size, QUANTUM_NS)
    await asyncio.sleep(0)
    at_ns += 10 * QUANTUM_NS
    assert not burst.is_long(at_ns, at_ns + 10, size, QUANTUM_NS)


@in_loop
async def test_immediate_next_requests_are_no_long_burst() -> None:
    """Each request arrives 100 us after the previous one was processed, in a new iteration."""
    burst = ReadBurst(TurnScheduler(asyncio.get_running_loop()))
    at_ns = GAP_NS * 10
    for _ in range(100):
        assert not burst.is_long(at_ns, at_ns + 50 * NS_PER_US, 4096, QUANTUM_NS)
        at_ns += 150 * NS_PER_US
