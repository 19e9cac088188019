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

from iskander.errors import Draining, IskanderError
from iskander.foundation.clock import now_ns
from iskander.gateway.protocols.oip.infer import Inference
from iskander.gateway.protocols.oip.streamed import StreamedInfer
from iskander.gateway.protocols.stream_terms import StreamTerms
from iskander.gateway.protocols.window import Window
from iskander.gateway.transport.http2.call import Call, Message

STATUS_METADATA: Final = ("triton_grpc_error", "true")
"""Metadata that ends a stream with the status of its first error."""


class InferStream:
    """One stream; its window has the limits of Flight's streams."""

    def __init__(self, call: Call, inference: Inference) -> None:
        submitter = inference.submitter
        self._call = call
        self._inference = inference
        self._terms = StreamTerms(
            call.metadata, call.deadline_ns, call.source, is_traced=submitter.uses_contexts
        )
        self._ends_on_error = STATUS_METADATA in call.metadata
        self._window = Window(submitter.limits)
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
        stalled_ns = self._call.progress_ns
        return stalled_ns or (0 if self._requests else self._progress_ns)

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

    def _enter(self, message: Message | None) -> bool:
        """Submit the request of a message; return False at the end of the stream."""
        if message is None:
            return False
        request = StreamedInfer(
            self._inference,
            self._call,
            self._window,
            self._changed.set,
            ends_on_error=self._ends_on_error,
        )
        self._requests.append(request)
        request.start(message, self._terms)
        return True

    async def _write_all(self, reader: asyncio.Task[None]) -> None:
        """Write each response in order, until the end of the stream."""
        while True:  # No local variable for a request: its error would keep this frame.
            if self._requests and self._requests[0].is_answered:
                await self._call.write(*self._requests[0].response())
                self._progress_ns = now_ns()
                self._window.leave(self._requests.popleft().held_bytes)
                self._changed.set()
            elif not self._requests and reader.done():
                if reader.cancelled():
                    raise self._last_error
                return reader.result()
            else:
                self._changed.clear()
                await self._changed.wait()
