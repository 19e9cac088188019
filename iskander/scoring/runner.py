"""Runs a scoring job: reading, scoring and writing of several units at the same time.

    source -> reader -> Flow -> stream of the client -> Queue -> sink.stage

Each unit has three threads and bounded queues between them. The model version is pinned in the
plan. Only columns that the model needs are sent; kept columns join their results here.

Runs in: the operator's tool; the caller's thread waits for the threads of units.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa

from iskander import clock
from iskander.client import ModelDescription
from iskander.client.matching import Matching
from iskander.client.slicing import slices
from iskander.errors import (
    Cancelled,
    ContractError,
    DeadlineExceeded,
    IskanderError,
    ModelMoved,
    ModelNotFound,
)
from iskander.scoring.filters import Filter, parse_filter
from iskander.scoring.job import Job
from iskander.scoring.journal import Finished, Journal
from iskander.scoring.plan import Plan, Unit, canonical, fingerprint, limited, model_digest
from iskander.scoring.progress import NoProgress, Progress
from iskander.scoring.report import Counters, Report
from iskander.scoring.rows import (
    ErrorBudget,
    Outcome,
    Quarantine,
    QuarantineWriter,
    RowPolicy,
)
from iskander.scoring.sinks import Sink
from iskander.scoring.sinks.schemas import GROUP_BYTES, check_columns
from iskander.scoring.sinks.writing import BUFFERED_BLOCKS, Staged
from iskander.scoring.sources import Source

IN_FLIGHT_BYTES: Final = 32 << 20
"""Bytes of a unit's batches that were read and have no result, each with its sent copy."""
IN_FLIGHT_BATCHES: Final = 64
RESULT_BYTES: Final = 16 << 20
"""Bytes of a unit's results that wait to be written."""
RESULT_BATCHES: Final = 64
BATCH_BYTES: Final = 16 << 20
"""Assumed bytes of one batch in `memory_bytes`."""
GRACE_S: Final = 5.0
"""Time for units in flight to end after a stop."""
STALL_S: Final = 900.0
"""Time without any progress after which the job fails."""
THREADS_END_S: Final = 5.0
DESCRIBE_S: Final = 120.0
"""Time in which a server that is starting again has to describe the model."""
TTL_MS: Final = 3_600_000
"""Time in the queue: the server's default is for interactive calls."""
_POLL_S: Final = 0.1
_UNSTABLE: Final = ("ready", "versions", "aliases", "limits", "max_batch_rows")
"""Keys of a contract that may change while the results stay the same."""


class Interrupted(Exception):
    """The job was stopped by a signal; finished units are in the journal.

    Attributes:
        report: State at the stop.
    """

    def __init__(self, report: Report) -> None:
        super().__init__("the job was interrupted")
        self.report = report


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


def memory_bytes(job: Job, batch_bytes: int = BATCH_BYTES) -> int:
    """Upper bound of the bytes in the queues of a job, and in the blocks of its files.

    Not in it: the process itself, and what pyarrow decodes ahead of a Parquet row group.

    Args:
        job: The job.
        batch_bytes: Bytes of the largest batch of `Job.batch_rows` rows, with its sent copy.
    """
    # A queue exceeds its limit by the batch that is put in last; one more is in each thread.
    queues = IN_FLIGHT_BYTES + RESULT_BYTES + 5 * batch_bytes
    # A block, its joined copy and its encoded form.
    blocks = 3 + (BUFFERED_BLOCKS if job.partition_by else 0)
    return job.concurrency * (queues + blocks * GROUP_BYTES)


@dataclass(frozen=True)
class Planned:
    """A plan, and what its units need.

    Attributes:
        plan: The plan.
        description: Description of the model.
        filter: Condition of the rows.
        read: Columns that are read, in the order of the input.
        kept: Columns of the input in the output.
        matching: Mapping of the read columns to the model's inputs.
        sent: Columns that are matched.
        output: Columns of the output.
    """

    plan: Plan
    description: ModelDescription
    filter: Filter | None
    read: pa.Schema
    kept: tuple[str, ...]
    matching: Matching
    sent: tuple[str, ...]
    output: pa.Schema


