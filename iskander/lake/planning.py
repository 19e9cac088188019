"""Planning of a job: columns, matching, units and fingerprint; nothing is scored.

Runs in: the operator's tool, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pyarrow as pa

from iskander.client import ModelDescription
from iskander.client.matching import Matching
from iskander.client.slicing import cut_and_join, join_to_one
from iskander.errors import ContractError, IskanderError, LimitExceeded
from iskander.foundation import clock
from iskander.lake.execution import execution_values
from iskander.lake.failures import with_place
from iskander.lake.filters import Filter, parse_filter
from iskander.lake.job import Job
from iskander.lake.plan import JobPlan, fingerprint, limit_units, model_digest
from iskander.lake.rows import require_separable
from iskander.lake.sinks.schemas import check_columns
from iskander.lake.sources import JobSource
from iskander.lake.whole import require_rows, require_whole

WORKERS_S: Final = 30.0
"""Time for a ready server to load the model in its other workers too, before a job."""
DESCRIBE_S: Final = 120.0
"""Time within which a server that is starting again must describe the model."""
_POLL_S: Final = 0.1
_NOT_IDENTITY: Final = (
    "ready", "versions", "aliases", "limits", "max_batch_rows", "runtimes", "all_runtimes", "rows",
)  # fmt: skip
"""Keys of a contract that do not identify the model; `execution` handles some of them."""


class ScoringClient(Protocol):
    """The calls of `Client` that a job uses."""

    def model(self, name: str, *, version: str | None = None) -> Any:  # noqa: ANN401
        """Describe a model."""

    def stream(
        self,
        model: str,
        batches: Any,  # noqa: ANN401
        *,
        version: str | None = None,
        terms: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Any:  # noqa: ANN401
        """Score batches; raise the first error."""

    def outcomes(
        self,
        model: str,
        batches: Any,  # noqa: ANN401
        *,
        version: str | None = None,
        terms: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Score batches; yield errors of batches."""


@dataclass(frozen=True)
class PlannedJob:
    """The plan of a job, and everything that a run of its units needs.

    Attributes:
        plan: The plan.
        description: Description of the model.
        filter: Condition of the rows.
        read: Columns that are read, in the order of the input.
        kept: Columns of the input that are in the output.
        matching: Mapping of the read columns to the model's inputs.
        sent: Columns of the input that are matched and sent.
        output: Columns of the output.
    """

    plan: JobPlan
    description: ModelDescription
    filter: Filter | None
    read: pa.Schema
    kept: tuple[str, ...]
    matching: Matching
    sent: tuple[str, ...]
    output: pa.Schema


def plan_job(job: Job, source: JobSource, description: ModelDescription) -> PlannedJob:
    """Plan a job; rows are read only to count them for `limit`.

    Args:
        job: The job.
        source: Its input.
        description: Description of the pinned version of the model.

    Raises:
        ConfigError: A column of an option does not exist, or `on_error` does not fit the model.
        ContractError: The input does not match the model, two output columns have the same name, or
            the model takes all rows in one request and the source reads rows in parts.
        FilterError: The filter is not valid for the input.
        LimitExceeded: The model takes all rows in one request, and there are too many.
    """
    schema = source.schema
    condition = parse_filter(job.filter) if job.filter is not None else None
    if condition is not None:
        condition.expression(schema)
    require_separable(job.on_error, description)
    require_whole(source, description)
    if job.keep is not None:
        check_columns("keep", job.keep, schema)
    kept = tuple(job.keep) if job.keep is not None else tuple(schema.names)
    results = description.output_schema
    twice = [name for name in kept if name in results.names]
    if twice:
        raise ContractError(
            f"column {twice[0]!r} is in the input and a result of model `{description.name}`; "
            "choose other columns with --keep",
            column=twice[0],
        )
    wanted = {
        _column_or_struct(job.columns.get(name, name), schema)
        for name in (*description.input_types, *description.ranked_within)
        if name
    }
    sent = tuple(dict.fromkeys(name for name in schema.names if name in wanted))
    inputs = pa.schema([schema.field(name) for name in sent])
    try:
        matching = Matching(description, inputs, columns=job.columns, decimals=source.decimals)
    except ContractError:
        # With all columns of the input, the error names the one nearest to a missing column.
        Matching(description, schema, columns=job.columns)
        raise
    is_all = job.quarantine is not None
    read = pa.schema([each for each in schema if is_all or each.name in {*kept, *sent}])
    output = pa.schema(
        [schema.field(name) for name in kept] + [field.with_nullable(True) for field in results]
    )
    units = limit_units(source.units(), job.limit, lambda unit: source.count(unit, condition))
    if condition is None and units[0].rows is not None:
        require_rows(description, units[0].rows)
    digest = model_digest(identity(description))
    options = job.fingerprint_options() | execution_values(description)
    plan = JobPlan(
        units=tuple(units),
        fingerprint=fingerprint(
            model=description.name,
            version=description.version,
            digest=digest,
            contract=identity(description),
            output_columns=output.names,
            options=options,
            snapshot=source.snapshot,
        ),
        model=description.name,
        version=description.version,
        digest=digest,
        snapshot=source.snapshot,
        schema=schema,
        values=options,
    )
    return PlannedJob(plan, description, condition, read, kept, matching, sent, output)


