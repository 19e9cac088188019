"""Retry policy: retryable errors, waits between attempts, and the retry budget of a client.

Runs on: the caller's threads. Source: gRFC A6 (the retry budget is its `retryThrottling`).
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import cast

from iskander.errors import (
    ConfigError,
    ConnectionFailed,
    DeadlineExceeded,
    DeadlineUnreachable,
    Draining,
    DroppedFromQueue,
    IskanderError,
    RegionNotFound,
    Unauthenticated,
)
from iskander.foundation import clock
from iskander.foundation.backoff import backoff

BUDGET = 500
"""Tokens of the retry budget. A killed gateway fails all open calls at once; half of the tokens
cover 250 such calls."""
BUDGET_MAX = 10**9
"""Limit of the tokens, which a float counts exactly."""
SUCCESS_TOKENS = 0.1
STATED_WAIT_MAX_S = 60.0
"""Longest wait stated by an error that is retried. An overloaded gateway states no longer waits; a
quarantined model does, up to an hour."""
SECONDS_MAX = 1e9
"""Limit of timeouts and waits, 31 years: waits of `threading` overflow at 9.2e9 s."""
_SCHEDULED = (DeadlineUnreachable, DroppedFromQueue)
"""Errors of a batch that comes too late for its terms; sent again, it would be later still."""

_log = logging.getLogger("iskander.client")
_log.addHandler(logging.NullHandler())  # A program without logging would print each retry.


def is_retryable(error: BaseException) -> bool:
    """Whether the same call may succeed later, or on another gateway."""
    if isinstance(error, Unauthenticated):
        return error.has_new_token
    if isinstance(error, RegionNotFound):  # The next attempt uses another region or no region.
        return True
    if isinstance(error, _SCHEDULED):
        return False
    return isinstance(error, IskanderError) and error.retryable


def is_gateway_failure(error: BaseException) -> bool:
    """Whether other calls to the same gateway will probably fail too.

    A timeout of the client without an answer counts as one: a probe then checks the gateway.
    """
    if isinstance(error, DeadlineExceeded):
        return error.is_unanswered
    return isinstance(error, Draining | ConnectionFailed)


def require_seconds(value: object, name: str, *, minimum: float = 0.0) -> float:
    """Return a value as seconds, or raise a ConfigError that names it.

    Raises:
        ConfigError: The value is no number, or out of range.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    # NaN is in no range.
    if not is_number or not minimum <= float(cast(Real, value)) <= SECONDS_MAX:
        limits = f"up to {SECONDS_MAX:g}" if minimum < 0 else f"from {minimum:g} to {SECONDS_MAX:g}"
        raise ConfigError(f"invalid time: {value!r}; expected seconds {limits} (`{name}`)")
    return float(cast(Real, value))


class Deadline:
    """Deadline of a call with all its attempts.

    Args:
        timeout_s: Time from now to the deadline; a negative time has passed. None: no deadline.
        now_ns: Clock.

    Raises:
        ConfigError: The time is no finite number.
    """

    __slots__ = ("_end_ns", "_now_ns")

    def __init__(
        self, timeout_s: float | None, *, now_ns: Callable[[], int] = clock.now_ns
    ) -> None:
        self._now_ns = now_ns
        self._end_ns = None
        if timeout_s is not None:
            seconds = require_seconds(timeout_s, "timeout_s", minimum=-SECONDS_MAX)
            self._end_ns = now_ns() + int(seconds * clock.NS_PER_S)

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

    def ends_within(self, wait_s: float) -> bool:
        """Whether the deadline passes before a wait of this length is over."""
        if self._end_ns is None:
            return False
        return self._end_ns - self._now_ns() <= wait_s * clock.NS_PER_S


