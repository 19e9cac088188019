"""gRPC server reflection, v1 and v1alpha.

Runs on: gateway loop. Source: gRPC server reflection protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
from iskander.transport.http2.call import Call, Message
from iskander.transport.http2.status import Status

SERVICES = {
    "grpc.reflection.v1.ServerReflection": reflection_v1_pb2,
    "grpc.reflection.v1alpha.ServerReflection": reflection_v1alpha_pb2,
}
"""The two versions differ only in names."""
DESCRIBED = (flight_pb2, health_pb2, oip_pb2, reflection_v1_pb2, reflection_v1alpha_pb2)
IDLE_S = 60.0
"""Idle timeout of a stream."""


class ReflectionService:
    """Methods of the ServerReflection service."""

    def __init__(self, streams_max: int) -> None:
        self.streams_max = streams_max
        self._streams = 0

    async def info(self, call: Call, module: Any) -> None:  # noqa: ANN401
        """Answer the requests of a stream in order; `module` has the messages of a version."""
        if self._streams >= self.streams_max:
            raise Overloaded(
                f"too many reflection streams: {self._streams} open, "
                f"limit {self.streams_max} (`limits.streams`)"
            )
        self._streams += 1
        try:
            while (raw := await _read_until_idle(call)) is not None:
                try:
                    request = module.ServerReflectionRequest.FromString(bytes(raw))
                except (DecodeError, UnicodeDecodeError):
                    raise MalformedInput("the message is not a ServerReflectionRequest") from None
                await call.write(answer(request, module).SerializeToString())
        finally:
            self._streams -= 1


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
