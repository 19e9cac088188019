"""Gateways and workers that look for messages for a while before they sleep."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pyarrow as pa
from support import models
from support.processes import running

SPELL_US = 5000
IDLE_S = 1.0
IDLE_SHARE = 0.2
"""Of a core, at most: a spell of 5 ms after each beat of 100 ms would be 5 %, and all of it 100."""


def test_results_are_the_same_and_idle_processes_sleep(tmp_path: Path) -> None:
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    with running(
        tmp_path,
        served,
        server={"busy_poll_us": SPELL_US},
        workers={"groups": ["0"], "busy_poll_us": SPELL_US},
    ) as gateway:
        batches = [pa.record_batch([pa.array([number])], names=["x"]) for number in range(200)]
        with gateway.client() as client:
            results = [each.column("y")[0].as_py() for each in client.stream("ids", batches)]
        assert results == [3 * number + 1 for number in range(200)]
        pids = [gateway.pid, *gateway.worker_pids()]
        processes = [psutil.Process(pid) for pid in pids]
        time.sleep(0.1)
        before = [sum(process.cpu_times()[:2]) for process in processes]
        time.sleep(IDLE_S)
        after = [sum(process.cpu_times()[:2]) for process in processes]
        for used in (now - then for then, now in zip(before, after, strict=True)):
            assert used < IDLE_SHARE * IDLE_S
