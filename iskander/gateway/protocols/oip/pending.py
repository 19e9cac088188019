"""One request of the Open Inference Protocol over gRPC, from its message to its response.

    scan and parse  ->  find the model  ->  read the tensors  ->  submit  ->  response

A request needs no task: it is read and submitted in the event loop iteration of its arrival, and
answered in that of its results. Only large strings and typed contents are read in a thread.

Runs on: gateway loop. Source: Open Inference Protocol v2.
"""

from __future__ import annotations

import asyncio

from iskander.errors import IskanderError, detach
from iskander.gateway.protocols.oip.infer import Inference, ResolvedRequest
from iskander.gateway.protocols.oip.request import is_for_thread
from iskander.gateway.protocols.oip.wire import Scanned, scan
from iskander.gateway.protocols.stream_terms import StreamTerms
from iskander.gateway.protocols.tensors import RequestTensors
from iskander.gateway.protocols.traced_call import GONE, TracedCall
from iskander.gateway.scheduling.request import Request
from iskander.gateway.scheduling.tracing import Method
from iskander.gateway.transport.http2.call import Call, Message


class PendingInfer:
    """A request of a call, and the receiver of its results (`Caller`).

    After `begin`, one of `answer` and `reject` is called once, unless the request is withdrawn.

    Attributes:
        request_id: Id that the client gave; empty before the message is scanned.
    """

    __slots__ = (
        "_call",
        "_charged_bytes",
        "_inference",
        "_is_over",
        "_is_streamed",
        "_reading",
        "_request",
        "_resolved",
        "_traced",
        "request_id",
    )

    def __init__(
        self, inference: Inference, call: Call, method: Method, *, is_streamed: bool
    ) -> None:
        self._inference = inference
        self._call = call
        self._is_streamed = is_streamed
        self._charged_bytes = 0
        self._is_over = False
        self._reading: asyncio.Task[None] | None = None
        self._request: Request | None = None
        self._resolved: ResolvedRequest | None = None
        tracer = inference.submitter.tracer
        self._traced = None if tracer is None else TracedCall(tracer, method)
        self.request_id = b""

    def answer(self, parts: list[Message]) -> None:
        """Take the response, a ModelInferResponse in parts; call `end_trace` once it is written."""
        raise NotImplementedError

    def reject(self, error: Exception) -> None:
        """Take the error; one that is no `IskanderError` is a bug."""
        raise NotImplementedError

    def begin(self, message: Message, terms: StreamTerms) -> None:
        """Submit the request.

        Raises:
            IskanderError: It is rejected now; neither `answer` nor `reject` is called.
        """
        try:
            self._begin(message, terms)
        except BaseException as error:
            self._finish()
            if isinstance(error, IskanderError):
                self._count(error)
                self.end_trace(error)
            raise

    def withdraw(self) -> None:
        """End a request whose response nobody needs; idempotent."""
        if self._is_over:
            return
        request = self._request
        self._finish()
        if request is not None:
            self._inference.submitter.withdraw(request)
        self.end_trace(GONE)

    def deliver(self, request: Request, results: bytes | memoryview) -> None:
        """Answer with the results of the worker."""
        if not self._is_over:
            self._answer(request.rows, results)

    def fail(self, _: Request, error: IskanderError) -> None:
        """Reject the request with an error of the queue or of the worker."""
        self._fail(error)

    def end_trace(self, error: IskanderError | None) -> None:
        """Record the end of the request, if it is traced."""
        if self._traced is not None:
            self._traced.end(error)

    def _begin(self, message: Message, terms: StreamTerms) -> None:
        inference, call = self._inference, self._call
        scanned = scan(message, inference.submitter.limits)
        self.request_id = scanned.id
        if self._traced is not None:
            self._traced.context = terms.trace
        self._resolved = resolved = inference.find(scanned, terms, call.grant)
        if is_for_thread(resolved.cached.parsed, scanned):
            self._charged_bytes = inference.charge_reading(resolved, scanned, call)
            self._reading = asyncio.get_running_loop().create_task(self._read(scanned, terms))
            return
        tensors, self._charged_bytes = inference.tensors(resolved, scanned, call)
        self._submit(tensors, terms)

    async def _read(self, scanned: Scanned, terms: StreamTerms) -> None:
        """Read the tensors in a thread, then submit the request."""
        assert self._resolved is not None
        try:
            tensors = await self._inference.tensors_by_thread(self._resolved, scanned)
            self._reading = None  # Breaks a reference cycle.
            self._submit(tensors, terms)
        except Exception as error:
            self._fail(error)

    def _submit(self, tensors: RequestTensors, terms: StreamTerms) -> None:
        resolved, submitter = self._resolved, self._inference.submitter
        assert resolved is not None
        if not tensors.rows:
            submitter.require_running()
            resolved.lane.require_rows_optional()
            return self._answer(0, b"")
        request = submitter.submit(
            resolved.lane,
            tensors,
            self,
            terms=terms.merged(resolved.cached.parsed.terms),
            call_deadline_ns=terms.deadline_ns,
            traced=self._traced,
        )
        if not self._is_over:  # Not rejected meanwhile.
            self._request = request
        if request.lease is not None:  # Else it waits for arena space, and its tensors are needed.
            self._release_memory()

    def _answer(self, rows: int, results: bytes | memoryview) -> None:
        assert self._resolved is not None
        parts = self._inference.response(
            self._resolved, rows, results, is_streamed=self._is_streamed
        )
        self._finish()
        self.answer(parts)

    def _fail(self, error: Exception) -> None:
        if self._is_over:
            return
        self._finish()
        if isinstance(error, IskanderError):
            self._count(error)
            self.end_trace(error)
            detach(error)
        self.reject(error)

    def _count(self, error: IskanderError) -> None:
        if self._resolved is not None:
            self._resolved.lane.count_refused(error)

    def _finish(self) -> None:
        """Release everything that only an unanswered request needs."""
        self._is_over = True
        self._request = None  # Breaks a reference cycle.
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
        self._release_memory()

    def _release_memory(self) -> None:
        charged_bytes, self._charged_bytes = self._charged_bytes, 0
        if charged_bytes:
            self._call.release_memory(charged_bytes)
