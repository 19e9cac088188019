"""The submitter: each request answered once, given up when its task is, refused by name, drained."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref

import numpy as np
import pytest
from support.input_arena import in_loop, turns
from support.submitter import LIMITS, office

from iskander.clock import now_ns
from iskander.config.schema import LimitsConfig
from iskander.errors import DeadlineExceeded, Draining, ExecutionFailed, NotReady, Overloaded
from iskander.memory.arena import GRAIN_BYTES
from iskander.protocols.submit import RequestSubmitter
from iskander.protocols.tensors import RequestTensors
from iskander.scheduling.request import Terms


@in_loop
async def test_the_answer_is_what_the_worker_wrote() -> None:
    async with office() as made:
        asked = made.ask()
        await turns()
        (request,) = made.dispatcher.submitted
        body = bytes(made.input_arena.segment.view[request.body_offset :][:32])
        assert np.frombuffer(body, np.int64).tolist() == [0, 1, 2, 3]

        made.dispatcher.answer(request, b"results")

        assert await asked == b"results"


@in_loop
async def test_terms_and_the_calls_deadline_go_with_the_request() -> None:
    async with office() as made:
        terms = Terms(client="robot", is_named=True, priority=0, budget_ms=60_000)
        deadline_ns = now_ns() + 1_000_000_000
        asked = made.ask(terms=terms, call_deadline_ns=deadline_ns)
        await turns()
        (request,) = made.dispatcher.submitted
        assert request.terms is terms and request.deadline_ns == deadline_ns
        made.dispatcher.answer(request, b"")
        await asked


@in_loop
async def test_no_rows_are_answered_at_once() -> None:
    async with office() as made:
        assert await made.ask(0) == b""
        assert not made.dispatcher.submitted


@in_loop
async def test_a_failure_is_raised_where_the_results_are_waited_for() -> None:
    async with office() as made:
        asked = made.ask()
        await turns()
        (request,) = made.dispatcher.submitted
        request.caller.fail(request, ExecutionFailed("no"))
        with pytest.raises(ExecutionFailed):
            await asked


@in_loop
async def test_a_task_that_is_cancelled_gives_its_request_up() -> None:
    async with office() as made:
        asked = made.ask()
        await turns()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        (request,) = made.dispatcher.submitted
        assert made.dispatcher.withdrawn == [request]
        # What comes too late meets nobody.
        request.caller.deliver(request, memoryview(b"late"))
        request.caller.fail(request, ExecutionFailed("late"))


@in_loop
async def test_where_the_arena_is_full_a_request_waits_for_room() -> None:
    async with office() as made:
        rows = (3 * GRAIN_BYTES - 1024) // 9 // 64 * 64
        first, second = made.ask(rows), made.ask(rows)
        await turns()
        assert len(made.dispatcher.submitted) == 1
        made.dispatcher.answer(made.dispatcher.submitted[0], b"first")
        await turns()
        made.dispatcher.answer(made.dispatcher.submitted[1], b"second")
        assert [await first, await second] == [b"first", b"second"]


@in_loop
async def test_what_the_lane_refuses_is_refused() -> None:
    async with office() as made:
        with pytest.raises(DeadlineExceeded):
            await made.ask(call_deadline_ns=1)
        made.lane.workers.clear()
        with pytest.raises(NotReady):
            await made.ask()


@in_loop
async def test_a_refused_request_keeps_its_tensors_no_longer() -> None:
    """Without a collection, which comes late where messages are few and large."""
    gc.collect()
    gc.disable()
    try:
        async with office() as made:
            ids = np.arange(4)
            held = weakref.ref(ids)
            wanted = RequestTensors(4, [memoryview(ids).cast("B"), memoryview(b"\x00")])
            with contextlib.suppress(DeadlineExceeded):
                await made.submitter.infer(made.lane, wanted, call_deadline_ns=1)
            del ids, wanted
            assert held() is None
    finally:
        gc.enable()


@in_loop
async def test_what_one_call_asks_keeps_no_other_call_out() -> None:
    """A stream has a window of its own, and is one of the calls that may be open."""
    async with office() as made:
        with made.submitter.open_call():
            asked = [made.ask() for _ in range(LIMITS.streams + 1)]
            await turns()
            with made.submitter.open_call():
                asked.append(made.ask())
                await turns()
            for request in made.dispatcher.submitted:
                made.dispatcher.answer(request, b"")
            assert [await each for each in asked] == [b""] * (LIMITS.streams + 2)


@in_loop
async def test_more_calls_than_may_be_open_are_refused() -> None:
    async with office() as made:
        with made.submitter.open_call(), made.submitter.open_call():
            with pytest.raises(Overloaded), made.submitter.open_call():
                raise AssertionError("a third call is held")
            assert len(made.submitter.calls) == 2
        with made.submitter.open_call():
            assert len(made.submitter.calls) == 1


@in_loop
async def test_a_drain_answers_what_was_accepted_and_takes_no_more() -> None:
    async with office() as made:
        told: list[str] = []
        with made.submitter.open_call(lambda: told.append("drain")):
            asked = made.ask()
            await turns()
            made.submitter.drain()
            assert told == ["drain"]
            with pytest.raises(Draining):
                await made.ask()
            with pytest.raises(Draining), made.submitter.open_call():
                raise AssertionError("a call is held")
            made.dispatcher.answer(made.dispatcher.submitted[0], b"results")
            assert await asked == b"results"


@in_loop
async def test_one_caller_leaves_places_for_others() -> None:
    """Of 32, four are for callers that hold less than four."""
    limits = LimitsConfig(streams=32)
    async with office() as made:
        submitter = RequestSubmitter(made.input_arena, made.dispatcher, limits)
        with contextlib.ExitStack() as stack:
            for _ in range(28):
                stack.enter_context(submitter.open_call(caller="greedy"))
            with pytest.raises(Overloaded, match=r"open requests of this caller .* limit 4 of 32"):
                stack.enter_context(submitter.open_call(caller="greedy"))
            for other in ("a", "b", "a"):
                stack.enter_context(submitter.open_call(caller=other))
            stack.enter_context(submitter.open_call())
            with pytest.raises(Overloaded, match="too many open requests: 32, limit 32"):
                stack.enter_context(submitter.open_call(caller="c"))
        for _ in range(3):
            with submitter.open_call(caller="greedy"):
                assert len(submitter.calls) == 1
        assert not submitter.calls
