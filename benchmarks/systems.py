"""The measured systems: command lines, startup, readiness, and shutdown.

    direct        no server: the client process runs the model itself (the ceiling)
    echo          a bare pyarrow Flight server that returns every batch (the floor)
    iskander      `iskander-gateway` by its command line, and its workers; the client uses Flight,
                  with `-oip` `tritonclient`, with `-inferential` Inferential's client
    iskander-shared   the same server; large batches are in its shared-memory regions
    iskander-busy     with `busy_poll_us`, for gateway and worker
    ...-default   the same servers, with gRPC's default client (`sessions.environment`)
    triton        `tritonserver` of the nvidia-pytriton wheel with its Python backend
    mosec         its Rust front and one Python worker
    mlserver      with a custom runtime
    inferential   its server with the local dispatcher

The last four have their own environments, which `python -m benchmarks install` creates.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.machine import PEERS
from benchmarks.sessions import Target, opener, require_outputs
from benchmarks.workloads import FOLDER, Workload

SERVERS = FOLDER / "servers"
START_S = 60
STOP_S = 40
LOG_TAIL_BYTES = 4000
CHECKED_ROWS = 3
MESSAGE_BYTES = 1 << 30
BUSY_US = 2000

REQUIREMENTS = {
    "iskander": (),
    "triton": ("nvidia-pytriton==0.7.0",),
    "mosec": ("mosec==0.9.8",),
    "mlserver": ("mlserver==1.7.1",),
    "inferential": ("inferential==1.4.0",),
}
"""Packages of each environment, in addition to ONNX Runtime; for Iskander, this checkout."""

Command = Callable[[Workload, int, Path], list[str]]


class System(NamedTuple):
    """Server command and client of a system.

    Attributes:
        session: A kind of `sessions`.
        command: Returns the command line for a workload, a port and a private folder; None
            without a server.
        server: The system with the same server and the default client; else itself.
    """

    session: str
    command: Command | None
    server: str


class Running(NamedTuple):
    """A running system.

    Attributes:
        port: Of 127.0.0.1; 0 if the client computes itself.
        front: The started process.
        workers: Its child processes.
    """

    port: int
    front: psutil.Process | None
    workers: tuple[psutil.Process, ...]

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"127.0.0.1:{self.port}"

    @property
    def processes(self) -> dict[str, tuple[psutil.Process, ...]]:
        """All processes by name."""
        named: dict[str, tuple[psutil.Process, ...]] = {}
        for process in (*((self.front,) if self.front else ()), *self.workers):
            named[process.name()] = (*named.get(process.name(), ()), process)
        return named


class NotInstalledError(Exception):
    """A peer's environment does not exist."""


def cpu_s(processes: tuple[psutil.Process, ...]) -> float:
    """User and system time of the processes so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


@contextlib.contextmanager
def start(name: str, workload: Workload) -> Iterator[Running]:
    """Start a system by name, wait until its outputs are the model's, and stop it at the end.

    Raises:
        NotInstalledError: Its environment does not exist.
        RuntimeError: It did not become ready; with the end of its log.
    """
    system = SYSTEMS[name]
    if system.command is None:
        yield Running(0, None, ())
        return
    has_environment = system.server in REQUIREMENTS and system.server != "iskander"
    if has_environment and not (PEERS / system.server).exists():
        command = f"python -m benchmarks install {system.server}"
        raise NotInstalledError(f"{name} is not installed: run `{command}`")
    with tempfile.TemporaryDirectory(prefix="isk-bench-") as folder_name:
        folder = Path(folder_name)
        with (folder / "log").open("wb") as log:
            port = free_port()
            environment = _environment(system.server, workload, port)
            notices = listen(folder / "notify") if system.server.startswith("iskander") else None
            process = subprocess.Popen(
                system.command(workload, port, folder),
                stdout=log,
                stderr=log,
                env=environment | ({"NOTIFY_SOCKET": str(folder / "notify")} if notices else {}),
                cwd=folder,
            )
            workers: tuple[psutil.Process, ...] = ()
            try:
                front = psutil.Process(process.pid)
                failure = wait_ready(process, notices) or _wait_correct(
                    process, system.session, port, workload
                )
                if failure:
                    tail = (folder / "log").read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
                    raise RuntimeError(f"{name} did not become ready: {failure}:\n{tail}")
                workers = child_processes(front)
                yield Running(port, front, workers)
            finally:
                stop(process, workers)


def child_processes(front: psutil.Process) -> tuple[psutil.Process, ...]:
    """The child processes of a system, without the sandbox server, which exits when idle."""
    children = front.children(recursive=True)
    return tuple(each for each in children if each.name() != "isk-sandbox")


def listen(path: Path) -> socket.socket:
    """A socket for a service manager's notifications."""
    notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notices.bind(str(path))
    return notices


