"""gRPC server reflection, v1 and v1alpha.

Runs on: gateway loop. Source: gRPC server reflection protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from iskander._generated import (
    POOL,
    flight_pb2,
    health_pb2,
    oip_pb2,
    reflection_v1_pb2,
    reflection_v1alpha_pb2,
)
from iskander.errors import MalformedInput, Overloaded
from iskander.foundation.clock import now_ns
from iskander.gateway.auth.shares import Shares
from iskander.gateway.protocols.submit import RETRY_MS, given_way_error
from iskander.gateway.transport.http2.call import Call, Message
from iskander.gateway.transport.http2.status import Status

SERVICES = {
    "grpc.reflection.v1.ServerReflection": reflection_v1_pb2,
    "grpc.reflection.v1alpha.ServerReflection": reflection_v1alpha_pb2,
}
"""The two versions differ only in names."""
DESCRIBED = (flight_pb2, health_pb2, oip_pb2, reflection_v1_pb2, reflection_v1alpha_pb2)
IDLE_S = 60.0
"""Idle timeout of a stream."""


@dataclass(eq=False)
class _Stream:
    """A stream: the scope that ends it, and the time of its last answer or its start."""

    scope: asyncio.Timeout
    progress_ns: int


def _idle_since(stream: _Stream) -> int:
    return stream.progress_ns


def _give_way(stream: _Stream) -> None:
    stream.scope.reschedule(asyncio.get_running_loop().time())


class ReflectionService:
    """Methods of the ServerReflection service."""

    def __init__(self, streams_max: int) -> None:
        self.streams_max = streams_max
        self._streams: Shares[_Stream] = Shares(_idle_since, _give_way)

    async def info(self, call: Call, module: Any) -> None:  # noqa: ANN401
        """Answer the requests of a stream in order; `module` has the messages of a version."""
        if not self._streams.make_room(call.caller, self.streams_max, now_ns()):
            raise Overloaded(
                f"too many reflection streams: {len(self._streams)} open, "
                f"limit {self.streams_max} (`limits.streams`)",
                retry_after_ms=RETRY_MS,
            )
        stream = _Stream(asyncio.timeout(None), now_ns())
        self._streams.add(call.caller, stream)
        try:
            async with stream.scope:
                await self._answer_all(call, module, stream)
        except TimeoutError:
            raise given_way_error("reflection stream") from None
        finally:
            self._streams.remove(stream)

    async def _answer_all(self, call: Call, module: Any, stream: _Stream) -> None:  # noqa: ANN401
        while (raw := await _read_until_idle(call)) is not None:
            try:
                request = module.ServerReflectionRequest.FromString(bytes(raw))
            except (DecodeError, UnicodeDecodeError):
                raise MalformedInput("the message is not a ServerReflectionRequest") from None
            await call.write(answer(request, module).SerializeToString())
            stream.progress_ns = now_ns()


def answer(request: Any, module: Any) -> Any:  # noqa: ANN401
    """Return the response to one request."""
    response = module.ServerReflectionResponse(valid_host=request.host, original_request=request)
    kind = request.WhichOneof("message_request")
    if kind == "list_services":
        for each in DESCRIBED:
            for service in each.DESCRIPTOR.services_by_name.values():
                response.list_services_response.service.add(name=service.full_name)
        return response
    file = None
    if kind == "file_by_filename":
        file = _find_first(POOL.FindFileByName, request.file_by_filename)
    elif kind == "file_containing_symbol":
        symbol = request.file_containing_symbol  # A field or method is found by its parent.
        file = _find_first(POOL.FindFileContainingSymbol, symbol, symbol.rpartition(".")[0])
    if file is None:
        # Extension requests too: no message has extensions.
        response.error_response.error_code = Status.NOT_FOUND
        response.error_response.error_message = "not found on this server"
    else:
        response.file_descriptor_response.file_descriptor_proto.append(file.serialized_pb)
    return response


def _find_first(find: Callable[[str], Any], *names: str) -> Any:  # noqa: ANN401
    for name in names:
        try:
            return find(name)
        except KeyError:
            continue
    return None


async def _read_until_idle(call: Call) -> Message | None:
    try:
        async with asyncio.timeout(IDLE_S):
            return await call.read()
    except TimeoutError:
        return None
