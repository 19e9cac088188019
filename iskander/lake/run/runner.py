"""Runs a scoring job: scores units on several threads, keeps a journal, commits once.

The model version is pinned in the plan, and checked after each unit.

Runs in: the operator's tool; the caller's thread waits for the threads of units.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import pyarrow as pa

from iskander.errors import (
    Cancelled,
    ContractError,
    DeadlineExceeded,
    IskanderError,
    ModelMoved,
    ModelNotFound,
)
from iskander.foundation import clock
from iskander.lake.errors import JobConflict
from iskander.lake.execution import require_runtimes, runtime_terms
from iskander.lake.job import Job
from iskander.lake.journal import Finished, Journal
from iskander.lake.plan import Unit
from iskander.lake.planning import PlannedJob, ScoringClient, describe, identity
from iskander.lake.rows import ErrorBudget, Quarantine
from iskander.lake.run.progress import NoProgress, Progress
from iskander.lake.run.report import Counters, Report
from iskander.lake.run.unit_run import (
    IN_FLIGHT_BYTES,
    RESULT_BYTES,
    THREADS_END_S,
    UnitContext,
    UnitRun,
)
from iskander.lake.sinks import Sink
from iskander.lake.sinks.schemas import GROUP_BYTES
from iskander.lake.sinks.sorting import MEMORY_BYTES
from iskander.lake.sinks.writing import BUFFERED_BLOCKS, Staged
from iskander.lake.sources import JobSource

BATCH_BYTES: Final = 16 << 20
"""Bytes of one batch that `memory_bytes` assumes."""
GRACE_S: Final = 5.0
"""Time within which running units can end after a stop request."""
STALL_S: Final = 900.0
"""Time without any progress after which the job fails."""
_POLL_S: Final = 0.1


class Interrupted(Exception):
    """The job was stopped by a signal; finished units are in the journal."""

    def __init__(self) -> None:
        super().__init__("the job was interrupted")


def memory_bytes(job: Job, batch_bytes: int = BATCH_BYTES) -> int:
    """Return an upper bound of the bytes in a job's queues, blocks of files, and sort.

    The process itself is not included, nor what pyarrow decodes ahead of a Parquet row group.

    Args:
        job: The job.
        batch_bytes: Bytes of the largest batch of `Job.batch_rows` rows, with its sent copy.
    """
    # A queue can exceed its limit by its last batch, and every thread holds one more batch.
    queues = IN_FLIGHT_BYTES + RESULT_BYTES + 5 * batch_bytes
    # A block exists three times: as it is, as a joined copy and encoded.
    blocks = 3 + (BUFFERED_BLOCKS if job.partition_by else 0)
    units = job.concurrency * (queues + blocks * GROUP_BYTES)
    # The sort begins after the last unit.
    return max(units, MEMORY_BYTES + blocks * GROUP_BYTES) if job.sort_by else units


class StopRequest:
    """Request to stop a job, from a signal handler or another thread."""

    def __init__(self) -> None:
        self._add_to_counters = 0

    def request(self) -> None:
        """Request a stop; a second call gives running units no time to end."""
        self._add_to_counters += 1

    @property
    def is_requested(self) -> bool:
        """Whether no other unit may begin."""
        return self._add_to_counters > 0

    @property
    def is_urgent(self) -> bool:
        """Whether running units are dropped."""
        return self._add_to_counters > 1


class RunningUnit(Protocol):
    """One run of a unit."""

    def run(self) -> tuple[Staged, Finished]:
        """Score the unit and stage its results; called once, from a thread of the job."""

    def cancel(self) -> None:
        """Make `run` end with an error soon; called from another thread."""


@dataclass(frozen=True, kw_only=True)
class JobSetup:
    """Everything that a `Runner` needs for a job.

    Attributes:
        job: The job.
        planned: Result of `plan_job`.
        source: Input of the job.
        sink: Output of the job.
        client: Client of the server.
        journal: State folder; None for a job that cannot be resumed.
        progress: Receives counts of rows.
        stop: Request to stop.
        lost: Returns an error if the server has ended and will not be started again; else None.
        open_unit: Opens the run of a unit, here or in another process.
    """

    job: Job
    planned: PlannedJob
    source: JobSource
    sink: Sink
    client: ScoringClient
    journal: Journal | None = None
    progress: Progress = field(default_factory=NoProgress)
    stop: StopRequest = field(default_factory=StopRequest)
    lost: Callable[[], IskanderError | None] = lambda: None
    open_unit: Callable[[UnitContext, Unit], RunningUnit] = UnitRun


class Runner:
    """One run of a job.

    Args:
        setup: The job with its input and output.
        grace_s: Time for units in flight to end after a stop.
        stall_s: Time without progress after which the job fails.
    """

    def __init__(
        self, setup: JobSetup, *, grace_s: float = GRACE_S, stall_s: float = STALL_S
    ) -> None:
        self._setup = setup
        self._plan = setup.planned.plan
        self._grace_s, self._stall_s = grace_s, stall_s
        self._counters = Counters()
        self._staged: dict[int, Staged] = {}
        self._resumed = 0
        self._started_ns = self._progress_ns = clock.now_ns()
        self._changed = threading.Condition()
        self._todo: deque[Unit] = deque()
        self._running: dict[int, RunningUnit] = {}
        self._error: Exception | None = None

    def run(self) -> Report:
        """Score all units that are not finished, and commit the output.

        Raises:
            Interrupted: The job was stopped.
            JobConflict: The state folder has another job, or the commit of an earlier run.
            ModelMoved: The model was replaced or unloaded.
            IskanderError: Any other failure; finished units are in the journal.
        """
        sink, journal, plan = self._setup.sink, self._setup.journal, self._plan
        if self._is_done():
            sink.finish()
            self._resumed = len(plan.units)
            if (quarantine := self._quarantine()) is not None:
                self._counters.add(quarantined=sum(map(quarantine.rows, plan.units)))
            return self.report("done")
        is_resumed = self._begin()
        try:
            shared = self._prepare(is_resumed=is_resumed)
            self._score(shared)
            staged = [self._staged[unit.index] for unit in plan.units]
            sink.commit(plan, staged, check=self._check_stop)
        except BaseException:
            if journal is None:
                sink.abort()
            raise
        # After a crash between these two, the next run finds the output itself.
        if journal is not None:
            journal.clear()
        sink.finish()
        return self.report("done")

    def report(self, state: str) -> Report:
        """Return the report of the job so far."""
        counters, plan = self._counters, self._plan
        return Report(
            model=plan.model,
            version=plan.version,
            digest=plan.digest,
            output=self._setup.job.output,
            state=state,
            units=len(plan.units),
            units_resumed=self._resumed,
            rows_in=counters.rows_in,
            rows_out=counters.rows_out,
            quarantined=counters.quarantined,
            rejected=counters.rejected,
            bytes_out=counters.bytes_out,
            seconds=(clock.now_ns() - self._started_ns) / clock.NS_PER_S,
            read_s=counters.read_s,
            score_s=counters.score_s,
            write_s=counters.write_s,
            batch_p50_ms=counters.percentile(50),
            batch_p95_ms=counters.percentile(95),
        )

    def _is_done(self) -> bool:
        """Whether an earlier run has completed the output and removed its state."""
        job, journal = self._setup.job, self._setup.journal
        is_asked = job.resume or job.unattended
        if journal is None or not is_asked or journal.plan() is not None:
            return False
        return self._setup.sink.is_complete(self._plan)

    def _begin(self) -> bool:
        """Begin the journal; return whether an earlier run is resumed."""
        job, journal = self._setup.job, self._setup.journal
        if journal is None:
            return False
        if job.restart and self._setup.sink.is_commit_begun:
            raise JobConflict(
                f"{journal.folder}: the earlier run has committed a part of its output; complete "
                "it with the options of that run and --resume, or delete this folder and the output"
            )
        return journal.begin(self._plan, is_restart=job.restart, must_resume=job.resume)

    def _prepare(self, *, is_resumed: bool) -> UnitContext:
        """Prepare the output, and find the staged units of an earlier run."""
        setup, plan, journal = self._setup, self._plan, self._setup.journal
        job, sink = setup.job, setup.sink
        try:
            quarantine = self._quarantine()
            sink.prepare(plan, setup.planned.output, is_resumed=is_resumed)
        except Exception:
            if journal is not None and not is_resumed:
                journal.clear()
            raise
        for index, finished in (journal.finished() if journal is not None else {}).items():
            unit = plan.units[index]
            staged = sink.recover(unit, finished)
            if (
                quarantine is not None
                and finished.quarantined
                and quarantine.rows(unit) != finished.quarantined
            ):
                staged = None
            if staged is None:
                assert journal is not None
                journal.forget(index)
                continue
            self._staged[index] = staged
            self._add_to_counters(finished)
        self._resumed = len(self._staged)
        self._todo.extend(unit for unit in plan.units if unit.index not in self._staged)
        return UnitContext(
            job=job,
            planned=setup.planned,
            source=setup.source,
            stager=sink.stager(),
            client=setup.client,
            counters=self._counters,
            budget=ErrorBudget(count=self._counters.rejected),
            quarantine=quarantine,
            on_rows=self._advance,
            terms=runtime_terms(setup.planned.description),
        )

    def _quarantine(self) -> Quarantine | None:
        """Return the quarantine of the job; None if the job has no quarantine."""
        uri = self._setup.job.quarantine
        return None if uri is None else Quarantine(uri, self._plan, self._setup.planned.read)

    def _add_to_counters(self, finished: Finished) -> None:
        self._counters.add(
            rows_in=finished.rows_in,
            rows_out=finished.rows_out,
            quarantined=finished.quarantined,
            rejected=finished.rejected,
            bytes_out=finished.bytes,
        )

    def _advance(self, rows: int) -> None:
        self._progress_ns = clock.now_ns()
        self._setup.progress.advance(rows)

    def _score(self, shared: UnitContext) -> None:
        """Score the units that are not staged, and report the progress."""
        job, plan, progress = self._setup.job, self._plan, self._setup.progress
        progress.start(
            plan.rows if job.filter is None else None,
            len(plan.units),
            rows_done=self._counters.rows_in,
            units_done=len(self._staged),
        )
        threads = [
            threading.Thread(
                target=self._run_units, args=(shared,), name=f"unit-{index}", daemon=True
            )
            for index in range(min(job.concurrency, len(self._todo)))
        ]
        self._progress_ns = clock.now_ns()
        for thread in threads:
            thread.start()
        try:
            self._wait_for_threads(threads)
        finally:
            progress.close()
        if self._error is not None:
            raise self._error
        if len(self._staged) < len(plan.units):
            assert self._setup.stop.is_requested, "a unit is missing without an error"
            raise Interrupted

    def _wait_for_threads(self, threads: list[threading.Thread]) -> None:
        """Wait for the threads, a stop or a failure."""
        stop = self._setup.stop
        stopped_ns: int | None = None
        while any(thread.is_alive() for thread in threads):
            # A wait without a timeout would block the handlers of signals.
            with self._changed:
                self._changed.wait(_POLL_S)
            now_ns = clock.now_ns()
            if stop.is_requested and stopped_ns is None:
                stopped_ns = now_ns
                with self._changed:
                    self._todo.clear()
            is_late = stopped_ns is not None and (
                stop.is_urgent or now_ns - stopped_ns > self._grace_s * clock.NS_PER_S
            )
            if now_ns - self._progress_ns > self._stall_s * clock.NS_PER_S:
                self._fail(DeadlineExceeded(f"no progress for {self._stall_s:g} s"))
            if (lost := self._setup.lost()) is not None:
                self._fail(lost)
            if is_late or self._error is not None:
                self._cancel(threads)
                return

    def _cancel(self, threads: list[threading.Thread]) -> None:
        """Drop the running units; a thread that does not end in time ends with the process."""
        with self._changed:
            self._todo.clear()
            for running in self._running.values():
                running.cancel()
        if self._setup.journal is None:
            # Units that are written to a stream wait for the unit before them.
            self._setup.sink.abort()
        deadline_ns = clock.now_ns() + int(THREADS_END_S * clock.NS_PER_S)
        for thread in threads:
            thread.join(max((deadline_ns - clock.now_ns()) / clock.NS_PER_S, 0))

    def _run_units(self, shared: UnitContext) -> None:
        """Run units one after another; the function of the job's threads."""
        while True:
            with self._changed:
                if not self._todo or self._is_ended():
                    self._changed.notify_all()
                    return
                unit = self._todo.popleft()
                running = self._running[unit.index] = self._setup.open_unit(shared, unit)
            try:
                staged, finished = running.run()
                self._require_model(unit)
                if self._setup.journal is not None:
                    self._setup.journal.append(finished)
            except Exception as error:  # The end of a thread: the caller's thread raises it again.
                self._fail(self._reason_of(error, unit))
                return
            with self._changed:
                del self._running[unit.index]
                self._staged[unit.index] = staged
                self._add_to_counters(finished)
                # A filter may leave a unit without rows.
                self._progress_ns = clock.now_ns()
            self._setup.progress.finish_unit()

    def _fail(self, error: Exception) -> None:
        """Record the first error of the job, unless a stop request caused it."""
        with self._changed:
            if self._error is None and not (
                isinstance(error, Cancelled) and self._setup.stop.is_requested
            ):
                self._error = error
            self._changed.notify_all()

    def _require_model(self, unit: Unit) -> None:
        """Require that the model is still the planned one, before a scored unit counts.

        Raises:
            ModelMoved: The model was replaced.
            RuntimeDiffers: The server runs the model with another library, provider or number of
                threads.
        """
        plan = self._plan
        found = describe(self._setup.client, plan.model, plan.version, is_ended=self._is_ended)
        planned = self._setup.planned.description
        require_runtimes(planned, found, f"at {unit.name}, the server")
        if identity(found) != identity(planned) or found.is_whole != planned.is_whole:
            raise ModelMoved(
                f"model `{plan.model}/{plan.version}` was replaced during the job, at "
                f"{unit.name}; start again with --restart"
            )

    def _is_ended(self) -> bool:
        return self._setup.stop.is_requested or self._error is not None

    def _check_stop(self) -> None:
        """Raise `Interrupted` after a stop; a commit calls it until it changes the output."""
        if self._setup.stop.is_requested:
            raise Interrupted

    def _reason_of(self, error: Exception, unit: Unit) -> Exception:
        """Return the error that ends the job: `ModelMoved` if that is the reason of `error`."""
        plan = self._plan
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
