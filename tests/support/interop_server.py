"""grpc.testing.TestService on the gateway's own gRPC listener, in its own process.

The script prints `{"address": ...}`, responds to each line on standard input with the open calls
and the ended connections, and stops at the end of the input. `InteropServer` controls it.
"""

from __future__ import annotations

import asyncio
import json
import select
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import uvloop

sys.path.insert(0, str(Path(__file__).parent.parent))
from iskander.config.schema import Config
from iskander.gateway.transport.http2.call import Call
from iskander.gateway.transport.http2.decompression import Compressed
from iskander.gateway.transport.http2.listener import Listener
from iskander.gateway.transport.http2.response_headers import Metadata
from iskander.gateway.transport.http2.status import RpcError, Status
from iskander.gateway.transport.limits.connection_limits import ConnectionLimits
from iskander.gateway.transport.sockets import bind
from support.generated import interop_pb2 as pb

SERVICE: Final = "/grpc.testing.TestService/"
ECHO_INITIAL: Final = "x-grpc-test-echo-initial"
ECHO_TRAILING: Final = "x-grpc-test-echo-trailing-bin"
MESSAGE_BYTES: Final = 4 << 20
WITHIN_S: Final = 20.0


class InteropServer:
    """The server's process, from the test's view.

    Attributes:
        address: Host and port.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            self.address: str = self._line()["address"]
        except BaseException:
            self._process.kill()
            self.close()
            raise

    def state(self) -> dict[str, Any]:
        """Open calls, charged bytes, and ended connections by reason."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"state\n")
        self._process.stdin.flush()
        return self._line()

    def close(self) -> int:
        """Stop it; returns its exit code."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            return self._process.wait(WITHIN_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], WITHIN_S)[0], "the server is silent"
        line = self._process.stdout.readline()
        assert line, "the server ended"
        read: dict[str, Any] = json.loads(line)
        return read


class TestService:
    """The methods of gRPC's interoperability tests."""

    __test__ = False

    def __init__(self) -> None:
        self._methods: dict[str, Callable[[Call], Awaitable[None]]] = {
            f"{SERVICE}{name}": serve
            for name, serve in (
                ("EmptyCall", self.empty_call),
                ("UnaryCall", self.unary_call),
                ("StreamingInputCall", self.streaming_input_call),
                ("StreamingOutputCall", self.streaming_output_call),
                ("FullDuplexCall", self.full_duplex_call),
            )
        }

    async def serve(self, call: Call) -> None:
        """Serve a call by its path."""
        serve = self._methods.get(call.path)
        if serve is None:
            raise RpcError(Status.UNIMPLEMENTED, f"there is no method {call.path}")
        initial, trailing = echoed(call.metadata)
        if initial:
            call.begin(initial)
        try:
            await serve(call)
        except RpcError as error:
            raise RpcError(error.status, error.message, trailing) from None
        call.end(Status.OK, "", trailing)

    async def empty_call(self, call: Call) -> None:
        raw, _ = await next_message(call)
        pb.Empty.FromString(bytes(raw or b""))
        await self._answer(call, pb.Empty())

    async def unary_call(self, call: Call) -> None:
        raw, is_compressed = await next_message(call)
        if raw is None:
            raise RpcError(Status.INVALID_ARGUMENT, "there is no request")
        request = pb.SimpleRequest.FromString(bytes(raw))
        require_compression(request, is_compressed)
        require_ok(request)
        await self._answer(call, pb.SimpleResponse(payload=payload(request.response_size)))

    async def streaming_input_call(self, call: Call) -> None:
        size = 0
        while True:
            raw, is_compressed = await next_message(call)
            if raw is None:
                break
            request = pb.StreamingInputCallRequest.FromString(bytes(raw))
            require_compression(request, is_compressed)
            size += len(request.payload.body)
        await self._answer(call, pb.StreamingInputCallResponse(aggregated_payload_size=size))

    async def streaming_output_call(self, call: Call) -> None:
        raw, _ = await next_message(call)
        await self._stream(call, pb.StreamingOutputCallRequest.FromString(bytes(raw or b"")))

    async def full_duplex_call(self, call: Call) -> None:
        while (raw := await call.read()) is not None:
            await self._stream(call, pb.StreamingOutputCallRequest.FromString(bytes(raw)))

    async def _stream(self, call: Call, request: Any) -> None:
        require_ok(request)
        for wanted in request.response_parameters:
            await asyncio.sleep(wanted.interval_us / 1e6)
            answer = pb.StreamingOutputCallResponse(payload=payload(wanted.size))
            await call.write(answer.SerializeToString())

    async def _answer(self, call: Call, answer: Any) -> None:
        """Send a single response; together with its status if that has no metadata."""
        _, trailing = echoed(call.metadata)
        send = call.write if trailing else call.answer
        await send(answer.SerializeToString())


async def next_message(call: Call) -> tuple[bytes | memoryview | None, bool]:
    """The next message, or None at the end; and whether it was compressed."""
    loop = asyncio.get_running_loop()
    while not (call._messages or call.is_over):
        there = loop.create_future()
        call.on_input = lambda there=there: there.done() or there.set_result(None)
        try:
            await there
        finally:
            call.on_input = None
    is_compressed = bool(call._messages) and isinstance(call._messages[0], Compressed)
    return await call.read(), is_compressed


def echoed(metadata: Metadata) -> tuple[Metadata, Metadata]:
    """Metadata to return before the first message, and with the status."""
    named = {
        name: tuple(pair for pair in metadata if pair[0] == name)
        for name in (ECHO_INITIAL, ECHO_TRAILING)
    }
    return named[ECHO_INITIAL], named[ECHO_TRAILING]


def payload(size: int) -> Any:
    if not 0 <= size <= MESSAGE_BYTES:
        raise RpcError(Status.INVALID_ARGUMENT, f"a payload of {size} bytes is wanted")
    return pb.Payload(body=bytes(size))


def require_ok(request: Any) -> None:
    """End the call with the status in its request."""
    wanted = request.response_status
    if wanted.code:
        raise RpcError(Status(wanted.code), wanted.message)


def require_compression(request: Any, is_compressed: bool) -> None:
    if request.HasField("expect_compressed") and request.expect_compressed.value != is_compressed:
        said = "compressed" if is_compressed else "not compressed"
        raise RpcError(Status.INVALID_ARGUMENT, f"the message came {said}")


async def main() -> None:
    limits = ConnectionLimits(Config())
    listener = Listener(
        TestService().serve,
        serve_inline=lambda call: False,
        message_bytes=lambda path: MESSAGE_BYTES,
        calls_max=1000,
        connections_max=1000,
        add_details=lambda path, error: error,
        limits=limits,
    )
    (listening,) = await bind("127.0.0.1:0", is_shared=False)
    host, port = listening.getsockname()
    await listener.listen(listening)
    send({"address": f"{host}:{port}"})
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(commands), sys.stdin
    )
    while await commands.readline():
        calls = sum(len(connection.calls) for connection in listener.connections)
        send({"calls": calls, "bytes": limits.budget.used_bytes, "ended": dict(limits.ended)})
    await listener.stop(0.0)


def send(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
