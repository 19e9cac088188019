"""Small thread pool for conversions and plans, in which callers take turns.

A message of 500 bytes may occupy a thread for 100 ms. Two threads leave cores for the event loop
and the workers. A caller with a thousand such messages delays another caller by one or two of them.

Runs on: gateway loop, and threads of its own.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final, TypeVar

THREADS_MAX: Final = 2
Result = TypeVar("Result")


class FairThreads:
    """Thread pool with a queue for each caller; a caller is any hashable object."""

    def __init__(self, count: int = THREADS_MAX) -> None:
        self._free = count
        self._waiting: OrderedDict[object, deque[asyncio.Future[None]]] = OrderedDict()
        self._executor = ThreadPoolExecutor(count, "convert")

    @asynccontextmanager
    async def turn(self, caller: object) -> AsyncIterator[None]:
        """Wait for a free thread and reserve it for the body of the context.

        Charge the memory of the work in the body, so that a waiting caller holds none.
        """
        if self._free and not self._waiting:
            self._free -= 1
        else:
            await self._wait(caller)
        try:
            yield
        finally:
            self._pass_on()

    async def run(self, function: Callable[..., Result], *args: object) -> Result:
        """Run a function on a thread; call within a turn."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    async def _wait(self, caller: object) -> None:
        """Queue a turn of the caller and wait for it."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            queue = self._waiting.get(caller)
            if queue is not None and turn in queue:
                queue.remove(turn)
                if not queue:
                    del self._waiting[caller]
            elif turn.done() and not turn.cancelled():
                self._pass_on()  # Cancelled after the thread was reserved for it.
            raise

    def _pass_on(self) -> None:
        """Pass the thread to the caller with the earliest last turn, or free it."""
        while self._waiting:
            caller, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[caller] = queue  # Behind all others.
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._free += 1
