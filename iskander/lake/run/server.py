"""Private server of one job: a gateway on a unix socket that ends with this process.

A thread starts the gateway, and starts it again if it dies. The kernel sends the gateway SIGTERM at
the death of that thread, so that no server outlives the command, even after SIGKILL.

Runs in: the operator's tool, main thread and one thread. Source: prctl(2), PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from iskander.client import OFF, Client
from iskander.contract.manifest import model_file
from iskander.errors import ConfigError, IskanderError, NotReady, utf8_problem
from iskander.foundation import clock

READY_S: Final = 180.0
"""Limit of the time from the start of the gateway until its model is ready."""
CALL_S: Final = 5.0
STOP_S: Final = 15.0
DRAIN_S: Final = 5.0
REATTACH_S: Final = 5.0
"""Time for which workers keep their memory after a killed gateway, for the next one."""
STARTS_MAX: Final = 4
"""Limit of the starts of the gateway in one job, including the first."""
SOCKET_PATH_BYTES_MAX: Final = 100
"""Limit of a socket's path, below the system's limit of 107 bytes."""
SOCKET_NAME_BYTES: Final = 30
"""Longest rest of a socket's path: the random part of the folder's name, and the file names."""
FOLDER: Final = "isk-score-"
"""Prefix of the names of servers' folders, in the folder for temporary files."""
LOCK: Final = "lock"
STALE_MAX: Final = 100
"""Limit of the leftover folders that the start of a server examines."""
DEATHS_MAX: Final = 1000
_LOG_BYTES: Final = 4000
_POLL_S: Final = 0.1
_READY_POLL_S: Final = 0.02
_VERSION = re.compile(r"0|[1-9][0-9]{0,17}")
_NAME = re.compile(r"[^A-Za-z0-9_.:-]")
_WRAPPER: Final = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"
    "if os.getppid() != int(sys.argv[1]): os._exit(1)\n"
    "command = [sys.executable, '-P', '-m', 'iskander.gateway', *sys.argv[2:]]\n"
    "os.execv(sys.executable, command)\n"
)
"""Program of the child before it becomes the gateway; exec keeps the parent's death signal."""


def model_name(path: str) -> str:
    """Return the name of the model at a path: the name of its file, or of a folder.

    For `model.onnx`, and for a folder that is a version, it is the name of the folder above.
    """
    parts = [part for part in Path(path).absolute().parts if part not in ("/", "")]
    last = Path(parts[-1]).stem if Path(path).is_file() else parts[-1]
    if len(parts) > 1 and (last == "model" or last.isdecimal()):
        parts.pop()
        last = parts[-1]
        if last.isdecimal() and len(parts) > 1:
            last = parts[-2]
    name = _NAME.sub("-", last)[:100]
    return name if name[:1].isalnum() else f"model{name}"


def model_path(path: str) -> Path:
    """Return the path to serve: for a folder of versions, the newest version in it.

    The newest version has the greatest number. A folder that contains a model file is itself the
    model.
    """
    given = Path(path)
    if not given.is_dir() or _has_model(given):
        return given
    try:
        versions = [folder for folder in given.iterdir() if _VERSION.fullmatch(folder.name)]
    except OSError:
        return given  # The server reports why the folder cannot be read.
    served = [each for each in versions if _has_model(each)]
    return max(served, key=lambda each: int(each.name), default=given)


def _has_model(folder: Path) -> bool:
    return any(model_file(folder, backend).is_file() for backend in ("onnx", ""))


