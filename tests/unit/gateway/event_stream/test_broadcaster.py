"""Socket for subscribers, with connections of this process: limits of each and of all of them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import uvloop

from iskander.config.events import EventsConfig
from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.foundation.clock import NS_PER_MS, now_ns
from iskander.gateway.event_stream import broadcaster as module
from iskander.gateway.event_stream.broadcaster import (
    FLUSH_BYTES,
    READ_SHARE,
    WRITE_BUFFER_BYTES,
    Broadcaster,
)
from iskander.gateway.event_stream.endpoint import Endpoint
from iskander.gateway.event_stream.forwarder import ForwardedPublications, Forwarder
from iskander.gateway.transport.zmtp import frames

WITHIN_S = 60.0
TOPIC, BODY = b"worker", b"x" * 1000
READ_NS = 5 * NS_PER_MS
HANDSHAKE = frames.GREETING + frames.ready(Socket_Type=b"SUB")
GREETED = frames.GREETING + frames.ready(Socket_Type=b"PUB")

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def message(*parts: bytes) -> bytes:
    return b"".join(frames.message(parts))


class Stage:
    """A broadcaster, and connections to it."""

    def __init__(self, folder: Path, **events: int) -> None:
        self._path = folder / "events"
        config = Config(events=EventsConfig(address=f"ipc://{self._path}", **events))
        self.broadcaster = Broadcaster(config)
        self.writers: list[asyncio.StreamWriter] = []

    async def connect(self, sent: bytes = HANDSHAKE + message(b"\x01" + TOPIC)) -> Stream:
        reader, writer = await asyncio.open_unix_connection(str(self._path))
        self.writers.append(writer)
        writer.write(sent)
        return reader, writer

    async def subscribe(self) -> Stream:
        """Connect, and wait until the subscription is known."""
        reader, writer = await self.connect()
        assert await reader.readexactly(len(GREETED)) == GREETED
        while not all(each.subscriptions.select(TOPIC) for each in self.connections):
            await asyncio.sleep(0.01)
        return reader, writer

    @property
    def connections(self) -> set[module.Connection]:
        return self.broadcaster._connections


@contextlib.asynccontextmanager
async def playing(folder: Path, **events: int) -> AsyncIterator[Stage]:
    stage = Stage(folder, **events)
    await stage.broadcaster.start()
    try:
        async with asyncio.timeout(WITHIN_S):
            yield stage
    finally:
        await stage.broadcaster.stop()
        for writer in stage.writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        assert not stage.connections


def test_subscribers_above_the_limit_are_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with playing(tmp_path, subscribers=2) as stage:
            first, second = await stage.subscribe(), await stage.subscribe()
            rejected, _ = await stage.connect(b"")
            assert await rejected.read() == b""
            second[1].close()
            while len(stage.connections) > 1:
                await asyncio.sleep(0.01)
            third = await stage.subscribe()
            stage.broadcaster.publish(TOPIC, BODY)
            stage.broadcaster.publish(b"other", BODY)
            await stage.broadcaster.stop()
            for reader, _ in (first, third):
                assert await reader.read() == message(TOPIC, BODY)

    asyncio.run(run())
    assert "too many subscribers, limit 2 (`events.subscribers`)" in caplog.text


def test_messages_of_one_turn_are_sent_together_and_in_order(tmp_path: Path) -> None:
    """More than may wait for a subscriber that does not read; this one does."""
    bodies = [b"%d" % number for number in range(100)]

    async def run() -> None:
        async with playing(tmp_path, subscriber_messages=40) as stage:
            reader, _ = await stage.subscribe()
            (connection,) = stage.connections
            writes = []
            send = connection._transport.write
            connection._transport = mock.Mock(wraps=connection._transport)
            connection._transport.write.side_effect = lambda data: writes.append(send(data))
            for body in bodies:
                stage.broadcaster.publish(TOPIC, body)
            expected = b"".join(message(TOPIC, body) for body in bodies)
            assert await reader.readexactly(len(expected)) == expected
            assert len(writes) == 3

    asyncio.run(run())


def test_address_in_use_is_a_configuration_error() -> None:
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
            broadcaster = Broadcaster(Config(events=EventsConfig(address=address)))
            with pytest.raises(ConfigError, match="cannot listen: Address already in use"):
                await broadcaster.start()

    asyncio.run(run())


def test_connection_without_a_handshake_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.3)

    async def run() -> None:
        async with playing(tmp_path) as stage:
            subscribed = await stage.subscribe()
            silent, _ = await stage.connect(frames.GREETING)
            assert await silent.read() == GREETED
            stage.broadcaster.publish(TOPIC, BODY)
            sent = message(TOPIC, BODY)
            assert await subscribed[0].readexactly(len(sent)) == sent

    asyncio.run(run())
    assert "no READY within 0.3 s" in caplog.text


def test_messages_for_a_subscriber_that_does_not_read_are_bounded(tmp_path: Path) -> None:
    """It receives the oldest ones, and the others are dropped."""

    async def run() -> None:
        async with playing(tmp_path, subscriber_messages=10) as stage:
            reader, writer = await stage.subscribe()
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            (connection,) = stage.connections
            for number in itertools.count():
                stage.broadcaster.publish(TOPIC, b"%6d" % number + BODY)
                if connection._is_blocked and len(connection._queue) == 10:
                    break
                if not number % 20:
                    await asyncio.sleep(0)
            for _ in range(1000):
                stage.broadcaster.publish(TOPIC, b"dropped" + BODY)
            assert len(connection._queue) == 10
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            for expected in range(number + 1):
                sent = message(TOPIC, b"%6d" % expected + BODY)
                assert await reader.readexactly(len(sent)) == sent
            stage.broadcaster.publish(TOPIC, b"later" + BODY)
            sent = message(TOPIC, b"later" + BODY)
            assert await reader.readexactly(len(sent)) == sent

    asyncio.run(run())


def test_messages_of_a_process_are_forwarded_to_the_last(tmp_path: Path) -> None:
    """The last one has arrived, and the event loop has not processed it."""
    config = Config(events=EventsConfig(address=f"ipc://{tmp_path}/events"))

    async def run() -> None:
        async with playing(tmp_path) as stage:
            reader, _ = await stage.subscribe()
            forwarder = Forwarder(stage.broadcaster, config, tmp_path)
            process = ForwardedPublications(config, tmp_path)
            received = asyncio.create_task(reader.readexactly(1))
            while not received.done():
                process.publish(TOPIC, b"first")
                await asyncio.sleep(0.01)
            process.publish(TOPIC, b"last")
            await process.stop()
            assert forwarder._socket.poll(WITHIN_S * 1000)
            forwarder.stop()
            await stage.broadcaster.stop()
            assert (await reader.read()).endswith(message(TOPIC, b"last"))

    asyncio.run(run())


def test_subscriber_is_read_once_in_a_loop_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libuv reads up to 32 times, or until the protocol pauses it."""
    iteration, read_in = 0, list[int]()
    process = module.Connection.buffer_updated

    def buffer_updated(connection: module.Connection, nbytes: int) -> None:
        read_in.append(iteration)
        process(connection, nbytes)

    monkeypatch.setattr(module.Connection, "buffer_updated", buffer_updated)
    monkeypatch.setattr(module, "READ_SHARE", 0)

    async def run() -> None:
        nonlocal iteration
        changes = (message(b"\x01a") + message(b"\x00a")) * (1 << 14)
        async with playing(tmp_path) as stage:
            await stage.connect(HANDSHAKE + changes + message(b"\x01" + TOPIC))
            while not any(each.subscriptions.select(TOPIC) for each in stage.connections):
                await asyncio.sleep(0)
                iteration += 1

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    assert len(read_in) >= 32 and len(set(read_in)) == len(read_in)


