"""What a start has yet to look at, for calls that come meanwhile.

A process that starts finds what was wanted before, and is told by its siblings of what changes.
What it is told of a model holds once it has begun with that model, and would be undone before.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio


class StartupBarrier:
    """Which models a start has not begun with."""

    def __init__(self) -> None:
        self._is_listed = asyncio.Event()
        self._expected: dict[str, asyncio.Event] = {}

    def expect(self, name: str) -> None:
        """A model will be looked at."""
        self._expected[name] = asyncio.Event()

    def listed(self) -> None:
        """No others will."""
        self._is_listed.set()

    def begun(self, name: str) -> None:
        """It is decided what of a model is loaded."""
        expected = self._expected.pop(name, None)
        if expected is not None:
            expected.set()

    async def until(self, name: str) -> None:
        """Wait until that is decided of a model."""
        await self._is_listed.wait()
        if name in self._expected:
            await self._expected[name].wait()
