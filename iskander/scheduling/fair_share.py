"""Fair queueing between the sources of requests: rounds, and who has used up a round.

Service goes in rounds. In each, a source may have `quantum_rows` rows; the policy's order decides
between the sources that have not used up theirs. A source that comes, or comes back after it had
less than its share, enters one round before the present one and so goes before all that have a
backlog. So the backlog of a source delays its own later requests, and the request of another source
waits for little more than the batch that is running.

A tenant (the name of a token) has one share however many connections it opens: a row of a
connection costs as many rows as its tenant has connections with waiting requests. A connection
without a token has a share of its own.

Pure. Source: deficit round robin (Shreedhar and Varghese, 1995); new flows before old ones as in
FQ-CoDel (RFC 8290, section 4.2).
"""

from __future__ import annotations

from typing import Final

from iskander.auth.source import UNKNOWN_SOURCE, Source
from iskander.clock import NS_PER_MS, NS_PER_S
from iskander.scheduling.cost import LEARNED_SAMPLES, CostModel
from iskander.scheduling.request import Request

SLICE_NS: Final = 2 * NS_PER_MS
"""How long a batch of one source may run while another source sends brief requests."""
RECENT_NS: Final = NS_PER_S
"""For how long a brief request counts."""
QUANTUM_ROWS: Final = 1024
"""Rows of a source in a round while the cost of rows is not known; then, those of a slice."""
SOURCES_MAX: Final = 4096
"""Sources without waiting requests that are remembered."""


class Flow:
    """The waiting requests of one source.

    Attributes:
        source: Whose they are.
        ranked: (rank, number, request), ascending.
        round: In which its next row is served.
        credit: Rows that it may have in that round.
        rows: That wait.
        bytes: Of the inputs that wait.
    """

    def __init__(self, source: Source, round_number: int, credit: int) -> None:
        self.source = source
        self.ranked: list[tuple[float, int, Request]] = []
        self.round = round_number
        self.credit = credit
        self.rows = 0
        self.bytes = 0


class FairShare:
    """The rounds of one queue.

    Attributes:
        quantum_rows: That a source may have in a round.
        round: The present one: the latest of which something was served.
    """

    def __init__(self) -> None:
        self.quantum_rows = QUANTUM_ROWS
        self.round = 1
        self._served_before = 0
        self._away: dict[Source, Flow] = {}
        self._connections: dict[str, int] = {}
        self._shares = 0

    def enter(self, source: Source) -> Flow:
        """A source that had no waiting request has one now."""
        tenant = source.tenant
        if tenant:
            count = self._connections.get(tenant, 0)
            self._connections[tenant] = count + 1
            self._shares += not count
        else:
            self._shares += 1
        flow = self._away.pop(source, None)
        if flow is None or flow.round < self.round - 1:
            flow = Flow(source, self.round - 1, self.quantum_rows)
        return flow

    def entry_of(self, source: Source) -> tuple[int, int]:
        """The round in which a source without waiting requests would enter, and its credit."""
        away = self._away.get(source)
        if away is not None and away.round >= self.round - 1:
            return away.round, away.credit
        return self.round - 1, self.quantum_rows

    def leave(self, flow: Flow) -> None:
        """A source has no waiting request any more."""
        tenant = flow.source.tenant
        left = self._connections[tenant] - 1 if tenant else 0
        if left:
            self._connections[tenant] = left
        else:
            if tenant:
                del self._connections[tenant]
            self._shares -= 1
        if len(self._away) >= SOURCES_MAX:
            away = self._away.items()
            self._away = {source: each for source, each in away if each.round >= self.round - 1}
            if len(self._away) >= SOURCES_MAX:
                self._away.clear()  # All enter as if they were new.
        self._away[flow.source] = flow

    def serve(self, flow: Flow, rows: int) -> None:
        """Rows of a source go to a worker."""
        if flow.round >= self.round:
            self.round = flow.round
            self._served_before = 0
        else:
            # Sources that are always new would keep those with a backlog waiting for ever.
            self._served_before += rows
            if self._served_before > self.quantum_rows * self._shares:
                self.round += 1
                self._served_before = 0
        cost = rows * self.cost(flow)
        if cost < flow.credit:
            flow.credit -= cost
        else:
            flow.round, flow.credit = self.after(flow.round, flow.credit, cost)

    def after(self, round_number: int, credit: int, rows: int) -> tuple[int, int]:
        """Round and credit of a source that has had rows; of a large request it owes the rest."""
        credit -= rows
        if credit <= 0:
            rounds = -credit // self.quantum_rows + 1
            round_number += rounds
            credit += rounds * self.quantum_rows
        return round_number, credit

    def cost(self, flow: Flow) -> int:
        """What a row of a source costs it, in rows."""
        tenant = flow.source.tenant
        return self._connections[tenant] if tenant else 1


class BriefRequests:
    """Which sources have sent requests lately that cost much less than a slice.

    Only then are batches of the others sliced: a slice costs a copy of its results and a message
    more, and where all requests are large nobody gains by it.
    """

    def __init__(self) -> None:
        self._last = self._before = UNKNOWN_SOURCE
        self._last_ns = self._before_ns = -RECENT_NS

    def note(self, source: Source, now_ns: int) -> None:
        """A brief request came."""
        if source != self._last:
            self._before, self._before_ns = self._last, self._last_ns
            self._last = source
        self._last_ns = now_ns

    def is_recent(self, now_ns: int) -> bool:
        """Whether one came lately."""
        return now_ns - self._last_ns < RECENT_NS

    def has_other(self, source: Source, now_ns: int) -> bool:
        """Whether one came lately from another source than this."""
        if source != self._last:
            return now_ns - self._last_ns < RECENT_NS
        return now_ns - self._before_ns < RECENT_NS


def slice_rows(cost: CostModel) -> int:
    """Rows of a slice; at least as many as cost what a batch costs by itself. 0: not known."""
    if cost.samples < LEARNED_SAMPLES or cost.row_ns <= 0:
        return 0
    return max(int(max(SLICE_NS - cost.base_ns, cost.base_ns) / cost.row_ns), 1)


def is_brief(cost: CostModel, rows: int) -> bool:
    """Whether so many rows cost at most half a slice."""
    return cost.samples >= LEARNED_SAMPLES and 2 * cost.predict_ns(rows) <= SLICE_NS
