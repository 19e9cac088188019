"""Admission: whether a request may join a lane's queue, and which requests it evicts.

Runs before memory is leased. Every rejection has its own error code and a time to retry, estimated
from the learned cost.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from iskander.config.models import LaneConfig
from iskander.errors import ClientOverShare, DeadlineExceeded, DeadlineUnreachable, QueueFull
from iskander.foundation.clock import NS_PER_MS
from iskander.gateway.auth.shares import FREE_SHARE, leaves_enough
from iskander.gateway.auth.source import Source
from iskander.gateway.scheduling.lanes.batcher import Rules
from iskander.gateway.scheduling.lanes.cost import CostModel
from iskander.gateway.scheduling.lanes.queue import WaitingQueue
from iskander.gateway.scheduling.request import Request, Terms

MISSED: Final = (DeadlineExceeded.code, DeadlineUnreachable.code)
"""Error codes that count as missed deadlines."""
RETRY_UNKNOWN_MS: Final = 100
PASSED_MAX: Final = 64
"""Maximum number of more urgent requests that the search for a victim skips."""
RESERVE: Final = FREE_SHARE + 1
"""The share of a source is limited within the last 1 / `RESERVE` of a limit."""
RESERVABLE_MIN: Final = 128
"""Smallest limit with a reserved part; a ninth of a smaller one is too little to be useful."""
MARGIN_MIN: Final = 1 / 8
MARGIN_GROWTH: Final = 1 / 2
MARGIN_MEMORY: Final = 64


class Margin:
    """Safety margin of the completion estimate, as a share of the expected time.

    A queue filled up to its deadlines cannot absorb a delay: early deadlines force small batches,
    which waste the time needed to catch up. Under overload a shorter queue loses no throughput, so
    the margin grows with the share of requests that were rejected as late.
    """

    def __init__(self) -> None:
        self.share = MARGIN_MIN
        self._late = 0.0

    def learn(self, *, is_late: bool) -> None:
        """Update from a request with a deadline; averages about the last `MARGIN_MEMORY`."""
        self._late += (is_late - self._late) / MARGIN_MEMORY
        self.share = MARGIN_MIN + MARGIN_GROWTH * self._late


class Backlog(NamedTuple):
    """Work ahead of a new request: `workers` is their number; the first is free at `free_ns`."""

    cost: CostModel
    workers: int
    free_ns: int

    def drain_ns(self, rules: Rules, rows: int, requests: int = 1) -> int:
        """Time that the workers need for the rows of some requests.

        In full batches, or one for each request if the rules keep them apart.
        """
        if not rows:
            return 0
        batches = -(-rows // rules.rows_max)
        if rules.is_apart and requests > batches:
            batches, batch_rows = requests, -(-rows // requests)
        else:
            batch_rows = min(rows, rules.rows_max)
        turns = -(-batches // max(self.workers, 1))
        return turns * self.cost.predict_ns(rules.run_rows(batch_rows))


class Unreserved:
    """The part of a queue's limits that is open to every source."""

    def __init__(self, config: LaneConfig) -> None:
        self._requests = config.queue_requests - reserve_of(config.queue_requests)
        self._rows = config.queue_rows - reserve_of(config.queue_rows)
        self._bytes = config.queue_bytes - reserve_of(config.queue_bytes)

    def fits(self, queue: WaitingQueue, request: Request) -> bool:
        """Whether a request fits this part; if so, `select_victims` would evict none."""
        return (
            queue.requests < self._requests
            and queue.rows + request.rows <= self._rows
            and queue.bytes + request.input_bytes <= self._bytes
        )


def select_victims(
    queue: WaitingQueue, config: LaneConfig, request: Request, older: Request | None, title: str
) -> list[Request] | QueueFull:
    """Select the queued requests to evict for a new one; an error if that is not enough.

    The result excludes `older`, which the new request replaces in any case.
    """
    limits = _Limits(queue, config, request)
    if older is not None:
        limits.remove(older)
    error = limits.error(title)
    if error is None:
        return []
    evicted: list[Request] = []
    for victim in _victims(queue, config, request):
        is_same_client_batch = request.is_part and victim.caller is request.caller
        if victim is not older and not is_same_client_batch:
            evicted.append(victim)
            limits.remove(victim)
            if limits.error(title) is None:
                return evicted
    return error


def _victims(queue: WaitingQueue, config: LaneConfig, request: Request) -> Iterator[Request]:
    """Queued requests that the overflow policy may evict, in order of eviction."""
    victims: Iterator[Request]
    if config.overflow == "drop_oldest":
        oldest = queue.oldest_first(highest=request.terms.priority)
        victims = _no_more_urgent(oldest, request.terms)
    elif config.overflow == "drop_lowest_priority":
        victims = queue.least_first(above=request.terms.priority)
    else:
        return iter(())
    if not queue.is_fair:
        return victims
    # A source never evicts requests of a source that uses less of the queue.
    least = _dominant_share(queue, config, request.terms.source)
    return (v for v in victims if _dominant_share(queue, config, v.terms.source) >= least)


def _dominant_share(queue: WaitingQueue, config: LaneConfig, source: Source) -> float:
    """The largest share of any limit that a source uses."""
    requests, rows, size = queue.usage_of(source)
    shares = (requests / config.queue_requests, rows / config.queue_rows, size / config.queue_bytes)
    return max(shares)


def _no_more_urgent(oldest: Iterator[Request], than: Terms) -> Iterator[Request]:
    """Requests of lower priority or at most equal urgency; stops after `PASSED_MAX` others."""
    passed = 0
    for request in oldest:
        terms = request.terms
        if terms.priority > than.priority or terms.urgency <= than.urgency:
            yield request
        else:
            passed += 1
            if passed == PASSED_MAX:
                return


