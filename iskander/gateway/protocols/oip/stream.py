"""ModelStreamInfer call: responses in the order of the requests.

A bounded window of requests is in flight. Reading pauses while the window is full, so a client that
stops reading blocks only its own stream. An error replaces the response of its request and the
stream continues, unless the client asks for statuses.

Runs on: gateway loop. Source: Triton's streaming extension of the Open Inference Protocol v2.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from iskander._generated import oip_pb2
from iskander.errors import Draining, IskanderError, detach
from iskander.foundation.clock import now_ns
from iskander.foundation.logs import requests as log
from iskander.gateway.protocols.oip.infer import Inference
from iskander.gateway.protocols.oip.pending import PendingInfer
from iskander.gateway.protocols.oip.wire import in_stream
from iskander.gateway.protocols.stream_terms import StreamTerms
from iskander.gateway.protocols.traced_call import MODEL_STREAM_INFER
from iskander.gateway.protocols.window import Window
from iskander.gateway.transport.http2.call import Call, Message

STATUS_METADATA: Final = ("triton_grpc_error", "true")
"""Metadata that ends a stream with the status of its first error."""
FAILURE: Final = "internal server error; see the server's log"


class InferStream:
    """One stream; its window has the limits of Flight's streams."""

    def __init__(self, call: Call, inference: Inference) -> None:
        submitter = inference.submitter
        self.call = call
        self.inference = inference
        self.terms = StreamTerms(
            call.metadata, call.deadline_ns, call.source, is_traced=submitter.uses_contexts
        )
        self.ends_on_error = STATUS_METADATA in call.metadata
        self.window = Window(submitter.limits)
        self._requests: deque[StreamedInfer] = deque()
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
        self._reader = reader = asyncio.create_task(self._read_all())
        reader.add_done_callback(lambda _: self._changed.set())
        self._writer = asyncio.current_task()
        try:
            await self._write_all(reader)
        except asyncio.CancelledError:
            if self._given_way is None:
                raise
            raise self._given_way from None
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            for request in self._requests:
                request.withdraw()
            # Breaks the reference cycle of this frame, the tasks and their error.
            self._reader = self._writer = None
            self._requests.clear()

    def drain(self) -> None:
        """Stop reading; accepted requests are still answered, then the stream ends."""
        if self._reader is not None:
            self._reader.cancel()

    def idle_since_ns(self) -> int:
        """Start of the time without progress; 0 while a request is being answered."""
        stalled_ns = self.call.progress_ns
        return stalled_ns or (0 if self._requests else self._progress_ns)

    def give_way(self, error: IskanderError) -> None:
        """End the stream, which makes no progress, with an error."""
        if self._writer is not None:
            self._given_way = error
            self._writer.cancel()

    def check_grant(self) -> None:
        """If the token is no longer valid, drain the stream and end it with that error."""
        try:
            self.call.grant.require_valid()
        except IskanderError as error:
            self._last_error = error
            self.drain()

    def on_answered(self) -> None:
        """Continue to write: a request has its response or its error."""
        self._changed.set()

    async def _read_all(self) -> None:
        """Read requests while the window has capacity."""
        # Without a local variable, which would keep the last message during the next read.
        while self._enter(await self.call.read()):
            while self.window.is_full:
                self._changed.clear()
                await self._changed.wait()

    def _enter(self, message: Message | None) -> bool:
        """Submit the request of a message; return False at the end of the stream."""
        if message is None:
            return False
        request = StreamedInfer(self, len(message))
        self._requests.append(request)
        request.start(message)
        return True

    async def _write_all(self, reader: asyncio.Task[None]) -> None:
        """Write each response in order, until the end of the stream."""
        while True:  # No local variable for a request: its error would keep this frame.
            if self._requests and self._requests[0].is_answered:
                await self.call.write(*self._requests[0].response())
                self._progress_ns = now_ns()
                self.window.leave(self._requests.popleft().held_bytes)
                self._changed.set()
            elif not self._requests and reader.done():
                if reader.cancelled():
                    raise self._last_error
                return reader.result()
            else:
                self._changed.clear()
                await self._changed.wait()


class StreamedInfer(PendingInfer):
    """One request of a stream.

    Attributes:
        held_bytes: Private memory of the request in the window: its message and its response.
    """

    __slots__ = ("_error", "_parts", "_stream", "held_bytes")

    def __init__(self, stream: InferStream, message_bytes: int) -> None:
        super().__init__(stream.inference, stream.call, MODEL_STREAM_INFER, is_streamed=True)
        self._stream = stream
        self._parts: list[Message] | None = None
        self._error: IskanderError | None = None
        self.held_bytes = message_bytes
        stream.window.enter(message_bytes)

    @property
    def is_answered(self) -> bool:
        """Whether the response, or the error, can be written."""
        return self._parts is not None or self._error is not None

    def response(self) -> list[Message]:
        """Return the response in parts, or raise the error that ends the stream."""
        if self._error is not None:
            raise self._error
        assert self._parts is not None
        return self._parts

    def start(self, message: Message) -> None:
        """Submit the request; an error is its response."""
        try:
            self.begin(message, self._stream.terms)
        except Exception as error:
            if isinstance(error, IskanderError):
                detach(error)
            self.reject(error)

    def answer(self, parts: list[Message]) -> None:
        """See `PendingInfer`."""
        self.end_trace(None)
        self._respond(in_stream(parts))

    def reject(self, error: Exception) -> None:
        """See `PendingInfer`."""
        if not isinstance(error, IskanderError):
            log.inference_stream_failed(error=error)
            error = IskanderError(FAILURE)
        if self._stream.ends_on_error:
            self._error = error
            self._stream.on_answered()
        else:
            self._respond([error_response(error, self.request_id)])

    def _respond(self, parts: list[Message]) -> None:
        response_bytes = sum(map(len, parts))
        self._parts = parts
        self.held_bytes += response_bytes
        self._stream.window.add_memory(response_bytes)
        self._stream.on_answered()


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
