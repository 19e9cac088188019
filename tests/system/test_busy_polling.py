"""Busy polling of gateways and workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from support import models
from support.processes import Gateway, running

POLL_US = 10_000
BATCHES = 200
GAP_S = 0.001
IDLE_S = 1.0
IDLE_SHARE = 0.2
"""Maximum CPU share of an idle process: heartbeats and one polling period. Polling uses 1."""


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    server, workers = {"busy_poll_us": POLL_US}, {"groups": ["0"], "busy_poll_us": POLL_US}
    with running(tmp_path, served, server=server, workers=workers) as ready:
        yield ready


def processes_of(gateway: Gateway) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in (gateway.pid, *gateway.worker_pids())]


def spaced_batches() -> Iterator[pa.RecordBatch]:
    for number in range(BATCHES):
        time.sleep(GAP_S)
        yield pa.record_batch([pa.array([number])], names=["x"])


def test_processes_do_not_sleep_between_batches(gateway: Gateway) -> None:
    processes = processes_of(gateway)
    before = [process.num_ctx_switches().voluntary for process in processes]
    with gateway.client() as client:
        results = [each.column("y")[0].as_py() for each in client.stream("ids", spaced_batches())]
    after = [process.num_ctx_switches().voluntary for process in processes]
    assert results == [3 * number + 1 for number in range(BATCHES)]
    # A sleeping process wakes at least once per batch.
    for sleeps in (now - then for then, now in zip(before, after, strict=True)):
        assert sleeps < BATCHES / 2


def test_processes_sleep_without_requests(gateway: Gateway) -> None:
    with gateway.client() as client:
        assert client.score("ids", next(spaced_batches())).column("y").to_pylist() == [1]
    processes = processes_of(gateway)
    time.sleep(0.1)
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(IDLE_S)
    after = [sum(process.cpu_times()[:2]) for process in processes]
    for used in (now - then for then, now in zip(before, after, strict=True)):
        assert used < IDLE_SHARE * IDLE_S
