"""Retry policy: retryable errors, waits, the deadline of all attempts, and the retry budget."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from pyarrow import flight

from iskander.client.calls.retry import (
    OFF,
    STATED_WAIT_MAX_S,
    Attempts,
    Deadline,
    Retry,
    RetryBudget,
    is_gateway_failure,
    is_retryable,
    require_seconds,
)
from iskander.errors import (
    ConfigError,
    ConnectionFailed,
    ContractError,
    DeadlineExceeded,
    DeadlineUnreachable,
    Draining,
    DroppedFromQueue,
    NotReady,
    QueueFull,
    Unauthenticated,
)
from iskander.foundation.clock import NS_PER_S

STEADY = Retry(first_wait_s=0.1, wait_max_s=1.0, jitter_s=0.0)


class FakeClock:
    """A clock that only sleeps advance."""

    def __init__(self) -> None:
        self.ns = 0
        self.waits: list[float] = []

    def now_ns(self) -> int:
        return self.ns

    def sleep(self, seconds: float) -> None:
        self.waits.append(round(seconds, 6))
        self.ns += round(seconds * NS_PER_S)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def attempts_of(
    clock: FakeClock,
    retry: Retry = STEADY,
    *,
    timeout_s: float | None = None,
    budget: RetryBudget | None = None,
) -> Attempts:
    deadline = Deadline(timeout_s, now_ns=clock.now_ns)
    return Attempts(retry, budget or RetryBudget(), deadline, clock.sleep)


def fail_until_raised(attempts: Attempts, error: Exception) -> int:
    """Report the same failure until it is raised; returns how often."""
    for count in range(1, 100):
        try:
            attempts.wait_after(error)
        except type(error) as raised:
            assert raised is error
            return count
    raise AssertionError("the attempts do not end")


def renewed() -> Unauthenticated:
    error = Unauthenticated("expired")
    error.has_new_token = True
    return error


def unanswered() -> DeadlineExceeded:
    error = DeadlineExceeded("x")
    error.is_unanswered = True
    return error


def notes_of(error: Exception) -> list[str]:
    return list(getattr(error, "__notes__", []))


@pytest.mark.parametrize(
    ("error", "is_expected"),
    [
        (NotReady("x"), True),
        (QueueFull("x"), True),
        (Draining("x"), True),
        (ConnectionFailed("x"), True),
        (Unauthenticated("x"), False),
        (renewed(), True),
        (ContractError("x"), False),
        (DeadlineExceeded("x"), False),
        (DeadlineUnreachable("x"), False),
        (DroppedFromQueue("x"), False),
        (flight.FlightUnavailableError("of the caller's feed"), False),
        (ValueError("x"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_retryable_errors(error: Exception, is_expected: bool) -> None:
    assert is_retryable(error) is is_expected


def test_gateway_failures_are_broken_connections_and_drains() -> None:
    assert is_gateway_failure(ConnectionFailed("x"))
    assert is_gateway_failure(Draining("x"))
    full = QueueFull("x")
    full.__cause__ = flight.FlightUnavailableError("its status")
    assert not is_gateway_failure(full)
    assert not is_gateway_failure(NotReady("x"))


def test_gateway_that_does_not_answer_in_time_may_have_failed() -> None:
    assert is_gateway_failure(unanswered())
    assert not is_gateway_failure(DeadlineExceeded("of the server, for one batch"))


def test_waits_double_up_to_the_maximum_and_the_last_error_has_a_note(clock: FakeClock) -> None:
    error = ConnectionFailed("connection refused")
    assert fail_until_raised(attempts_of(clock), error) == 6
    assert clock.waits == [0.1, 0.2, 0.4, 0.8, 1.0]
    assert notes_of(error) == ["failed after 6 attempts: limit 6 (`attempts`)"]


def test_jitter_is_added_to_each_wait(clock: FakeClock) -> None:
    retry = Retry(attempts=50, first_wait_s=0.1, wait_max_s=0.2, jitter_s=0.05)
    fail_until_raised(attempts_of(clock, retry), NotReady("x"))
    assert 0.1 < clock.waits[0] <= 0.15
    assert max(clock.waits) <= 0.2
    clock.waits.clear()
    stated = QueueFull("x", retry_after_ms=300)
    fail_until_raised(attempts_of(clock, retry), stated)
    assert all(0.3 <= wait <= 0.35 for wait in clock.waits)
    assert len(set(clock.waits)) > 1


def test_stated_wait_of_the_server_is_used(clock: FakeClock) -> None:
    attempts = attempts_of(clock)
    attempts.wait_after(QueueFull("x", retry_after_ms=2500))
    attempts.wait_after(NotReady("x"))
    attempts.wait_after(Draining("x", retry_after_ms=0))
    assert clock.waits == [2.5, 0.2, 0.4]


def test_longest_stated_wait_is_used_and_a_longer_one_raises_at_once(clock: FakeClock) -> None:
    attempts = attempts_of(clock)
    attempts.wait_after(QueueFull("x", retry_after_ms=int(STATED_WAIT_MAX_S * 1000)))
    assert clock.waits == [STATED_WAIT_MAX_S]
    error = QueueFull("x", retry_after_ms=3_600_000)
    assert fail_until_raised(attempts, error) == 1
    assert clock.waits == [STATED_WAIT_MAX_S]
    assert notes_of(error) == [
        "failed after 2 attempts: the error states a wait of 3,600 s, limit 60 s"
    ]


@pytest.mark.parametrize("stated_ms", [-5, "soon"])
def test_invalid_stated_wait_is_ignored(clock: FakeClock, stated_ms: Any) -> None:
    attempts_of(clock).wait_after(QueueFull("x", retry_after_ms=stated_ms))
    assert clock.waits == [0.1]


def test_waits_of_many_attempts_stay_finite(clock: FakeClock) -> None:
    retry = Retry(attempts=3000, first_wait_s=0.1, wait_max_s=0.2, jitter_s=0.0)
    assert fail_until_raised_within(attempts_of(clock, retry, budget=RetryBudget(1e6)), 3000)
    assert clock.waits[-1] == 0.2


def fail_until_raised_within(attempts: Attempts, count: int) -> bool:
    error = NotReady("x")
    for _ in range(count - 1):
        attempts.wait_after(error)
    with pytest.raises(NotReady):
        attempts.wait_after(error)
    return True


def test_error_of_the_pause_ends_the_call(clock: FakeClock) -> None:
    def pause(_: float) -> None:
        raise DeadlineExceeded("closed")

    with pytest.raises(DeadlineExceeded, match="closed"):
        Attempts(STEADY, RetryBudget(), Deadline(None), pause).wait_after(NotReady("x"))


def test_other_errors_are_raised_at_once_without_a_note(clock: FakeClock) -> None:
    error = ContractError("wrong column")
    assert fail_until_raised(attempts_of(clock), error) == 1
    assert (clock.waits, notes_of(error)) == ([], [])


def test_disabled_retries_raise_the_first_error(clock: FakeClock) -> None:
    error, budget = NotReady("x"), RetryBudget(2)
    assert fail_until_raised(attempts_of(clock, OFF, budget=budget), error) == 1
    assert (clock.waits, notes_of(error)) == ([], [])


def test_no_attempt_begins_after_the_deadline(clock: FakeClock) -> None:
    error = NotReady("x")
    # 0.1 + 0.2 + 0.4 s of waits; another 0.8 s would end at 1.5 s.
    assert fail_until_raised(attempts_of(clock, timeout_s=1.4), error) == 4
    assert clock.waits == [0.1, 0.2, 0.4]
    assert "4 attempts: the next one would begin after the call's deadline" in notes_of(error)[0]


def test_stated_wait_beyond_the_deadline_raises_at_once(clock: FakeClock) -> None:
    error = QueueFull("x", retry_after_ms=5000)
    assert fail_until_raised(attempts_of(clock, timeout_s=4.0), error) == 1
    assert clock.waits == []


def test_deadline_counts_down_over_all_attempts(clock: FakeClock) -> None:
    deadline = Deadline(1.0, now_ns=clock.now_ns)
    assert deadline.remaining_s() == 1.0
    clock.sleep(0.75)
    assert deadline.remaining_s() == 0.25
    clock.sleep(0.25)
    with pytest.raises(DeadlineExceeded):
        deadline.remaining_s()
    assert Deadline(None, now_ns=clock.now_ns).remaining_s() is None


def test_success_counts_from_zero_again(clock: FakeClock) -> None:
    attempts = attempts_of(clock)
    for _ in range(5):
        attempts.wait_after(NotReady("x"))
    attempts.succeed()
    error = NotReady("x")
    assert fail_until_raised(attempts, error) == 6
    assert clock.waits == [0.1, 0.2, 0.4, 0.8, 1.0] * 2
    assert "failed after 6 attempts" in notes_of(error)[0]


def test_budget_ends_retries_of_all_calls_and_successes_refill_it(clock: FakeClock) -> None:
    budget = RetryBudget(10)
    retry = Retry(attempts=100, jitter_s=0.0)
    error = NotReady("x")
    # Five failures leave half of the tokens.
    assert fail_until_raised(attempts_of(clock, retry, budget=budget), error) == 5
    assert notes_of(error) == [
        "failed after 5 attempts: the retry budget of this client is used up"
    ]
    assert fail_until_raised(attempts_of(clock, retry, budget=budget), NotReady("x")) == 1
    for _ in range(30):
        attempts_of(clock, retry, budget=budget).succeed()
    assert fail_until_raised(attempts_of(clock, retry, budget=budget), NotReady("x")) == 2


def test_budget_is_bounded_at_both_ends() -> None:
    budget = RetryBudget(4)
    for _ in range(100):
        budget.succeed()
    assert [budget.fail() for _ in range(3)] == [True, False, False]
    for _ in range(100):
        budget.fail()
    for _ in range(31):
        budget.succeed()
    assert budget.fail()


def test_each_retry_is_logged_and_reported(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Any] = []

    def on_retry(failed: int, wait_s: float, error: Exception) -> None:
        events.append((failed, wait_s, str(error), len(clock.waits)))

    attempts = attempts_of(clock, dataclasses.replace(STEADY, on_retry=on_retry))
    with caplog.at_level(logging.WARNING, "iskander.client"):
        attempts.wait_after(NotReady("x"))
        attempts.wait_after(NotReady("y"))
    assert events == [(1, 0.1, "x", 0), (2, 0.2, "y", 1)]
    assert caplog.messages == [
        "retry 1 in 0.100 s after an error: x",
        "retry 2 in 0.200 s after an error: y",
    ]


def test_a_program_without_logging_prints_nothing_at_a_retry() -> None:
    name = "iskander.client"
    script = f"import logging, iskander.client; logging.getLogger({name!r}).warning('retry')"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert (result.stdout, result.stderr) == (b"", b"")


INVALID: list[Any] = [-0.1, float("nan"), float("inf"), 1e10, "3", None, True]


@pytest.mark.parametrize("value", INVALID, ids=repr)
@pytest.mark.parametrize("field", ["first_wait_s", "wait_max_s", "jitter_s"])
def test_values_out_of_range_are_config_errors(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"expected seconds from 0 to 1e\+09 \(`{field}`\)"):
        Retry(**{field: value})


@pytest.mark.parametrize("value", [0, -1, 1.5, float("nan"), True, "6"], ids=repr)
def test_number_of_attempts_is_a_positive_integer(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected an integer from 1 \(`attempts`\)"):
        Retry(attempts=value)


@pytest.mark.parametrize("value", [0, -1, 1.5, float("nan"), True, "6", 10**10], ids=repr)
def test_budget_is_an_integer_in_its_range(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected an integer from 1 to \d+ \(`budget`\)"):
        Retry(budget=value)


@pytest.mark.parametrize("value", [0, 2, 0.5, np.float32(0.5), np.int64(3), 1e9], ids=repr)
def test_every_kind_of_number_is_a_time(value: Any) -> None:
    assert require_seconds(value, "timeout_s") == float(value)
    assert Deadline(value, now_ns=lambda: 0).ends_within(float(value))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), "3", 1e10], ids=repr)
def test_timeout_that_is_no_finite_number_is_a_config_error(value: Any) -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        Deadline(value)


def test_negative_timeout_has_passed() -> None:
    """Callers compute what is left of a deadline of their own."""
    with pytest.raises(DeadlineExceeded):
        Deadline(-0.5).remaining_s()
