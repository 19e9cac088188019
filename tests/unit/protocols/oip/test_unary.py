"""A ModelInfer call without a task: answered once, given up with its client, nothing kept."""

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
from support.submitter import SubmitterHarness, office

from iskander._generated import oip_pb2
from iskander.errors import ExecutionFailed, IskanderError
from iskander.memory.arena import GRAIN_BYTES
from iskander.protocols.grpc_errors import rpc_error
from iskander.protocols.oip.infer import Inference
from iskander.protocols.oip.unary import UnaryInfer
from iskander.repository.models import Models
from iskander.scheduling.request import Request
from iskander.transport.http2.call import Call

GRPC_OK, RESOURCE_EXHAUSTED, INTERNAL = 0, 8, 13
SCORES = np.arange(4, dtype=np.float32)
LARGE_ROWS = (3 * GRAIN_BYTES - 1024) // 9 // 64 * 64
"""Two of these have no room in the arena."""


class Server:
    """A connection whose calls are answered at once where they can be."""

    def __init__(self, made: SubmitterHarness) -> None:
        models = Models()
        models.serve(made.lane)
        self.office = made
        self.inference = Inference(models, made.submitter)
        self.peer = Peer()
        self.peer.host.serve_inline = self._at_once
        self.begun: list[weakref.ref[UnaryInferKept]] = []

    @property
    def submitted(self) -> list[Request]:
        return self.office.dispatcher.submitted

    def ask(
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
            model_name=self.office.lane.model.name, inputs=inputs, raw_input_contents=raw
        )
        whole = message(request.SerializeToString())
        pieces = [whole[at : at + 16_384] for at in range(0, len(whole), 16_384)]
        self.peer.open(stream_id)
        frames = [data(stream_id, piece) for piece in pieces[:-1]]
        self.peer.say(*frames, data(stream_id, pieces[-1], END_STREAM), cut=cut)

    def ask_whole(
        self, stream_id: int = 1, rows: int = 4, then: bytes = b"", *, is_typed: bool = False
    ) -> None:
        """All of a call in one read, and what comes with it."""
        said: list[bytes] = []
        say, self.peer.say = self.peer.say, lambda *parts, **_: said.extend(parts)  # type: ignore[method-assign]
        self.ask(stream_id, rows, is_typed=is_typed)
        self.peer.say = say  # type: ignore[method-assign]
        self.peer.say(*said, then)

    def refuse_at_once(self) -> None:
        """Fail every request from here on while it is put into the queue."""

        def submit(request: Request) -> None:
            self.office.input_arena.give_back(request)
            request.caller.fail(request, ExecutionFailed("at once"))

        self.office.dispatcher.submit = submit  # type: ignore[method-assign]

    def response(self, stream_id: int = 1) -> oip_pb2.ModelInferResponse:
        (raw,) = self.peer.answer(stream_id).messages
        return oip_pb2.ModelInferResponse.FromString(raw)

    def _at_once(self, call: Call) -> bool:
        whole = call.whole
        if whole is None:
            return False
        try:
            unary = UnaryInferKept(self.inference, self.office.submitter, call, refuse)
            self.begun.append(weakref.ref(unary))
            return unary.begin(whole)
        except IskanderError as error:
            refuse(call, error)
            return True


class UnaryInferKept(UnaryInfer):
    """One that can be asked whether it is still there."""

    __slots__ = ("__weakref__",)


def refuse(call: Call, error: Exception) -> None:
    assert isinstance(error, IskanderError)
    why = rpc_error(error)
    call.end(why.status, why.message, why.trailers)


@contextlib.asynccontextmanager
async def server() -> AsyncIterator[Server]:
    async with office() as made:
        yield Server(made)


