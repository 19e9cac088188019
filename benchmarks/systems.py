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
from collections.abc import Callable, Iterator
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


Starting = tuple[subprocess.Popen[bytes], Callable[[], str]]
"""A process, and a call that waits for its address; empty where there will be none."""


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
            process, wait_ready = starter(folder, workload, log.fileno())
            workers: tuple[psutil.Process, ...] = ()
            try:
                address = wait_ready()
                if not address:
                    tail = (folder / "log").read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
                    raise RuntimeError(f"{name} did not get ready:\n{tail}")
                front = psutil.Process(process.pid)
                workers = tuple(front.children())
                yield Running(address, front, workers)
            finally:
                _stop(process, workers)


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


def _start_echo(folder: Path, workload: Workload, log_fd: int) -> Starting:
    del folder, workload
    command = [sys.executable, str(FOLDER / "echo_server.py")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log_fd)
    output = process.stdout
    assert output is not None

    def wait_ready() -> str:
        port = output.readline().decode().strip()
        return f"127.0.0.1:{port}" if port else ""

    return process, wait_ready


def _start_iskander(folder: Path, workload: Workload, log_fd: int) -> Starting:
    notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notices.bind(str(folder / "notify"))
    command = [
        str(Path(sys.executable).with_name("iskander-gateway")),
        "--config",
        str(workload.config),
        "--set",
        f"server.runtime_directory={folder}",
    ]
    environment = {**os.environ, "NOTIFY_SOCKET": str(folder / "notify")}
    process = subprocess.Popen(command, stdout=log_fd, stderr=log_fd, env=environment)
    return process, lambda: _read_notice(process, notices)


def _read_notice(process: subprocess.Popen[bytes], notices: socket.socket) -> str:
    """The address in a READY datagram; empty where the process ends first or takes too long."""
    ended = os.pidfd_open(process.pid)
    try:
        with notices:
            while notices.fileno() in select.select([notices.fileno(), ended], [], [], START_S)[0]:
                lines = notices.recv(4096).decode().splitlines()
                fields = dict(line.partition("=")[::2] for line in lines)
                if fields.get("READY") == "1":
                    return fields["X_ISKANDER_ADDRESS"]
            return ""
    finally:
        os.close(ended)


def _stop(process: subprocess.Popen[bytes], workers: tuple[psutil.Process, ...]) -> None:
    """Ask a process to end, and end it and its workers where they do not."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for worker in workers:
        # psutil compares start times, so a number that another process got since is left alone.
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
