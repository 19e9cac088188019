"""The measured servers: this one, and Triton with its Python backend.

Triton's model is a Python class that calls ONNX Runtime on the GPU, in one process or in several
(instances). The server comes from the nvidia-pytriton wheel, in the environment that `python -m
benchmarks install triton-gpu` creates.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.clients import run_clients
from benchmarks.gpu.models import config_of
from benchmarks.machine import PEERS
from benchmarks.systems import LOG_TAIL_BYTES, SERVERS, child_processes, free_port, stop
from iskander.client import Client
from iskander.lake.run.server import prepared_server

GRAPHS = "provider_options = {cuda = {enable_cuda_graph = true}}"
TRITON = PEERS / "triton-gpu" / "bin" / "python"
START_S = 120.0


def require_gpu() -> None:
    """Exit with a message if the CUDA driver finds no device."""
    with contextlib.suppress(OSError):
        if ctypes.CDLL("libcuda.so.1").cuInit(0) == 0:
            return
    sys.exit("no GPU: the CUDA driver finds none")


def run_iskander(
    name: str, folder: Path, provider: str, seconds: float, *, has_graphs: bool
) -> dict[str, Any]:
    """Measure a server with one worker; also the megabytes that it copied for a batch."""
    with tempfile.TemporaryDirectory(prefix="isk-gpu-") as own:
        config = Path(own) / "iskander.toml"
        config.write_text(config_of(name, folder, provider, more=GRAPHS if has_graphs else ""))
        with prepared_server(config=str(config)) as server:
            server.start()
            measured = run_clients("flight", server.address, name, seconds)
            with Client(server.address) as client:
                (worker,) = client.stats()["workers"]
    copied = {way: count / worker["batches"] for way, count in worker["copied_bytes"].items()}
    return measured | {"copied_mb": [round(copied.get(way, 0) / 1e6, 3) for way in ("in", "out")]}


def run_triton(
    name: str, folder: Path, provider: str, seconds: float, *, instances: int
) -> dict[str, Any]:
    """Measure Triton with the same model and clients."""
    with _triton(name, folder, provider, instances) as address:
        return run_clients("triton", address, name, seconds)


@contextlib.contextmanager
def _triton(name: str, folder: Path, provider: str, instances: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="isk-gpu-triton-") as own:
        port = free_port()
        command = [str(TRITON), str(SERVERS / "triton_server.py"), str(port)]
        command += [str(folder / "model.onnx"), name, own, provider, str(instances)]
        with (Path(own) / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        workers: tuple[psutil.Process, ...] = ()
        try:
            if failure := _wait_ready(process, port, name):
                tail = (Path(own) / "log").read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
                raise RuntimeError(f"Triton did not become ready: {failure}:\n{tail}")
            workers = child_processes(psutil.Process(process.pid))
            yield f"127.0.0.1:{port}"
        finally:
            stop(process, workers)


def _wait_ready(process: subprocess.Popen[bytes], port: int, name: str) -> str:
    """Wait for the model; return the failure, or an empty text."""
    import tritonclient.grpc as triton

    deadline_s = time.monotonic() + START_S
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        while time.monotonic() < deadline_s:
            if process.poll() is not None:
                return f"exit code {process.returncode}"
            with contextlib.suppress(triton.InferenceServerException):
                if client.is_model_ready(name):
                    return ""
            time.sleep(0.1)
    return f"no response within {START_S:g} s"
