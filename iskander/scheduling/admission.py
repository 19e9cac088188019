"""Whether a request may join a lane's queue, and who leaves it for that.

Decided before anything is spent on it.

Every refusal has a code of its own, and says when to come back as far as the learned cost tells.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from iskander.auth.source import Source
from iskander.clock import NS_PER_MS
from iskander.config.models import LaneConfig
from iskander.errors import ClientOverShare, DeadlineExceeded, DeadlineUnreachable, QueueFull
from iskander.scheduling.batcher import Rules
from iskander.scheduling.cost import CostModel
from iskander.scheduling.queue import WaitingQueue
from iskander.scheduling.request import Request, Terms

MISSED: Final = (DeadlineExceeded.code, DeadlineUnreachable.code)
"""Codes of requests that are not done in time; each says when a new one may be."""
RETRY_UNKNOWN_MS: Final = 100
PASSED_MAX: Final = 64
"""More urgent requests that are passed over in search of one to give way: each newcomer looks."""
FREE_SHARE: Final = 8
"""A source may hold so many times what it leaves free."""
RESERVE: Final = FREE_SHARE + 1
"""Within this part of a limit from its end, `FREE_SHARE` counts."""
DIVISIBLE_MIN: Final = 128
"""A smaller limit is not divided: its ninth part is no room for anybody."""
MARGIN_LEAST: Final = 1 / 8
MARGIN_GROWTH: Final = 1 / 2
MARGIN_MEMORY: Final = 64


class Margin:
    """What is added to the expected time of a request that is behind others, as a share of it.

    A queue that is filled right up to its deadlines is thrown by any delay: what is due next allows
    small batches only, and those cost what would have caught up. While more comes than can be done
    it is filled all the time, and a shorter one loses nothing; so the margin grows with the share
    of requests that were refused as too late.

    Attributes:
        share: Of the expected time.
    """

    def __init__(self) -> None:
        self.share = MARGIN_LEAST
        self._late = 0.0

    def learn(self, *, is_late: bool) -> None:
        """A request with a deadline came; the last `MARGIN_MEMORY` count, more or less."""
        self._late += (is_late - self._late) / MARGIN_MEMORY
        self.share = MARGIN_LEAST + MARGIN_GROWTH * self._late


class Backlog(NamedTuple):
    """What is before a request that comes now.

    Attributes:
        cost: Of a worker of the lane; without samples where none has run.
        workers: That take the lane's batches.
        free_ns: When the first of them is expected to be free.
    """

    cost: CostModel
    workers: int
    free_ns: int

    def drain_ns(self, rules: Rules, rows: int) -> int:
        """How long the workers take for so many rows in full batches."""
        if not rows:
            return 0
        batches = -(-rows // rules.rows_max)
        turns = -(-batches // max(self.workers, 1))
        return turns * self.cost.predict_ns(rules.run_rows(min(rows, rules.rows_max)))


class Unreserved:
    """The part of a queue's limits that any source may use."""

    def __init__(self, config: LaneConfig) -> None:
        self._requests = config.queue_requests - reserve_of(config.queue_requests)
        self._rows = config.queue_rows - reserve_of(config.queue_rows)
        self._bytes = config.queue_bytes - reserve_of(config.queue_bytes)

    def takes(self, queue: WaitingQueue, request: Request) -> bool:
        """Whether a request is within that part."""
        return (
            queue.requests < self._requests
            and queue.rows + request.rows <= self._rows
            and queue.bytes + request.input_bytes <= self._bytes
        )


def has_place(
    queue: WaitingQueue, config: LaneConfig, unreserved: Unreserved, request: Request
) -> bool:
    """Whether a queue takes a request as it is; the usual case of `make_way`."""
    if unreserved.takes(queue, request):
        return True
    return _Limits(queue, config, request).error("") is None


def make_way(
    queue: WaitingQueue, config: LaneConfig, request: Request, older: Request | None, title: str
) -> list[Request] | QueueFull:
    """Who has to leave a queue for a request; an error where even that would not do.

    Args:
        queue: Of the lane.
        config: Of the lane.
        request: The newcomer.
        older: Whose place it takes in any case; not among those who are returned.
        title: Of the lane.
    """
    limits = _Limits(queue, config, request)
    if older is not None:
        limits.leave(older)
    error = limits.error(title)
    if error is None:
        return []
    leaving: list[Request] = []
    for victim in _victims(queue, config, request):
        is_of_its_batch = request.is_part and victim.caller is request.caller
        if victim is not older and not is_of_its_batch:
            leaving.append(victim)
            limits.leave(victim)
            if limits.error(title) is None:
                return leaving
    return error


def _victims(queue: WaitingQueue, config: LaneConfig, request: Request) -> Iterator[Request]:
    """Who gives way to a request when the queue is full; never one that is worth more."""
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
    # A source takes the place of no source that holds less than it does.
    least = _dominant_share(queue, config, request.terms.source)
    return (v for v in victims if _dominant_share(queue, config, v.terms.source) >= least)


def _dominant_share(queue: WaitingQueue, config: LaneConfig, source: Source) -> float:
    """The largest share of a limit that a source holds."""
    held = queue.held_by(source)
    return max(
        held.requests / config.queue_requests,
        held.rows / config.queue_rows,
        held.bytes / config.queue_bytes,
    )


