"""Small thread pool for conversions and plans, in which callers take turns.

A message of 500 bytes may occupy a thread for 100 ms. Two threads leave cores for the event loop
and the workers. A caller with a thousand such messages delays another caller by one or two of them.
While a thread runs Python, the event loop waits for the interpreter lock, so a caller may have to
rest after its work.

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
        self._resting: set[object] = set()
        self._executor = ThreadPoolExecutor(count, "convert")

    @asynccontextmanager
    async def turn(self, caller: object) -> AsyncIterator[None]:
        """Wait for a free thread and reserve it for the body of the context.

        Charge the memory of the work in the body, so that a waiting caller holds none.
        """
        if self._free and caller not in self._resting and caller not in self._waiting:
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

    def rest(self, caller: object, seconds: float) -> None:
        """Give the caller no further turn for a time."""
        if caller not in self._resting:
            self._resting.add(caller)
            asyncio.get_running_loop().call_later(seconds, self._end_rest, caller)

    def _end_rest(self, caller: object) -> None:
        self._resting.discard(caller)
        if self._free and caller in self._waiting:
            self._free -= 1
            self._pass_on()

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
        for caller, queue in list(self._waiting.items()):
            if caller in self._resting:
                continue
            while queue:
                turn = queue.popleft()
                if not turn.cancelled():
                    self._waiting.move_to_end(caller)  # Behind all others.
                    if not queue:
                        del self._waiting[caller]
                    turn.set_result(None)
                    return
            del self._waiting[caller]
        self._free += 1
