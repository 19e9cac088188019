"""ModelStreamInfer call: responses in the order of the requests.

A bounded window of requests is in flight. Reading pauses while the window is full, so a client that
stops reading blocks only its own stream. An error replaces the response of its request and the
stream continues, unless the client asks for statuses.

Runs on: gateway loop. Source: Triton's streaming extension of the Open Inference Protocol v2.
"""

from __future__ import annotations

import asyncio

from iskander._generated import oip_pb2
from iskander.config.schema import LimitsConfig
from iskander.errors import Draining, IskanderError, detach
from iskander.foundation.clock import now_ns
from iskander.foundation.logs import requests as log
from iskander.gateway.protocols.oip.infer import Inference
from iskander.gateway.protocols.oip.wire import in_stream, scan
from iskander.gateway.protocols.stream_terms import StreamTerms
from iskander.gateway.protocols.traced_call import MODEL_STREAM_INFER, TracedCall
from iskander.gateway.protocols.window import Window
from iskander.gateway.scheduling.tracing import Tracer
from iskander.gateway.transport.http2.call import Call, Message

STATUS_METADATA = ("triton_grpc_error", "true")
"""Metadata that ends a stream with the status of its first error."""


class InferStream:
    """One stream; its window has the limits of Flight's streams."""

    def __init__(
        self,
        call: Call,
        inference: Inference,
        limits: LimitsConfig,
        tracer: Tracer | None = None,
        *,
        uses_contexts: bool = False,
    ) -> None:
        self._call = call
        self._inference = inference
        self._limits = limits
        self._tracer = tracer
        self._terms = StreamTerms(
            call.metadata, call.deadline_ns, call.source, is_traced=uses_contexts
        )
        self._ends_on_error = STATUS_METADATA in call.metadata
        self._window = Window(limits)
        # Private memory of each request in flight: its message and its response.
        self._answers: dict[asyncio.Task[list[Message]], int] = {}
        self._changed = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._progress_ns = now_ns()
        self._given_way: IskanderError | None = None
        self._last_error: IskanderError = Draining(
            "the server is stopping; send further requests to another server", retry_after_ms=0
        )

    async def run(self) -> None:
        """Serve the stream until its end; raise its error after all earlier responses."""
        self._reader = asyncio.create_task(self._read_all())
        self._reader.add_done_callback(lambda _: self._changed.set())
        self._writer = asyncio.current_task()
        try:
            await self._write_all()
        except asyncio.CancelledError:
            if self._given_way is None:
                raise
            raise self._given_way from None
        finally:
            tasks = [self._reader, *self._answers]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # Breaks the reference cycle of this frame, the tasks and their error.
            self._reader = self._writer = None
            self._answers.clear()
            tasks.clear()

    def drain(self) -> None:
        """Stop reading; accepted requests are still answered, then the stream ends."""
        if self._reader is not None:
            self._reader.cancel()

    def idle_since_ns(self) -> int:
        """Start of the time without progress; 0 while a request is being answered."""
        stalled_ns = self._call.progress_ns
        return stalled_ns or (0 if self._answers else self._progress_ns)

    def give_way(self, error: IskanderError) -> None:
        """End the stream, which makes no progress, with an error."""
        if self._writer is not None:
            self._given_way = error
            self._writer.cancel()

    def check_grant(self) -> None:
        """If the token is no longer valid, drain the stream and end it with that error."""
        try:
            self._call.grant.require_valid()
        except IskanderError as error:
            self._last_error = error
            self.drain()

    async def _read_all(self) -> None:
        """Read requests while the window has capacity."""
        # Without a local variable, which would keep the last message during the next read.
        while self._enter(await self._call.read()):
            while self._window.is_full:
                self._changed.clear()
                await self._changed.wait()

    def _enter(self, raw: Message | None) -> bool:
        """Start to answer a message; return False at the end of the stream."""
        if raw is None:
            return False
        answer = asyncio.create_task(self._answer(raw))
        self._answers[answer] = len(raw)
        self._window.enter(len(raw))
        answer.add_done_callback(self._on_answer)
        return True

    def _on_answer(self, answer: asyncio.Task[list[Message]]) -> None:
        if answer in self._answers and not answer.cancelled() and answer.exception() is None:
            response_bytes = sum(map(len, answer.result()))
            self._answers[answer] += response_bytes
            self._window.add_memory(response_bytes)
        self._changed.set()

    @property
    def _first(self) -> asyncio.Task[list[Message]]:
        return next(iter(self._answers))

    async def _write_all(self) -> None:
        """Write each response in order, until the end of the stream."""
        assert self._reader is not None
        while True:  # No local variable for a task: its error would keep this frame.
            if self._answers and self._first.done():
                await self._call.write(*self._first.result())
                self._progress_ns = now_ns()
                self._window.leave(self._answers.pop(self._first))
                self._changed.set()
            elif not self._answers and self._reader.done():
                if self._reader.cancelled():
                    raise self._last_error
                return self._reader.result()
            else:
                self._changed.clear()
                await self._changed.wait()

    async def _answer(self, raw: Message) -> list[Message]:
        """Return the response to one request, or its error response."""
        request_id = b""
        try:
            with TracedCall(self._tracer, MODEL_STREAM_INFER, self._terms.trace) as traced:
                scanned = scan(raw, self._limits)
                request_id = scanned.id
                answer = self._inference.answer(
                    scanned, self._terms, self._call, traced, is_streamed=True
                )
                return in_stream(await answer)
        except IskanderError as error:
            detach(error)
            if self._ends_on_error:
                raise
            return [error_response(error, request_id)]
        except Exception as bug:
            log.inference_stream_failed(error=bug)
            failure = "internal server error; see the server's log"
            if self._ends_on_error:
                raise IskanderError(failure) from None
            return [error_response(IskanderError(failure), request_id)]


def error_response(error: IskanderError, request_id: bytes) -> bytes:
    """Encode an error as a ModelStreamInferResponse.

    The parameters have the names of the trailers in a call's status.
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