class PrivateServer:
    """A gateway that belongs to this process.

    Args:
        settings: Values of `--set`, by `SECTION.KEY`.
        config: Configuration file.
        folder: Folder of sockets and the log.
        listen: `HOST:PORT` to listen on beside the unix socket; empty for no such address.
        token: Token for health checks, if the configuration has tokens.

    Attributes:
        address: Address of the gateway for a client.
        starts: Number of starts of the gateway.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        config: Path,
        folder: Path,
        *,
        listen: str = "",
        token: str | None = None,
    ) -> None:
        self.address = f"unix:{folder / 'server.sock'}"
        self.starts = 0
        self._token = token
        self._log = folder / "gateway.log"
        settings = {
            "server.address": [self.address, listen] if listen else self.address,
            "server.runtime_directory": str(folder / "run"),
            "server.processes": 1,
            "server.drain_s": DRAIN_S,
            "workers.reattach_s": REATTACH_S,
            "shared_memory.path": str(folder / "shared.sock"),
            "admin.address": "",
            "lanes.ttl_ms": 0,
            **settings,
        }
        self._arguments = ["--config", str(config)]
        for key, value in settings.items():
            self._arguments += ["--set", f"{key}={json.dumps(value)}"]
        self._stopped = threading.Event()
        self._ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name="private-server", daemon=True)

    @property
    def pid(self) -> int | None:
        """Process id of the gateway."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the gateway and wait for the models.

        Raises:
            NotReady: The gateway ended, or was not ready before the deadline.
        """
        self._thread.start()
        deadline_ns = clock.now_ns() + int(READY_S * clock.NS_PER_S)
        with self._client() as client:
            while True:
                if self._ended.is_set():
                    raise NotReady(f"the private server ended at its start: {self.log_tail()}")
                with contextlib.suppress(IskanderError):
                    if client.health()["ready"]:
                        return
                if clock.now_ns() > deadline_ns:
                    raise NotReady(
                        f"the private server is not ready after {READY_S:g} s: {self.log_tail()}"
                    )
                self._ended.wait(_READY_POLL_S)

    def is_ready(self) -> bool:
        """Whether the gateway answers and its models are ready."""
        try:
            with self._client() as client:
                return bool(client.health()["ready"])
        except IskanderError:
            return False

    def stop(self) -> None:
        """End the gateway with SIGTERM, or with SIGKILL if that takes too long."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(2 * STOP_S)

    def loss_error(self) -> NotReady | None:
        """Return an error if the gateway has ended and will not be started again; else None."""
        if not self._ended.is_set() or self._stopped.is_set():
            return None
        return NotReady(f"the private server ended, start {self.starts}: {self.log_tail()}")

    def log_tail(self) -> str:
        """Return the last lines of the gateway's log, or why the gateway cannot be started."""
        if self._failure:
            return self._failure
        try:
            text = self._log.read_bytes()[-_LOG_BYTES:].decode("utf-8", "replace")
        except OSError:
            return "no log"
        return " | ".join(text.strip().splitlines()[-5:])[-800:] or "its log is empty"

    def _client(self) -> Client:
        return Client(self.address, timeout_s=CALL_S, token=self._token, shared_bytes=0, retry=OFF)

    def _run(self) -> None:
        """Start the gateway, start it again after a crash, and end it after `stop`."""
        try:
            while not self._stopped.is_set() and self.starts < STARTS_MAX:
                self.starts += 1
                process = self._process = self._spawn()
                while process.poll() is None and not self._stopped.wait(_POLL_S):
                    pass
                if self._stopped.is_set():
                    _end_process(process)
                elif process.returncode >= 0:
                    break  # The gateway exited by itself, so the next one would exit too.
        except OSError as error:
            self._failure = f"it cannot be started: {error}"
        finally:
            self._ended.set()

    def _spawn(self) -> subprocess.Popen[bytes]:
        # Only the command may notify a service manager, and only the command receives SIGINT from a
        # terminal.
        environment = {k: v for k, v in os.environ.items() if k != "NOTIFY_SOCKET"}
        command = [sys.executable, "-P", "-c", _WRAPPER, str(os.getpid()), *self._arguments]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                process_group=0,
            )


def _end_process(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_S)


@contextlib.contextmanager
def private_server(
    model: str | None = None, *, config: str | None = None
) -> Iterator[PrivateServer]:
    """Serve one model file or folder, or the models of a configuration, during the block.

    Args:
        model: Path of a model; needed without a configuration.
        config: Configuration, whose addresses are replaced.

    Raises:
        ConfigError: The file does not exist.
        NotReady: The server does not start.
    """
    # The job itself stops after too many crashes, so that the limit of the server is off.
    settings = {"workers.model_deaths": DEATHS_MAX}
    with prepared_server(model, config=config, settings=settings) as server:
        server.start()
        yield server


@contextlib.contextmanager
def prepared_server(
    model: str | None = None,
    *,
    config: str | None = None,
    listen: str = "",
    token: str | None = None,
    is_unprotected: bool = False,
    settings: Mapping[str, Any] = MappingProxyType({}),
    model_settings: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[PrivateServer]:
    """Prepare a server like `private_server`, which the caller starts; stop it after the block.

    Args:
        model: Path of a model; needed without a configuration.
        config: Configuration, whose addresses are replaced.
        listen: `HOST:PORT` to listen on beside the unix socket; empty for no such address.
        token: Token for health checks, if the configuration has tokens.
        is_unprotected: Whether the server may listen on the network without TLS or tokens.
        settings: More values of `--set`, by `SECTION.KEY`.
        model_settings: More keys of `[[models]]`, for a model without a configuration.

    Raises:
        ConfigError: The file does not exist.
    """
    given = model if config is None else config
    assert given is not None
    if not Path(given).exists():
        raise ConfigError(
            f"{given}: does not exist; without --server, MODEL is a model file or folder, or a "
            "model of --config"
        )
    path = (model_path(given) if config is None else Path(given)).absolute()
    if problem := utf8_problem(str(path)):
        raise ConfigError(f"model: {problem}: rename a folder of it")
    with _locked_folder() as folder:
        overrides = dict(settings)
        if config is None:
            table = {"name": model_name(given), "path": str(path), **model_settings}
            path = folder / "iskander.toml"
            lines = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
            path.write_text("\n".join(["[[models]]", *lines]) + "\n")
            # The caller trusts its own model, and a sandboxed load would start another process.
            overrides["loading.sandbox"] = False
        if is_unprotected:
            overrides["access.allow_unprotected_network"] = ["server.address"]
        server = PrivateServer(overrides, path, folder, listen=listen, token=token)
        try:
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def _locked_folder() -> Iterator[Path]:
    """Create a folder for sockets during the block; delete folders of dead commands."""
    parent = temporary_folder()
    _delete_unlocked(parent)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER, dir=parent))
    try:
        with (folder / LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def temporary_folder() -> Path:
    """Return the folder for temporary files, or /tmp if its path is too long for sockets."""
    parent = Path(tempfile.gettempdir())
    is_long = len(str(parent / FOLDER)) > SOCKET_PATH_BYTES_MAX - SOCKET_NAME_BYTES
    return Path("/tmp") if is_long else parent


def _delete_unlocked(parent: Path) -> None:
    """Delete the folders of commands that were killed; nobody holds the lock in such a folder."""
    for folder in itertools.islice(parent.glob(f"{FOLDER}*"), STALE_MAX):
        # A folder without a lock is skipped: another command is about to create the lock.
        with contextlib.suppress(OSError), (folder / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
