"""Interface of the holder of sampled results, whose leases it keeps until they are copied.

Runs on: gateway loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from iskander.interprocess.memory.arena import Lease

if TYPE_CHECKING:
    from iskander.gateway.scheduling.worker_slot import WorkerSlot


class Observer(Protocol):
    """Holds the results of sampled requests; there is none if no consumer is on."""

    def holds_output(self, output: Lease) -> bool:
        """Whether the output lease of a batch is held; then the observer gives it back."""

    def reclaim_output(self, worker: WorkerSlot) -> bool:
        """Give back a held lease of a full output arena; False if there is none."""
