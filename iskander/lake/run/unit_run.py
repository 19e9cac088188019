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
from iskander.lake.failures import located
from iskander.lake.job import Job
from iskander.lake.journal import Finished
from iskander.lake.plan import Unit
from iskander.lake.planning import Planned, ScoringClient, cut
from iskander.lake.rows import ErrorBudget, Outcome, Quarantine, QuarantineWriter, RowPolicy
from iskander.lake.run.flow import Flow
from iskander.lake.run.report import Counters
from iskander.lake.sinks import Stager
from iskander.lake.sinks.writing import Staged
from iskander.lake.sources import Source

IN_FLIGHT_BYTES: Final = 32 << 20
"""Bytes of a unit's batches that were read and have no result, each with its sent copy."""
IN_FLIGHT_BATCHES: Final = 64
RESULT_BYTES: Final = 16 << 20
"""Bytes of a unit's results that wait to be written."""
RESULT_BATCHES: Final = 64
THREADS_END_S: Final = 5.0
TTL_MS: Final = 3_600_000
"""Time in the queue: the server's default is for interactive calls."""


class _Read(NamedTuple):
    """A batch that was read, its parts that are sent, and the bytes of both.

    `first` is the number of its first row in the unit, and `error` that of a batch that cannot be
    sent.
    """

    batch: pa.RecordBatch
    first: int
    parts: list[pa.RecordBatch]
    size: int
    error: IskanderError | None


class _Sent(NamedTuple):
    """A part of a read batch; `size` is that of the whole batch for its last part, else 0.

    `first` is the number of its first row in the unit.
    """

    batch: pa.RecordBatch
    first: int
    size: int
    sent_ns: int


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What the units of a job have in common.

    Attributes:
        job: The job.
        planned: Its plan.
        source: Its input.
        stager: Writes units.
        client: Client of the server.
        counters: Sums of the job.
        budget: Rejected rows that the job still permits.
        quarantine: Folder of rejected rows; None without one.
        on_rows: Called with the number of rows that have results.
        terms: Terms of the calls, beside those of all jobs.
    """

    job: Job
    planned: Planned
    source: Source
    stager: Stager
    client: ScoringClient
    counters: Counters
    budget: ErrorBudget
    quarantine: Quarantine | None
    on_rows: Callable[[int], None]
    terms: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class UnitRun:
    """One unit: its threads and counts.

    Attributes:
        rows_in: Rows that were read, after the filter.
        rejected: Rows that the model or the server rejected.
        write_wait_ns: Time in which the sink waited for results.
    """

    shared: Shared
    unit: Unit
    rows_in: int = 0
    rejected: int = 0
    write_wait_ns: int = 0
    _flow: Flow = field(default_factory=lambda: Flow(IN_FLIGHT_BYTES, IN_FLIGHT_BATCHES))
    _results: Flow = field(default_factory=lambda: Flow(RESULT_BYTES, RESULT_BATCHES))
    _pending: deque[_Sent] = field(default_factory=deque)
    _held: _Read | None = None
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
            staged = shared.stager.stage(unit, self._written())
            is_staged = True
        finally:
            if not is_staged:
                self.cancel()
            for each in threads:
                each.join(THREADS_END_S)
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
        """End the threads as soon as they wait."""
        self._flow.cancel()
        self._results.cancel()

    def _read(self) -> None:
        """Thread that reads batches and matches their columns."""
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
                read = self._prepared(batch)
                self.rows_in += batch.num_rows
                spent_ns += clock.now_ns() - started_ns
                self._flow.put(read, read.size)
        except Exception as raised:  # The end of a thread: raised again by `Flow.take`.
            error = raised
        self.shared.counters.add(read_s=spent_ns / clock.NS_PER_S)
        self._flow.end(error)

    def _prepared(self, batch: pa.RecordBatch) -> _Read:
        try:
            parts = self._parts(batch)
        except IskanderError as error:
            if not self._policy.can_handle(error):
                raise self._located(error, self.rows_in, batch) from error
            return _Read(batch, self.rows_in, [], batch.nbytes, error)
        return _Read(
            batch, self.rows_in, parts, batch.nbytes + sum(each.nbytes for each in parts), None
        )

    def _located(self, error: IskanderError, first: int, batch: pa.RecordBatch) -> IskanderError:
        """Return the error of a batch that begins at row `first` of the unit, with its place."""
        shared = self.shared
        return located(
            error,
            shared.source,
            self.unit,
            shared.planned.filter,
            first=first,
            batch=batch,
            columns=shared.job.columns,
        )

    def _parts(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Match a batch and cut it to the server's limits."""
        planned = self.shared.planned
        matched = planned.matching.apply(batch.select(planned.sent))
        return list(cut(matched, planned.description))

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
        shared, plan = self.shared, self.shared.planned.plan
        call = shared.client.stream if shared.job.on_error == "fail" else shared.client.outcomes
        waited_ns = 0
        outcomes = call(plan.model, self._feed(), version=plan.version, terms=self._terms)
        while True:
            started_ns = clock.now_ns()
            try:
                outcome = next(outcomes, None)
            except IskanderError as error:
                if not self._pending:
                    raise
                # Outcomes are in the order of the batches.
                failed = self._pending[0]
                raise self._located(error, failed.first, failed.batch) from error
            now_ns = clock.now_ns()
            waited_ns += now_ns - started_ns
            if outcome is None:
                break
            sent = self._pending.popleft()
            if isinstance(outcome, IskanderError):
                joined = self._handled(sent.batch, outcome)
            else:
                shared.counters.add_latency((now_ns - sent.sent_ns) / clock.NS_PER_MS)
                joined = self._joined(sent.batch, outcome)
            self._put(joined)
            shared.on_rows(sent.batch.num_rows)
            if sent.size:
                self._flow.release(sent.size)
        shared.counters.add(score_s=waited_ns / clock.NS_PER_S)
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
                first, size = read.first + offset, read.size if is_last else 0
                offset += part.num_rows
                self._pending.append(_Sent(batch, first, size, clock.now_ns()))
                yield part

    def _score_one(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Score a batch in calls of its own, with retries."""
        shared, plan = self.shared, self.shared.planned.plan
        parts = self._parts(batch)
        results = list(
            shared.client.stream(plan.model, parts, version=plan.version, terms=self._terms)
        )
        return results[0] if len(results) == 1 else pa.concat_batches(results)

    def _handled(self, batch: pa.RecordBatch, error: IskanderError) -> pa.RecordBatch:
        """Score a batch again if its error may pass, else find its rejected rows.

        Returns:
            Its rows of the output.
        """
        if error.retryable:
            try:
                results = self._score_one(batch)
            except IskanderError as again:
                error = again
            else:
                return self._joined(batch, results)
        outcome: Outcome = self._policy.handle(batch, error, self._score_one)
        self.rejected += outcome.rejected_rows
        if outcome.rejected is not None and self._quarantine is not None:
            self._quarantine.write(outcome.rejected)
        return self._joined(outcome.kept, outcome.results)

    def _joined(self, batch: pa.RecordBatch, results: pa.RecordBatch) -> pa.RecordBatch:
        """Return kept columns and results as one batch."""
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
