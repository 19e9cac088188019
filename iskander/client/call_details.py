"""Flight middleware: request headers, and error details from the trailers.

Runs on: the caller's threads.
"""

from __future__ import annotations

import json
import threading
from typing import Any

from pyarrow import flight

from iskander.errors import DeadlineExceeded, IskanderError


class CallDetail(flight.ClientMiddleware):  # type: ignore[misc]
    """Headers and error detail of one call.

    Reads the detail from the trailers, since pyarrow passes `extra_info` for some statuses only.
    """

    def __init__(self, headers: dict[str, str]) -> None:
        super().__init__()
        self._headers = headers
        self._detail: bytes = b""

    def sending_headers(self) -> dict[str, str]:
        """Return the request headers."""
        return self._headers

    def received_headers(self, headers: dict[str, list[Any]]) -> None:
        """Store the error detail."""
        for value in headers.get("grpc-status-details-bin", ()):
            self._detail = value

    def to_named(self, error: Exception) -> Exception:
        """Return the server's `IskanderError` for a Flight error, else the Flight error."""
        try:
            detail = json.loads(self._detail)
        except ValueError:
            if isinstance(error, flight.FlightTimedOutError):  # The client ended it first.
                return DeadlineExceeded("the call's deadline has passed")
            return error
        return IskanderError.from_wire(detail) if isinstance(detail, dict) else error


class CallDetails(flight.ClientMiddlewareFactory):  # type: ignore[misc]
    """Creates the detail of each call, and keeps the latest for each thread."""

    def __init__(self, token: str | None) -> None:
        super().__init__()
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._thread = threading.local()

    def start_call(self, info: Any) -> CallDetail:  # noqa: ANN401
        """Create the detail of a call."""
        detail = self._thread.latest = CallDetail(self._headers)
        return detail

    def latest(self) -> CallDetail:
        """Return the detail of the last call that this thread started."""
        detail: CallDetail = self._thread.latest
        return detail
