"""Answers that are rendered once for all callers that wait for the same answer.

A render begins after the arrival of all of its callers, so no answer is older than its call. One
render runs at a time, in steps, and the next begins `PAUSE_S` later: any number of callers costs
the loop one render in that time. Its callers are answered in steps too.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Final

PAUSE_S: Final = 0.01
"""Time without a render after each one; a common answer takes a millisecond."""
CALLS_PER_STEP: Final = 4
"""Calls that are answered in one event loop iteration."""

Render = Callable[[], Awaitable[list[bytes]]]


class SharedAnswers:
    """Renders each answer once for the calls that wait for it."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, list[asyncio.Future[list[bytes]]]] = {}
        self._renders: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._next_s = 0.0

    async def get(self, key: Hashable, render: Render) -> list[bytes]:
        """Return the messages of an answer.

        Args:
            key: Equal for calls with the same answer: what is asked, and what the caller may see.
            render: Renders the answer; an error that it raises is raised for all callers.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[bytes]] = loop.create_future()
        calls = self._waiting.get(key)
        if calls is None:
            self._waiting[key] = [answer]
            task = loop.create_task(self._render(key, render))
            self._renders.add(task)
            task.add_done_callback(self._renders.discard)
        else:
            calls.append(answer)
        return await answer

    async def _render(self, key: Hashable, render: Render) -> None:
        """Render an answer after the pause, and give it to its callers."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            pause_s = self._next_s - loop.time()
            if pause_s > 0:
                await asyncio.sleep(pause_s)
            # A call that comes from here on waits for the next render.
            calls = self._waiting.pop(key)
            messages: list[bytes] = []
            error: Exception | None = None
            if not all(call.done() for call in calls):  # Else all callers are gone.
                try:
                    messages = await render()
                except Exception as failure:
                    error = failure
            for index, call in enumerate(calls):
                if not index % CALLS_PER_STEP:
                    await asyncio.sleep(0)
                if call.done():
                    continue
                if error is None:
                    call.set_result(messages)
                else:
                    call.set_exception(error)
            self._next_s = loop.time() + PAUSE_S
