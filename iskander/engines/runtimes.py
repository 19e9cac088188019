"""Comparison of the servers of one job: the same library, providers and threads.

Runs in: drivers of engines, and the operator's tool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from iskander.client import OFF, Client, ModelDescription
from iskander.client.calls.retry import is_gateway_failure, is_retryable
from iskander.errors import IskanderError
from iskander.lake.execution import require_runtimes, runtime_terms

CALL_S: Final = 5.0
"""Time limit of a call that describes the model; a slower server checks the terms of each call."""


def common_runtimes(
    description: ModelDescription,
    addresses: Sequence[str],
    options: Mapping[str, Any],
    *,
    open_client: Callable[..., Any] = Client,
) -> dict[str, str]:
    """Require equal runtimes of all servers that answer; return the terms for the job's calls.

    With these terms, a server that did not answer or joins later rejects calls if its runtime
    differs.

    Args:
        description: Description of the model by one of the servers.
        addresses: Addresses of all servers.
        options: Options of the clients of the job.
        open_client: Opens a client of one address.

    Raises:
        RuntimeDiffers: A server runs the model with another library, provider or number of threads.
    """
    probing = {**options, "timeout_s": CALL_S, "retry": OFF, "shared_bytes": 0}
    for address in addresses if len(addresses) > 1 else ():
        found = None
        with contextlib.closing(open_client(address, **probing)) as client:
            try:
                version = description.version
                found = client.model(description.name, version=version).description
            except IskanderError as error:
                if not is_retryable(error) and not is_gateway_failure(error):
                    raise
        if found is not None:
            require_runtimes(description, found, f"server {address}")
    return runtime_terms(description)