def plan_job(
    job: Job, source: Source, description: ModelDescription, *, files: str | None = None
) -> Planned:
    """Plan a job; reads nothing but what `limit` needs.

    Args:
        job: The job.
        source: Its input.
        description: Description of the pinned version of the model.
        files: Digest of the model's files, if it is known.

    Raises:
        ConfigError: A column of an option does not exist.
        ContractError: The input does not match the model, or two output columns have one name.
        FilterError: The filter is not valid for the input.
    """
    schema = source.schema
    condition = parse_filter(job.filter) if job.filter is not None else None
    if condition is not None:
        condition.expression(schema)
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
        _top(job.columns.get(name, name), schema)
        for name in (*description.input_types, *description.ranked_within)
        if name
    }
    sent = tuple(dict.fromkeys(name for name in schema.names if name in wanted))
    matching = Matching(
        description, pa.schema([schema.field(name) for name in sent]), columns=job.columns
    )
    is_all = job.quarantine is not None
    read = pa.schema([each for each in schema if is_all or each.name in {*kept, *sent}])
    output = pa.schema(
        [schema.field(name) for name in kept] + [each.with_nullable(True) for each in results]
    )
    units = limited(source.units(), job.limit, lambda unit: source.count(unit, condition))
    digest = digest_of(description, files)
    options = job.fingerprinted()
    if description.ranked_within:
        # A rank is within one batch, so that results depend on its size.
        options["batch_rows"] = job.batch_rows
    plan = Plan(
        units=tuple(units),
        fingerprint=fingerprint(
            model=description.name,
            version=description.version,
            digest=digest,
            contract=_stable(description),
            output_columns=output.names,
            options=options,
            snapshot=source.snapshot,
        ),
        model=description.name,
        version=description.version,
        digest=digest,
        snapshot=source.snapshot,
        schema=schema,
    )
    return Planned(plan, description, condition, read, kept, matching, sent, output)


def digest_of(description: ModelDescription, files: str | None = None) -> str:
    """Hash what identifies a model version: its contract, and its files if they are known."""
    return model_digest(_stable(description), files or description.metadata.get("fingerprint"))


def _stable(description: ModelDescription) -> dict[str, Any]:
    return {k: v for k, v in description.metadata.items() if k not in _UNSTABLE}


def _top(name: str, schema: pa.Schema) -> str:
    """Column of an input: the struct `a` for `a.b`, unless a column has that name."""
    return name if name in schema.names else name.partition(".")[0]


def csv_types(job: Job, description: ModelDescription) -> dict[str, pa.DataType]:
    """Types for columns of CSV files: those of the model's inputs."""
    inputs = description.input_schema
    return {
        job.columns.get(name, name): inputs.field(name).type
        for name in description.input_types
        if name in inputs.names and not pa.types.is_nested(inputs.field(name).type)
    }


def score_first(
    job: Job, planned: Planned, source: Source, client: ScoringClient
) -> tuple[int, float] | None:
    """Score the first batch of a job; return its rows and seconds, or None without rows."""
    plan = planned.plan
    batches = source.read(plan.units[0], planned.read.names, planned.filter, job.batch_rows)
    batch = next(batches, None)
    if batch is None:
        return None
    sent = planned.matching.apply(batch.select(planned.sent))
    sent = sent.slice(0, planned.description.limits["rows"])
    started_ns = clock.now_ns()
    for _ in client.stream(plan.model, [sent], version=plan.version):
        pass
    return sent.num_rows, (clock.now_ns() - started_ns) / clock.NS_PER_S


