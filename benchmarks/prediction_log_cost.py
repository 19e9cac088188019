"""Cost of the prediction log: requests per second with it off, and at several shares.

    python -m benchmarks.prediction_log_cost --rounds 8 --seconds 3

All servers run from the start; in each round one after the other is loaded, in another order than
before. Ratios are taken within a round. At a share of 0 another model is logged, so that the
observer process runs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
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
SHARES = {"off": None, "0 %": 0.0, "1 %": 0.01, "100 %": 1.0}


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    found = _measure(Effort(rounds=options.rounds, seconds=options.seconds))
    rows = []
    for name, rounds in found.items():
        ratios = sorted(
            rate / off for (rate, _), (off, _) in zip(rounds, found["off"], strict=True)
        )
        spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
        rate, cpu_us = (median(each) for each in zip(*rounds, strict=True))
        rows.append([name, f"{rate:,.0f}", f"{median(ratios):.3f}", spread, f"{cpu_us:.1f}"])
    print(render_table(["share", "requests/s", "ratio", "range", "gateway CPU us"], rows))


def _measure(effort: Effort) -> dict[str, list[tuple[float, float]]]:
    """Requests per second, and CPU time of the gateway's process for one, by server and round."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SHARES}
    names = list(SHARES)
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(_serving(SHARES[name])) for name in names}
        for index in range(effort.rounds):
            turn = index % len(names)
            for name in (*names[turn:], *names[:turn]):
                figures = measure("flight", LOAD, servers[name], effort, effort.seconds)
                rate = figures["requests"] / effort.seconds
                found[name].append((rate, figures["front_cpu_us"]))
                log_progress(f"round {index + 1}: {name}: {rate:,.0f} requests/s")
    return found


@contextlib.contextmanager
def _serving(share: float | None) -> Iterator[Running]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="isk-bench-") as name:
        folder = Path(name)
        config = folder / "iskander.toml"
        config.write_text(_config(share, folder, port))
        command = [str(gateway_command()), "--config", str(config)]
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


def _config(share: float | None, folder: Path, port: int) -> str:
    """The workload's model, logged with a share, and a second version of it."""
    source = TWO_TOWER.config
    (model,) = tomllib.loads(source.read_text())["models"]
    path = (source.parent / model["path"]).resolve()
    lines = [
        "[server]",
        f'address = "127.0.0.1:{port}"',
        f'runtime_directory = "{folder}"',
        "[admin]",
        'log_level = "warning"',
        'address = ""',
    ]
    lines += [] if share is None else ["[prediction_log]", f'path = "{folder}/log"']
    for version, logged in ((2, share), (1, None if share is None else 1.0)):
        lines += ["[[models]]", f'name = "{model["name"]}"', f'path = "{path}"']
        lines += [f"version = {version}", "intra_threads = 1"]
        lines += [] if logged is None else ["[models.prediction_log]", f"share = {logged}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