def _no_more_urgent(oldest: Iterator[Request], than: Terms) -> Iterator[Request]:
    """Those of a lower priority, or no more urgent; not behind `PASSED_MAX` that are."""
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
    """The last part of a limit, which is for sources that hold little."""
    return limit // RESERVE if limit >= DIVISIBLE_MIN else 0


class _Limits:
    """What a queue and a source would hold with a newcomer, against the limits of the queue.

    The last ninth of each limit is for sources that hold at most eight times what then stays free:
    no source, and no number of sources together, fills the queue for those who come next.

    Source: dynamic queue thresholds (Choudhury and Hahne, 1998).
    """

    def __init__(self, queue: WaitingQueue, config: LaneConfig, request: Request) -> None:
        own = queue.held_by(request.terms.source)
        self._source = request.terms.source
        self._is_shared = queue.is_fair and not request.is_part
        self._limits = (config.queue_requests, config.queue_rows, config.queue_bytes)
        self._wanted = (1, request.rows, request.input_bytes)
        self._used = [queue.requests, queue.rows, queue.bytes]
        self._own = [own.requests, own.rows, own.bytes]

    def leave(self, leaving: Request) -> None:
        """A request leaves the queue."""
        for index, size in enumerate((1, leaving.waiting_rows, leaving.input_bytes)):
            self._used[index] -= size
            if leaving.terms.source == self._source:
                self._own[index] -= size

    def error(self, title: str) -> QueueFull | None:
        """Which limit the newcomer would break; None: there is a place."""
        for index, unit in enumerate(("requests", "rows", "bytes")):
            limit, wanted, used = self._limits[index], self._wanted[index], self._used[index]
            own, free = self._own[index], limit - used - wanted
            is_last_part = self._is_shared and used and free < reserve_of(limit)
            message = ""
            if free < 0:
                message = f"{used} {unit} wait for model `{title}`, and its queue takes {limit}"
            elif is_last_part and own + wanted > FREE_SHARE * free:
                message = (
                    f"{own} {unit} of this client wait for model `{title}`, and of the "
                    f"{free + wanted} that its queue still takes the rest is for others"
                )
            if message:
                return QueueFull(message, model=title.rpartition("/")[0])
        return None


def share_error(outstanding: int, config: LaneConfig, request: Request) -> ClientOverShare | None:
    """Whether a client has as many requests as it may."""
    if outstanding < config.client_requests:
        return None
    return ClientOverShare(
        f"client `{request.terms.client[:64]}` has {outstanding} requests outstanding, the limit"
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
    """Whether a request's deadline will have passed before it could be done.

    Args:
        queue: What waits already.
        rules: Of the lane.
        request: The newcomer.
        backlog: What is before it at the workers.
        now_ns: The time.
        margin: As `Margin.share`.
    """
    if not backlog.cost.samples:
        return None
    deadline_ns = request.deadline_ns
    start_ns = max(backlog.free_ns, now_ns)
    # Were all that waits to go first and it was still in time, there is no need to look closer.
    margin_ns = int(margin * (deadline_ns - now_ns))
    if start_ns + backlog.drain_ns(rules, queue.rows + request.rows) + margin_ns <= deadline_ns:
        return None
    before = queue.rows_before(request) if len(queue) else 0
    end_ns = start_ns + backlog.drain_ns(rules, before + request.rows)
    if before:
        end_ns += int(margin * (end_ns - now_ns))
    if end_ns <= deadline_ns:
        return None
    return DeadlineUnreachable(
        f"{request.rows} rows behind {before} others would be done in "
        f"{(end_ns - now_ns) / NS_PER_MS:.1f} ms and are due in "
        f"{(deadline_ns - now_ns) / NS_PER_MS:.1f} ms",
        retry_after_ms=max((end_ns - deadline_ns) // NS_PER_MS, 1),
    )


def expired_error(request: Request, now_ns: int) -> DeadlineExceeded:
    """The error of a request that left the queue because its time had passed."""
    waited_ms = (now_ns - request.arrived_ns) / NS_PER_MS
    what = f"its time to wait passed after {waited_ms:.1f} ms"
    limit_ms, age_ms = request.lane.config.staleness_ms, request.terms.age_ms + waited_ms
    if request.expires_ns == request.deadline_ns:
        what = f"its deadline passed after {waited_ms:.1f} ms"
    elif limit_ms and age_ms >= limit_ms:
        whose = "by its client's clock " if request.terms.age_ms else ""
        what = f"{whose}it was {age_ms:.1f} ms old, and may be {limit_ms:.1f}"
    return DeadlineExceeded(f"{what}, before it ran")


def doomed_error(request: Request, now_ns: int) -> DeadlineUnreachable:
    """The error of a request whose turn came too late."""
    waited_ms = (now_ns - request.arrived_ns) / NS_PER_MS
    left_ms = max(request.deadline_ns - now_ns, 0) / NS_PER_MS
    return DeadlineUnreachable(
        f"its turn came after {waited_ms:.1f} ms, and the {left_ms:.1f} ms left are less than the "
        "next batch takes"
    )
