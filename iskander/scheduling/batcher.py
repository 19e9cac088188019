"""Which waiting requests make the next batch, and whether to send it now.

Rows are counted, not requests. Requests of the first one's shape are taken in the queue's order
until the next one would not fit, or would make the earliest deadline of the batch be missed. A
request is only ever split where it is larger than any batch may be.

A batch goes to an idle worker at once, unless waiting a little pays: the settings say to linger, or
a client is about to send a request that would otherwise have to pay for a run of its own. To a
worker that still runs another it goes ahead of time, so that the worker does not idle in between;
but one that gains by growing goes just before it is needed.

Pure: reads the queue and changes nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from enum import StrEnum
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from iskander.clock import NS_PER_US
from iskander.config.models import LaneConfig
from iskander.scheduling.cost import LEARNED_SAMPLES, CostModel
from iskander.scheduling.fair_share import BriefRequests, slice_rows
from iskander.scheduling.queue import WaitingQueue
from iskander.scheduling.request import NEVER_NS, Request

REQUESTS_MAX: Final = 1024
"""Of one batch: its message has to fit a frame."""
SKIPPED_MAX: Final = 256
"""Requests of other shapes that are passed over in search of those that fit the first."""
GROWTH: Final = 8
"""A batch whose rows cost eight times what the batch itself does, its way to the worker and back
included, is as good as full."""
LEAD_NS: Final = 150 * NS_PER_US
LEAD_SHARE: Final = 1 / 16
"""A batch goes to a busy worker so long before it is expected to be free: a trip between the
processes, and a share of the run by which the expectation may be wrong."""
DOUBT: Final = 1 / 32
"""Of a run, by which it may take longer without being late."""
GIVEN_UP_FOR: Final = 64
"""The most requests that are looked at to see whether one of them is better given up."""
LATE_NS: Final = 1000 * NS_PER_US
"""A timer of the loop fires up to a millisecond late, and the batch still has to go there."""
EXPECTED_LATE_NS: Final = 500 * NS_PER_US
"""The same where a client is expected, who mostly comes before the timer."""


class Reason(StrEnum):
    """Why a batch was closed; the names under which they are counted."""

    FULL = "closed.full"
    IDLE = "closed.idle"
    LINGER = "closed.linger"
    DEADLINE = "closed.deadline"
    SHAPE = "closed.shape"
    ALONE = "closed.alone"


class Rules(NamedTuple):
    """How a lane's batches are made.

    Attributes:
        rows_max: The most rows of a batch.
        sizes: The only numbers of rows that the model is run with, ascending; empty: any.
        preferred: Numbers of rows to close a batch at, ascending.
        linger_ns: How long the first request may wait for others.
        may_doom: Whether what cannot meet its deadline is left out, to be refused.
        has_shapes: Requests may have different shapes.
    """

    rows_max: int
    sizes: tuple[int, ...] = ()
    preferred: tuple[int, ...] = ()
    linger_ns: int = 0
    may_doom: bool = True
    has_shapes: bool = False

    def run_rows(self, rows: int) -> int:
        """Rows that the model is run with for a batch of so many."""
        return next((size for size in self.sizes if size >= rows), rows)

    def slice_of(self, rows: int) -> int:
        """Rows of a slice that is to have about so many; 0: not known."""
        if self.sizes and rows:
            rows = next((size for size in reversed(self.sizes) if size <= rows), self.sizes[0])
        return min(rows, self.rows_max)


def make_rules(config: LaneConfig, rows_max: int, rows_fixed: int | None, linger_ns: int) -> Rules:
    """The rules of a lane.

    Args:
        config: Its settings.
        rows_max: The most rows that its model may be run with.
        rows_fixed: The only number of rows that the model takes; None: any.
        linger_ns: Of its policy, where the settings name none.
    """
    sizes = tuple(sorted(size for size in set(config.pad_to) if size <= rows_max))
    if rows_fixed is not None:
        sizes = (rows_fixed,)
    if sizes:
        rows_max = sizes[-1]
    return Rules(
        rows_max=rows_max,
        sizes=sizes,
        preferred=tuple(sorted(size for size in config.preferred_batch_rows if size <= rows_max)),
        linger_ns=config.linger_us * NS_PER_US or linger_ns,
    )


class Formed(msgspec.Struct, frozen=True):
    """The next batch.

    Attributes:
        picks: Requests and how many of their next rows.
        rows: In all.
        reason: Why nothing was added.
        hold_ns: Send it at this moment, or when something changes; 0: now.
        is_kept: It is held until its worker is nearly free, and no other lane's may go before it.
        doomed: Requests that cannot be done by their deadlines any more, or are given up for more
            others; they are to be refused, and a batch formed anew.
    """

    picks: list[tuple[Request, int]]
    rows: int
    reason: Reason
    hold_ns: int
    is_kept: bool
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
    """The next batch of a queue that is not empty.

    Args:
        queue: What waits.
        rules: Of the lane.
        cost: Of the worker that would run it.
        now_ns: The time.
        free_ns: When the worker will have run what it has; 0: it has nothing.
        expected: Clients that will ask next, as `Cadence.expected` has them.
        brief: Whose requests are brief; the large ones of others run in slices.
    """
    slicing = _Slicing(rules, cost, brief, now_ns)
    target = _target(queue, rules, cost)
    is_simple = not queue.bound and not rules.linger_ns and not rules.has_shapes
    if is_simple and queue.rows < target and queue.rows <= slicing.rows:
        # Nobody to wait for and nothing to be late for: all that waits goes together.
        picks: list[tuple[Request, int]] = []
        rows = 0
        for request in queue.unordered():
            count = request.todo[0][1]
            picks.append((request, count))
            rows += count
            if len(picks) == REQUESTS_MAX:
                break
        kept_ns = _kept_ns(cost, rules.run_rows(rows), rows, free_ns) if free_ns else 0
        is_kept = kept_ns > now_ns
        return Formed(picks, rows, Reason.IDLE, kept_ns if is_kept else 0, is_kept, [])
    draft = _Draft(rules, cost, max(now_ns, free_ns), target)
    doomed: list[Request] = []
    reason = draft.fill(queue, slicing, doomed)
    hold_ns = kept_ns = 0
    must_keep = draft.earliest_ns < NEVER_NS or draft.is_sliced
    may_wait = reason is None or must_keep
    if may_wait and draft.picks and not draft.picks[0][0].is_alone:
        run_rows = rules.run_rows(draft.rows)
        kept_ns = _kept_ns(cost, run_rows, draft.rows, free_ns, must_keep=must_keep)
        if reason is None:
            hold_ns = _hold_ns(draft, expected)
            reason = Reason.LINGER if rules.linger_ns else Reason.IDLE
    until_ns = max(hold_ns, kept_ns)
    if reason is Reason.DEADLINE and until_ns <= now_ns and rules.may_doom and not doomed:
        doomed = _given_up(draft, queue)
    return Formed(
        draft.picks,
        draft.rows,
        reason or Reason.IDLE,
        until_ns if until_ns > now_ns else 0,
        kept_ns > now_ns and kept_ns >= hold_ns,
        doomed,
    )


class _Slicing:
    """Which requests run in slices: the large ones, while another source sends brief ones.

    A slice goes alone, and is kept until its worker is nearly free.

    Attributes:
        rows: Of a slice; of any request where none is sliced.
    """

    def __init__(
        self, rules: Rules, cost: CostModel, brief: BriefRequests | None, now_ns: int
    ) -> None:
        self.rows = rules.rows_max
        self._brief = brief
        self._now_ns = now_ns
        if brief is not None and brief.is_recent(now_ns):
            self.rows = rules.slice_of(slice_rows(cost)) or rules.rows_max

    def is_for(self, request: Request) -> bool:
        """Whether a request runs in slices."""
        return (
            request.todo[0][1] > self.rows
            and self._brief is not None
            and self._brief.has_other(request.terms.source, self._now_ns)
        )


class _Draft:
    """A batch while it is put together."""

    def __init__(self, rules: Rules, cost: CostModel, begin_ns: int, target: int) -> None:
        self.rules = rules
        self.cost = cost
        self.begin_ns = begin_ns
        self.target = target
        self.picks: list[tuple[Request, int]] = []
        self.rows = 0
        self.earliest_ns = self.oldest_ns = NEVER_NS
        self.is_sliced = False

    def fill(self, queue: WaitingQueue, slicing: _Slicing, doomed: list[Request]) -> Reason | None:
        """Add requests in their order; those that would be late are added to `doomed`.

        Returns:
            Why nothing was added after the last; None: nothing more waits.
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
            self.is_sliced = slicing.is_for(request)
            if not (self.is_sliced and self.picks):
                self.add(request, slicing.rows if self.is_sliced else self.rules.rows_max)
            if self.is_sliced or self.rows >= self.target or len(self.picks) >= REQUESTS_MAX:
                return Reason.FULL
        return Reason.SHAPE if skipped else None

    def run_ns(self, rows: int) -> int:
        """What a batch of so many rows would take."""
        return self.cost.predict_ns(self.rules.run_rows(rows))

    def end_ns(self, rows: int) -> int:
        """When a batch of so many rows would surely have its results."""
        run_ns = self.run_ns(rows)
        return self.begin_ns + run_ns + LEAD_NS + int(DOUBT * run_ns)

    def latest_ns(self, rows: int) -> int:
        """Until when the batch can be held and be in time with so many rows in the end."""
        return self.earliest_ns - (self.end_ns(rows) - self.begin_ns)

    def is_doomed(self, request: Request) -> bool:
        """Whether a request would be late in a batch of its own."""
        if request.deadline_ns >= NEVER_NS or not self.rules.may_doom or not self.cost.samples:
            return False
        rows = min(request.todo[0][1], self.rules.rows_max)
        return self.end_ns(rows) > request.deadline_ns

    def closes_before(self, request: Request) -> Reason | None:
        """Why a request is not added; None: it is."""
        if not self.picks:
            return None
        first, rows = self.picks[0][0], self.rows + request.todo[0][1]
        if first.is_alone or request.is_alone:
            return Reason.ALONE
        if request.shape != first.shape:
            return Reason.SHAPE
        if rows > self.target:
            return Reason.FULL
        due_ns = min(self.earliest_ns, request.deadline_ns)
        if due_ns < NEVER_NS and self.cost.samples and self.end_ns(rows) > due_ns:
            return Reason.DEADLINE
        return None

    def add(self, request: Request, rows_max: int) -> None:
        """Add a request's next rows, at most so many."""
        rows = min(request.todo[0][1], rows_max)
        self.picks.append((request, rows))
        self.rows += rows
        self.earliest_ns = min(self.earliest_ns, request.deadline_ns)
        self.oldest_ns = min(self.oldest_ns, request.queued_ns)


