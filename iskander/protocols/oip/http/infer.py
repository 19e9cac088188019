"""Inference over HTTP: from a request's body to the answer's last piece.

Runs on: gateway loop. Source: Open Inference Protocol v2, REST; its binary tensor data extension.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from iskander.auth.grants import Grant
from iskander.auth.source import Source
from iskander.config.schema import HttpConfig
from iskander.errors import (
    Cancelled,
    IskanderError,
    LimitExceeded,
    MalformedInput,
    Overloaded,
    detach,
)
from iskander.protocols.oip.http.body import (
    PIECE_BYTES,
    RETRY_MS,
    BodyQuota,
    ReceivedBody,
    chosen_coding,
    compress,
    read_body,
)
from iskander.protocols.oip.http.messages import (
    HEADER_LENGTH,
    ParsedRequest,
    choose,
    read_raw,
    read_request,
    write_answer,
)
from iskander.protocols.oip.terms import said_in, said_over
from iskander.protocols.stream_terms import StreamTerms
from iskander.protocols.submit import RequestSubmitter
from iskander.protocols.tensors import give, take
from iskander.protocols.terms import HEADER_PREFIX
from iskander.repository.models import Models
from iskander.scheduling.lane import Lane
from iskander.scheduling.request import Terms

JSON_TYPE = "application/json"
BINARY_TYPE = "application/octet-stream"
AT_ONCE_BYTES = 256 << 10
"""What is longer is read by a thread."""
JSON_COST = 24
"""Bytes that reading a byte of JSON takes for a time: an empty list of 3 bytes takes 64."""
_DIGITS_MAX = 18


class HttpInference:
    """The endpoint. A call is open until its answer is written, which a drain waits for.

    Args:
        models: What is served.
        desk: Has the rows computed.
        config: Of the port.
        room: For bodies.
    """

    def __init__(
        self, models: Models, desk: RequestSubmitter, config: HttpConfig, room: BodyQuota
    ) -> None:
        self._models = models
        self._desk = desk
        self._json_max = min(config.json_bytes, desk.limits.message_bytes)
        self._room = room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request.

        Raises:
            IskanderError: Why there is no answer; nothing of one was sent.
        """
        request = Request(scope, receive)
        if scope["is_surplus"]:
            raise Overloaded("as many connections as may be are open", retry_after_ms=RETRY_MS)
        self._desk.require_open()
        path = request.path_params
        grant: Grant = scope["grant"]
        grant.require_model(path["name"])
        key = _route_key(request.headers, grant)
        lane = self._models.find_loaded(path["name"], path.get("version"), key)
        lane.entering += 1
        with ReceivedBody(self._room) as held:
            try:
                asked = await self._read(request, lane, held)
                with self._desk.held(caller=_caller(request)):
                    parts, json_bytes = await self._ask(request, lane, asked)
                    held.add(sum(map(len, parts)))
                    await _write(request, send, parts, json_bytes)
            except IskanderError as error:
                detach(error)
                raise
            finally:
                lane.entering -= 1

    async def _read(self, request: Request, lane: Lane, held: ReceivedBody) -> ParsedRequest:
        json_bytes, limits = _json_bytes(request.headers), self._desk.limits
        body_max = self._json_max if json_bytes is None else limits.message_bytes
        raw = await read_body(request.receive, request.headers, body_max, held)
        body = raw.toreadonly()
        if json_bytes is not None:
            self._require_json(json_bytes, len(body))
        assert lane.contract is not None
        if json_bytes == 0:
            return read_raw(lane.contract, body)
        with held.work(JSON_COST * (len(body) if json_bytes is None else json_bytes)):
            if len(body) <= AT_ONCE_BYTES:
                return read_request(body, json_bytes, lane.contract, limits)
            return await asyncio.to_thread(read_request, body, json_bytes, lane.contract, limits)

    async def _ask(
        self, request: Request, lane: Lane, asked: ParsedRequest
    ) -> tuple[list[bytes | memoryview], int | None]:
        contract = lane.contract
        assert contract is not None
        offered = take(contract, asked.tensors, self._desk.limits)
        chosen = choose(contract, asked, offered.rows, self._json_max)
        terms = _terms(request, asked)
        results = await _unless_gone(request.receive, self._desk.ask(lane, offered, terms=terms))
        given = give(contract, offered.rows, results)
        model = (lane.model.name, lane.model.version)
        return write_answer(model, asked, given, chosen, self._json_max)

    def _require_json(self, json_bytes: int, body_bytes: int) -> None:
        if json_bytes > body_bytes:
            raise MalformedInput(
                f"the header `{HEADER_LENGTH}` says {json_bytes} bytes, and the body has "
                f"{body_bytes}"
            )
        if json_bytes > self._json_max:
            raise LimitExceeded(
                f"a request's JSON may have {self._json_max} bytes, got {json_bytes}: send the "
                "tensors as binary data",
                wanted=self._json_max,
            )


def _caller(request: Request) -> object:
    """Whose a request is, as far as one is told from another: by name, or else by address."""
    grant: Grant = request.scope["grant"]
    return grant.name or (request.client and request.client.host)


def _json_bytes(headers: Mapping[str, str]) -> int | None:
    text = headers.get(HEADER_LENGTH)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX):
        raise MalformedInput(f"the header `{HEADER_LENGTH}` is no number of bytes")
    return int(text)


def _route_key(headers: Mapping[str, str], grant: Grant) -> str:
    """By which the version is chosen: of the headers, since no body is read before that."""
    said = headers.get(f"{HEADER_PREFIX}route-key") or headers.get(f"{HEADER_PREFIX}client")
    return said or StreamTerms((), None, Source(grant.name)).route_key


def _source(request: Request) -> Source:
    """Whose share of a queue a request takes; a connection is known by the address of its peer."""
    client = request.client
    grant: Grant = request.scope["grant"]
    return Source(grant.name, f"{client.host}:{client.port}" if client else "http")


def _terms(request: Request, asked: ParsedRequest) -> Terms:
    """What headers and parameters say about urgency; where both do, the parameters."""
    headers = request.headers
    said = {name: value for name, value in headers.items() if name.startswith(HEADER_PREFIX)}
    terms = said_over(said_in(asked.parameters), said_in(said, f"`{HEADER_PREFIX}` headers"))
    return StreamTerms((), None, _source(request)).with_said(terms)


async def _unless_gone(
    receive: Receive, answer: Coroutine[Any, Any, bytes | memoryview]
) -> bytes | memoryview:
    """Wait for an answer; where the client leaves, the request is given up.

    Raises:
        Cancelled: It left.
        IskanderError: Why there is no answer.
    """
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
    request: Request, send: Send, parts: Sequence[bytes | memoryview], json_bytes: int | None
) -> None:
    """Write an answer piece by piece, as far as its client takes it."""
    headers = [(b"content-type", (JSON_TYPE if json_bytes is None else BINARY_TYPE).encode())]
    if json_bytes is not None:
        headers.append((HEADER_LENGTH.encode(), str(json_bytes).encode()))
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
