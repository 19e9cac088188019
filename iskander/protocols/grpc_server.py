"""The gRPC port: where it listens, its methods, and errors as status and trailers.

Every method takes and gives bytes: what they mean is the frontends' business, and the batches are
never copied by a protobuf runtime.

Runs on: gateway loop. Source: gRPC's call kinds; HTTP/2 status mapping of gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from iskander.auth.grants import Authenticator, Grant
from iskander.config.schema import LimitsConfig, ServerConfig
from iskander.errors import (
    ConfigError,
    DeadlineExceeded,
    IskanderError,
    LimitExceeded,
    MalformedInput,
    Overloaded,
    Unauthenticated,
    Unsupported,
)
from iskander.protocols import health, reflection
from iskander.protocols.flight import service as flight
from iskander.protocols.flight.service import FlightService
from iskander.protocols.grpc_errors import rpc_error
from iskander.protocols.health import HealthService
from iskander.protocols.oip import service as oip_service
from iskander.protocols.oip.service import OipService
from iskander.protocols.reflection import ReflectionService
from iskander.transport.addresses import unix_path
from iskander.transport.connection_limits import ConnectionLimits
from iskander.transport.http2.call import Call, Message
from iskander.transport.http2.listener import Listener
from iskander.transport.http2.status import RpcError, Status
from iskander.transport.sockets import BoundPath, bind, with_port
from iskander.transport.tls import HTTP2, Tls

log: Final = logging.getLogger("iskander.grpc")

MESSAGE_SLACK_BYTES: Final = 1 << 20
"""What the transport takes beyond our own limit: up to here an error is of one batch, and a stream
whose client asked for that goes on."""
CALLS_SLACK: Final = 1000
"""Calls of one connection beyond the streams that are served, so that those are refused by name."""
REQUEST_S: Final = 30.0
"""A call whose only message has not come by then ends."""

PROBES: Final = frozenset(
    {f"/{health.SERVICE}/Check", f"/{health.SERVICE}/Watch"}
    | {f"/{oip_service.SERVICE}/{name}" for name in ("ServerLive", "ServerReady")}
)
"""Who asks whether the server is well needs no token."""
PROBE_BYTES: Final = 1024
MODEL_INFER: Final = f"/{oip_service.SERVICE}/ModelInfer"
BATCHES: Final = frozenset(
    {f"/{flight.SERVICE}/{name}" for name in ("DoExchange", "DoPut")}
    | {f"/{oip_service.SERVICE}/{name}" for name in ("ModelInfer", "ModelStreamInfer")}
)
"""Whose messages are as large as a batch; a protobuf runtime reads those of all others."""
ASKED_BYTES: Final = 1 << 16

_NAMED: Final = {
    Status.DEADLINE_EXCEEDED: DeadlineExceeded,
    Status.RESOURCE_EXHAUSTED: LimitExceeded,
    Status.UNIMPLEMENTED: Unsupported,
    Status.INTERNAL: MalformedInput,
    Status.UNAVAILABLE: Overloaded,
}
"""What the transport refuses, by its status."""

Serve = Callable[[Call], Awaitable[None]]


class GrpcServer:
    """The port and the socket files that it owns.

    Args:
        flight_service: Answers the Flight calls.
        health_service: Answers the health calls.
        oip_service: Answers the Open Inference Protocol's calls.
        access: Knows what a caller may ask.
        tls: Of the server.
        limits: Of the server.
        connection_limits: Over the connections of all listeners.
    """

    def __init__(
        self,
        flight_service: FlightService,
        health_service: HealthService,
        oip_service: OipService,
        access: Authenticator,
        tls: Tls,
        *,
        limits: LimitsConfig,
        connection_limits: ConnectionLimits,
    ) -> None:
        streams = limits.streams
        self._paths: list[BoundPath] = []
        self._access = access
        most = limits.message_bytes + MESSAGE_SLACK_BYTES
        self._flight_methods = _flight(flight_service)
        reflection_methods = _reflection(ReflectionService(streams))
        self._reflection_paths = frozenset(reflection_methods)
        self._methods = {
            **self._flight_methods,
            **_health(health_service),
            **_oip(oip_service),
            **reflection_methods,
        }
        self._prompt = {MODEL_INFER: oip_service.infer_at_once}
        self._listener = Listener(
            self._serve,
            at_once=self._at_once,
            message_bytes=partial(_message_bytes, most),
            calls_max=streams + CALLS_SLACK,
            connections_max=limits.connections,
            named=self._named,
            limits=connection_limits,
            tls=tls.context(HTTP2),
        )

    @property
    def unsent(self) -> int:
        """Connections whose clients have not read all of their answers."""
        return self._listener.unsent

    async def start(
        self, config: ServerConfig, addresses: tuple[str, ...], *, is_shared: bool = False
    ) -> list[str]:
        """Listen.

        Args:
            config: Of the server.
            addresses: Where.
            is_shared: Other processes of this gateway listen there too.

        Returns:
            The addresses with the ports that were taken.

        Raises:
            ConfigError: An address is in use, or is none.
        """
        bound = []
        for address in addresses:
            path = unix_path(address)
            try:
                sockets = (
                    await bind(address, is_shared=is_shared)
                    if path is None
                    else [self._bind_path(path, config)]
                )
            except OSError as error:
                raise ConfigError(
                    f"server.address {address}: cannot listen there: {error.strerror}"
                ) from None
            for listening in sockets:
                await self._listener.listen(listening)
            bound.append(address if path is not None else with_port(address, sockets[0]))
        return bound

    def look_at_grants(self) -> None:
        """End the reflection streams whose token is not valid any more."""
        for connection in list(self._listener.connections):
            for call in list(connection.calls.values()):
                if call.path in self._reflection_paths:
                    try:
                        call.grant.require_valid()
                    except Unauthenticated as error:
                        self._refuse(call, error)

    def close_door(self) -> None:
        """Take no more connections; those that are open go on."""
        self._listener.close_door()

    async def stop(self, grace_s: float) -> None:
        """Stop listening, and end what is still open after `grace_s`."""
        await self._listener.stop(grace_s)
        for path in self._paths:
            path.release()

    def _bind_path(self, path: Path, config: ServerConfig) -> socket.socket:
        bound = BoundPath(path, config)
        self._paths.append(bound)
        return bound.socket

    def _at_once(self, call: Call) -> bool:
        """Answer a call without a task of its own, where its method may and its message is there.

        Returns:
            Whether that is done, or begun.
        """
        answer, message = self._prompt.get(call.path), call.whole
        if answer is None or message is None:
            return False
        try:
            call.grant = self._access.grant(call.metadata, is_probe=False)
            return answer(message, call, self._refuse)
        except Exception as error:
            self._refuse(call, error)
            return True

    async def _serve(self, call: Call) -> None:
        try:
            serve = self._methods.get(call.path)
            if serve is None:
                raise Unsupported(f"there is no method `{call.path[:200]}`")
            call.grant = self._access.grant(call.metadata, is_probe=call.path in PROBES)
            await serve(call)
        except Exception as error:
            raise self._why(call.path, error) from None

    def _refuse(self, call: Call, error: Exception) -> None:
        """End a call with an error."""
        why = self._why(call.path, error)
        call.end(why.status, why.message, why.trailers)

    def _why(self, path: str, error: Exception) -> RpcError:
        """How a call of that path ends with an error."""
        if isinstance(error, RpcError):
            return self._named(path, error)
        if not isinstance(error, IskanderError):
            # The call ends here and the server goes on; the text stays in the log.
            log.error("a call failed", exc_info=error)
            error = IskanderError("the server failed; its log says why")
        elif error.fault == "server":
            log.warning("a call ended with %s: %s", error.code, error.message)
        return self._ended(path, error)

    def _ended(self, path: str, error: IskanderError) -> RpcError:
        return rpc_error(error, is_flight=path in self._flight_methods)

    def _named(self, path: str, error: RpcError) -> RpcError:
        """What the transport refused, with its details; what has them already stays as it is."""
        known = _NAMED.get(error.status)
        return error if known is None else self._ended(path, known(error.message))


def _message_bytes(most: int, path: str) -> int:
    """The largest message of a method."""
    if path in BATCHES:
        return most
    return PROBE_BYTES if path in PROBES else ASKED_BYTES


def _flight(service: FlightService) -> dict[str, Serve]:
    methods = {
        "Handshake": service.handshake,
        "ListFlights": _with_request(service.list_flights),
        "GetFlightInfo": _unary(service.get_flight_info),
        "PollFlightInfo": _unary(service.poll_flight_info),
        "GetSchema": _unary(service.get_schema),
        "DoGet": _with_request(service.do_get),
        "DoPut": service.do_put,
        "DoExchange": service.do_exchange,
        "DoAction": _with_request(service.do_action),
        "ListActions": _with_request(service.list_actions),
    }
    return {f"/{flight.SERVICE}/{name}": serve for name, serve in methods.items()}


def _health(service: HealthService) -> dict[str, Serve]:
    methods = {"Check": _unary(service.check), "Watch": _with_request(service.watch)}
    return {f"/{health.SERVICE}/{name}": serve for name, serve in methods.items()}


def _oip(service: OipService) -> dict[str, Serve]:
    methods: dict[str, Serve] = {name: _unary(answer) for name, answer in service.unary().items()}
    methods["ModelInfer"] = _with_message(service.infer)
    methods["ModelStreamInfer"] = service.stream_infer
    return {f"/{oip_service.SERVICE}/{name}": serve for name, serve in methods.items()}


def _reflection(service: ReflectionService) -> dict[str, Serve]:
    return {
        f"/{name}/ServerReflectionInfo": partial(service.info, module=module)
        for name, module in reflection.SERVICES.items()
    }


def _with_message(handler: Callable[[Message, Call], Awaitable[Any]]) -> Serve:
    """A method that takes one message as it came, and writes what it answers."""

    async def serve(call: Call) -> None:
        request = call.receive() if call.has_input else await _first(call)
        if request is None:
            raise MalformedInput("the call ended before its message")
        await handler(request, call)

    return serve


async def _first(call: Call) -> Message | None:
    try:
        async with asyncio.timeout(REQUEST_S):
            return await call.read()
    except TimeoutError:
        raise DeadlineExceeded(f"the call's message did not come in {REQUEST_S:g} s") from None


def _with_request(handler: Callable[[bytes, Call], Awaitable[Any]]) -> Serve:
    """The same, of messages that a protobuf runtime reads."""
    return _with_message(lambda message, call: handler(bytes(message), call))


def _unary(handler: Callable[[bytes, Grant], Awaitable[bytes]]) -> Serve:
    """A method that takes one message and gives one."""

    async def answer(request: bytes, call: Call) -> None:
        await call.answer(await handler(request, call.grant))

    return _with_request(answer)
