"""Arrow IPC stream on standard output: units in order, no staging.

A batch is written when it arrives: a reader waits for it, and joining batches to blocks would delay
it. The reader recognizes an incomplete job by a stream without its end.

Runs in: the operator's tool; `stage` is called from several threads, and waits for earlier units.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa

from iskander.errors import Cancelled, ConfigError
from iskander.lake.job import Job
from iskander.lake.journal import Finished
from iskander.lake.plan import JobPlan, Unit
from iskander.lake.sinks.schemas import conform, plain_schema
from iskander.lake.sinks.staging import provenance
from iskander.lake.sinks.storage import OutputFile, writing
from iskander.lake.sinks.writing import Staged, compression_of

PLACE: Final = "standard output"


class StreamSink:
    """A stream of record batches.

    Args:
        job: Job with the output `-`.
        file: Binary file of the stream; None is standard output.

    Raises:
        ConfigError: An option needs files or a table.
    """

    is_resumable = False
    is_commit_begun = False

    def __init__(self, job: Job, file: Any = None) -> None:  # noqa: ANN401
        for option in ("partition_by", "sort_by"):
            if getattr(job, option):
                raise ConfigError(f"{option} needs files or a table as output, not a stream (`-`)")
        if job.overwrite != "error":
            raise ConfigError(f"overwrite {job.overwrite} has no meaning for a stream (`-`)")
        self._compression = compression_of("ipc", job.compression)
        self._file = OutputFile(sys.stdout.buffer if file is None else file, is_synced=False)
        self._writer: Any = None
        self._schema: pa.Schema | None = None
        self._turn = threading.Condition()
        self._next = 0
        self._failure: str | None = None

    def is_complete(self, plan: JobPlan) -> bool:
        """Return False, because it is unknown what a reader received."""
        return False

    def prepare(self, plan: JobPlan, schema: pa.Schema, *, is_resumed: bool) -> None:
        """Write the schema; see `Sink.prepare`."""
        assert not is_resumed, "a stream cannot be resumed"
        self._schema = plain_schema(schema)
        codec = None if self._compression == "none" else self._compression
        with writing(PLACE):
            self._writer = pa.ipc.new_stream(
                self._file,
                self._schema.with_metadata(provenance(plan)),
                options=pa.ipc.IpcWriteOptions(compression=codec),
            )

    def stager(self) -> StreamSink:
        """Return this sink; see `Sink.stager`."""
        return self

    def stage(self, unit: Unit, batches: Iterator[pa.RecordBatch]) -> Staged:
        """Write a unit after the units before it; see `Stager.stage`.

        A unit that failed cannot be staged again, because some of its rows were written.

        Raises:
            Cancelled: An earlier unit failed, or the job was aborted.
        """
        assert self._schema is not None, "prepare comes first"
        with self._turn:
            # The wait needs no limit: the runner aborts a job that makes no progress.
            self._turn.wait_for(lambda: self._next == unit.index or self._failure is not None)
            if self._failure is not None:
                raise Cancelled(f"{unit.name}: not written, because {self._failure}")
        start, rows = self._file.bytes, 0
        is_complete = False
        try:
            for batch in batches:
                part = conform(batch, self._schema)
                with writing(PLACE):
                    self._writer.write_batch(part)
                    self._file.flush()
                rows += part.num_rows
            is_complete = True
        finally:
            with self._turn:
                if is_complete:
                    self._next = unit.index + 1
                else:
                    self._failure = f"{unit.name} failed"
                self._turn.notify_all()
        return Staged(unit.index, PLACE, rows, self._file.bytes - start)

    def recover(self, unit: Unit, finished: Finished) -> Staged | None:
        """Return None: a stream has no earlier run."""
        return None

    def commit(
        self, plan: JobPlan, staged: Sequence[Staged], *, check: Callable[[], None] = lambda: None
    ) -> None:
        """Write the end of the stream; see `Sink.commit`."""
        if self._writer is None:
            return
        assert len(staged) == len(plan.units), "a unit is not staged"
        with writing(PLACE):
            self._writer.close()
            self._writer = None
            self._file.flush()

    def abort(self) -> None:
        """End all waits. The end of the stream is not written, so that its reader fails."""
        with self._turn:
            self._failure = self._failure or "the job was aborted"
            self._turn.notify_all()
        self._file.discard()
        self._writer = None

    def finish(self) -> None:
        """Do nothing, because nothing is kept for a repeated commit."""
