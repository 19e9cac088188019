"""What a server says beside a call's status, and what is shown to it.

Runs on: the caller's threads.
"""

from __future__ import annotations

import json
import threading
from typing import Any

from pyarrow import flight

from iskander.errors import DeadlineExceeded, IskanderError


class Detail(flight.ClientMiddleware):  # type: ignore[misc]
    """What the server said beside a call's status, and what is shown to it.

    Read from the trailers, since pyarrow hands `extra_info` on for some statuses only.
    """

    def __init__(self, shown: dict[str, str]) -> None:
        super().__init__()
        self._shown = shown
        self._wire: bytes = b""

    def sending_headers(self) -> dict[str, str]:
        """What is shown."""
        return self._shown

    def received_headers(self, headers: dict[str, list[Any]]) -> None:
        """Keep what is said."""
        for value in headers.get("grpc-status-details-bin", ()):
            self._wire = value

    def named(self, error: Exception) -> Exception:
        """The server's own error where it sent one; else the error as it is.

        At a call's deadline it is a race which side ends it, and the error is the same.
        """
        try:
            wire = json.loads(self._wire)
        except ValueError:
            if isinstance(error, flight.FlightTimedOutError):
                return DeadlineExceeded("the call's deadline has passed")
            return error
        return IskanderError.from_wire(wire) if isinstance(wire, dict) else error


class Details(flight.ClientMiddlewareFactory):  # type: ignore[misc]
    """Gives each call its detail; a call begins on the thread that asks for `latest`."""

    def __init__(self, token: str | None) -> None:
        super().__init__()
        self._shown = {} if token is None else {"authorization": f"Bearer {token}"}
        self._thread = threading.local()

    def start_call(self, info: Any) -> Detail:  # noqa: ANN401
        """A call begins."""
        detail = self._thread.latest = Detail(self._shown)
        return detail

    def latest(self) -> Detail:
        """Of the call that this thread began last."""
        detail: Detail = self._thread.latest
        return detail