class Stop:
    """Request to stop a job, from a signal handler or another thread."""

    def __init__(self) -> None:
        self._count = 0

    def request(self) -> None:
        """Stop; at the second call, without time for units in flight."""
        self._count += 1

    @property
    def is_requested(self) -> bool:
        """Whether to begin no other unit."""
        return self._count > 0

    @property
    def is_urgent(self) -> bool:
        """Whether to drop units in flight."""
        return self._count > 1


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a job runs with.

    Attributes:
        job: The job.
        planned: Result of `plan_job`.
        source: Its input.
        sink: Its output.
        client: Client of the server.
        journal: State folder; None for a job that cannot be resumed.
        progress: Receives counts of rows.
        stop: Request to stop.
        lost: Returns an error if the server has ended for good.
    """

    job: Job
    planned: Planned
    source: Source
    sink: Sink
    client: ScoringClient
    journal: Journal | None = None
    progress: Progress = field(default_factory=NoProgress)
    stop: Stop = field(default_factory=Stop)
    lost: Callable[[], IskanderError | None] = lambda: None


def run(parts: Parts, *, grace_s: float = GRACE_S, stall_s: float = STALL_S) -> Report:
    """Score all units that are not finished, and commit the output.

    Args:
        parts: The job with its input and output.
        grace_s: Time for units in flight to end after a stop.
        stall_s: Time without progress after which the job fails.

    Raises:
        Interrupted: The job was stopped.
        ModelMoved: The model was replaced or unloaded.
        IskanderError: Any other failure; finished units are in the journal.
    """
    return _Runner(parts).run(grace_s, stall_s)


class _Runner:
    """One run of a job."""

    def __init__(self, parts: Parts) -> None:
        self.job = parts.job
        self.planned = parts.planned
        self.plan = parts.planned.plan
        self.source = parts.source
        self.sink = parts.sink
        self.client = parts.client
        self.progress = parts.progress
        self.counters = Counters()
        self.budget = ErrorBudget()
        self.quarantine: Quarantine | None = None
        self.terms = {
            "client": f"score-{self.plan.fingerprint[:8]}",
            "run_alone": True,
            "ttl_ms": TTL_MS,
        }
        self._journal = parts.journal
        self._stop = parts.stop
        self._lost = parts.lost
        self._staged: dict[int, Staged] = {}
        self._resumed = 0
        self._started_ns = self._progress_ns = clock.now_ns()
        self._changed = threading.Condition()
        self._todo: deque[Unit] = deque()
        self._running: dict[int, _UnitRun] = {}
        self._error: Exception | None = None

    def run(self, grace_s: float, stall_s: float) -> Report:
        job, plan = self.job, self.plan
        self._prepare()
        rows_done = self.counters.rows_in
        self.progress.start(
            plan.rows if job.filter is None else None,
            len(plan.units),
            rows_done=rows_done,
            units_done=len(self._staged),
        )
        try:
            self._score(grace_s, stall_s)
        except BaseException:
            if not self.sink.is_resumable:
                self.sink.abort()
            raise
        finally:
            self.progress.close()
        staged = [self._staged[unit.index] for unit in plan.units]
        self.sink.commit(plan, staged)
        if self._journal is not None:
            self._journal.remove()
        self.sink.finish()
        return self.report("done")

    def report(self, state: str) -> Report:
        """Make the report of the job so far."""
        counters, plan = self.counters, self.plan
        return Report(
            model=plan.model,
            version=plan.version,
            digest=plan.digest,
            output=self.job.output,
            state=state,
            units=len(plan.units),
            units_resumed=self._resumed,
            rows_in=counters.rows_in,
            rows_out=counters.rows_out,
            quarantined=counters.quarantined,
            errors=self.budget.count,
            bytes_out=counters.bytes_out,
            seconds=(clock.now_ns() - self._started_ns) / clock.NS_PER_S,
            read_s=counters.read_s,
            score_s=counters.score_s,
            write_s=counters.write_s,
            batch_p50_ms=counters.percentile(50),
            batch_p95_ms=counters.percentile(95),
        )

    def advance(self, rows: int) -> None:
        """Count rows that have results."""
        self._progress_ns = clock.now_ns()
        self.progress.advance(rows)

    def _prepare(self) -> None:
        """Begin or resume; find the staged units of an earlier run."""
        job, plan, journal = self.job, self.plan, self._journal
        is_resumed = False
        if journal is not None:
            is_resumed = journal.begin(plan, is_restart=job.restart, must_resume=job.resume)
        try:
            if job.quarantine is not None:
                self.quarantine = Quarantine(job.quarantine, plan, self.planned.read)
            self.sink.prepare(plan, self.planned.output, is_resumed=is_resumed)
        except Exception:
            if journal is not None and not is_resumed:
                journal.remove()
            raise
        for index, finished in (journal.finished() if journal is not None else {}).items():
            staged = self.sink.recover(plan.units[index], finished)
            if staged is None:
                assert journal is not None
                journal.forget(index)
                continue
            self._staged[index] = staged
            self._count(finished)
        self.budget = ErrorBudget(count=self.counters.quarantined)
        self._resumed = len(self._staged)
        self._todo.extend(unit for unit in plan.units if unit.index not in self._staged)

    def _count(self, finished: Finished) -> None:
        self.counters.add(
            rows_in=finished.rows_in,
            rows_out=finished.rows_out,
            quarantined=finished.quarantined,
            bytes_out=finished.bytes,
        )

    def _score(self, grace_s: float, stall_s: float) -> None:
        """Run the threads of units, and wait for them, a stop or a failure."""
        count = min(self.job.concurrency, len(self._todo))
        threads = [
            threading.Thread(target=self._work, name=f"unit-{index}", daemon=True)
            for index in range(count)
        ]
        for each in threads:
            each.start()
        # A wait without a timeout would block the handlers of signals.
        stopped_ns: int | None = None
        while any(each.is_alive() for each in threads):
            with self._changed:
                self._changed.wait(_POLL_S)
            now_ns = clock.now_ns()
            if self._stop.is_requested and stopped_ns is None:
                stopped_ns = now_ns
                with self._changed:
                    self._todo.clear()
            is_late = stopped_ns is not None and (
                self._stop.is_urgent or now_ns - stopped_ns > grace_s * clock.NS_PER_S
            )
            if self._error is None and now_ns - self._progress_ns > stall_s * clock.NS_PER_S:
                self._fail(DeadlineExceeded(f"no progress for {stall_s:g} s"))
            if self._error is None and (lost := self._lost()) is not None:
                self._fail(lost)
            if is_late or self._error is not None:
                self._cancel(threads)
                break
        if self._error is not None:
            raise self._error
        if len(self._staged) < len(self.plan.units):
            assert self._stop.is_requested, "a unit is missing without an error"
            raise Interrupted(self.report("interrupted"))

    def _cancel(self, threads: list[threading.Thread]) -> None:
        """Drop the units in flight; a thread that does not end is left to the process's end."""
        with self._changed:
            self._todo.clear()
            for running in self._running.values():
                running.cancel()
        if not self.sink.is_resumable:
            self.sink.abort()
        deadline_ns = clock.now_ns() + int(THREADS_END_S * clock.NS_PER_S)
        for each in threads:
            each.join(max((deadline_ns - clock.now_ns()) / clock.NS_PER_S, 0))

    def _work(self) -> None:
        """Run units one after another."""
        while True:
            with self._changed:
                if not self._todo or self._is_ended():
                    self._changed.notify_all()
                    return
                unit = self._todo.popleft()
                each = self._running[unit.index] = _UnitRun(self, unit)
            try:
                staged, finished = each.run()
                self._require_model(unit)
                if self._journal is not None:
                    self._journal.append(finished)
            except Exception as error:  # The end of a thread: raised again by the caller's.
                self._fail(self._named(error, unit))
                return
            with self._changed:
                del self._running[unit.index]
                self._staged[unit.index] = staged
                self._count(finished)
            self.progress.finish_unit()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if self._error is None and not (
                isinstance(error, Cancelled) and self._stop.is_requested
            ):
                self._error = error
            self._changed.notify_all()

    def _require_model(self, unit: Unit) -> None:
        """Check after a unit that the model is the planned one, before the unit counts.

        Raises:
            ModelMoved: It is not.
        """
        plan = self.plan
        description = describe(self.client, plan.model, plan.version, is_ended=self._is_ended)
        if canonical(_stable(description)) != canonical(_stable(self.planned.description)):
            raise ModelMoved(
                f"model `{plan.model}/{plan.version}` was replaced during the job, at "
                f"{unit.name}; start again with --restart"
            )

    def _is_ended(self) -> bool:
        return self._stop.is_requested or self._error is not None

    def _named(self, error: Exception, unit: Unit) -> Exception:
        """Return the error that ends the job: `ModelMoved` if that is the reason of others."""
        plan = self.plan
        if isinstance(error, ModelNotFound | ModelMoved):
            return ModelMoved(
                f"model `{plan.model}/{plan.version}` was replaced or unloaded during the job, at "
                f"{unit.name}: {error.message}"
            )
        if isinstance(error, ContractError | pa.ArrowException | KeyError):
            try:
                self._require_model(unit)
            except ModelMoved as moved:
                return moved
            except IskanderError:
                return error
        return error


