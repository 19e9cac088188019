"""Turns of connections with input left over: order, shares, and what a long step costs."""

from __future__ import annotations

import asyncio

import pytest
from support.input_arena import in_loop

from iskander.clock import NS_PER_US
from iskander.transport import turn_scheduler as turns
from iskander.transport.turn_scheduler import (
    GAP_NS,
    LARGE_READ_BYTES,
    QUANTUM_NS,
    TURN_NS,
    WASTED_NS_MAX,
    ReadBurst,
    TurnScheduler,
)


class Clock:
    """Time that passes only where a connection works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 0
        monkeypatch.setattr(turns, "now_ns", lambda: self.ns)
        monkeypatch.setattr(turns, "thread_cpu_ns", lambda: self.ns)


class Worker:
    """A connection with steps of work left over.

    Attributes:
        log: Name of each connection that had a turn.
        used_ns: As it was told.
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
    async def play() -> None:
        clock, log = Clock(monkeypatch), list[str]()
        scheduler = TurnScheduler(asyncio.get_running_loop())
        for name in "abc":
            scheduler.wait(Worker(clock, log, name, 3, QUANTUM_NS))
        while scheduler._waiting:
            await asyncio.sleep(0)
        assert sorted(log) == list("aaabbbccc")
        assert log[:3] == list("abc")

    play()


def test_a_turn_of_the_loop_serves_as_many_as_its_time_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What others have to do comes between."""

    @in_loop
    async def play() -> None:
        clock, log = Clock(monkeypatch), list[str]()
        scheduler = TurnScheduler(asyncio.get_running_loop())
        for number in range(10):
            scheduler.wait(Worker(clock, log, str(number), 20, QUANTUM_NS // 2))
        counts = []
        while scheduler._waiting:
            before = len(log)
            await asyncio.sleep(0)
            counts.append(len(log) - before)
        assert max(counts) <= TURN_NS // QUANTUM_NS + 1
        assert all(log.count(str(number)) == 10 for number in range(10))

    play()


def test_a_connection_whose_steps_are_long_waits_for_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @in_loop
    async def play() -> None:
        clock, log = Clock(monkeypatch), list[str]()
        scheduler = TurnScheduler(asyncio.get_running_loop())
        long = Worker(clock, log, "long", 100, 10 * QUANTUM_NS)
        short = Worker(clock, log, "short", 100, QUANTUM_NS)
        scheduler.wait(long)
        scheduler.wait(short)
        while len(log) < 60:
            await asyncio.sleep(0)
        assert 3 <= log.count("long") <= 8
        assert log.count("short") == 60 - log.count("long")

    play()


def test_a_connection_that_is_alone_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    @in_loop
    async def play() -> None:
        clock, log = Clock(monkeypatch), list[str]()
        scheduler = TurnScheduler(asyncio.get_running_loop())
        scheduler.wait(Worker(clock, log, "a", 5, 10 * QUANTUM_NS))
        for _ in range(5):
            await asyncio.sleep(0)
        assert log == ["a"] * 5 and not scheduler._waiting

    play()


def test_processor_time_is_told_and_a_connection_that_ended_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @in_loop
    async def play() -> None:
        clock, log = Clock(monkeypatch), list[str]()
        scheduler = TurnScheduler(asyncio.get_running_loop())
        one = Worker(clock, log, "a", 100, QUANTUM_NS)
        scheduler.wait(one)
        await asyncio.sleep(0)
        one.is_ended = True
        await asyncio.sleep(0)
        assert one.used_ns == [QUANTUM_NS, QUANTUM_NS]
        assert not scheduler._waiting

    play()


@in_loop
async def test_a_turn_that_delivers_nothing_for_long_is_followed_by_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of a connection that is alone: what others will send is not known."""
    loop, log = asyncio.get_running_loop(), list[str]()
    scheduler = TurnScheduler(loop)
    one = Worker(Clock(monkeypatch), log, "a", 2, 10 * QUANTUM_NS)
    one.wasted_ns = 20 * WASTED_NS_MAX
    begun_s = loop.time()
    scheduler.wait(one)
    await asyncio.sleep(0)
    assert log == ["a"] and not scheduler._waiting
    while len(log) < 2:
        await asyncio.sleep(0.001)
    assert loop.time() - begun_s >= 0.019


@in_loop
async def test_reads_close_together_are_one_burst() -> None:
    """libuv reads a socket again and again in one turn."""
    burst = ReadBurst(TurnScheduler(asyncio.get_running_loop()))
    at_ns, long_after = GAP_NS * 10, 0
    for number in range(20):
        if burst.is_long(at_ns, at_ns + 100, 0, 1000):
            long_after = number
            break
        at_ns += 100 + 100
    # After half of the limit the turns are counted, and the burst with them.
    assert 5 <= long_after <= 8
    at_ns += GAP_NS + 101
    assert not burst.is_long(at_ns, at_ns + 100, 0, 1000)


@in_loop
async def test_reads_close_together_of_different_turns_are_no_burst() -> None:
    """A busy loop goes round in a few microseconds."""
    burst = ReadBurst(TurnScheduler(asyncio.get_running_loop()))
    at_ns = GAP_NS * 10
    for _ in range(100):
        assert not burst.is_long(at_ns, at_ns + 100, 0, 1000)
        at_ns += 100 + 100
        await asyncio.sleep(0)


@in_loop
async def test_large_reads_of_one_turn_are_one_burst_however_long_each_takes() -> None:
    """The memory that a frame is read into may be new: a read then takes milliseconds."""
    burst, size = ReadBurst(TurnScheduler(asyncio.get_running_loop())), LARGE_READ_BYTES
    at_ns = GAP_NS * 10
    assert not burst.is_long(at_ns, at_ns + 10, size, QUANTUM_NS)
    at_ns += 10 * QUANTUM_NS
    assert burst.is_long(at_ns, at_ns + 10, size, QUANTUM_NS)
    await asyncio.sleep(0)
    at_ns += 10 * QUANTUM_NS
    assert not burst.is_long(at_ns, at_ns + 10, size, QUANTUM_NS)


@in_loop
async def test_a_client_that_asks_again_as_soon_as_it_is_answered_has_no_long_burst() -> None:
    """Its next request comes 100 us after the one before was processed, in another turn."""
    burst = ReadBurst(TurnScheduler(asyncio.get_running_loop()))
    at_ns = GAP_NS * 10
    for _ in range(100):
        assert not burst.is_long(at_ns, at_ns + 50 * NS_PER_US, 4096, QUANTUM_NS)
        at_ns += 150 * NS_PER_US
