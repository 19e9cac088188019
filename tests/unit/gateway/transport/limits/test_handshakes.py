"""Turns of TLS handshakes: pauses, sources in turn, cancelled waits, and closed connections."""

from __future__ import annotations

import asyncio
import socket
import time

from iskander.gateway.transport.limits.handshakes import (
    PAUSE_SHARE,
    HandshakeTurns,
    first_bytes,
    has_ended,
)

COST_NS = 1_000_000
COST_S = 0.001
WAIT_S = 5.0


def test_handshakes_use_a_share_of_the_time() -> None:
    async def run() -> None:
        turns = HandshakeTurns()
        began_s = time.monotonic()
        await turns.wait("a", COST_NS)
        assert time.monotonic() - began_s < COST_S * PAUSE_SHARE, "the first one waits for nothing"
        await asyncio.gather(*(turns.wait("a", COST_NS) for _ in range(5)))
        # The loop's clock has a resolution of a millisecond.
        assert time.monotonic() - began_s >= 5 * PAUSE_SHARE * COST_S

    asyncio.run(run())


def test_sources_take_turns() -> None:
    async def run() -> None:
        turns, begun = HandshakeTurns(), list[str]()

        async def begin(source: str) -> None:
            await turns.wait(source, COST_NS)
            begun.append(source)

        await turns.wait("flood", COST_NS)
        flood = [asyncio.create_task(begin("flood")) for _ in range(20)]
        await asyncio.sleep(0)
        await asyncio.wait_for(begin("other"), WAIT_S)
        assert begun.count("flood") <= 2
        for each in flood:
            each.cancel()
        await asyncio.gather(*flood, return_exceptions=True)

    asyncio.run(run())


def test_cancelled_waits_leave_nothing() -> None:
    async def run() -> None:
        turns = HandshakeTurns()
        await turns.wait("a", COST_NS)
        waits = [asyncio.create_task(turns.wait(name, COST_NS)) for name in "abab"]
        await asyncio.sleep(0)
        for each in waits:
            each.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        assert not turns._queues
        await asyncio.wait_for(turns.wait("a", COST_NS), WAIT_S)

    asyncio.run(run())


def test_wait_cancelled_with_its_turn_gives_it_to_the_next() -> None:
    async def run() -> None:
        turns = HandshakeTurns()
        await turns.wait("a", COST_NS)
        waits = [asyncio.create_task(turns.wait("a", COST_NS)) for _ in range(2)]
        while (turns._queues and len(turns._queues["a"]) == 2) or not turns._queues:
            await asyncio.sleep(0)
        waits[0].cancel()
        await asyncio.wait_for(waits[1], WAIT_S)

    asyncio.run(run())


def test_input_and_end_of_a_connection_are_seen_without_reading() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            client = socket.create_connection(listening.getsockname())
            server, _ = listening.accept()
        with server, client:
            server.setblocking(False)
            waiting = asyncio.create_task(first_bytes(loop, server))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            client.sendall(b"hello")
            await asyncio.wait_for(waiting, WAIT_S)
            assert not has_ended(server)
            client.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(WAIT_S):
                while not has_ended(server):
                    await asyncio.sleep(0.01)
            assert server.recv(9) == b"hello"

    asyncio.run(run())
