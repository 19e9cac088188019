"""The server under test: its folder, its configuration, its processes and its state."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.endurance import models
from benchmarks.endurance.processes import processes_of
from benchmarks.endurance.requests import FRAGILE, NUMERIC, PYTHON, STRINGS, VERSIONED
from benchmarks.systems import (
    free_port,
    listen,
    stop,
    wait_ready,
)
from iskander.client import OFF, Client
from iskander.errors import IskanderError
from iskander.gateway.auth.tokens import add_token

QUIET_S = 90.0
"""Limit for open requests to end and for workers to restart."""
SETTLE_S, POLL_S = 1.0, 0.1
CONNECTIONS = 100
"""Attempts to reach every gateway process: the kernel selects one for each connection."""
CONFIG = """
[server]
address = "127.0.0.1:{port}"
runtime_directory = "{folder}/run"
processes = {processes}
[admin]
address = ""
log_level = "warning"
[http]
address = "127.0.0.1:{http_port}"
[inferential]
address = "tcp://127.0.0.1:{zmq_port}"
errors = "metadata"
[access]
tokens = "tokens.toml"
anonymous = ["ids", "python"]
[arena]
input_bytes = 16777216
output_bytes = 16777216
[limits]
bytes = 4194304
string_bytes = 1048576
message_bytes = 5242880
window_bytes = 8388608
[lanes]
queue_requests = {queue_requests}
[loading]
cache = "{folder}/cache"
[shared_memory]
path = "{folder}/regions.sock"
region_bytes = 4194304
[workers]
count = 2
groups = ["{cpus}"]
recycle_batches = {recycle_batches}
crash_loop = 1000
model_deaths = 2
quarantine_s = 20
[repository]
path = "{folder}/models"
versions = "latest:2"
{entries}
"""
ENTRY = """
[[models]]
name = "{name}"
path = "{folder}/{name}"
intra_threads = 1
max_batch_rows = 16384
"""
QUEUE_REQUESTS = 4096


class Server:
    """A running server.

    Attributes:
        folder: Everything that it reads and writes.
        address: For Flight and gRPC.
        token: Permits all models.
        other_token: A valid token without permissions, which `rewrite_tokens` replaces.
    """

    def __init__(self, folder: Path, *, processes: int, recycle_batches: int) -> None:
        self.folder = folder
        self.processes = processes
        self._settings = {
            "folder": folder,
            "processes": processes,
            "port": free_port(),
            "http_port": free_port(),
            "zmq_port": free_port(),
            "recycle_batches": recycle_batches,
            "cpus": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        }
        self._queue_requests = QUEUE_REQUESTS
        self.address = f"127.0.0.1:{self._settings['port']}"
        self.http_address = f"127.0.0.1:{self._settings['http_port']}"
        self.zmq_address = f"tcp://127.0.0.1:{self._settings['zmq_port']}"
        self._tokens = folder / "tokens.toml"
        self.token = add_token(self._tokens, "load", ("*",))
        self._lasting_tokens = self._tokens.read_text("utf-8")
        self.versions = folder / "models" / VERSIONED
        self._newest = 0
        self.front: psutil.Process
        self._write_models()
        self._write_config()

    def _write_models(self) -> None:
        models.write_ids(self.folder / NUMERIC)
        models.write_words(self.folder / STRINGS)
        models.write_fragile(self.folder / FRAGILE)
        models.write_python(self.folder / PYTHON)
        self.versions.mkdir(parents=True)
        (self.versions / "model.toml").write_text(
            "intra_threads = 1\nmax_batch_rows = 16384\n", "utf-8"
        )
        self.publish()

    def _write_config(self) -> None:
        names = (NUMERIC, STRINGS, FRAGILE)
        entries = "".join(ENTRY.format(name=name, folder=self.folder) for name in names)
        entries += ENTRY.format(name=PYTHON, folder=self.folder) + 'backend = "python"\n'
        text = CONFIG.format(**self._settings, entries=entries, queue_requests=self._queue_requests)
        (self.folder / "iskander.toml").write_text(text, "utf-8")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start it, and stop it at the end."""
        notices = listen(self.folder / "notify")
        with (self.folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    str(Path(sys.executable).with_name("iskander-gateway")),
                    "--config",
                    str(self.folder / "iskander.toml"),
                ],
                stdout=log,
                stderr=log,
                env=os.environ | {"NOTIFY_SOCKET": str(self.folder / "notify")},
            )
        self.front = psutil.Process(process.pid)
        try:
            failure = wait_ready(process, notices)
            if failure:
                raise RuntimeError(f"the server is not ready: {failure}: {self.log()[-4000:]}")
            self.wait_quiet()
            yield
        finally:
            left = [each for each in processes_of(self.folder) if each.pid != process.pid]
            stop(process, tuple(left))

    def log(self) -> str:
        """Its log so far."""
        return (self.folder / "log").read_text("utf-8", errors="replace")

    def stats(self) -> list[dict[str, Any]]:
        """The statistics of each gateway process.

        Raises:
            IskanderError: It cannot be reached.
        """
        found: dict[int, dict[str, Any]] = {}
        for _ in range(CONNECTIONS):
            with Client(self.address, token=self.token, retry=OFF, shared_bytes=0) as client:
                stats = client.stats()
            found[stats.get("process") or 0] = stats
            if len(found) == self.processes:
                break
        return [found[number] for number in sorted(found)]

    def wait_quiet(self) -> tuple[list[dict[str, Any]], bool]:
        """Wait until nothing is leased, queued or running for a while, and all workers are ready.

        Returns:
            The last statistics, and whether that happened in time.
        """
        begun_s = time.monotonic()
        busy_s = begun_s
        while True:
            try:
                stats = self.stats()
            except IskanderError:
                stats = []
            now_s = time.monotonic()
            if len(stats) < self.processes or not all(map(_is_quiet, stats)):
                busy_s = now_s
            is_quiet = now_s - busy_s >= SETTLE_S
            if is_quiet or now_s - begun_s > QUIET_S:
                return stats, is_quiet
            time.sleep(POLL_S)

    def publish(self) -> str:
        """Add a version, once the last one is served, and remove the one before the last."""
        if self._newest and f"{VERSIONED}/{self._newest}" not in self.stats()[0]["lanes"]:
            return f"version {self._newest} is not served yet"
        self._newest += 1
        models.write_scaled(self.versions / str(self._newest), self._newest)
        old = self.versions / str(self._newest - 2)
        if old.exists():
            hidden = self.versions / f".old-{old.name}"
            old.rename(hidden)
            shutil.rmtree(hidden)
        return f"version {self._newest}"

    def rewrite_tokens(self) -> str:
        """Replace the token file; one token changes."""
        made = self.folder / ".tokens"
        made.write_text(self._lasting_tokens, "utf-8")
        made.chmod(0o600)
        add_token(made, "other", ("other",))
        made.rename(self._tokens)
        return "tokens rewritten"

    def reload(self) -> str:
        """Change a live setting, and send SIGHUP."""
        self._queue_requests = 2 * QUEUE_REQUESTS + QUEUE_REQUESTS - self._queue_requests
        self._write_config()
        self.front.send_signal(signal.SIGHUP)
        return f"SIGHUP with queue_requests = {self._queue_requests}"

    def signal_worker(self, act: Callable[[int], None], *, last: bool) -> str:
        """Do something to a shared worker, by its pid descriptor; the last one, or the first."""
        shared = [each for each in self.stats()[0]["workers"] if not each["pool"]]
        worker = shared[-1 if last else 0]
        if worker["state"] != "ready" or not worker["pid"]:
            return ""
        try:
            descriptor = os.pidfd_open(worker["pid"])
        except ProcessLookupError:
            return ""
        try:
            act(descriptor)
        except ProcessLookupError:
            return ""
        finally:
            os.close(descriptor)
        return f"worker {worker['index']}"


def _is_quiet(stats: dict[str, Any]) -> bool:
    lanes = stats["lanes"]
    if stats["input_arena"]["leases"] or any(lane["queued"] for lane in lanes.values()):
        return False
    for worker in stats["workers"]:
        # A model's own worker is absent while the model is in quarantine.
        is_expected = not lanes.get(worker["pool"], {}).get("quarantine")
        if worker["state"] != "ready" and is_expected:
            return False
        if worker["in_flight"] or worker["output_leased_bytes"]:
            return False
    return True
