"""The Open Inference Protocol over HTTP: its paths, and errors as status and JSON.

The convenient way in, not the fast one: bodies are read, parsed and written on the loop that serves
every batch, so what is JSON has a limit of its own. What is told of server and models is what
`oip_service` tells over gRPC.

Runs on: gateway loop. Source: Open Inference Protocol v2, REST; its extensions for model
configuration, statistics, model repository, shared memory, traces and logging.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from iskander._generated import oip_pb2
from iskander.auth.grants import Authenticator
from iskander.decoders import thread_safe
from iskander.errors import (
    Draining,
    IskanderError,
    MalformedInput,
    NotReady,
    Unauthenticated,
    Unsupported,
)
from iskander.protocols.oip.http.body import RETRY_MS, BodyQuota, ReceivedBody, read_body
from iskander.protocols.oip.http.infer import JSON_TYPE
from iskander.protocols.oip.http.messages import plain
from iskander.protocols.oip.service import OipService
from iskander.repository.models import Models

log = logging.getLogger("iskander.http")

ASKED_BYTES_MAX = 1 << 16
"""Of a body that is no inference."""
_REFUSED = (429, 503)
_PROBES = ("/v2/health/live", "/v2/health/ready")

_Struct = TypeVar("_Struct", bound=msgspec.Struct)

Answer = Callable[[Request], Awaitable[Response]]
Pick = Callable[[Any], Any]


@thread_safe
class _Index(msgspec.Struct):
    ready: bool | None = None


@thread_safe
class _Load(msgspec.Struct):
    parameters: dict[str, Any] | None = None


class OipHttp:
    """The application.

    Args:
        models: What is served.
        service: What is told of it.
        infer: Answers inference.
        access: Knows what a caller may ask.
        room: For bodies.
    """

    def __init__(
        self,
        models: Models,
        service: OipService,
        infer: ASGIApp,
        access: Authenticator,
        room: BodyQuota,
    ) -> None:
        self._access = access
        self._room = room
        self._models = models
        self._service = service
        self._infer = infer

    def app(self) -> ASGIApp:
        """The application, for callers who may ask; its requests' `scope` has their `grant`."""
        routed = self._routed()

        async def granted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                _strip_authority(scope)
                headers = [
                    (name.decode("latin-1"), v.decode("latin-1")) for name, v in scope["headers"]
                ]
                try:
                    is_probe = scope["path"] in _PROBES
                    scope["grant"] = self._access.grant(headers, is_probe=is_probe)
                except Unauthenticated as error:
                    return await error_response(error)(scope, receive, send)
            return await routed(scope, receive, send)

        return granted

    def _routed(self) -> Starlette:
        """A path that is not named here is not found.

        What a path has in braces are fields of the message that is asked for in gRPC.
        """
        repository = "/v2/repository/models/{model_name}"
        routes: list[BaseRoute] = [
            Route("/v2", self._told("ServerMetadata", plain)),
            Route("/v2/health/live", self._live),
            Route("/v2/health/ready", self._ready),
            Route("/v2/models/stats", self._told("ModelStatistics", plain)),
            Route("/v2/repository/index", self._index, methods=["POST"]),
            Route(f"{repository}/load", self._load, methods=["POST"]),
            Route(f"{repository}/unload", self._unload, methods=["POST"]),
        ]
        for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            routes += [
                Route(path, self._told("ModelMetadata", plain)),
                Route(f"{path}/ready", self._model_ready),
                Route(f"{path}/config", self._told("ModelConfig", lambda m: plain(m.config))),
                Route(f"{path}/stats", self._told("ModelStatistics", plain)),
                Route(f"{path}/infer", self._infer, methods=["POST"]),
            ]
        for path, name in (
            ("/v2/trace/setting", "TraceSetting"),
            ("/v2/models/{model_name}/trace/setting", "TraceSetting"),
            ("/v2/logging", "LogSettings"),
        ):
            routes.append(Route(path, self._told(name), methods=["GET", "POST"]))
        for kind in ("System", "Cuda"):
            routes += self._shared_memory(kind)
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

    def _shared_memory(self, kind: str) -> list[BaseRoute]:
        path, name = f"/v2/{kind.lower()}sharedmemory", f"{kind}SharedMemory"
        region = f"{path}/region/{{name}}"
        status = self._told(f"{name}Status", lambda m: list(plain(m)["regions"].values()))
        unregister = self._told(f"{name}Unregister")
        return [
            Route(f"{path}/status", status),
            Route(f"{region}/status", status),
            Route(f"{region}/register", self._told(f"{name}Register"), methods=["POST"]),
            Route(f"{path}/unregister", unregister, methods=["POST"]),
            Route(f"{region}/unregister", unregister, methods=["POST"]),
        ]

    def _told(self, name: str, pick: Pick | None = None) -> Answer:
        """A path that tells what a call tells; without `pick`, only that it was done."""
        kind = getattr(oip_pb2, f"{name}Request")

        async def tell(request: Request) -> Response:
            asked = kind(**request.path_params)
            told = self._service.answer(name, asked, request.scope["grant"])
            return Response() if pick is None else _json(pick(told))

        return tell

    async def _live(self, _: Request) -> Response:
        return _json({"live": True})

    async def _ready(self, request: Request) -> Response:
        reasons = self._models.reasons()
        if reasons:
            is_discreet = request.scope["grant"].is_anonymous
            why = "the server is not ready" if is_discreet else "; ".join(reasons)
            raise NotReady(why, retry_after_ms=RETRY_MS)
        return _json({"ready": True})

    async def _model_ready(self, request: Request) -> Response:
        asked = oip_pb2.ModelReadyRequest(**request.path_params)
        if not self._service.answer("ModelReady", asked, request.scope["grant"]).ready:
            raise NotReady(f"model `{asked.name}` is not ready", retry_after_ms=RETRY_MS)
        return _json({"name": asked.name, "ready": True})

    async def _index(self, request: Request) -> Response:
        asked = await self._read(request, _Index)
        message = oip_pb2.RepositoryIndexRequest(ready=bool(asked.ready))
        told = self._service.answer("RepositoryIndex", message, request.scope["grant"])
        return _json(plain(told)["models"])

    async def _load(self, request: Request) -> Response:
        asked = await self._read(request, _Load)
        message = oip_pb2.RepositoryModelLoadRequest(**request.path_params)
        for name in asked.parameters or ():
            message.parameters.get_or_create(name)
        await self._service.load(message, request.scope["grant"])
        return Response()

    async def _unload(self, request: Request) -> Response:
        message = oip_pb2.RepositoryModelUnloadRequest(**request.path_params)
        await self._service.unload(message, request.scope["grant"])
        return Response()

    async def _read(self, request: Request, kind: type[_Struct]) -> _Struct:
        """A small body of JSON; without one, what is meant by saying nothing."""
        with ReceivedBody(self._room) as held:
            raw = await read_body(request.receive, request.headers, ASKED_BYTES_MAX, held)
            try:
                return msgspec.json.decode(raw or b"{}", type=kind)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise MalformedInput(f"the request's JSON: {error}") from None


def _strip_authority(scope: Scope) -> None:
    """Leave the path of a target that names its server too, as proxies are asked.

    Source: RFC 9112, section 3.2.2.
    """
    scheme, colon, rest = scope["raw_path"].partition(b"://")
    if colon and scheme.lower() in (b"http", b"https"):
        path = b"/" + rest.partition(b"/")[2]
        scope["raw_path"], scope["path"] = path, unquote(path.decode("ascii"))


def error_response(error: IskanderError, status: int | None = None) -> Response:
    """An error as its client gets it: `error` is the text, beside it what programs read."""
    detail = error.to_wire()
    status = status or error.http_status
    headers = {}
    if status in _REFUSED:
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
        log.warning("a request ended with %s: %s", error.code, error.message)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Of the paths: one that is not there, or not for this method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method[:20]} {request.url.path[:200]}"
    answer = error_response(Unsupported(f"there is no `{what}` here"), error.status_code)
    answer.headers.update(error.headers or {})
    return answer


async def _on_failure(_: Request, __: Exception) -> Response:
    # It is raised again behind this answer, so that the log has it.
    return error_response(IskanderError("the server failed; its log says why"))
