"""A model loaded once, in the interpreter of its own workers, to see whether it can be.

Runs on: the operator's tool.
"""

from __future__ import annotations

import subprocess

from iskander.errors import IskanderError, ManifestError, NotReady
from iskander.gateway.supervision.workers import worker_command
from iskander.wire.messages import Loaded, LoadFailed, ModelSpec, decode_to_gateway, encode


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
    try:
        ended = subprocess.run(
            [*worker_command(python), "--try", str(cores)],
            input=encode(spec),
            stdout=subprocess.PIPE,
            timeout=wait_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NotReady(f"it was not loaded after {wait_s:g} s") from None
    if ended.returncode or not ended.stdout:
        raise ManifestError(
            f"its interpreter ended with exit code {ended.returncode} before it was loaded"
        )
    (answer,) = decode_to_gateway(ended.stdout)
    if isinstance(answer, LoadFailed):
        raise IskanderError.from_wire({"code": answer.code, "message": answer.message})
    assert isinstance(answer, Loaded)
    return answer
