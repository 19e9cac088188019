"""Cost of traces: requests per second with tracing off, and at ratios of 0, 1 % and 100 %.

    python -m benchmarks.tracing_cost --rounds 8 --seconds 3

All servers run from the start; in each round one after the other is loaded, in another order than
before. Ratios are taken within a round. Spans go to an HTTP server that accepts and discards them,
in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median

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
from benchmarks.workloads import TWO_TOWER

LOAD = Load(workload=TWO_TOWER, rows=128, clients=4)
RATIOS = {"off": None, "0 %": 0.0, "1 %": 0.01, "100 %": 1.0}
SPANS_PER_S = 1_000_000
GOAL = "1 %"
LEAST = 0.98


def main() -> int:
    """Measure, and print the table; return 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--spans-per-s", type=int, default=SPANS_PER_S)
    parser.add_argument("--sink", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sink:
        _serve_sink()
    effort = Effort(rounds=options.rounds, seconds=options.seconds)
    found = _measure(effort, options.spans_per_s)
    rows, ratio_of_goal = [], 0.0
    for name, rounds in found.items():
        ratios = sorted(
            rate / off for (rate, _), (off, _) in zip(rounds, found["off"], strict=True)
        )
        spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
        rate, cpu_us = (median(each) for each in zip(*rounds, strict=True))
        rows.append([name, f"{rate:,.0f}", f"{median(ratios):.3f}", spread, f"{cpu_us:.1f}"])
        ratio_of_goal = median(ratios) if name == GOAL else ratio_of_goal
    print(render_table(["tracing", "requests/s", "ratio", "range", "gateway CPU us"], rows))
    print(f"\nratio at {GOAL}: {ratio_of_goal:.3f} (goal: at least {LEAST})")
    return int(ratio_of_goal < LEAST)


def _measure(effort: Effort, spans_per_s: int) -> dict[str, list[tuple[float, float]]]:
    """Requests per second, and CPU time of the gateway's process for one, by server and round."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in RATIOS}
    names = list(RATIOS)
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(_sink())
        servers = {
            name: stack.enter_context(_serving(ratio, endpoint, spans_per_s))
            for name, ratio in RATIOS.items()
        }
        for index in range(effort.rounds):
            turn = index % len(names)
            for name in (*names[turn:], *names[:turn]):
                figures = measure("flight", LOAD, servers[name], effort, effort.seconds)
                rate = figures["requests"] / effort.seconds
                found[name].append((rate, figures["front_cpu_us"]))
                log_progress(f"round {index + 1}: {name}: {rate:,.0f} requests/s")
    return found


@contextlib.contextmanager
def _serving(ratio: float | None, endpoint: str, spans_per_s: int) -> Iterator[Running]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="isk-bench-") as name:
        folder = Path(name)
        settings = [
            f"server.address=127.0.0.1:{port}",
            f"server.runtime_directory={folder}",
            "admin.log_level=warning",
        ]
        if ratio is not None:
            settings += [
                "tracing.enabled=true",
                f"tracing.ratio={ratio}",
                f"tracing.spans_per_s={spans_per_s}",
                f"tracing.endpoint={endpoint}",
            ]
        command = [str(gateway_command()), "--config", str(TWO_TOWER.config)]
        command += [part for setting in settings for part in ("--set", setting)]
        notices = listen(folder / "notify")
        environment = os.environ | {"NOTIFY_SOCKET": str(folder / "notify")}
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        front, workers = psutil.Process(process.pid), ()
        try:
            if failure := wait_ready(process, notices):
                raise RuntimeError(f"the gateway did not become ready: {failure}")
            workers = child_processes(front)
            yield Running(port, front, workers)
        finally:
            stop(process, workers)


@contextlib.contextmanager
def _sink() -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.tracing_cost", "--sink"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sink:
        assert sink.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(sink.stdout.readline())}/v1/traces"
        finally:
            sink.kill()


def _serve_sink() -> None:
    class Sink(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
