"""Scoring in a Python worker of Spark: one client per process, several batches in flight.

Runs in: Python workers of Spark.
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

import pyarrow as pa

from iskander.engines.scorer import Scorer, ScoreSpec

CALLS: Final = 4
"""Concurrent batches of a task."""
OPENED_MAX: Final = 8
"""Maximum number of scorers that a process keeps; Spark uses the process for other tasks and
queries."""

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

_opened: OrderedDict[tuple[int, str], Scorer] = OrderedDict()


def open_scorer(key: str, spec: ScoreSpec) -> Scorer:
    """Return the scorer of this process for a key; the first use opens its clients."""
    own = (os.getpid(), key)  # A fork cannot use the connections of its parent.
    found = _opened.pop(own, None) or Scorer(spec)
    _opened[own] = found
    while len(_opened) > OPENED_MAX:
        _opened.popitem(last=False)
    return found


def cut_tables(batches: Iterable[pa.RecordBatch], rows_max: int) -> Iterator[pa.Table]:
    """Yield the rows of batches as tables of 1 to `rows_max` rows."""
    for batch in batches:
        for start in range(0, batch.num_rows, rows_max):
            yield pa.Table.from_batches([batch.slice(start, rows_max)])


def in_order(
    function: Callable[[ItemT], ResultT], items: Iterable[ItemT], *, calls: int = CALLS
) -> Iterator[ResultT]:
    """Yield the results of concurrent calls in the order of the items.

    The items are read on the caller's thread, at most one ahead of the calls.
    """
    pool = ThreadPoolExecutor(calls, thread_name_prefix="iskander-spark")
    pending: deque[Future[ResultT]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > calls:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        # Spark waits for the end of the task; calls whose results nothing needs end by themselves.
        pool.shutdown(wait=False, cancel_futures=True)
