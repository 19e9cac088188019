"""Writer thread of a stream, concurrent with the reader of its results.

Runs on: a thread of its own; the thread of the caller counts results.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from iskander.client.calls.flight_errors import FLIGHT_ERRORS
from iskander.client.calls.resume import CallEndedError, WindowFeed
from iskander.errors import ProtocolError

if TYPE_CHECKING:
    from iskander.client.calls.shared_memory import Region

JOIN_S = 1.0


class StreamWriter(threading.Thread):
    """Writes the batches of a stream.

    This thread never closes the writing side, because a failed call closes it on the reading
    thread, and gRPC aborts the process on a second close. The reading thread closes the writing
    side after the last result. If all results arrive before the feed ends, this thread cancels the
    call, which has no work left.
    """

    def __init__(
        self,
        writer: Any,  # noqa: ANN401
        reader: Any,  # noqa: ANN401
        first: tuple[pa.RecordBatch, bytes],
        rest: WindowFeed,
        region: Region | None,
    ) -> None:
        super().__init__(name="iskander-feeder", daemon=True)
        self._writer = writer
        self._reader = reader
        self._rest = rest
        self._feed = itertools.chain([first], rest)
        self._schema = first[0].schema
        self._region = region
        self._is_shared: deque[bool] = deque()
        self._lock = threading.Lock()
        self._sent = self._received = 0
        self._is_exhausted = False
        self.error: BaseException | None = None
        self.must_cancel = False

    def run(self) -> None:
        """Write batches until the feed or the call ends."""
        try:
            with _call_may_end():
                self._writer.begin(self._schema)
            for batch, metadata in self._feed:
                self._write(batch, metadata)
        except CallEndedError:
            return  # The reader raises the reason.
        except BaseException as error:  # Raised again on the caller's thread, whatever it is.
            self.error = error
        with self._lock:
            self._is_exhausted = True
            self.must_cancel = self.error is not None or self._received == self._sent
        if self.must_cancel:
            self._reader.cancel()

    def _write(self, batch: pa.RecordBatch, metadata: bytes) -> None:
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

    def free_oldest(self) -> None:
        """Free the shared memory of the oldest batch, if it used any.

        Raises:
            ProtocolError: Every batch has a result already.
        """
        if not self._is_shared:
            raise ProtocolError("the server sent more results than it received batches")
        if self._is_shared.popleft():
            assert self._region is not None
            self._region.free()

    def count_result(self) -> bool:
        """Count a result; return whether it is the last one."""
        with self._lock:
            self._received += 1
            return self._is_exhausted and self._received == self._sent

    def finish(self) -> None:
        """Join the thread, and retrieve the call's error, which Arrow otherwise prints to stderr.

        If the feed blocks, its thread is left running until the feed yields.
        """
        self._rest.end()
        if self._region is not None:
            self._region.cancel_waits()
        self.join(JOIN_S)
        if not self.is_alive():
            with contextlib.suppress(*FLIGHT_ERRORS):
                self._writer.close()


@contextlib.contextmanager
def _call_may_end() -> Iterator[None]:
    """Convert errors of Flight in the block to `CallEndedError`, apart from errors of the feed."""
    try:
        yield
    except FLIGHT_ERRORS as error:
        raise CallEndedError from error
