"""Interface of shadow versions: finished requests run again in idle time of the workers.

Runs on: gateway loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from iskander.interprocess.control.messages import Failed

if TYPE_CHECKING:
    from iskander.gateway.scheduling.worker_slot import WorkerSlot


class ShadowBatches(Protocol):
    """Sends batches to workers that are idle; there is none without a shadow version."""

    def pump(self, now: int) -> int:
        """Send and cancel batches; return the time of the next call."""

    def on_done(self, worker: WorkerSlot, run_ns: int, now: int) -> None:
        """Handle the results of a worker's shadow batch."""

    def on_failed(self, worker: WorkerSlot, failed: Failed, now: int) -> None:
        """Handle the failure of a worker's shadow batch."""

    def on_lost(self, worker: WorkerSlot, *, was_running: bool, now: int) -> None:
        """Handle the end of a worker with a shadow batch."""
