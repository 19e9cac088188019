"""Errors of batches: the file and the row of the input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from iskander.errors import ContractError, ExecutionFailed, IskanderError, QueueFull
from iskander.lake.failures import with_place
from iskander.lake.filters import Filter, parse_filter
from iskander.lake.plan import Unit
from iskander.lake.positions import Position
from iskander.lake.sources.files import FileSource
from iskander.lake.sources.stream import StreamSource
from iskander.lake.whole import WholeSource

ROWS = 100
FILES = 3


def write(folder: Path, format: str, index: int) -> None:
    table = pa.table({"n": list(range(index * ROWS, (index + 1) * ROWS)), "file": [index] * ROWS})
    path = folder / f"{index}.{format}"
    if format == "parquet":
        pq.write_table(table, path, row_group_size=30)
    elif format == "csv":
        pacsv.write_csv(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=30)


@pytest.mark.long
@pytest.mark.parametrize("unit_bytes", [1, 1 << 20])
@pytest.mark.parametrize("format", ["parquet", "csv", "arrow"])
@pytest.mark.parametrize("text", [None, "n > 150 and file in [1, 2]", "n > 250 or n < 3"])
def test_every_row_of_every_unit_is_found_in_its_file(
    tmp_path: Path, format: str, unit_bytes: int, text: str | None
) -> None:
    for index in range(FILES):
        write(tmp_path, format, index)
    source = FileSource([str(tmp_path)], unit_bytes=unit_bytes)
    condition = None if text is None else parse_filter(text)
    for unit in source.units():
        count = 0
        for batch in source.read(unit, ["n"], condition, 7):
            for n in batch.column(0).to_pylist():
                found = source.locate(unit, count, condition)
                assert found == Position(str(tmp_path / f"{n // ROWS}.{format}"), n % ROWS)
                count += 1
        assert source.locate(unit, count, condition) is None


@pytest.mark.parametrize("unit_bytes", [1, 1 << 20])
def test_row_of_a_table_in_one_request_is_found_in_its_file(
    tmp_path: Path, unit_bytes: int
) -> None:
    for index in range(FILES):
        write(tmp_path, "parquet", index)
    description: Any = None
    source = WholeSource(FileSource([str(tmp_path)], unit_bytes=unit_bytes), description)
    (unit,) = source.units()
    found = source.locate(unit, 150, parse_filter("n >= 100"))
    assert found == Position(str(tmp_path / "2.parquet"), 50)
    assert source.locate(unit, 299, None) == Position(str(tmp_path / "2.parquet"), 99)
    assert source.locate(unit, 300, None) is None


class Places:
    """A source of two files of ten rows."""

    def __init__(self, error: Exception | None = None, *, is_known: bool = True) -> None:
        self.error, self.is_known = error, is_known

    def locate(self, unit: Unit, row: int, filter: Filter | None) -> Position | None:
        if self.error is not None:
            raise self.error
        return Position("ab"[row // 10], row % 10 if self.is_known else None)


def place(error: IskanderError, *, source: Any = None, first: int = 3, x: Any = None) -> Any:
    batch = pa.record_batch({"given": [1] * 4 if x is None else x})
    unit = Unit(0, "part-0", {}, None, 0)
    source = source or Places()
    return with_place(error, source, unit, None, first=first, batch=batch, columns={"x": "given"})


def test_row_of_an_error_becomes_that_of_the_file() -> None:
    error = place(ContractError("column `x`: row 2 has 3", column="x", row=2), first=11)
    assert type(error) is ContractError
    assert error.message == "input b, row 3 (from 0): column `x`: row 3 has 3"
    assert error.fields == {"column": "x", "file": "b", "row": 3}
    assert place(error) is error


def test_first_null_is_the_row_of_an_error_with_a_number_of_nulls() -> None:
    error = ContractError("column `x` has 1 nulls", column="x", nulls=1)
    assert place(error, x=[1, 2, None]).fields["row"] == 5
    # Values in lists are null, or the error is of another column.
    assert place(error).message == "input a, rows 3 to 6 (from 0): column `x` has 1 nulls"


def test_rows_of_a_batch_are_named_if_no_row_is_known() -> None:
    failed = ExecutionFailed("failed")
    failed.blame_input()
    error = place(failed, first=8)
    assert error.message == "input a from row 8 (from 0) to b, row 1: failed"
    assert (error.fault, error.status) == (failed.fault, "INVALID_ARGUMENT")
    assert "row" not in error.fields
    unknown = place(failed, source=Places(is_known=False), first=8)
    assert unknown.message == "input a to b, in a batch of 4 rows: failed"
    # A row beyond the batch is none of it.
    assert "rows 3 to 6" in place(ContractError("bad", row=4)).message


def test_input_that_cannot_be_read_again_leaves_the_unit() -> None:
    error = place(ContractError("bad", row=1), source=Places(OSError("gone")))
    assert error.message == "input part-0, in a batch of 4 rows: bad"
    assert error.fields == {"file": "part-0"}


def test_errors_of_no_row_have_no_place() -> None:
    error = QueueFull("later")
    assert place(error) is error


def test_rows_of_a_stream_have_its_numbers_without_a_filter() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("n", pa.int64())])):
        pass
    source = StreamSource(pa.BufferReader(sink.getvalue()))
    (unit,) = source.units()
    assert source.locate(unit, 7, None) == Position("standard input", 7)
    assert source.locate(unit, 7, parse_filter("n > 1")) == Position("standard input", None)
