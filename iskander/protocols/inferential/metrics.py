"""What came of observations, counted, and as points of the measures that Inferential's users know.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections import Counter

from iskander.clock import NS_PER_MS, wall_ns
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
from iskander.measurement.recent_values import RecentValues
from iskander.measurement.subscribers import Labels

_FULL = frozenset(
    kind.code for kind in (QueueFull, ClientOverShare, DroppedFromQueue, ArenaFull, Superseded)
)
_EXPIRED = frozenset(kind.code for kind in (DeadlineExceeded, DeadlineUnreachable))


class InferentialMetrics:
    """Counts outcomes, and records points.

    Args:
        recent: Where points are kept.

    Attributes:
        outcomes: Observations by what came of them: `answered`, `late` (its deadline had passed),
            `unsent` (its client had gone), or the code of its error.
        broken: Connections that were ended because of what came over them.
        last_error: What the last observation failed with, for who looks for it; empty: none has.
    """

    def __init__(self, recent: RecentValues) -> None:
        self._recent = recent
        self.outcomes: Counter[str] = Counter()
        self.broken = 0
        self.last_error = ""

    def received(self, labels: Labels, stamp_ns: int, payload_bytes: int) -> None:
        """An observation came, made at a moment of its client's wall clock; 0: not known."""
        if stamp_ns:
            staleness_ms = (wall_ns() - stamp_ns) / NS_PER_MS
            self._recent.record("observation_staleness_ms", staleness_ms, labels)
        self._recent.record("payload_size_bytes", payload_bytes, labels)

    def malformed(self, error: IskanderError) -> None:
        """A message came that nobody could be answered for."""
        self._count(error)
        self._recent.record("observation_errors", 1, {})

    def refused(self, labels: Labels, model: str, error: IskanderError) -> None:
        """An observation gets no results."""
        self._count(error)
        if error.code in _FULL:
            self._recent.record("queue_full_drops", 1, labels)
        elif error.code in _EXPIRED:
            self._recent.record("requests_expired", 1, {})
        else:
            labels = {**labels, "model": model[:100], "error": error.code}
            self._recent.record("dispatch_errors", 1, labels)

    def answered(self) -> None:
        """An observation's results were sent."""
        self.outcomes["answered"] += 1

    def late(self, labels: Labels) -> None:
        """Results came when their client had given them up."""
        self.outcomes["late"] += 1
        self._recent.record("send_errors", 1, labels)

    def unsent(self, labels: Labels) -> None:
        """A client went before it was answered."""
        self.outcomes["unsent"] += 1
        self._recent.record("send_errors", 1, labels)

    def clients(self, count: int) -> None:
        """So many clients are connected now."""
        self._recent.record("active_clients", count, {})

    def left(self, labels: Labels) -> None:
        """A client is not connected any more."""
        self._recent.record("client_disconnected", 1, labels)

    def cut(self, reason: str) -> None:
        """A connection was ended because of what came over it."""
        self.broken += 1
        self.last_error = reason

    def _count(self, error: IskanderError) -> None:
        self.outcomes[error.code] += 1
        self.last_error = error.message
