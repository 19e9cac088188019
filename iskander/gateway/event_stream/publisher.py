"""Publisher of the event stream: encodes each event once, and wakes the subscribers.

Runs on: gateway loop, and the parent's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from typing import Any, Final

from iskander.config.events import EventsConfig
from iskander.gateway.event_stream.buffer import EventBuffer
from iskander.gateway.event_stream.changes import ChangeHandler
from iskander.gateway.event_stream.messages import (
    COMPLETION,
    Change,
    Completion,
    completion_topic,
    encode,
)
from iskander.gateway.event_stream.recorder import CompletionRecorder

PERIOD_S: Final = 0.02
"""Time in which events come together, so that a subscriber has one write for them."""
STOP_S: Final = 0.5
"""Longest wait at the end until the subscribers have the last events."""
POLL_S: Final = 0.01


class Publisher:
    """The stream of one process.

    Attributes:
        recorder: Tracer that publishes completed requests.
        buffer: The last events.
        arrived: Done when there are new events, or the stream ends; another one follows then.
        is_ended: No event follows.
        address: URL for subscribers; empty until it is known.
        readers: Open subscriptions, and the connection to the parent.
    """

    def __init__(self, config: EventsConfig, process: int | None = None) -> None:
        self.recorder = CompletionRecorder(self._on_completion, process)
        self.buffer = EventBuffer(secrets.token_hex(8), config.buffer_bytes, process)
        self.is_ended = False
        self.address = ""
        self.readers = 0
        self._changes = ChangeHandler(self._on_change, process)
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self.arrived: asyncio.Future[None] = self._loop.create_future()
        self._is_wake_due = False

    def start(self) -> None:
        """Start to publish changes."""
        self._changes.start()

    async def stop(self) -> None:
        """End the stream, once the subscribers have the last events or `STOP_S` later."""
        self._changes.stop()
        self.is_ended = True
        self._wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                while self.readers:
                    await asyncio.sleep(POLL_S)

    def stats(self) -> dict[str, Any]:
        """Return the URL, and counts of events and subscribers."""
        return {
            "address": self.address,
            "published": self.buffer.next,
            "readers": self.readers,
        }

    def publish(self, topic: str, name: str, data: bytes) -> None:
        """Add an event; its subscribers are woken after `PERIOD_S`."""
        if self.is_ended:
            return
        self.buffer.add(topic, name, data)
        if not self._is_wake_due:
            self._is_wake_due = True
            self._loop.call_later(PERIOD_S, self._wake)

    def _wake(self) -> None:
        self._is_wake_due = False
        self.arrived.set_result(None)
        self.arrived = self._loop.create_future()

    def _on_completion(self, completion: Completion) -> None:
        topic = completion_topic(completion.model, completion.version)
        self.publish(topic, COMPLETION, encode(completion))

    def _on_change(self, topic: str, change: Change) -> None:
        data = encode(change)
        if threading.get_ident() == self._thread:
            self.publish(topic, topic, data)
        else:
            with contextlib.suppress(RuntimeError):  # It may log after the end of the loop.
                self._loop.call_soon_threadsafe(self.publish, topic, topic, data)
