"""Flight middleware: request headers, and error details from the trailers.

Runs on: the caller's threads.
"""

from __future__ import annotations

import json
import threading
from typing import Any

from pyarrow import flight

from iskander.client.calls.credentials import Credentials
from iskander.errors import IskanderError


class CallDetail(flight.ClientMiddleware):  # type: ignore[misc]
    """Headers and error detail of one call.

    The detail is read from the trailers, because pyarrow passes `extra_info` for some statuses
    only.

    Attributes:
        token: Token of the call.
    """

    def __init__(self, token: str | None) -> None:
        super().__init__()
        self.token = token
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._detail: bytes = b""

    def sending_headers(self) -> dict[str, str]:
        """Return the request headers."""
        return self._headers

    def received_headers(self, headers: dict[str, list[Any]]) -> None:
        """Store the error detail."""
        for value in headers.get("grpc-status-details-bin", ()):
            self._detail = value

    def server_error(self) -> IskanderError | None:
        """Return the error that the gateway sent.

        None if it sent none, as on a broken connection.
        """
        try:
            detail = json.loads(self._detail)
            is_ours = isinstance(detail["code"], str) and isinstance(detail["message"], str)
        except (ValueError, LookupError, TypeError):
            return None
        return IskanderError.from_wire(detail) if is_ours else None


class CallDetails(flight.ClientMiddlewareFactory):  # type: ignore[misc]
    """Creates the detail of every call, and keeps the latest detail of every thread."""

    def __init__(self, credentials: Credentials) -> None:
        super().__init__()
        self._credentials = credentials
        self._thread = threading.local()

    def prepare(self) -> None:
        """Get the token for the next call of this thread; not in a callback, which must not raise.

        Raises:
            ConfigError: The token is invalid.
            Exception: The error of the caller's token function.
        """
        self._thread.latest = None
        self._thread.token = self._credentials.current()

    def start_call(self, info: Any) -> CallDetail:  # noqa: ANN401
        """Create the detail of a call."""
        detail = self._thread.latest = CallDetail(self._thread.token)
        return detail

    def latest(self) -> CallDetail | None:
        """Return the detail of the call that this thread began after `prepare`.

        None without one.
        """
        detail: CallDetail | None = self._thread.latest
        return detail
