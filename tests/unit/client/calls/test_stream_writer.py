"""Writer thread of a stream: errors of the feed end the call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from iskander.client.calls.resume import ResumeWindow
from iskander.client.calls.retry import Deadline
from iskander.client.calls.stream_writer import StreamWriter
from iskander.errors import ProtocolError

JOIN_S = 10.0


class Call:
    """Both sides of a call."""

    def __init__(self) -> None:
        self.written: list[pa.RecordBatch] = []
        self.is_cancelled = False

    def begin(self, schema: pa.Schema) -> None:
        pass

    def write_batch(self, batch: pa.RecordBatch) -> None:
        self.written.append(batch)

    def cancel(self) -> None:
        self.is_cancelled = True


def test_more_results_than_batches_are_a_protocol_error() -> None:
    call = Call()
    window = ResumeWindow(iter([pa.record_batch({"x": [1]})]), Deadline(None))
    rest = window.restart()
    writer = StreamWriter(call, call, next(rest), rest, None)
    writer.start()
    writer.join(JOIN_S)
    writer.free_oldest()
    with pytest.raises(ProtocolError, match="more results"):
        writer.free_oldest()


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError()],
    ids=repr,
)
def test_error_of_the_feed_cancels_the_call_and_is_kept(error: BaseException) -> None:
    """Else the reader of the results waits for ever."""
    batches = [pa.record_batch({"x": [number]}) for number in range(3)]

    def feed() -> Iterator[Any]:
        yield from batches
        raise error

    call = Call()
    window = ResumeWindow(feed(), Deadline(None))
    rest = window.restart()
    writer = StreamWriter(call, call, next(rest), rest, None)
    writer.start()
    writer.join(JOIN_S)
    assert writer.error is error
    assert call.is_cancelled
    assert call.written == batches
