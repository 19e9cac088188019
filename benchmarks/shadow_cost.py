"""Cost of a shadow version: latency of the served one at half load, with shares of 0 and 1.

    python -m benchmarks.shadow_cost --rounds 8 --seconds 5

Both servers have the model twice, as the served version and as its shadow; in one of them the
shadow is paused. They run from the start. The load is half of the rate that four clients reach in a
closed loop without the shadow, with random arrivals. In each round one server after the other is
loaded, in another order than before, and ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from benchmarks.load import Load
from benchmarks.runner import Effort, log_progress, measure
from benchmarks.systems import (
    Running,
    child_processes,
    free_port,
    gateway_command,
    listen,
    stop,
    wait_ready,
)
from benchmarks.tables import render_table
from benchmarks.workloads import TWO_TOWER, WIDE, Workload

WORKLOADS = {workload.model: workload for workload in (TWO_TOWER, WIDE)}
SHARES = {"paused": 0.0, "all": 1.0}
CLIENTS = 8
GOAL = 1.05


class Served(NamedTuple):
    """A running server, and its admin port."""

    running: Running
    admin_port: int

    def compared_rows(self) -> int:
        """Rows that were compared so far."""
        url = f"http://127.0.0.1:{self.admin_port}/status.json"
        with urllib.request.urlopen(url, timeout=10) as response:
            status: dict[str, Any] = json.load(response)
        return sum(int(shadow["rows"]) for shadow in status["shadows"])


def main() -> int:
    """Measure, and print the table; return 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(WORKLOADS), default=TWO_TOWER.model)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--load", type=float, default=0.5, help="share of the highest rate")
    parser.add_argument("--percent", type=float, help="`shadow.time_percent`")
    options = parser.parse_args()
    effort = Effort(rounds=options.rounds, seconds=options.seconds)
    load = Load(workload=WORKLOADS[options.model], rows=options.rows, clients=CLIENTS)
    found, shares = _measure(load, effort, options.load, options.percent)
    rows = []
    ratios: list[float] = []
    for name, rounds in found.items():
        pairs = list(zip(rounds, found["paused"], strict=True))
        ratios = sorted(each["p99_us"] / base["p99_us"] for each, base in pairs)
        p50 = median(each["p50_us"] / base["p50_us"] for each, base in pairs)
        rows.append([
            name,
            f"{median(each['p50_us'] for each in rounds):,.0f}",
            f"{median(each['p99_us'] for each in rounds):,.0f}",
            f"{p50:.3f}",
            f"{median(ratios):.3f}",
            f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
            f"{100 * median(shares[name]):.1f} %",
        ])  # fmt: skip
    head = ["shadow", "p50 us", "p99 us", "p50 ratio", "p99 ratio", "range", "rows compared"]
    print(render_table(head, rows))
    print(f"\nratio of p99: {median(ratios):.3f} (goal: at most {GOAL})")
    return int(median(ratios) > GOAL)


def _measure(
    load: Load, effort: Effort, share_of_load: float, percent: float | None
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[float]]]:
    """Figures, and compared rows as a share of the rows, of each server and round."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SHARES}
    shares: dict[str, list[float]] = {name: [] for name in SHARES}
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(_serving(load.workload, share, percent))
            for name, share in SHARES.items()
        }
        closed = replace(load, clients=4)
        highest = measure("flight", closed, servers["paused"].running, effort, effort.seconds)
        half = replace(load, arrivals_per_s=share_of_load * highest["requests_per_s"])
        log_progress(f"{half.arrivals_per_s:,.0f} of {highest['requests_per_s']:,.0f} requests/s")
        names = list(SHARES)
        for index in range(effort.rounds):
            turn = index % len(names)
            for name in (*names[turn:], *names[:turn]):
                server = servers[name]
                before = server.compared_rows()
                figures = measure("flight", half, server.running, effort, effort.seconds)
                found[name].append(figures)
                seconds = effort.seconds + effort.warm_up_seconds
                offered = half.arrivals_per_s * seconds * load.rows
                shares[name].append((server.compared_rows() - before) / offered)
                log_progress(
                    f"round {index + 1}: {name}: p50 {figures['p50_us']:,.0f} us, "
                    f"p99 {figures['p99_us']:,.0f} us, {100 * shares[name][-1]:.1f} % compared"
                )
    return found, shares


@contextlib.contextmanager
def _serving(workload: Workload, share: float, percent: float | None) -> Iterator[Served]:
    port, admin_port = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="isk-bench-") as name:
        folder = Path(name)
        config = folder / "iskander.toml"
        model = f'[[models]]\nname = "{workload.model}"\npath = "{workload.folder}"\n'
        shadow = f'{model}version = "2"\nshadow_share = {share}\n'
        settings = "" if percent is None else f"[shadow]\ntime_percent = {percent}\n"
        config.write_text(f'{model}version = "1"\n{shadow}{settings}')
        command = [str(gateway_command()), "--config", str(config)]
        for setting in (
            f"server.address=127.0.0.1:{port}",
            f"server.runtime_directory={folder}",
            f"admin.address=127.0.0.1:{admin_port}",
            "admin.log_level=warning",
        ):
            command += ["--set", setting]
        notices = listen(folder / "notify")
        environment = os.environ | {"NOTIFY_SOCKET": str(folder / "notify")}
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        front, workers = psutil.Process(process.pid), ()
        try:
            if failure := wait_ready(process, notices):
                raise RuntimeError(f"the gateway did not become ready: {failure}")
            workers = child_processes(front)
            yield Served(Running(port, front, workers), admin_port)
        finally:
            stop(process, workers)


if __name__ == "__main__":
    sys.exit(main())
