"""Gateway and worker processes: start by command, readiness by notification, stop by pid."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

from iskander.client import OFF, Client, Tls

BIN = Path(sys.executable).parent
READY_WITHIN_S = 60.0
STOP_WITHIN_S = 30.0
MIB = 1 << 20


def eventually(
    predicate: Callable[[], Any], within_s: float = 20.0, what: str = "the condition"
) -> Any:
    """Wait until the predicate is true; returns its value."""
    deadline = time.monotonic() + within_s
    pause_s = 0.01
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {within_s:g} s")
        time.sleep(pause_s)
        # Back off, so that a long wait costs little CPU.
        pause_s = min(1.2 * pause_s, 0.05)


def render_config(**sections: Any) -> str:
    """A configuration as TOML; `models` and `sources` are lists of tables."""
    lines = []
    for name in ("models", "sources"):
        for table in sections.pop(name, ()):
            lines += [f"[[{name}]]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    for name, values in sections.items():
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(entry)}" for key, entry in value.items()) + "}"
    return json.dumps(value)


CHANNEL = "seqpacket"
"""Channel between the gateway and its workers; set by the fixture `channel`."""


class PlainClient(Client):
    """A client whose results are tables, also those of a batch."""

    def score(self, model: str, data: Any, **options: Any) -> pa.Table:
        table = pa.Table.from_batches([data]) if isinstance(data, pa.RecordBatch) else data
        return super().score(model, table, **options)


class Gateway:
    """A gateway and its workers, with small arenas and its own runtime directory.

    Attributes:
        prefix: Command that runs the gateway's command, such as a sandbox.
        token: Of the test's own calls.
        secrecy: TLS settings of the test's own calls; None: plaintext.
    """

    prefix: tuple[str, ...] = ()
    token: str | None = None
    secrecy: Tls | None = None

    def __init__(self, folder: Path, models: list[dict[str, Any]], **sections: Any) -> None:
        self.folder = folder
        self.runtime = folder / "run"
        sections.setdefault("server", {}).setdefault("address", "127.0.0.1:0")
        sections["server"].setdefault("runtime_directory", str(self.runtime))
        sections.setdefault("admin", {}).setdefault("address", "127.0.0.1:0")
        sections.setdefault("arena", {}).setdefault("input_bytes", 24 * MIB)
        sections["arena"].setdefault("output_bytes", 16 * MIB)
        limits = sections.setdefault("limits", {})
        for key, value in (("bytes", 16), ("message_bytes", 20), ("window_bytes", 32)):
            limits.setdefault(key, value * MIB)
        sections.setdefault("workers", {}).setdefault("reattach_s", 5.0)
        sections["workers"].setdefault("channel", CHANNEL)
        # Sandboxed loads only where tests need them: every test generates new models.
        sections.setdefault("loading", {"sandbox": False})
        self.config = folder / "iskander.toml"
        self.config.write_text(render_config(models=models, **sections))
        self.log = folder / "gateway.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.address = ""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def attach_socket(self) -> Path:
        return self.runtime / "attach.sock"

    def start(self, *, is_ready: bool = True, **environment: str) -> Gateway:
        """Start it, and wait for its readiness."""
        notices = Notices()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, str(BIN / "iskander-gateway"), "--config", str(self.config)],
                stdout=log,
                stderr=log,
                env=dict(os.environ, NOTIFY_SOCKET=notices.path, **environment),
            )
        if is_ready:
            self.address = notices.wait_for("X_ISKANDER_ADDRESS", self)
        notices.close()
        return self

    def client(self) -> Client:
        """A client without retries, matching and shared memory: the server's own behavior."""
        return PlainClient(
            self.address,
            token=self.token,
            tls=self.secrecy,
            shared_bytes=0,
            retry=OFF,
            is_matched=False,
        )

    def stats(self) -> dict[str, Any]:
        with self.client() as client:
            return client.stats()

    def worker_pids(self) -> list[int]:
        """Pids of the attached workers; 0, the pid of empty slots, means all to kill()."""
        return [worker["pid"] for worker in self.stats()["workers"] if worker["pid"]]

    def kill_worker(self, index: int = 0) -> int:
        """SIGKILL the worker in a slot; returns its pid."""
        pid: int = eventually(lambda: self.stats()["workers"][index]["pid"], what="a worker")
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_ready(self) -> None:
        eventually(lambda: self.stats()["ready"], what="readiness")

    def wait_full(self) -> None:
        """Wait for every worker of the placement plan; a gateway is ready with its quorum."""

        def is_full() -> bool:
            return all(worker["state"] == "ready" for worker in self.stats()["workers"])

        eventually(is_full, what="all workers")

    def wait_idle(self) -> dict[str, Any]:
        """Wait until nothing is leased or in flight; returns the stats."""

        def is_idle() -> dict[str, Any] | None:
            stats = self.stats()
            busy = stats["input_arena"]["leases"] or stats["streams"] or stats["calls"]
            busy = busy or any(w["in_flight"] or w["output_leased_bytes"] for w in stats["workers"])
            return None if busy else stats

        found: dict[str, Any] = eventually(is_idle, what="an idle server")
        return found

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, within_s: float = STOP_WITHIN_S) -> int:
        assert self.process is not None
        return self.process.wait(within_s)

    def stop(self) -> int:
        """Drain it; returns its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(STOP_WITHIN_S)
        finally:
            self.end()

    def end(self) -> None:
        """Kill it and all of its processes, if any remain."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        left = processes_of(self.runtime)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=STOP_WITHIN_S)

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


