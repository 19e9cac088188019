"""The systems that are measured: each started as its own processes, found ready, and stopped.

direct     no server: the client process runs the model by itself
echo       `echo_server.py`: Flight without any work
iskander   `iskander-gateway` by its command line, and the workers that it starts
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
from pyarrow import flight
from workloads import FOLDER, Workload

START_S = 60
STOP_S = 40
LOG_TAIL_BYTES = 4000
SCORE_TOLERANCE = 1e-4


class Running(NamedTuple):
    """A system that is up.

    Attributes:
        address: `host:port`; empty where the client computes by itself.
        front: The process that clients talk to.
        workers: The processes behind it.
    """

    address: str
    front: psutil.Process | None
    workers: tuple[psutil.Process, ...]


@contextlib.contextmanager
def start(name: str, workload: Workload) -> Iterator[Running]:
    """Start a system by its name, and stop it at the end.

    Raises:
        RuntimeError: It did not get ready; with the end of its log.
    """
    if name == "direct":
        yield Running("", None, ())
        return
    with tempfile.TemporaryDirectory(prefix="isk-bench-") as folder_name:
        folder = Path(folder_name)
        with (folder / "log").open("wb") as log:
            starter = _start_echo if name == "echo" else _start_iskander
            process, ready = starter(folder, workload, log.fileno())
            try:
                address = _wait_ready(process, ready)
                if not address:
                    tail = (folder / "log").read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
                    raise RuntimeError(f"{name} did not get ready:\n{tail}")
                front = psutil.Process(process.pid)
                yield Running(address, front, tuple(front.children()))
            finally:
                _stop(process)


def require_scores(address: str, workload: Workload, rows: int) -> None:
    """Ask a server for one batch: a fast wrong answer is no result.

    Raises:
        RuntimeError: Its scores are not those of the model.
    """
    batch = workload.batches(rows)[0]
    with flight.FlightClient(f"grpc://{address}") as client:
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_path(workload.model))
        with writer:
            writer.begin(batch.schema)
            writer.write_batch(batch)
            got = reader.read_chunk().data.column("score").to_numpy()
    if not np.allclose(got, workload.scores(batch), atol=SCORE_TOLERANCE):
        raise RuntimeError(f"{workload.model}: the served scores are not the model's")


def cpu_s(processes: tuple[psutil.Process, ...]) -> float:
    """User and system time that they have taken so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _start_echo(
    folder: Path, workload: Workload, log_fd: int
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    del folder, workload
    ready, far_end = socket.socketpair()
    with far_end:
        command = [sys.executable, str(FOLDER / "echo_server.py")]
        process = subprocess.Popen(command, stdout=far_end, stderr=log_fd)
    return process, ready


def _start_iskander(
    folder: Path, workload: Workload, log_fd: int
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ready.bind(str(folder / "notify"))
    command = [
        str(Path(sys.executable).with_name("iskander-gateway")),
        "--config",
        str(workload.config),
        "--set",
        f"server.runtime_directory={folder}",
    ]
    environment = {**os.environ, "NOTIFY_SOCKET": str(folder / "notify")}
    process = subprocess.Popen(command, stdout=log_fd, stderr=log_fd, env=environment)
    return process, ready


def _wait_ready(process: subprocess.Popen[bytes], ready: socket.socket) -> str:
    """The address that a starting process announces; empty where it ends or takes too long."""
    pidfd = os.pidfd_open(process.pid)
    try:
        with ready:
            while ready in select.select([ready, pidfd], [], [], START_S)[0]:
                announced = ready.recv(4096).decode()
                if not announced:
                    return ""
                if announced.strip().isdecimal():
                    return f"127.0.0.1:{announced.strip()}"
                fields = dict(line.partition("=")[::2] for line in announced.splitlines())
                if fields.get("READY") == "1":
                    return fields["X_ISKANDER_ADDRESS"]
            return ""
    finally:
        os.close(pidfd)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and end it and what it started where it does not."""
    if process.poll() is not None:
        return
    children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in children:
        # psutil compares start times, so a number that another process got since is left alone.
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
