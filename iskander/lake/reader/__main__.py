"""`python -m iskander.lake.reader`: serves the requests of one gateway over a socket.

The process ends with the gateway: by the death signal, or at the end of the socket. An error of a
request is its answer; a crash, such as one of a decoder, ends this process only.

Runs in: a process of its own. Source: setrlimit(2), where RLIMIT_DATA counts private writable
memory; prctl(2), PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa

from iskander.client import Client
from iskander.errors import INTERNAL, IskanderError, LimitExceeded, ProtocolError
from iskander.foundation.logs import workers as log
from iskander.foundation.logs.stderr import set_up_child
from iskander.gateway.sources.messages import (
    HEAD,
    LENGTH,
    REQUEST_BYTES_MAX,
    Envelope,
    Kind,
    ReadRequest,
    Request,
)
from iskander.lake.reader.planning import plan
from iskander.lake.reader.reading import read

NICE: Final = 5
THREADS: Final = 2
"""Threads that decode columns."""
EMPTY: Final = memoryview(b"")
_PR_SET_PDEATHSIG: Final = 1


class Server:
    """Serves the requests of one gateway until the socket ends."""

    def __init__(self, connection: socket.socket, memory_bytes: int) -> None:
        self._connection = connection
        self._memory_bytes = memory_bytes
        self._client: Client | None = None
        self._caller: tuple[str, str | None] = ("", None)

    def run(self) -> None:
        """Serve requests, one after the other."""
        while (request := self._receive()) is not None:
            try:
                self._serve(request)
            except BrokenPipeError:
                return
            except Exception as error:  # The end of a request.
                self._send(
                    Kind.ERROR, 0, memoryview(msgspec.msgpack.encode(self._encode_error(error)))
                )

    def _serve(self, request: Request) -> None:
        if isinstance(request, ReadRequest):
            read(request, self._client_of(request), self._send)
        else:
            answer = msgspec.msgpack.encode(plan(request))
            self._send(Kind.PLANNED, 0, memoryview(answer))
        self._send(Kind.END, 0, EMPTY)

    def _client_of(self, request: ReadRequest) -> Client:
        """Return a client with the caller's token, which is kept for the next request."""
        caller = (request.address, request.token)
        if self._client is None or caller != self._caller:
            if self._client is not None:
                self._client.close()
            self._client, self._caller = Client(request.address, token=request.token), caller
        return self._client

    def _encode_error(self, error: Exception) -> dict[str, object]:
        if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError):
            limit = f"limit {self._memory_bytes:,} bytes (`source_reads.memory_bytes`)"
            error = LimitExceeded(f"the process that reads the source needs more memory, {limit}")
        if not isinstance(error, IskanderError):
            log.source_read_failed(error=error)
            error = IskanderError(INTERNAL)
        return error.to_wire()

    def _receive(self) -> Request | None:
        head = self._receive_exactly(LENGTH.size)
        if head is None:
            return None
        (length,) = LENGTH.unpack(head)
        if length > REQUEST_BYTES_MAX:
            raise ProtocolError(f"request of {length} bytes, limit {REQUEST_BYTES_MAX}")
        text = self._receive_exactly(length)
        return None if text is None else msgspec.msgpack.decode(text, type=Envelope).request

    def _receive_exactly(self, count: int) -> bytearray | None:
        """Receive `count` bytes; None at the end of the socket."""
        data = bytearray(count)
        view = memoryview(data)
        while view:
            got = self._connection.recv_into(view)
            if not got:
                return None
            view = view[got:]
        return data

    def _send(self, kind: Kind, rows: int, metadata: memoryview, body: memoryview = EMPTY) -> None:
        """Send a frame; block while the gateway does not read."""
        self._connection.sendall(HEAD.pack(kind, rows, len(metadata), len(body)))
        for part in (metadata, body):
            if part:
                self._connection.sendall(part)


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="iskander-source-reader", description=__doc__)
    parser.add_argument("--socket", type=int, required=True, metavar="FD")
    parser.add_argument("--parent", type=int, required=True, metavar="PID")
    parser.add_argument("--memory", type=int, required=True, metavar="BYTES")
    arguments = parser.parse_args()
    set_up_child()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != arguments.parent:
        sys.exit("the gateway ended before this process began")
    Path("/proc/self/comm").write_text("isk-reader")
    os.nice(NICE)
    for limit, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_DATA, arguments.memory)):
        resource.setrlimit(limit, (most, most))
    pa.set_cpu_count(THREADS)
    with socket.socket(fileno=arguments.socket) as connection:
        Server(connection, arguments.memory).run()


if __name__ == "__main__":
    main()
