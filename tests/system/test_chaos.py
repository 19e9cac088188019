"""Everything goes wrong at once, by a seed: whatever was asked is answered once, and rightly.

`ISKANDER_CHAOS_S` says for how long, `ISKANDER_CHAOS_SEED` what is drawn.
"""

from __future__ import annotations

import os
import random
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

from iskander.scheduling.policies import POLICIES

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("ISKANDER_CHAOS_S", "10"))
SEED = int(os.environ.get("ISKANDER_CHAOS_SEED", "0")) or time.time_ns() % 1_000_000
HANG_S = 1.0


def served(folder: Path) -> list[dict[str, object]]:
    """Three models, whose lanes differ in what they do with too much."""
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
"""Of asyncio's own pool: made when several things want one at once, and kept."""


def footprint(gateway: Gateway) -> dict[str, int]:
    """What the gateway holds, but for its clients' connections."""
    process = psutil.Process(gateway.pid)

    def descriptors() -> int | None:
        """None where a connection came or went between looking at the one and the other."""
        held = process.num_fds()
        connections = [c for c in process.net_connections() if c.status != "LISTEN"]
        return held - len(connections) if process.num_fds() == held else None

    maps = Path(f"/proc/{gateway.pid}/maps").read_text()
    return {
        "descriptors": eventually(descriptors, what="a moment of rest"),
        "threads": process.num_threads(),
        "mappings": maps.count("memfd:iskander"),
        "children": len(process.children()),
    }


def assert_no_more_than(before: dict[str, int], gateway: Gateway) -> None:
    """What the gateway holds comes back to what it held before."""
    most = {**before, "threads": before["threads"] + POOL_THREADS}

    def is_as_before() -> bool:
        return all(count <= most[name] for name, count in footprint(gateway).items())

    try:
        eventually(is_as_before)
    except AssertionError:
        raise AssertionError(f"was {before}, is {footprint(gateway)}") from None


def test_whatever_breaks_each_batch_is_answered_once_and_rightly(tmp_path: Path) -> None:
    """Workers die, stop and hang, clients leave, time out and do not read; then it drains."""
    ledger, deeds = Ledger(), []
    try:
        _chaos(tmp_path, ledger, deeds)
        assert not ledger.wrong
    finally:
        sys.stderr.write(f"ISKANDER_CHAOS_SEED={SEED}, {SECONDS:g} s: {ledger}\n")
        sys.stderr.write("\n".join(deeds) + "\n")


def _chaos(folder: Path, ledger: Ledger, deeds: list[str]) -> None:
    workers = {"groups": ["0", "1"], "hang_s": HANG_S, "crash_loop": 1000, "recycle_batches": 1500}
    # So little of it that streams have to wait for room.
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
            eventually(lambda: ledger.counts["right"] > 100 or ledger.wrong, what="answers")
        quiet(gateway)
        before = footprint(gateway)
        with Load(gateway, SEED + 1, ledger), Breaker(gateway, SEED, HANG_S, ledger) as breaker:
            threading.Event().wait(SECONDS)
        deeds += breaker.deeds
        stats = quiet(gateway)
        assert sum(lane.get("withdrawn", 0) for lane in lanes_of(stats)), "nobody left in time"
        assert all(worker["starts"] > 1 for worker in stats["workers"]) or SECONDS < 10
        assert_no_more_than(before, gateway)
        _drain_under_load(gateway, ledger)
        log = gateway.text()
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:4000]
    assert processes_of(gateway.runtime) == []
    left = sorted(path.name for path in gateway.runtime.iterdir())
    assert left == ["gateway.lock", "worker-0.lock", "worker-1.lock"]


def _drain_under_load(gateway: Gateway, ledger: Ledger) -> None:
    """What was accepted is answered before the gateway ends; then nobody is there."""
    right = ledger.counts["right"]
    with Load(gateway, SEED + 2, ledger) as load:
        eventually(lambda: ledger.counts["right"] > right + 100 or ledger.wrong, what="answers")
        load.expect_drain()
        gateway.signal(signal.SIGTERM)
    assert gateway.wait() == 0