def _target(queue: WaitingQueue, rules: Rules, cost: CostModel) -> int:
    """Rows to fill a batch up to.

    The largest preferred number that waits. Without preferences, all that a batch may have, or what
    is worth it: a batch whose rows cost many times what the batch itself does gains nothing by
    more, and rows of one whole request are not copied.
    """
    if rules.preferred:
        return max((size for size in rules.preferred if size <= queue.rows), default=rules.rows_max)
    if rules.sizes or cost.samples < LEARNED_SAMPLES or not cost.row_ns:
        return rules.rows_max
    return min(rules.rows_max, max(int(GROWTH * (cost.base_ns + LEAD_NS) / cost.row_ns), 1))


def _kept_ns(
    cost: CostModel, run_rows: int, rows: int, free_ns: int, *, must_keep: bool = False
) -> int:
    """Until when to keep a batch from a worker that runs another.

    Where its rows cost more than the batch itself there is little to gain by growing, and it goes
    now; so it does where nothing is known yet. Where it has a deadline, or is a slice, it is kept
    all the same (`must_keep`): one that is due sooner, or of a source that had less, may come.
    """
    gains = cost.base_ns >= cost.row_ns * rows or must_keep
    if not free_ns or not cost.samples or not gains:
        return 0
    return free_ns - LEAD_NS - int(LEAD_SHARE * cost.predict_ns(run_rows))


