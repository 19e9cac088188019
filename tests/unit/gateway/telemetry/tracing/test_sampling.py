"""Which requests are traced, and the limit of spans."""

from __future__ import annotations

import pytest

from iskander.errors import (
    Cancelled,
    ContractError,
    DeadlineUnreachable,
    ExecutionFailed,
    IskanderError,
    NotReady,
    QueueFull,
)
from iskander.foundation.clock import NS_PER_MS, NS_PER_S
from iskander.gateway.telemetry.tracing.sampling import Reason, SpanLimit, is_failure, trace_reason

SLOW_NS = 100 * NS_PER_MS


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, False),
        (ContractError("x"), False),
        (Cancelled("x"), False),
        (QueueFull("x"), True),
        (DeadlineUnreachable("x"), True),
        (ExecutionFailed("x"), True),
        (NotReady("x"), True),
        (IskanderError("x"), True),
    ],
)
def test_failures_are_errors_that_the_caller_did_not_cause(
    error: IskanderError | None, expected: bool
) -> None:
    assert is_failure(error) is expected


@pytest.mark.parametrize(
    ("error", "duration_ns", "slow_ns", "is_head_sampled", "expected"),
    [
        (None, 1, 0, False, Reason.NONE),
        (None, 1, 0, True, Reason.HEAD),
        (ContractError("x"), 1, 0, False, Reason.NONE),
        (ContractError("x"), 1, 0, True, Reason.HEAD),
        (QueueFull("x"), 1, 0, False, Reason.ERROR),
        (QueueFull("x"), 1, 0, True, Reason.HEAD),
        (None, SLOW_NS, SLOW_NS, False, Reason.NONE),
        (None, SLOW_NS + 1, SLOW_NS, False, Reason.SLOW),
        (None, SLOW_NS + 1, 0, False, Reason.NONE),
        (ContractError("x"), SLOW_NS + 1, SLOW_NS, False, Reason.SLOW),
    ],
)
def test_reason(
    error: IskanderError | None,
    duration_ns: int,
    slow_ns: int,
    is_head_sampled: bool,
    expected: Reason,
) -> None:
    reason = trace_reason(error, duration_ns, slow_ns, is_head_sampled)
    assert reason is expected


def test_limit_holds_the_spans_of_one_second_and_refills() -> None:
    limit = SpanLimit(100, 0)
    assert [limit.take(40, 0, is_head_sampled=False) for _ in range(3)] == [True, True, False]
    assert limit.take(40, NS_PER_S // 5, is_head_sampled=False)
    assert not limit.take(1, NS_PER_S // 5, is_head_sampled=False)
    assert limit.take(100, 100 * NS_PER_S, is_head_sampled=False)
    assert not limit.take(1, 100 * NS_PER_S, is_head_sampled=False)


def test_head_sampled_requests_leave_a_fourth_to_failures() -> None:
    limit = SpanLimit(100, 0)
    assert limit.take(75, 0, is_head_sampled=True)
    assert not limit.take(1, 0, is_head_sampled=True)
    assert limit.take(25, 0, is_head_sampled=False)
