"""Events of gateway processes at their parent: order, orderly ends, kills, and losses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from iskander.config.events import EventsConfig
from iskander.gateway.event_stream import parent_link as module
from iskander.gateway.event_stream.buffer import Reader
from iskander.gateway.event_stream.messages import Change, encode, parse_event
from iskander.gateway.event_stream.parent_link import SOCKET, ParentLink, ParentListener
from iskander.gateway.event_stream.publisher import Publisher

WITHIN_S = 10.0
URL = "http://127.0.0.1:1/events"


def change(publisher: Publisher, number: int, process: int = 1) -> None:
    event = Change(
        at_s=1.0, process=process, event="e", level="info", text="t", fields={"number": number}
    )
    publisher.publish("worker", "worker", encode(event))


async def received(reader: Reader, count: int) -> list[dict[str, Any]]:
    """Events, once there are so many."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        blocks = reader.take(1 << 20).decode().split("\n\n")
        found += [json.loads(parse_event(block).data) for block in blocks if block]
        await asyncio.sleep(0.01)
    return found


def linked(
    folder: Path,
    test: Callable[[Publisher, Reader, ParentListener], Awaitable[None]],
    **settings: int,
) -> None:
    """Run a test with the listener of a parent."""

    async def run() -> None:
        parent = Publisher(EventsConfig(enabled=True, **settings))
        reader = parent.buffer.open(lambda _: True)
        listener = ParentListener(parent, folder, URL)
        await listener.start()
        try:
            await test(parent, reader, listener)
        finally:
            await listener.stop()
            await parent.stop()
        assert not (folder / SOCKET).exists()

    asyncio.run(asyncio.wait_for(run(), WITHIN_S))


def test_events_arrive_with_those_before_the_connection_and_at_the_end(tmp_path: Path) -> None:
    async def test(parent: Publisher, reader: Reader, listener: ParentListener) -> None:
        child = Publisher(EventsConfig(enabled=True), 1)
        link = ParentLink(child, 1, tmp_path)
        change(child, 0)
        assert [event["fields"]["number"] for event in await received(reader, 1)] == [0]
        assert child.address == URL
        change(child, 1)
        await child.stop()
        await link.stop()
        await listener.stop()
        (event,) = await received(reader, 1)
        assert (event["fields"]["number"], event["process"]) == (1, 1)
        assert not reader.is_behind and parent.buffer.next == 2

    linked(tmp_path, test)


def test_killed_process_is_a_loss_of_unknown_length(tmp_path: Path) -> None:
    async def test(parent: Publisher, reader: Reader, listener: ParentListener) -> None:
        del parent, listener
        own, writer = await asyncio.open_unix_connection(tmp_path / SOCKET)
        assert await own.readline() == f"{URL}\n".encode()
        writer.write(b"3\nid: s-1\nevent: worker\ndata: {}\n\nid: s-2\nevent")
        writer.close()
        event, lost = await received(reader, 2)
        assert event == {}
        assert lost == {"kind": "lost", "process": 3, "lost": None, "reason": "restarted"}

    linked(tmp_path, test)


def test_parent_that_does_not_read_loses_events_and_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent reads nothing until all events are published."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 1000)

    async def test(parent: Publisher, reader: Reader, listener: ParentListener) -> None:
        del parent, listener
        child = Publisher(EventsConfig(enabled=True, buffer_bytes=65_536), 1)
        link = ParentLink(child, 1, tmp_path)
        for number in range(1000):
            change(child, number)
        await child.stop()
        await link.stop()
        lost, *events = await received(reader, 100)
        assert (lost["kind"], lost["reason"], lost["process"]) == ("lost", "slow", 1)
        numbers = [event["fields"]["number"] for event in events]
        assert numbers == list(range(lost["lost"], 1000))

    linked(tmp_path, test)


def test_process_without_its_parent_logs_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        child = Publisher(EventsConfig(enabled=True), 1)
        link = ParentLink(child, 1, tmp_path)
        while child.readers:
            await asyncio.sleep(0.01)
        change(child, 0)
        await child.stop()
        await link.stop()

    asyncio.run(asyncio.wait_for(run(), WITHIN_S))
    assert [record.message for record in caplog.records] == [
        "events of a process do not reach the subscribers: No such file or directory"
    ]
