"""Socket of the event stream for subscribers, as a ZeroMQ PUB socket.

ZeroMQ's own has no limit on connections, subscriptions, and the time of their processing in the
thread that publishes: 300,000 subscriptions of 32 bytes took 450 MB.

Runs on: gateway loop, and the parent's loop. Source: RFC 37/ZMTP 3.1, RFC 29/PUBSUB.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import Final, cast

from iskander.clock import NS_PER_MS, NS_PER_S, now_ns, thread_cpu_ns
from iskander.config.schema import Config
from iskander.event_stream.endpoint import Endpoint
from iskander.event_stream.subscriptions import Subscriptions
from iskander.logs import network as log
from iskander.transport.cpu_allowance import PER_S_NS, CpuAllowance
from iskander.transport.zmtp import frames
from iskander.transport.zmtp.frames import ProtocolViolation

READ_BYTES: Final = 4096
"""Of a subscriber in one event loop iteration: up to 1,365 subscriptions, in a millisecond."""
WRITE_BUFFER_BYTES: Final = 1 << 16
"""Above it, messages wait in the queue of the subscriber."""
HANDSHAKE_S: Final = 10.0
FLUSH_S: Final = 0.5
"""Timeout for the last events at the end."""
FLUSH_TICK_S: Final = 0.01


class Broadcaster:
    """Listening sockets, and the connections of all subscribers.

    Attributes:
        address: Actual address, once started.
    """

    def __init__(self, config: Config) -> None:
        self.address = ""
        self.scratch = memoryview(bytearray(READ_BYTES))
        self.messages_max = config.events.subscriber_messages
        self._subscribers_max = config.events.subscribers
        self._endpoint = Endpoint(config)
        self._servers: list[asyncio.Server] = []
        self._connections: set[Connection] = set()

    async def start(self) -> None:
        """Accept subscribers; raises ConfigError if the address is in use."""
        loop = asyncio.get_running_loop()
        for bound in await self._endpoint.bind():
            is_unix = bound.family == socket.AF_UNIX
            create = loop.create_unix_server if is_unix else loop.create_server
            self._servers.append(await create(lambda: Connection(self), sock=bound))
        self.address = self._endpoint.address

    def publish(self, topic: bytes, body: bytes) -> None:
        """Send a message to the subscribers of its topic; never blocks."""
        receivers = [each for each in self._connections if each.subscriptions.select(topic)]
        if receivers:
            message = b"".join(frames.message((topic, body)))
            for connection in receivers:
                connection.send(message)

    async def stop(self) -> None:
        """Send what waits for the subscribers, within `FLUSH_S`, and close. Idempotent."""
        for server in self._servers:
            server.close()
        deadline_ns = now_ns() + int(FLUSH_S * NS_PER_S)
        while self._connections and now_ns() < deadline_ns:
            for connection in list(self._connections):
                connection.close()
            await asyncio.sleep(FLUSH_TICK_S)
        for connection in list(self._connections):
            connection.abort()
        self._endpoint.release()

    def add(self, connection: Connection) -> bool:
        """Add a new connection; return False above the limit."""
        if len(self._connections) >= self._subscribers_max:
            limit = f"limit {self._subscribers_max} (`events.subscribers`)"
            log.subscriber_ended(reason=f"too many subscribers, {limit}")
            return False
        self._connections.add(connection)
        return True

    def forget(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self._connections.discard(connection)


class Connection(asyncio.BufferedProtocol):
    """A subscriber, and the messages that wait for it."""

    def __init__(self, host: Broadcaster) -> None:
        self.subscriptions = Subscriptions()
        self._host = host
        self._transport: asyncio.Transport
        self._handshake: asyncio.TimerHandle
        self._cpu = CpuAllowance(now_ns())
        self._queue: deque[bytes] = deque()
        self._is_blocked = self._is_flush_due = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the greeting."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        loop = asyncio.get_running_loop()
        self._handshake = loop.call_later(HANDSHAKE_S, self._require_handshake)
        if self._host.add(self):
            self._transport.write(frames.GREETING)
        else:
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the subscriber."""
        del error
        self._handshake.cancel()
        self._queue.clear()
        self._host.forget(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer of all connections: each read is processed before the next."""
        del sizehint
        return self._host.scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Process a read."""
        began_ns = thread_cpu_ns()
        try:
            answer = self.subscriptions.feed(bytes(self._host.scratch[:nbytes]))
        except ProtocolViolation as error:
            self._fail(str(error))
            return
        if answer and not self._is_blocked:
            self._transport.write(answer)
        if not self._cpu.charge(now_ns(), thread_cpu_ns() - began_ns):
            self._fail(f"CPU limit exceeded: {PER_S_NS // NS_PER_MS} ms/s")

    def pause_writing(self) -> None:
        """Queue messages: the write buffer is full."""
        self._is_blocked = True

    def resume_writing(self) -> None:
        """Send queued messages."""
        self._is_blocked = False
        self._flush()

    def send(self, message: bytes) -> None:
        """Queue a message; drop it if the queue is full and the subscriber does not read."""
        if len(self._queue) >= self._host.messages_max:
            self._flush()
            if len(self._queue) >= self._host.messages_max:
                return
        self._queue.append(message)
        if not (self._is_blocked or self._is_flush_due):
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send queued messages, joined: a write of each would cost a system call of each."""
        self._is_flush_due = False
        while self._queue and not self._is_blocked:
            joined: list[bytes] = []
            size = 0
            while self._queue and size < WRITE_BUFFER_BYTES:
                joined.append(self._queue.popleft())
                size += len(joined[-1])
            self._transport.write(b"".join(joined))

    def close(self) -> None:
        """Close after the write buffer is sent, if no message is queued."""
        if not self._queue:
            self._transport.close()

    def abort(self) -> None:
        """Close now."""
        self._transport.abort()

    def _require_handshake(self) -> None:
        if not self.subscriptions.is_ready:
            self._fail(f"no READY within {HANDSHAKE_S:g} s")

    def _fail(self, reason: str) -> None:
        log.subscriber_ended(reason=reason)
        self.abort()
