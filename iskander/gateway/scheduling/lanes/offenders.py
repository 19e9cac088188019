"""Sources whose requests ended workers: their requests are rejected for a time that doubles.

A request is known to end workers when a worker ended while it ran that request alone. New requests
of its source for that model are then rejected for a pause, so that other sources get the worker.
Until the source is forgotten, its requests run alone, so that one ended worker is enough to know
the request. A source with a token is the same source on all its connections.

Pure.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from iskander.errors import ClientOverShare
from iskander.foundation.backoff import backoff
from iskander.foundation.clock import NS_PER_MS, NS_PER_S
from iskander.gateway.auth.source import Source

PAUSE_FIRST_NS: Final = NS_PER_S // 4
PAUSE_MAX_NS: Final = 10 * NS_PER_S
FORGET_NS: Final = 300 * NS_PER_S
"""Time without such a request after which a source is forgotten."""
SOURCES_MAX: Final = 1024

Party: TypeAlias = str | int
"""Token or connection of a source, as in `Source.party`."""


class Offenders:
    """Sources of one lane whose requests ended workers, in the order of their last such request."""

    def __init__(self) -> None:
        self._until_ns: dict[Party, int] = {}  # End of the latest pause.
        self._counts: dict[Party, int] = {}

    def __len__(self) -> int:
        return len(self._until_ns)

    def note(self, source: Source, now_ns: int) -> None:
        """Count a request that ended workers, and begin the pause of its source."""
        party = source.party
        if now_ns - self._until_ns.pop(party, now_ns) > FORGET_NS:
            self._counts.pop(party, None)
        count = self._counts[party] = self._counts.get(party, 0) + 1
        pause_ns = int(backoff(count, PAUSE_FIRST_NS, PAUSE_MAX_NS))
        self._until_ns[party] = now_ns + pause_ns
        if len(self._until_ns) > SOURCES_MAX:
            self._forget(next(iter(self._until_ns)))

    def is_known(self, source: Source, now_ns: int) -> bool:
        """Whether requests of a source have ended workers, and the source is not forgotten."""
        until_ns = self._until_ns.get(source.party)
        if until_ns is None:
            return False
        if now_ns - until_ns <= FORGET_NS:
            return True
        self._forget(source.party)
        return False

    def error(self, source: Source, now_ns: int, title: str) -> ClientOverShare | None:
        """The error of a new request during the pause of its source, else None."""
        if not self.is_known(source, now_ns):
            return None
        party = source.party
        left_ns = self._until_ns[party] - now_ns
        if left_ns <= 0:
            return None
        left_ms = left_ns // NS_PER_MS + 1
        return ClientOverShare(
            f"requests of this client ended workers of model `{title}` {self._counts[party]} "
            f"times; its requests are accepted again in {left_ms} ms",
            retry_after_ms=left_ms,
        )

    def _forget(self, party: Party) -> None:
        del self._until_ns[party]
        del self._counts[party]
