"""Inference over HTTP: body, submission, answer.

Runs on: gateway loop. Source: Open Inference Protocol v2, REST; its binary tensor data extension.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from iskander.config.schema import HttpConfig
from iskander.errors import (
    Cancelled,
    IskanderError,
    LimitExceeded,
    MalformedInput,
    Overloaded,
    detach,
)
from iskander.gateway.auth.grants import Grant
from iskander.gateway.auth.source import Source
from iskander.gateway.protocols.oip.http.body import (
    PIECE_BYTES,
    RETRY_MS,
    BodyQuota,
    ReceivedBody,
    compress,
    read_body,
    response_coding,
)
from iskander.gateway.protocols.oip.http.json_bounds import PIECE_BYTES as TEXT_PIECE_BYTES
from iskander.gateway.protocols.oip.http.messages import (
    HEADER_LENGTH,
    ParsedRequest,
    read_raw,
    read_request,
    select_outputs,
    write_answer,
)
from iskander.gateway.protocols.oip.terms import merge_terms, parse_terms
from iskander.gateway.protocols.stream_terms import StreamTerms
from iskander.gateway.protocols.submit import RequestSubmitter
from iskander.gateway.protocols.tensors import read_inputs, result_tensors
from iskander.gateway.protocols.terms import HEADER_PREFIX
from iskander.gateway.protocols.trace_context import PARENT, STATE, context_of_headers
from iskander.gateway.protocols.traced_call import HTTP_INFER, TracedCall
from iskander.gateway.repository.models import Models
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.request import Terms

JSON_TYPE = "application/json"
BINARY_TYPE = "application/octet-stream"
AT_ONCE_BYTES = 256 << 10
"""Longer bodies are parsed in a thread."""
AT_ONCE_JSON_BYTES = TEXT_PIECE_BYTES
"""Longer JSON is read and written in a thread, for which requests wait under the receive budget."""
JSON_THREAD = ThreadPoolExecutor(1, "json")
"""One thread: JSON needs the interpreter, so that more of them would only delay the loop more."""
JSON_COST = 24
"""Temporary bytes for parsing a byte of JSON: an empty list of 3 bytes needs 64."""
_DIGITS_MAX = 18

_T = TypeVar("_T")


class HttpInference:
    """The endpoint. A drain waits for its calls until their answers are written."""

    def __init__(
        self, models: Models, submitter: RequestSubmitter, config: HttpConfig, quota: BodyQuota
    ) -> None:
        self._models = models
        self._submitter = submitter
        self.config = config
        self._quota = quota

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; if it raises, nothing was sent."""
        request, tracer = Request(scope, receive), self._submitter.tracer
        context = None if tracer is None else context_of_headers(request.headers.items())
        with TracedCall(tracer, HTTP_INFER, context) as traced:
            await self._answer(scope, request, send, traced)

    async def _answer(self, scope: Scope, request: Request, send: Send, traced: TracedCall) -> None:
        if scope["is_surplus"]:
            raise Overloaded(
                "too many open connections (`http.connections`)", retry_after_ms=RETRY_MS
            )
        path = request.path_params
        grant: Grant = scope["grant"]
        caller = grant.name or (request.client and request.client.host)
        self._submitter.require_open(caller)
        grant.require_model(path["name"])
        key = _route_key(request.headers, grant)
        lane = self._models.find_loaded(path["name"], path.get("version"), key)
        lane.entering += 1
        with ReceivedBody(self._quota) as received:
            try:
                parsed = await self._read(request, lane, received)
                with self._submitter.open_call(caller=caller):
                    parts, json_bytes = await self._infer(request, lane, parsed, traced)
                    received.add(sum(map(len, parts)))
                    await _write(request, send, parts, json_bytes)
            except IskanderError as error:
                detach(error)
                lane.count_refused(error)
                raise
            finally:
                lane.entering -= 1

    async def _read(self, request: Request, lane: Lane, received: ReceivedBody) -> ParsedRequest:
        json_bytes = _json_bytes(request.headers)
        limits, contract = self._submitter.limits, lane.contract
        assert contract is not None
        body_max = self._json_max if json_bytes is None else limits.message_bytes
        raw = await read_body(request.receive, request.headers, body_max, received)
        body = raw.toreadonly()
        if json_bytes is not None:
            self._require_json(json_bytes, len(body))
        if json_bytes == 0:
            return read_raw(contract, body)
        text_bytes = len(body) if json_bytes is None else json_bytes
        with received.work(JSON_COST * text_bytes):
            if text_bytes <= AT_ONCE_JSON_BYTES and len(body) <= AT_ONCE_BYTES:
                return read_request(body, json_bytes, contract, limits)
            return await _in_thread(read_request, body, json_bytes, contract, limits)

    async def _infer(
        self, request: Request, lane: Lane, parsed: ParsedRequest, traced: TracedCall
    ) -> tuple[list[bytes | memoryview], int | None]:
        contract = lane.contract
        assert contract is not None
        tensors = read_inputs(contract, parsed.tensors, self._submitter.limits)
        chosen = select_outputs(contract, parsed, tensors.rows, self._json_max)
        terms = _terms(request, parsed, is_traced=self._submitter.uses_contexts)
        answer = self._submitter.infer(lane, tensors, terms=terms, traced=traced)
        body = await _unless_gone(request.receive, answer)
        results = result_tensors(contract, tensors.rows, body)
        model = (lane.model.name, lane.model.version)
        texts = {output.name for output in chosen if not output.is_binary}
        written = model, parsed, results, chosen, self._json_max
        if sum(len(each.data) for each in results if each.name in texts) <= AT_ONCE_JSON_BYTES:
            return write_answer(*written)
        return await _in_thread(write_answer, *written)

    @property
    def _json_max(self) -> int:
        return min(self.config.json_bytes, self._submitter.limits.message_bytes)

    def _require_json(self, json_bytes: int, body_bytes: int) -> None:
        if json_bytes > body_bytes:
            raise MalformedInput(
                f"the header `{HEADER_LENGTH}` declares {json_bytes} bytes, but the body has "
                f"{body_bytes}"
            )
        if json_bytes > self._json_max:
            raise LimitExceeded(
                f"JSON too large: {json_bytes} bytes, limit {self._json_max} (`http.json_bytes`): "
                "send the tensors as binary data",
                wanted=self._json_max,
            )


