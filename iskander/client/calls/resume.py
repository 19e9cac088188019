"""Streams that continue on another connection, after a failure or at a preferred gateway.

    caller's batches -> ResumeWindow (batches without a result) -> WindowFeed of one exchange

A new exchange sends the batches of the window again, then new batches. A batch leaves the window
before the caller gets its result, so every result is returned once and in order. If the preferred
gateway is ready again, the current exchange takes no more batches, and after its last result the
next exchange begins at the preferred gateway, so no batch is sent twice.

Runs on: the caller's threads, and the writer thread of each exchange.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from iskander.client.calls.retry import Attempts, Deadline
from iskander.client.calls.trace_context import with_trace
from iskander.errors import ContractError, DeadlineExceeded, IskanderError, ModelMoved
from iskander.foundation import clock

Item: TypeAlias = pa.RecordBatch | tuple[pa.RecordBatch, Mapping[str, Any]]
"""A batch, or a batch and its terms, such as `{"deadline_ms": 20, "priority": 0}`."""

Outcome: TypeAlias = pa.RecordBatch | IskanderError

WINDOW_BATCHES = 256
WINDOW_BYTES = 64 << 20
_ITEM_PARTS = 2
_END = object()


class CallEndedError(Exception):
    """The call accepts no more batches."""


class _LeaseOfExchange(Protocol):
    """The part of a `TargetLease` that a feed uses."""

    rows: int

    @property
    def is_outdated(self) -> bool:
        """Whether the exchange should end, because a better target is ready."""


class _Unanswered(NamedTuple):
    """A batch without a result, and the time when it was taken from the caller."""

    batch: pa.RecordBatch
    terms: Mapping[str, Any] | None
    taken_ns: int


class ResumeWindow:
    """Batches of a stream that have no result yet, in order.

    One thread at a time takes a batch from the caller's iterator. If the iterator blocks while a
    call ends, the next call sends the batches of the window without waiting for the iterator.

    Args:
        items: The caller's batches, of one schema.
        deadline: Deadline of the stream.
        deadline_ms: The term `deadline_ms` of the stream. A batch that is sent again has less time
            left.
        batches_max: Limit of the batches in the window; None: no limit.
        bytes_max: Limit of their bytes, which a single batch may exceed; None: no limit.
        now_ns: Clock.
    """

    def __init__(
        self,
        items: Iterator[Item],
        deadline: Deadline,
        *,
        deadline_ms: float | str | None = None,
        batches_max: int | None = WINDOW_BATCHES,
        bytes_max: int | None = WINDOW_BYTES,
        now_ns: Callable[[], int] = clock.now_ns,
    ) -> None:
        self._items = items
        self._deadline = deadline
        self._deadline_ms = deadline_ms
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self._now_ns = now_ns
        self._changed = threading.Condition()
        self._unanswered: deque[_Unanswered] = deque()
        self._bytes = 0
        self._sent = self._sent_max = 0  # Unanswered batches sent by this call, and by any call.
        self._rows = self._taken = 0
        self._schema: pa.Schema | None = None
        self._is_taking = self._is_exhausted = False
        self._current: WindowFeed | None = None
        self.error: BaseException | None = None
        """Error of the caller's iterator, or of an item that it returned."""

    @property
    def is_complete(self) -> bool:
        """Whether every batch has its result."""
        with self._changed:
            return self._is_exhausted and not self._unanswered

    @property
    def rows(self) -> int:
        """Number of rows in the window, which have no result yet."""
        return self._rows

    def has_caused(self, error: BaseException) -> bool:
        """Whether an error comes from the caller's iterator, and not from the server."""
        # If no batch waits for a result at the deadline, the iterator was late.
        return error is self.error or (isinstance(error, DeadlineExceeded) and not self._rows)

    def restart(self) -> WindowFeed:
        """Return a feed for a new call, which begins at the oldest batch without a result."""
        with self._changed:
            self._sent = 0
            self._current = feed = WindowFeed(self)
            self._changed.notify_all()
        return feed

    def acknowledge(self) -> None:
        """Remove the oldest batch, because its result has arrived."""
        with self._changed:
            answered = self._unanswered.popleft()
            self._bytes -= answered.batch.nbytes
            self._rows -= answered.batch.num_rows
            self._sent -= 1
            self._sent_max -= 1
            self._update_load()
            self._changed.notify_all()

    def end(self, feed: WindowFeed | None = None) -> None:
        """End the waits of a feed, or of all feeds."""
        with self._changed:
            if feed is None or feed is self._current:
                self._current = None
                self._changed.notify_all()

    def next_for(self, feed: WindowFeed) -> tuple[pa.RecordBatch, bytes]:
        """Wait for the next batch of a call; return it with its encoded terms.

        Raises:
            StopIteration: All batches are sent, or the next batches are left to another call.
            CallEndedError: The call of this feed has ended.
            DeadlineExceeded: The stream's deadline has passed.
            BaseException: The error of the caller's iterator.
        """
        while True:
            with self._changed:
                self._wait_for(feed)
                if feed.load is not None and feed.load.is_outdated:
                    raise StopIteration
                if self._sent < len(self._unanswered):
                    is_again = self._sent < self._sent_max
                    unanswered = self._unanswered[self._sent]
                    self._sent += 1
                    self._sent_max = max(self._sent, self._sent_max)
                    break
                if self.error is not None:
                    raise self.error
                if self._is_exhausted:
                    raise StopIteration
                self._is_taking = True
            self._take()
        batch, terms, taken_ns = unanswered
        if is_again:
            waited_ms = (self._now_ns() - taken_ns) / clock.NS_PER_MS
            terms = shorten_deadline(terms, self._deadline_ms, waited_ms)
        return batch, _encode_terms(terms)

    def _wait_for(self, feed: WindowFeed) -> None:
        """Wait until there is a batch to send or to take; the lock is held."""
        while True:
            if feed is not self._current:
                raise CallEndedError
            if self._sent < len(self._unanswered) or self.error or self._is_exhausted:
                return
            if not self._is_taking and self._has_space():
                return
            self._changed.wait(self._deadline.remaining_s())

    def _has_space(self) -> bool:
        if not self._unanswered:
            return True
        if self._batches_max is not None and len(self._unanswered) >= self._batches_max:
            return False
        return self._bytes_max is None or self._bytes < self._bytes_max

    def _take(self) -> None:
        """Take a batch from the caller's iterator, outside the lock."""
        item, error = None, None
        try:
            item = next(self._items, _END)
        except BaseException as raised:  # Raised again on the caller's thread, whatever it is.
            error = raised
        with self._changed:
            self._is_taking = False
            if error is not None:
                self.error = error
            elif item is _END:
                self._is_exhausted = True
            else:
                self._add(item)
            self._changed.notify_all()

    def _add(self, item: Any) -> None:  # noqa: ANN401
        """Add an item, or set the error if the item is invalid; the lock is held."""
        batch, terms = (
            item if isinstance(item, tuple) and len(item) == _ITEM_PARTS else (item, None)
        )
        has_terms = terms is None or isinstance(terms, Mapping)
        if not isinstance(batch, pa.RecordBatch) or not has_terms:
            text = f"item {self._taken} of the stream is {_type_text(item)}"
            self.error = ContractError(
                f"{text}; expected a pyarrow.RecordBatch, or a pair of one and a mapping of terms"
            )
        elif self._schema is not None and not batch.schema.equals(self._schema):
            text = "all batches of a stream have one schema"
            self.error = ContractError(f"{text}; item {self._taken} has another than item 0")
        else:
            self._schema = batch.schema
            self._taken += 1
            terms = with_trace(terms)
            self._unanswered.append(_Unanswered(batch, terms, self._now_ns()))
            self._bytes += batch.nbytes
            self._rows += batch.num_rows
            self._update_load()

    def _update_load(self) -> None:
        if self._current is not None and self._current.load is not None:
            self._current.load.rows = self._rows