class WorkerProcess:
    """An `iskander-worker` started by its command."""

    def __init__(self, socket_path: Path, folder: Path, *arguments: str) -> None:
        self.log = folder / f"worker-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(BIN / "iskander-worker"), "--attach", str(socket_path), *arguments],
                stdout=log,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Notices:
    """The service manager's side of sd_notify."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="isk-notify-")
        self.path = str(Path(self._folder.name) / "notify.sock")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self.lines: list[str] = []

    def wait_for(self, key: str, gateway: Gateway, within_s: float = READY_WITHIN_S) -> str:
        """The value of a field of a notification; fails at once if the process exits."""
        deadline = time.monotonic() + within_s
        while True:
            for line in self.lines:
                if line.startswith(f"{key}="):
                    return line.partition("=")[2]
            assert gateway.process is not None
            if gateway.process.poll() is not None or time.monotonic() > deadline:
                code = gateway.process.poll()
                raise AssertionError(
                    f"the gateway did not say {key} (exit code {code}):\n{gateway.text()}"
                )
            if select.select([self._socket], [], [], 0.05)[0]:
                self.lines += self._socket.recv(4096).decode().splitlines()

    def close(self) -> None:
        self._socket.close()
        self._folder.cleanup()


@contextlib.contextmanager
def running(
    folder: Path,
    models: list[dict[str, Any]],
    *,
    prefix: tuple[str, ...] = (),
    token: str | None = None,
    secrecy: Tls | None = None,
    **sections: Any,
) -> Iterator[Gateway]:
    """A gateway with all its workers, drained at the end.

    After a failure, its log is printed.
    """
    gateway = Gateway(folder, models, **sections)
    gateway.prefix, gateway.token, gateway.secrecy = prefix, token, secrecy
    try:
        gateway.start(is_ready=True)
        if sections.get("workers", {}).get("spawn", True):
            gateway.wait_full()
        yield gateway
        code = gateway.stop()
        assert code == 0, f"exit code {code}"
    except BaseException:
        sys.stderr.write(gateway.text()[-8000:])
        raise
    finally:
        gateway.end()


def processes_of(runtime: Path) -> list[psutil.Process]:
    """Every process with the runtime directory in its command line."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(runtime) in part for part in process.cmdline()):
                found.append(process)
    return found


def shared_mappings(pid: int | str = "self") -> list[str]:
    """The segments of iskander that a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return sorted(set(re.findall(r"memfd:iskander\S*", maps)))


def suspended(pid: int) -> contextlib.AbstractContextManager[None]:
    """Suspend a process inside the block."""

    @contextlib.contextmanager
    def stopped() -> Iterator[None]:
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    return stopped()
