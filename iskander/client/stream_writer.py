"""Writes a stream's batches while its results are read.

Runs on: a thread of its own; results are counted on the caller's.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyarrow import flight

from iskander.client.shared_memory import Region
from iskander.errors import ContractError

FEEDER_STOP_S = 1.0
FLIGHT_ERRORS = (flight.FlightError, pa.ArrowException, OSError)


class StreamWriter(threading.Thread):
    """Writes a stream's batches while its results are read.

    It never says that writing is done: where a call fails, the reading thread closes the writing
    side too, and gRPC ends the process of whoever closes it twice. The reading thread says so
    after the last result. Where the results were there before the feed had ended, there is nobody
    to say it, and the call is cancelled, which costs nothing any more.
    """

    def __init__(
        self,
        writer: Any,  # noqa: ANN401
        reader: Any,  # noqa: ANN401
        first: tuple[pa.RecordBatch, bytes],
        rest: Iterator[tuple[pa.RecordBatch, bytes]],
        region: Region | None,
    ) -> None:
        super().__init__(name="iskander-feeder", daemon=True)
        self._writer = writer
        self._reader = reader
        self._feed = itertools.chain([first], rest)
        self._schema = first[0].schema
        self._region = region
        self._is_shared: deque[bool] = deque()
        self._lock = threading.Lock()
        self._sent = 0
        self._received = 0
        self._is_exhausted = False
        self.error: Exception | None = None
        self.has_ended_call = False

    def run(self) -> None:
        """Write until the feed or the call ends."""
        try:
            self._begin()
            for batch, metadata in self._feed:
                self._write(batch, metadata)
        except _CallEndedError:
            return  # The reader is told why.
        except Exception as error:
            self.error = error
        with self._lock:
            self._is_exhausted = True
            self.has_ended_call = self.error is not None or self._received == self._sent
        if self.has_ended_call:
            self._reader.cancel()

    def _begin(self) -> None:
        with _call_may_end():
            self._writer.begin(self._schema)

    def _write(self, batch: pa.RecordBatch, metadata: bytes) -> None:
        if not batch.schema.equals(self._schema):
            raise ContractError("a stream's batches have one schema, and this one has another")
        located = None if self._region is None else self._region.put(batch, metadata)
        self._is_shared.append(located is not None)
        self._sent += 1
        with _call_may_end():
            if located is not None:
                self._writer.write_metadata(located)
            elif metadata:
                self._writer.write_with_metadata(batch, metadata)
            else:
                self._writer.write_batch(batch)

    def on_result(self) -> None:
        """A result is there: what its batch had of the region, if anything, is free."""
        if self._is_shared.popleft():
            assert self._region is not None
            self._region.free()

    def is_last_result(self) -> bool:
        """Count a result; whether it was the last one that will come."""
        with self._lock:
            self._received += 1
            return self._is_exhausted and self._received == self._sent

    def finish(self) -> None:
        """Wait for the thread, and take the call's error once more.

        Where nobody asks for it, Arrow prints it to stderr. A feed that blocks keeps its thread
        until it yields; that thread's next write fails and ends it.
        """
        if self._region is not None:
            self._region.give_up()
        self.join(FEEDER_STOP_S)
        if not self.is_alive():
            with contextlib.suppress(*FLIGHT_ERRORS):
                self._writer.close()


class _CallEndedError(Exception):
    """The call takes no more."""


@contextlib.contextmanager
def _call_may_end() -> Iterator[None]:
    """What Flight raises inside says that; what a feed raises, whatever it is, does not."""
    try:
        yield
    except FLIGHT_ERRORS as error:
        raise _CallEndedError from error
