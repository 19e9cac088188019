"""Dry run of a scoring job: its plan, matched columns and an estimate, as text and JSON.

Runs in: the operator's tool, one thread.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from iskander.errors import IskanderError
from iskander.lake.planning import score_first
from iskander.lake.rows import is_row_error
from iskander.lake.run.runner import memory_bytes

if TYPE_CHECKING:
    from iskander.client import Client
    from iskander.lake.job import Job
    from iskander.lake.journal import Journal
    from iskander.lake.planning import PlannedJob
    from iskander.lake.sources import JobSource


@dataclass(frozen=True, kw_only=True)
class MatchedColumn:
    """A column that the model reads.

    Attributes:
        input: Input column of the model.
        column: Column of the job's input that is sent for it.
        given: Type of this column in the job's input.
        sent: Type with which the column is sent, after the cast.
    """

    input: str
    column: str
    given: str
    sent: str

    def line(self) -> str:
        """Render for a terminal."""
        cast = "" if self.given == self.sent else f", cast to {self.sent}"
        return f"column    {self.input} <- {self.column}: {self.given}{cast}"


@dataclass(frozen=True, kw_only=True)
class EarlierRun:
    """What the state folder has of an earlier run.

    Attributes:
        state: `none`; `same` for the same job, whose finished units are skipped; `other` for
            another job, whose state `--restart` deletes.
        folder: State folder; empty for `none`.
        units_finished: Finished units of the same job.
    """

    state: Literal["none", "same", "other"] = "none"
    folder: str = ""
    units_finished: int = 0

    def line(self) -> str:
        """Render for a terminal."""
        return {
            "none": "resume    no earlier run",
            "same": f"resume    skips {self.units_finished} finished units",
            "other": f"resume    {self.folder} has another job; --restart deletes it",
        }[self.state]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated time of the job: the time of its first batch, scaled to all rows.

    Attributes:
        rows: Rows of the first batch; 0 if the first unit has no rows.
        seconds: Time in which the first batch was scored.
        job_s: Estimated time of the job on one stream; None if its number of rows is unknown.
        error: Error of a rejected row in the batch, which prevents an estimate.
    """

    rows: int = 0
    seconds: float = 0.0
    job_s: float | None = None
    error: str = ""

    def line(self) -> str:
        """Render for a terminal."""
        if self.error:
            return f"estimate  none, because the first batch has a rejected row: {self.error}"
        if not self.rows:
            return "estimate  no rows in the first unit"
        text = f"estimate  {self.rows:,} rows in {self.seconds:.3f} s"
        return text if self.job_s is None else f"{text}; about {self.job_s:,.0f} s on one stream"


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Description of what a job would do.

    Attributes:
        model: Name of the model.
        version: Version of the model.
        input: Kind of the input, such as `files`.
        units: Units of the plan.
        rows: Rows of the input before the filter; None if they are unknown before reading.
        bytes: Bytes of the input.
        is_filtered: Whether the job has a filter.
        output: Output of the job.
        output_columns: Columns of the output.
        memory_bytes: Upper bound of the bytes in queues and in blocks of files.
        columns: Columns that the model reads.
        earlier: State of an earlier run.
        estimate: Estimate of the time; None if the input can be read only once.
    """

    model: str
    version: str
    input: str
    units: int
    rows: int | None
    bytes: int
    is_filtered: bool
    output: str
    output_columns: tuple[str, ...]
    memory_bytes: int
    columns: tuple[MatchedColumn, ...]
    earlier: EarlierRun
    estimate: Estimate | None

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Render for a terminal."""
        rows = "unknown" if self.rows is None else f"{self.rows:,}"
        return [
            f"model     {self.model}, version {self.version}",
            f"input     {self.input}: {self.units} units, {rows} rows"
            f"{' before the filter' if self.is_filtered else ''}, {self.bytes:,} bytes",
            f"output    {self.output}: {', '.join(self.output_columns)}",
            f"memory    {self.memory_bytes:,} bytes at most in queues and files",
            *(column.line() for column in self.columns),
            self.earlier.line(),
            *(() if self.estimate is None else (self.estimate.line(),)),
        ]


def dry_run(
    job: Job, planned: PlannedJob, *, source: JobSource, client: Client, journal: Journal | None
) -> DryRun:
    """Describe a job, and score its first batch; nothing is written.

    Raises:
        JobConflict: The state of an earlier run is damaged.
        IskanderError: The batch fails, unless rejected rows do not end the job.
    """
    plan = planned.plan
    return DryRun(
        model=plan.model,
        version=plan.version,
        input=plan.snapshot["kind"],
        units=len(plan.units),
        rows=plan.rows,
        bytes=plan.bytes,
        is_filtered=bool(job.filter),
        output=job.output,
        output_columns=tuple(planned.output.names),
        memory_bytes=memory_bytes(job),
        columns=_columns(job, planned),
        earlier=_earlier(planned, journal),
        estimate=_estimate(job, planned, source, client) if source.is_resumable else None,
    )


def _columns(job: Job, planned: PlannedJob) -> tuple[MatchedColumn, ...]:
    sent, read = planned.matching.schema, planned.read
    found = []
    for name in planned.description.input_types:
        column, top = job.columns.get(name, name), name.partition(".")[0]
        # An input of a struct's field has no column of its own.
        given = str(read.field(column).type) if column in read.names else "field"
        type_sent = str(sent.field(top).type) if top in sent.names else given
        found.append(MatchedColumn(input=name, column=column, given=given, sent=type_sent))
    return tuple(found)


def _earlier(planned: PlannedJob, journal: Journal | None) -> EarlierRun:
    earlier = None if journal is None else journal.plan()
    if earlier is None or journal is None:
        return EarlierRun()
    folder = str(journal.folder)
    if earlier.fingerprint != planned.plan.fingerprint:
        return EarlierRun(state="other", folder=folder)
    count = len(journal.finished_of(planned.plan))
    return EarlierRun(state="same", folder=folder, units_finished=count)


def _estimate(job: Job, planned: PlannedJob, source: JobSource, client: Client) -> Estimate:
    try:
        first = score_first(job, planned, source, client)
    except IskanderError as error:
        if job.on_error == "fail" or not is_row_error(error):
            raise
        return Estimate(error=error.message)
    if first is None:
        return Estimate()
    rows, seconds = first
    total = planned.plan.rows
    if total is not None:
        total = total if job.limit is None else min(total, job.limit)
    job_s = None if total is None else total * seconds / rows
    return Estimate(rows=rows, seconds=seconds, job_s=job_s)
