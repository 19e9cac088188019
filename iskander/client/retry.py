"""Retry policy: retryable errors, waits between attempts, and the retry budget of a client.

Backoff, jitter and the hooks for logs and metrics are those of `stamina`, which is imported at the
first retry.

Runs on: the caller's threads. Source: gRFC A6 (the retry budget is its `retryThrottling`).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from iskander import clock
from iskander.errors import (
    ConfigError,
    ConnectionFailed,
    DeadlineExceeded,
    DeadlineUnreachable,
    Draining,
    DroppedFromQueue,
    IskanderError,
    Unauthenticated,
)

if TYPE_CHECKING:
    from stamina import Attempt

TOKENS_MAX = 500.0
"""A killed gateway fails every open call at once: half of these tokens cover 250 calls."""
SUCCESS_TOKENS = 0.1
_SCHEDULED = (DeadlineUnreachable, DroppedFromQueue)
"""Decisions about one batch by its terms: the same batch, sent later, is later still."""


def is_retryable(error: BaseException) -> bool:
    """Whether the same call may succeed later, or on another gateway."""
    if isinstance(error, Unauthenticated):
        return error.has_new_token
    if isinstance(error, _SCHEDULED):
        return False
    return isinstance(error, IskanderError) and error.retryable


def is_gateway_failure(error: BaseException) -> bool:
    """Whether other calls to the same gateway will fail too."""
    return isinstance(error, Draining | ConnectionFailed)


class Deadline:
    """Deadline of a call with all its attempts; None: no deadline."""

    __slots__ = ("_end_ns", "_now_ns")

    def __init__(
        self, timeout_s: float | None, *, now_ns: Callable[[], int] = clock.now_ns
    ) -> None:
        self._now_ns = now_ns
        self._end_ns = None if timeout_s is None else now_ns() + int(timeout_s * clock.NS_PER_S)

    def remaining_s(self) -> float | None:
        """Return the time left for the next attempt.

        Raises:
            DeadlineExceeded: No time is left.
        """
        if self._end_ns is None:
            return None
        left_ns = self._end_ns - self._now_ns()
        if left_ns <= 0:
            raise DeadlineExceeded("the call's deadline has passed")
        return left_ns / clock.NS_PER_S

    def is_before(self, wait_s: float) -> bool:
        """Whether a wait ends after the deadline."""
        if self._end_ns is None:
            return False
        return self._end_ns - self._now_ns() <= wait_s * clock.NS_PER_S


class RetryBudget:
    """Token bucket that all calls of a client share, against retries to a failing server.

    A failure takes one token, a success returns a tenth. At half of the tokens or fewer, failures
    are not retried.
    """

    def __init__(self, tokens_max: float = TOKENS_MAX) -> None:
        self._tokens_max = self._tokens = tokens_max
        self._lock = threading.Lock()

    def fail(self) -> bool:
        """Count a failure; return whether it may be retried."""
        with self._lock:
            self._tokens = max(self._tokens - 1, 0.0)
            return self._tokens > self._tokens_max / 2

    def succeed(self) -> None:
        """Count a success."""
        if self._tokens < self._tokens_max:
            with self._lock:
                self._tokens = min(self._tokens + SUCCESS_TOKENS, self._tokens_max)


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """Retries of calls and streams.

    The wait before retry n is `first_wait_s * 2 ** (n - 1)` plus a random part of up to
    `jitter_s`, at most `wait_max_s`; or the time that the server's error states.

    Attributes:
        attempts: Maximum attempts, the first included. A stream starts again to count after a
            result.
        first_wait_s: Wait before the first retry.
        wait_max_s: Maximum wait before a retry.
        jitter_s: Maximum random addition to a wait.
        is_enabled: Retry at all.

    Raises:
        ConfigError: A value is out of range.
    """

    attempts: int = 6
    first_wait_s: float = 0.05
    wait_max_s: float = 2.0
    jitter_s: float = 0.1
    is_enabled: bool = True

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"retry attempts are {self.attempts}; the minimum is 1 (`attempts`)")
        for name in ("first_wait_s", "wait_max_s", "jitter_s"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"a retry wait is {value:g} s; the minimum is 0 (`{name}`)")


OFF = Retry(is_enabled=False)


class Attempts:
    """Failed attempts of one call. It costs nothing until the first failure."""

    __slots__ = ("_attempt", "_budget", "_context", "_deadline", "_failed", "_reason", "_retry")

    def __init__(self, retry: Retry, budget: RetryBudget, deadline: Deadline) -> None:
        self._retry = retry
        self._budget = budget
        self._deadline = deadline
        self._context: Iterator[Attempt] | None = None
        self._attempt: Attempt | None = None
        self._failed = 0
        self._reason = ""

    def wait_after(self, error: Exception) -> None:
        """Wait before the next attempt.

        Raises:
            Exception: The error, if there is no other attempt; a note has their number.
        """
        if not self._retry.is_enabled or not is_retryable(error):
            raise error
        self._failed += 1
        self._reason = f"limit {self._retry.attempts} (`attempts`)"
        if self._context is None:
            self._context = self._open_context()
            self._attempt = next(self._context)
        assert self._attempt is not None
        with self._attempt:
            raise error
        try:
            self._attempt = next(self._context)  # Waits, or raises the error.
        except type(error):
            plural = "s" if self._failed > 1 else ""
            error.add_note(f"failed after {self._failed} attempt{plural}: {self._reason}")
            self.reset()  # The context refers to the error, whose traceback refers to this frame.
            raise

    def succeed(self) -> None:
        """Count the call as a success."""
        self._budget.succeed()

    def reset(self) -> None:
        """Count from zero again, after a result."""
        self._context = self._attempt = None
        self._failed = 0

    def _open_context(self) -> Iterator[Attempt]:
        import stamina

        retry = self._retry
        return iter(
            stamina.retry_context(
                on=self._decide,
                attempts=retry.attempts,
                timeout=None,  # The deadline ends the attempts.
                wait_initial=retry.first_wait_s,
                wait_max=retry.wait_max_s,
                wait_jitter=retry.jitter_s,
            )
        )

    def _decide(self, error: Exception) -> bool | float:
        """Return whether to retry with the usual wait, or the wait that the server stated."""
        if not self._budget.fail():
            self._reason = "the retry budget of this client is used up"
            return False
        stated_ms = error.retry_after_ms if isinstance(error, IskanderError) else None
        if stated_ms:
            wait_s = stated_ms / 1000 + random.uniform(0, self._retry.jitter_s)
        else:
            backoff_s = self._retry.first_wait_s * 2.0 ** (self._failed - 1)
            wait_s = min(backoff_s, self._retry.wait_max_s)
        if self._deadline.is_before(wait_s):
            self._reason = "the next one would begin after the call's deadline"
            return False
        return wait_s if stated_ms else True
