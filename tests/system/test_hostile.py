"""Every attack of `benchmarks.hostile` for a moment, beside an innocent client.

The bounds are generous: a client that waits for seconds is one that an attack has stopped. What the
attacks cost in milliseconds is measured by the benchmark.
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
LEFT_BYTES = 48 * MIB
SECONDS = 0.7
LONGEST_S = 5.0
WITHIN_S = 30.0


class Target:
    """The gateway, its ports by door, and what its innocent client has seen."""

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
        # One attack opens as many connections as a limited shell has descriptors.
        workers={"groups": ["0"]},
    ) as gateway:
        made = Target(gateway, http, zmtp)
        asking = threading.Thread(target=made.innocent.run)
        asking.start()
        try:
            eventually(lambda: made.innocent.requests, what="the first answers")
            yield made
        finally:
            made.innocent.stop()
            asking.join()


def attack(target: Target, row: str) -> list[dict[str, object]]:
    """Carry a row's attacks out, all at once; what each attacker says came of it."""
    module = [sys.executable, "-m", "benchmarks.hostile.attacker"]
    attackers = [
        subprocess.Popen(
            [*module, each.name, str(target.ports[each.listener]), str(SECONDS)],
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
        reports.append(json.loads(each.communicate(timeout=WITHIN_S)[0]))
    return reports


@pytest.mark.parametrize("row", rows())
def test_an_attack_stops_no_other_client(target: Target, row: str) -> None:
    innocent = target.innocent
    seen, failed = len(innocent.requests), len(innocent.errors)
    begun_s = time.monotonic()
    reports = attack(target, row)
    assert all(report["sent_bytes"] for report in reports)
    eventually(
        lambda: len(innocent.requests) > seen and innocent.requests[-1][0] > begun_s + SECONDS,
        what="answers after the attack",
    )
    assert innocent.errors[failed:] == []
    longest_s = max(took_s for _, took_s in innocent.requests[seen:])
    assert longest_s < LONGEST_S
    held = own_bytes(target.gateway.pid) - target.start_bytes
    assert held < BUDGET_BYTES + SLACK_BYTES


def test_memory_goes_back_to_the_system_after_all_attacks(target: Target) -> None:
    eventually(
        lambda: own_bytes(target.gateway.pid) - target.start_bytes < LEFT_BYTES,
        WITHIN_S,
        "memory that the attacks took",
    )
