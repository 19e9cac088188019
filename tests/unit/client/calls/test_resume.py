"""Resumed streams: order, the window, failures of the feed, terms, and changed contracts."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import flight

from iskander.client.calls.resume import (
    CallEndedError,
    Item,
    Outcome,
    ResumeWindow,
    WindowFeed,
    resume_until_complete,
    shorten_deadline,
)
from iskander.client.calls.retry import OFF, Attempts, Deadline, Retry, RetryBudget
from iskander.errors import (
    ConnectionFailed,
    ContractError,
    DeadlineExceeded,
    DeadlineUnreachable,
    Draining,
    ModelMoved,
    QueueFull,
)
from iskander.foundation.clock import NS_PER_MS

JOIN_S = 10.0
AT_ONCE = Retry(first_wait_s=0.0, jitter_s=0.0)
BROKEN = ConnectionFailed("connection reset")
RAW = flight.FlightUnavailableError("connection reset")


def batch(number: int) -> pa.RecordBatch:
    return pa.record_batch({"x": [number]})


def numbers(results: Iterable[Any]) -> list[int]:
    return [result["y"][0].as_py() for result in results]


class Script:
    """Exchanges that send up to `window` batches ahead, answer `counts[n]`, then fail.

    The exchanges after the last of `failures` answer all batches.
    """

    def __init__(
        self, failures: list[tuple[int, Exception]] | None = None, *, ahead: int = 3
    ) -> None:
        self._failures = failures or []
        self._ahead = ahead
        self.sent: list[list[int]] = []
        self.metadata: list[list[bytes]] = []
        self.closed = 0
        self.make: Callable[[int, int], Outcome] = lambda _, number: pa.record_batch(
            {"y": [number]}
        )

    def connect(self, feed: WindowFeed) -> Iterator[Outcome]:
        call = len(self.sent)
        self.sent.append([])
        self.metadata.append([])
        count, error = self._failures[call] if call < len(self._failures) else (None, None)
        answered = 0
        unanswered: list[int] = []
        has_more = True
        try:
            while True:
                while has_more and len(unanswered) < self._ahead:
                    item = next(feed, None)
                    if item is None:
                        has_more = False
                        break
                    number = item[0]["x"][0].as_py()
                    unanswered.append(number)
                    self.sent[call].append(number)
                    self.metadata[call].append(item[1])
                if answered == count:
                    assert error is not None
                    raise error
                if not unanswered:
                    return
                yield self.make(call, unanswered.pop(0))
                answered += 1
        finally:
            self.closed += 1
            feed.end()


def window_of(items: Iterable[Item], **options: Any) -> ResumeWindow:
    return ResumeWindow(iter(items), Deadline(None), **options)


def run(
    script: Script,
    items: Iterable[Item],
    *,
    retry: Retry = AT_ONCE,
    **options: Any,
) -> Iterator[Any]:
    attempts = Attempts(retry, RetryBudget(), Deadline(None))
    return resume_until_complete(script.connect, window_of(items, **options), attempts)


# ---- Order


@given(
    count=st.integers(0, 30),
    failures=st.lists(st.integers(0, 6), max_size=6),
    ahead=st.integers(1, 5),
)
def test_every_batch_is_answered_once_and_in_order(
    count: int, failures: list[int], ahead: int
) -> None:
    script = Script([(answered, BROKEN) for answered in failures], ahead=ahead)
    retry = Retry(attempts=10, first_wait_s=0.0, jitter_s=0.0)
    assert numbers(run(script, map(batch, range(count)), retry=retry)) == list(range(count))
    assert script.closed == len(script.sent)


def test_only_unanswered_batches_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script([(2, BROKEN), (1, Draining("stopping"))])
    assert numbers(run(script, map(batch, range(8)))) == list(range(8))
    assert script.sent == [[0, 1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6, 7]]


def test_failure_of_the_first_exchange_sends_the_first_batches_again() -> None:
    script = Script([(0, BROKEN), (0, BROKEN)])
    assert numbers(run(script, map(batch, range(4)))) == [0, 1, 2, 3]
    assert [sent[0] for sent in script.sent] == [0, 0, 0]


def test_failure_after_the_last_result_is_ignored() -> None:
    """The feed is exhausted, so nothing is missing."""
    script = Script([(2, BROKEN)])
    assert numbers(run(script, map(batch, range(2)))) == [0, 1]
    assert len(script.sent) == 1


def test_empty_feed_yields_nothing() -> None:
    assert list(run(Script(), [])) == []


# ---- Failures


def test_permanent_failure_is_raised_with_the_number_of_attempts() -> None:
    error = QueueFull("queue full")
    script = Script([(0, error)] * 50)
    with pytest.raises(QueueFull) as caught:
        list(run(script, map(batch, range(3))))
    assert caught.value is error
    assert error.__notes__ == ["failed after 6 attempts: limit 6 (`attempts`)"]
    assert len(script.sent) == 6


def test_results_between_failures_reset_the_attempts() -> None:
    script = Script([(1, BROKEN)] * 20)
    assert numbers(run(script, map(batch, range(30)))) == list(range(30))
    assert len(script.sent) == 21


@pytest.mark.parametrize(
    "error",
    [ContractError("x"), DeadlineExceeded("x"), DeadlineUnreachable("x"), ValueError("x")],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_end_the_stream_after_the_earlier_results(error: Exception) -> None:
    script, results = Script([(1, error)]), []
    with pytest.raises(type(error)):
        results.extend(run(script, map(batch, range(3))))
    assert len(script.sent) == 1


def test_disabled_retries_raise_the_first_failure() -> None:
    script, results = Script([(1, BROKEN)]), []
    with pytest.raises(ConnectionFailed):
        for result in run(script, map(batch, range(3)), retry=OFF):
            results.append(result)
    assert numbers(results) == [0]
    assert len(script.sent) == 1


def test_in_band_errors_are_outcomes_and_not_sent_again() -> None:
    script = Script([(2, BROKEN)])
    full = QueueFull("queue full")
    script.make = lambda _, number: full if number % 2 else pa.record_batch({"y": [number]})
    outcomes = list(run(script, map(batch, range(5))))
    assert outcomes[1] is outcomes[3] is full
    assert numbers(outcomes[::2]) == [0, 2, 4]
    assert script.sent[1] == [2, 3, 4]


@pytest.mark.parametrize(
    "error", [ValueError("bad row"), RAW, QueueFull("x")], ids=["value", "flight", "retryable"]
)
def test_error_of_the_feed_is_raised_and_not_retried(error: Exception) -> None:
    """A feed that reads from another server may raise the errors of a broken connection."""

    def feed() -> Iterator[pa.RecordBatch]:
        yield batch(0)
        raise error

    script = Script()
    with pytest.raises(type(error)) as caught:
        list(run(script, feed()))
    assert caught.value is error
    assert len(script.sent) == 1


def test_error_of_the_feed_during_a_failure_is_raised_by_the_next_exchange() -> None:
    """Batches before it are sent again first."""
    error = ValueError("bad row")

    def feed() -> Iterator[pa.RecordBatch]:
        yield from map(batch, range(3))
        raise error

    script, results = Script([(1, BROKEN)], ahead=2), []
    with pytest.raises(ValueError, match="bad row"):
        for result in run(script, feed()):
            results.append(result)
    assert numbers(results)[:2] == [0, 1]


def test_batch_with_another_schema_is_a_contract_error() -> None:
    script = Script()
    with pytest.raises(ContractError, match="one schema"):
        list(run(script, [batch(0), pa.record_batch({"x": ["text"]})]))


# ---- Items


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        (None, "NoneType"),
        (pa.table({"x": [1]}), "pyarrow.lib.Table"),
        ({"x": [1]}, "dict"),
        ((batch(1), {}, 3), "a tuple of pyarrow.lib.RecordBatch, dict, int"),
        ((batch(1),), "a tuple of pyarrow.lib.RecordBatch"),
        ((batch(1), 5), "a tuple of pyarrow.lib.RecordBatch, int"),
        ((None, {}), "a tuple of NoneType, dict"),
        ((), "a tuple of nothing"),
    ],
    ids=str,
)
def test_item_that_is_no_batch_is_a_contract_error(item: Any, kind: str) -> None:
    """It is no end of the stream: the batches after it would be missing without an error."""
    got = []
    expected = f"item 2 of the stream is {kind}; expected a pyarrow.RecordBatch, or a pair"
    with pytest.raises(ContractError) as caught:
        for result in run(Script(ahead=1), [batch(0), batch(1), item, batch(3)]):
            got.append(result)
    assert caught.value.message.startswith(expected)
    assert numbers(got) == [0, 1]


def test_batch_in_place_of_a_list_of_batches_is_a_contract_error() -> None:
    with pytest.raises(ContractError, match=r"item 0 of the stream is pyarrow\.lib\.Int64Array"):
        list(run(Script(), batch(0)))  # type: ignore[arg-type]


def test_terms_that_are_none_are_not_sent() -> None:
    script = Script()
    list(run(script, [(batch(0), {"deadline_ms": None, "priority": 0})]))
    assert script.metadata == [[b'{"iskander": {"priority": 0}}']]


@pytest.mark.parametrize(
    "error", [SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr
)
def test_error_that_is_no_exception_is_raised_in_each_exchange(error: BaseException) -> None:
    """The iterator runs on a thread of an exchange, which must not die with it."""

    def feed() -> Iterator[pa.RecordBatch]:
        yield batch(0)
        raise error

    window = window_of(feed())
    for _ in range(2):
        exchange = window.restart()
        assert next(exchange)[0].equals(batch(0))
        with pytest.raises(type(error)) as caught:
            next(exchange)
        assert caught.value is error
    assert window.has_caused(error)


def test_deadline_is_of_the_caller_if_every_batch_has_its_result() -> None:
    window = window_of(map(batch, range(2)))
    feed = window.restart()
    next(feed)
    late = DeadlineExceeded("x")
    assert not window.has_caused(late)
    window.acknowledge()
    assert window.has_caused(late)
    assert not window.has_caused(BROKEN)


def test_early_end_by_the_caller_ends_the_feed() -> None:
    feeds = []
    window = window_of(map(batch, range(100)))

    def connect(feed: WindowFeed) -> Iterator[Outcome]:
        feeds.append(feed)
        yield pa.record_batch({"y": [next(feed)[0]["x"][0].as_py()]})

    results = resume_until_complete(
        connect, window, Attempts(AT_ONCE, RetryBudget(), Deadline(None))
    )
    assert numbers([next(results)]) == [0]
    results.close()  # type: ignore[attr-defined]
    with pytest.raises(CallEndedError):
        next(feeds[0])


def test_early_end_by_the_caller_closes_the_exchange() -> None:
    script = Script()
    results = run(script, map(batch, range(100)))
    assert numbers([next(results)]) == [0]
    results.close()  # type: ignore[attr-defined]
    assert script.closed == 1


def test_end_of_the_stream_ends_the_feeds_of_all_exchanges() -> None:
    window = window_of(map(batch, range(100)))
    feed = window.restart()
    window.end()
    with pytest.raises(CallEndedError):
        next(feed)


# ---- Contracts


def test_changed_result_schema_is_model_moved_and_nothing_is_mixed() -> None:
    script, results = Script([(2, BROKEN)]), []
    script.make = lambda call, number: pa.record_batch({"y": [number] if not call else ["text"]})
    with pytest.raises(ModelMoved, match="result schema changed"):
        for result in run(script, map(batch, range(5))):
            results.append(result)
    assert numbers(results) == [0, 1]
    assert len(script.sent) == 2


def test_changed_result_schema_before_the_first_result_is_accepted() -> None:
    script = Script([(0, ModelMoved("replaced"))])
    assert numbers(run(script, map(batch, range(3)))) == [0, 1, 2]


def test_moved_model_after_results_is_raised() -> None:
    script = Script([(1, ModelMoved("replaced"))])
    with pytest.raises(ModelMoved, match="replaced"):
        list(run(script, map(batch, range(3))))
    assert len(script.sent) == 1


# ---- Terms


def test_terms_belong_to_their_batches_in_each_exchange() -> None:
    script = Script([(1, BROKEN)])
    items: list[Item] = [(batch(0), {"priority": 0}), batch(1), (batch(2), {"priority": 2})]
    list(run(script, items))
    first, second = script.metadata
    assert first == [b'{"iskander": {"priority": 0}}', b"", b'{"iskander": {"priority": 2}}']
    assert second == first[1:]


def test_deadline_of_a_batch_does_not_start_again() -> None:
    times = {"ns": 0}
    window = window_of(
        [(batch(0), {"deadline_ms": 50, "priority": 0}), batch(1), batch(2)],
        deadline_ms=20.0,
        now_ns=lambda: times["ns"],
    )
    feed = window.restart()
    assert [metadata for _, metadata in (next(feed), next(feed))] == [
        b'{"iskander": {"deadline_ms": 50, "priority": 0}}', b"",
    ]  # fmt: skip
    times["ns"] = 30 * NS_PER_MS
    feed = window.restart()
    again = [json.loads(metadata)["iskander"] for _, metadata in (next(feed), next(feed))]
    assert again == [{"deadline_ms": 20.0, "priority": 0}, {"deadline_ms": 0.0}]
    assert next(feed)[1] == b""  # Sent for the first time: the stream's own terms apply.


def test_deadline_starts_with_the_first_sending_after_earlier_results() -> None:
    times = {"ns": 0}
    window = window_of(map(batch, range(4)), deadline_ms=20.0, now_ns=lambda: times["ns"])
    feed = window.restart()
    next(feed), next(feed)
    window.acknowledge()
    window.acknowledge()
    feed = window.restart()
    assert [metadata for _, metadata in (next(feed), next(feed))] == [b"", b""]


def test_terms_without_a_deadline_stay_as_they_are() -> None:
    assert shorten_deadline(None, None, 5.0) is None
    terms = {"ttl_ms": 10}
    assert shorten_deadline(terms, None, 5.0) is terms
    assert shorten_deadline(None, 8, 5.0) == {"deadline_ms": 3.0}


def test_deadline_as_text_is_shortened_and_other_text_is_left_to_the_server() -> None:
    assert shorten_deadline({"deadline_ms": "500"}, None, 5.0) == {"deadline_ms": 495.0}
    assert shorten_deadline(None, "8", 5.0) == {"deadline_ms": 3.0}
    assert shorten_deadline(None, "soon", 5.0) is None


# ---- The window


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"batches_max": 2}, 2),
        ({"bytes_max": 20}, 3),
        ({"bytes_max": 1}, 1),
        ({"batches_max": None, "bytes_max": None}, 10),
    ],
    ids=["batches", "bytes", "one-above-the-limit", "no-limit"],
)
def test_window_limits_the_batches_without_a_result(options: dict[str, Any], expected: int) -> None:
    taken: list[int] = []

    def feed() -> Iterator[pa.RecordBatch]:
        for number in range(10):
            taken.append(number)
            yield batch(number)

    window = window_of(feed(), **options)
    current = window.restart()
    for _ in range(expected):
        next(current)
    assert len(taken) == expected
    if expected < 10:
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append(next(current)))
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        assert len(taken) == expected
        window.acknowledge()
        thread.join(JOIN_S)
        assert got[0][0].equals(batch(expected))


def test_window_reports_its_rows_to_the_current_exchange() -> None:
    class Load:
        rows, is_outdated = -1, False

    window, load = window_of(map(batch, range(3))), Load()
    feed = window.restart()
    feed.load = load
    next(feed), next(feed)
    assert load.rows == window.rows == 2
    window.acknowledge()
    assert load.rows == 1


class Outdated:
    """Use of a target that is outdated after a number of checks."""

    def __init__(self, checks: int) -> None:
        self.rows, self._checks = 0, checks

    @property
    def is_outdated(self) -> bool:
        self._checks -= 1
        return self._checks < 0


@pytest.mark.parametrize("retry", [AT_ONCE, OFF], ids=["retried", "not retried"])
@pytest.mark.parametrize("checks", [0, 2, 8])
def test_stream_moves_to_a_better_target_without_sending_a_batch_twice(
    checks: int, retry: Retry
) -> None:
    script, window = Script(), window_of(map(batch, range(10)))
    uses: list[Outdated] = []

    def connect(feed: WindowFeed) -> Iterator[Outcome]:
        uses.append(Outdated(100 if uses else checks))
        feed.load = uses[-1]
        yield from script.connect(feed)

    attempts = Attempts(retry, RetryBudget(), Deadline(None))
    assert numbers(resume_until_complete(connect, window, attempts)) == list(range(10))
    first, rest = script.sent
    assert first + rest == list(range(10))
    assert len(first) == checks // 2  # It is asked before and after it takes a batch.


def test_batches_are_sent_again_while_the_feed_blocks() -> None:
    """The thread of the ended exchange is still in the caller's iterator."""
    is_in_feed, go_on = threading.Event(), threading.Event()

    def feed() -> Iterator[pa.RecordBatch]:
        yield batch(0)
        is_in_feed.set()
        assert go_on.wait(JOIN_S)
        yield batch(1)

    window = window_of(feed())
    old = window.restart()
    next(old)
    ended: list[type] = []

    def write() -> None:
        try:
            next(old)
        except CallEndedError:
            ended.append(CallEndedError)

    thread = threading.Thread(target=write)
    thread.start()
    assert is_in_feed.wait(JOIN_S)
    old.end()
    new = window.restart()
    assert next(new)[0].equals(batch(0))
    go_on.set()
    assert next(new)[0].equals(batch(1))
    thread.join(JOIN_S)
    assert ended == [CallEndedError]
    assert next(new, None) is None