def wait_ready(process: subprocess.Popen[bytes], notices: socket.socket | None) -> str:
    """Wait for READY=1 if the system sends it; returns the failure, or an empty text."""
    if notices is None:
        return ""
    ended = os.pidfd_open(process.pid)
    try:
        with notices:
            while notices.fileno() in select.select([notices.fileno(), ended], [], [], START_S)[0]:
                if b"READY=1" in notices.recv(4096).splitlines():
                    return ""
            return f"no READY=1 within {START_S} s, or the process exited"
    finally:
        os.close(ended)


def _wait_correct(
    process: subprocess.Popen[bytes], session: str, port: int, workload: Workload
) -> str:
    """Retry until the outputs are correct; returns the last failure, or an empty text."""
    expected = workload.expected(CHECKED_ROWS)
    deadline_s = time.monotonic() + START_S
    failure = ""
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            return f"exit code {process.returncode}"
        try:
            opened = opener(session, Target(port, workload, CHECKED_ROWS))()
            try:
                require_outputs(opened, expected)
                return ""
            finally:
                opened.close()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"[:200]
            time.sleep(0.1)
    return failure or f"no response within {START_S} s"


def free_port() -> int:
    """A port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(server: str, workload: Workload, port: int) -> dict[str, str]:
    environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "1"}
    if server == "mosec":
        environment |= {
            "BENCHMARK_MODEL": str(workload.folder / "model.onnx"),
            "MOSEC_ADDRESS": "127.0.0.1",
            "MOSEC_PORT": str(port),
            "MOSEC_MAX_REQUEST_SIZE": str(MESSAGE_BYTES),
            "MOSEC_LOG_LEVEL": "warning",
        }
    return environment


def stop(process: subprocess.Popen[bytes], workers: tuple[psutil.Process, ...]) -> None:
    """Terminate a process; kill it and its workers if they do not exit."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for worker in workers:
        # psutil compares start times, so it does not kill a process with a reused pid.
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()


def gateway_command() -> Path:
    """The command of the environment installed for Iskander, else of this environment."""
    installed = PEERS / "iskander" / "bin" / "iskander-gateway"
    return installed if installed.exists() else Path(sys.executable).with_name("iskander-gateway")


def _echo(workload: Workload, port: int, folder: Path) -> list[str]:
    return [sys.executable, str(SERVERS / "echo.py"), str(port)]


def _iskander(workload: Workload, port: int, folder: Path) -> list[str]:
    settings = (
        f"server.address=127.0.0.1:{port}",
        f"server.runtime_directory={folder}",
        f"shared_memory.path={folder}/memory",
    )
    sets = [part for setting in settings for part in ("--set", setting)]
    return [str(gateway_command()), "--config", str(workload.config), *sets]


def _iskander_busy(workload: Workload, port: int, folder: Path) -> list[str]:
    settings = (f"server.busy_poll_us={BUSY_US}", f"workers.busy_poll_us={BUSY_US}")
    sets = [part for setting in settings for part in ("--set", setting)]
    return [*_iskander(workload, port, folder), *sets]


def _iskander_inferential(workload: Workload, port: int, folder: Path) -> list[str]:
    settings = (
        f"server.address=unix:{folder}/grpc",
        f"server.runtime_directory={folder}",
        f"inferential.address=tcp://127.0.0.1:{port}",
    )
    sets = [part for setting in settings for part in ("--set", setting)]
    return [str(gateway_command()), "--config", str(workload.config), *sets]


def _peer(name: str) -> Command:
    def command(workload: Workload, port: int, folder: Path) -> list[str]:
        python = str(PEERS / name / "bin" / "python")
        model = str(workload.folder / "model.onnx")
        scripts = {
            "triton": ["triton_server.py", str(port), model, workload.model, str(folder)],
            "mosec": ["mosec_server.py"],
            "mlserver": ["mlserver_model.py", str(port), model, workload.model, str(folder)],
            "inferential": ["inferential_server.py", str(port), model, workload.model],
        }
        script, *arguments = scripts[name]
        return [python, str(SERVERS / script), *arguments]

    return command


SYSTEMS = {
    "direct": System("direct", None, "direct"),
    "echo": System("flight-polled", _echo, "echo"),
    "echo-default": System("flight", _echo, "echo"),
    "iskander": System("flight-polled", _iskander, "iskander"),
    "iskander-shared": System("shared-flight-polled", _iskander, "iskander"),
    "iskander-busy": System("flight-polled", _iskander_busy, "iskander-busy"),
    "iskander-default": System("flight", _iskander, "iskander"),
    "iskander-oip": System("rows-infer-polled", _iskander, "iskander"),
    "iskander-oip-default": System("rows-infer", _iskander, "iskander"),
    "iskander-inferential": System("inferential", _iskander_inferential, "iskander-inferential"),
    "triton": System("infer", _peer("triton"), "triton"),
    "triton-polled": System("infer-polled", _peer("triton"), "triton"),
    "triton-shared": System("shared-infer", _peer("triton"), "triton"),
    "triton-serialized": System("serialized-infer", _peer("triton"), "triton"),
    "mosec": System("http", _peer("mosec"), "mosec"),
    "mlserver": System("infer", _peer("mlserver"), "mlserver"),
    "inferential": System("inferential", _peer("inferential"), "inferential"),
}
