"""Who runs again after a failure or a loss, who runs alone, and who gets the error."""

from __future__ import annotations

import pytest
from support.lanes import lane_of, request_of

from iskander.errors import Cancelled, ContractError, ExecutionFailed, IskanderError, LimitExceeded
from iskander.scheduling.request import Request
from iskander.scheduling.retry import KILLS_MAX, LOSSES_MAX, after_failure, after_loss


@pytest.fixture
def request_() -> Request:
    return request_of(lane_of())


@pytest.mark.parametrize(
    "error", [ExecutionFailed("no"), ContractError("no"), LimitExceeded("no"), IskanderError("no")]
)
def test_what_failed_together_runs_again_alone(request_: Request, error: IskanderError) -> None:
    """Whatever it was: the rows of one may be to blame, and its words are not for the others."""
    assert after_failure(request_, error, is_shared=True) is None
    assert request_.is_alone


def test_what_failed_alone_gets_the_error(request_: Request) -> None:
    error = ExecutionFailed("no")

    assert after_failure(request_, error, is_shared=False) is error
    assert not request_.is_alone


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_batch_that_nobody_waits_for_is_not_tried_again(
    request_: Request, is_shared: bool
) -> None:
    error = Cancelled("no")
    assert after_failure(request_, error, is_shared=is_shared) is error
    assert not request_.is_alone


def test_what_was_not_running_is_not_blamed(request_: Request) -> None:
    """However many workers die with its batch waiting behind another."""
    for _ in range(3 * KILLS_MAX):
        assert after_loss(request_, was_running=False) is None

    assert (request_.kills, request_.is_alone) == (0, False)


def test_what_was_running_runs_alone_and_then_not_again(request_: Request) -> None:
    for kills in range(1, KILLS_MAX):
        assert after_loss(request_, was_running=True) is None
        assert (request_.kills, request_.is_alone) == (kills, True)

    error = after_loss(request_, was_running=True)

    assert error is not None
    assert (error.code, error.retryable, error.fields) == ("poisoned", False, {"model": "m0"})
    assert f"{KILLS_MAX} workers died" in error.message and "`m0/1`" in error.message


def test_a_loss_between_two_kills_changes_nothing(request_: Request) -> None:
    after_loss(request_, was_running=True)
    assert after_loss(request_, was_running=False) is None

    assert after_loss(request_, was_running=True) is not None


def test_what_is_lost_again_and_again_is_given_up_though_nothing_blames_it(
    request_: Request,
) -> None:
    """A worker may die before its beat says what it runs."""
    for _ in range(LOSSES_MAX - 1):
        assert after_loss(request_, was_running=False) is None

    error = after_loss(request_, was_running=False)

    assert error is not None and error.code == "poisoned"
    assert f"{LOSSES_MAX} workers died while they held this request" in error.message
