"""ModelInfer call: one request, answered by a callback.

Runs on: gateway loop. Source: Open Inference Protocol v2.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from iskander.gateway.protocols.oip.infer import Inference
from iskander.gateway.protocols.oip.pending import PendingInfer
from iskander.gateway.protocols.stream_terms import StreamTerms
from iskander.gateway.protocols.traced_call import GONE, MODEL_INFER
from iskander.gateway.transport.http2.call import Call, Message

Reject: TypeAlias = Callable[[Call, Exception], None]


class UnaryInfer(PendingInfer):
    """The request of one ModelInfer call; `reject` ends a call with an error."""

    __slots__ = ("_open_call", "_reject")

    def __init__(self, inference: Inference, call: Call, reject: Reject) -> None:
        super().__init__(inference, call, MODEL_INFER, is_streamed=False)
        self._reject = reject
        self._open_call = inference.submitter.open_call(caller=call.caller)

    def start(self, message: Message) -> None:
        """Submit the request; raises `IskanderError` if it is rejected now."""
        call = self._call
        call.on_closed = self._on_gone
        try:
            terms = StreamTerms(
                call.metadata,
                call.deadline_ns,
                call.source,
                is_traced=self._inference.submitter.uses_contexts,
            )
            self.begin(message, terms)
        except BaseException:
            self._close()
            raise

    def answer(self, parts: list[Message]) -> None:
        """See `PendingInfer`."""
        call = self._call
        call.on_closed = None
        if call.try_answer(parts):
            self._open_call.close()
            self.end_trace(None)
        else:
            self._open_call.lend(self._stalled_since_ns, partial(self._reject, call))
            call.task = writing = asyncio.get_running_loop().create_task(self._write(parts))
            # Not in the task: it never runs if cancelled before its first step.
            writing.add_done_callback(self._on_written)

    def reject(self, error: Exception) -> None:
        """See `PendingInfer`."""
        self._close()
        self._reject(self._call, error)

    async def _write(self, parts: list[Message]) -> None:
        await self._call.write(*parts)
        self._call.end()

    def _on_written(self, writing: asyncio.Task[None]) -> None:
        self._open_call.close()
        self.end_trace(GONE if writing.cancelled() else None)

    def _stalled_since_ns(self) -> int:
        return self._call.progress_ns

    def _on_gone(self) -> None:
        """Withdraw the request: the client is gone, or the call's deadline has passed."""
        self._open_call.close()
        self.withdraw()

    def _close(self) -> None:
        self._call.on_closed = None
        self._open_call.close()
