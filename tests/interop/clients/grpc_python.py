"""gRPC's interoperability test cases with grpcio: the synchronous client and the asyncio one.

Arguments: the server's address, and `sync` or `aio`. Reads the name of a case from each line, and
prints `ok` or the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from support.generated import interop_pb2 as pb

SERVICE = "/grpc.testing.TestService/"
ECHO_INITIAL, INITIAL = "x-grpc-test-echo-initial", "test_initial_metadata_value"
ECHO_TRAILING, TRAILING = "x-grpc-test-echo-trailing-bin", b"\xab\xab\xab"
MESSAGE = "test status message"
SPECIAL = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n"
SENT = (27182, 8, 1828, 45904)
RECEIVED = (31415, 9, 2653, 58979)
LARGE_SENT, LARGE_RECEIVED = 271_828, 314_159
DEADLINE_S = 10.0
CONCURRENT_CALLS, SOAK_CALLS, SOAK_CHANNELS, SOAK_S = 1000, 100, 20, 60.0
GZIP = grpc.Compression.Gzip


def payload(size: int) -> Any:
    return pb.Payload(body=bytes(size))


def large(**fields: Any) -> Any:
    return pb.SimpleRequest(response_size=LARGE_RECEIVED, payload=payload(LARGE_SENT), **fields)


def streamed(sent: int, *received: int, **fields: Any) -> Any:
    parameters = [pb.ResponseParameters(size=size) for size in received]
    return pb.StreamingOutputCallRequest(
        response_parameters=parameters, payload=payload(sent), **fields
    )


def equal(actual: Any, expected: Any, what: str) -> None:
    if actual != expected:
        raise AssertionError(f"{what}: {actual!r:.200}, expected {expected!r:.200}")


def equal_body(message: Any, size: int) -> None:
    equal(message.payload.body == bytes(size), True, f"a payload of {size} zeros")


class Stubs:
    """The methods, over a synchronous or an asyncio channel."""

    def __init__(self, channel: Any) -> None:
        def stub(kind: str, path: str, request: Any, response: Any) -> Any:
            return getattr(channel, kind)(
                path,
                request_serializer=request.SerializeToString,
                response_deserializer=response.FromString,
            )

        output = pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse
        self.empty = stub("unary_unary", f"{SERVICE}EmptyCall", pb.Empty, pb.Empty)
        self.unary = stub("unary_unary", f"{SERVICE}UnaryCall", pb.SimpleRequest, pb.SimpleResponse)
        self.input = stub(
            "stream_unary",
            f"{SERVICE}StreamingInputCall",
            pb.StreamingInputCallRequest,
            pb.StreamingInputCallResponse,
        )
        self.output = stub("unary_stream", f"{SERVICE}StreamingOutputCall", *output)
        self.duplex = stub("stream_stream", f"{SERVICE}FullDuplexCall", *output)
        self.no_method = stub("unary_unary", f"{SERVICE}UnimplementedCall", pb.Empty, pb.Empty)
        self.no_service = stub(
            "unary_unary",
            "/grpc.testing.UnimplementedService/UnimplementedCall",
            pb.Empty,
            pb.Empty,
        )


def inputs(*sizes: int, **fields: Any) -> list[Any]:
    return [pb.StreamingInputCallRequest(payload=payload(size), **fields) for size in sizes]


def expect_compressed(value: bool) -> dict[str, Any]:
    return {"expect_compressed": pb.BoolValue(value=value)}


def metadata_of(pairs: Any) -> dict[str, Any]:
    return {key: value for key, value in pairs or ()}


class Sync:
    """The cases with the synchronous client."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.stubs = Stubs(channel)

    def empty_unary(self) -> None:
        equal(self.stubs.empty(pb.Empty(), timeout=DEADLINE_S), pb.Empty(), "the response")

    def large_unary(self) -> None:
        equal_body(self.stubs.unary(large(), timeout=DEADLINE_S), LARGE_RECEIVED)

    def client_streaming(self) -> None:
        response = self.stubs.input(iter(inputs(*SENT)), timeout=DEADLINE_S)
        equal(response.aggregated_payload_size, sum(SENT), "the sum of sizes")

    def server_streaming(self) -> None:
        received = list(self.stubs.output(streamed(0, *RECEIVED), timeout=DEADLINE_S))
        equal(len(received), len(RECEIVED), "responses")
        for message, size in zip(received, RECEIVED, strict=True):
            equal_body(message, size)

    def ping_pong(self) -> None:
        requests: queue.Queue[Any] = queue.Queue()
        call = self.stubs.duplex(iter(requests.get, None), timeout=DEADLINE_S)
        for sent, received in zip(SENT, RECEIVED, strict=True):
            requests.put(streamed(sent, received))
            equal_body(next(call), received)
        requests.put(None)
        equal(list(call), [], "responses at the end")
        equal(call.code(), grpc.StatusCode.OK, "the status")

    def empty_stream(self) -> None:
        call = self.stubs.duplex(iter(()), timeout=DEADLINE_S)
        equal(list(call), [], "responses")
        equal(call.code(), grpc.StatusCode.OK, "the status")

    def cancel_after_begin(self) -> None:
        requests: queue.Queue[Any] = queue.Queue()
        call = self.stubs.input.future(iter(requests.get, None), timeout=DEADLINE_S)
        call.cancel()
        requests.put(None)
        equal(call.code(), grpc.StatusCode.CANCELLED, "the status")

    def cancel_after_first_response(self) -> None:
        requests: queue.Queue[Any] = queue.Queue()
        requests.put(streamed(SENT[0], RECEIVED[0]))
        call = self.stubs.duplex(iter(requests.get, None), timeout=DEADLINE_S)
        equal_body(next(call), RECEIVED[0])
        call.cancel()
        requests.put(None)
        equal(final_status(call), (grpc.StatusCode.CANCELLED, 0), "the status")

    def timeout_on_sleeping_server(self) -> None:
        requests: queue.Queue[Any] = queue.Queue()
        requests.put(streamed(SENT[0]))
        call = self.stubs.duplex(iter(requests.get, None), timeout=0.001)
        equal(final_status(call), (grpc.StatusCode.DEADLINE_EXCEEDED, 0), "the status")
        requests.put(None)

    def custom_metadata(self) -> None:
        options = {
            "metadata": [(ECHO_INITIAL, INITIAL), (ECHO_TRAILING, TRAILING)],
            "timeout": DEADLINE_S,
        }
        response, unary = self.stubs.unary.with_call(large(), **options)
        equal_body(response, LARGE_RECEIVED)
        duplex = self.stubs.duplex(iter([streamed(LARGE_SENT, LARGE_RECEIVED)]), **options)
        equal_body(next(duplex), LARGE_RECEIVED)
        equal(list(duplex), [], "responses at the end")
        for call in (unary, duplex):
            equal(metadata_of(call.initial_metadata()).get(ECHO_INITIAL), INITIAL, "initial")
            equal(metadata_of(call.trailing_metadata()).get(ECHO_TRAILING), TRAILING, "trailing")

    def status_code_and_message(self) -> None:
        status = pb.EchoStatus(code=2, message=MESSAGE)
        self._unary_status(MESSAGE)
        call = self.stubs.duplex(iter([streamed(0, response_status=status)]), timeout=DEADLINE_S)
        equal(final_status(call), (grpc.StatusCode.UNKNOWN, 0), "the status")
        equal(call.details(), MESSAGE, "the message")

    def special_status_message(self) -> None:
        self._unary_status(SPECIAL)

    def unimplemented_method(self) -> None:
        self._fails(self.stubs.no_method, pb.Empty(), grpc.StatusCode.UNIMPLEMENTED)

    def unimplemented_service(self) -> None:
        self._fails(self.stubs.no_service, pb.Empty(), grpc.StatusCode.UNIMPLEMENTED)

    def concurrent_large_unary(self) -> None:
        calls = [self.stubs.unary.future(large(), timeout=SOAK_S) for _ in range(CONCURRENT_CALLS)]
        for call in calls:
            equal_body(call.result(), LARGE_RECEIVED)

    def rpc_soak(self) -> None:
        for _ in range(SOAK_CALLS):
            self.large_unary()

    def channel_soak(self) -> None:
        for _ in range(SOAK_CHANNELS):
            # Else all channels of a process share their connection.
            options = [("grpc.use_local_subchannel_pool", 1)]
            with grpc.insecure_channel(sys.argv[1], options) as channel:
                Sync(channel).large_unary()

    def client_compressed_unary(self) -> None:
        self._fails(
            self.stubs.unary, large(**expect_compressed(True)), grpc.StatusCode.INVALID_ARGUMENT
        )
        for is_compressed in (True, False):
            response = self.stubs.unary(
                large(**expect_compressed(is_compressed)),
                timeout=DEADLINE_S,
                compression=GZIP if is_compressed else None,
            )
            equal_body(response, LARGE_RECEIVED)

    def client_compressed_streaming(self) -> None:
        """Two streams: the client cannot compress only some messages of a stream."""
        probe = iter(inputs(27182, **expect_compressed(True)))
        self._fails(self.stubs.input, probe, grpc.StatusCode.INVALID_ARGUMENT)
        for is_compressed in (True, False):
            response = self.stubs.input(
                iter(inputs(27182, 45904, **expect_compressed(is_compressed))),
                timeout=DEADLINE_S,
                compression=GZIP if is_compressed else None,
            )
            equal(response.aggregated_payload_size, 73086, "the sum of sizes")

    def server_compressed_unary(self) -> None:
        for is_compressed in (True, False):
            request = large(response_compressed=pb.BoolValue(value=is_compressed))
            equal_body(self.stubs.unary(request, timeout=DEADLINE_S), LARGE_RECEIVED)

    def server_compressed_streaming(self) -> None:
        sizes = (31415, 92653)
        parameters = [
            pb.ResponseParameters(size=size, compressed=pb.BoolValue(value=size == sizes[0]))
            for size in sizes
        ]
        request = pb.StreamingOutputCallRequest(response_parameters=parameters)
        received = list(self.stubs.output(request, timeout=DEADLINE_S))
        for message, size in zip(received, sizes, strict=True):
            equal_body(message, size)

    def _unary_status(self, message: str) -> None:
        status = pb.EchoStatus(code=2, message=message)
        request = pb.SimpleRequest(response_status=status)
        details = self._fails(self.stubs.unary, request, grpc.StatusCode.UNKNOWN)
        equal(details, message, "the message")

    def _fails(self, stub: Any, request: Any, code: grpc.StatusCode) -> Any:
        try:
            stub(request, timeout=DEADLINE_S)
        except grpc.RpcError as error:
            equal(error.code(), code, "the status")
            return error.details()
        raise AssertionError(f"the call ended with OK, expected {code}")


