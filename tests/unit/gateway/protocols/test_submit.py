"""Request submitter: results, withdrawal, rejection, call limits and drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref

import numpy as np
import pytest
from support.input_arena import in_loop, turns
from support.submitter import LIMITS, submitter_harness

from iskander.config.schema import LimitsConfig
from iskander.errors import (
    DeadlineExceeded,
    Draining,
    ExecutionFailed,
    IskanderError,
    NotReady,
    Overloaded,
)
from iskander.foundation.clock import now_ns
from iskander.gateway.auth.shares import IDLE_NS
from iskander.gateway.protocols.submit import RequestSubmitter
from iskander.gateway.protocols.tensors import RequestTensors
from iskander.gateway.scheduling.request import Terms
from iskander.interprocess.memory.arena import GRAIN_BYTES


@in_loop
async def test_infer_returns_the_worker_results() -> None:
    async with submitter_harness() as harness:
        task = harness.infer()
        await turns()
        (request,) = harness.dispatcher.submitted
        body = bytes(harness.input_arena.segment.view[request.body_offset :][:32])
        assert np.frombuffer(body, np.int64).tolist() == [0, 1, 2, 3]

        harness.dispatcher.answer(request, b"results")

        assert await task == b"results"


@in_loop
async def test_request_has_the_terms_and_the_call_deadline() -> None:
    async with submitter_harness() as harness:
        terms = Terms(client="robot", is_named=True, priority=0, budget_ms=60_000)
        deadline_ns = now_ns() + 1_000_000_000
        task = harness.infer(terms=terms, call_deadline_ns=deadline_ns)
        await turns()
        (request,) = harness.dispatcher.submitted
        assert request.terms is terms and request.deadline_ns == deadline_ns
        harness.dispatcher.answer(request, b"")
        await task


@in_loop
async def test_zero_rows_are_answered_immediately() -> None:
    async with submitter_harness() as harness:
        assert await harness.infer(0) == b""
        assert not harness.dispatcher.submitted


@in_loop
async def test_infer_raises_the_error_of_the_request() -> None:
    async with submitter_harness() as harness:
        task = harness.infer()
        await turns()
        (request,) = harness.dispatcher.submitted
        request.caller.fail(request, ExecutionFailed("no"))
        with pytest.raises(ExecutionFailed):
            await task


@in_loop
async def test_cancelled_task_withdraws_its_request() -> None:
    async with submitter_harness() as harness:
        task = harness.infer()
        await turns()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (request,) = harness.dispatcher.submitted
        assert harness.dispatcher.withdrawn == [request]
        # Late responses are ignored.
        request.caller.deliver(request, memoryview(b"late"))
        request.caller.fail(request, ExecutionFailed("late"))


@in_loop
async def test_request_waits_for_space_in_a_full_arena() -> None:
    async with submitter_harness() as harness:
        rows = (3 * GRAIN_BYTES - 1024) // 9 // 64 * 64
        first, second = harness.infer(rows), harness.infer(rows)
        await turns()
        assert len(harness.dispatcher.submitted) == 1
        harness.dispatcher.answer(harness.dispatcher.submitted[0], b"first")
        await turns()
        harness.dispatcher.answer(harness.dispatcher.submitted[1], b"second")
        assert [await first, await second] == [b"first", b"second"]


@in_loop
async def test_rejections_by_the_lane_are_raised() -> None:
    async with submitter_harness() as harness:
        with pytest.raises(DeadlineExceeded):
            await harness.infer(call_deadline_ns=1)
        harness.lane.workers.clear()
        with pytest.raises(NotReady):
            await harness.infer()


@in_loop
async def test_rejected_request_frees_its_tensors() -> None:
    """Without a garbage collection, which is rare with few large messages."""
    gc.collect()
    gc.disable()
    try:
        async with submitter_harness() as harness:
            ids = np.arange(4)
            reference = weakref.ref(ids)
            inputs = RequestTensors(4, [memoryview(ids).cast("B"), memoryview(b"\x00")])
            with contextlib.suppress(DeadlineExceeded):
                await harness.submitter.infer(harness.lane, inputs, call_deadline_ns=1)
            del ids, inputs
            assert reference() is None
    finally:
        gc.enable()


@in_loop
async def test_requests_of_one_call_do_not_block_other_calls() -> None:
    """A stream has its own window and counts as one open call."""
    async with submitter_harness() as harness:
        with harness.submitter.open_call():
            tasks = [harness.infer() for _ in range(LIMITS.streams + 1)]
            await turns()
            with harness.submitter.open_call():
                tasks.append(harness.infer())
                await turns()
            for request in harness.dispatcher.submitted:
                harness.dispatcher.answer(request, b"")
            assert [await each for each in tasks] == [b""] * (LIMITS.streams + 2)


@in_loop
async def test_calls_above_the_limit_are_rejected() -> None:
    async with submitter_harness() as harness:
        with harness.submitter.open_call(), harness.submitter.open_call():
            with pytest.raises(Overloaded), harness.submitter.open_call():
                raise AssertionError("a third call was opened")
            assert len(harness.submitter.calls) == 2
        with harness.submitter.open_call():
            assert len(harness.submitter.calls) == 1


@in_loop
async def test_drain_answers_accepted_requests_and_rejects_new_ones() -> None:
    async with submitter_harness() as harness:
        events: list[str] = []
        with harness.submitter.open_call(lambda: events.append("drain")):
            task = harness.infer()
            await turns()
            harness.submitter.drain()
            assert events == ["drain"]
            with pytest.raises(Draining):
                await harness.infer()
            with pytest.raises(Draining), harness.submitter.open_call():
                raise AssertionError("a call was opened")
            harness.dispatcher.answer(harness.dispatcher.submitted[0], b"results")
            assert await task == b"results"


@in_loop
async def test_last_share_of_calls_is_reserved_for_other_callers() -> None:
    """A caller holds at most eight times what it leaves free."""
    limits = LimitsConfig(streams=32)
    async with submitter_harness() as harness:
        submitter = RequestSubmitter(harness.entry, harness.dispatcher, limits)
        with contextlib.ExitStack() as stack:
            for _ in range(28):
                stack.enter_context(submitter.open_call(caller="greedy"))
            with pytest.raises(Overloaded, match=r"of this caller .*: 28 of 28, limit 32"):
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


@in_loop
async def test_call_without_progress_gives_way_to_a_caller_with_fewer() -> None:
    """At the limit of two calls; not to the same caller, and not while it makes progress."""
    async with submitter_harness() as harness:
        ended: list[IskanderError] = []
        since = [now_ns()]
        opened = [harness.submitter.open_call(caller="greedy") for _ in range(2)]
        for call in opened:
            call.lend(lambda: since[0], ended.append)
        with pytest.raises(Overloaded):
            harness.submitter.open_call(caller="other")
        since[0] -= IDLE_NS
        with pytest.raises(Overloaded):
            harness.submitter.open_call(caller="greedy")
        with harness.submitter.open_call(caller="other"):
            (error,) = ended
            assert isinstance(error, Overloaded) and "given to another" in error.message
            assert len(harness.submitter.calls) == 2
        for call in opened:
            call.close()