def test_end_of_an_exchange_ends_its_wait_for_space() -> None:
    window = window_of(map(batch, range(3)), batches_max=1)
    feed = window.restart()
    next(feed)
    ended = threading.Event()

    def write() -> None:
        with pytest.raises(CallEndedError):
            next(feed)
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    feed.end()
    thread.join(JOIN_S)
    assert ended.is_set()


def test_end_of_an_old_exchange_leaves_the_current_one() -> None:
    window = window_of(map(batch, range(3)))
    old = window.restart()
    new = window.restart()
    old.end()
    assert next(new)[0].equals(batch(0))
    with pytest.raises(CallEndedError):
        next(old)


def test_wait_of_the_window_ends_at_the_deadline() -> None:
    clock = iter([0, 0, 10**12, 10**12])
    deadline = Deadline(1.0, now_ns=lambda: next(clock))
    window = ResumeWindow(map(batch, range(3)), deadline, batches_max=1)
    feed = window.restart()
    next(feed)
    with pytest.raises(DeadlineExceeded):
        window._changed.wait = lambda _: None  # type: ignore[method-assign]
        next(feed)


def test_each_result_of_a_stream_is_a_success_and_its_end_is_none() -> None:
    budget = RetryBudget(4)
    budget.fail()
    attempts = Attempts(AT_ONCE, budget, Deadline(None))
    list(resume_until_complete(Script().connect, window_of(map(batch, range(9))), attempts))
    assert budget._tokens == pytest.approx(3.9)


def test_long_stream_outlives_more_failures_than_the_budget_has_tokens() -> None:
    attempts = Attempts(AT_ONCE, RetryBudget(4), Deadline(None))
    script = Script([(11, BROKEN)] * 20)
    results = resume_until_complete(script.connect, window_of(map(batch, range(230))), attempts)
    assert numbers(results) == list(range(230))
    assert len(script.sent) == 21
