"""Whether a request may join a lane's queue, and who leaves it for that.

Decided before anything is spent on it.

Every refusal has a code of its own, and says when to come back as far as the learned cost tells.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from iskander.clock import NS_PER_MS
from iskander.config_models import LaneConfig
from iskander.errors import (
    ClientOverShare,
    DeadlineExceeded,
    DeadlineUnreachable,
    QueueFull,
)
from iskander.gateway.lanes.batcher import Rules
from iskander.gateway.lanes.cost import CostModel
from iskander.gateway.lanes.request import Request, Terms
from iskander.gateway.lanes.waiting import WaitingQueue

MISSED: Final = (DeadlineExceeded.code, DeadlineUnreachable.code)
"""Codes of requests that are not done in time; each says when a new one may be."""
RETRY_UNKNOWN_MS: Final = 100
PASSED_MAX: Final = 64
"""More urgent requests that are passed over in search of one to give way: each newcomer looks."""
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


class Load(NamedTuple):
    """What a queue holds, or part of it."""

    requests: int
    rows: int
    bytes: int

    def without(self, leaving: Iterable[Request]) -> Load:
        """What is left when some requests leave."""
        requests, rows, count = self
        for request in leaving:
            requests -= 1
            rows -= request.waiting_rows
            count -= request.input_bytes
        return Load(requests, rows, count)


def has_place(queue: WaitingQueue, config: LaneConfig, request: Request) -> bool:
    """Whether a queue takes a request as it is; the usual case of `make_way`."""
    return (
        queue.requests < config.queue_requests
        and queue.rows + request.rows <= config.queue_rows
        and queue.bytes + request.input_bytes <= config.queue_bytes
    )


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
    load = Load(len(queue), queue.rows, queue.bytes)
    if older is not None:
        load = load.without([older])
    error = full_error(load, config, request, title)
    if error is None:
        return []
    leaving: list[Request] = []
    for victim in _victims(queue, config, request):
        is_of_its_batch = request.is_part and victim.caller is request.caller
        if victim is not older and not is_of_its_batch:
            leaving.append(victim)
            load = load.without([victim])
            if full_error(load, config, request, title) is None:
                return leaving
    return error


def _victims(queue: WaitingQueue, config: LaneConfig, request: Request) -> Iterator[Request]:
    """Who gives way to a request when the queue is full; never one that is worth more."""
    if config.overflow == "drop_oldest":
        oldest = queue.oldest_first(highest=request.terms.priority)
        return _no_more_urgent(oldest, request.terms)
    if config.overflow == "drop_lowest_priority":
        return queue.least_first(above=request.terms.priority)
    return iter(())


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


def full_error(load: Load, config: LaneConfig, request: Request, title: str) -> QueueFull | None:
    """Which limit of the queue a request would break; None: there is a place."""
    if load.requests >= config.queue_requests:
        have, limit = f"{load.requests} requests wait", f"{config.queue_requests} requests"
    elif load.rows + request.rows > config.queue_rows:
        have, limit = f"{load.rows} rows wait", f"{config.queue_rows} rows"
    elif load.bytes + request.input_bytes > config.queue_bytes:
        have, limit = f"{load.bytes} bytes wait", f"{config.queue_bytes} bytes"
    else:
        return None
    return QueueFull(
        f"{have} for model `{title}`, and its queue takes {limit}", model=title.rpartition("/")[0]
    )


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
    before = queue.rows_before(request.rank) if len(queue) else 0
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
