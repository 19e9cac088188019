"""Limits of shadow batches: their share of time, their size, and the pause after a failure.

Pure.
"""

from __future__ import annotations

from typing import Final

from iskander.foundation.backoff import backoff
from iskander.foundation.clock import NS_PER_MS, NS_PER_S
from iskander.gateway.scheduling.lanes.batcher import LEAD_NS
from iskander.gateway.scheduling.lanes.cost import LEARNED_SAMPLES, CostModel

BURST_NS: Final = 10 * NS_PER_MS
"""Time that a budget saves up while there is nothing to do."""
RUN_SHARE: Final = 1 / 16
"""Run time of a shadow batch as a share of the latency of the served version: a request that finds
the worker busy with one waits no longer than that."""
FIRST_ROWS: Final = 4
"""Rows of the first shadow batch of a candidate whose cost is unknown; each further one has twice
as many, until the cost is learned."""
PAUSE_FIRST_S: Final = 2.0
PAUSE_MAX_S: Final = 600.0
FAILURES_MAX: Final = 10
"""Counted failures; the pause after more of them is not longer, and a power of two has a limit."""
LOSS_PAUSES: Final = 6
"""The first pause after the death of a worker is that of this many failures, about a minute."""


class TimeBudget:
    """A share of the elapsed time; what is spent above it is a debt."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._balance_ns = float(BURST_NS)
        self._updated_ns = 0

    def spend(self, duration_ns: int, now_ns: int) -> None:
        """Subtract time that was used."""
        self._balance_ns = self._balance(now_ns) - duration_ns
        self._updated_ns = now_ns

    def ready_ns(self, now_ns: int) -> int:
        """Return when time can be used again; not later than now if it can."""
        return now_ns + int(max(-self._balance(now_ns), 0) / self.share)

    def _balance(self, now_ns: int) -> float:
        earned_ns = max(now_ns - self._updated_ns, 0) * self.share
        return min(self._balance_ns + earned_ns, BURST_NS)


class Pauses:
    """Pauses of a pair after failures in a row: two seconds, then twice as long each time.

    Attributes:
        until_ns: End of the last pause.
        reason: Its reason.
    """

    def __init__(self) -> None:
        self.until_ns = 0
        self.reason = ""
        self._failures = 0

    def on_failure(self, reason: str, now_ns: int, *, was_loss: bool = False) -> None:
        """Begin a pause; `was_loss`: the batch ended its worker."""
        failures = max(self._failures + 1, LOSS_PAUSES if was_loss else 0)
        self._failures = min(failures, FAILURES_MAX)
        self.until_ns = now_ns + int(backoff(self._failures, PAUSE_FIRST_S, PAUSE_MAX_S) * NS_PER_S)
        self.reason = reason

    def on_success(self) -> None:
        """Forget one failure."""
        self._failures = max(self._failures - 1, 0)


def rows_of_batch(candidate: CostModel, served: CostModel, rows: int, *, is_odd: bool) -> int:
    """Return the limit of rows of the next shadow batch.

    Its run takes at most `RUN_SHARE` of the latency of a request of `rows` rows, or twice its fixed
    cost. Every other batch has half as many rows: from one size only, the cost model could not
    separate the fixed cost from that of the rows.
    """
    if candidate.samples < LEARNED_SAMPLES:
        return FIRST_ROWS << candidate.samples
    latency_ns = served.predict_ns(rows) + LEAD_NS
    run_ns = max(latency_ns * RUN_SHARE, 2 * candidate.base_ns)
    most = int((run_ns - candidate.base_ns) / max(candidate.row_ns, 1.0))
    return max(most // 2 if is_odd else most, 1)
