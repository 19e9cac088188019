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

from iskander.config.schema import Config
from iskander.foundation.clock import NS_PER_S, now_ns, thread_cpu_ns
from iskander.foundation.logs import network as log
from iskander.gateway.event_stream.endpoint import Endpoint
from iskander.gateway.event_stream.subscriptions import Subscriptions
from iskander.gateway.transport.acceptor import AcceptedSocket, Acceptor
from iskander.gateway.transport.limits.descriptors import descriptor_limit
from iskander.gateway.transport.sources import Source
from iskander.gateway.transport.zmtp import frames
from iskander.gateway.transport.zmtp.frames import ProtocolViolation

READ_BYTES: Final = 4096
"""Up to 1,365 subscriptions, in a millisecond; one read of all subscribers in a loop iteration."""
READ_SHARE: Final = 10
"""The reads of all subscribers use at most a tenth of the time of a processor."""
WRITE_BUFFER_BYTES: Final = 1 << 16
"""Above it, messages wait in the queue of the subscriber."""
FLUSH_BYTES: Final = 1 << 18
"""Written for a subscriber in one event loop iteration."""
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
        self._acceptors: list[Acceptor] = []
        self._connections: set[Connection] = set()
        self._unprocessed: dict[Connection, None] = {}  # With a read, in the order of arrival.
        self._turn_ns = 0
        self._is_turn_due = False

    async def start(self) -> None:
        """Accept subscribers; raises ConfigError if the address is in use."""
        for bound in await self._endpoint.bind():
            self._acceptors.append(Acceptor(bound, self))
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
        for acceptor in self._acceptors:
            acceptor.close()
        deadline_ns = now_ns() + int(FLUSH_S * NS_PER_S)
        while self._connections and now_ns() < deadline_ns:
            for connection in list(self._connections):
                connection.close()
            await asyncio.sleep(FLUSH_TICK_S)
        for connection in list(self._connections):
            connection.abort()
        self._endpoint.release()

    def admit(self, source: Source) -> AcceptedSocket[Connection]:
        """Return the state of a new connection; `add` applies the limit."""
        return AcceptedSocket(source)

    def make(self, accepted: AcceptedSocket[Connection]) -> Connection:
        """Create the protocol object of a new connection."""
        del accepted
        return Connection(self)

    def drop(self, accepted: AcceptedSocket[Connection]) -> None:
        """Do nothing: a connection counts once it is set up."""

    def on_accept_error(self, listening: socket.socket, error: OSError) -> None:
        """Log a failed `accept`."""
        del listening
        log.accept_failed(reason=str(error.strerror), times=1, limit=descriptor_limit())

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
        self._unprocessed.pop(connection, None)

    def process_later(self, connection: Connection) -> None:
        """Process the read of a subscriber when it has its turn."""
        self._unprocessed[connection] = None
        self._schedule_turn()

    def _schedule_turn(self) -> None:
        if self._unprocessed and not self._is_turn_due:
            self._is_turn_due = True
            delay_s = max(self._turn_ns - now_ns(), 0) / NS_PER_S
            asyncio.get_running_loop().call_later(delay_s, self._run_turn)

    def _run_turn(self) -> None:
        """Process the oldest read; the next turn is `READ_SHARE` times its duration later."""
        self._is_turn_due = False
        if not self._unprocessed:
            return
        connection = next(iter(self._unprocessed))
        del self._unprocessed[connection]
        self._turn_ns = max(self._turn_ns, now_ns())
        cpu_ns = thread_cpu_ns()
        connection.process_read()
        self._turn_ns += READ_SHARE * (thread_cpu_ns() - cpu_ns)
        self._schedule_turn()


class Connection(asyncio.BufferedProtocol):
    """A subscriber, and the messages that wait for it."""

    def __init__(self, host: Broadcaster) -> None:
        self.subscriptions = Subscriptions()
        self._host = host
        self._transport: asyncio.Transport
        self._handshake: asyncio.TimerHandle
        self._read = b""
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
        """Return the buffer of all connections: each read is copied before the next."""
        del sizehint
        return self._host.scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Pause until the read is processed: libuv reads up to 32 times in an iteration."""
        self._read = bytes(self._host.scratch[:nbytes])
        self._transport.pause_reading()
        self._host.process_later(self)

    def process_read(self) -> None:
        """Process the last read, and read again."""
        try:
            answer = self.subscriptions.feed(self._read)
        except ProtocolViolation as error:
            self._fail(str(error))
            return
        if answer and not self._is_blocked:
            self._transport.write(answer)
        if not self._transport.is_closing():
            self._transport.resume_reading()

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
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not (self._is_blocked or self._is_flush_due):
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send queued messages, joined: a write of each would cost a system call of each."""
        self._is_flush_due = False
        left = FLUSH_BYTES
        while self._queue and left > 0 and not self._is_blocked:
            joined: list[bytes] = []
            size = 0
            while self._queue and size < WRITE_BUFFER_BYTES:
                joined.append(self._queue.popleft())
                size += len(joined[-1])
            self._transport.write(b"".join(joined))
            left -= size
        if self._queue:
            self._flush_soon()

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
