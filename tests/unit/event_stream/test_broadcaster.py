"""Socket for subscribers, with connections of this process: limits of each and of all of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from unittest import mock

import pytest

from iskander.config.events import EventsConfig
from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.event_stream import broadcaster as module
from iskander.event_stream.broadcaster import Broadcaster
from iskander.event_stream.forwarder import ForwardedPublications, Forwarder
from iskander.transport.zmtp import frames

WITHIN_S = 60.0
TOPIC, BODY = b"worker", b"x" * 1000
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


@pytest.mark.slow
def test_subscriptions_and_cancellations_without_end_are_limited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with playing(tmp_path) as stage:
            _, writer = await stage.connect()
            changes = (message(b"\x01a") + message(b"\x00a")) * 1000
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(changes)
                    await writer.drain()

    asyncio.run(run())
    assert "CPU limit exceeded: 100 ms/s" in caplog.text