def describe(
    client: ScoringClient,
    name: str,
    version: str | None,
    *,
    within_s: float = DESCRIBE_S,
    is_ended: Callable[[], bool] = bool,
) -> ModelDescription:
    """Describe a model; wait for a server that starts again.

    Raises:
        IskanderError: There is no such model, or no answer before the deadline.
    """
    deadline_ns = clock.now_ns() + int(within_s * clock.NS_PER_S)
    while True:
        try:
            description: ModelDescription = client.model(name, version=version).description
            return description
        except IskanderError as error:
            if not error.retryable or clock.now_ns() > deadline_ns or is_ended():
                raise
        clock.pause_s(_POLL_S)


class Flow:
    """Batches between the reader and their results: bounded in number and bytes.

    `put` waits while the batches without a result are at a limit; one batch alone is always taken.
    """

    def __init__(self, bytes_max: int, batches_max: int) -> None:
        self._bytes_max = bytes_max
        self._batches_max = batches_max
        self._changed = threading.Condition()
        self._items: deque[Any] = deque()
        self._bytes = self._count = 0
        self._is_ended = False
        self._error: BaseException | None = None

    def put(self, item: Any, size: int) -> None:  # noqa: ANN401
        """Add an item; wait for space.

        Raises:
            Cancelled: `cancel` was called.
        """
        with self._changed:
            while self._error is None and (
                self._count >= self._batches_max
                or (self._count > 0 and self._bytes + size > self._bytes_max)
            ):
                self._changed.wait()
            if self._error is not None:
                raise Cancelled("the unit was dropped")
            self._items.append(item)
            self._bytes += size
            self._count += 1
            self._changed.notify_all()

    def take(self) -> Any | None:  # noqa: ANN401
        """Return the next item; None after the last.

        Raises:
            BaseException: The error of `end` or `cancel`.
        """
        with self._changed:
            while not self._items and not self._is_ended and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error
            return self._items.popleft() if self._items else None

    def release(self, size: int) -> None:
        """Give back the space of an item."""
        with self._changed:
            self._bytes -= size
            self._count -= 1
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """End after the items in it, or with an error at once."""
        with self._changed:
            self._is_ended = True
            self._error = self._error or error
            self._changed.notify_all()

    def cancel(self) -> None:
        """End all waits with `Cancelled`."""
        self.end(Cancelled("the unit was dropped"))


