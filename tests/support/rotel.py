"""Rotel, an OpenTelemetry collector, on loopback: receives OTLP over HTTP and forwards it.

Its agent is a program inside the wheel `rotel`. It decodes the spans, batches them, and encodes
requests of its own.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.processes import STOP_WITHIN_S, eventually
from support.prometheus import free_port


class Rotel:
    """The agent; all starts have the same port.

    Args:
        folder: For its log.
        target: Base URL of the endpoint that it forwards to.

    Attributes:
        process: Of the last start.
    """

    def __init__(self, folder: Path, target: str) -> None:
        self._log = folder / "rotel.log"
        self._port = free_port()
        self._command = [
            str(_agent()),
            "start",
            f"--otlp-http-endpoint=127.0.0.1:{self._port}",
            "--otlp-grpc-endpoint=127.0.0.1:0",
            "--batch-timeout=50ms",
            "--exporter=otlp",
            "--otlp-exporter-protocol=http",
            f"--otlp-exporter-endpoint={target}",
        ]
        self.base = f"http://127.0.0.1:{self._port}"
        self.url = f"{self.base}/v1/traces"
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Start it, and wait until it listens."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        eventually(self._is_listening, what=f"rotel: {self._log.read_text()}")
        return self.process

    def kill(self) -> None:
        """SIGKILL it."""
        self.process.kill()
        self.process.wait(STOP_WITHIN_S)

    def _is_listening(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", self._port), STOP_WITHIN_S).close()
            return True
        return False


@contextlib.contextmanager
def forwarding(folder: Path, target: str) -> Iterator[Rotel]:
    """A running agent."""
    rotel = Rotel(folder, target)
    try:
        yield rotel
    finally:
        rotel.kill()


def _agent() -> Path:
    """The program; without it the test is skipped."""
    package = find_spec("rotel")
    if package is None or package.origin is None:
        pytest.skip("needs `rotel` of the extra `test`, which has wheels for Python up to 3.13")
    return Path(package.origin).with_name("rotel-agent")
