"""gRPC server reflection, v1 and v1alpha: which services this port has, and what they take.

Runs on: gateway loop. Source: gRPC server reflection protocol.
"""

from __future__ import annotations

import asyncio
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
"""The two versions differ by their names alone."""
DESCRIBED = (flight_pb2, health_pb2, oip_pb2, reflection_v1_pb2, reflection_v1alpha_pb2)
IDLE_S = 60.0
"""A stream that asks nothing for so long ends."""


class ReflectionService:
    """The calls of ServerReflection.

    Args:
        streams_max: Open at once.
    """

    def __init__(self, streams_max: int) -> None:
        self._streams_max = streams_max
        self._streams = 0

    async def info(self, call: Call, module: Any) -> None:  # noqa: ANN401
        """Answer questions in order, until there are no more.

        Args:
            call: Of a client.
            module: Of the version that it speaks.
        """
        if self._streams >= self._streams_max:
            raise Overloaded(f"{self._streams_max} streams are open, the limit")
        self._streams += 1
        try:
            while (raw := await _next(call)) is not None:
                try:
                    request = module.ServerReflectionRequest.FromString(bytes(raw))
                except (DecodeError, UnicodeDecodeError):
                    raise MalformedInput("the message is not a ServerReflectionRequest") from None
                await call.write(answer(request, module).SerializeToString())
        finally:
            self._streams -= 1


def answer(request: Any, module: Any) -> Any:  # noqa: ANN401
    """The response to one question."""
    response = module.ServerReflectionResponse(valid_host=request.host, original_request=request)
    wanted = request.WhichOneof("message_request")
    if wanted == "list_services":
        for each in DESCRIBED:
            for service in each.DESCRIPTOR.services_by_name.values():
                response.list_services_response.service.add(name=service.full_name)
        return response
    file = None
    if wanted == "file_by_filename":
        file = _file_named(request.file_by_filename)
    elif wanted == "file_containing_symbol":
        file = _file_with(request.file_containing_symbol)
    if file is None:
        # No message here has extensions, so that whoever asks for one is told the same.
        response.error_response.error_code = Status.NOT_FOUND
        response.error_response.error_message = "there is no such thing on this server"
    else:
        response.file_descriptor_response.file_descriptor_proto.append(file.serialized_pb)
    return response


def _file_named(name: str) -> Any:  # noqa: ANN401
    try:
        return POOL.FindFileByName(name)
    except KeyError:
        return None


def _file_with(symbol: str) -> Any:  # noqa: ANN401
    """The file of a message, enum, field, service or method."""
    for name in (symbol, symbol.rpartition(".")[0]):
        try:
            return POOL.FindFileContainingSymbol(name)
        except KeyError:
            continue
    return None


async def _next(call: Call) -> Message | None:
    try:
        async with asyncio.timeout(IDLE_S):
            return await call.read()
    except TimeoutError:
        return None
