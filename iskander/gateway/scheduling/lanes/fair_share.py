"""Fair queueing between the sources of requests.

A source may use `quantum_rows` rows in each round; the policy orders the sources that have rows
left. A new source, or one that returns after using less than its share, enters one round before the
current one and so goes before every source with a backlog. So a backlog delays only its own source,
and a request of another source waits for little more than the running batch.

All connections of a tenant (the name of a token) have one share: a row costs as many rows as its
tenant has connections with queued requests. A connection without a token has its own share.

Pure. Source: deficit round robin (Shreedhar and Varghese, 1995); new flows before old ones as in
FQ-CoDel (RFC 8290, section 4.2).
"""

from __future__ import annotations

from typing import Final

from iskander.foundation.clock import NS_PER_MS, NS_PER_S
from iskander.gateway.auth.source import UNKNOWN_SOURCE, Source
from iskander.gateway.scheduling.lanes.cost import LEARNED_SAMPLES, CostModel
from iskander.gateway.scheduling.request import Request

SLICE_NS: Final = 2 * NS_PER_MS
"""Run time of a slice; large requests are sliced while another source sends brief ones."""
RECENT_NS: Final = NS_PER_S
"""Time for which a brief request counts."""
QUANTUM_ROWS: Final = 1024
"""Rows of a source in a round until the cost of rows is learned; then, the rows of a slice."""
SOURCES_MAX: Final = 4096
"""Sources without queued requests whose state is kept."""
SOURCES_UNCHECKED: Final = 64
"""Sources without queued requests that are kept without a check for outdated ones."""


class Flow:
    """Queued requests of one source.

    Attributes:
        ranked: (rank, number, request), ascending.
        round: Round in which its next row is served.
        credit: Rows left in that round.
    """

    def __init__(self, source: Source, round_number: int, credit: int) -> None:
        self.source = source
        self.ranked: list[tuple[float, int, Request]] = []
        self.round = round_number
        self.credit = credit
        self.rows = 0
        self.bytes = 0


class FairShare:
    """Rounds of one queue.

    Attributes:
        quantum_rows: Rows of a source in one round.
        round: Latest round that was served.
    """

    def __init__(self) -> None:
        self.quantum_rows = QUANTUM_ROWS
        self.round = 1
        # Rows that sources in earlier rounds used since `round` last advanced.
        self._rows_behind = 0
        self._away: dict[Source, Flow] = {}
        self._check_at = SOURCES_UNCHECKED
        self._connections: dict[str, int] = {}
        self._shares = 0

    def enter(self, source: Source) -> Flow:
        """Add a source with its first queued request; a recent one keeps its round and credit."""
        tenant = source.tenant
        count = self._connections.get(tenant, 0) if tenant else 0
        if tenant:
            self._connections[tenant] = count + 1
        self._shares += not count
        flow = self._away.pop(source, None)
        if flow is None or flow.round < self.round - 1:
            flow = Flow(source, self.round - 1, self.quantum_rows)
        return flow

    def entry_of(self, source: Source) -> tuple[int, int]:
        """Round and credit with which a source without queued requests would enter."""
        away = self._away.get(source)
        if away is not None and away.round >= self.round - 1:
            return away.round, away.credit
        return self.round - 1, self.quantum_rows

    def leave(self, flow: Flow) -> None:
        """Remove a source when its last request leaves the queue."""
        tenant = flow.source.tenant
        left = self._connections[tenant] - 1 if tenant else 0
        if left:
            self._connections[tenant] = left
        else:
            if tenant:
                del self._connections[tenant]
            self._shares -= 1
        if len(self._away) >= self._check_at:
            self._drop_outdated()
        self._away[flow.source] = flow

    def serve(self, flow: Flow, rows: int) -> None:
        """Charge a source for rows that go to a worker."""
        if flow.round >= self.round:
            self.round = flow.round
            self._rows_behind = 0
        else:
            # A steady supply of new sources must not starve those with a backlog.
            self._rows_behind += rows
            if self._rows_behind > self.quantum_rows * self._shares:
                self.round += 1
                self._rows_behind = 0
        cost = rows * self.cost(flow)
        if cost < flow.credit:
            flow.credit -= cost
        else:
            flow.round, flow.credit = self.after(flow.round, flow.credit, cost)

    def after(self, round_number: int, credit: int, rows: int) -> tuple[int, int]:
        """Round and credit of a source after rows were served; a deficit spans several rounds."""
        credit -= rows
        if credit <= 0:
            rounds = -credit // self.quantum_rows + 1
            round_number += rounds
            credit += rounds * self.quantum_rows
        return round_number, credit

    def _drop_outdated(self) -> None:
        """Drop the sources that would enter as new ones, such as those of closed connections.

        The next check is after as many sources again as are left, so that one costs constant time.
        """
        away = self._away.items()
        self._away = {source: each for source, each in away if each.round >= self.round - 1}
        if 2 * len(self._away) > SOURCES_MAX:
            self._away.clear()  # All of them enter as new sources.
        self._check_at = max(2 * len(self._away), SOURCES_UNCHECKED)

    def cost(self, flow: Flow) -> int:
        """Credit that one row of a source costs."""
        tenant = flow.source.tenant
        return self._connections[tenant] if tenant else 1


class BriefRequests:
    """Sources that recently sent brief requests (`is_brief`).

    Large requests are sliced only while another source sends brief ones, because a slice costs a
    copy and an extra message.
    """

    def __init__(self) -> None:
        self._last = self._before = UNKNOWN_SOURCE
        self._last_ns = self._before_ns = -RECENT_NS

    def note(self, source: Source, now_ns: int) -> None:
        """Record a brief request."""
        if source != self._last:
            self._before, self._before_ns = self._last, self._last_ns
            self._last = source
        self._last_ns = now_ns

    def is_recent(self, now_ns: int) -> bool:
        """Whether any source sent one recently."""
        return now_ns - self._last_ns < RECENT_NS

    def has_other(self, source: Source, now_ns: int) -> bool:
        """Whether another source sent one recently."""
        last_ns = self._last_ns if source != self._last else self._before_ns
        return now_ns - last_ns < RECENT_NS


def slice_rows(cost: CostModel) -> int:
    """Number of rows in a slice; 0 while the cost is not learned.

    A slice runs for `SLICE_NS`, or twice the fixed cost of a batch if that is longer.
    """
    if cost.samples < LEARNED_SAMPLES or cost.row_ns <= 0:
        return 0
    return max(int(max(SLICE_NS - cost.base_ns, cost.base_ns) / cost.row_ns), 1)


def is_brief(cost: CostModel, rows: int) -> bool:
    """Whether rows cost at most half a slice; False until the cost is learned."""
    return cost.samples >= LEARNED_SAMPLES and 2 * cost.predict_ns(rows) <= SLICE_NS
