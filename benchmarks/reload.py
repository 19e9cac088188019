"""Cost of a model reload for active streams: alternating windows with and without reloads.

Eight streams stay open at a constant rate. In every other window a copy replaces the model's
folder, and a call loads it; the next reload starts after `PAUSE_S`.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.load import Load
from benchmarks.results import Results
from benchmarks.runner import Effort, log_progress, measure, summarize
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
from iskander.client import Client

LOAD = Load(
    workload=TWO_TOWER, rows=128, clients=8, processes=2, arrivals_per_s=400.0, pattern="fixed"
)
PAUSE_S = 0.25
"""Pause between two reloads: the quiet time of a watched folder."""
P99_MOST = 2.0
CONFIG = """
[server]
address = "127.0.0.1:{port}"
runtime_directory = "{folder}"
[admin]
address = ""
log_level = "warning"
[repository]
path = "{folder}/models"
control = "explicit"
load = ["*"]
"""


def reload(effort: Effort) -> Iterator[dict[str, Any]]:
    """The figures of each window, and the number of its reloads."""
    with tempfile.TemporaryDirectory(prefix="isk-bench-") as name, _serving(Path(name)) as system:
        for number in range(effort.rounds):
            for is_reloading in (False, True):
                window = "with reloads" if is_reloading else "without"
                log_progress(f"round {number + 1}: reload: {window}")
                with Reloader(Path(name), system.address, is_active=is_reloading) as reloader:
                    figures = measure("flight", LOAD, system, effort, effort.seconds)
                if reloader.error is not None:
                    raise reloader.error
                log_progress(f"    {summarize(figures)}")
                kept = ("requests", "errors", "drops", "p50_us", "p99_us")
                yield {
                    "kind": "probe",
                    "name": "reload",
                    "round": number + 1,
                    "reloads": reloader.count,
                    **{key: figures[key] for key in kept if key in figures},
                }


def render(results: Results) -> str:
    """Both kinds of windows and their ratio; empty without windows."""
    probes = [each for each in results.probes if each["name"] == "reload"]
    if not probes:
        return ""
    rows, p99 = [], {}
    for is_reloading in (False, True):
        found = [each for each in probes if bool(each["reloads"]) == is_reloading]
        if not found:
            continue
        p99[is_reloading] = median(each["p99_us"] for each in found)
        reloads = sum(each["reloads"] for each in found)
        lost = sum(each["errors"] + each.get("drops", 0) for each in found)
        figures = [median(each["p50_us"] for each in found), p99[is_reloading]]
        rows.append([f"{reloads} reloads", *(f"{figure:,.0f}" for figure in figures), f"{lost}"])
    table = render_table(["eight streams", "p50 us", "p99 us", "lost"], rows)
    if len(p99) < 2:
        return table
    ratio = p99[True] / p99[False]
    return f"{table}\n\np99 with reloads is {ratio:.2f} times that without (goal: {P99_MOST:g})"


class Reloader(threading.Thread):
    """Replaces the model repeatedly while active.

    Attributes:
        count: Completed reloads.
        error: Of a failed reload.
    """

    def __init__(self, folder: Path, address: str, *, is_active: bool) -> None:
        super().__init__(name="reloader")
        self._folder, self._address, self._is_active = folder, address, is_active
        self._is_over = threading.Event()
        self.count = 0
        self.error: Exception | None = None

    def __enter__(self) -> Reloader:
        if self._is_active:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._is_active:
            self.join()

    def run(self) -> None:
        """Reload until `__exit__`."""
        try:
            with Client(self._address) as client:
                while not self._is_over.wait(PAUSE_S):
                    _replace_model(self._folder)
                    client.load(TWO_TOWER.model)
                    self.count += 1
        except Exception as error:
            self.error = error


def _replace_model(folder: Path) -> None:
    """Replace the model's folder with a fresh copy."""
    new, old = folder / "new", folder / "old"
    target = folder / "models" / TWO_TOWER.model / "1"
    shutil.copytree(TWO_TOWER.folder, new)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _serving(folder: Path) -> Iterator[Running]:
    _replace_model(folder)
    port = free_port()
    config = folder / "iskander.toml"
    config.write_text(CONFIG.format(port=port, folder=folder))
    (folder / "models" / TWO_TOWER.model / "model.toml").write_text("intra_threads = 1\n")
    notices = listen(folder / "notify")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(gateway_command()), "--config", str(config)],
            stdout=log,
            stderr=log,
            env={"NOTIFY_SOCKET": str(folder / "notify")},
        )
    front = psutil.Process(process.pid)
    workers: tuple[psutil.Process, ...] = ()
    try:
        failure = wait_ready(process, notices)
        if failure:
            log_tail = (folder / "log").read_text()[-4000:]
            raise RuntimeError(f"the gateway did not become ready: {failure}:\n{log_tail}")
        workers = child_processes(front)
        yield Running(port, front, workers)
    finally:
        stop(process, workers)
