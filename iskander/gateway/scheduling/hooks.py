"""Hooks of the dispatcher: functions that read batches, results and ended workers.

The dispatcher calls them for traces, samples and shadow versions; they do not block. Without
functions for an event, the path of a batch makes no calls for it.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Callable

from iskander.gateway.scheduling.worker_slot import BatchPart, InFlightBatch, WorkerSlot


class Hooks:
    """Functions that the dispatcher calls, by event.

    Attributes:
        on_batch: A batch was answered or lost: its worker, the batch, its id, the time, its run
            time, and the outcome of `BatchRun`.
        on_steps: A worker has sent the pipeline steps of the batch that it answered last.
        on_results: The results of some rows are copied, and still in the output arena: its worker,
            the batch, the rows, and the results of the whole request, or None while rows of it
            are not computed.
        on_worker_lost: A worker has ended, and its output arena will be unmapped.
    """

    __slots__ = ("on_batch", "on_results", "on_steps", "on_worker_lost")

    def __init__(self) -> None:
        self.on_batch: list[Callable[[WorkerSlot, InFlightBatch, int, int, int, str], None]] = []
        self.on_steps: list[Callable[[WorkerSlot, tuple[tuple[str, int], ...]], None]] = []
        self.on_results: list[
            Callable[[WorkerSlot, InFlightBatch, BatchPart, bytes | memoryview | None], None]
        ] = []
        self.on_worker_lost: list[Callable[[WorkerSlot], None]] = []
