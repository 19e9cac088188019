"""Queues and batches without a lane."""

from __future__ import annotations

from typing import Any

from iskander.gateway.scheduling.lanes.batcher import LEAD_NS, RUN_MARGIN, Formed, Rules, form
from iskander.gateway.scheduling.lanes.cost import CostModel
from iskander.gateway.scheduling.lanes.queue import WaitingQueue
from iskander.gateway.scheduling.request import NEVER_NS, Request
from support.lanes import MS, cost_of, lane_of, request_of

LANE = lane_of(ttl_ms=0)
NOW = 1_000 * MS
FAR = NOW + 100 * MS
ROW, BASE = 10_000, 1 * MS
COST = cost_of(ROW, BASE)
UNKNOWN = CostModel()


def queue_of(*requests: Request | int) -> WaitingQueue:
    """A queue in this order; a number stands for a request with this number of rows."""
    queue = WaitingQueue()
    for number, each in enumerate(requests):
        request = waiting(each) if isinstance(each, int) else each
        request.number = request.rank = number
        queue.put(request)
    return queue


def waiting(
    rows: int = 1, *, due_ns: int = NEVER_NS, shape: int = 0, is_alone: bool = False,
    queued_ns: int = NOW, **terms: Any,
) -> Request:  # fmt: skip
    """A queued request; `terms` are those of `Terms`."""
    request = request_of(LANE, rows, arrived_ns=queued_ns, **terms)
    request.queued_ns, request.shape, request.is_alone = queued_ns, shape, is_alone
    request.deadline_ns = request.expires_ns = due_ns
    return request


def formed(queue: WaitingQueue, *, cost: CostModel = UNKNOWN, **given: Any) -> Formed:
    """The next batch; `given` are rules, and keyword arguments of `form`."""
    arguments: dict[str, Any] = {"now_ns": NOW}
    for key in ("now_ns", "free_ns", "expected"):
        if key in given:
            arguments[key] = given.pop(key)
    return form(queue, Rules(**({"rows_max": 64} | given)), cost, **arguments)


def rows_of(batch: Formed) -> list[int]:
    return [rows for _, rows in batch.picks]


def surely_ns(run_ns: int) -> int:
    """Longest time from the start of a run to its results."""
    return run_ns + LEAD_NS + int(RUN_MARGIN * run_ns)


def span_ns(rows: int, cost: CostModel = COST) -> int:
    """The same for a number of rows."""
    return surely_ns(cost.predict_ns(rows))
