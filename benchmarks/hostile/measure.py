"""Measurement of a row: server, innocent client, attackers, and the server's memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import psutil

from benchmarks.hostile import scene
from benchmarks.hostile.attacks import attacks_of
from benchmarks.machine import ROOT
from benchmarks.systems import (
    child_processes,
    cpu_s,
    free_port,
    gateway_command,
    listen,
    start,
    stop,
    wait_ready,
)
from benchmarks.workloads import TWO_TOWER

MIB = 1 << 20
SAMPLE_S = 0.02
SETTLE_S = 10.0
"""Limit for the memory to shrink after an attack."""
SETTLED_BYTES = 16 * MIB
"""The memory has shrunk when it exceeds its size before the attack by less than this."""
CORE = "grpc"
"""The system with gRPC's C core: a bare Flight server of pyarrow."""
IGNORED_S = 1.0
"""Excluded start of the innocent client."""


@dataclass(frozen=True)
class Effort:
    """Durations and limits of a row.

    Attributes:
        seconds: Before, during and after the attack, each.
        receive_bytes: Of the server's budget; 0: the server has no such setting.
        is_settled: Wait up to `SETTLE_S` after the attack for the memory to shrink.
    """

    seconds: float = 6.0
    receive_bytes: int = 256 * MIB
    is_settled: bool = True


@dataclass(frozen=True)
class Places:
    """Places of a server's listeners: ports, and the path of the socket for regions."""

    grpc: str
    http: str = ""
    zmtp: str = ""
    memory: str = ""


class Memory:
    """Samples the private memory of a process, without its shared arenas."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.start_bytes = self.peak_bytes = own_bytes(pid)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, own_bytes(self._pid))


def own_bytes(pid: int) -> int:
    """Resident memory without shared memory. Source: proc(5), `statm`."""
    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def serving(
    system: str, effort: Effort, *, has_tls: bool = False
) -> Iterator[tuple[psutil.Process, Places]]:
    """A server with all listeners."""
    if system == CORE:
        with start("echo", TWO_TOWER) as running:
            assert running.front is not None
            yield running.front, Places(str(running.port))
        return
    grpc, http, zmtp = free_port(), free_port(), free_port()
    folder = ROOT / "build" / "hostile"
    config = scene.write_config(folder)
    places = Places(str(grpc), str(http), str(zmtp), f"{folder}/memory")
    settings = {
        "server.address": f"127.0.0.1:{grpc}",
        "server.runtime_directory": str(folder),
        "shared_memory.path": places.memory,
        "http.address": f"127.0.0.1:{http}",
        "inferential.address": f"tcp://127.0.0.1:{zmtp}",
    }
    if effort.receive_bytes:
        settings["limits.receive_bytes"] = str(effort.receive_bytes)
    if has_tls:
        certificate, key = scene.certificate(folder)
        settings |= {"tls.certificate": str(certificate), "tls.key": str(key)}
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [str(gateway_command()), "--config", str(config), *sets]
    if system == "interpreted":
        command[0] = str(Path(sys.executable).with_name("iskander-gateway"))
    notices = listen_at(folder / "notify")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=os.environ | {"NOTIFY_SOCKET": str(folder / "notify")},
        )
    workers: tuple[psutil.Process, ...] = ()
    try:
        failure = wait_ready(process, notices)
        if failure:
            raise RuntimeError(
                f"{system} did not become ready: {failure}: {(folder / 'log').read_text()[-2000:]}"
            )
        front = psutil.Process(process.pid)
        workers = child_processes(front)
        yield front, places
    finally:
        stop(process, workers)


def listen_at(path: Path) -> Any:  # noqa: ANN401
    """A new socket for a service manager's notifications."""
    path.unlink(missing_ok=True)
    return listen(path)


def measure(system: str, row: str, effort: Effort) -> dict[str, Any]:
    """Start a system, and measure one row against it."""
    attacks = attacks_of(row)
    has_tls = any(attack.has_tls for attack in attacks)
    with serving(system, effort, has_tls=has_tls) as (front, places):
        seconds = effort.seconds
        attackers = [
            _python("attacker", attack.name, getattr(places, attack.listener), str(seconds))
            for attack in attacks
        ]
        for attacker in attackers:
            assert attacker.stdout is not None
            attacker.stdout.readline()
        place = f"tls:{places.grpc}" if has_tls else places.grpc
        probe = next((each.probe for each in attacks if each.probe), "")
        probe = f"region {places.memory}" if probe == "region" else probe
        innocent = _python("innocent", place, str(3 * seconds + IGNORED_S), probe)
        assert innocent.stdout is not None
        innocent.stdout.readline()
        started_s = time.monotonic()
        time.sleep(max(started_s + IGNORED_S + seconds - time.monotonic(), 0))
        cpu_before_s = cpu_s((front,))
        memory = Memory(front.pid)
        attack_s = time.monotonic()
        for attacker in attackers:
            assert attacker.stdin is not None
            attacker.stdin.write(b"go\n")
            attacker.stdin.flush()
        reports = [json.loads(attacker.communicate()[0]) for attacker in attackers]
        ended_s = time.monotonic()
        used_s = cpu_s((front,)) - cpu_before_s
        memory.stop()
        results = json.loads(innocent.communicate()[0])
        left_bytes = own_bytes(front.pid)
        while effort.is_settled and time.monotonic() < ended_s + SETTLE_S:
            if left_bytes - memory.start_bytes <= SETTLED_BYTES:
                break
            time.sleep(SAMPLE_S)
            left_bytes = own_bytes(front.pid)
    return {
        "kind": "hostile",
        "system": system,
        "row": row,
        "before": _phase(results, started_s + IGNORED_S, attack_s),
        "during": _phase(results, attack_s, ended_s),
        "after": _phase(results, ended_s + IGNORED_S, ended_s + 1e6),
        "cpu_share": used_s / (ended_s - attack_s),
        "start_bytes": memory.start_bytes,
        "peak_bytes": memory.peak_bytes - memory.start_bytes,
        "left_bytes": left_bytes - memory.start_bytes,
        "budget_bytes": effort.receive_bytes,
        "attackers": reports,
    }


def _python(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", f"benchmarks.hostile.{module}", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)


def _phase(results: dict[str, Any], started_s: float, ended_s: float) -> dict[str, Any]:
    """Latencies of the requests that ended in a period, in milliseconds, and its errors."""
    latencies = sorted(
        latency_s * 1000 for at, latency_s in results["requests"] if started_s <= at < ended_s
    )
    errors = [text for at, text in results["errors"] if started_s <= at < ended_s]
    if len(latencies) < 2:
        latencies = (latencies or [1e9]) * 2
    cuts = quantiles(latencies, n=100, method="inclusive")
    return {
        "count": len(latencies),
        "p50": cuts[49],
        "p99": cuts[98],
        "longest": latencies[-1],
        "errors": errors,
        "opened": _longest(results["opened"], started_s, ended_s),
        "probes": _longest(results["probes"], started_s, ended_s),
    }


def _longest(found: list[list[float]], started_s: float, ended_s: float) -> float:
    """The longest latency in a period, in milliseconds; 0 without any."""
    latencies = [latency_s * 1000 for at, latency_s in found if started_s <= at < ended_s]
    return max(latencies, default=0.0)
