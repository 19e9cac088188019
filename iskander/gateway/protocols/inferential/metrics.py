"""Outcome counters of observations, and values under Inferential's metric names.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections import Counter

from iskander.errors import (
    ArenaFull,
    ClientOverShare,
    DeadlineExceeded,
    DeadlineUnreachable,
    DroppedFromQueue,
    IskanderError,
    QueueFull,
    Superseded,
)
from iskander.foundation.clock import NS_PER_MS, wall_ns
from iskander.foundation.measurement.recent_values import RecentValues
from iskander.foundation.measurement.subscribers import Labels

_FULL = frozenset(
    kind.code for kind in (QueueFull, ClientOverShare, DroppedFromQueue, ArenaFull, Superseded)
)
_EXPIRED = frozenset(kind.code for kind in (DeadlineExceeded, DeadlineUnreachable))


class InferentialMetrics:
    """Counts outcomes, and records values for `RecentValues`.

    Outcomes are `answered`, `late` (deadline passed), `unsent` (client disconnected), and the codes
    of errors.
    """

    def __init__(self, recent: RecentValues) -> None:
        self._recent = recent
        self.outcomes: Counter[str] = Counter()
        self.broken = 0  # Connections closed because of a protocol violation.
        self.last_error = ""  # Of the last failed observation or connection; empty for none.

    def on_received(self, labels: Labels, stamp_ns: int, payload_bytes: int) -> None:
        """Record an observation; `stamp_ns` is its wall-clock time, 0 if unknown."""
        if stamp_ns:
            staleness_ms = (wall_ns() - stamp_ns) / NS_PER_MS
            self._recent.record("observation_staleness_ms", staleness_ms, labels)
        self._recent.record("payload_size_bytes", payload_bytes, labels)

    def on_malformed(self, error: IskanderError) -> None:
        """Count a message that cannot be parsed, and so has no address for a reply."""
        self._count(error)
        self._recent.record("observation_errors", 1, {})

    def on_rejected(self, labels: Labels, model: str, error: IskanderError) -> None:
        """Count a rejected or failed observation."""
        self._count(error)
        if error.code in _FULL:
            self._recent.record("queue_full_drops", 1, labels)
        elif error.code in _EXPIRED:
            self._recent.record("requests_expired", 1, {})
        else:
            labels = {**labels, "model": model[:100], "error": error.code}
            self._recent.record("dispatch_errors", 1, labels)

    def on_answered(self) -> None:
        """Count results that were sent."""
        self.outcomes["answered"] += 1

    def on_late(self, labels: Labels) -> None:
        """Count results that missed their deadline."""
        self.outcomes["late"] += 1
        self._recent.record("send_errors", 1, labels)

    def on_unsent(self, labels: Labels) -> None:
        """Count an observation whose client disconnected."""
        self.outcomes["unsent"] += 1
        self._recent.record("send_errors", 1, labels)

    def set_clients(self, count: int) -> None:
        """Record the number of connected clients."""
        self._recent.record("active_clients", count, {})

    def on_client_left(self, labels: Labels) -> None:
        """Record a disconnect."""
        self._recent.record("client_disconnected", 1, labels)

    def on_connection_broken(self, reason: str) -> None:
        """Count a connection closed because of a protocol violation."""
        self.broken += 1
        self.last_error = reason

    def _count(self, error: IskanderError) -> None:
        self.outcomes[error.code] += 1
        self.last_error = error.message
