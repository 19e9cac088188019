"""Treatment of rows that the server rejects: fail, null results, or quarantine.

A rejected batch is halved until the rejected rows are alone, so that `b` rejected rows of `n` cost
about `2 b log2(n / b)` calls. A call whose data ends workers costs a second or more, so such a
batch is cut into more parts: four such calls find a row among 8,192. Only errors about values
count: a missing permission or an unknown model is no error of a row.

Runs in: the operator's tool, threads of one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from iskander.client import ModelDescription
from iskander.errors import ConfigError, ExecutionFailed, Fault, IskanderError, PoisonedRequest
from iskander.lake.job import QUARANTINE
from iskander.lake.plan import JobPlan, Unit
from iskander.lake.sinks.schemas import check_columns, conform, plain_schema
from iskander.lake.sinks.staging import provenance
from iskander.lake.sinks.storage import Storage, storage_of, writing
from iskander.lake.sinks.writing import Layout, UnitWriter

ERRORS_MAX: Final = 10_000
"""Limit of the rejected rows of a job, of a task of Spark, or of a batch of Ray Data."""
POISONED_MAX: Final = 100
"""Limit of the calls of a job whose data ends workers; such a call ends two workers."""
POISONED_PARTS: Final = 64
"""Number of parts into which a batch is cut if its data ended workers."""
ROW_CODES: Final = frozenset(
    {
        "contract", "malformed", "limit", ExecutionFailed.code, PoisonedRequest.code
    }
)  # fmt: skip
"""Codes of errors that the values of a row can cause."""
CODE_COLUMN: Final = "error_code"
MESSAGE_COLUMN: Final = "error_message"


class TooManyErrors(
    IskanderError, code="too_many_errors", fault=Fault.CLIENT, status="INVALID_ARGUMENT"
):
    """The server rejected more rows than the job permits."""


@dataclass(frozen=True)
class RejectedRow:
    """A row of a batch that the server rejects: its offset, and the error."""

    offset: int
    code: str
    message: str


@dataclass(frozen=True)
class Outcome:
    """Results of a batch with rejected rows.

    Attributes:
        kept: Rows of the input that are in the output.
        results: Results of these rows, in the same order; null for rejected rows with `null`.
        rejected: Rejected rows with `error_code` and `error_message`, for the quarantine; None
            with `null`.
        rejected_rows: Number of rejected rows.
    """

    kept: pa.RecordBatch
    results: pa.RecordBatch
    rejected: pa.RecordBatch | None
    rejected_rows: int


class ErrorBudget:
    """Number of rejected rows that a job still permits; threads share it.

    A pickled copy in another process counts separately; `add` counts the rows of that process here.

    Args:
        errors_max: Limit of the rejected rows of the job.
        count: Number of rejected rows of an earlier run.
        poisoned_max: Limit of the calls of the job whose data ends workers.
    """

    def __init__(
        self, errors_max: int = ERRORS_MAX, count: int = 0, poisoned_max: int = POISONED_MAX
    ) -> None:
        self._max = errors_max
        self._count = count
        self._poisoned_max = poisoned_max
        self._poisoned = 0
        self._mutex = threading.Lock()

    def take(self, error: IskanderError) -> None:
        """Count one rejected row.

        Raises:
            TooManyErrors: The job permits no more.
        """
        if self._is_above(1):
            raise TooManyErrors(
                f"the server rejected {self._max + 1:,} rows; limit {self._max:,} (errors_max). "
                f"The last error: {error.message}",
                last=error.code,
            ) from error

    def take_call(self, error: IskanderError) -> None:
        """Count a call that was rejected, if its data ended workers.

        Raises:
            TooManyErrors: The job permits no more such calls.
        """
        if error.code != PoisonedRequest.code:
            return
        with self._mutex:
            self._poisoned += 1
            is_above = self._poisoned > self._poisoned_max
        if is_above:
            raise TooManyErrors(
                f"the data of {self._poisoned_max + 1} calls ended workers; limit "
                f"{self._poisoned_max} (poisoned_max). The last error: {error.message}",
                last=error.code,
            ) from error

    def add(self, count: int) -> None:
        """Count rejected rows of a unit in another process.

        Raises:
            TooManyErrors: The job permits no more.
        """
        if self._is_above(count):
            raise TooManyErrors(
                f"the server rejected more than {self._max:,} rows, the limit (errors_max)"
            )

    def _is_above(self, count: int) -> bool:
        with self._mutex:
            self._count += count
            return self._count > self._max

    def __reduce__(self) -> tuple[type[ErrorBudget], tuple[int, int, int]]:
        return ErrorBudget, (self._max, self._count, self._poisoned_max)


class RowPolicy:
    """Policy for rejected rows: fail, null results, or quarantine.

    Args:
        on_error: `Job.on_error`.
        results: Columns of the results.
        budget: Rejected rows that the job permits.
    """

    def __init__(self, on_error: str, results: pa.Schema, budget: ErrorBudget) -> None:
        self.is_quarantine = on_error.startswith(QUARANTINE)
        self._is_fail = on_error == "fail"
        self._results = pa.schema(
            [field.with_nullable(True) for field in results], metadata=results.metadata
        )
        self._budget = budget

    def can_handle(self, error: IskanderError) -> bool:
        """Whether rows can be the reason of an error, and the policy is not `fail`."""
        return not self._is_fail and is_row_error(error)

    def handle(
        self,
        batch: pa.RecordBatch,
        error: IskanderError,
        score: Callable[[pa.RecordBatch], pa.RecordBatch],
    ) -> Outcome:
        """Find the rejected rows of a batch, and score its other rows.

        Args:
            batch: The rejected batch.
            error: Its error.
            score: Scores a batch in one call, which has its own deadline.

        Raises:
            IskanderError: `error` itself, if the policy is `fail` or rows are not its reason; or an
                error of `score` whose reason is not a row.
            TooManyErrors: The job has too many rejected rows.
        """
        if not self.can_handle(error):
            raise error
        results, rejected = find_rejected_rows(batch, error, score, self._budget)
        return self._outcome(batch, results, rejected)

    def _outcome(
        self,
        batch: pa.RecordBatch,
        parts: list[pa.RecordBatch],
        rejected: list[RejectedRow],
    ) -> Outcome:
        bad = {each.offset for each in rejected}
        good = pa.array([i for i in range(batch.num_rows) if i not in bad], pa.int64())
        fitting = [_fitted(part, self._results) for part in parts]
        scored = pa.Table.from_batches(fitting, self._results).combine_chunks()
        assert scored.num_rows == len(good), "results and rows differ"
        if not self.is_quarantine:
            position = {row: index for index, row in enumerate(good.to_pylist())}
            indices = pa.array([position.get(i) for i in range(batch.num_rows)], pa.int64())
            return Outcome(batch, _one(scored.take(indices)), None, len(rejected))
        lines = batch.take(pa.array([each.offset for each in rejected], pa.int64()))
        schema = quarantine_schema(batch.schema)
        codes = pa.array([each.code for each in rejected], pa.string())
        messages = pa.array([each.message for each in rejected], pa.string())
        quarantined = pa.RecordBatch.from_arrays(
            [*conform(lines, plain_schema(batch.schema)).columns, codes, messages], schema=schema
        )
        return Outcome(batch.take(good), _one(scored), quarantined, len(rejected))


def require_separable(on_error: str, description: ModelDescription) -> None:
    """Require a model for which leaving out a rejected row does not change other results.

    Raises:
        ConfigError: The model ranks the rows of a batch, or its rows depend on each other, and the
            policy is not `fail`.
    """
    if on_error != "fail" and description.is_whole:
        raise ConfigError(
            f"on_error is {on_error!r}, but model `{description.name}` takes all rows in one "
            f"request, because {description.whole_reason}: without a rejected row, the others may "
            "have other results; use `fail`"
        )
    if on_error != "fail" and description.ranked_within:
        raise ConfigError(
            f"on_error is {on_error!r}, but model `{description.name}` ranks the rows of a batch: "
            "without a rejected row, the others would have other ranks; use `fail`"
        )


def is_row_error(error: IskanderError) -> bool:
    """Whether the values of a row can be the reason of an error."""
    return not error.retryable and error.code in ROW_CODES


def find_rejected_rows(
    batch: pa.RecordBatch,
    error: IskanderError,
    score: Callable[[pa.RecordBatch], pa.RecordBatch],
    budget: ErrorBudget,
) -> tuple[list[pa.RecordBatch], list[RejectedRow]]:
    """Cut a rejected batch until its rejected rows are alone.

    Returns:
        Results of the other rows in order, and the rejected rows in order.

    Raises:
        TooManyErrors: The budget is used up.
        IskanderError: An error of `score` whose reason is not a row.
    """
    results: list[pa.RecordBatch] = []
    rejected: list[RejectedRow] = []
    # The top of the stack is the next range in order; an error belongs to its range.
    stack: list[tuple[int, int, IskanderError | None]] = [(0, batch.num_rows, error)]
    while stack:
        start, count, known = stack.pop()
        if known is None:
            try:
                results.append(score(batch.slice(start, count)))
                continue
            except IskanderError as caught:
                if not is_row_error(caught):
                    raise
                known = caught
        budget.take_call(known)
        if count <= 1:
            if count:
                budget.take(known)
                rejected.append(RejectedRow(start, known.code, known.message))
            continue
        parts = min(POISONED_PARTS if known.code == PoisonedRequest.code else 2, count)
        ends = [start + count * part // parts for part in range(parts + 1)]
        stack += [(a, b - a, None) for a, b in reversed(list(pairwise(ends)))]
    return results, rejected


def quarantine_schema(schema: pa.Schema) -> pa.Schema:
    """Return the columns of the quarantine: the input's, `error_code` and `error_message`.

    Raises:
        ConfigError: The input has a column of that name.
    """
    for name in (CODE_COLUMN, MESSAGE_COLUMN):
        if name in schema.names:
            raise ConfigError(
                f"the input has a column {name!r}, which the quarantine uses; rename it, or use "
                "--on-error null"
            )
    plain = plain_schema(schema)
    return pa.schema([*plain, (CODE_COLUMN, pa.string()), (MESSAGE_COLUMN, pa.string())])


class Quarantine:
    """Folder with the rejected rows: one Parquet file for each unit that has some.

    The name of a file contains unit and job, so that a unit that is scored again replaces its file.

    Args:
        uri: Path or URI of the folder.
        plan: Plan of the job.
        schema: Columns of the input batches.

    Raises:
        OutputError: The filesystem is unknown.
        ConfigError: The input has a column `error_code` or `error_message`.
    """

    def __init__(self, uri: str, plan: JobPlan, schema: pa.Schema) -> None:
        self._storage, self._path = storage_of(uri)
        self._mark = plan.fingerprint[:8]
        columns = quarantine_schema(schema)
        check_columns("quarantine", columns.names, columns)
        self._layout = Layout(schema=columns, metadata=provenance(plan))

    def open(self, unit: Unit) -> QuarantineWriter:
        """Return a writer for the rejected rows of a unit."""
        return QuarantineWriter(self._storage, self._path, self._name(unit), self._layout)

    def rows(self, unit: Unit) -> int:
        """Count the rows in the file of a finished unit; 0 if there is no file.

        Raises:
            OutputError: The filesystem cannot be read.
        """
        path = f"{self._path}/{self._name(unit)}.parquet"
        with writing(path):
            if self._storage.kind(path) != "file":
                return 0
            with self._storage.filesystem.open_input_file(path) as file:
                return int(pq.read_metadata(file).num_rows)

    def _name(self, unit: Unit) -> str:
        return f"{unit.name}-{self._mark}"


class QuarantineWriter:
    """Rejected rows of one unit, which appear at `finish`; used by one thread."""

    def __init__(self, storage: Storage, folder: str, name: str, layout: Layout) -> None:
        self.rows = 0
        self._storage = storage
        self._target = f"{folder}/{name}.parquet"
        self._partial = f"{folder}/_{name}.partial"
        self._name = name
        self._writer = UnitWriter(storage, self._partial, name, layout)

    def write(self, rejected: pa.RecordBatch) -> None:
        """Add rejected rows.

        Raises:
            OutputError: The system rejects to write.
        """
        self._writer.write(rejected)
        self.rows += rejected.num_rows

    def finish(self) -> int:
        """Put the file in place, before the unit is in the journal; returns its rows.

        Raises:
            OutputError: The system rejects to write.
        """
        try:
            files = self._writer.finish()
            with writing(self._target):
                if files:
                    self._storage.move(f"{self._partial}/{files[0].path}", self._target)
                else:
                    # An earlier run of the unit may have left one.
                    self._storage.remove_file(self._target)
                self._storage.remove_folder(self._partial)
        except IskanderError:
            self.abort()
            raise
        return self.rows

    def abort(self) -> None:
        """Delete what was written."""
        self._writer.abandon()
        with suppress(OSError):
            self._storage.remove_folder(self._partial)


def _fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(batch.select(schema.names).columns, schema=schema)


def _one(table: pa.Table) -> pa.RecordBatch:
    """Convert a table to one batch."""
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)
