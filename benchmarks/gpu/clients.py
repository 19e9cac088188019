"""Clients in processes of their own, against one server: rate, latencies and cores."""

from __future__ import annotations

import contextlib
import json
import select
import statistics
import subprocess
import sys
import time
from typing import Any

import psutil

from benchmarks.gpu.models import ROOT, ROWS

CLIENTS = 4
START_S = 60.0
"""Start of the clients, and their first batches."""
WARM_S = 1.0
"""All of them call for so long before the measured time."""


def run_clients(kind: str, address: str, name: str, seconds: float) -> dict[str, Any]:
    """Measure a running server, which is a descendant of this process.

    Args:
        kind: Protocol of `benchmarks.gpu.client`.
        address: Of the server.
        name: The model.
        seconds: Measured time.
    """
    command = [sys.executable, "-m", "benchmarks.gpu.client", kind, address, name, str(ROWS[name])]
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(
                subprocess.Popen(
                    command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            for _ in range(CLIENTS)
        ]
        for client in clients:
            stack.callback(client.kill)
        return _measure(clients, seconds)


def _measure(clients: list[subprocess.Popen[str]], seconds: float) -> dict[str, Any]:
    deadline_s = time.monotonic() + START_S
    for client in clients:
        assert client.stdout is not None
        left_s = max(deadline_s - time.monotonic(), 0)
        is_there = select.select([client.stdout], [], [], left_s)[0]
        if not is_there or not client.stdout.readline():
            raise RuntimeError(f"a client ended, or had no answer within {START_S:g} s")
    begin = time.monotonic() + WARM_S
    end = begin + seconds
    for client in clients:
        assert client.stdin is not None
        client.stdin.write(f"{begin} {end}\n")
        client.stdin.flush()
    pids = [client.pid for client in clients]
    time.sleep(max(begin - time.monotonic(), 0))
    before = _cpu_times(pids)
    time.sleep(max(end - time.monotonic(), 0))
    after = _cpu_times(pids)
    answers = [json.loads(client.communicate(timeout=START_S)[0]) for client in clients]
    return {
        "rate": sum(each["rows"] for each in answers) / seconds,
        "cores": {
            process: round((used - before.get(process, 0.0)) / seconds, 2)
            for process, used in after.items()
        },
        "p50_ms": statistics.median(each["p50_ms"] for each in answers),
        "p99_ms": max(each["p99_ms"] for each in answers),
    }


def _cpu_times(clients: list[int]) -> dict[str, float]:
    """CPU seconds of the clients together, and of the server's processes by name."""
    times: dict[str, float] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            name = "clients" if process.pid in clients else process.name()
            used = process.cpu_times()
            times[name] = times.get(name, 0.0) + used.user + used.system
    return times
