"""Arrow IPC stream as output: order of units, failures, and options that need files."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.scoring_sinks import SCHEMA, a_job, a_plan, cut, rows_of, run

from iskander.errors import Cancelled, ConfigError
from iskander.lake.job import Job
from iskander.lake.sinks import open_sink
from iskander.lake.sinks.errors import OutputError
from iskander.lake.sinks.stream import StreamSink

ALL = pa.Table.from_batches([rows_of(i) for i in range(3)])


def job_for(folder: Path, **options: Any) -> Job:
    return a_job("-", folder / "s", **options)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_stream_has_all_rows_and_the_origin(tmp_path: Path, compression: str | None) -> None:
    out = io.BytesIO()
    run(job_for(tmp_path, compression=compression), a_plan(), make=lambda job: StreamSink(job, out))
    found = pa.ipc.open_stream(out.getvalue()).read_all()
    assert found.equals(ALL)
    assert found.schema.metadata[b"iskander.model"] == b"churn"


@pytest.mark.parametrize("units", [0, 2])
def test_stream_without_rows_has_the_columns(tmp_path: Path, units: int) -> None:
    out = io.BytesIO()
    run(job_for(tmp_path), a_plan(units), rows=0, make=lambda job: StreamSink(job, out))
    found = pa.ipc.open_stream(out.getvalue()).read_all()
    assert found.schema.equals(SCHEMA) and found.num_rows == 0


def test_units_of_several_threads_are_written_in_order(tmp_path: Path) -> None:
    out = io.BytesIO()
    plan = a_plan(6)
    sink = StreamSink(job_for(tmp_path), out)
    sink.prepare(plan, SCHEMA, is_resumed=False)
    staged: dict[int, Any] = {}

    def stage(index: int) -> None:
        staged[index] = sink.stager().stage(plan.units[index], cut(rows_of(index), 100))

    threads = [threading.Thread(target=stage, args=(i,)) for i in reversed(range(6))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    sink.commit(plan, [staged[i] for i in range(6)])
    sink.commit(plan, [staged[i] for i in range(6)])
    found = pa.ipc.open_stream(out.getvalue()).read_all()
    assert found.column("id").to_pylist() == list(range(6000))
    assert sum(each.bytes for each in staged.values()) < len(out.getvalue())


def test_failed_unit_ends_the_waits_of_later_units(tmp_path: Path) -> None:
    plan = a_plan(3)
    sink = StreamSink(job_for(tmp_path), io.BytesIO())
    sink.prepare(plan, SCHEMA, is_resumed=False)
    errors: list[BaseException] = []

    def stage() -> None:
        try:
            sink.stager().stage(plan.units[2], iter([rows_of(2)]))
        except Cancelled as error:
            errors.append(error)

    thread = threading.Thread(target=stage)
    thread.start()

    def failing() -> Any:
        yield rows_of(0)
        raise ValueError("of the model")

    with pytest.raises(ValueError, match="of the model"):
        sink.stager().stage(plan.units[0], failing())
    thread.join(30)
    assert len(errors) == 1 and not thread.is_alive()


def test_unit_waits_for_its_turn_until_the_abort(tmp_path: Path) -> None:
    plan = a_plan(2)
    sink = StreamSink(job_for(tmp_path), io.BytesIO())
    sink.prepare(plan, SCHEMA, is_resumed=False)
    errors: list[BaseException] = []
    waits = threading.Event()
    wait_for = sink._turn.wait_for

    def observed(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        assert timeout is None
        waits.set()
        return wait_for(predicate)

    sink._turn.wait_for = observed  # type: ignore[method-assign]

    def stage() -> None:
        try:
            sink.stager().stage(plan.units[1], iter([rows_of(1)]))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=stage)
    thread.start()
    assert waits.wait(30)
    sink.abort()
    thread.join(30)
    assert [type(each) for each in errors] == [Cancelled]
    assert not sink.is_commit_begun and not sink.is_complete(plan)


def test_aborted_stream_has_no_end(tmp_path: Path) -> None:
    plan = a_plan(2)
    out = io.BytesIO()
    sink = StreamSink(job_for(tmp_path), out)
    sink.prepare(plan, SCHEMA, is_resumed=False)
    sink.stager().stage(plan.units[0], iter([rows_of(0)]))
    sink.abort()
    with pytest.raises(Cancelled):
        sink.stager().stage(plan.units[1], iter([rows_of(1)]))
    assert not out.getvalue().endswith(b"\xff\xff\xff\xff\x00\x00\x00\x00")


def test_reader_that_is_gone_is_named(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    plan = a_plan(1)
    sink = StreamSink(job_for(tmp_path), os.fdopen(writer, "wb", buffering=0))
    sink.prepare(plan, SCHEMA, is_resumed=False)
    with pytest.raises(OutputError, match="standard output"):
        sink.stager().stage(plan.units[0], iter([rows_of(0)]))
    sink.abort()
    sink._file.abandon()


def test_buffered_output_is_complete_at_the_commit(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    plan = a_plan(1)
    with os.fdopen(writer, "wb") as file, os.fdopen(reader, "rb") as source:
        sink = StreamSink(job_for(tmp_path), file)
        sink.prepare(plan, SCHEMA, is_resumed=False)
        sink.commit(plan, [sink.stager().stage(plan.units[0], iter([rows_of(0, 3)]))])
        assert pa.ipc.open_stream(source).read_all().num_rows == 3


@pytest.mark.parametrize(
    "options",
    [{"partition_by": ("day",)}, {"sort_by": ("day",)}, {"overwrite": "append"}],
)
def test_options_that_need_files_are_rejected(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="stream"):
        open_sink(job_for(tmp_path, **options))
