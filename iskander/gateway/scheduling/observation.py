"""Interface of the sampling of finished requests, whose leases it may hold a little longer.

Runs on: gateway loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from iskander.interprocess.memory.arena import Lease

if TYPE_CHECKING:
    from iskander.gateway.scheduling.worker_slot import BatchPart, InFlightBatch, WorkerSlot


class Observer(Protocol):
    """Samples requests; there is none if no consumer is on."""

    def on_results(
        self, worker: WorkerSlot, batch: InFlightBatch, part: BatchPart, *, is_last: bool
    ) -> None:
        """Sample the results of some rows, which are still in the output arena.

        Args:
            worker: Owner of the output arena.
            batch: The batch, whose output lease may be held.
            part: The rows.
            is_last: All rows of the request are computed; its input lease may be held.
        """

    def holds_output(self, output: Lease) -> bool:
        """Whether the output lease of a batch is held; then the observer gives it back."""

    def reclaim_output(self, worker: WorkerSlot) -> bool:
        """Give back a held lease of a full output arena; False if there is none."""

    def on_lost(self, worker: WorkerSlot) -> None:
        """Forget the output arena of an ended worker."""
