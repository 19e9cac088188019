"""A model loaded once, in the interpreter of its own workers, to see whether it can be.

Runs on: the operator's tool.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile

from iskander.control.messages import Loaded, LoadFailed, ModelSpec, decode_to_gateway, encode
from iskander.errors import IskanderError, ManifestError, NotReady
from iskander.supervision.worker import worker_command


def try_model(spec: ModelSpec, python: str, cores: int, wait_s: float) -> Loaded:
    """Load a model as one of its own workers would.

    Args:
        spec: What to load.
        python: The interpreter; empty for this one.
        cores: Physical cores of a worker.
        wait_s: How long it may take.

    Raises:
        ManifestError: It cannot be loaded; the worker's own words.
        NotReady: It took too long.
    """
    code, raw = _ended([*worker_command(python), "--try", str(cores)], encode(spec), wait_s)
    if code or not raw:
        raise ManifestError(f"its interpreter ended with exit code {code} before it was loaded")
    (answer,) = decode_to_gateway(raw)
    if isinstance(answer, LoadFailed):
        raise IskanderError.from_wire({"code": answer.code, "message": answer.message})
    assert isinstance(answer, Loaded)
    return answer


def _ended(command: list[str], said: bytes, wait_s: float) -> tuple[int, bytes]:
    """Run a command to its end: its exit code, and what it wrote.

    It reads and writes files: a pipe would stay open for as long as anything lives that the model's
    class has forked. All of that is ended with it.

    Raises:
        NotReady: It took too long.
    """
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as target:
        source.write(said)
        source.seek(0)
        child = subprocess.Popen(command, stdin=source, stdout=target, start_new_session=True)
        pidfd = os.pidfd_open(child.pid)
        try:
            if not select.select([pidfd], [], [], wait_s)[0]:
                raise NotReady(f"it was not loaded after {wait_s:g} s")
        finally:
            # Before its number is given back, so that it is still that of this group.
            os.killpg(child.pid, signal.SIGKILL)
            code = child.wait()
            os.close(pidfd)
        target.seek(0)
        return code, target.read()
