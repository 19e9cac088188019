"""HTTP application of the Open Inference Protocol: routes, and errors as status and JSON.

The event loop of all batches also parses these bodies, so JSON has its own limit. All calls but
inference have the same answers as over gRPC (`OipService`).

Runs on: gateway loop. Source: Open Inference Protocol v2, REST; its extensions for model
configuration, statistics, model repository, shared memory, traces and logging.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from iskander._generated import oip_pb2
from iskander.errors import (
    Draining,
    IskanderError,
    MalformedInput,
    NotReady,
    Overloaded,
    Unauthenticated,
    Unsupported,
)
from iskander.foundation.decoders import thread_safe
from iskander.foundation.logs import requests as log
from iskander.gateway.auth.grants import Authenticator
from iskander.gateway.protocols.oip.http.body import RETRY_MS, BodyQuota, ReceivedBody, read_body
from iskander.gateway.protocols.oip.http.infer import JSON_TYPE
from iskander.gateway.protocols.oip.http.json_bounds import require_members
from iskander.gateway.protocols.oip.http.messages import plain
from iskander.gateway.protocols.oip.service import OipService
from iskander.gateway.repository.models import Models

CALL_BYTES_MAX = 1 << 16
"""Limit of the body of any call other than inference."""
CALL_COLUMNS = 16
"""Limit of its members, as of a request with so many columns."""
_RETRYABLE = (429, 503)
PROBES = ("/v2/health/live", "/v2/health/ready")

_Struct = TypeVar("_Struct", bound=msgspec.Struct)

Answer = Callable[[Request], Awaitable[Response]]
Pick = Callable[[Any], Any]


@thread_safe
class _Index(msgspec.Struct):
    ready: bool | None = None


@thread_safe
class _Load(msgspec.Struct):
    parameters: dict[str, msgspec.Raw] | None = None


@dataclass(slots=True)
class OipHttp:
    """The application; `service` answers all calls but inference, `infer` inference.

    `calls_ended` counts calls by protocol and status.
    """

    models: Models
    service: OipService
    infer: ASGIApp
    authenticator: Authenticator
    quota: BodyQuota
    calls_ended: Counter[tuple[str, str]]

    def app(self) -> ASGIApp:
        """Return the application with authentication; it adds `grant` to each `scope`."""
        routed = self._routed()

        async def authenticated(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                send = self._counting(send)
                _strip_authority(scope)
                headers = [
                    (name.decode("latin-1"), v.decode("latin-1")) for name, v in scope["headers"]
                ]
                try:
                    is_probe = scope["path"] in PROBES
                    origin = scope["origin"]
                    authenticate = self.authenticator.authenticate
                    scope["grant"] = await authenticate(headers, is_probe=is_probe, origin=origin)
                except (Unauthenticated, Overloaded) as error:
                    return await error_response(error)(scope, receive, send)
            return await routed(scope, receive, send)

        return authenticated

    def _counting(self, send: Send) -> Send:
        """Count the call by the status of its response."""

        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.calls_ended["http", str(message["status"])] += 1
            await send(message)

        return count

    def _routed(self) -> Starlette:
        """Build the routes; names in braces are fields of the gRPC request."""
        repository = "/v2/repository/models/{model_name}"
        routes: list[BaseRoute] = [
            Route("/v2", self._call("ServerMetadata", plain)),
            Route("/v2/health/live", self._live),
            Route("/v2/health/ready", self._ready),
            Route("/v2/models/stats", self._call("ModelStatistics", plain)),
            Route("/v2/repository/index", self._index, methods=["POST"]),
            Route(f"{repository}/load", self._load, methods=["POST"]),
            Route(f"{repository}/unload", self._unload, methods=["POST"]),
        ]
        for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            routes += [
                Route(path, self._call("ModelMetadata", plain)),
                Route(f"{path}/ready", self._model_ready),
                Route(f"{path}/config", self._call("ModelConfig", lambda m: plain(m.config))),
                Route(f"{path}/stats", self._call("ModelStatistics", plain)),
                Route(f"{path}/infer", self.infer, methods=["POST"]),
            ]
        for path, name in (
            ("/v2/trace/setting", "TraceSetting"),
            ("/v2/models/{model_name}/trace/setting", "TraceSetting"),
            ("/v2/logging", "LogSettings"),
        ):
            routes.append(Route(path, self._call(name), methods=["GET", "POST"]))
        for kind in ("System", "Cuda"):
            path, name = f"/v2/{kind.lower()}sharedmemory", f"{kind}SharedMemory"
            region = f"{path}/region/{{name}}"
            status = self._call(f"{name}Status", lambda m: list(plain(m)["regions"].values()))
            routes += [Route(f"{prefix}/status", status) for prefix in (path, region)]
            calls = (path, "Unregister"), (region, "Unregister"), (region, "Register")
            for prefix, method in calls:
                answer = self._call(f"{name}{method}")
                routes.append(Route(f"{prefix}/{method.lower()}", answer, methods=["POST"]))
        app = Starlette(
            routes=routes,
            exception_handlers={
                IskanderError: _on_error,
                HTTPException: _on_http_error,
                Exception: _on_failure,
            },
        )
        app.router.redirect_slashes = False
        return app

    def _call(self, name: str, pick: Pick | None = None) -> Answer:
        """Return an endpoint for a call; without `pick` its answer has no body."""
        kind = getattr(oip_pb2, f"{name}Request")

        async def answer(request: Request) -> Response:
            message = kind(**request.path_params)
            response = self.service.answer(name, message, request.scope["grant"])
            return Response() if pick is None else _json(pick(response))

        return answer

    async def _live(self, _: Request) -> Response:
        return _json({"live": True})

    async def _ready(self, request: Request) -> Response:
        reasons = self.models.reasons()
        if reasons:
            # The reasons have names of models.
            may_see = request.scope["is_own_host"] and not request.scope["grant"].is_anonymous
            why = "; ".join(reasons) if may_see else "the server is not ready"
            raise NotReady(why, retry_after_ms=RETRY_MS)
        return _json({"ready": True})

    async def _model_ready(self, request: Request) -> Response:
        message = oip_pb2.ModelReadyRequest(**request.path_params)
        if not self.service.answer("ModelReady", message, request.scope["grant"]).ready:
            raise NotReady(f"model `{message.name}` is not ready", retry_after_ms=RETRY_MS)
        return _json({"name": message.name, "ready": True})

    async def _index(self, request: Request) -> Response:
        body = await self._read(request, _Index)
        message = oip_pb2.RepositoryIndexRequest(ready=bool(body.ready))
        response = self.service.answer("RepositoryIndex", message, request.scope["grant"])
        return _json(plain(response)["models"])

    async def _load(self, request: Request) -> Response:
        body = await self._read(request, _Load)
        message = oip_pb2.RepositoryModelLoadRequest(**request.path_params)
        for name in body.parameters or ():
            message.parameters.get_or_create(name)
        await self.service.load(message, request.scope["grant"], request.scope["origin"])
        return Response()

    async def _unload(self, request: Request) -> Response:
        message = oip_pb2.RepositoryModelUnloadRequest(**request.path_params)
        await self.service.unload(message, request.scope["grant"], request.scope["origin"])
        return Response()

    async def _read(self, request: Request, kind: type[_Struct]) -> _Struct:
        """Read a small JSON body; an empty one is `{}`."""
        with ReceivedBody(self.quota) as received:
            raw = await read_body(request.receive, request.headers, CALL_BYTES_MAX, received)
            require_members(raw, CALL_COLUMNS)
            try:
                return msgspec.json.decode(raw or b"{}", type=kind)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise MalformedInput(f"invalid JSON of the request: {error}") from None


def _strip_authority(scope: Scope) -> None:
    """Reduce an absolute target, which proxies receive, to its path.

    Source: RFC 9112, section 3.2.2.
    """
    scheme, colon, rest = scope["raw_path"].partition(b"://")
    if colon and scheme.lower() in (b"http", b"https"):
        path = b"/" + rest.partition(b"/")[2]
        scope["raw_path"], scope["path"] = path, unquote(path.decode("ascii"))


def error_response(error: IskanderError, status: int | None = None) -> Response:
    """Encode an error: the text is `error`, beside it are machine-readable fields."""
    detail = error.to_wire()
    status = status or error.http_status
    headers = {}
    if status in _RETRYABLE:
        wait_ms = RETRY_MS if error.retry_after_ms is None else error.retry_after_ms
        headers["retry-after"] = str(math.ceil(wait_ms / 1000))
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, Draining):
        headers["connection"] = "close"
    return _json({"error": detail.pop("message"), **detail}, status, headers)


def _json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:  # noqa: ANN401
    return Response(msgspec.json.encode(content), status, headers, JSON_TYPE)


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, IskanderError)
    if error.fault == "server":
        log.http_request_failed(code=error.code, reason=error.message)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer an unknown path or method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method[:20]} {request.url.path[:200]}"
    answer = error_response(Unsupported(f"unknown path or method: `{what}`"), error.status_code)
    answer.headers.update(error.headers or {})
    return answer


async def _on_failure(_: Request, __: Exception) -> Response:
    # Starlette raises it again after this answer, and the log has it.
    return error_response(IskanderError("internal server error; see the server's log"))