def identity(description: ModelDescription) -> dict[str, Any]:
    """Return the identity of a model version: its contract, and the hash of its files."""
    return {k: v for k, v in description.metadata.items() if k not in _NOT_IDENTITY}


def _column_or_struct(name: str, schema: pa.Schema) -> str:
    """Return the column of a model's input: the struct `a` for `a.b`, unless `a.b` is a column."""
    return name if name in schema.names else name.partition(".")[0]


def csv_types(job: Job, description: ModelDescription) -> dict[str, pa.DataType]:
    """Return the types that a model wants for columns of CSV files and hive folders."""
    inputs = description.input_schema
    return {
        job.columns.get(name, name): inputs.field(name).type
        for name in description.input_types
        if name in inputs.names and not pa.types.is_nested(inputs.field(name).type)
    }


def cut_for_calls(batch: pa.RecordBatch, description: ModelDescription) -> Iterator[pa.RecordBatch]:
    """Cut the rows of a matched batch into batches that are sent in one call each.

    The batches are within the limits of the server and of a worker's batch, so that the server does
    not cut them depending on its load. Rows of a batch that the model ranks stay together.

    Raises:
        LimitExceeded: A single row exceeds a limit, or rows that must stay together exceed a limit.
        ContractError: Rows that must stay together cannot be joined.
    """
    limits = description.limits
    rows_max = limits["rows"]
    if description.is_whole:
        try:
            batch = join_to_one(
                [batch],
                rows_max=rows_max,
                bytes_max=limits["bytes"],
                string_bytes_max=limits["string_bytes"],
                rows_setting=description.rows_setting,
            )
        except LimitExceeded as error:
            raise description.whole_error(error) from None
        return iter([batch])
    if not description.ranked_within:
        rows_max = min(rows_max, description.max_batch_rows)
    return cut_and_join(
        [batch],
        rows_max=rows_max,
        bytes_max=limits["bytes"],
        string_bytes_max=limits["string_bytes"],
        rows_min=0,
    )


def score_first(
    job: Job, planned: PlannedJob, source: JobSource, client: ScoringClient
) -> tuple[int, float] | None:
    """Score the first batch that a job sends; return its rows and seconds, or None without rows."""
    plan = planned.plan
    batches = source.read(plan.units[0], planned.read.names, planned.filter, job.batch_rows)
    batch = next(batches, None)
    if batch is None:
        return None
    try:
        matched = planned.matching.apply(batch.select(planned.sent))
        sent = next(cut_for_calls(matched, planned.description))
        batch = batch.slice(0, sent.num_rows)
        started_ns = clock.now_ns()
        for _ in client.stream(plan.model, [sent], version=plan.version):
            pass
    except IskanderError as error:
        raise with_place(
            error,
            source,
            plan.units[0],
            planned.filter,
            first=0,
            batch=batch,
            columns=job.columns,
        ) from error
    return sent.num_rows, (clock.now_ns() - started_ns) / clock.NS_PER_S


def describe(
    client: ScoringClient,
    name: str,
    version: str | None,
    *,
    within_s: float = DESCRIBE_S,
    workers_s: float = 0.0,
    is_ended: Callable[[], bool] = bool,
) -> ModelDescription:
    """Return the description of a model; wait for a server that is starting again.

    Args:
        client: Client of the server.
        name: Name of the model.
        version: Version or alias; None: the server's routing selects the version.
        within_s: Time for the server to answer.
        workers_s: Time for workers of every kind to load the model, after the first worker has: a
            worker with another number of cores or another device runs the model differently.
        is_ended: Returns True to stop waiting.

    Raises:
        IskanderError: There is no such model, or no answer before the deadline.
    """
    begun_ns = clock.now_ns()
    deadline_ns = begun_ns + int(within_s * clock.NS_PER_S)
    workers_ns = begun_ns + int(workers_s * clock.NS_PER_S)
    while True:
        try:
            description: ModelDescription = client.model(name, version=version).description
            is_whole = description.metadata.get("all_runtimes", True)
            if is_whole or clock.now_ns() > workers_ns or is_ended():
                return description
        except IskanderError as error:
            if not error.retryable or clock.now_ns() > deadline_ns or is_ended():
                raise
        clock.pause_s(_POLL_S)
