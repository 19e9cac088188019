"""Retry policy for failed and lost batches: retry, retry alone, or error."""

from __future__ import annotations

import pytest
from support.lanes import lane_of, request_of

from iskander.errors import (
    ContractError,
    ExecutionFailed,
    IskanderError,
    LimitExceeded,
    RemoteAnswerInvalid,
    RemoteFailed,
    RemoteLoop,
    RemoteRejected,
)
from iskander.gateway.scheduling.request import Request
from iskander.gateway.scheduling.retry import (
    KILLS_MAX,
    LOSSES_MAX,
    ROW_INDEPENDENT,
    after_failure,
    after_loss,
)


@pytest.fixture
def request_() -> Request:
    return request_of(lane_of())


@pytest.mark.parametrize(
    "kind",
    [
        ExecutionFailed,
        ContractError,
        LimitExceeded,
        IskanderError,
        RemoteAnswerInvalid,
        RemoteFailed,
        RemoteRejected,
    ],
)
def test_request_of_a_failed_shared_batch_is_retried_alone(
    request_: Request, kind: type[IskanderError]
) -> None:
    """Another request may be the cause, and the text of its error is private to it."""
    assert after_failure(request_, kind("no"), is_shared=True) is None
    assert request_.is_alone


def test_request_that_failed_alone_gets_the_error(request_: Request) -> None:
    error = ExecutionFailed("no")

    assert after_failure(request_, error, is_shared=False) is error
    assert not request_.is_alone


@pytest.mark.parametrize("kind", ROW_INDEPENDENT)
@pytest.mark.parametrize("is_shared", [True, False])
def test_error_that_no_rows_cause_is_not_retried(
    request_: Request, kind: type[IskanderError], is_shared: bool
) -> None:
    """Such as of a remote server that cannot be reached: one call for each request fails, too."""
    error = kind("no")
    assert after_failure(request_, error, is_shared=is_shared) is error
    assert not request_.is_alone


@pytest.mark.parametrize("hops", [0, 4])
def test_loop_fails_only_requests_with_the_hops_of_the_batch(hops: int) -> None:
    request = request_of(lane_of(), hops=hops)
    error = RemoteLoop("no")

    failure = after_failure(request, error, is_shared=True, hops=4)

    assert failure is (error if hops == 4 else None)
    assert request.is_alone == (hops < 4)


def test_request_that_was_not_running_is_not_blamed(request_: Request) -> None:
    """Regardless of how many workers die while its batch waits behind another."""
    for _ in range(3 * KILLS_MAX):
        assert after_loss(request_, was_running=False) is None

    assert (request_.kills, request_.is_alone) == (0, False)


def test_running_request_is_retried_alone_and_then_poisoned(request_: Request) -> None:
    for kills in range(1, KILLS_MAX):
        assert after_loss(request_, was_running=True) is None
        assert (request_.kills, request_.is_alone) == (kills, True)

    error = after_loss(request_, was_running=True)

    assert error is not None
    assert (error.code, error.retryable, error.fields) == ("poisoned", False, {"model": "m0"})
    assert f"{KILLS_MAX} workers died" in error.message and "`m0/1`" in error.message


def test_loss_between_two_kills_does_not_reset_the_count(request_: Request) -> None:
    after_loss(request_, was_running=True)
    assert after_loss(request_, was_running=False) is None

    assert after_loss(request_, was_running=True) is not None


def test_repeatedly_lost_request_is_poisoned_without_blame(
    request_: Request,
) -> None:
    """A worker may die before its heartbeat names the batch."""
    for _ in range(LOSSES_MAX - 1):
        assert after_loss(request_, was_running=False) is None

    error = after_loss(request_, was_running=False)

    assert error is not None and error.code == "poisoned"
    assert f"{LOSSES_MAX} workers died while they held this request" in error.message
