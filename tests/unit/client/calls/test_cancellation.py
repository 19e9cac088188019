"""Cancellation: calls and waits of one thread, and of a client that is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from iskander.client.calls.cancellation import Cancellation, OpenCalls, current
from iskander.errors import Cancelled

WITHIN_S = 20.0
FOR_EVER_S = 1000.0


class Call:
    """An open call."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


def test_cancellation_before_the_call_ends_it_at_once() -> None:
    early, call = Cancellation(), Call()
    early.cancel()
    early.enter(call)
    assert call.is_cancelled
    with pytest.raises(Cancelled):
        early.require_none()


def test_cancellation_after_the_context_ends_nothing() -> None:
    call = Call()
    with Cancellation() as late:
        assert current() is late
        late.enter(call)
    late.cancel()
    assert not call.is_cancelled
    assert current() is None


def test_first_reason_of_a_cancellation_counts() -> None:
    late, closed = Cancellation(), Cancellation()
    late.cancel(has_expired=True)
    late.cancel()
    closed.cancel()
    closed.cancel(has_expired=True)
    assert (late.has_expired, closed.has_expired) == (True, False)


def test_close_ends_the_open_calls_and_rejects_later_ones() -> None:
    calls = OpenCalls()
    ended, opened, late = Call(), Call(), Call()
    calls.enter(ended)
    calls.enter(opened)
    calls.leave(ended)
    calls.require_open()
    calls.close()
    assert (ended.is_cancelled, opened.is_cancelled) == (False, True)
    with pytest.raises(Cancelled, match="the client is closed"):
        calls.require_open()
    calls.enter(late)
    assert late.is_cancelled


def test_call_of_a_thread_is_in_its_context_too() -> None:
    calls, call = OpenCalls(), Call()
    with Cancellation() as cancellation:
        calls.enter(call)
        cancellation.cancel()
        assert call.is_cancelled
        with pytest.raises(Cancelled, match="the caller cancelled"):
            calls.require_open()
    calls.require_open()


def test_pause_ends_after_its_time() -> None:
    OpenCalls().pause(0.001)


@pytest.mark.parametrize("is_early", [False, True], ids=["during", "before"])
@pytest.mark.parametrize("by_close", [False, True], ids=["cancelled", "closed"])
def test_pause_ends_with_the_call_or_the_client(by_close: bool, is_early: bool) -> None:
    calls, cancellation = OpenCalls(), Cancellation()
    end: Callable[[], None] = calls.close if by_close else cancellation.cancel
    raised: list[str] = []
    has_begun = threading.Event()

    def pause() -> None:
        with cancellation:
            has_begun.set()
            with pytest.raises(Cancelled) as caught:
                calls.pause(FOR_EVER_S)
            raised.append(caught.value.message)

    thread = threading.Thread(target=pause, daemon=True)
    if is_early:
        end()
    thread.start()
    assert has_begun.wait(WITHIN_S)
    end()
    thread.join(WITHIN_S)
    assert raised == ["the client is closed" if by_close else "the caller cancelled the call"]
    assert not calls._entered
