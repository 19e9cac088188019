"""Seeded fault injection: each batch gets exactly one response, and it is correct.

`ISKANDER_CHAOS_S` sets the duration and `ISKANDER_CHAOS_SEED` the seed.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from support import models
from support.breaker import Breaker
from support.chaos import ROWS_MAX, VALUE_MAX, Ledger, Load, lanes_of, quiet
from support.processes import Gateway, eventually, processes_of, running

from iskander.gateway.scheduling.lanes.policies import POLICIES

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("ISKANDER_CHAOS_S", "10"))
SEED = int(os.environ.get("ISKANDER_CHAOS_SEED", "0")) or time.time_ns() % 1_000_000
HANG_S = 1.0


def served(folder: Path) -> list[dict[str, object]]:
    """Returns three models; their lanes have different limits and overflow settings."""
    models.row_ids(folder / "ids")
    models.priced(folder / "priced", 300, 600)
    models.picky(folder / "picky", VALUE_MAX)
    draw = random.Random(SEED)
    lanes = {
        "ids": {"queue_requests": 24, "pad_to": [8, ROWS_MAX]},
        "priced": {"client_requests": 16, "overflow": "drop_lowest_priority"},
        "picky": {"queue_rows": 4000, "overflow": "drop_oldest", "ttl_ms": 2000.0},
    }
    return [
        {
            "name": name,
            "path": str(folder / name),
            "intra_threads": 1,
            "max_batch_rows": ROWS_MAX,
            "lane": {**lane, "policy": draw.choice(list(POLICIES))},
        }
        for name, lane in lanes.items()
    ]


POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Maximum size of asyncio's default pool, which keeps the threads that it starts."""
WORKER = {"descriptors": 8, "threads": 0, "mappings": 2, "children": 1}
"""What the gateway has open for a worker: for one that isolates a model, in addition."""


def footprint(gateway: Gateway) -> dict[str, int]:
    """Returns counts of the gateway's resources without its clients' connections."""
    process = psutil.Process(gateway.pid)

    def descriptors() -> int | None:
        """Returns None if a connection opened or closed between the two counts."""
        count = process.num_fds()
        connections = [c for c in process.net_connections() if c.status != "LISTEN"]
        return count - len(connections) if process.num_fds() == count else None

    maps = Path(f"/proc/{gateway.pid}/maps").read_text()
    return {
        "descriptors": eventually(descriptors, what="a stable number of descriptors"),
        "threads": process.num_threads(),
        "mappings": maps.count("memfd:iskander"),
        "children": len(process.children()),
    }


def assert_no_more_than(before: dict[str, int], gateway: Gateway, isolated: int) -> None:
    """Waits until the gateway's resources are at most those of `before` and of isolated workers."""
    limit = {name: count + isolated * WORKER[name] for name, count in before.items()}
    limit["threads"] += POOL_THREADS

    def is_released() -> bool:
        return all(count <= limit[name] for name, count in footprint(gateway).items())

    try:
        eventually(is_released)
    except AssertionError:
        raise AssertionError(f"was {before}, is {footprint(gateway)}") from None


@pytest.mark.over_zmq
def test_each_batch_gets_one_correct_response_during_faults(tmp_path: Path) -> None:
    """Workers die, stop and hang; clients cancel, time out and do not read. A drain follows."""
    ledger, faults = Ledger(), []
    try:
        _run_with_faults(tmp_path, ledger, faults)
        assert not ledger.wrong
    finally:
        sys.stderr.write(f"ISKANDER_CHAOS_SEED={SEED}, {SECONDS:g} s: {ledger}\n")
        sys.stderr.write("\n".join(faults) + "\n")


def _run_with_faults(folder: Path, ledger: Ledger, faults: list[str]) -> None:
    workers = {"groups": ["0", "1"], "hang_s": HANG_S, "crash_loop": 1000, "recycle_batches": 1500}
    # Small enough that streams wait for space in the arena.
    arena = {"input_bytes": (1 << 20) + (1 << 16)}
    limits = {
        "bytes": 1 << 15,
        "string_bytes": 1 << 15,
        "message_bytes": 2 << 20,
        "rows": 4000,
        "window_batches": 64,
    }
    with running(folder, served(folder), workers=workers, arena=arena, limits=limits) as gateway:
        with Load(gateway, SEED, ledger):
            eventually(
                lambda: ledger.counts["right"] > 100 or ledger.wrong, what="100 correct responses"
            )
        quiet(gateway)
        before = footprint(gateway)
        with Load(gateway, SEED + 1, ledger), Breaker(gateway, SEED, HANG_S, ledger) as breaker:
            threading.Event().wait(SECONDS)
        faults += breaker.deeds
        stats = quiet(gateway)
        assert sum(lane.get("withdrawn", 0) for lane in lanes_of(stats)), "no request was withdrawn"
        # An isolated worker of a model whose batch ended a shared one may be new.
        shared = stats["workers"][: len(workers["groups"])]
        assert all(worker["starts"] > 1 for worker in shared) or SECONDS < 10
        isolated = len(stats["workers"]) - len(shared)
        assert isolated <= len(lanes_of(stats))
        assert_no_more_than(before, gateway, isolated)
        _drain_under_load(gateway, ledger)
        log = gateway.text()
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:4000]
    assert processes_of(gateway.runtime) == []
    remaining = {path.name for path in gateway.runtime.iterdir()}
    assert {"gateway.lock", "worker-0.lock", "worker-1.lock"} <= remaining
    # An isolated worker may have come and gone, or come in the drain.
    locks = re.compile(r"worker-\d+\.lock|gateway\.lock")
    assert all(locks.fullmatch(name) for name in remaining), remaining


def _drain_under_load(gateway: Gateway, ledger: Ledger) -> None:
    """Stops the gateway under load; it finishes accepted batches before it exits."""
    right = ledger.counts["right"]
    with Load(gateway, SEED + 2, ledger) as load:
        eventually(
            lambda: ledger.counts["right"] > right + 100 or ledger.wrong,
            what="100 correct responses",
        )
        load.expect_drain()
        gateway.signal(signal.SIGTERM)
    assert gateway.wait() == 0
