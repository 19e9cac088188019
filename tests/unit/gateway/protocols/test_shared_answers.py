"""Shared answers: one render for callers that wait, none older than its call."""

from __future__ import annotations

import asyncio
import time

import pytest

from iskander.errors import MalformedInput
from iskander.gateway.protocols.shared_answers import PAUSE_S, SharedAnswers


class Renderer:
    """Renders its number in two steps; `running` has the number of concurrent renders."""

    def __init__(self) -> None:
        self.count = self.running = 0

    async def __call__(self) -> list[bytes]:
        assert self.running == 0
        self.running += 1
        self.count += 1
        number = self.count
        await asyncio.sleep(0)
        self.running -= 1
        return [str(number).encode()]


def test_callers_that_wait_share_a_render() -> None:
    async def run() -> None:
        answers, render = SharedAnswers(), Renderer()
        began_s = time.monotonic()
        assert await answers.get("a", render) == [b"1"]
        calls = [asyncio.create_task(answers.get("a", render)) for _ in range(40)]
        other = asyncio.create_task(answers.get("b", render))
        assert await asyncio.gather(*calls) == [[b"2"]] * 40
        assert await other == [b"3"]
        assert time.monotonic() - began_s >= 2 * PAUSE_S - 0.002

    asyncio.run(run())


def test_call_during_a_render_gets_the_next_one() -> None:
    """Something may have changed since the render began."""

    async def run() -> None:
        answers, render = SharedAnswers(), Renderer()
        first = asyncio.create_task(answers.get("a", render))
        while not render.running:
            await asyncio.sleep(0)
        assert await answers.get("a", render) == [b"2"]
        assert await first == [b"1"]

    asyncio.run(run())


def test_cancelled_caller_does_not_end_the_render_of_others() -> None:
    async def run() -> None:
        answers, render = SharedAnswers(), Renderer()
        gone = asyncio.create_task(answers.get("a", render))
        stays = asyncio.create_task(answers.get("a", render))
        await asyncio.sleep(0)
        gone.cancel()
        assert await stays == [b"1"]

    asyncio.run(run())


def test_error_is_that_of_all_callers_and_of_no_later_one() -> None:
    async def run() -> None:
        answers = SharedAnswers()

        async def fail() -> list[bytes]:
            raise MalformedInput("no")

        calls = [asyncio.create_task(answers.get("a", fail)) for _ in range(3)]
        for call in calls:
            with pytest.raises(MalformedInput):
                await call
        assert await answers.get("a", Renderer()) == [b"1"]

    asyncio.run(run())
