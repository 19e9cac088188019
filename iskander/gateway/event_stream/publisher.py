"""Publisher of the event stream.

An event is appended to a queue. `PERIOD_S` later the loop encodes what has come together and gives
it to a sink, which does not wait for subscribers.

Runs on: gateway loop, and the parent's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from typing import Any, Protocol

from iskander.config.events import EventsConfig
from iskander.gateway.event_stream.changes import ChangeHandler
from iskander.gateway.event_stream.messages import (
    ENCODING,
    HEARTBEAT,
    Batch,
    Change,
    Completion,
    Event,
    Heartbeat,
    completion_topic,
    encode,
)
from iskander.gateway.event_stream.queue import EventQueue
from iskander.gateway.event_stream.recorder import CompletionRecorder

PERIOD_S = 0.01
HEARTBEAT_S = 1.0


class EventSink(Protocol):
    """Way to the subscribers: a `Broadcaster`, or `ForwardedPublications`."""

    address: str

    def publish(self, topic: bytes, body: bytes) -> None:
        """Send a message, or drop it; never blocks."""

    async def stop(self) -> None:
        """Send what waits, and close. Idempotent."""


class Publisher:
    """The stream of one process.

    Attributes:
        recorder: Tracer that publishes completed requests.
    """

    def __init__(self, config: EventsConfig, process: int | None = None) -> None:
        self.recorder = CompletionRecorder(self._on_completion)
        self._process = process
        self._stream = secrets.token_hex(8)
        self._queue = EventQueue(config.queue)
        self._changes = ChangeHandler(self._on_change)
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._sink: EventSink | None = None
        self._is_flush_due = False
        self._heartbeat: asyncio.TimerHandle | None = None

    def start(self, sink: EventSink) -> None:
        """Start to publish."""
        self._sink = sink
        self._changes.start()
        self._beat()

    async def stop(self) -> None:
        """Publish the last events, and end the sink; idempotent."""
        self._changes.stop()
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._sink is not None:
            while self._queue:
                self._flush()
            sink, self._sink = self._sink, None
            await sink.stop()

    def stats(self) -> dict[str, Any]:
        """Return the address, and counts of events."""
        address = "" if self._sink is None else self._sink.address
        published = sum(self._queue.next.values())
        return {"address": address, "published": published, "dropped": self._queue.dropped}

    def _on_completion(self, completion: Completion) -> None:
        self._add(completion_topic(completion), completion)

    def _on_change(self, topic: str, change: Change) -> None:
        if threading.get_ident() == self._thread:
            self._add(topic, change)
        else:
            with contextlib.suppress(RuntimeError):  # It may log after the end of the loop.
                self._loop.call_soon_threadsafe(self._add, topic, change)

    def _add(self, topic: str, event: Event) -> None:
        self._queue.add(topic, event)
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_later(PERIOD_S, self._flush)

    def _flush(self) -> None:
        """Publish one message of each queued topic; the rest in later loop iterations."""
        self._is_flush_due = False
        if self._sink is None:
            return
        for topic, first, events in self._queue.take():
            batch = Batch(
                stream=self._stream,
                process=self._process,
                first=first,
                dropped=self._queue.dropped,
                events=events,
            )
            self._send(topic, batch)
        if self._queue:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _beat(self) -> None:
        heartbeat = Heartbeat(
            stream=self._stream,
            process=self._process,
            dropped=self._queue.dropped,
            next=dict(self._queue.next),
        )
        self._send(HEARTBEAT, heartbeat)
        self._heartbeat = self._loop.call_later(HEARTBEAT_S, self._beat)

    def _send(self, topic: str, message: Batch | Heartbeat) -> None:
        assert self._sink is not None
        self._sink.publish(topic.encode(ENCODING), encode(message))
