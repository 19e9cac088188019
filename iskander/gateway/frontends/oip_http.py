"""The Open Inference Protocol over HTTP: paths, statuses, and inference as one call of the desk.

The convenient way in, not the fast one: bodies are read, parsed and written on the loop that serves
every batch, so what is JSON has a limit of its own.

Runs on: gateway loop. Source: Open Inference Protocol v2, REST; its extensions for binary tensor
data, statistics, model configuration and model repository.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from iskander.config import HttpConfig
from iskander.errors import (
    Cancelled,
    Draining,
    IskanderError,
    LimitExceeded,
    MalformedInput,
    NotReady,
    Overloaded,
    Unsupported,
)
from iskander.gateway.asking import Desk
from iskander.gateway.frontends.oip_http_body import (
    PIECE_BYTES,
    Held,
    Room,
    chosen_coding,
    compress,
    read_body,
)
from iskander.gateway.frontends.oip_http_messages import (
    HEADER_LENGTH,
    choose,
    read_raw,
    read_request,
    write_answer,
)
from iskander.gateway.lanes.lane import Lane
from iskander.gateway.models import Models
from iskander.gateway.offered import give, take

log = logging.getLogger("iskander.http")

JSON_TYPE = "application/json"
BINARY_TYPE = "application/octet-stream"
RETRY_MS = 1000
"""Where an error that passes says nothing of when."""
NO_LOADING = "models are those of the configuration; none is loaded or unloaded by clients"
NO_TRACES = "traces are not offered"
NO_LOGGING = "what is logged is the configuration's business"
NO_SHARED_MEMORY = "shared memory of clients is not taken here"
_REFUSED = (429, 503)
_DIGITS_MAX = 18

Answer = Callable[[Request], Awaitable[Response]]


class OipHttp:
    """The application.

    Args:
        models: What is served.
        desk: Where requests are asked for.
        config: Of the port.

    Attributes:
        is_full: Whether there are more connections than are served; the port knows.
    """

    def __init__(self, models: Models, desk: Desk, config: HttpConfig) -> None:
        self._models = models
        self._desk = desk
        self._config = config
        self._room = Room(config.bodies_bytes)
        self.is_full: Callable[[], bool] = lambda: False

    def app(self) -> Starlette:
        """All paths; one that is not named here is not found."""
        routes = [
            _get("/v2/health/live", self._live),
            _get("/v2/health/ready", self._ready),
            _post("/v2/repository/models/{model}/load", _unsupported(NO_LOADING)),
            _post("/v2/repository/models/{model}/unload", _unsupported(NO_LOADING)),
            _any("/v2/trace/setting", _unsupported(NO_TRACES)),
            _any("/v2/models/{model}/trace/setting", _unsupported(NO_TRACES)),
            _any("/v2/logging", _unsupported(NO_LOGGING)),
        ]
        for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            routes += [
                _get(f"{path}/ready", self._model_ready),
                Route(f"{path}/infer", _Endpoint(self._infer), methods=["POST"]),
            ]
        for kind in ("system", "cuda"):
            memory = f"/v2/{kind}sharedmemory"
            routes += [
                _get(f"{memory}/status", _no_regions),
                _get(f"{memory}/region/{{region}}/status", _no_regions),
                _post(f"{memory}/region/{{region}}/register", _unsupported(NO_SHARED_MEMORY)),
                _post(f"{memory}/unregister", _done),
                _post(f"{memory}/region/{{region}}/unregister", _done),
            ]
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

    async def _live(self, _: Request) -> Response:
        return Response()

    async def _ready(self, _: Request) -> Response:
        reasons = self._models.reasons()
        if reasons:
            raise NotReady("; ".join(reasons), retry_after_ms=RETRY_MS)
        return Response()

    async def _model_ready(self, request: Request) -> Response:
        lane = self._lane(request)
        if self._models.is_stopping or not self._models.is_lane_ready(lane):
            raise NotReady(f"model `{lane.title}` is not ready", retry_after_ms=RETRY_MS)
        return Response()

    def _lane(self, request: Request) -> Lane:
        return self._models.find(*_model_of(request))

    async def _infer(self, request: Request, send: Send) -> None:
        if self.is_full():
            raise Overloaded("as many connections as may be are open", retry_after_ms=RETRY_MS)
        self._desk.require_open()
        lane = self._models.find_loaded(*_model_of(request))
        contract, limits = lane.contract, self._desk.limits
        assert contract is not None
        json_max = min(self._config.json_bytes, limits.message_bytes)
        length = _header_length(request)
        body_max = json_max if length is None else limits.message_bytes
        with Held(self._room) as held:
            raw = await read_body(request.receive, request.headers, body_max, held)
            body = memoryview(raw).toreadonly()
            if length is not None and length > min(len(body), json_max):
                raise _wrong_length(length, len(body), json_max)
            asked = read_raw(contract, body) if length == 0 else read_request(body, length, limits)
            offered = take(contract, asked.tensors, limits)
            chosen = choose(contract, asked, offered.rows, json_max)
            with self._desk.held():
                asking = self._desk.ask(lane, offered)
                results = await _unless_gone(request.receive, asking)
                given = give(contract, offered.rows, results)
                parts, length = write_answer(
                    lane.model.name, lane.model.version, asked, given, chosen
                )
                held.add(sum(map(len, parts)))
                await _write(request, send, parts, length)


class _Endpoint:
    """An endpoint that writes its answer itself, and is not over before that."""

    def __init__(self, answer: Callable[[Request, Send], Awaitable[None]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(Request(scope, receive), send)


def error_response(error: IskanderError, status: int | None = None) -> Response:
    """An error as its client gets it: `error` is the text, and beside it what programs read."""
    detail = error.to_wire()
    status = status or error.http_status
    headers = {}
    if status in _REFUSED:
        wait_ms = RETRY_MS if error.retry_after_ms is None else error.retry_after_ms
        headers["retry-after"] = str(math.ceil(wait_ms / 1000))
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
    # The log has it: what is not an answer is raised again behind this one.
    return error_response(IskanderError("the server failed; its log says why"))


def _get(path: str, answer: Answer) -> Route:
    return Route(path, answer, methods=["GET"])


def _post(path: str, answer: Answer) -> Route:
    return Route(path, answer, methods=["POST"])


def _any(path: str, answer: Answer) -> Route:
    return Route(path, answer, methods=["GET", "POST"])


def _unsupported(why: str) -> Answer:
    async def refuse(_: Request) -> Response:
        raise Unsupported(why)

    return refuse


async def _no_regions(_: Request) -> Response:
    return _json([])


async def _done(_: Request) -> Response:
    return Response()


def _model_of(request: Request) -> tuple[str, str | None]:
    return request.path_params["model"], request.path_params.get("version")


def _header_length(request: Request) -> int | None:
    text = request.headers.get(HEADER_LENGTH)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX):
        raise MalformedInput(f"the header `{HEADER_LENGTH}` is no number of bytes")
    return int(text)


def _wrong_length(length: int, body_bytes: int, json_max: int) -> IskanderError:
    if length > body_bytes:
        return MalformedInput(
            f"the header `{HEADER_LENGTH}` says {length} bytes, and the body has {body_bytes}"
        )
    return LimitExceeded(f"a request's JSON may have {json_max} bytes, got {length}")


async def _unless_gone(receive: Receive, answer: Coroutine[Any, Any, bytes]) -> bytes:
    """Wait for an answer; where the client leaves, the request is given up."""
    asking = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            return asking.result()
        raise Cancelled("the caller left")
    finally:
        asking.cancel()
        leaving.cancel()


async def _write(
    request: Request, send: Send, parts: Sequence[bytes | memoryview], length: int | None
) -> None:
    """Write an answer piece by piece, as far as its client takes it."""
    headers = [(b"content-type", (JSON_TYPE if length is None else BINARY_TYPE).encode())]
    if length is not None:
        headers.append((HEADER_LENGTH.encode(), str(length).encode()))
    coding = chosen_coding(request.headers.get("accept-encoding", ""))
    if coding is not None:
        parts = [await compress(parts, coding)]
        headers += [(b"content-encoding", coding.encode()), (b"vary", b"accept-encoding")]
    headers.append((b"content-length", str(sum(map(len, parts))).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in parts:
        for start in range(0, len(part), PIECE_BYTES):
            piece = bytes(part[start : start + PIECE_BYTES])
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
