"""Jobs, plans and crashes for tests of outputs."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from iskander.lake.job import Job
from iskander.lake.journal import Finished
from iskander.lake.plan import JobPlan, make_unit
from iskander.lake.sinks import Sink, Staged, open_sink
from iskander.lake.sinks.storage import Storage

SCHEMA = pa.schema(
    [("id", pa.int64()), ("group", pa.string()), ("day", pa.int32()), ("score", pa.float32())]
)


class Crash(BaseException):
    """The process dies here."""


def a_job(output: str | Path, state: Path, **options: Any) -> Job:
    return Job(
        model="churn", inputs=("in.parquet",), output=str(output), state=str(state), **options
    )


def a_plan(count: int = 3, text: str = "job") -> JobPlan:
    units = tuple(make_unit(i, {"file": i}, rows=None, bytes=100) for i in range(count))
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    return JobPlan(units, fingerprint, "churn", "3", "d" * 64, {"kind": "files"}, SCHEMA)


def rows_of(index: int, count: int = 1000) -> pa.RecordBatch:
    start = index * count
    made = random.Random(index)
    return pa.record_batch(
        {
            "id": pa.array(range(start, start + count), pa.int64()),
            "group": pa.array([made.choice(["a", "b/c", "ü", None]) for _ in range(count)]),
            "day": pa.array([made.randrange(3) for _ in range(count)], pa.int32()),
            "score": pa.array([made.random() for _ in range(count)], pa.float32()),
        },
        schema=SCHEMA,
    )


def cut(batch: pa.RecordBatch, rows: int) -> Iterator[pa.RecordBatch]:
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def run(
    job: Job,
    plan: JobPlan,
    *,
    make: Callable[[Job], Sink] = open_sink,
    finished: dict[int, Finished] | None = None,
    rows: int = 1000,
    cut_rows: int = 300,
    schema: pa.Schema = SCHEMA,
    is_finished: bool = True,
) -> list[Staged]:
    """Run a job as the runner does; `finished` is the journal, which this call extends."""
    journal: dict[int, Finished] = {} if finished is None else finished
    sink = make(job)
    sink.prepare(plan, schema, is_resumed=finished is not None)
    staged = []
    for each in plan.units:
        found = sink.recover(each, journal[each.index]) if each.index in journal else None
        if found is None:
            batch = rows_of(each.index, rows).select(schema.names)
            found = sink.stager().stage(each, cut(batch, cut_rows))
            journal[each.index] = Finished(
                index=each.index,
                name=each.name,
                rows_in=rows,
                rows_out=found.rows,
                quarantined=0,
                rejected=0,
                bytes=found.bytes,
            )
        staged.append(found)
    sink.commit(plan, staged)
    if is_finished:
        sink.finish()
    return staged


def tree(folder: Path) -> dict[str, bytes]:
    """Contents of all files below a folder by path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


STEPS: Sequence[tuple[str, bool]] = (
    ("create", False),
    ("publish", True),
    ("publish", False),
    ("write", True),
    ("write", False),
    ("move", True),
    ("move", False),
    ("remove_file", True),
    ("remove_folder", True),
    ("remove_folder", False),
)
"""Operations before (False) or after (True) which a process can die."""


@contextmanager
def crash_at(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[list[str]]:
    """Raise `Crash` at the given step, counted over all operations; gives the steps so far."""
    seen: list[str] = []

    def step(name: str) -> None:
        seen.append(name)
        if len(seen) == number + 1:
            raise Crash(name)

    with monkeypatch.context() as patch:
        for name in dict(STEPS):
            original = getattr(Storage, name)

            def wrapped(
                self: Storage, *args: Any, _name: str = name, _original: Any = original
            ) -> Any:
                if (_name, False) in STEPS:
                    step(f"before {_name} {args}")
                result = _original(self, *args)
                if (_name, True) in STEPS:
                    step(f"after {_name} {args}")
                return result

            patch.setattr(Storage, name, wrapped)
        yield seen