async def _in_thread(function: Callable[..., _T], *args: Any) -> _T:  # noqa: ANN401
    return await asyncio.get_running_loop().run_in_executor(JSON_THREAD, function, *args)


def _json_bytes(headers: Mapping[str, str]) -> int | None:
    text = headers.get(HEADER_LENGTH)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX):
        raise MalformedInput(f"the header `{HEADER_LENGTH}` is not a number of bytes")
    return int(text)


def _route_key(headers: Mapping[str, str], grant: Grant) -> str:
    """Return the key that selects the version, from the headers: the body is not read yet."""
    key = headers.get(f"{HEADER_PREFIX}route-key") or headers.get(f"{HEADER_PREFIX}client")
    return key or StreamTerms((), None, Source(grant.name)).route_key


def _terms(request: Request, parsed: ParsedRequest, *, is_traced: bool) -> Terms:
    """Return the terms in parameters and headers; parameters take precedence."""
    headers, client = request.headers, request.client
    named = {name: value for name, value in headers.items() if name.startswith(HEADER_PREFIX)}
    in_headers = parse_terms(named, f"`{HEADER_PREFIX}` headers")
    terms = merge_terms(parse_terms(parsed.parameters), in_headers)
    grant: Grant = request.scope["grant"]
    source = Source(grant.name, f"{client.host}:{client.port}" if client else "http")
    # Of the headers, `StreamTerms` reads the trace context only: the others are in `terms`.
    trace = [each for each in headers.items() if each[0] in (PARENT, STATE)]
    return StreamTerms(trace, None, source, is_traced=is_traced).merged(terms)


async def _unless_gone(
    receive: Receive, answer: Coroutine[Any, Any, bytes | memoryview]
) -> bytes | memoryview:
    """Await an answer; cancel the request if the client disconnects."""
    answering = asyncio.ensure_future(answer)
    disconnecting = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((answering, disconnecting), return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
        raise Cancelled("the client disconnected")
    finally:
        answering.cancel()
        disconnecting.cancel()


async def _write(
    request: Request, send: Send, parts: Sequence[bytes | memoryview], json_bytes: int | None
) -> None:
    """Write an answer in pieces, under the client's flow control."""
    headers = [(b"content-type", (JSON_TYPE if json_bytes is None else BINARY_TYPE).encode())]
    if json_bytes is not None:
        headers.append((HEADER_LENGTH.encode(), str(json_bytes).encode()))
    coding = response_coding(request.headers.get("accept-encoding", ""))
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