class _Read(NamedTuple):
    """A batch that was read, its parts that are sent, and the bytes of both.

    `error` is that of a batch that cannot be sent.
    """

    batch: pa.RecordBatch
    parts: list[pa.RecordBatch]
    size: int
    error: IskanderError | None


class _Sent(NamedTuple):
    """A part of a read batch; `size` is that of the whole batch for its last part, else 0."""

    batch: pa.RecordBatch
    size: int
    sent_ns: int


@dataclass
class _UnitRun:
    """One unit: its threads and counts."""

    runner: _Runner
    unit: Unit
    rows_in: int = 0
    write_wait_ns: int = 0
    _flow: Flow = field(default_factory=lambda: Flow(IN_FLIGHT_BYTES, IN_FLIGHT_BATCHES))
    _results: Flow = field(default_factory=lambda: Flow(RESULT_BYTES, RESULT_BATCHES))
    _pending: deque[_Sent] = field(default_factory=deque)
    _held: _Read | None = None
    _quarantine: QuarantineWriter | None = None

    def __post_init__(self) -> None:
        runner = self.runner
        self._policy = RowPolicy(
            runner.job.on_error, runner.planned.description.output_schema, runner.budget
        )

    def run(self) -> tuple[Staged, Finished]:
        """Score the unit and stage its results."""
        runner, unit = self.runner, self.unit
        if runner.quarantine is not None:
            self._quarantine = runner.quarantine.open(unit)
        threads = [
            threading.Thread(target=target, name=f"{unit.name}-{name}", daemon=True)
            for name, target in (("read", self._read), ("score", self._score))
        ]
        for each in threads:
            each.start()
        started_ns = clock.now_ns()
        is_staged = False
        try:
            staged = runner.sink.stage(unit, self._written())
            is_staged = True
        finally:
            if not is_staged:
                self.cancel()
            for each in threads:
                each.join(THREADS_END_S)
            if not is_staged and self._quarantine is not None and not threads[1].is_alive():
                self._quarantine.abort()
        spent_ns = clock.now_ns() - started_ns - self.write_wait_ns
        runner.counters.add(write_s=max(spent_ns, 0) / clock.NS_PER_S)
        quarantined = self._quarantine.finish() if self._quarantine is not None else 0
        return staged, Finished(
            index=unit.index,
            name=unit.name,
            rows_in=self.rows_in,
            rows_out=staged.rows,
            quarantined=quarantined,
            bytes=staged.bytes,
            sha256=staged.sha256,
        )

    def cancel(self) -> None:
        """End the threads as soon as they wait."""
        self._flow.cancel()
        self._results.cancel()

    def _read(self) -> None:
        """Thread that reads batches and matches their columns."""
        planned, job = self.runner.planned, self.runner.job
        spent_ns = 0
        error: BaseException | None = None
        try:
            batches = self.runner.source.read(
                self.unit, planned.read.names, planned.filter, job.batch_rows
            )
            while True:
                started_ns = clock.now_ns()
                batch = next(batches, None)
                if batch is None:
                    break
                read = self._prepared(batch)
                self.rows_in += batch.num_rows
                spent_ns += clock.now_ns() - started_ns
                self._flow.put(read, read.size)
        except Exception as raised:  # The end of a thread: raised again by `Flow.take`.
            error = raised
        self.runner.counters.add(read_s=spent_ns / clock.NS_PER_S)
        self._flow.end(error)

    def _prepared(self, batch: pa.RecordBatch) -> _Read:
        try:
            parts = self._parts(batch, first_row=self.rows_in)
        except IskanderError as error:
            if not self._policy.can_handle(error):
                raise
            return _Read(batch, [], batch.nbytes, error)
        return _Read(batch, parts, batch.nbytes + sum(each.nbytes for each in parts), None)

    def _parts(self, batch: pa.RecordBatch, *, first_row: int = 0) -> list[pa.RecordBatch]:
        """Match a batch and cut it to the server's limits."""
        planned = self.runner.planned
        limits = planned.description.limits
        matched = planned.matching.apply(batch.select(planned.sent), first_row=first_row)
        return list(
            slices(
                [matched],
                rows_max=limits["rows"],
                bytes_max=limits["bytes"],
                string_bytes_max=limits["string_bytes"],
                rows_min=0,
            )
        )

    def _score(self) -> None:
        """Thread that streams the batches and joins results with kept columns."""
        error: BaseException | None = None
        try:
            while self._score_until_rejected():
                held, self._held = self._held, None
                assert held is not None and held.error is not None
                self._put(self._handled(held.batch, held.error))
                self._flow.release(held.size)
        except Exception as raised:  # The end of a thread: raised again by `Flow.take`.
            error = raised
            self._flow.cancel()
        self._results.end(error)

    def _score_until_rejected(self) -> bool:
        """Score batches in one stream; return True if a batch that cannot be sent is next."""
        runner, plan = self.runner, self.runner.plan
        call = runner.client.stream if runner.job.on_error == "fail" else runner.client.outcomes
        waited_ns = 0
        outcomes = call(plan.model, self._feed(), version=plan.version, terms=runner.terms)
        while True:
            started_ns = clock.now_ns()
            outcome = next(outcomes, None)
            now_ns = clock.now_ns()
            waited_ns += now_ns - started_ns
            if outcome is None:
                break
            sent = self._pending.popleft()
            if isinstance(outcome, IskanderError):
                if outcome.retryable:
                    joined = self._joined(sent.batch, self._score_one(sent.batch))
                else:
                    joined = self._handled(sent.batch, outcome)
            else:
                runner.counters.add_latency((now_ns - sent.sent_ns) / clock.NS_PER_MS)
                joined = self._joined(sent.batch, outcome)
            self._put(joined)
            runner.advance(sent.batch.num_rows)
            if sent.size:
                self._flow.release(sent.size)
        runner.counters.add(score_s=waited_ns / clock.NS_PER_S)
        return self._held is not None

    def _feed(self) -> Iterator[pa.RecordBatch]:
        """Batches of one stream; read by a thread of the client."""
        while True:
            read = self._flow.take()
            if read is None:
                return
            if read.error is not None:
                self._held = read
                return
            offset = 0
            for index, part in enumerate(read.parts):
                is_last = index == len(read.parts) - 1
                batch = read.batch.slice(offset, part.num_rows)
                offset += part.num_rows
                self._pending.append(_Sent(batch, read.size if is_last else 0, clock.now_ns()))
                yield part

    def _score_one(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Score a batch in calls of its own, with retries."""
        runner, plan = self.runner, self.runner.plan
        parts = self._parts(batch)
        results = list(
            runner.client.stream(plan.model, parts, version=plan.version, terms=runner.terms)
        )
        return results[0] if len(results) == 1 else pa.concat_batches(results)

    def _handled(self, batch: pa.RecordBatch, error: IskanderError) -> pa.RecordBatch:
        """Find the rejected rows of a batch; return the rows of the output."""
        outcome: Outcome = self._policy.handle(batch, error, self._score_one)
        if outcome.rejected is not None and self._quarantine is not None:
            self._quarantine.write(outcome.rejected)
        return self._joined(outcome.kept, outcome.results)

    def _joined(self, batch: pa.RecordBatch, results: pa.RecordBatch) -> pa.RecordBatch:
        """Return kept columns and results as one batch."""
        planned = self.runner.planned
        if results.num_rows != batch.num_rows:
            raise ContractError(
                f"model `{planned.plan.model}` returned {results.num_rows} rows for "
                f"{batch.num_rows}"
            )
        names = planned.description.output_schema.names
        arrays = [batch.column(name) for name in planned.kept]
        arrays += [results.column(name) for name in names]
        return pa.RecordBatch.from_arrays(arrays, schema=planned.output)

    def _put(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self._results.put(batch, batch.nbytes)

    def _written(self) -> Iterator[pa.RecordBatch]:
        """Results of the unit; read by the sink."""
        while True:
            started_ns = clock.now_ns()
            batch = self._results.take()
            self.write_wait_ns += clock.now_ns() - started_ns
            if batch is None:
                return
            size = batch.nbytes
            yield batch
            self._results.release(size)