def final_status(call: Iterator[Any]) -> tuple[grpc.StatusCode, int]:
    """The status of a call, and the number of responses before it."""
    received = 0
    try:
        for _ in call:
            received += 1
    except grpc.RpcError as error:
        return error.code(), received
    return grpc.StatusCode.OK, received


class Aio:
    """The cases with the asyncio client, except those that use the same code."""

    def __init__(self, channel: aio.Channel) -> None:
        self.stubs = Stubs(channel)

    async def empty_unary(self) -> None:
        equal(await self.stubs.empty(pb.Empty(), timeout=DEADLINE_S), pb.Empty(), "the response")

    async def large_unary(self) -> None:
        equal_body(await self.stubs.unary(large(), timeout=DEADLINE_S), LARGE_RECEIVED)

    async def client_streaming(self) -> None:
        call = self.stubs.input(timeout=DEADLINE_S)
        for request in inputs(*SENT):
            await call.write(request)
        await call.done_writing()
        equal((await call).aggregated_payload_size, sum(SENT), "the sum of sizes")

    async def server_streaming(self) -> None:
        call = self.stubs.output(streamed(0, *RECEIVED), timeout=DEADLINE_S)
        sizes = [len(message.payload.body) async for message in call]
        equal(sizes, list(RECEIVED), "sizes of responses")

    async def ping_pong(self) -> None:
        call = self.stubs.duplex(timeout=DEADLINE_S)
        for sent, received in zip(SENT, RECEIVED, strict=True):
            await call.write(streamed(sent, received))
            equal_body(await call.read(), received)
        await call.done_writing()
        equal(await call.read(), aio.EOF, "the end")
        equal(await call.code(), grpc.StatusCode.OK, "the status")

    async def empty_stream(self) -> None:
        call = self.stubs.duplex(timeout=DEADLINE_S)
        await call.done_writing()
        equal(await call.read(), aio.EOF, "the end")
        equal(await call.code(), grpc.StatusCode.OK, "the status")

    async def cancel_after_begin(self) -> None:
        call = self.stubs.input(timeout=DEADLINE_S)
        call.cancel()
        equal(await call.code(), grpc.StatusCode.CANCELLED, "the status")

    async def cancel_after_first_response(self) -> None:
        call = self.stubs.duplex(timeout=DEADLINE_S)
        await call.write(streamed(SENT[0], RECEIVED[0]))
        equal_body(await call.read(), RECEIVED[0])
        call.cancel()
        equal(await call.code(), grpc.StatusCode.CANCELLED, "the status")

    async def timeout_on_sleeping_server(self) -> None:
        code = grpc.StatusCode.INTERNAL
        for _ in range(20):
            call = self.stubs.duplex(timeout=0.001)
            with contextlib.suppress(grpc.RpcError):
                await call.write(streamed(SENT[0]))
            # grpc.aio itself sets INTERNAL if a write fails before the status arrives.
            if (code := await call.code()) is not grpc.StatusCode.INTERNAL:
                break
        equal(code, grpc.StatusCode.DEADLINE_EXCEEDED, "the status")

    async def custom_metadata(self) -> None:
        metadata = aio.Metadata((ECHO_INITIAL, INITIAL), (ECHO_TRAILING, TRAILING))
        unary = self.stubs.unary(large(), metadata=metadata, timeout=DEADLINE_S)
        equal_body(await unary, LARGE_RECEIVED)
        duplex = self.stubs.duplex(metadata=metadata, timeout=DEADLINE_S)
        await duplex.write(streamed(LARGE_SENT, LARGE_RECEIVED))
        await duplex.done_writing()
        equal_body(await duplex.read(), LARGE_RECEIVED)
        for call in (unary, duplex):
            equal(metadata_of(await call.initial_metadata()).get(ECHO_INITIAL), INITIAL, "initial")
            trailing = metadata_of(await call.trailing_metadata())
            equal(trailing.get(ECHO_TRAILING), TRAILING, "trailing")

    async def status_code_and_message(self) -> None:
        status = pb.EchoStatus(code=2, message=MESSAGE)
        await self._unary_status(MESSAGE)
        call = self.stubs.duplex(timeout=DEADLINE_S)
        await call.write(streamed(0, response_status=status))
        await call.done_writing()
        equal(await call.code(), grpc.StatusCode.UNKNOWN, "the status")
        equal(await call.details(), MESSAGE, "the message")

    async def special_status_message(self) -> None:
        await self._unary_status(SPECIAL)

    async def unimplemented_method(self) -> None:
        call = self.stubs.no_method(pb.Empty(), timeout=DEADLINE_S)
        equal(await call.code(), grpc.StatusCode.UNIMPLEMENTED, "the status")

    async def unimplemented_service(self) -> None:
        call = self.stubs.no_service(pb.Empty(), timeout=DEADLINE_S)
        equal(await call.code(), grpc.StatusCode.UNIMPLEMENTED, "the status")

    async def _unary_status(self, message: str) -> None:
        status = pb.EchoStatus(code=2, message=message)
        call = self.stubs.unary(pb.SimpleRequest(response_status=status), timeout=DEADLINE_S)
        equal(await call.code(), grpc.StatusCode.UNKNOWN, "the status")
        equal(await call.details(), message, "the message")


def run_cases(run: Callable[[str], None]) -> None:
    for case in sys.stdin:
        try:
            run(case.strip())
        except Exception as error:
            line = f"{type(error).__name__}: {error}".replace("\n", " ")
        else:
            line = "ok"
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def main() -> None:
    address, kind = sys.argv[1:]
    if kind == "sync":
        with grpc.insecure_channel(address) as channel:
            cases = Sync(channel)
            run_cases(lambda case: getattr(cases, case)())
    else:
        with asyncio.Runner() as runner:

            async def open_channel() -> aio.Channel:
                return aio.insecure_channel(address)

            channel = runner.run(open_channel())
            aio_cases = Aio(channel)
            run_cases(lambda case: runner.run(getattr(aio_cases, case)()))
            runner.run(channel.close())
    # In a regular exit, grpcio can wait for a lock of an ended thread.
    os._exit(0)


if __name__ == "__main__":
    main()
