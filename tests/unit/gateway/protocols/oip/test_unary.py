"""ModelInfer calls without a task: response, withdrawal, limits and memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from support.http2 import (
    END_STREAM,
    HEADERS,
    RST_STREAM,
    Peer,
    data,
    message,
    rst_stream,
    settings,
    window_update,
)
from support.input_arena import in_loop, turns
from support.submitter import SubmitterHarness, submitter_harness

from iskander._generated import oip_pb2
from iskander.errors import ExecutionFailed, IskanderError
from iskander.gateway.protocols.grpc_errors import rpc_error
from iskander.gateway.protocols.oip.infer import Inference
from iskander.gateway.protocols.oip.unary import UnaryInfer
from iskander.gateway.repository.models import Models
from iskander.gateway.scheduling.request import Request
from iskander.gateway.transport.http2.call import Call
from iskander.interprocess.memory.arena import GRAIN_BYTES

GRPC_OK, RESOURCE_EXHAUSTED, INTERNAL = 0, 8, 13
SCORES = np.arange(4, dtype=np.float32)
LARGE_ROWS = (3 * GRAIN_BYTES - 1024) // 9 // 64 * 64
"""Two requests of this size exceed the arena."""


class Server:
    """A connection that serves complete calls without a task."""

    def __init__(self, harness: SubmitterHarness) -> None:
        models = Models()
        models.serve(harness.lane)
        self.harness = harness
        self.inference = Inference(models, harness.submitter)
        self.peer = Peer()
        self.peer.host.serve_inline = self._serve_inline
        self.started: list[weakref.ref[WeakUnaryInfer]] = []

    @property
    def submitted(self) -> list[Request]:
        return self.harness.dispatcher.submitted

    def send_call(
        self, stream_id: int = 1, rows: int = 4, *, cut: int = 1 << 20, is_typed: bool = False
    ) -> None:
        inputs: list[Any] = [
            {"name": "id", "datatype": "INT64", "shape": [rows]},
            {"name": "flag", "datatype": "BOOL", "shape": [rows]},
        ]
        raw = [np.arange(rows).tobytes(), bytes(rows)]
        if is_typed:
            inputs[0]["contents"] = {"int64_contents": range(rows)}
            inputs[1]["contents"] = {"bool_contents": [False] * rows}
            raw = []
        request = oip_pb2.ModelInferRequest(
            model_name=self.harness.lane.model.name, inputs=inputs, raw_input_contents=raw
        )
        message_bytes = message(request.SerializeToString())
        pieces = [message_bytes[at : at + 16_384] for at in range(0, len(message_bytes), 16_384)]
        self.peer.open(stream_id)
        frames = [data(stream_id, piece) for piece in pieces[:-1]]
        self.peer.feed(*frames, data(stream_id, pieces[-1], END_STREAM), cut=cut)

    def send_complete_call(
        self, stream_id: int = 1, rows: int = 4, then: bytes = b"", *, is_typed: bool = False
    ) -> None:
        """Send a complete call, followed by `then`, in one read."""
        frames: list[bytes] = []
        feed = self.peer.feed
        self.peer.feed = lambda *parts, **_: frames.extend(parts)  # type: ignore[method-assign]
        self.send_call(stream_id, rows, is_typed=is_typed)
        self.peer.feed = feed  # type: ignore[method-assign]
        self.peer.feed(*frames, then)

    def reject_immediately(self) -> None:
        """Fail every later request when it is queued."""

        def submit(request: Request, victims: list[Request]) -> None:
            self.harness.input_arena.give_back(request)
            request.caller.fail(request, ExecutionFailed("at once"))

        self.harness.dispatcher.submit = submit  # type: ignore[method-assign]

    def response(self, stream_id: int = 1) -> oip_pb2.ModelInferResponse:
        (raw,) = self.peer.answer(stream_id).messages
        return oip_pb2.ModelInferResponse.FromString(raw)

    def _serve_inline(self, call: Call) -> bool:
        complete = call.whole
        if complete is None:
            return False
        try:
            call.receive()
            unary = WeakUnaryInfer(self.inference, call, reject)
            self.started.append(weakref.ref(unary))
            unary.start(complete)
            return True
        except IskanderError as error:
            reject(call, error)
            return True


class WeakUnaryInfer(UnaryInfer):
    """A call that supports weak references."""

    __slots__ = ("__weakref__",)


def reject(call: Call, error: Exception) -> None:
    assert isinstance(error, IskanderError)
    failure = rpc_error(error)
    call.end(failure.status, failure.message, failure.trailers)


@contextlib.asynccontextmanager
async def open_server() -> AsyncIterator[Server]:
    async with submitter_harness() as harness:
        yield Server(harness)


@in_loop
async def test_complete_call_is_answered_without_a_task() -> None:
    async with open_server() as server:
        server.send_complete_call()
        (request,) = server.submitted
        (call,) = server.peer.calls.values()
        assert call.whole is None, "the message is kept in addition to its tensors"
        server.harness.dispatcher.answer(request, SCORES.tobytes())
        assert server.peer.answer().status == GRPC_OK
        assert server.response().raw_output_contents == [SCORES.tobytes()]
        assert not server.peer.served and not server.peer.calls


@in_loop
async def test_smaller_header_table_is_announced_in_the_first_response() -> None:
    """A strict decoder closes the connection if the first block has no size update."""
    async with open_server() as server:
        server.peer.feed(settings(table=0))
        for stream_id in (1, 3):
            server.send_complete_call(stream_id)
            server.harness.dispatcher.answer(server.submitted[-1], SCORES.tobytes())
            await turns()
            assert server.peer.answer(stream_id).status == GRPC_OK
        first, _, *others = (each.payload for each in server.peer.frames_of(HEADERS))
        assert first.startswith(b"\x20")
        assert not any(other.startswith(b"\x20") for other in others)


@in_loop
async def test_call_in_pieces_is_served_by_a_task() -> None:
    async with open_server() as server:
        server.send_call(cut=20)
        await turns()
        assert len(server.peer.served) == 1 and not server.started


@in_loop
async def test_call_outlives_the_task_that_submitted_it() -> None:
    async with open_server() as server:

        async def serve(call: Call) -> None:
            message = await call.read()
            assert message is not None
            call.task = None
            UnaryInfer(server.inference, call, reject).start(message)

        server.peer.host.serve = serve
        server.send_call(cut=20)
        await turns()
        (request,) = server.submitted
        assert server.peer.calls and not server.peer.frames_of(RST_STREAM)
        server.harness.dispatcher.answer(request, SCORES.tobytes())
        assert server.peer.answer().status == GRPC_OK and not server.peer.calls


@in_loop
async def test_reset_while_a_thread_reads_submits_nothing() -> None:
    async with open_server() as server:
        server.send_complete_call(1, 300_000, is_typed=True)
        assert server.peer.host.budget.used_bytes > 300_000 and not server.submitted
        server.peer.feed(rst_stream(1))
        assert not server.harness.submitter.calls and server.peer.host.budget.used_bytes == 0
        await asyncio.sleep(0.1)
        assert not server.submitted


@in_loop
async def test_zero_rows_are_answered_immediately() -> None:
    async with open_server() as server:
        server.send_complete_call(rows=0)
        assert server.peer.answer().status == GRPC_OK and not server.submitted


@in_loop
async def test_worker_failure_ends_the_call() -> None:
    async with open_server() as server:
        server.send_complete_call()
        (request,) = server.submitted
        server.harness.input_arena.give_back(request)
        request.caller.fail(request, ExecutionFailed("no such user"))
        response = server.peer.answer()
        assert (response.status, response.blocks[-1]["grpc-message"]) == (INTERNAL, "no such user")


@in_loop
async def test_rejection_during_queueing_ends_the_call_once() -> None:
    async with open_server() as server:
        dispatcher = server.harness.dispatcher
        server.reject_immediately()
        server.send_complete_call()
        assert server.peer.answer().blocks[-1]["grpc-message"] == "at once"
        assert not server.harness.submitter.calls and not dispatcher.withdrawn


@in_loop
async def test_reset_withdraws_the_request() -> None:
    """A reset in the same read as the call prevents the request."""
    async with open_server() as server:
        server.send_complete_call(3, then=rst_stream(3))
        await turns()
        assert (
            not server.submitted and not server.peer.served and not server.harness.submitter.calls
        )
        server.send_complete_call(5)
        (request,) = server.submitted
        server.peer.feed(rst_stream(5))
        assert server.harness.dispatcher.withdrawn == [request]
        # Late responses are ignored.
        request.caller.deliver(request, SCORES.tobytes())
        request.caller.fail(request, ExecutionFailed("late"))
        assert not server.peer.frames_of(RST_STREAM) and server.peer.sent_bytes() == 0


@in_loop
async def test_call_waits_for_space_in_the_arena() -> None:
    async with open_server() as server:
        for stream_id in (1, 3):
            server.send_complete_call(stream_id, LARGE_ROWS)
        await turns()
        assert len(server.submitted) == 1
        results = bytes(4 * LARGE_ROWS)
        server.harness.dispatcher.answer(server.submitted[0], results)
        await turns()
        server.harness.dispatcher.answer(server.submitted[1], results)
        await turns()
        assert server.peer.answer(1).status == GRPC_OK


@in_loop
async def test_waiting_typed_tensors_are_charged_until_the_response() -> None:
    async with open_server() as server:
        budget = server.peer.host.budget
        for stream_id in (1, 3):
            server.send_complete_call(stream_id, LARGE_ROWS, is_typed=True)
            assert budget.used_bytes == (0 if stream_id == 1 else LARGE_ROWS * 8 + LARGE_ROWS // 8)
        results = bytes(4 * LARGE_ROWS)
        for index in range(2):
            await turns()
            server.harness.dispatcher.answer(server.submitted[index], results)
        assert budget.used_bytes == 0


@in_loop
async def test_typed_tensors_above_the_budget_are_rejected() -> None:
    async with open_server() as server:
        server.peer.host.budget.limit_bytes = 100
        server.send_complete_call(1, 64, is_typed=True)
        assert server.peer.answer(1).status == RESOURCE_EXHAUSTED
        assert not server.submitted and server.peer.host.budget.used_bytes == 0


@pytest.mark.parametrize("turns_before", [0, 1])
@in_loop
async def test_reset_of_a_waiting_call_frees_it(
    turns_before: int,
) -> None:
    """Also before the waiting task starts."""
    async with open_server() as server:
        server.send_complete_call(1, LARGE_ROWS)
        server.send_complete_call(3, LARGE_ROWS)
        for _ in range(turns_before):
            await turns()
        server.peer.feed(rst_stream(3))
        await turns()
        assert len(server.harness.submitter.calls) == 1 and not server.harness.submitter._entering
        (request,) = server.submitted
        server.peer.feed(rst_stream(1))
        assert server.harness.dispatcher.withdrawn[-1] is request


@pytest.mark.parametrize("turns_before", [0, 1])
@in_loop
async def test_response_waits_for_the_client_window(turns_before: int) -> None:
    """The call stays open until the response is written or the client resets it."""
    async with open_server() as server:
        rows = 40
        server.peer.feed(settings(window=100))
        server.send_complete_call(1, rows)
        server.send_complete_call(3, rows)
        for request in list(server.submitted):
            server.harness.dispatcher.answer(request, bytes(4 * rows))
        for _ in range(turns_before):
            await turns()
        assert len(server.harness.submitter.calls) == 2
        server.peer.feed(rst_stream(3))
        await turns()
        assert len(server.harness.submitter.calls) == 1
        server.peer.feed(window_update(0, 1 << 20), window_update(1, 1 << 20))
        await turns()
        assert server.peer.answer(1).status == GRPC_OK
        assert server.response(1).raw_output_contents == [bytes(4 * rows)]


@in_loop
async def test_invalid_results_end_the_call() -> None:
    async with open_server() as server:
        server.send_complete_call()
        (request,) = server.submitted
        with pytest.raises(TypeError):
            server.harness.dispatcher.answer(request, None)  # type: ignore[arg-type]
        request.caller.fail(request, IskanderError("the server failed to take the results"))
        assert server.peer.answer().status == INTERNAL


@in_loop
async def test_finished_call_is_freed() -> None:
    """Without a garbage collection, which is rare with few large messages."""
    gc.collect()
    gc.disable()
    try:
        async with open_server() as server:
            server.send_complete_call(1)
            server.harness.dispatcher.answer(server.submitted[0], SCORES.tobytes())
            server.send_complete_call(3)
            server.harness.input_arena.give_back(server.submitted[1])
            server.submitted[1].caller.fail(server.submitted[1], ExecutionFailed("no"))
            server.send_complete_call(5)
            server.peer.feed(rst_stream(5))
            server.reject_immediately()
            server.send_complete_call(7)
            server.submitted.clear()
            server.harness.dispatcher.withdrawn.clear()
            for request in list(server.harness.lane.queue):
                server.harness.lane.queue.remove(request)
            del request
            assert [each() for each in server.started] == [None] * 4
    finally:
        gc.enable()


@in_loop
async def test_calls_above_the_limit_are_rejected_unread() -> None:
    async with open_server() as server:
        for stream_id in (1, 3, 5):
            server.send_complete_call(stream_id)
        assert len(server.submitted) == 2
        assert server.peer.answer(5).status == RESOURCE_EXHAUSTED
        for request in server.submitted:
            server.harness.dispatcher.answer(request, SCORES.tobytes())
        await asyncio.sleep(0)
