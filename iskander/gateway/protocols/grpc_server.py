"""gRPC server: listeners, method table, and conversion of errors to status and trailers.

Methods receive and send bytes, so that no protobuf runtime copies a batch.

Runs on: gateway loop. Source: gRPC's call kinds; HTTP/2 status mapping of gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from iskander.config.schema import LimitsConfig, ServerConfig
from iskander.errors import (
    INTERNAL,
    ConfigError,
    DeadlineExceeded,
    IskanderError,
    LimitExceeded,
    MalformedInput,
    Overloaded,
    RemoteLoop,
    Unauthenticated,
    Unsupported,
)
from iskander.foundation.logs import requests as log
from iskander.gateway.auth.grants import Authenticator, Grant
from iskander.gateway.auth.passwords import PasswordUnverified
from iskander.gateway.protocols import health, reflection
from iskander.gateway.protocols.flight import service as flight
from iskander.gateway.protocols.flight.service import FlightService
from iskander.gateway.protocols.grpc_errors import rpc_error
from iskander.gateway.protocols.health import HealthService
from iskander.gateway.protocols.oip import service as oip_service
from iskander.gateway.protocols.oip.service import OipService
from iskander.gateway.protocols.oip.unary import Reject
from iskander.gateway.protocols.reflection import ReflectionService
from iskander.gateway.transport.addresses import unix_path
from iskander.gateway.transport.http2.call import Call, Message
from iskander.gateway.transport.http2.listener import Listener
from iskander.gateway.transport.http2.status import RpcError, Status
from iskander.gateway.transport.limits.connection_limits import ConnectionLimits
from iskander.gateway.transport.sockets import BoundPath, bind, with_port
from iskander.gateway.transport.tls import HTTP2, Tls
from iskander.interprocess.control.identity import ORIGIN

MESSAGE_SLACK_BYTES: Final = 1 << 20
"""Bytes that the transport accepts above `limits.message_bytes`.

