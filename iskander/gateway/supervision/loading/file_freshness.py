"""Check on daemon threads that a lane's model files match what was loaded.

A file system can be slow or never answer. A check that exceeds `CHECK_S` counts as a mismatch.

Runs on: gateway loop, and its own threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from iskander.foundation.logs import models as log
from iskander.gateway.scheduling.lanes.lane import Lane

THREADS_MAX = 4
"""Concurrent checks, including blocked ones. Each worker and generation has at most one pending."""
CHECK_S = 10.0
"""Timeout of a check, including the time that it waits for a thread."""


class FileFreshness:
    """Runs file checks, and calls `on_checked` after each.

    Attributes:
        fingerprint_of: Computes the fingerprint of a lane's files and settings on a thread; empty
            if unknown. None if files cannot change.
    """

    def __init__(self) -> None:
        self.fingerprint_of: Callable[[Lane], str] | None = None
        self.on_checked: Callable[[], None] = lambda: None
        self._threads = asyncio.Semaphore(THREADS_MAX)
        self._checks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def check(self, lane: Lane, callback: Callable[[bool], None]) -> None:
        """Check once, then call `callback(is_current)`; no call after `close`."""
        if self.fingerprint_of is None:
            callback(True)
        elif not self._is_closed:
            work = self._run_check(self.fingerprint_of, lane, callback)
            check = asyncio.get_running_loop().create_task(work)
            self._checks.add(check)
            check.add_done_callback(self._checks.discard)

    def close(self) -> None:
        """Cancel all checks without calling back."""
        self._is_closed = True
        for check in self._checks:
            check.cancel()

    async def _run_check(
        self, fingerprint_of: Callable[[Lane], str], lane: Lane, callback: Callable[[bool], None]
    ) -> None:
        fingerprint = ""
        try:
            async with asyncio.timeout(CHECK_S):
                await self._threads.acquire()
                fingerprint = await self._start_thread(fingerprint_of, lane)
        except TimeoutError:
            log.file_check_timed_out(model=lane.title, limit_s=CHECK_S)
        callback(fingerprint == lane.model.fingerprint)
        self.on_checked()

    def _start_thread(
        self, fingerprint_of: Callable[[Lane], str], lane: Lane
    ) -> asyncio.Future[str]:
        """Compute the fingerprint on a daemon thread, which does not delay process exit."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[str] = loop.create_future()

        def on_end(fingerprint: str) -> None:
            self._threads.release()
            if not result.done():
                result.set_result(fingerprint)

        def check() -> None:
            fingerprint = ""
            try:
                fingerprint = fingerprint_of(lane)
            except Exception as failure:
                log.file_check_failed(model=lane.title, error=failure)
            with contextlib.suppress(RuntimeError):  # The loop may be closed by then.
                loop.call_soon_threadsafe(on_end, fingerprint)

        try:
            threading.Thread(target=check, name="isk-freshness", daemon=True).start()
        except RuntimeError as error:
            log.file_check_not_started(model=lane.title, reason=str(error))
            on_end("")
        return result
