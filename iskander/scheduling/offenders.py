"""Sources whose requests ended workers: their requests are rejected for a time that doubles.

A request is known to end workers when it has ended one alone. Its source is then slowed for that
model, so that others of the model get its worker.

Pure.
"""

from __future__ import annotations

from typing import Final

from iskander.auth.source import Source
from iskander.clock import NS_PER_MS, NS_PER_S
from iskander.errors import ClientOverShare

PAUSE_FIRST_NS: Final = NS_PER_S // 4
PAUSE_MAX_NS: Final = 10 * NS_PER_S
FORGET_NS: Final = 300 * NS_PER_S
"""Time without such a request after which a source is forgotten."""
SOURCES_MAX: Final = 1024


class Offenders:
    """Slowed sources of one lane, the one that was noted last at the end."""

    def __init__(self) -> None:
        self._until_ns: dict[Source, int] = {}
        self._counts: dict[Source, int] = {}

    def __len__(self) -> int:
        return len(self._until_ns)

    def note(self, source: Source, now_ns: int) -> None:
        """Count a request of a source that has ended workers, and begin its pause."""
        if now_ns - self._until_ns.pop(source, now_ns) > FORGET_NS:
            self._counts.pop(source, None)
        count = self._counts[source] = self._counts.get(source, 0) + 1
        pause_ns = min(PAUSE_FIRST_NS << min(count - 1, 16), PAUSE_MAX_NS)
        self._until_ns[source] = now_ns + pause_ns
        if len(self._until_ns) > SOURCES_MAX:
            self._forget(next(iter(self._until_ns)))

    def error(self, source: Source, now_ns: int, title: str) -> ClientOverShare | None:
        """The error of a new request of a source; None: it is accepted."""
        until_ns = self._until_ns.get(source)
        if until_ns is None:
            return None
        if now_ns >= until_ns:
            if now_ns - until_ns > FORGET_NS:
                self._forget(source)
            return None
        left_ms = (until_ns - now_ns) // NS_PER_MS + 1
        return ClientOverShare(
            f"requests of this client ended workers of model `{title}` {self._counts[source]} "
            f"times; others are accepted in {left_ms} ms",
            retry_after_ms=left_ms,
        )

    def _forget(self, source: Source) -> None:
        del self._until_ns[source]
        del self._counts[source]