def _hold_ns(draft: _Draft, expected: Iterable[tuple[int, int]]) -> int:
    """Until when to keep a batch from an idle worker, for more to come; 0: not at all.

    For the settings' linger: as long as the earliest deadline allows. For a client that is
    expected: where it would be late if it had to wait for this batch to end and is in time with it,
    as is everybody in the batch, with those who are expected before it. Only requests with a
    deadline are held for others: theirs is to be in time, and the others' is to be soon.
    """
    rules, cost, rows = draft.rules, draft.cost, draft.rows
    if rules.linger_ns:
        latest_ns = draft.latest_ns(rows) - LATE_NS
        if not cost.samples and draft.earliest_ns < NEVER_NS:
            latest_ns = (draft.oldest_ns + draft.earliest_ns) // 2
        return min(draft.oldest_ns + rules.linger_ns, latest_ns)
    if draft.earliest_ns >= NEVER_NS or cost.samples < LEARNED_SAMPLES:
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


def _given_up(draft: _Draft, queue: WaitingQueue) -> list[Request]:
    """Requests that are better refused, because more others are in time without them.

    Who is due soonest allows a short run only, and so a small batch; after it, those that found no
    place in it may be late. Given up are so many of those that are due soonest that the fewest are
    late in this batch and the next; one of a higher priority counts for eight.
    """
    waiting = sorted(islice(queue, GIVEN_UP_FOR), key=_deadline_ns)
    best, best_lost, given_up = 0, float("inf"), 0.0
    for count, first in enumerate(waiting):
        if given_up >= best_lost:
            break
        taken, rows = count, 0
        while taken < len(waiting):
            wanted = rows + waiting[taken].todo[0][1]
            if wanted > draft.target or draft.end_ns(wanted) > first.deadline_ns:
                break
            taken, rows = taken + 1, wanted
        rest = waiting[taken:]
        rest_rows = min(sum(request.todo[0][1] for request in rest), draft.rules.rows_max)
        due_ns = draft.end_ns(rows) + draft.run_ns(rest_rows)
        late = rest[: bisect_left(rest, due_ns, key=_deadline_ns)]
        lost = given_up + sum(map(_weight, late))
        if lost < best_lost:
            best, best_lost = count, lost
        given_up += _weight(first)
    return waiting[:best]


def _deadline_ns(request: Request) -> int:
    return request.deadline_ns


def _weight(request: Request) -> float:
    return 8.0**-request.terms.priority
