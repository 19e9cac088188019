"""Trace of a call with one request, from its arrival to the written response.

Flight streams and Inferential sessions have many requests, and record each by themselves.

Runs on: gateway loop.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final

from iskander.errors import Cancelled, IskanderError
from iskander.foundation.clock import now_ns
from iskander.gateway.scheduling.request import Request
from iskander.gateway.scheduling.tracing import Method, TraceContext, Tracer

EXCHANGE: Final = Method("grpc", "arrow.flight.protocol.FlightService/DoExchange")
MODEL_INFER: Final = Method("grpc", "inference.GRPCInferenceService/ModelInfer")
MODEL_STREAM_INFER: Final = Method("grpc", "inference.GRPCInferenceService/ModelStreamInfer")
HTTP_INFER: Final = Method("http", "/v2/models/{name}/infer")
OBSERVATION: Final = Method("zmq", "Observation")
GONE: Final = Cancelled("the caller is gone")


class TracedCall:
    """Records a call once; also a context manager, which ends with the error of its block.

    Attributes:
        context: Caller's span; used until the call has a request.
        request: The request, once it exists.
    """

    __slots__ = ("_arrived_ns", "_method", "_tracer", "context", "request")

    def __init__(
        self, tracer: Tracer | None, method: Method, context: TraceContext | None = None
    ) -> None:
        self._tracer = tracer
        self._method = method
        self._arrived_ns = now_ns()
        self.context = context
        self.request: Request | None = None

    def end(self, error: IskanderError | None = None) -> None:
        """Record the end of the call."""
        tracer, request = self._tracer, self.request
        self._tracer = self.request = None
        if tracer is None:
            return
        if request is not None:
            tracer.on_end(request, self._method, error)
        elif error is not None:
            tracer.on_refused(self._method, self.context, self._arrived_ns, error)

    def __enter__(self) -> TracedCall:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, IskanderError):
            self.end(error)
        else:
            self.end(IskanderError("internal error") if isinstance(error, Exception) else GONE)