class RetryBudget:
    """Token bucket that limits retries to a failing server; all calls of a client share it.

    A failure takes one token, a success returns a tenth. At half of the tokens or fewer, failures
    are not retried.
    """

    def __init__(self, tokens_max: float = BUDGET) -> None:
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
        attempts: Maximum attempts, including the first. A stream counts from zero again after a
            result.
        first_wait_s: Wait before the first retry.
        wait_max_s: Maximum wait before a retry.
        jitter_s: Maximum random addition to a wait.
        is_enabled: Whether failures are retried.
        budget: Tokens that all calls of a client share. A failure takes one token, a result returns
            a tenth of one, and at half of the tokens or fewer nothing is retried. An outage takes
            one token for each attempt of each stream.
        on_retry: Called before each wait with the number of failed attempts, the wait in seconds
            and the error, for example to count retries. It must not raise an error.

    Raises:
        ConfigError: A value is out of range.
    """

    attempts: int = 6
    first_wait_s: float = 0.05
    wait_max_s: float = 2.0
    jitter_s: float = 0.1
    is_enabled: bool = True
    budget: int = BUDGET
    on_retry: Callable[[int, float, Exception], None] | None = None

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or self.attempts < 1:
            text = f"invalid number of attempts: {self.attempts!r}; expected an integer from 1"
            raise ConfigError(f"{text} (`attempts`)")
        if type(self.budget) is not int or not 1 <= self.budget <= BUDGET_MAX:
            text = f"invalid retry budget: {self.budget!r}; expected an integer from 1 to"
            raise ConfigError(f"{text} {BUDGET_MAX} (`budget`)")
        for name in ("first_wait_s", "wait_max_s", "jitter_s"):
            require_seconds(getattr(self, name), name)


OFF = Retry(is_enabled=False)


class Attempts:
    """Counts the failed attempts of one call, and decides about the next attempt.

    Args:
        retry: Limits and waits.
        budget: Budget of the client.
        deadline: Deadline of the call.
        pause: Waits for a number of seconds; may raise an error to end the call.
    """

    __slots__ = ("_budget", "_deadline", "_failed", "_pause", "_retry")

    def __init__(
        self,
        retry: Retry,
        budget: RetryBudget,
        deadline: Deadline,
        pause: Callable[[float], None] = clock.pause_s,
    ) -> None:
        self._retry = retry
        self._budget = budget
        self._deadline = deadline
        self._pause = pause
        self._failed = 0

    def wait_after(self, error: Exception) -> None:
        """Wait before the next attempt, or raise the error of the last attempt.

        Raises:
            Exception: `error`, if there is no other attempt; a note has the number of attempts.
        """
        if not self._retry.is_enabled or not is_retryable(error):
            raise error
        self._failed += 1
        stated_s = _stated_s(error)
        wait_s = self._backoff_s() if stated_s is None else stated_s + self._jitter_s()
        reason = self._reason_to_end(stated_s, wait_s)
        if reason is not None:
            plural = "s" if self._failed > 1 else ""
            error.add_note(f"failed after {self._failed} attempt{plural}: {reason}")
            raise error
        _log.warning("retry %d in %.3f s after an error: %s", self._failed, wait_s, error)
        if self._retry.on_retry is not None:
            self._retry.on_retry(self._failed, wait_s, error)
        self._pause(wait_s)

    def succeed(self) -> None:
        """Count a result as a success; count failures from zero again."""
        self._budget.succeed()
        self._failed = 0

    def _reason_to_end(self, stated_s: float | None, wait_s: float) -> str | None:
        """Return why no other attempt follows; None if another attempt follows."""
        if not self._budget.fail():
            return "the retry budget of this client is used up"
        if self._failed >= self._retry.attempts:
            return f"limit {self._retry.attempts} (`attempts`)"
        if stated_s is not None and stated_s > STATED_WAIT_MAX_S:
            return f"the error states a wait of {stated_s:,.0f} s, limit {STATED_WAIT_MAX_S:.0f} s"
        if self._deadline.ends_within(wait_s):
            return "the next one would begin after the call's deadline"
        return None

    def _backoff_s(self) -> float:
        wait_s = backoff(self._failed, self._retry.first_wait_s, self._retry.wait_max_s)
        return min(wait_s + self._jitter_s(), self._retry.wait_max_s)

    def _jitter_s(self) -> float:
        return random.uniform(0, self._retry.jitter_s)


def _stated_s(error: Exception) -> float | None:
    """Return the wait that an error states; None if it states none."""
    stated_ms = error.retry_after_ms if isinstance(error, IskanderError) else None
    is_stated = isinstance(stated_ms, int | float) and stated_ms > 0
    return cast(float, stated_ms) / 1000 if is_stated else None