def reserve_of(limit: int) -> int:
    """Size of the part of a limit that is reserved for sources with low usage."""
    return limit // RESERVE if limit >= RESERVABLE_MIN else 0


class _Limits:
    """Usage of a queue and of one source with a new request, against the limits of the queue.

    The last ninth of each limit is reserved for sources that use at most eight times the capacity
    that stays free, so that no number of sources can fill the queue completely.

    Source: dynamic queue thresholds (Choudhury and Hahne, 1998).
    """

    def __init__(self, queue: WaitingQueue, config: LaneConfig, request: Request) -> None:
        self._source = request.terms.source
        self._is_shared = queue.is_fair and not request.is_part
        self._limits = (config.queue_requests, config.queue_rows, config.queue_bytes)
        self._added = (1, request.rows, request.input_bytes)
        self._used = [queue.requests, queue.rows, queue.bytes]
        self._own = list(queue.usage_of(self._source))

    def remove(self, request: Request) -> None:
        """Subtract a queued request."""
        for index, size in enumerate((1, request.waiting_rows, request.input_bytes)):
            self._used[index] -= size
            if request.terms.source == self._source:
                self._own[index] -= size

    def error(self, title: str) -> QueueFull | None:
        """The error for the first limit that the new request exceeds; None if it fits."""
        for index, unit in enumerate(("requests", "rows", "bytes")):
            limit, added, used = self._limits[index], self._added[index], self._used[index]
            own, free = self._own[index], limit - used - added
            is_reserved = self._is_shared and used and free < reserve_of(limit)
            message = ""
            if free < 0:
                message = (
                    f"queue of model `{title}` full: {used:,} {unit} queued, {added:,} more sent, "
                    f"limit {limit:,} (`lanes.queue_{unit}`)"
                )
            elif is_reserved and not leaves_enough(own + added, free):
                message = (
                    f"queue share of the client used up for model `{title}`: {own:,} {unit} of "
                    f"this client queued, {added:,} more sent; the {free + added:,} free {unit} "
                    f"are reserved for other clients (`lanes.queue_{unit}`)"
                )
            if message:
                return QueueFull(message, model=title.rpartition("/")[0])
        return None


def share_error(outstanding: int, config: LaneConfig, request: Request) -> ClientOverShare | None:
    """The error of a client that has reached its limit of requests; None below the limit."""
    if outstanding < config.client_requests:
        return None
    return ClientOverShare(
        f"client `{request.terms.client[:64]}` has {outstanding} requests outstanding, "
        f"limit {config.client_requests} (`lanes.client_requests`)"
    )


def late_error(
    queue: WaitingQueue,
    rules: Rules,
    request: Request,
    backlog: Backlog,
    *,
    now_ns: int,
    margin: float,
) -> DeadlineUnreachable | None:
    """The error of a request that would complete after its deadline.

    None if it would be in time, or if no cost is learned.
    """
    if not backlog.cost.samples:
        return None
    deadline_ns = request.deadline_ns
    start_ns = max(backlog.free_ns, now_ns)
    # Fast path: in time even if the whole queue ran first.
    margin_ns = int(margin * (deadline_ns - now_ns))
    all_ns = backlog.drain_ns(rules, queue.rows + request.rows, queue.requests + 1)
    if start_ns + all_ns + margin_ns <= deadline_ns:
        return None
    before = queue.rows_before(request) if len(queue) else 0
    requests = 1 + (-(-before * queue.requests // queue.rows) if before else 0)
    end_ns = start_ns + backlog.drain_ns(rules, before + request.rows, requests)
    if before:
        end_ns += int(margin * (end_ns - now_ns))
    if end_ns <= deadline_ns:
        return None
    return DeadlineUnreachable(
        f"deadline unreachable: {request.rows} rows behind {before} queued rows would complete in "
        f"{(end_ns - now_ns) / NS_PER_MS:.1f} ms, "
        f"the deadline is in {(deadline_ns - now_ns) / NS_PER_MS:.1f} ms",
        retry_after_ms=max((end_ns - deadline_ns) // NS_PER_MS, 1),
    )


def expired_error(request: Request, now_ns: int) -> DeadlineExceeded:
    """The error of a request that expired before it ran."""
    waited_ms = (now_ns - request.arrived_ns) / NS_PER_MS
    what = f"queue time limit passed after {waited_ms:.1f} ms (`lanes.ttl_ms` or the client's)"
    limit_ms, age_ms = request.lane.config.staleness_ms, request.terms.age_ms + waited_ms
    if request.expires_ns == request.deadline_ns:
        what = f"deadline passed after {waited_ms:.1f} ms"
    elif limit_ms and age_ms >= limit_ms:
        clock = " by the client's clock" if request.terms.age_ms else ""
        what = f"too old{clock}: {age_ms:.1f} ms, limit {limit_ms:.1f} ms (`lanes.staleness_ms`)"
    return DeadlineExceeded(f"{what}, before the request ran")


def doomed_error(request: Request, now_ns: int) -> DeadlineUnreachable:
    """The error of a queued request in `Formed.doomed`."""
    waited_ms = (now_ns - request.arrived_ns) / NS_PER_MS
    left_ms = max(request.deadline_ns - now_ns, 0) / NS_PER_MS
    return DeadlineUnreachable(
        f"deadline unreachable: {left_ms:.1f} ms left after {waited_ms:.1f} ms in the queue, less "
        "than the next batch needs"
    )
