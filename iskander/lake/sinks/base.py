"""Sinks that stage units as files: the steps that files and tables share.

The record in the state folder has one of three states. `prepared`: the output is unchanged.
`committing`: the staged files are complete, the record lists them, and they are being made visible.
`committed`: the output is complete, and only the record is left to delete.

Runs in: the operator's tool; only `stage` is called from several threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from iskander.lake.job import Job
from iskander.lake.journal import Finished
from iskander.lake.plan import JobPlan, Unit
from iskander.lake.sinks.apart import check_inputs
from iskander.lake.sinks.errors import OutputExists
from iskander.lake.sinks.schemas import check_columns, check_partitions
from iskander.lake.sinks.sorting import check_sort
from iskander.lake.sinks.staging import Staging, check_others, provenance
from iskander.lake.sinks.storage import Record, Storage, writing
from iskander.lake.sinks.writing import Layout, Staged


class StagedSink(ABC):
    """A sink that stages units as files, keeps a record, and commits once.

    Args:
        job: Job with the output.
        path: Path or name of the output in errors.

    Raises:
        ConfigError: The output overlaps an input.
    """

    is_resumable = True
    _is_one_file = False
    """Whether the output is one file."""
    _prefix: str | None = None
    """Prefix of the names of staging folders, if the rest of a name is a fingerprint."""
    _folder: str | None = None
    """Output folder, which `abort` deletes if it is empty."""

    def __init__(self, job: Job, path: str) -> None:
        check_inputs(job)
        self._job = job
        self._path = path
        self._record = Record(job.state_folder)
        self._staging: Staging | None = None

    @property
    def is_commit_begun(self) -> bool:
        """Whether a commit was begun and not completed; see `Sink.is_commit_begun`."""
        return self._record.peek().get("state") == "committing"

    @abstractmethod
    def is_complete(self, plan: JobPlan) -> bool:
        """Whether the output has the results of a plan; see `Sink.is_complete`."""

    def prepare(self, plan: JobPlan, schema: pa.Schema, *, is_resumed: bool) -> None:
        """Check the output and begin; see `Sink.prepare`."""
        record = self._record
        is_known = is_resumed and record.load(plan.fingerprint)
        if is_known and record.state == "committed" and not self._is_committed(plan):
            # The output was deleted after its commit, so it is made again.
            record.values, is_known = {}, False
        is_begun = is_known and record.state != "prepared"
        layout = self._layout(plan, schema, is_begun=is_begun)
        values = record.values or {
            "fingerprint": plan.fingerprint,
            "state": "prepared",
            **self._first_values(),
        }
        storage, folder = self._staging_place(plan, values)
        is_joined = self._is_one_file or bool(self._job.sort_by)
        self._staging = Staging(
            storage, folder, layout, self._job.state_folder, is_joined=is_joined
        )
        if not is_begun and self._prefix is not None:
            check_others(self._staging, self._prefix, is_restart=self._job.restart)
        if is_known:
            self._staging.remove_partial()
        else:
            self._staging.remove()
            record.save(**values)

    def stager(self) -> Staging:
        """Return the staged units; see `Sink.stager`."""
        return self._ready()

    def recover(self, unit: Unit, finished: Finished) -> Staged | None:
        """Find a unit of an earlier run; see `Sink.recover`."""
        if self._record.state != "prepared":
            return Staged(unit.index, self._path, finished.rows_out, finished.bytes)
        return self._ready().recover(unit, finished)

    def commit(
        self, plan: JobPlan, staged: Sequence[Staged], *, check: Callable[[], None] = lambda: None
    ) -> None:
        """Make all units visible; see `Sink.commit`."""
        record = self._record
        if record.state == "committed":
            return
        with writing(self._path):
            if record.state == "prepared":
                self._check_free(plan, self._ready().layout)
                files = self._ready().complete(plan, staged, check)
                record.save(state="committing", **self._list_files(plan, files, check))
            self._publish(plan)
            self._clean(plan)
        record.save(state="committed")

    def abort(self) -> None:
        """Delete the staged units; see `Sink.abort`."""
        if self._staging is not None and self._record.state == "prepared":
            self._staging.abort()
            if self._folder is not None:
                self._staging.storage.remove_empty(self._folder.rpartition("/")[0], self._folder)
            self._record.remove()

    def finish(self) -> None:
        """Delete the record of the commit; see `Sink.finish`."""
        self._record.remove()

    def _ready(self) -> Staging:
        assert self._staging is not None, "prepare comes first"
        return self._staging

    def _is_committed(self, plan: JobPlan) -> bool:
        """Whether the output exists that the record says is committed."""
        return self.is_complete(plan)

    @abstractmethod
    def _layout(self, plan: JobPlan, schema: pa.Schema, *, is_begun: bool) -> Layout:
        """Check the output, unless its commit has begun, and return the layout of its files.

        Raises:
            OutputExists: The output exists and may not be changed, or has another layout.
        """

    def _first_values(self) -> dict[str, Any]:
        """Return the sink's own values for a new record."""
        return {}

    @abstractmethod
    def _staging_place(self, plan: JobPlan, values: Mapping[str, Any]) -> tuple[Storage, str]:
        """Return the staging folder that belongs to the values of the record."""

    @abstractmethod
    def _check_free(self, plan: JobPlan, layout: Layout) -> None:
        """Check before the commit that the output does not exist, or may be changed.

        Raises:
            OutputExists: The output exists and may not be changed.
        """

    @abstractmethod
    def _list_files(
        self, plan: JobPlan, files: Mapping[str, int], check: Callable[[], None]
    ) -> dict[str, Any]:
        """Return the list of files for the record.

        `files` has the bytes of the staged files, by path below the staging folder.
        """

    @abstractmethod
    def _publish(self, plan: JobPlan) -> None:
        """Make the listed files visible; safe to repeat."""

    def _clean(self, plan: JobPlan) -> None:
        """Delete what is still staged after the files are visible."""
        self._ready().remove()

    def _checked_layout(
        self,
        plan: JobPlan,
        schema: pa.Schema,
        partition_by: tuple[str, ...],
        **options: Any,  # noqa: ANN401
    ) -> Layout:
        """Return a layout; check that the columns of the job's options are in the schema."""
        job = self._job
        check_partitions(partition_by, schema)
        check_columns("sort_by", job.sort_by, schema)
        if job.sort_by:
            check_sort(job.sort_by, schema)
        return Layout(
            schema=schema,
            metadata=provenance(plan),
            partition_by=partition_by,
            sort_by=job.sort_by,
            **{"file_bytes": job.file_bytes, **options},
        )


