"""Batch formation: selects queued requests for the next batch and the time to send it.

The size of a batch is its number of rows. It takes requests with the shape of the first, in queue
order, until the next one does not fit or would make the batch miss its earliest deadline. A request
is split only if it is larger than the largest batch.

If the rows of a model depend on each other (`contract.row_relation`), each request is a batch of
its own, at once and without padding.

An idle worker gets its batch at once, unless a linger is configured or a client is about to send a
request that would otherwise cost a separate run. A busy worker gets its next batch early, to avoid
idle time between runs. A batch that gains by growing is held until the worker is nearly free.

Pure: reads the queue and changes nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from enum import StrEnum
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from iskander.config.models import LaneConfig
from iskander.contract.processing.row_relation import INDEPENDENT, RowRelation
from iskander.foundation.clock import NS_PER_US
from iskander.gateway.scheduling.lanes.cost import LEARNED_SAMPLES, CostModel
from iskander.gateway.scheduling.lanes.fair_share import BriefRequests, slice_rows
from iskander.gateway.scheduling.lanes.queue import WaitingQueue
from iskander.gateway.scheduling.request import NEVER_NS, Request

REQUESTS_MAX: Final = 1024
"""Maximum number of requests in a batch, so that its message fits a frame."""
SKIPPED_MAX: Final = 256
"""Maximum number of requests of other shapes that the search for matching ones skips."""
FULL_COST_RATIO: Final = 8
"""A batch counts as full when its rows cost eight times its fixed cost, transport included."""
LEAD_NS: Final = 150 * NS_PER_US
LEAD_SHARE: Final = 1 / 16
"""A busy worker gets its next batch this long before it is expected to be free: the time of a
message between the processes, and a share of the run for errors of the prediction."""
RUN_MARGIN: Final = 1 / 32
"""Safety margin of a predicted run time, as a share of it."""
EXAMINED_MAX: Final = 64
"""Maximum number of queued requests that `_select_rejections` examines."""
LATE_NS: Final = 1000 * NS_PER_US
"""A timer of the event loop fires up to a millisecond late, so a hold ends this much earlier."""
EXPECTED_LATE_NS: Final = 500 * NS_PER_US
"""The same while waiting for an expected request; it mostly arrives before the timer fires."""


class Reason(StrEnum):
    """Reason for closing a batch; the values are counter names."""

    FULL = "closed.full"
    IDLE = "closed.idle"
    LINGER = "closed.linger"
    DEADLINE = "closed.deadline"
    SHAPE = "closed.shape"
    ALONE = "closed.alone"


class Rules(NamedTuple):
    """Batching rules of a lane.

    Attributes:
        sizes: The only numbers of rows that the model runs with, ascending; empty: any.
        preferred: Numbers of rows at which to close a batch, ascending.
        linger_ns: Maximum time that the first request waits for others.
        may_doom: Requests that cannot meet their deadlines are rejected.
        has_shapes: Requests may have different shapes.
        is_apart: Every batch has rows of one request only, and is not held to grow.
        is_whole: Every request is one batch without padding; none has more than `rows_max` rows.
    """

    rows_max: int
    sizes: tuple[int, ...] = ()
    preferred: tuple[int, ...] = ()
    linger_ns: int = 0
    may_doom: bool = True
    has_shapes: bool = False
    is_apart: bool = False
    is_whole: bool = False

    def run_rows(self, rows: int) -> int:
        """Number of rows that the model runs with for a batch, padding included."""
        return next((size for size in self.sizes if size >= rows), rows)

    def slice_of(self, rows: int) -> int:
        """Round the rows of a slice to an allowed size, down if possible; 0 for 0."""
        if self.sizes and rows:
            rows = next((size for size in reversed(self.sizes) if size <= rows), self.sizes[0])
        return min(rows, self.rows_max)


def make_rules(
    config: LaneConfig,
    rows_max: int,
    rows_fixed: int | None,
    linger_ns: int,
    relation: RowRelation = INDEPENDENT,
) -> Rules:
    """Derive the rules of a lane; `rows_fixed` is the graph's, `linger_ns` the policy's default."""
    if relation.is_whole:
        return Rules(rows_fixed or rows_max, is_apart=True, is_whole=True)
    sizes = tuple(sorted(size for size in set(config.pad_to) if size <= rows_max))
    if rows_fixed is not None:
        sizes = (rows_fixed,)
    if sizes:
        rows_max = sizes[-1]
    if not relation.is_combinable:
        return Rules(rows_max, sizes, is_apart=True)
    return Rules(
        rows_max=rows_max,
        sizes=sizes,
        preferred=tuple(sorted(size for size in config.preferred_batch_rows if size <= rows_max)),
        linger_ns=config.linger_us * NS_PER_US or linger_ns,
    )


class Formed(msgspec.Struct, frozen=True):
    """The next batch.

    Attributes:
        picks: Requests, each with the number of its next rows.
        reason: Why the batch was closed.
        hold_ns: Time to send it, unless the queue changes before; 0: now.
        reserves_worker: It is held until its worker is nearly free, and reserves the worker.
        doomed: If not empty, reject these requests and form the batch again. They cannot meet their
            deadlines, or would make more other requests late.
    """

    picks: list[tuple[Request, int]]
    rows: int
    reason: Reason
    hold_ns: int
    reserves_worker: bool
    doomed: list[Request]


def form(
    queue: WaitingQueue,
    rules: Rules,
    cost: CostModel,
    *,
    now_ns: int,
    free_ns: int = 0,
    expected: Iterable[tuple[int, int]] = (),
    brief: BriefRequests | None = None,
) -> Formed:
    """Form the next batch of a queue that is not empty, for one worker.

    At `free_ns` the worker becomes free (0: it is idle). `expected` are the requests predicted by
    `ArrivalPredictor`. While a source sends `brief` requests, large ones of others run in slices.
    """
    slice_max = rules.rows_max
    if brief is not None and brief.is_recent(now_ns):
        slice_max = rules.slice_of(slice_rows(cost)) or slice_max
    target = _target(queue, rules, cost)
    is_simple = not queue.constrained and not rules.linger_ns and not rules.has_shapes
    is_simple = is_simple and not rules.is_apart
    if is_simple and queue.rows < target and queue.rows <= slice_max:
        # Fast path: nothing to wait for and no deadline, so the whole queue is one batch.
        picks: list[tuple[Request, int]] = []
        rows = 0
        for request in queue.unordered():
            count = request.todo[0][1]
            picks.append((request, count))
            rows += count
            if len(picks) == REQUESTS_MAX:
                break
        busy_hold_ns = _busy_hold_ns(cost, rules.run_rows(rows), rows, free_ns) if free_ns else 0
        reserves_worker = busy_hold_ns > now_ns
        return Formed(
            picks, rows, Reason.IDLE, busy_hold_ns if reserves_worker else 0, reserves_worker, []
        )
    draft = _Draft(rules, cost, max(now_ns, free_ns), target)
    doomed: list[Request] = []
    reason = draft.fill(queue, doomed, slice_max, brief, now_ns)
    hold_ns = busy_hold_ns = 0
    must_hold = draft.due_ns < NEVER_NS or draft.is_sliced
    may_wait = reason is None or must_hold
    is_alone = rules.is_apart or (bool(draft.picks) and draft.picks[0][0].is_alone)
    if may_wait and draft.picks and not is_alone:
        run_rows = rules.run_rows(draft.rows)
        busy_hold_ns = _busy_hold_ns(cost, run_rows, draft.rows, free_ns, must_hold=must_hold)
        if reason is None:
            hold_ns = _idle_hold_ns(draft, expected)
            reason = Reason.LINGER if rules.linger_ns else Reason.IDLE
    until_ns = max(hold_ns, busy_hold_ns)
    if reason is Reason.DEADLINE and until_ns <= now_ns and rules.may_doom and not doomed:
        doomed = _select_rejections(draft, queue)
    return Formed(
        draft.picks,
        draft.rows,
        reason or Reason.IDLE,
        until_ns if until_ns > now_ns else 0,
        busy_hold_ns > now_ns and busy_hold_ns >= hold_ns,
        doomed,
    )


class _Draft:
    """A batch under construction.

    Attributes:
        begin_ns: Earliest start of its run.
        target: Number of rows at which it is full.
        due_ns: Earliest deadline of its requests.
        oldest_ns: Earliest `queued_ns` of its requests.
        is_sliced: It is a slice of a large request, or closed before one.
    """

    def __init__(self, rules: Rules, cost: CostModel, begin_ns: int, target: int) -> None:
        self.rules = rules
        self.cost = cost
        self.begin_ns = begin_ns
        self.target = target
        self.picks: list[tuple[Request, int]] = []
        self.rows = 0
        self.due_ns = self.oldest_ns = NEVER_NS
        self.is_sliced = False

    def fill(
        self,
        queue: WaitingQueue,
        doomed: list[Request],
        slice_max: int,
        brief: BriefRequests | None,
        now_ns: int,
    ) -> Reason | None:
        """Add requests in queue order, and those too late to `doomed`.

        A slice of a large request runs alone; a request that runs alone by its terms or the rules
        has no slices. Returns the reason for closing; None: it can grow.
        """
        skipped = 0
        for request in queue:
            if self.is_doomed(request):
                doomed.append(request)
                continue
            reason = self.closes_before(request)
            if reason is Reason.SHAPE and skipped < SKIPPED_MAX:
                skipped += 1
                continue
            if reason is not None:
                return reason
            self.is_sliced = (
                request.todo[0][1] > slice_max
                and not (self.rules.is_apart or request.terms.is_alone)
                and brief is not None
                and brief.has_other(request.terms.source, now_ns)
            )
            if not (self.is_sliced and self.picks):
                self.add(request, slice_max if self.is_sliced else self.rules.rows_max)
            if self.is_sliced or self.rows >= self.target or len(self.picks) >= REQUESTS_MAX:
                return Reason.FULL
        return Reason.SHAPE if skipped else None

    def run_ns(self, rows: int) -> int:
        """Predicted run time of a batch."""
        return self.cost.predict_ns(self.rules.run_rows(rows))

    def end_ns(self, rows: int) -> int:
        """Predicted time at which the results of a batch are complete, with safety margins."""
        run_ns = self.run_ns(rows)
        return self.begin_ns + run_ns + LEAD_NS + int(RUN_MARGIN * run_ns)

    def latest_ns(self, rows: int) -> int:
        """Latest send time at which a batch of `rows` meets its earliest deadline."""
        return self.due_ns - (self.end_ns(rows) - self.begin_ns)

    def is_doomed(self, request: Request) -> bool:
        """Whether a request would be late even if it ran next and alone."""
        if request.deadline_ns >= NEVER_NS or not self.rules.may_doom or not self.cost.samples:
            return False
        rows = min(request.todo[0][1], self.rules.rows_max)
        return self.end_ns(rows) > request.deadline_ns

    def closes_before(self, request: Request) -> Reason | None:
        """Reason for closing the batch before a request; None if the request can be added."""
        if not self.picks:
            return None
        first, rows = self.picks[0][0], self.rows + request.todo[0][1]
        if self.rules.is_apart or first.is_alone or request.is_alone:
            return Reason.ALONE
        if request.shape != first.shape:
            return Reason.SHAPE
        if rows > self.target:
            return Reason.FULL
        due_ns = min(self.due_ns, request.deadline_ns)
        if due_ns < NEVER_NS and self.cost.samples and self.end_ns(rows) > due_ns:
            return Reason.DEADLINE
        return None

    def add(self, request: Request, rows_max: int) -> None:
        """Add the next rows of a request, at most `rows_max`."""
        rows = min(request.todo[0][1], rows_max)
        self.picks.append((request, rows))
        self.rows += rows
        self.due_ns = min(self.due_ns, request.deadline_ns)
        self.oldest_ns = min(self.oldest_ns, request.queued_ns)


def _target(queue: WaitingQueue, rules: Rules, cost: CostModel) -> int:
    """Number of rows at which a batch is full.

    The largest preferred size that the queue can fill, else the maximum. Without preferred sizes,
    less if the cost of rows dominates: a batch then gains little by growing, and one of a single
    whole request needs no copy.
    """
    if rules.preferred:
        return max((size for size in rules.preferred if size <= queue.rows), default=rules.rows_max)
    if rules.sizes or cost.samples < LEARNED_SAMPLES or not cost.row_ns:
        return rules.rows_max
    full_rows = int(FULL_COST_RATIO * (cost.base_ns + LEAD_NS) / cost.row_ns)
    return min(rules.rows_max, max(full_rows, 1))


def _busy_hold_ns(
    cost: CostModel, run_rows: int, rows: int, free_ns: int, *, must_hold: bool = False
) -> int:
    """Time until which to hold a batch for a busy worker; 0: send it now.

    A batch whose rows cost more than its fixed cost gains little by growing and is sent at once.
    `must_hold` (a deadline, or a slice) holds it, because a more urgent request may arrive.
    """
    may_hold = cost.base_ns >= cost.row_ns * rows or must_hold
    if not free_ns or not cost.samples or not may_hold:
        return 0
    return free_ns - LEAD_NS - int(LEAD_SHARE * cost.predict_ns(run_rows))


def _idle_hold_ns(draft: _Draft, expected: Iterable[tuple[int, int]]) -> int:
    """Time until which to hold a batch for an idle worker while it grows; 0: send it now.

    A linger ends in time for the earliest deadline. Without a linger, the batch is held for an
    expected request that would be late after it, but in time as a part of it, together with all
    requests expected earlier. Batches without a deadline are sent at once, for low latency.
    """
    rules, cost, rows = draft.rules, draft.cost, draft.rows
    if rules.linger_ns:
        latest_ns = draft.latest_ns(rows) - LATE_NS
        if not cost.samples and draft.due_ns < NEVER_NS:
            latest_ns = (draft.oldest_ns + draft.due_ns) // 2
        return min(draft.oldest_ns + rules.linger_ns, latest_ns)
    if draft.due_ns >= NEVER_NS or cost.samples < LEARNED_SAMPLES:
        return 0
    after_ns = draft.end_ns(rows) + draft.run_ns(1)
    for rows_more, (at_ns, due_ns) in enumerate(expected, 1):
        latest_ns = draft.latest_ns(rows + rows_more) - EXPECTED_LATE_NS
        if at_ns > latest_ns or rows + rows_more > draft.target:
            return 0
        would_end_ns = at_ns + draft.end_ns(rows + rows_more) - draft.begin_ns
        if at_ns > draft.begin_ns and would_end_ns <= due_ns < after_ns:
            return at_ns
    return 0


def _select_rejections(draft: _Draft, queue: WaitingQueue) -> list[Request]:
    """Select requests to reject, so that the fewest are rejected or late.

    The earliest deadline allows only a small batch, and the requests left for the next one may be
    late. Selects the requests with the N earliest deadlines; N minimizes the weight of all that are
    rejected, or late in the next batch. Each level of priority weighs eight times the next lower
    one.
    """
    waiting = sorted(islice(queue, EXAMINED_MAX), key=_deadline_ns)
    best, least_lost, rejected = 0, float("inf"), 0.0
    for count, first in enumerate(waiting):
        if rejected >= least_lost:
            break
        end, rows = count, 0
        while end < len(waiting):
            with_next = rows + waiting[end].todo[0][1]
            if with_next > draft.target or draft.end_ns(with_next) > first.deadline_ns:
                break
            end, rows = end + 1, with_next
        rest = waiting[end:]
        rest_rows = min(sum(request.todo[0][1] for request in rest), draft.rules.rows_max)
        due_ns = draft.end_ns(rows) + draft.run_ns(rest_rows)
        late = rest[: bisect_left(rest, due_ns, key=_deadline_ns)]
        lost = rejected + sum(map(_weight, late))
        if lost < least_lost:
            best, least_lost = count, lost
        rejected += _weight(first)
    return waiting[:best]


def _deadline_ns(request: Request) -> int:
    return request.deadline_ns


def _weight(request: Request) -> float:
    return 8.0**-request.terms.priority
