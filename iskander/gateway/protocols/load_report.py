"""Load reports to clients and proxies that balance by load, in the trailers of gRPC calls.

`weighted_round_robin` gives a server the weight `rps_fractional / application_utilization`. The
utilization is the mean number of requests in the server, waiting or running, for each worker: by
Little's law, requests per second times the mean time of a request, its queue wait included. So the
weight is the number of workers divided by the mean time of a request.

Runs on: gateway loop. Source: gRFC A51 (ORCA), A58 (weighted round robin).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from iskander._generated import orca_pb2
from iskander.errors import ContractError, LimitExceeded, MalformedInput, Unsupported
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.gateway.repository.models import Models
from iskander.gateway.transport.http2.response_headers import block

TRAILER: Final = "endpoint-load-metrics-bin"
PERIOD_S: Final = 1.0
"""Interval between two reports; a report covers the time since the last one."""
FAULTS_OF_CALLERS: Final = frozenset(
    f"refused.{kind.code}" for kind in (ContractError, LimitExceeded, MalformedInput, Unsupported)
)
"""Counters of a lane that say nothing about the server: it gets no lower weight for them."""
QUEUE_WAIT: Final = "iskander.queue_wait_seconds"
"""Named metric: mean wait of a request for a worker."""


class Load(NamedTuple):
    """Sums over all models since the start."""

    completed: int = 0
    total_ns: int = 0
    waits: int = 0
    wait_ns: int = 0
    errors: int = 0


class LoadReports:
    """Computes the load report of a gateway process once per period.

    Args:
        models: The served models.
        on_report: Receives the encoded header field.
    """

    def __init__(self, models: Models, on_report: Callable[[bytes], None]) -> None:
        self._models = models
        self._on_report = on_report
        self._load = Load()
        self._began_ns = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the first period."""
        self._load, self._began_ns = self._sum(), now_ns()
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._report)

    def stop(self) -> None:
        """Stop reporting."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _report(self) -> None:
        load = self._sum()
        elapsed_s = (now_ns() - self._began_ns) / NS_PER_S
        ready = max((len(lane.ready) for lane in self._models), default=0)
        raw = encode(self._load, load, elapsed_s, max(ready, 1))
        # Without a completed request there is nothing to report; the last report stays valid.
        if raw:
            self._on_report(block([(TRAILER, raw)]))
        self.start()

    def _sum(self) -> Load:
        sums = [0] * len(Load._fields)
        for lane in self._models:
            metrics = lane.metrics
            errors = sum(
                count
                for name, count in lane.counts.items()
                if name.startswith(("failed.", "refused.")) and name not in FAULTS_OF_CALLERS
            )
            values = (
                len(metrics.total_ns),
                metrics.total_ns.sum,
                len(metrics.wait_ns),
                metrics.wait_ns.sum,
                errors,
            )
            sums = [total + value for total, value in zip(sums, values, strict=True)]
        return Load(*sums)


def encode(before: Load, after: Load, elapsed_s: float, workers: int) -> bytes:
    """Encode the report of a period; empty if no request was completed in it."""
    completed = after.completed - before.completed
    # The sums fall when a model is unloaded.
    if completed <= 0 or after.total_ns < before.total_ns or elapsed_s <= 0:
        return b""
    report = orca_pb2.OrcaLoadReport(
        rps_fractional=completed / elapsed_s,
        eps=max(after.errors - before.errors, 0) / elapsed_s,
        application_utilization=(after.total_ns - before.total_ns) / NS_PER_S / elapsed_s / workers,
    )
    waits = after.waits - before.waits
    if waits > 0:
        waited_s = max(after.wait_ns - before.wait_ns, 0) / NS_PER_S
        report.named_metrics[QUEUE_WAIT] = waited_s / waits
    raw: bytes = report.SerializeToString()
    return raw
