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
from typing import Any

import pytest
from support import models
from support.processes import Gateway, eventually, running

from benchmarks.hostile import scene
from benchmarks.hostile.attacks import attacks_of, rows
from benchmarks.hostile.innocent import Innocent
from benchmarks.hostile.measure import own_bytes
from benchmarks.systems import free_port
from iskander.client import Tls

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
    """The gateway, its places by listener, its innocent client, and its memory at the start."""

    def __init__(self, gateway: Gateway, places: dict[str, str], *, has_tls: bool) -> None:
        port = gateway.address.rpartition(":")[2]
        self.gateway = gateway
        self.places = places | {"grpc": port}
        self.innocent = Innocent(f"tls:{port}" if has_tls else port)
        self.start_bytes = own_bytes(gateway.pid)


@pytest.fixture(scope="module")
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    has_tls: bool = request.param
    folder = tmp_path_factory.mktemp("hostile")
    http, zmtp, memory = free_port(), free_port(), f"{folder}/memory"
    sections: dict[str, Any] = {}
    secrecy = None
    if has_tls:
        certificate, key = scene.certificate(folder)
        secrecy = Tls(roots=certificate)
        sections["tls"] = {"certificate": str(certificate), "key": str(key)}
    with running(
        folder,
        scene.models(folder / "models"),
        limits={"message_bytes": 72 * MIB, "receive_bytes": BUDGET_BYTES},
        http={"address": f"127.0.0.1:{http}"},
        inferential={"address": f"tcp://127.0.0.1:{zmtp}"},
        shared_memory={"path": memory},
        sources=scene.sources(folder),
        source_reads={"idle_s": 0},  # No process is left after a read.
        # One attack opens as many connections as the file descriptor limit permits.
        workers={"groups": ["0"]},
        secrecy=secrecy,
        **sections,
    ) as gateway:
        places = {"http": str(http), "zmtp": str(zmtp), "memory": memory}
        target = Target(gateway, places, has_tls=has_tls)
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
            [*module, each.name, target.places[each.listener], str(ATTACK_S)],
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
    probe = next((each.probe for each in attacks_of(row) if each.probe), "")
    if probe:
        time.sleep(ATTACK_S / 2)
        place = target.places["memory"] if probe == "region" else ""
        target.innocent.probe(f"{probe} {place}")
    for each in attackers:
        reports.append(json.loads(each.communicate(timeout=TIMEOUT_S)[0]))
    return reports


def cases() -> list[Any]:
    """Each row, with the kind of its target."""
    kinds = {row: any(each.has_tls for each in attacks_of(row)) for row in rows()}
    return [pytest.param(kinds[row], row, id=row) for row in sorted(kinds, key=kinds.get)]


@pytest.mark.parametrize(("target", "row"), cases(), indirect=["target"])
def test_attack_does_not_stop_other_clients(target: Target, row: str) -> None:
    innocent = target.innocent
    completed, failed = len(innocent.requests), len(innocent.errors)
    start_s = time.monotonic()
    reports = attack(target, row)
    assert all(report["sent_bytes"] for report in reports)
    opened = len(innocent.opened)
    eventually(
        lambda: (
            len(innocent.requests) > completed and innocent.requests[-1][0] > start_s + ATTACK_S
        ),
        what="responses after the attack",
    )
    eventually(lambda: len(innocent.opened) > opened, what="a new stream after the attack")
    assert innocent.errors[failed:] == []
    latency_s = max(took_s for _, took_s in innocent.requests[completed:])
    assert latency_s < LATENCY_MAX_S
    used_bytes = own_bytes(target.gateway.pid) - target.start_bytes
    assert used_bytes < BUDGET_BYTES + SLACK_BYTES


@pytest.mark.parametrize("target", [False], indirect=True)
def test_memory_is_returned_to_the_system_after_all_attacks(target: Target) -> None:
    eventually(
        lambda: own_bytes(target.gateway.pid) - target.start_bytes < RETAINED_BYTES_MAX,
        TIMEOUT_S,
        "memory returned after the attacks",
    )
