"""One ModelStreamInfer call: requests in, responses out in the order of the requests.

A bounded window of requests is in flight, and while it is full nothing is read, so that a client
which stops reading stops only itself. An error takes the place of its request's response and the
stream goes on, unless the client asked for statuses.

Runs on: gateway loop. Source: Triton's streaming extension of the Open Inference Protocol v2.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial

from iskander._generated import oip_pb2
from iskander.config.schema import LimitsConfig
from iskander.errors import Draining, IskanderError, detach
from iskander.protocols.oip.infer import Inference
from iskander.protocols.oip.wire import in_stream, scan
from iskander.protocols.stream_terms import StreamTerms
from iskander.transport.http2.call import Call, Message

log = logging.getLogger("iskander.oip")

STATUS_WANTED = ("triton_grpc_error", "true")
"""Metadata of clients that want a stream to end with the status of its first error."""


class _Pending:
    """A request of the stream, until its response is written.

    Attributes:
        answer: Ends with the response or its error.
        held_bytes: What it keeps of private memory: its message and its response.
    """

    __slots__ = ("answer", "held_bytes")

    def __init__(self, answer: asyncio.Task[list[Message]]) -> None:
        self.answer = answer
        self.held_bytes = 0


class InferStream:
    """One stream.

    Args:
        call: Of a client.
        inference: Answers its requests.
        limits: Of the server; the window is that of Flight's streams.
    """

    def __init__(self, call: Call, inference: Inference, limits: LimitsConfig) -> None:
        self._call = call
        self._inference = inference
        self._limits = limits
        self._terms = StreamTerms(call.metadata, call.deadline_ns, call.source)
        self._ends_on_error = STATUS_WANTED in call.metadata
        self._window: deque[_Pending] = deque()
        self._window_bytes = 0
        self._moved = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._last_error: IskanderError = Draining(
            "the server is stopping; send the rest to another", retry_after_ms=0
        )

    async def run(self) -> None:
        """Serve the stream until its end.

        Raises:
            IskanderError: What ended it, after all responses before that were written.
        """
        self._reader = asyncio.create_task(self._read_all())
        self._reader.add_done_callback(lambda _: self._moved.set())
        try:
            await self._write_all()
        finally:
            tasks = [self._reader, *(pending.answer for pending in self._window)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # What ended the stream knows this frame, and these know what ended it.
            self._reader = None
            self._window.clear()
            tasks.clear()

    def drain(self) -> None:
        """Read no more; what was accepted is still answered, then the stream ends."""
        if self._reader is not None:
            self._reader.cancel()

    def look_at_grant(self) -> None:
        """Read no more where the caller's token is not valid any more, and say so at the end."""
        try:
            self._call.grant.require_valid()
        except IskanderError as error:
            self._last_error = error
            if self._reader is not None:
                self._reader.cancel()

    async def _read_all(self) -> None:
        """Take requests until there are no more, as far as the window has room."""
        # No name for a message here: it would keep the last one for as long as the next takes.
        while self._enter(await self._call.read()):
            while self._is_full:
                self._moved.clear()
                await self._moved.wait()

    def _enter(self, raw: Message | None) -> bool:
        """Begin to answer a message; False at the end of them."""
        if raw is None:
            return False
        pending = _Pending(asyncio.create_task(self._answer(raw)))
        self._window.append(pending)
        self._hold(pending, len(raw))
        pending.answer.add_done_callback(partial(self._on_answer, pending))
        return True

    def _on_answer(self, pending: _Pending, answer: asyncio.Task[list[Message]]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            self._hold(pending, sum(map(len, answer.result())))
        self._moved.set()

    def _hold(self, pending: _Pending, count: int) -> None:
        pending.held_bytes += count
        self._window_bytes += count

    @property
    def _is_full(self) -> bool:
        return (
            len(self._window) >= self._limits.window_batches
            or self._window_bytes >= self._limits.window_bytes
        )

    async def _write_all(self) -> None:
        """Write each response when its turn comes, and end when no more will come."""
        assert self._reader is not None
        window = self._window
        while True:
            if window and window[0].answer.done():
                await self._call.write(*window[0].answer.result())
                self._window_bytes -= window.popleft().held_bytes
                self._moved.set()
            elif not window and self._reader.done():
                if self._reader.cancelled():
                    raise self._last_error
                return self._reader.result()
            else:
                self._moved.clear()
                await self._moved.wait()

    async def _answer(self, raw: Message) -> list[Message]:
        """The response to one request, or in its place what went wrong."""
        request_id = b""
        try:
            scanned = scan(raw, self._limits)
            request_id = scanned.id
            return in_stream(
                await self._inference.answer(scanned, self._terms, self._call, is_streamed=True)
            )
        except IskanderError as error:
            detach(error)
            if self._ends_on_error:
                raise
            return [error_response(error, request_id)]
        except Exception:
            log.exception("a request of a stream failed")
            failed = "the server failed; its log says why"
            if self._ends_on_error:
                raise IskanderError(failed) from None
            return [error_response(IskanderError(failed), request_id)]


def error_response(error: IskanderError, request_id: bytes) -> bytes:
    """An error as a ModelStreamInferResponse: its text, its request's id, and what programs read.

    The parameters have the names of the trailers that a call's status has.
    """
    message = oip_pb2.ModelStreamInferResponse(error_message=error.message)
    response = message.infer_response
    response.id = request_id.decode()
    response.parameters["iskander-code"].string_param = error.code
    response.parameters["iskander-fault"].string_param = error.fault.value
    response.parameters["iskander-retryable"].bool_param = error.retryable
    if error.retry_after_ms is not None:
        response.parameters["iskander-retry-after-ms"].int64_param = error.retry_after_ms
    raw: bytes = message.SerializeToString()
    return raw
