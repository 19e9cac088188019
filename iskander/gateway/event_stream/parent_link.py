"""Connection on which a gateway process sends server-sent events to its parent.

The process sends its number first, and the parent the URL of the stream. A connection that ends
without the last block is that of a process that was killed: its last events are lost.

Runs on: gateway loop (`ParentLink`), and the parent's loop (`ParentListener`).
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Final

from iskander.errors import ProtocolError
from iskander.foundation.logs import network as log
from iskander.gateway.event_stream.messages import (
    END,
    EVENT_BYTES_MAX,
    LOST,
    Lost,
    encode,
    parse_event,
)
from iskander.gateway.event_stream.publisher import POLL_S, STOP_S, Publisher

SOCKET: Final = "events.sock"
"""Name of the socket in the parent's runtime directory."""
CHUNK_BYTES: Final = 65_536
LAST: Final = b": the end\n\n"
EVENTS_PER_TURN: Final = 64


class ParentLink:
    """The sending side; a parent that does not read loses events, as a subscriber does."""

    def __init__(self, publisher: Publisher, process: int, folder: Path) -> None:
        self._publisher, self._process = publisher, process
        self._path = folder / SOCKET
        self._reader = publisher.buffer.open(lambda _: True)
        publisher.readers += 1
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """End, after `Publisher.stop`. Idempotent."""
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def _run(self) -> None:
        publisher = self._publisher
        try:
            parent, writer = await asyncio.open_unix_connection(self._path)
            try:
                writer.write(b"%d\n" % self._process)
                publisher.address = (await parent.readline()).decode().strip()
                while True:
                    arrived = publisher.arrived
                    if text := self._reader.take(CHUNK_BYTES):
                        writer.write(text)
                        await writer.drain()
                    elif publisher.is_ended:
                        break
                    else:
                        await asyncio.wait((arrived,))
                writer.write(LAST)
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        except OSError as error:
            log.events_not_sent(reason=str(error.strerror or error))
        finally:
            publisher.readers -= 1
            publisher.buffer.close(self._reader)


class ParentListener:
    """The receiving side: publishes the events of all processes.

    Args:
        publisher: Stream of the parent.
        folder: Runtime directory of the parent.
        address: URL of the stream, which the processes report.
    """

    def __init__(self, publisher: Publisher, folder: Path, address: str) -> None:
        self._publisher = publisher
        self._path = folder / SOCKET
        self._address = address
        self._open = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Accept the processes."""
        self._server = await asyncio.start_unix_server(
            self._receive, self._path, limit=EVENT_BYTES_MAX
        )

    async def stop(self) -> None:
        """Publish what the ended processes have sent, and close."""
        if self._server is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                while self._open:
                    await asyncio.sleep(POLL_S)
        self._server.close()
        self._path.unlink(missing_ok=True)

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        process = received = 0
        is_complete = False
        try:
            writer.write(f"{self._address}\n".encode())
            process = int(await reader.readline())
            while (text := await reader.readuntil(END)) != LAST:
                event = parse_event(text.decode())
                self._publisher.publish(event.topic, event.name, event.data.encode())
                received += 1
                if received % EVENTS_PER_TURN == 0:
                    await asyncio.sleep(0)
            is_complete = True
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # The process was killed, which the parent logs.
        except (OSError, ValueError, asyncio.LimitOverrunError, ProtocolError) as error:
            log.events_not_sent(reason=str(error))
        finally:
            self._open -= 1
            writer.close()
        if not is_complete:
            lost = Lost(process=process, lost=None, reason="restarted")
            self._publisher.publish(LOST, LOST, encode(lost))
