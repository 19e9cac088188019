"""One request of a ModelStreamInfer call: its place in the window, its response or error.

Runs on: gateway loop. Source: Triton's streaming extension of the Open Inference Protocol v2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from iskander._generated import oip_pb2
from iskander.errors import IskanderError, detach
from iskander.foundation.logs import requests as log
from iskander.gateway.protocols.oip.infer import Inference
from iskander.gateway.protocols.oip.pending import PendingInfer
from iskander.gateway.protocols.oip.wire import in_stream
from iskander.gateway.protocols.stream_terms import StreamTerms
from iskander.gateway.protocols.traced_call import MODEL_STREAM_INFER
from iskander.gateway.protocols.window import Window
from iskander.gateway.transport.http2.call import Call, Message

FAILURE: Final = "internal server error; see the server's log"


class StreamedInfer(PendingInfer):
    """One request of a stream.

    Attributes:
        held_bytes: Private memory of the request in the window: its message and its response.
    """

    __slots__ = ("_ends_on_error", "_error", "_on_answered", "_parts", "_window", "held_bytes")

    def __init__(
        self,
        inference: Inference,
        call: Call,
        window: Window,
        on_answered: Callable[[], None],
        *,
        ends_on_error: bool,
    ) -> None:
        """`on_answered` is called when the response can be written."""
        super().__init__(inference, call, MODEL_STREAM_INFER, is_streamed=True)
        self._window = window
        self._on_answered = on_answered
        self._ends_on_error = ends_on_error
        self._parts: list[Message] | None = None
        self._error: IskanderError | None = None
        self.held_bytes = 0

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

    def start(self, message: Message, terms: StreamTerms) -> None:
        """Enter the window, and submit the request; an error is its response."""
        self.held_bytes = len(message)
        self._window.enter(self.held_bytes)
        try:
            self.begin(message, terms)
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
        if self._ends_on_error:
            self._error = error
            self._on_answered()
        else:
            self._respond([error_response(error, self.request_id)])

    def _respond(self, parts: list[Message]) -> None:
        response_bytes = sum(map(len, parts))
        self._parts = parts
        self.held_bytes += response_bytes
        self._window.add_memory(response_bytes)
        self._on_answered()


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
