"""One unit of a job: it is read, scored and staged by three threads with bounded queues.

    source -> reader -> Flow -> stream of the client -> Flow -> stager

Only columns that the model needs are sent; kept columns join their results here.

Runs in: the operator's tool.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import pyarrow as pa

from iskander.errors import ContractError, IskanderError
from iskander.foundation import clock
from iskander.lake.failures import with_place
from iskander.lake.job import Job
from iskander.lake.journal import Finished
from iskander.lake.plan import Unit
from iskander.lake.planning import PlannedJob, ScoringClient, cut_for_calls
from iskander.lake.rows import ErrorBudget, Outcome, Quarantine, QuarantineWriter, RowPolicy
from iskander.lake.run.flow import Flow
from iskander.lake.run.report import Counters
from iskander.lake.sinks import Stager
from iskander.lake.sinks.writing import Staged
from iskander.lake.sources import JobSource

IN_FLIGHT_BYTES: Final = 32 << 20
"""Limit of the bytes of a unit's batches without a result, including their sent copies."""
IN_FLIGHT_BATCHES: Final = 64
RESULT_BYTES: Final = 16 << 20
"""Limit of the bytes of a unit's results that wait to be written."""
RESULT_BATCHES: Final = 64
THREADS_END_S: Final = 5.0
TTL_MS: Final = 3_600_000
"""Limit of a request's time in the server's queue, whose default is for interactive calls."""


class _Read(NamedTuple):
    """A batch that was read.

    Attributes:
        batch: Rows with the columns that were read.
        first: Number of the first row in the unit.
        parts: Matched rows, cut into the batches that are sent.
        size: Bytes of `batch` and `parts`.
        error: Why the batch cannot be sent; None if it can.
    """

    batch: pa.RecordBatch
    first: int
    parts: list[pa.RecordBatch]
    size: int
    error: IskanderError | None


class _Sent(NamedTuple):
    """A part of a read batch that was sent.

    Attributes:
        batch: Rows of the part with the columns that were read.
        first: Number of the part's first row in the unit.
        size: For the last part of a read batch, the size of that batch; for other parts 0.
        sent_ns: Time of the sending.
    """

    batch: pa.RecordBatch
    first: int
    size: int
    sent_ns: int


