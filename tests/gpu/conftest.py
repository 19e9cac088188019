"""Tests on a real GPU; skipped without one. `make test-gpu` runs them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import processes
from support.processes import WorkerProcess
from support.scripted import ScriptedGateway

FOLDER = Path(__file__).parent
COMMANDS = {"iskander-gateway": "iskander.gateway", "iskander-worker": "iskander_worker"}


def has_gpu() -> bool:
    """Whether the CUDA driver finds a device."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not has_gpu():
        for item in items:
            if item.path.parent == FOLDER:
                item.add_marker(pytest.mark.skip(reason="no GPU: the CUDA driver finds none"))


@pytest.fixture(autouse=True, scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The commands, also where this distribution is on the path and not installed."""
    before = processes.BIN
    if not (before / "iskander-gateway").exists():
        folder = tmp_path_factory.mktemp("bin")
        for name, module in COMMANDS.items():
            script = folder / name
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
            script.chmod(0o755)
        processes.BIN = folder
    yield
    processes.BIN = before


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ScriptedGateway]:
    gateway = ScriptedGateway(tmp_path)
    yield gateway
    gateway.close()


@pytest.fixture
def worker(gateway: ScriptedGateway) -> Iterator[WorkerProcess]:
    """A registered worker."""
    worker = WorkerProcess(gateway.socket_path, gateway.folder, "--group", "0")
    try:
        gateway.accept()
        gateway.welcome()
        yield worker
    finally:
        worker.end()
