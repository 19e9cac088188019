"""Pair of versions, served and candidate: state, selected requests, comparison of results.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Callable
from random import random
from typing import Final

from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.foundation.logs import models as log
from iskander.foundation.measurement.counters import Counters
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.request import NEVER_NS, Request
from iskander.gateway.shadow.admission import Pauses
from iskander.gateway.shadow.comparison import GROUP_WORK, Body, Comparison, Tolerance
from iskander.gateway.shadow.contract import match_outputs
from iskander.gateway.shadow.queue import ShadowPart, ShadowQueue

COMPARE_NS: Final = NS_PER_S // 10
"""Age at which collected results are compared, even if they are few."""
WHOLE_WORK_MAX: Final = 16 * GROUP_WORK
"""Work of the comparison of a request that runs as a whole: some 3 ms of the event loop."""
INTERNAL: Final = "internal error, see the log"


class ShadowPair:
    """Requests of the lane `served` also run on the lane `candidate`, a share of them.

    `admit` keeps a selected request, or drops it.

    Attributes:
        queue: Selected requests that have to run.
        comparison: None until both contracts are known, or if they cannot be compared.
        problem: Why they cannot be compared; empty if they can.
        dropped: Rows of selected requests that were not compared, by reason.
        pauses: Pauses after failures.
        batches: Batches sent to workers.
        busy_until_ns: Until this time, the limits of time permit no batch.
        compare_at_ns: Time at which the collected results are compared at the latest.
    """

    def __init__(
        self,
        served: Lane,
        candidate: Lane,
        queue: ShadowQueue,
        tolerance: Tolerance,
        admit: Callable[[ShadowPair, Request, bytes | memoryview], None],
    ) -> None:
        self.served, self.candidate, self.queue = served, candidate, queue
        self.share = 0.0
        self.comparison: Comparison | None = None
        self.problem = ""
        self.dropped = Counters()
        self.pauses = Pauses()
        self.batches = self.busy_until_ns = 0
        self.compare_at_ns = NEVER_NS
        self._tolerance = tolerance
        self._admit = admit

    def offer(self, request: Request, results: bytes | memoryview) -> None:
        """Select a request or not; its results are complete, and its lease can be shared."""
        if random() < self.share:
            try:
                self._admit(self, request, results)
            except Exception as error:  # The request and those beside it still get their results.
                self._on_error(error)

    @property
    def key(self) -> tuple[str, str, str]:
        """Name of the model, version that is served, and candidate."""
        return self.served.model.name, self.served.model.version, self.candidate.model.version

    @property
    def is_runnable(self) -> bool:
        """Whether a worker would run a batch of the candidate."""
        lane = self.candidate
        is_open = lane.contract is not None and lane.quarantine is None and not lane.outage
        return is_open and bool(lane.workers)

    @property
    def is_apart(self) -> bool:
        """Whether the candidate must run each request as the served version did: as one batch."""
        return self.served.rules.is_apart or self.candidate.rules.is_apart

    def obstacle(self, request: Request) -> str:
        """Return why a request is not compared although it must run as a whole; empty if it is."""
        assert self.comparison is not None
        served, candidate = self.served, self.candidate
        is_part = request.is_part or request.whole is not None
        rows_max = min(served.rules.rows_max, candidate.rules.rows_max)
        is_wrong = candidate.rules.is_whole and candidate.whole_error(request.rows) is not None
        if is_part or is_wrong or request.rows > rows_max:
            return "not_whole"
        is_large = request.rows * self.comparison.row_work > WHOLE_WORK_MAX
        return "too_large" if is_large else ""

    def match(self) -> bool:
        """Compare the contracts, once both are known; return whether results can be compared."""
        served, candidate = self.served, self.candidate
        if self.comparison is None and not self.problem and candidate.contract is not None:
            assert served.contract is not None
            matches = match_outputs(served.contract, candidate.contract)
            if isinstance(matches, str):
                self.problem = matches
                log.shadow_not_comparable(
                    model=candidate.title, served=served.title, reason=matches
                )
            else:
                copiers = served.layouts.outputs, candidate.layouts.outputs
                self.comparison = Comparison(matches, *copiers, self._tolerance)
        return self.comparison is not None

    def state(self, now: int) -> tuple[str, str]:
        """Return the state, and its reason if it is not `comparing`."""
        if self.problem:
            return "not comparable", self.problem
        if not self.share:
            return "paused", "its share is 0"
        if now < self.pauses.until_ns:
            return "suspended", self.pauses.reason
        if not self.is_runnable:
            return "waiting", "no worker runs the candidate"
        return "comparing", ""

    def collect(self, part: ShadowPart, output: memoryview, now: int) -> None:
        """Copy the candidate's results of some rows out of its arena for their comparison."""
        assert self.comparison is not None
        outputs = self.candidate.layouts.outputs
        if outputs.has_strings:
            try:
                output = output[: outputs.string_ranges(output, part.rows)[1]]
            except Exception as error:  # A worker wrote these results.
                self._on_error(error)
                return
        self.compare_at_ns = min(self.compare_at_ns, now + COMPARE_NS)
        served = Body(part.request.results, part.request.rows, part.first)
        self.comparison.collect(part.rows, served, Body(output.tobytes(), part.rows, 0))

    def compare(self, now: int) -> None:
        """Compare the collected results, if they are enough or old."""
        comparison = self.comparison
        if comparison is not None and (comparison.is_due or now >= self.compare_at_ns):
            self.compare_at_ns = NEVER_NS
            try:
                comparison.compare()
            except Exception as error:  # A worker wrote these results.
                self._on_error(error)

    def drop_all(self, reason: str) -> None:
        """Drop all requests that wait."""
        while len(self.queue):
            self.dropped[reason] += self.queue.drop_first()

    def _on_error(self, error: Exception) -> None:
        log.shadow_comparison_failed(model=self.candidate.title, error=error)
        self.pauses.on_failure(INTERNAL, now_ns())