def test_reads_of_all_subscribers_share_a_part_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a subscriber that connects again too."""
    clock = itertools.count(step=READ_NS)
    monkeypatch.setattr(module, "thread_cpu_ns", lambda: next(clock))
    began_ns, times_ns = now_ns(), list[int]()
    process = module.Connection.process_read

    def process_read(connection: module.Connection) -> None:
        times_ns.append(now_ns())
        process(connection)

    monkeypatch.setattr(module.Connection, "process_read", process_read)

    async def run() -> None:
        async with playing(tmp_path) as stage:
            for _ in range(3):
                _, writer = await stage.subscribe()
                await stage.subscribe()
                writer.close()

    asyncio.run(run())
    pauses_ns = (len(times_ns) - 1) * READ_SHARE * READ_NS
    assert len(times_ns) >= 6 and times_ns[-1] - began_ns >= pauses_ns


def test_bytes_written_in_a_loop_iteration_are_limited(tmp_path: Path) -> None:
    async def run() -> None:
        async with playing(tmp_path) as stage:
            await stage.subscribe()
            (connection,) = stage.connections
            with mock.patch.object(connection, "_transport") as transport:
                for _ in range(40):
                    stage.broadcaster.publish(TOPIC, bytes(WRITE_BUFFER_BYTES))
                sizes = []
                while connection._queue:
                    transport.write.reset_mock()
                    await asyncio.sleep(0)
                    sizes.append(sum(len(each.args[0]) for each in transport.write.call_args_list))
            assert len(sizes) > 1 and max(sizes) <= FLUSH_BYTES + 2 * WRITE_BUFFER_BYTES

    asyncio.run(run())


class FailingSocket(socket.socket):
    """Listening socket whose first `accept` fails."""

    has_failed = False

    def accept(self) -> Any:
        if self.has_failed:
            return super().accept()
        self.has_failed = True
        raise OSError(errno.ENFILE, "no free files")


def test_subscribers_are_accepted_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bind = Endpoint.bind

    async def bind_failing(endpoint: Endpoint) -> list[socket.socket]:
        return [FailingSocket(fileno=each.detach()) for each in await bind(endpoint)]

    monkeypatch.setattr(Endpoint, "bind", bind_failing)

    async def run() -> None:
        async with playing(tmp_path) as stage:
            await stage.subscribe()

    asyncio.run(run())
    assert "accept failed: no free files" in caplog.text
