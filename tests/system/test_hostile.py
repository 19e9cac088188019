"""Every attack of `benchmarks.hostile`, run briefly while an innocent client sends requests.

The bounds are generous: a latency of seconds counts as a stopped client. The benchmark measures
the latency that the attacks add in milliseconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import models
from support.processes import Gateway, eventually, running

from benchmarks.hostile.attacks import attacks_of, rows
from benchmarks.hostile.innocent import Innocent
from benchmarks.hostile.measure import own_bytes
from benchmarks.systems import free_port

pytestmark = pytest.mark.slow

ROOT = Path(models.__file__).resolve().parents[2]
MIB = 1 << 20
BUDGET_BYTES = 192 * MIB
SLACK_BYTES = 64 * MIB
RETAINED_BYTES_MAX = 48 * MIB
ATTACK_S = 0.7
LATENCY_MAX_S = 5.0
TIMEOUT_S = 30.0


class Target:
    """The gateway, its ports by listener, its innocent client, and its memory at the start."""

    def __init__(self, gateway: Gateway, http: int, zmtp: int) -> None:
        self.gateway = gateway
        self.ports = {"grpc": int(gateway.address.rpartition(":")[2]), "http": http, "zmtp": zmtp}
        self.innocent = Innocent(self.ports["grpc"], 3600.0)
        self.start_bytes = own_bytes(gateway.pid)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    http, zmtp = free_port(), free_port()
    with running(
        tmp_path_factory.mktemp("hostile"),
        [{"name": "movielens-two-tower", "path": str(models.TWO_TOWER), "intra_threads": 1}],
        limits={"message_bytes": 72 * MIB, "receive_bytes": BUDGET_BYTES},
        http={"address": f"127.0.0.1:{http}"},
        inferential={"address": f"tcp://127.0.0.1:{zmtp}"},
        # One attack opens as many connections as the file descriptor limit permits.
        workers={"groups": ["0"]},
    ) as gateway:
        target = Target(gateway, http, zmtp)
        thread = threading.Thread(target=target.innocent.run)
        thread.start()
        try:
            eventually(lambda: target.innocent.requests, what="the first responses")
            yield target
        finally:
            target.innocent.stop()
            thread.join()


def attack(target: Target, row: str) -> list[dict[str, object]]:
    """Runs the attacks of one row at once; returns the report of each attacker."""
    module = [sys.executable, "-m", "benchmarks.hostile.attacker"]
    attackers = [
        subprocess.Popen(
            [*module, each.name, str(target.ports[each.listener]), str(ATTACK_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        for each in attacks_of(row)
    ]
    for each in attackers:
        assert each.stdout is not None and each.stdout.readline() == b"ready\n"
    reports = []
    for each in attackers:
        assert each.stdin is not None
        each.stdin.write(b"go\n")
        each.stdin.flush()
    for each in attackers:
        reports.append(json.loads(each.communicate(timeout=TIMEOUT_S)[0]))
    return reports


@pytest.mark.parametrize("row", rows())
def test_attack_does_not_stop_other_clients(target: Target, row: str) -> None:
    innocent = target.innocent
    completed, failed = len(innocent.requests), len(innocent.errors)
    start_s = time.monotonic()
    reports = attack(target, row)
    assert all(report["sent_bytes"] for report in reports)
    eventually(
        lambda: (
            len(innocent.requests) > completed and innocent.requests[-1][0] > start_s + ATTACK_S
        ),
        what="responses after the attack",
    )
    assert innocent.errors[failed:] == []
    latency_s = max(took_s for _, took_s in innocent.requests[completed:])
    assert latency_s < LATENCY_MAX_S
    used_bytes = own_bytes(target.gateway.pid) - target.start_bytes
    assert used_bytes < BUDGET_BYTES + SLACK_BYTES


def test_memory_is_returned_to_the_system_after_all_attacks(target: Target) -> None:
    eventually(
        lambda: own_bytes(target.gateway.pid) - target.start_bytes < RETAINED_BYTES_MAX,
        TIMEOUT_S,
        "memory returned after the attacks",
    )
