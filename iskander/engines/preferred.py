"""Client that prefers one server, and uses others while that one is unavailable.

Runs in: actors of Ray; any number of calling threads, and one thread while the preferred server is
left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from iskander import clock
from iskander.client.retry import is_gateway_failure, is_retryable
from iskander.engines.addresses import Addresses
from iskander.errors import DeadlineExceeded, IskanderError, NotReady

PROBE_S: Final = 1.0
"""Time between two probes of a preferred server that was left."""
PAUSE_S: Final = 0.2
"""Pause after a round in which no server scored the batch."""


class ScoringClient(Protocol):
    """The calls of `Client` that are used."""

    @property
    def score(self) -> Callable[..., Any]:
        """Score a table."""

    def health(self) -> dict[str, Any]:
        """Return the readiness."""


class PreferredClient:
    """Client of several servers with the same models.

    Args:
        look_up: Returns the current addresses; called again after failures.
        open_client: Opens a client of addresses; with retries of its own.
        wait_s: Time for which a batch waits while no server is available.
        probe_s: Time between two probes of the preferred server.
    """

    def __init__(
        self,
        look_up: Callable[[], Addresses],
        open_client: Callable[[Sequence[str]], ScoringClient],
        *,
        wait_s: float,
        probe_s: float = PROBE_S,
    ) -> None:
        self._look_up = look_up
        self._open = open_client
        self._wait_s, self._probe_s = wait_s, probe_s
        self._lock = threading.Lock()
        self._clients: dict[tuple[str, ...], ScoringClient] = {}
        self._is_left = False
        self._addresses = Addresses("", ())
        self._update(look_up())

    def score(self, model: str, data: Any, **options: Any) -> Any:  # noqa: ANN401
        """Score a table with the preferred server, or with another one.

        Raises:
            IskanderError: No server scored it in time, or its error cannot be retried.
        """
        end_ns: int | None = None
        while True:
            failure: IskanderError = NotReady("no server is known or ready")
            addresses = self._addresses
            for group in self._groups(addresses):
                try:
                    return self._client(group).score(model, data, **options)
                except IskanderError as error:
                    failure = error
                    is_late = isinstance(error, DeadlineExceeded)
                    if not is_late and not is_retryable(error):
                        raise
                    if group == (addresses.preferred,) and (is_late or _is_gone(error)):
                        self._leave()
            now_ns = clock.now_ns()
            end_ns = end_ns or now_ns + int(self._wait_s * clock.NS_PER_S)
            if now_ns >= end_ns:
                failure.add_note(f"no server scored the batch within {self._wait_s:g} s")
                raise failure
            clock.pause_s(PAUSE_S)
            self._update(self._look_up())

    def _groups(self, addresses: Addresses) -> list[tuple[str, ...]]:
        """Addresses of the clients to try, in order."""
        groups = [addresses.others] if addresses.others else []
        if addresses.preferred and not (self._is_left and groups):
            groups.insert(0, (addresses.preferred,))
        return groups

    def _client(self, addresses: tuple[str, ...]) -> ScoringClient:
        with self._lock:
            client = self._clients.get(addresses)
            if client is None:
                client = self._clients[addresses] = self._open(addresses)
            return client

    def _update(self, addresses: Addresses) -> None:
        """Use new addresses; other threads may still use the clients of the old ones."""
        with self._lock:
            self._addresses = addresses
            known = {(addresses.preferred,), addresses.others}
            self._clients = {key: each for key, each in self._clients.items() if key in known}
        if addresses.is_expected and not addresses.preferred:
            self._leave()

    def _leave(self) -> None:
        """Use the others, until a thread finds the preferred server ready again."""
        with self._lock:
            if self._is_left:
                return
            self._is_left = True
        threading.Thread(target=self._return, name="iskander-preferred", daemon=True).start()

    def _return(self) -> None:
        """Probe the preferred server, which may have another address, until it is ready."""
        try:
            while not self._is_back():
                clock.pause_s(self._probe_s)
        except IskanderError:
            return  # This process has left the cluster.
        finally:
            # Also after an error, which ends this thread: the next failure starts another one.
            self._is_left = False

    def _is_back(self) -> bool:
        addresses = self._look_up()
        if not addresses.preferred:
            return False
        try:
            is_ready = bool(self._client((addresses.preferred,)).health()["ready"])
        except IskanderError:
            return False
        if is_ready:
            self._update(addresses)
        return is_ready


def _is_gone(error: IskanderError) -> bool:
    """Whether the next batches would fail too."""
    return is_gateway_failure(error) or isinstance(error, NotReady)