@in_loop
async def test_a_whole_call_is_asked_and_answered_without_a_task() -> None:
    async with server() as served:
        served.ask_whole()
        (request,) = served.submitted
        (call,) = served.peer.calls.values()
        assert call.whole is None, "the message is kept beside its tensors"
        served.office.dispatcher.answer(request, SCORES.tobytes())
        assert served.peer.answer().status == GRPC_OK
        assert served.response().raw_output_contents == [SCORES.tobytes()]
        assert not served.peer.served and not served.peer.calls


@in_loop
async def test_a_client_with_a_smaller_table_is_told_before_the_first_answer() -> None:
    """A strict reader breaks the connection where the first block does not say so."""
    async with server() as served:
        served.peer.say(settings(table=0))
        for stream_id in (1, 3):
            served.ask_whole(stream_id)
            served.office.dispatcher.answer(served.submitted[-1], SCORES.tobytes())
            await turns()
            assert served.peer.answer(stream_id).status == GRPC_OK
        first, _, *others = (each.payload for each in served.peer.heard(HEADERS))
        assert first.startswith(b"\x20")
        assert not any(other.startswith(b"\x20") for other in others)


@in_loop
async def test_a_call_that_comes_in_pieces_has_a_task() -> None:
    async with server() as served:
        served.ask(cut=20)
        await turns()
        assert len(served.peer.served) == 1 and not served.begun


@in_loop
async def test_no_rows_are_answered_at_once() -> None:
    async with server() as served:
        served.ask_whole(rows=0)
        assert served.peer.answer().status == GRPC_OK and not served.submitted


@in_loop
async def test_what_the_worker_failed_at_ends_the_call() -> None:
    async with server() as served:
        served.ask_whole()
        (request,) = served.submitted
        served.office.input_arena.give_back(request)
        request.caller.fail(request, ExecutionFailed("no such user"))
        answer = served.peer.answer()
        assert (answer.status, answer.blocks[-1]["grpc-message"]) == (INTERNAL, "no such user")


@in_loop
async def test_what_is_refused_while_it_is_queued_ends_the_call_once() -> None:
    async with server() as served:
        dispatcher = served.office.dispatcher
        served.refuse_at_once()
        served.ask_whole()
        assert served.peer.answer().blocks[-1]["grpc-message"] == "at once"
        assert not served.office.submitter.calls and not dispatcher.withdrawn


@in_loop
async def test_a_client_that_resets_its_call_gives_its_request_up() -> None:
    """In the read that brought the call it has none yet, and is not begun."""
    async with server() as served:
        served.ask_whole(3, then=rst_stream(3))
        await turns()
        assert not served.submitted and not served.peer.served and not served.office.submitter.calls
        served.ask_whole(5)
        (request,) = served.submitted
        served.peer.say(rst_stream(5))
        assert served.office.dispatcher.withdrawn == [request]
        # What comes too late meets nobody.
        request.caller.deliver(request, SCORES.tobytes())
        request.caller.fail(request, ExecutionFailed("late"))
        assert not served.peer.heard(RST_STREAM) and served.peer.sent_bytes() == 0


@in_loop
async def test_a_call_waits_for_room_in_the_arena() -> None:
    async with server() as served:
        for stream_id in (1, 3):
            served.ask_whole(stream_id, LARGE_ROWS)
        await turns()
        assert len(served.submitted) == 1
        results = bytes(4 * LARGE_ROWS)
        served.office.dispatcher.answer(served.submitted[0], results)
        await turns()
        served.office.dispatcher.answer(served.submitted[1], results)
        await turns()
        assert served.peer.answer(1).status == GRPC_OK


