"""Python client over Arrow Flight: batches in, predictions out, typed errors.

It adds three things to pyarrow.flight: concurrent writes and reads (a client that writes everything
before it reads blocks for ever on flow control), the server's error detail as `IskanderError`, and
optionally shared memory for large batches to a server on the same machine.

Runs on: the caller's threads; never in the gateway.
"""

from iskander.client.aio import AsyncClient
from iskander.client.calls.connection import CALL_TIMEOUT_S, Tls
from iskander.client.calls.resume import Item
from iskander.client.calls.retry import OFF, Retry
from iskander.client.client import Client
from iskander.client.model import Model, ModelDescription
from iskander.errors import IskanderError

__all__ = [
    "CALL_TIMEOUT_S",
    "OFF",
    "AsyncClient",
    "Client",
    "IskanderError",
    "Item",
    "Model",
    "ModelDescription",
    "Retry",
    "Tls",
]
