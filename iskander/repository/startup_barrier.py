"""Barrier for changes of models whose load at startup has not begun.

A process loads the recorded models at startup, and receives changes from its peers at once. A
change that is applied before the startup reaches its model would be overwritten, so it waits.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio


class StartupBarrier:
    """Holds back changes of models that the startup has not reached."""

    def __init__(self) -> None:
        self._is_listed = asyncio.Event()
        self._expected: dict[str, asyncio.Event] = {}

    def expect(self, name: str) -> None:
        """Register a model that the startup will load."""
        self._expected[name] = asyncio.Event()

    def all_expected(self) -> None:
        """Declare the registration complete."""
        self._is_listed.set()

    def release(self, name: str) -> None:
        """Let changes of a model proceed: the startup has chosen its versions."""
        expected = self._expected.pop(name, None)
        if expected is not None:
            expected.set()

    async def wait_for(self, name: str) -> None:
        """Wait until changes of a model may proceed."""
        await self._is_listed.wait()
        if name in self._expected:
            await self._expected[name].wait()