@in_loop
async def test_typed_tensors_that_wait_for_room_are_charged_until_they_are_answered() -> None:
    async with server() as served:
        budget = served.peer.host.budget
        for stream_id in (1, 3):
            served.ask_whole(stream_id, LARGE_ROWS, is_typed=True)
            assert budget.used_bytes == (0 if stream_id == 1 else LARGE_ROWS * 8 + LARGE_ROWS // 8)
        results = bytes(4 * LARGE_ROWS)
        for place in range(2):
            await turns()
            served.office.dispatcher.answer(served.submitted[place], results)
        assert budget.used_bytes == 0


@in_loop
async def test_typed_tensors_for_which_there_is_no_memory_are_refused() -> None:
    async with server() as served:
        served.peer.host.budget.limit_bytes = 100
        served.ask_whole(1, 64, is_typed=True)
        assert served.peer.answer(1).status == RESOURCE_EXHAUSTED
        assert not served.submitted and served.peer.host.budget.used_bytes == 0


@pytest.mark.parametrize("turns_before", [0, 1])
@in_loop
async def test_a_call_that_is_reset_while_it_waits_for_room_leaves_nothing(
    turns_before: int,
) -> None:
    """Also where the task that waits has not begun to."""
    async with server() as served:
        served.ask_whole(1, LARGE_ROWS)
        served.ask_whole(3, LARGE_ROWS)
        for _ in range(turns_before):
            await turns()
        served.peer.say(rst_stream(3))
        await turns()
        assert len(served.office.submitter.calls) == 1 and not served.office.submitter._entering
        (request,) = served.submitted
        served.peer.say(rst_stream(1))
        assert served.office.dispatcher.withdrawn[-1] is request


@pytest.mark.parametrize("turns_before", [0, 1])
@in_loop
async def test_an_answer_waits_for_the_clients_window(turns_before: int) -> None:
    """The call is held until it is written, or its client has gone, whenever that is."""
    async with server() as served:
        rows = 40
        served.peer.say(settings(window=100))
        served.ask_whole(1, rows)
        served.ask_whole(3, rows)
        for request in list(served.submitted):
            served.office.dispatcher.answer(request, bytes(4 * rows))
        for _ in range(turns_before):
            await turns()
        assert len(served.office.submitter.calls) == 2
        served.peer.say(rst_stream(3))
        await turns()
        assert len(served.office.submitter.calls) == 1
        served.peer.say(window_update(0, 1 << 20), window_update(1, 1 << 20))
        await turns()
        assert served.peer.answer(1).status == GRPC_OK
        assert served.response(1).raw_output_contents == [bytes(4 * rows)]


@in_loop
async def test_results_that_cannot_be_told_end_the_call() -> None:
    async with server() as served:
        served.ask_whole()
        (request,) = served.submitted
        with pytest.raises(TypeError):
            served.office.dispatcher.answer(request, None)  # type: ignore[arg-type]
        request.caller.fail(request, IskanderError("the server failed to take the results"))
        assert served.peer.answer().status == INTERNAL


@in_loop
async def test_a_call_that_is_over_is_kept_by_nothing() -> None:
    """Without a collection, which comes late where messages are few and large."""
    gc.collect()
    gc.disable()
    try:
        async with server() as served:
            served.ask_whole(1)
            served.office.dispatcher.answer(served.submitted[0], SCORES.tobytes())
            served.ask_whole(3)
            served.office.input_arena.give_back(served.submitted[1])
            served.submitted[1].caller.fail(served.submitted[1], ExecutionFailed("no"))
            served.ask_whole(5)
            served.peer.say(rst_stream(5))
            served.refuse_at_once()
            served.ask_whole(7)
            served.submitted.clear()
            served.office.dispatcher.withdrawn.clear()
            for request in list(served.office.lane.queue):
                served.office.lane.queue.remove(request)
            del request
            assert [each() for each in served.begun] == [None] * 4
    finally:
        gc.enable()


@in_loop
async def test_more_calls_than_may_be_open_are_refused_unread() -> None:
    async with server() as served:
        for stream_id in (1, 3, 5):
            served.ask_whole(stream_id)
        assert len(served.submitted) == 2
        assert served.peer.answer(5).status == RESOURCE_EXHAUSTED
        for request in served.submitted:
            served.office.dispatcher.answer(request, SCORES.tobytes())
        await asyncio.sleep(0)
