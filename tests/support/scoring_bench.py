"""Scoring jobs with a scripted source, client and sink."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from iskander.client import ModelDescription
from iskander.errors import (
    ContractError,
    IskanderError,
)
from iskander.lake.dry_run import DryRun, dry_run
from iskander.lake.filters import Filter
from iskander.lake.job import Job
from iskander.lake.journal import Finished, Journal
from iskander.lake.plan import JobPlan, Unit, make_unit
from iskander.lake.planning import PlannedJob, plan_job
from iskander.lake.positions import Position
from iskander.lake.run.runner import JobSetup, Runner, StopRequest
from iskander.lake.sinks.writing import Staged
from iskander.lake.whole import whole_if_needed

WITHIN_S = 10.0


def description(**changes: Any) -> ModelDescription:
    values: dict[str, Any] = {
        "name": "m", "version": "3", "ready": True, "backend": "onnx", "max_batch_rows": 100,
        "limits": {"rows": 1000, "bytes": 1 << 20, "string_bytes": 1 << 20}, "versions": ("3",),
        "aliases": {}, "input_schema": pa.schema([("x", pa.int64())]),
        "output_schema": pa.schema([pa.field("y", pa.int64(), nullable=False)]),
        "input_types": {"x": "int64"}, "passthrough": "none", "ranked_within": (),
        "metadata": {"name": "m", "version": "3", "ready": True, "inputs": ["x"]},
    }  # fmt: skip
    return ModelDescription(**(values | changes))


class ScriptedSource:
    """Units of `rows` rows, with the columns `x` (row number) and `id` (its text)."""

    is_resumable = True
    decimals: frozenset[str] = frozenset()

    def __init__(self, units: int = 3, rows: int = 10) -> None:
        self.schema = pa.schema([("x", pa.int64()), ("id", pa.string())])
        self.snapshot = {"kind": "scripted"}
        self.read_batches = 0
        self.error_after: tuple[int, Exception] | None = None
        self._rows = rows
        self._units = [make_unit(i, {"n": i}, rows=rows, bytes=8 * rows) for i in range(units)]

    def units(self) -> list[Unit]:
        return self._units

    def count(self, unit: Unit, filter: Filter | None) -> int:
        return self._rows

    def read(
        self, unit: Unit, columns: Any, filter: Filter | None, batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        first = unit.index * self._rows
        for start in range(first, first + self._rows, batch_rows):
            x = list(range(start, min(start + batch_rows, first + self._rows)))
            batch = pa.record_batch({"x": x, "id": [f"r{each}" for each in x]}, self.schema)
            self.read_batches += 1
            yield batch.select(columns)
        if self.error_after is not None and self.error_after[0] == unit.index:
            raise self.error_after[1]

    def locate(self, unit: Unit, row: int, filter: Filter | None) -> Position | None:
        return Position(f"file-{unit.index}", row)

    def close(self) -> None:
        pass


class ScriptedSink:
    """Keeps rows in memory."""

    is_resumable = True
    is_commit_begun = False

    def __init__(self) -> None:
        self.is_done = False
        self.on_commit: Callable[[], None] = lambda: None
        self.rows: dict[int, list[dict[str, Any]]] = {}
        self.lost: set[int] = set()
        self.committed: list[dict[str, Any]] | None = None
        self.calls: list[str] = []
        self.error: Exception | None = None

    def prepare(self, plan: JobPlan, schema: pa.Schema, *, is_resumed: bool) -> None:
        self.calls.append(f"prepare {is_resumed}")
        if self.error is not None:
            raise self.error

    def stager(self) -> ScriptedSink:
        return self

    def stage(self, unit: Unit, batches: Iterator[pa.RecordBatch]) -> Staged:
        rows = [row for batch in batches for row in batch.to_pylist()]
        self.rows[unit.index] = rows
        return Staged(unit.index, unit.name, len(rows), 8 * len(rows))

    def recover(self, unit: Unit, finished: Finished) -> Staged | None:
        if unit.index in self.lost:
            return None
        return Staged(unit.index, unit.name, finished.rows_out, finished.bytes)

    def is_complete(self, plan: JobPlan) -> bool:
        return self.is_done

    def commit(
        self, plan: JobPlan, staged: Any, *, check: Callable[[], None] = lambda: None
    ) -> None:
        self.on_commit()
        check()
        assert [each.index for each in staged] == [each.index for each in plan.units]
        self.calls.append("commit")
        self.committed = [row for each in plan.units for row in self.rows.get(each.index, [])]

    def abort(self) -> None:
        self.calls.append("abort")

    def finish(self) -> None:
        self.calls.append("finish")


class ScriptedClient:
    """`y = 3 x + 1`; `answer` decides on each batch, with an error or None."""

    def __init__(self) -> None:
        self.description = description()
        self.answer: Callable[[list[int]], Exception | None] = lambda x: None
        self.calls: list[tuple[str, str | None, Any]] = []
        self.sent: list[list[int]] = []
        self.columns: set[str] = set()

    def model(self, name: str, *, version: str | None = None) -> Any:
        return SimpleNamespace(description=self.description)

    def stream(
        self,
        model: str,
        batches: Any,
        *,
        version: str | None = None,
        terms: Any = None,
        timeout_s: float | None = None,
    ) -> Iterator[pa.RecordBatch]:
        for outcome in self.outcomes(model, batches, version=version, terms=terms):
            if isinstance(outcome, IskanderError):
                raise outcome
            yield outcome

    def outcomes(
        self, model: str, batches: Any, *, version: str | None = None, terms: Any = None
    ) -> Iterator[Any]:
        self.calls.append((model, version, terms))
        for batch in batches:
            self.columns |= set(batch.schema.names)
            x = batch["x"].to_pylist()
            self.sent.append(x)
            error = self.answer(x)
            yield pa.record_batch({"y": [3 * each + 1 for each in x]}) if error is None else error


class Bench:
    """A job with its scripted parts."""

    def __init__(self, folder: Path, *, units: int = 3, **options: Any) -> None:
        values: dict[str, Any] = {"model": "m", "inputs": ("in",), "output": "out"}
        values |= {"batch_rows": 4, "concurrency": 1, **options}
        self.job = Job(**values)
        self.source = ScriptedSource(units)
        self.sink = ScriptedSink()
        self.client = ScriptedClient()
        self.state = folder / "state"
        self.stop = StopRequest()
        self.lost: Callable[[], IskanderError | None] = lambda: None
        self.runner: Runner | None = None
        self.is_kept = True

    def planned(self) -> PlannedJob:
        source = whole_if_needed(self.source, self.client.description)
        return plan_job(self.job, source, self.client.description)

    def run(self, **limits: float) -> Any:
        planned = self.planned()
        with Journal(self.state) as journal:
            parts = JobSetup(
                job=self.job,
                planned=planned,
                source=whole_if_needed(self.source, self.client.description),
                sink=self.sink,
                client=self.client,
                journal=journal if self.is_kept else None,
                stop=self.stop,
                lost=self.lost,
            )
            self.runner = Runner(parts, **limits)
            return self.runner.run()

    def dry_run(self) -> DryRun:
        client: Any = self.client
        with Journal(self.state) as journal:
            source = whole_if_needed(self.source, client.description)
            return dry_run(self.job, self.planned(), source=source, client=client, journal=journal)

    def finished(self) -> set[int]:
        with Journal(self.state) as journal:
            journal.begin(self.planned().plan)
            return set(journal.finished())


def rejecting(*bad: int) -> Callable[[list[int]], Exception | None]:
    return lambda x: ContractError("bad row") if set(x) & set(bad) else None
