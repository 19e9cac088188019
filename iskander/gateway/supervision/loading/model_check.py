"""Load a model once in the interpreter of its workers to check that it loads.

Runs on: the operator's tool.
"""

from __future__ import annotations

import os
import select
import signal
import tempfile
from collections.abc import Mapping
from types import MappingProxyType

from iskander.errors import IskanderError, ManifestError, NotReady
from iskander.gateway.supervision.worker import start_process, worker_command
from iskander.interprocess.control.messages import (
    Loaded,
    LoadFailed,
    ModelSpec,
    decode_to_gateway,
    encode,
)


def check_model(
    spec: ModelSpec,
    python: str,
    cores: int,
    wait_s: float,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Loaded:
    """Load a model in the interpreter `python` (empty: this one) on `cores` physical cores.

    `variables` are added to the environment of the process.

    Raises ManifestError if the model cannot be loaded, NotReady after `wait_s`.
    """
    command = [*worker_command(python), "--try", str(cores)]
    code, raw = _run(command, encode(spec), wait_s, {**os.environ, **variables})
    if code or not raw:
        raise ManifestError(f"the interpreter exited with code {code} before the model was loaded")
    (answer,) = decode_to_gateway(raw)
    if isinstance(answer, LoadFailed):
        raise IskanderError.from_wire({"code": answer.code, "message": answer.message})
    assert isinstance(answer, Loaded)
    return answer


def _run(
    command: list[str], payload: bytes, wait_s: float, environment: dict[str, str]
) -> tuple[int, bytes]:
    """Run a command, kill its process group, and return its exit code and output.

    Input and output are files: a process that the model forks would keep a pipe open.
    """
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as target:
        source.write(payload)
        source.seek(0)
        child, pidfd = start_process(command, environment, source.fileno(), stdout=target.fileno())
        try:
            if not select.select([pidfd], [], [], wait_s)[0]:
                raise NotReady(f"load timeout: the model was not loaded within {wait_s:g} s")
        finally:
            # Before `wait` frees the pid, so that it still names this process group.
            os.killpg(child.pid, signal.SIGKILL)
            code = child.wait()
            os.close(pidfd)
        target.seek(0)
        return code, target.read()
