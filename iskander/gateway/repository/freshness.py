"""Whether lanes' files are still those that they were loaded from: looked at beside the loop.

A file system may take its time, or never answer. So the looks have threads of their own, few of
them, and one that takes too long is answered as if the files were others.

Runs on: gateway loop, and its own threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from iskander.gateway.lanes.lane import Lane

log = logging.getLogger("iskander.repository")

LOOKS_MAX = 4
"""At a time. As many more may wait as there are workers and generations: each asks for one."""
LOOK_S = 10.0


class Freshness:
    """Looks at files.

    Attributes:
        fingerprint_of: What a lane's files and settings are now, empty where nobody can say; called
            on a thread. None where nothing can change.
        on_known: Called after each answer.
    """

    def __init__(self) -> None:
        self.fingerprint_of: Callable[[Lane], str] | None = None
        self.on_known: Callable[[], None] = _nothing
        self._threads = ThreadPoolExecutor(LOOKS_MAX, "isk-look")
        self._turns = asyncio.Semaphore(LOOKS_MAX)
        self._looks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def ask(self, lane: Lane, then: Callable[[bool], None]) -> None:
        """Look once, and tell whether the files are those of the lane; nothing after `close`."""
        fingerprint_of = self.fingerprint_of
        if fingerprint_of is None:
            then(True)
        elif not self._is_closed:
            work = self._look(fingerprint_of, lane, then)
            look = asyncio.get_running_loop().create_task(work)
            self._looks.add(look)
            look.add_done_callback(self._looks.discard)

    def close(self) -> None:
        """Look no more; nobody is told of what is under way."""
        self._is_closed = True
        for look in self._looks:
            look.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _look(
        self, fingerprint_of: Callable[[Lane], str], lane: Lane, then: Callable[[bool], None]
    ) -> None:
        found = ""
        try:
            async with self._turns, asyncio.timeout(LOOK_S):
                loop = asyncio.get_running_loop()
                found = await loop.run_in_executor(self._threads, fingerprint_of, lane)
        except TimeoutError:
            log.error("the files of %s could not be looked at in %g s", lane.title, LOOK_S)
        except Exception:
            log.exception("the files of %s could not be looked at", lane.title)
        then(found == lane.model.fingerprint)
        self.on_known()


def _nothing() -> None:
    """Nobody wants to know."""