class WindowFeed:
    """Iterator over the batches of one call, with their terms as `app_metadata`.

    Attributes:
        load: Lease of the exchange: receives the number of rows without a result, and can end the
            feed.
    """

    def __init__(self, window: ResumeWindow) -> None:
        self._window = window
        self.load: _LeaseOfExchange | None = None

    def __iter__(self) -> WindowFeed:
        return self

    def __next__(self) -> tuple[pa.RecordBatch, bytes]:
        return self._window.next_for(self)

    def end(self) -> None:
        """End the wait for a batch, after the end of the call."""
        self._window.end(self)


def resume_until_complete(
    connect: Callable[[WindowFeed], Iterator[Outcome]], window: ResumeWindow, attempts: Attempts
) -> Iterator[Any]:
    """Yield the outcome of each batch, in order, over as many exchanges as needed.

    Args:
        connect: Opens an exchange that sends a feed, and yields an outcome for each batch. An
            outcome can be the error of a batch.
        window: The batches.
        attempts: Decides whether a failure is retried; every outcome counts as a success.

    Raises:
        ModelMoved: The result schema of a later exchange differs from that of the earlier results.
        BaseException: The failure of the last exchange, or the error of the caller's iterator.
    """
    schema: pa.Schema | None = None
    try:
        while True:
            outcomes = connect(window.restart())
            is_checked = False
            try:
                while (outcome := _next_outcome(outcomes, window, schema, attempts)) is not None:
                    if outcome is _END:
                        if window.is_complete:
                            return
                        break
                    if not is_checked and not isinstance(outcome, IskanderError):
                        schema = _require_same(schema, outcome.schema)
                        is_checked = True
                    window.acknowledge()
                    attempts.succeed()
                    yield outcome
            finally:
                outcomes.close()  # type: ignore[attr-defined]
    finally:
        window.end()


