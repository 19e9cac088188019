"""`grpc.health.v1` service: the server under the empty name, and each model.

A model is `NAME` (all its versions) or `NAME/VERSION`. A model that is being loaded, or failed to
load, is NOT_SERVING.

Runs on: gateway loop. Source: gRPC health checking protocol v1.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from iskander._generated import health_pb2
from iskander.errors import MalformedInput, ModelNotFound, NotReady, Overloaded
from iskander.foundation.clock import now_ns
from iskander.gateway.auth.grants import Grant
from iskander.gateway.auth.shares import Shares
from iskander.gateway.protocols.submit import RETRY_MS, given_way_error
from iskander.gateway.repository.models import Models
from iskander.gateway.transport.http2.call import Call

SERVICE = "grpc.health.v1.Health"
ANONYMOUS_DIVISOR = 4
"""Anonymous callers may open a quarter of the watch streams."""
_Status = health_pb2.HealthCheckResponse.ServingStatus


@dataclass(eq=False)
class _Watch:
    """A watch stream: the time of its start, and the scope that ends it."""

    opened_ns: int
    scope: asyncio.Timeout


def _opened_ns(watch: _Watch) -> int:
    return watch.opened_ns


def _give_way(watch: _Watch) -> None:
    watch.scope.reschedule(asyncio.get_running_loop().time())


class HealthService:
    """Methods of the Health service."""

    def __init__(self, models: Models, watchers_max: int) -> None:
        self._models = models
        self.watchers_max = watchers_max
        self._watches: Shares[_Watch] = Shares(_opened_ns, _give_way)
        self._is_stopped = False
        self._changed = asyncio.Event()

    def publish(self) -> None:
        """Make the watch streams compare the status again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Report NOT_SERVING from now on."""
        self._is_stopped = True
        self.publish()

    async def check(self, raw: bytes, grant: Grant) -> bytes:
        """Return the current status; raises ModelNotFound, Unauthenticated or PermissionDenied."""
        name = _service_name(raw, grant)
        status = self._status(name)
        if status == _Status.SERVICE_UNKNOWN:
            raise ModelNotFound(f"unknown service `{name[:100]}`")
        return _response(status)

    async def watch(self, raw: bytes, call: Call) -> None:
        """Send the current status and each change."""
        name = _service_name(raw, call.grant)
        limit = self.watchers_max // (ANONYMOUS_DIVISOR if call.grant.is_anonymous else 1)
        if not self._watches.make_room(call.caller, limit, now_ns()):
            count = f"{len(self._watches)} open, limit {limit} (`limits.streams`)"
            raise Overloaded(f"too many watch streams: {count}", retry_after_ms=RETRY_MS)
        watch = _Watch(now_ns(), asyncio.timeout(None))
        self._watches.add(call.caller, watch)
        try:
            async with watch.scope:
                await self._send_changes(name, call)
        except TimeoutError:
            raise given_way_error("watch stream") from None
        finally:
            self._watches.remove(watch)

    async def _send_changes(self, name: str, call: Call) -> None:
        last = None
        while True:
            _require_grant(name, call.grant)
            changed, status = self._changed, self._status(name)
            if status != last:
                await call.write(_response(status))
                last = status
            elif self._is_stopped:
                return
            else:
                await changed.wait()

    def _status(self, name: str) -> _Status:
        try:
            is_serving = self._is_ready(name) and not self._is_stopped
        except ModelNotFound:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if is_serving else _Status.NOT_SERVING

    def _is_ready(self, name: str) -> bool:
        if not name:
            return self._models.is_ready
        model, _, version = name.partition("/")
        lanes = [lane for lane in self._models if lane.model.name == model]
        lanes = [lane for lane in lanes if version in ("", lane.model.version)]
        try:
            lanes = lanes or [self._models.find(model, version or None)]
        except NotReady:
            return False
        return all(lane.is_ready for lane in lanes)


def _service_name(raw: bytes, grant: Grant) -> str:
    try:
        name: str = health_pb2.HealthCheckRequest.FromString(raw).service
    except (DecodeError, UnicodeDecodeError):
        raise MalformedInput("the message is not a HealthCheckRequest") from None
    _require_grant(name, grant)
    return name


def _require_grant(name: str, grant: Grant) -> None:
    grant.require_valid()
    if name:
        grant.require_model(name.partition("/")[0])


def _response(status: _Status) -> bytes:
    raw: bytes = health_pb2.HealthCheckResponse(status=status).SerializeToString()
    return raw
