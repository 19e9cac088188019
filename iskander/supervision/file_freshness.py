"""Whether lanes' files are still those that they were loaded from: looked at beside the loop.

A file system may take its time, or never answer. So each look has a thread of its own, few at a
time, and one that takes too long is answered as if the files were others.

Runs on: gateway loop, and its own threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

from iskander.scheduling.lane import Lane

log = logging.getLogger("iskander.repository")

LOOKS_MAX = 4
"""At a time, also of those that never end. As many more may wait as there are workers and
generations: each asks for one."""
LOOK_S = 10.0
"""After which the answer is no, whether a look has its turn or waits for it."""


class FileFreshness:
    """Looks at files.

    Attributes:
        fingerprint_of: What a lane's files and settings are now, empty where nobody can say; called
            on a thread. None where nothing can change.
        on_known: Called after each answer.
    """

    def __init__(self) -> None:
        self.fingerprint_of: Callable[[Lane], str] | None = None
        self.on_known: Callable[[], None] = _nothing
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

    async def _look(
        self, fingerprint_of: Callable[[Lane], str], lane: Lane, then: Callable[[bool], None]
    ) -> None:
        found = ""
        try:
            async with asyncio.timeout(LOOK_S):
                await self._turns.acquire()
                found = await self._begin(fingerprint_of, lane)
        except TimeoutError:
            log.error("the files of %s could not be looked at in %g s", lane.title, LOOK_S)
        then(found == lane.model.fingerprint)
        self.on_known()

    def _begin(self, fingerprint_of: Callable[[Lane], str], lane: Lane) -> asyncio.Future[str]:
        """Start a thread, which has a turn until it ends; daemons hold up no exit."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[str] = loop.create_future()

        def on_end(fingerprint: str) -> None:
            self._turns.release()
            if not found.done():
                found.set_result(fingerprint)

        def look() -> None:
            fingerprint = ""
            try:
                fingerprint = fingerprint_of(lane)
            except Exception:
                log.exception("the files of %s could not be looked at", lane.title)
            with contextlib.suppress(RuntimeError):  # The loop may be closed by then.
                loop.call_soon_threadsafe(on_end, fingerprint)

        try:
            threading.Thread(target=look, name="isk-look", daemon=True).start()
        except RuntimeError as error:
            log.error("the files of %s could not be looked at: %s", lane.title, error)
            on_end("")
        return found


def _nothing() -> None:
    """Nobody wants to know."""