def _next_outcome(
    outcomes: Iterator[Outcome], window: ResumeWindow, schema: pa.Schema | None, attempts: Attempts
) -> Any:  # noqa: ANN401
    """Return the next outcome, _END after the last one, or None after the wait for a retry."""
    try:
        return next(outcomes, _END)
    except IskanderError as error:
        if window.is_complete:
            return _END  # Only the end of the call failed.
        is_moved = isinstance(error, ModelMoved) and schema is not None
        if error is window.error or is_moved:
            raise
        attempts.wait_after(error)
        return None


def _require_same(earlier: pa.Schema | None, schema: pa.Schema) -> pa.Schema:
    if earlier is not None and not schema.equals(earlier):
        raise ModelMoved(
            "the result schema changed while the stream was resumed: open another stream",
            retry_after_ms=0,
        )
    return schema


def shorten_deadline(
    terms: Mapping[str, Any] | None, deadline_ms: float | str | None, waited_ms: float
) -> Mapping[str, Any] | None:
    """Return the terms of a batch that is sent again, with the time that is left to its deadline.

    Args:
        terms: Terms of the batch.
        deadline_ms: The term `deadline_ms` of the stream; a text if it is from a header.
        waited_ms: Time since the caller's iterator returned the batch.
    """
    own_ms = None if terms is None else terms.get("deadline_ms")
    limit_ms = deadline_ms if own_ms is None else own_ms
    if limit_ms is None:
        return terms
    try:
        left_ms = max(float(limit_ms) - waited_ms, 0.0)
    except (TypeError, ValueError):  # The server rejects it.
        return terms
    return {**(terms or {}), "deadline_ms": left_ms}


def _encode_terms(terms: Mapping[str, Any] | None) -> bytes:
    """Encode the terms of a batch as `app_metadata`; leave out terms that are None."""
    if terms is None:
        return b""
    given = {name: value for name, value in terms.items() if value is not None}
    return json.dumps({"iskander": given}).encode()


def _type_text(item: Any) -> str:  # noqa: ANN401
    """Return the name of an item's type; for a tuple, with the types of its entries."""
    if isinstance(item, tuple):
        return f"a tuple of {', '.join(map(_type_text, item)) or 'nothing'}"
    module, name = type(item).__module__, type(item).__qualname__
    return name if module == "builtins" else f"{module}.{name}"
