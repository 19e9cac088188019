"""Outputs of scoring jobs: files, Delta tables, Iceberg tables, and standard output.

Units are staged one by one and committed together. `base` has the steps that files and tables
share. Imports pyarrow; the libraries of table formats
and of the sort are loaded only for their jobs.
Runs in: the operator's tool, threads of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import pyarrow as pa

from iskander.lake.job import STREAM, Job
from iskander.lake.journal import Finished
from iskander.lake.plan import JobPlan, Unit
from iskander.lake.sinks.writing import Staged

DELTA = "delta://"
ICEBERG = "iceberg://"


class Stager(Protocol):
    """The part of a sink that writes units; several threads use it."""

    def stage(self, unit: Unit, batches: Iterator[pa.RecordBatch]) -> Staged:
        """Write the results of a unit to disk, so that readers of the output do not see them yet.

        A unit that is staged again replaces the earlier one. Equal rows give equal bytes, whatever
        the batches are. After an error of the iterator, which is raised, nothing of the unit
        remains.

        Raises:
            OutputError: The results cannot be written.
            ContractError: A batch does not fit the schema of `prepare`.
            Cancelled: `abort` was called.
        """


class Sink(Protocol):
    """An output that shows either none or all results of a job.

    A job calls `prepare`; `recover` for each unit of its journal and `stager().stage` for each
    other unit; `commit`; then it removes the journal; then `finish`. After a crash between any two
    of them the next run repeats them from `prepare`. Only `stage` is called from several threads.
    """

    @property
    def is_resumable(self) -> bool:
        """Whether another process can continue the output."""

    @property
    def is_commit_begun(self) -> bool:
        """Whether the state folder has the record of a commit that was begun and not completed.

        The record may be of any job. Some files of that job may be in place, so only that job can
        continue.

        Raises:
            JobConflict: The record is damaged.
            OutputError: The record cannot be read.
        """

    def is_complete(self, plan: JobPlan) -> bool:
        """Whether the output states that it has the results of exactly this plan.

        The origin of the results is in `_SUCCESS` of a folder, in the metadata of one Parquet or
        Arrow IPC file, in the transaction of a Delta table or in the snapshot of an Iceberg table.
        One CSV file and a stream have no origin.

        Raises:
            OutputError: The output cannot be read.
        """

    def prepare(self, plan: JobPlan, schema: pa.Schema, *, is_resumed: bool) -> None:
        """Check the output before anything is scored, and begin.

        Args:
            plan: Plan of the job.
            schema: Columns of the results, in order.
            is_resumed: `Journal.begin` found an earlier run of this plan. If it found none, staged
                units of this plan are deleted. If the earlier run had committed an output that was
                deleted since, the job begins again, and `recover` finds nothing.

        Raises:
            OutputExists: The output exists and `overwrite` does not permit to change it.
            OutputError: The output cannot be written.
            JobConflict: Another job has staged units for this output.
            ConfigError: The options do not fit the columns, or a library is not installed.
            Unsupported: The format has no type for a column.
        """

    def stager(self) -> Stager:
        """Return the part that writes units, after `prepare`.

        The stager of a resumable sink can be pickled, for processes with the same storage.
        """

    def recover(self, unit: Unit, finished: Finished) -> Staged | None:
        """Find the staged files of a unit in the journal; None if they are lost."""

    def commit(
        self, plan: JobPlan, staged: Sequence[Staged], *, check: Callable[[], None] = lambda: None
    ) -> None:
        """Make all units visible. A repetition after a crash at any moment is safe.

        Args:
            plan: Plan of the job.
            staged: All units of the plan.
            check: Raises an exception to stop the commit, which leaves everything as before it.
                `check` is called between long steps, also from another thread, but no longer after
                the first change of the output.

        Raises:
            OutputExists: The output was created by another program since `prepare`.
            OutputError: The output cannot be written, or staged files are lost.
        """

    def abort(self) -> None:
        """Delete the staged units and the record of a job, unless its commit has begun.

        A call of `stage` in another thread fails, and its unit is deleted too.
        """

    def finish(self) -> None:
        """Delete what a repeated commit needs; call it after the journal was removed."""


def open_sink(job: Job) -> Sink:
    """Open the output of a job; nothing is changed before `prepare`.

    Raises:
        ConfigError: The options do not fit the output, a library is not installed, or the output,
            the quarantine and the inputs overlap.
        OutputError: The filesystem or the catalog cannot be opened.
    """
    from iskander.lake.sinks.apart import check_quarantine

    check_quarantine(job)
    if job.output == STREAM:
        from iskander.lake.sinks.stream import StreamSink

        return StreamSink(job)
    if job.output.startswith(ICEBERG):
        from iskander.lake.sinks.iceberg import IcebergSink

        return IcebergSink(job)
    if job.output.startswith(DELTA) or _has_log(job.output):
        from iskander.lake.sinks.delta import DeltaSink

        return DeltaSink(job)
    from iskander.lake.sinks.files import FileSink

    return FileSink(job)


def _has_log(output: str) -> bool:
    """Whether an output is the folder of a Delta table."""
    from iskander.lake.sinks.storage import storage_of, writing

    storage, path = storage_of(output)
    with writing(output):
        return storage.kind(f"{path}/_delta_log") == "folder"
