"""Publisher of the event stream.

An event is appended to a queue. `PERIOD_S` later the loop encodes what has come together and gives
it to ZeroMQ, whose thread sends it; neither waits for a subscriber.

Runs on: gateway loop, and the parent's loop.

Source: zmq_socket(3) (ZMQ_PUB), zmq_setsockopt(3) (ZMQ_SNDHWM, ZMQ_LINGER).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from typing import Any

import zmq

from iskander.config.events import EventsConfig
from iskander.event_stream.changes import ChangeHandler
from iskander.event_stream.endpoint import LINGER_MS, Endpoint
from iskander.event_stream.messages import (
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
from iskander.event_stream.queue import EventQueue
from iskander.event_stream.recorder import CompletionRecorder

PERIOD_S = 0.01
HEARTBEAT_S = 1.0


class Publisher:
    """The stream of one process, which is bound to an address or connected to the forwarder.

    Attributes:
        recorder: Tracer that publishes completed requests.
        address: Actual address, once started.
    """

    def __init__(self, config: EventsConfig, process: int | None = None) -> None:
        self.recorder = CompletionRecorder(self._on_completion)
        self.address = ""
        self._process = process
        self._stream = secrets.token_hex(8)
        self._queue = EventQueue(config.queue)
        self._changes = ChangeHandler(self._on_change)
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._context: Any = zmq.Context(io_threads=1)
        self._socket: Any = self._context.socket(zmq.PUB)
        self._socket.sndhwm, self._socket.linger = config.subscriber_messages, LINGER_MS
        self._endpoint: Endpoint | None = None
        self._is_flush_due = False
        self._heartbeat: asyncio.TimerHandle | None = None

    def bind(self, endpoint: Endpoint) -> None:
        """Publish at an address; raises ConfigError if it is in use."""
        self._endpoint = endpoint
        self.address = endpoint.bind(self._socket)
        self._start()

    def connect(self, path: str, address: str) -> None:
        """Publish by the forwarder at a path, which has an address for subscribers."""
        self.address = address
        self._socket.connect(f"ipc://{path}")
        self._start()

    def stop(self) -> None:
        """Publish the last events, and end; idempotent."""
        self._changes.stop()
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if not self._socket.closed:
            while self._queue:
                self._flush()
            self._socket.close()
            self._context.term()
        if self._endpoint is not None:
            self._endpoint.release()

    def stats(self) -> dict[str, Any]:
        """Return the address, and counts of events."""
        published = sum(self._queue.next.values())
        return {"address": self.address, "published": published, "dropped": self._queue.dropped}

    def _start(self) -> None:
        self._changes.start()
        self._beat()

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
        if self._socket.closed:
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
        # PUB drops what a slow subscriber does not read, and never blocks.
        self._socket.send_multipart((topic.encode(ENCODING), encode(message)), zmq.DONTWAIT)
