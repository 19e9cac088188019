"""One ModelInfer call, from its message to its answer, without a task that would wait for it.

Most calls never wait for anything but their results: they are read, admitted and queued in the turn
in which they came, and answered in the turn in which the results did. What has to wait before, as
for large strings that a thread reads, goes by a task (`OipService.infer`).

Runs on: gateway loop. Source: Open Inference Protocol v2.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from iskander.errors import IskanderError
from iskander.protocols.oip.infer import Inference, ResolvedRequest
from iskander.protocols.oip.request import is_copied, is_for_thread
from iskander.protocols.oip.wire import scan
from iskander.protocols.stream_terms import StreamTerms
from iskander.protocols.submit import RequestSubmitter
from iskander.scheduling.request import Request
from iskander.transport.http2.call import Call, Message

Refuse: TypeAlias = Callable[[Call, Exception], None]


class UnaryInfer:
    """Whoever asks for one call's request.

    Args:
        inference: Knows the models, and how they are asked.
        desk: Has rows computed.
        call: Whose input is all there.
        refuse: Ends a call with an error.
    """

    __slots__ = ("_call", "_desk", "_held", "_inference", "_refuse", "_request", "_wanted")

    def __init__(
        self, inference: Inference, desk: RequestSubmitter, call: Call, refuse: Refuse
    ) -> None:
        self._inference = inference
        self._desk = desk
        self._call = call
        self._refuse = refuse
        self._held = desk.held(caller=call.caller)
        self._request: Request | None = None
        self._wanted: ResolvedRequest | None = None

    def begin(self, message: Message) -> bool:
        """Have the rows of the call's message computed.

        Returns:
            Whether that is done; False where a thread is to read it, and nothing has happened.

        Raises:
            IskanderError: Why there will be no answer.
        """
        try:
            if self._ask(message):
                return True
        except BaseException:
            self._leave()
            raise
        self._leave()
        return False

    def deliver(self, request: Request, results: bytes | memoryview) -> None:
        """Answer the call."""
        self._answer(request.rows, results)
        self._request = None  # They know each other, and would stay until a collection.

    def fail(self, _: Request, error: IskanderError) -> None:
        """End the call with an error."""
        self._leave()
        self._refuse(self._call, error)

    def _ask(self, message: Message) -> bool:
        call = self._call
        scanned = scan(message, self._desk.limits)
        terms = StreamTerms(call.metadata, call.deadline_ns, call.source)
        self._wanted = wanted = self._inference.find(scanned, terms, call.grant)
        if is_for_thread(wanted.known.asked, scanned):
            return False
        offered = self._inference.offered(wanted, scanned)
        if not offered.rows:
            self._answer(0, b"")
            return True
        copied_bytes = offered.size if is_copied(wanted.known.asked, scanned) else 0
        if copied_bytes:
            call.take_memory(copied_bytes)
        call.receive()  # Its tensors are known to the request alone from here on.
        call.on_gone = self._on_gone
        request = self._desk.begin(
            wanted.lane,
            offered,
            self,
            terms=terms.with_said(wanted.known.asked.said),
            call_deadline_ns=terms.deadline_ns,
        )
        if call.on_gone is not None:  # It was not refused meanwhile.
            self._request = request
        if copied_bytes and request.lease is not None:  # Else it waits for room in the arena.
            call.give_back_memory(copied_bytes)
        return True

    def _answer(self, rows: int, results: bytes | memoryview) -> None:
        assert self._wanted is not None
        parts = self._inference.response(self._wanted, rows, results)
        self._call.on_gone = None
        if self._call.try_answer(parts):
            self._held.close()
        else:
            self._call.task = writing = asyncio.get_running_loop().create_task(self._write(parts))
            # Not in the task itself: one that is cancelled before its first step never begins.
            writing.add_done_callback(lambda _: self._held.close())

    async def _write(self, parts: list[Message]) -> None:
        """Answer as the client takes it."""
        await self._call.write(*parts)
        self._call.end()

    def _on_gone(self) -> None:
        """The client has gone, or the call's deadline has passed."""
        self._held.close()
        request, self._request = self._request, None
        if request is not None:
            self._desk.withdraw(request)

    def _leave(self) -> None:
        self._call.on_gone = None
        self._request = None
        self._held.close()