A larger message ends its call; one up to this size fails only its batch.
"""
CALLS_SLACK: Final = 1000
"""Calls of one connection above `limits.streams`; they are rejected with a named error."""
REQUEST_S: Final = 30.0
"""Timeout for the request of a call with a single request."""

PROBES: Final = frozenset(
    {f"/{health.SERVICE}/Check", f"/{health.SERVICE}/Watch"}
    | {f"/{oip_service.SERVICE}/{name}" for name in ("ServerLive", "ServerReady")}
)
"""Health probes, which need no token."""
PROBE_BYTES: Final = 1024
MODEL_INFER: Final = f"/{oip_service.SERVICE}/ModelInfer"
BATCH_METHODS: Final = frozenset(
    {f"/{flight.SERVICE}/{name}" for name in ("DoExchange", "DoPut")}
    | {f"/{oip_service.SERVICE}/{name}" for name in ("ModelInfer", "ModelStreamInfer")}
)
"""Methods with messages as large as a batch; protobuf parses the messages of all others."""
OTHER_BYTES: Final = 1 << 16

_ERRORS: Final = {
    Status.DEADLINE_EXCEEDED: DeadlineExceeded,
    Status.RESOURCE_EXHAUSTED: LimitExceeded,
    Status.UNIMPLEMENTED: Unsupported,
    Status.INTERNAL: MalformedInput,
    Status.UNAVAILABLE: Overloaded,
}
"""Error class for each status that the transport raises."""

Serve = Callable[[Call], Awaitable[None]]


class GrpcServer:
    """The gRPC listeners and their unix socket files."""

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
        own_id: str = "",
    ) -> None:
        self._own_id = own_id
        self._paths: list[BoundPath] = []
        self._access = access
        self._flight = flight_service
        self._flight_methods = _flight(flight_service)
        check, watch = _unary(health_service.check), _with_request(health_service.watch)
        health_methods = _by_path(health.SERVICE, {"Check": check, "Watch": watch})
        self._health = health_service
        self._reflection = ReflectionService(limits.streams)
        reflect = self._reflection.info
        reflection_methods: dict[str, Serve] = {
            f"/{name}/ServerReflectionInfo": partial(reflect, module=module)
            for name, module in reflection.SERVICES.items()
        }
        self._reflection_paths = frozenset(reflection_methods)
        methods_by_protocol = {
            "flight": self._flight_methods,
            "oip": _oip(oip_service, self._reject),
            "health": health_methods,
            "reflection": reflection_methods,
        }
        self._methods: dict[str, Serve] = {}
        for methods in methods_by_protocol.values():
            self._methods |= methods
        self._inline_methods = {MODEL_INFER: oip_service.infer_inline}
        self._listener = Listener(
            self._serve,
            serve_inline=self._serve_inline,
            message_bytes=_message_limit(limits),
            calls_max=limits.streams + CALLS_SLACK,
            connections_max=limits.connections,
            add_details=self._rpc_error,
            limits=connection_limits,
            tls=tls.context(HTTP2),
        )
        self._listener.protocols = {
            path: name for name, methods in methods_by_protocol.items() for path in methods
        }

    def configure(self, limits: LimitsConfig) -> None:
        """Apply the limits: of messages to new calls, of calls to new connections."""
        self._health.watchers_max = self._reflection.streams_max = limits.streams
        self._listener.calls_max = limits.streams + CALLS_SLACK
        self._listener.connections_max = limits.connections
        self._listener.message_bytes = _message_limit(limits)

    def set_load_trailer(self, encoded: bytes) -> None:
        """Set the header field that the trailers of all calls end with from now on."""
        self._listener.load_trailer = encoded

    @property
    def unsent(self) -> int:
        """Number of connections with unread responses."""
        return self._listener.unsent

    async def start(
        self, config: ServerConfig, addresses: tuple[str, ...], *, is_shared: bool = False
    ) -> list[str]:
        """Listen; return the addresses with the allocated ports, or raise `ConfigError`."""
        bound = []
        for address in addresses:
            path = unix_path(address)
            try:
                if path is None:
                    sockets = await bind(address, is_shared=is_shared)
                else:
                    self._paths.append(BoundPath(path, config))
                    sockets = [self._paths[-1].socket]
            except OSError as error:
                message = f"server.address {address}: cannot listen there: {error.strerror}"
                raise ConfigError(message) from None
            for listening in sockets:
                await self._listener.listen(listening)
            bound.append(address if path is not None else with_port(address, sockets[0]))
        return bound

    def check_grants(self) -> None:
        """End the reflection streams whose token is no longer valid."""
        for connection in list(self._listener.connections):
            for call in list(connection.calls.values()):
                if call.path in self._reflection_paths:
                    try:
                        call.grant.require_valid()
                    except Unauthenticated as error:
                        self._reject(call, error)

    def stop_accepting(self) -> None:
        """Stop accepting connections of ports; open ones, and unix sockets, continue.

        Reader processes of open reads connect to a unix socket.
        """
        self._listener.stop_accepting(keeps_unix=True)

    async def stop(self, grace_s: float) -> None:
        """Stop listening; after `grace_s` close the open connections."""
        await self._listener.stop(grace_s)
        for path in self._paths:
            path.release()

    def _serve_inline(self, call: Call) -> bool:
        """Serve a complete unary call without a task; False if the call needs one."""
        serve, message = self._inline_methods.get(call.path), call.whole
        if serve is None or message is None:
            return False
        try:
            call.grant = self._access.find(call.metadata, origin=call.origin)
            return serve(message, call, self._reject)
        except PasswordUnverified:
            return False
        except Exception as error:
            self._reject(call, error)
            return True

    async def _serve(self, call: Call) -> None:
        try:
            serve = self._methods.get(call.path)
            if serve is None:
                raise Unsupported(f"unknown method `{call.path[:200]}`")
            if (ORIGIN, self._own_id) in call.metadata:
                raise RemoteLoop("the remote server of this model is this server itself")
            reader_grant = self._flight.reader_grant(call)
            call.grant = reader_grant or await self._access.authenticate(
                call.metadata, is_probe=call.path in PROBES, origin=call.origin
            )
            await serve(call)
        except Exception as error:
            raise self._rpc_error(call.path, error) from None

    def _reject(self, call: Call, error: Exception) -> None:
        ended = self._rpc_error(call.path, error)
        call.end(ended.status, ended.message, ended.trailers)

    def _rpc_error(self, path: str, error: Exception) -> RpcError:
        """Convert an exception to the error of a call with this path; log faults of the server."""
        if isinstance(error, RpcError):
            named = _ERRORS.get(error.status)
            if named is None:
                return error
            error = named(error.message)
        elif not isinstance(error, IskanderError):
            log.call_raised(error=error)
            error = IskanderError(INTERNAL)
        elif error.fault == "server":
            log.call_failed(code=error.code, reason=error.message)
        return rpc_error(error, is_flight=path in self._flight_methods)


def _message_limit(limits: LimitsConfig) -> Callable[[str], int]:
    """Return the function that the transport calls with the path of each new call."""
    return partial(_message_bytes, limits.message_bytes + MESSAGE_SLACK_BYTES)


def _message_bytes(batch_bytes: int, path: str) -> int:
    """The maximum message size of a method."""
    if path in BATCH_METHODS:
        return batch_bytes
    return PROBE_BYTES if path in PROBES else OTHER_BYTES


def _flight(service: FlightService) -> dict[str, Serve]:
    methods: dict[str, Serve] = {
        "Handshake": service.handshake,
        "ListFlights": _with_request(service.list_flights),
        "GetFlightInfo": _with_request(service.get_flight_info),
        "PollFlightInfo": _unary(service.poll_flight_info),
        "GetSchema": _with_request(service.get_schema),
        "DoGet": _with_request(service.do_get),
        "DoPut": service.do_put,
        "DoExchange": service.do_exchange,
        "DoAction": _with_request(service.do_action),
        "ListActions": _with_request(service.list_actions),
    }
    return _by_path(flight.SERVICE, methods)


def _oip(service: OipService, reject: Reject) -> dict[str, Serve]:
    methods: dict[str, Serve] = {name: _unary(answer) for name, answer in service.unary().items()}
    methods |= {name: _with_request(run) for name, run in service.administrative().items()}
    methods["ModelInfer"] = _with_message(partial(service.infer, reject=reject))
    methods["ModelStreamInfer"] = service.stream_infer
    return _by_path(oip_service.SERVICE, methods)


def _by_path(service: str, methods: dict[str, Serve]) -> dict[str, Serve]:
    return {f"/{service}/{name}": serve for name, serve in methods.items()}


def _with_message(handler: Callable[[Message, Call], Awaitable[Any]]) -> Serve:
    """Adapt a handler of one unparsed request, which sends the response itself."""

    async def serve(call: Call) -> None:
        if call.has_input:
            request = call.receive()
        else:
            try:
                async with asyncio.timeout(REQUEST_S):
                    request = await call.read()
            except TimeoutError:
                raise DeadlineExceeded(f"no message received in {REQUEST_S:g} s") from None
        if request is None:
            raise MalformedInput("the call ended before its message")
        await handler(request, call)

    return serve


def _with_request(handler: Callable[[bytes, Call], Awaitable[Any]]) -> Serve:
    """Adapt a handler of one message that protobuf parses."""
    return _with_message(lambda message, call: handler(bytes(message), call))


def _unary(handler: Callable[[bytes, Grant], Awaitable[bytes]]) -> Serve:
    """Adapt a handler of one request that returns the response."""

    async def answer(request: bytes, call: Call) -> None:
        await call.answer(await handler(request, call.grant))

    return _with_request(answer)
