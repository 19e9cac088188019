"""ModelInfer call without a task: submitted on arrival, answered by a callback.

Most calls wait for their results only. They are read, admitted and queued in the event loop
iteration of their arrival, and answered in that of their results. Others, such as those that need a
thread for large strings, get a task (`OipService.infer`).

Runs on: gateway loop. Source: Open Inference Protocol v2.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from iskander.errors import IskanderError
from iskander.gateway.protocols.oip.infer import Inference, ResolvedRequest
from iskander.gateway.protocols.oip.request import is_for_thread
from iskander.gateway.protocols.oip.wire import scan
from iskander.gateway.protocols.stream_terms import StreamTerms
from iskander.gateway.protocols.submit import RequestSubmitter
from iskander.gateway.protocols.traced_call import GONE, MODEL_INFER, TracedCall
from iskander.gateway.scheduling.request import Request
from iskander.gateway.transport.http2.call import Call, Message

Reject: TypeAlias = Callable[[Call, Exception], None]


class UnaryInfer:
    """One completely received ModelInfer call, and the caller of its request."""

    __slots__ = (
        "_call",
        "_inference",
        "_open_call",
        "_reject",
        "_request",
        "_resolved",
        "_submitter",
        "_traced",
    )

    def __init__(
        self, inference: Inference, submitter: RequestSubmitter, call: Call, reject: Reject
    ) -> None:
        self._inference = inference
        self._submitter = submitter
        self._call = call
        self._reject = reject
        self._open_call = submitter.open_call(caller=call.caller)
        self._request: Request | None = None
        self._resolved: ResolvedRequest | None = None
        tracer = submitter.tracer
        self._traced = None if tracer is None else TracedCall(tracer, MODEL_INFER)

    def begin(self, message: Message) -> bool:
        """Submit the request, or return False without effect if a thread must read it."""
        is_begun = False
        try:
            is_begun = self._begin(message)
        except IskanderError as error:
            self._end_trace(error)
            raise
        finally:
            if not is_begun:
                self._close()
        return is_begun

    def deliver(self, request: Request, results: bytes | memoryview) -> None:
        """Answer the call."""
        self._answer(request.rows, results)
        self._request = None  # Breaks a reference cycle.

    def fail(self, _: Request, error: IskanderError) -> None:
        """End the call with an error."""
        self._close()
        self._reject(self._call, error)
        self._end_trace(error)

    def _begin(self, message: Message) -> bool:
        call = self._call
        scanned = scan(message, self._submitter.limits)
        traced = self._traced
        terms = StreamTerms(
            call.metadata,
            call.deadline_ns,
            call.source,
            is_traced=self._submitter.uses_contexts,
        )
        if traced is not None:
            traced.context = terms.trace
        self._resolved = resolved = self._inference.find(scanned, terms, call.grant)
        parsed = resolved.cached.parsed
        if is_for_thread(parsed, scanned):
            return False
        tensors, charged_bytes = self._inference.tensors(resolved, scanned, call)
        if not tensors.rows:
            resolved.lane.require_rows_optional()
            self._answer(0, b"")
            return True
        call.receive()  # From here on only the request refers to the message.
        call.on_closed = self._on_gone
        merged, lane = terms.merged(parsed.terms), resolved.lane
        request = self._submitter.submit(
            lane,
            tensors,
            self,
            terms=merged,
            call_deadline_ns=terms.deadline_ns,
            traced=traced,
        )
        if call.on_closed is not None:  # Not rejected meanwhile.
            self._request = request
        if charged_bytes and request.lease is not None:  # Else it waits for arena space.
            call.release_memory(charged_bytes)
        return True

    def _answer(self, rows: int, results: bytes | memoryview) -> None:
        assert self._resolved is not None
        parts = self._inference.response(self._resolved, rows, results)
        self._call.on_closed = None
        if self._call.try_answer(parts):
            self._open_call.close()
            self._end_trace(None)
        else:
            self._open_call.lend(self._stalled_since_ns, partial(self._reject, self._call))
            self._call.task = writing = asyncio.get_running_loop().create_task(self._write(parts))
            # Not in the task: it never runs if cancelled before its first step.
            writing.add_done_callback(self._on_written)

    def _on_written(self, writing: asyncio.Task[None]) -> None:
        self._open_call.close()
        self._end_trace(GONE if writing.cancelled() else None)

    def _stalled_since_ns(self) -> int:
        return self._call.progress_ns

    async def _write(self, parts: list[Message]) -> None:
        await self._call.write(*parts)
        self._call.end()

    def _on_gone(self) -> None:
        """Withdraw the request: the client is gone, or the call's deadline has passed."""
        self._open_call.close()
        request, self._request = self._request, None
        if request is not None:
            self._submitter.withdraw(request)
        self._end_trace(GONE)

    def _end_trace(self, error: IskanderError | None) -> None:
        if self._traced is not None:
            self._traced.end(error)

    def _close(self) -> None:
        self._call.on_closed = None
        self._request = None
        self._open_call.close()
