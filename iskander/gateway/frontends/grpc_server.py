"""The gRPC server: addresses, limits of the transport, methods, and errors as trailers.

Every method takes and gives bytes: what they mean is the frontends' business, and the batches are
never copied by a protobuf runtime.

Runs on: gateway loop. Source: gRPC core's channel arguments; HTTP/2 status mapping of gRPC.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import msgspec

from iskander.config import ServerConfig
from iskander.errors import ConfigError, IskanderError
from iskander.gateway.addresses import owner_of, unix_path
from iskander.gateway.frontends import flight, health
from iskander.gateway.frontends.flight import FlightService
from iskander.gateway.frontends.health import HealthService
from iskander.wire.attach import LockFile

log = logging.getLogger("iskander.grpc")

KEEPALIVE_MS = 60_000
KEEPALIVE_TIMEOUT_MS = 20_000
CLIENT_PING_LEAST_MS = 10_000
MESSAGE_SLACK_BYTES = 1 << 20
"""Beyond our own limit, so that our error and not the transport's is what a client sees."""

Handler = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]


class GrpcServer:
    """The server and the socket files that it owns.

    Args:
        flight_service: Answers the Flight calls.
        health_service: Answers the health calls.
        message_bytes: The largest message taken.
    """

    def __init__(
        self, flight_service: FlightService, health_service: HealthService, message_bytes: int
    ) -> None:
        self._locks: list[LockFile] = []
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", message_bytes + MESSAGE_SLACK_BYTES),
                ("grpc.max_send_message_length", -1),
                # One gateway an address: a second one must fail, not take half of the clients.
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", CLIENT_PING_LEAST_MS),
            ]
        )
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(flight.SERVICE, _flight(flight_service)),
                grpc.method_handlers_generic_handler(health.SERVICE, _health(health_service)),
            )
        )

    async def start(self, config: ServerConfig, addresses: tuple[str, ...]) -> list[str]:
        """Listen.

        Returns:
            The addresses with the ports that were taken.

        Raises:
            ConfigError: An address is in use, or is none.
        """
        bound = [self._add(address) for address in addresses]
        await self._server.start()
        for address in addresses:
            path = unix_path(address)
            if path is not None:
                _own(path, config)
        return bound

    async def stop(self, grace_s: float) -> None:
        """Stop listening, and end what is still open after `grace_s`."""
        await self._server.stop(grace_s)
        for lock in self._locks:
            lock.release()

    def _add(self, address: str) -> str:
        path = unix_path(address)
        if path is not None:
            # gRPC takes a path from whoever listens there, without a word.
            lock = LockFile(path.with_name(path.name + ".lock"))
            try:
                is_free = lock.take()
            except OSError as error:
                raise ConfigError(f"server.address {address}: {error.strerror}") from None
            if not is_free:
                raise ConfigError(f"server.address {address}: another process listens there")
            self._locks.append(lock)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError:
            port = 0
        if port == 0:
            raise ConfigError(
                f"server.address {address}: cannot listen there; it is in use, or no address of "
                "this machine"
            )
        return address if path is not None else f"{address.rpartition(':')[0]}:{port}"


async def abort(context: grpc.aio.ServicerContext, error: IskanderError) -> None:
    """End a call with an error: status, text, and the detail that programs read.

    pyarrow gives the `grpc-status-details-bin` trailer to its users as `extra_info`.
    """
    wire = error.to_wire()
    trailers = [
        ("iskander-code", error.code),
        ("iskander-fault", error.fault.value),
        ("iskander-retryable", "true" if error.retryable else "false"),
        ("grpc-status-details-bin", msgspec.json.encode(wire)),
    ]
    if error.retry_after_ms is not None:
        trailers.append(("iskander-retry-after-ms", str(error.retry_after_ms)))
    status = grpc.StatusCode[error.flight_status or error.status]
    await context.abort(status, error.message, tuple(trailers))


def _guarded(handler: Handler) -> Handler:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: ANN401
        try:
            return await handler(request, context)
        except IskanderError as error:
            if error.fault == "server":
                log.warning("a call ended with %s: %s", error.code, error.message)
            await abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception:
            # The call ends here and the server goes on; the text stays in the log.
            log.exception("a call failed")
            await abort(context, IskanderError("the server failed; its log says why"))

    return call


def _flight(service: FlightService) -> dict[str, grpc.RpcMethodHandler]:
    unary, server, both = (
        grpc.unary_unary_rpc_method_handler,
        grpc.unary_stream_rpc_method_handler,
        grpc.stream_stream_rpc_method_handler,
    )
    return {
        "Handshake": both(_guarded(service.handshake)),
        "ListFlights": server(_guarded(service.list_flights)),
        "GetFlightInfo": unary(_guarded(service.get_flight_info)),
        "PollFlightInfo": unary(_guarded(service.poll_flight_info)),
        "GetSchema": unary(_guarded(service.get_schema)),
        "DoGet": server(_guarded(service.do_get)),
        "DoPut": both(_guarded(service.do_put)),
        "DoExchange": both(_guarded(service.do_exchange)),
        "DoAction": server(_guarded(service.do_action)),
        "ListActions": server(_guarded(service.list_actions)),
    }


def _health(service: HealthService) -> dict[str, grpc.RpcMethodHandler]:
    return {
        "Check": grpc.unary_unary_rpc_method_handler(_guarded(service.check)),
        "Watch": grpc.unary_stream_rpc_method_handler(_guarded(service.watch)),
    }


def _own(path: Path, config: ServerConfig) -> None:
    try:
        os.chown(path, *owner_of(config))
        os.chmod(path, int(config.unix_mode, 8))
    except OSError as error:
        raise ConfigError(
            f"server.unix_owner = {config.unix_owner}: the socket cannot be given to them: "
            f"{error.strerror}"
        ) from None