@dataclass(frozen=True, kw_only=True)
class UnitContext:
    """Everything that the units of a job share.

    Attributes:
        job: The job.
        planned: Plan of the job.
        source: Input of the job.
        stager: Writer of units.
        client: Client of the server.
        counters: Sums of the job.
        budget: Rejected rows that the job still permits.
        quarantine: Folder of rejected rows; None without one.
        on_rows: Called with the number of rows that have results.
        terms: Options of the calls, such as the client's name and the deadline, in addition to
            those of every job.
    """

    job: Job
    planned: PlannedJob
    source: JobSource
    stager: Stager
    client: ScoringClient
    counters: Counters
    budget: ErrorBudget
    quarantine: Quarantine | None
    on_rows: Callable[[int], None]
    terms: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class UnitRun:
    """One run of a unit: its threads and counts.

    Attributes:
        shared: What all units of the job share.
        unit: The unit.
        rows_in: Rows that were read, after the filter.
        rejected: Rows that the model or the server rejected.
        write_wait_ns: Time in which the writer of the unit waited for results.
    """

    shared: UnitContext
    unit: Unit
    rows_in: int = 0
    rejected: int = 0
    write_wait_ns: int = 0
    _flow: Flow = field(default_factory=lambda: Flow(IN_FLIGHT_BYTES, IN_FLIGHT_BATCHES))
    _results: Flow = field(default_factory=lambda: Flow(RESULT_BYTES, RESULT_BATCHES))
    _pending: deque[_Sent] = field(default_factory=deque)
    _unsendable: _Read | None = None
    _quarantine: QuarantineWriter | None = None

    def __post_init__(self) -> None:
        shared, plan = self.shared, self.shared.planned.plan
        self._policy = RowPolicy(
            shared.job.on_error, shared.planned.description.output_schema, shared.budget
        )
        self._terms = {
            "client": f"score-{plan.fingerprint[:8]}",
            "run_alone": True,
            "ttl_ms": TTL_MS,
            **shared.terms,
        }

    def run(self) -> tuple[Staged, Finished]:
        """Score the unit and stage its results."""
        shared, unit = self.shared, self.unit
        if shared.quarantine is not None:
            self._quarantine = shared.quarantine.open(unit)
        threads = [
            threading.Thread(target=target, name=f"{unit.name}-{name}", daemon=True)
            for name, target in (("read", self._read), ("score", self._score))
        ]
        for each in threads:
            each.start()
        started_ns = clock.now_ns()
        is_staged = False
        try:
            staged = shared.stager.stage(unit, self._results_to_write())
            is_staged = True
        finally:
            if not is_staged:
                self.cancel()
            for thread in threads:
                thread.join(THREADS_END_S)
            if not is_staged and self._quarantine is not None and not threads[1].is_alive():
                self._quarantine.abort()
        spent_ns = clock.now_ns() - started_ns - self.write_wait_ns
        shared.counters.add(write_s=max(spent_ns, 0) / clock.NS_PER_S)
        quarantined = self._quarantine.finish() if self._quarantine is not None else 0
        return staged, Finished(
            index=unit.index,
            name=unit.name,
            rows_in=self.rows_in,
            rows_out=staged.rows,
            quarantined=quarantined,
            rejected=self.rejected,
            bytes=staged.bytes,
        )

    def cancel(self) -> None:
        """Make every thread end when it waits for a queue."""
        self._flow.cancel()
        self._results.cancel()

    def _read(self) -> None:
        """Read batches and match their columns; the function of the first thread."""
        planned, job = self.shared.planned, self.shared.job
        spent_ns = 0
        error: BaseException | None = None
        try:
            batches = self.shared.source.read(
                self.unit, planned.read.names, planned.filter, job.batch_rows
            )
            while True:
                started_ns = clock.now_ns()
                batch = next(batches, None)
                if batch is None:
                    break
                read = self._prepare(batch)
                self.rows_in += batch.num_rows
                spent_ns += clock.now_ns() - started_ns
                self._flow.put(read, read.size)
        except (
            Exception
        ) as raised:  # It ends this thread, and `Flow.take` raises it in the other one.
            error = raised
        self.shared.counters.add(read_s=spent_ns / clock.NS_PER_S)
        self._flow.end(error)

    def _prepare(self, batch: pa.RecordBatch) -> _Read:
        try:
            parts = self._cut_for_calls(batch)
        except IskanderError as error:
            if not self._policy.can_handle(error):
                raise self._with_place(error, self.rows_in, batch) from error
            return _Read(batch, self.rows_in, [], batch.nbytes, error)
        return _Read(
            batch, self.rows_in, parts, batch.nbytes + sum(part.nbytes for part in parts), None
        )

    def _with_place(self, error: IskanderError, first: int, batch: pa.RecordBatch) -> IskanderError:
        """Add its place to the error of a batch that begins at row `first` of the unit."""
        shared = self.shared
        return with_place(
            error,
            shared.source,
            self.unit,
            shared.planned.filter,
            first=first,
            batch=batch,
            columns=shared.job.columns,
        )

    def _cut_for_calls(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Match a batch and cut it to the server's limits."""
        planned = self.shared.planned
        matched = planned.matching.apply(batch.select(planned.sent))
        return list(cut_for_calls(matched, planned.description))

    def _score(self) -> None:
        """Stream the batches and join results with kept columns.

        The function of the second thread.
        """
        error: BaseException | None = None
        try:
            while self._score_until_unsendable():
                held, self._unsendable = self._unsendable, None
                assert held is not None and held.error is not None
                self._put(self._score_again(held.batch, held.error))
                self._flow.release(held.size)
        except (
            Exception
        ) as raised:  # It ends this thread, and `Flow.take` raises it in the other one.
            error = raised
            self._flow.cancel()
        self._results.end(error)

    def _score_until_unsendable(self) -> bool:
        """Score batches in one stream.

        Return True if it ended before a batch that cannot be sent.
        """
        shared, plan = self.shared, self.shared.planned.plan
        call = shared.client.stream if shared.job.on_error == "fail" else shared.client.outcomes
        waited_ns = 0
        outcomes = call(
            plan.model, self._batches_to_send(), version=plan.version, terms=self._terms
        )
        while True:
            started_ns = clock.now_ns()
            try:
                outcome = next(outcomes, None)
            except IskanderError as error:
                if not self._pending:
                    raise
                # Outcomes are in the order of the batches.
                failed = self._pending[0]
                raise self._with_place(error, failed.first, failed.batch) from error
            now_ns = clock.now_ns()
            waited_ns += now_ns - started_ns
            if outcome is None:
                break
            sent = self._pending.popleft()
            if isinstance(outcome, IskanderError):
                joined = self._score_again(sent.batch, outcome)
            else:
                shared.counters.add_latency((now_ns - sent.sent_ns) / clock.NS_PER_MS)
                joined = self._join_columns(sent.batch, outcome)
            self._put(joined)
            shared.on_rows(sent.batch.num_rows)
            if sent.size:
                self._flow.release(sent.size)
        shared.counters.add(score_s=waited_ns / clock.NS_PER_S)
        return self._unsendable is not None

    def _batches_to_send(self) -> Iterator[pa.RecordBatch]:
        """Yield the batches of one stream; a thread of the client reads them."""
        while True:
            read = self._flow.take()
            if read is None:
                return
            if read.error is not None:
                self._unsendable = read
                return
            offset = 0
            for index, part in enumerate(read.parts):
                is_last = index == len(read.parts) - 1
                batch = read.batch.slice(offset, part.num_rows)
                first, size = read.first + offset, read.size if is_last else 0
                offset += part.num_rows
                self._pending.append(_Sent(batch, first, size, clock.now_ns()))
                yield part

    def _score_one(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Score a batch in one stream of its own; the client retries the calls."""
        shared, plan = self.shared, self.shared.planned.plan
        parts = self._cut_for_calls(batch)
        results = list(
            shared.client.stream(plan.model, parts, version=plan.version, terms=self._terms)
        )
        return results[0] if len(results) == 1 else pa.concat_batches(results)

    def _score_again(self, batch: pa.RecordBatch, error: IskanderError) -> pa.RecordBatch:
        """Score a failed batch again if the error may be temporary, else find its rejected rows.

        Returns:
            The rows of the batch in the output.
        """
        if error.retryable:
            try:
                results = self._score_one(batch)
            except IskanderError as again:
                error = again
            else:
                return self._join_columns(batch, results)
        outcome: Outcome = self._policy.handle(batch, error, self._score_one)
        self.rejected += outcome.rejected_rows
        if outcome.rejected is not None and self._quarantine is not None:
            self._quarantine.write(outcome.rejected)
        return self._join_columns(outcome.kept, outcome.results)

    def _join_columns(self, batch: pa.RecordBatch, results: pa.RecordBatch) -> pa.RecordBatch:
        """Return the kept columns of a batch and its results as one batch."""
        planned = self.shared.planned
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

    def _results_to_write(self) -> Iterator[pa.RecordBatch]:
        """Yield the results of the unit, which the stager writes."""
        while True:
            started_ns = clock.now_ns()
            batch = self._results.take()
            self.write_wait_ns += clock.now_ns() - started_ns
            if batch is None:
                return
            size = batch.nbytes
            yield batch
            self._results.release(size)