def output_exists_error(output: str, kind: str) -> OutputExists:
    """Return the error of an output that exists and may not be changed."""
    return OutputExists(
        f"{output}: the {kind} exists; use --overwrite append or replace, or another output",
        output=output,
    )


def appended_before_error(output: str, plan: JobPlan) -> OutputExists:
    """Return the error of a table that has the results of a job already."""
    return OutputExists(
        f"{output}: the table has the results of this job already (fingerprint "
        f"{plan.fingerprint[:8]}); nothing is appended twice"
    )


def check_partitioning(output: str, wanted: Sequence[str], found: Sequence[str]) -> None:
    """Check that the partitions of a job are those of its table.

    Raises:
        OutputExists: The partitions differ.
    """
    if wanted and list(wanted) != list(found):
        raise OutputExists(f"{output}: partition_by is {list(wanted)}; the table has {list(found)}")


def check_same_columns(output: str, found: pa.Schema, results: pa.Schema) -> None:
    """Check that a table has the columns of the results, in any order.

    Raises:
        OutputExists: The columns differ.
    """
    if {each.name: each.type for each in found} != {field.name: field.type for field in results}:
        raise OutputExists(
            f"{output}: the columns differ: the table has {columns_text(found)}; the results have "
            f"{columns_text(results)}"
        )


def columns_text(schema: pa.Schema) -> str:
    """Return the names and types of columns as a text for errors."""
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
