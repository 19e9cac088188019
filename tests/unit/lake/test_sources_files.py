"""Files as input: schemas, order, hive folders, filters, changes during a job, and many files."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.dataset as pads
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_examples import up_to

from iskander.errors import FilterError, SourceChanged, SourceError, Unsupported
from iskander.lake.filters import parse_filter
from iskander.lake.plan import ROWS_MAX, Unit, limit_units, make_unit
from iskander.lake.sources import JobSource, open_source
from iskander.lake.sources import reading as reading_module
from iskander.lake.sources.files import FileSource
from iskander.lake.sources.stream import StreamSource


def table(start: int, count: int) -> pa.Table:
    numbers = range(start, start + count)
    names = [f"n{number % 7}" for number in numbers]
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    return pa.table({"id": list(numbers), "name": names}, schema=schema)


def write(path: Path, data: pa.Table, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        pa_csv.write_csv(data, path)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, data.schema) as writer:
            writer.write_table(data, max_chunksize=options.get("row_group_size"))
    else:
        pq.write_table(data, path, **options)
    return path


def read_all(
    source: JobSource,
    columns: Sequence[str] | None = None,
    filter: str | None = None,
    batch_rows: int = 1000,
    units: Sequence[Unit] | None = None,
) -> list[dict[str, Any]]:
    parsed = parse_filter(filter) if filter else None
    rows: list[dict[str, Any]] = []
    for each in source.units() if units is None else units:
        for batch in source.read(each, columns, parsed, batch_rows):
            rows += batch.to_pylist()
    return rows


def ids(source: JobSource, **options: Any) -> list[int]:
    return [row["id"] for row in read_all(source, **options)]


@pytest.mark.parametrize("end", [".parquet", ".csv", ".arrow"])
def test_each_format_gives_equal_rows(tmp_path: Path, end: str) -> None:
    source = FileSource([str(write(tmp_path / f"a b ü%20{end}", table(0, 100)))])
    assert source.schema == table(0, 1).schema
    assert read_all(source) == table(0, 100).to_pylist()
    assert source.count(source.units()[0], None) == 100
    source.close()


@pytest.mark.parametrize("end", [".parquet", ".arrow"])
def test_format_is_found_without_an_extension(tmp_path: Path, end: str) -> None:
    path = write(tmp_path / f"x{end}", table(0, 5)).rename(tmp_path / "part-0")
    assert ids(FileSource([str(path)])) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("end", [".parquet", ".arrow"])
def test_large_file_is_cut_between_row_groups(tmp_path: Path, end: str) -> None:
    path = write(tmp_path / f"x{end}", table(0, 1000), row_group_size=100)
    whole, cut = (FileSource([str(path)], unit_bytes=size) for size in (1 << 30, 1500))
    assert len(whole.units()) == 1 < len(cut.units())
    assert [each.rows for each in whole.units()] == [1000]
    assert sum(each.rows or 0 for each in cut.units()) == 1000
    assert ids(cut) == ids(whole) == list(range(1000))
    assert abs(sum(each.bytes for each in cut.units()) - path.stat().st_size) < 100


def test_union_without_fields_is_an_error_of_its_file(tmp_path: Path) -> None:
    """pyarrow ends the process when it takes rows of such a column."""
    column = pa.UnionArray.from_sparse(pa.array([], pa.int8()), [])
    batch = pa.record_batch([pa.array([], pa.int64()), column], ["id", "empty"])
    path = tmp_path / "x.arrow"
    with pa.ipc.new_file(str(path), batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(SourceError, match="column 'empty' has a union without fields"):
        FileSource([str(path)])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    with pytest.raises(SourceError, match="column 'empty' has a union without fields"):
        StreamSource(pa.BufferReader(sink.getvalue()))


def test_small_files_are_joined(tmp_path: Path) -> None:
    for index in range(20):
        write(tmp_path / f"{index:02}.parquet", table(index * 5, 5))
    source = FileSource([str(tmp_path)])
    assert [each.rows for each in source.units()] == [100]
    assert ids(source) == list(range(100))


def test_small_input_has_several_units(tmp_path: Path) -> None:
    assert reading_module.target_bytes(1 << 30, 128 << 20) == 32 << 20
    assert reading_module.target_bytes(1 << 40, 128 << 20) == 128 << 20
    assert reading_module.target_bytes(10, 128 << 20) == 4 << 20
    assert reading_module.target_bytes(10, 5) == 5


@pytest.mark.parametrize("batch_rows", [1, 7, 100, 101, 5000])
def test_batches_do_not_depend_on_row_groups(tmp_path: Path, batch_rows: int) -> None:
    many = write(tmp_path / "a.parquet", table(0, 500), row_group_size=13)
    one = write(tmp_path / "b.parquet", table(0, 500))
    sizes = []
    for path in (many, one):
        source = FileSource([str(path)])
        batches = list(source.read(source.units()[0], None, None, batch_rows))
        sizes.append([batch.num_rows for batch in batches])
    assert sizes[0] == sizes[1]
    assert set(sizes[0][:-1]) <= {batch_rows} and sum(sizes[0]) == 500


def test_order_is_that_of_inputs_and_then_of_paths(tmp_path: Path) -> None:
    for name, start in (("b/2.parquet", 2), ("b/10.parquet", 1), ("a/é z.parquet", 3)):
        write(tmp_path / name, table(start, 1))
    inputs = [str(tmp_path / "b"), str(tmp_path / "a")]
    assert ids(FileSource(inputs)) == [1, 2, 3]
    assert ids(FileSource(inputs[::-1])) == [3, 1, 2]
    first, second = FileSource(inputs), FileSource(inputs)
    assert first.units() == second.units() and first.snapshot == second.snapshot
    assert FileSource(inputs[::-1]).snapshot != first.snapshot


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.parquet", [1]),
        ("*/*.parquet", [2, 3]),
        ("**/*.parquet", [1, 4, 2, 3]),
        ("**", [1, 4, 2, 3]),
        ("[ab]/?.parquet", [2, 3]),
        ("a*", [4, 2, 1]),
        ("file://{}/a/*.parquet", [2]),
        ("a [[]1].parquet", [5]),
    ],
)
def test_glob(tmp_path: Path, pattern: str, expected: list[int]) -> None:
    names = ("a1.parquet", "a/1.parquet", "b/2.parquet", "a/c/3.parquet")
    for start, name in zip((1, 2, 3, 4), names, strict=True):
        write(tmp_path / name, table(start, 1))
    write(tmp_path / "_hidden.parquet", table(9, 1))
    if expected == [5]:
        write(tmp_path / "a [1].parquet", table(5, 1))
    where = pattern.format(tmp_path) if "://" in pattern else str(tmp_path / pattern)
    assert sorted(ids(FileSource([where]))) == sorted(expected)


def test_existing_path_is_not_a_glob(tmp_path: Path) -> None:
    write(tmp_path / "a[1].parquet", table(7, 1))
    write(tmp_path / "a1.parquet", table(8, 1))
    assert ids(FileSource([str(tmp_path / "a[1].parquet")])) == [7]
    assert ids(FileSource([f"file://{tmp_path}/a%5B1%5D.parquet"])) == [7]


def test_hidden_files_of_folders_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", table(0, 1))
    for name in ("_SUCCESS", "_staging/x.parquet", ".a.parquet.crc", "sub/.tmp/y.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"nothing")
    assert ids(FileSource([str(tmp_path)])) == [0]


@pytest.mark.parametrize("where", ["missing.parquet", "empty", "*.csv", "s3x://bucket/key"])
def test_input_without_files_is_rejected_by_name(tmp_path: Path, where: str) -> None:
    (tmp_path / "empty").mkdir()
    name = where if "://" in where else str(tmp_path / where)
    with pytest.raises(SourceError) as caught:
        FileSource([name])
    assert where in caught.value.message


def test_file_in_two_inputs_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", table(0, 1))
    with pytest.raises(SourceError, match="two inputs"):
        FileSource([str(path), str(tmp_path)])


def test_unknown_and_mixed_formats_are_rejected(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", table(0, 1))
    (tmp_path / "readme.txt").write_text("hello")
    with pytest.raises(SourceError, match=r"readme\.txt"):
        FileSource([str(tmp_path)])
    (tmp_path / "readme.txt").unlink()
    write(tmp_path / "b.csv", table(0, 1))
    with pytest.raises(SourceError, match=r"b\.csv.*csv.*a\.parquet.*parquet"):
        FileSource([str(tmp_path)])


@pytest.mark.parametrize("end", [".parquet", ".arrow"])
@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"id": pa.array([1], pa.int32()), "name": ["x"]}, ("'id'", "int32", "int64")),
        ({"id": [1]}, ("'name'", "absent", "string")),
        ({"id": [1], "name": ["x"], "more": [1.0]}, ("'more'", "double", "absent")),
    ],
)
def test_other_schema_is_rejected_with_file_column_and_types(
    tmp_path: Path, end: str, other: dict[str, Any], named: tuple[str, ...]
) -> None:
    write(tmp_path / f"a{end}", table(0, 3))
    write(tmp_path / f"b{end}", pa.table(other))
    with pytest.raises(SourceError) as caught:
        FileSource([str(tmp_path)])
    for each in (f"b{end}", f"a{end}", *named):
        assert each in caught.value.message


@pytest.mark.parametrize("end", [".parquet", ".arrow"])
def test_order_of_columns_nullability_and_metadata_may_differ(tmp_path: Path, end: str) -> None:
    first = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])
    write(tmp_path / f"a{end}", table(0, 3).cast(first).replace_schema_metadata({"x": "y"}))
    nulls = pa.table({"name": ["z"], "id": pa.array([None], pa.int64())})
    write(tmp_path / f"b{end}", nulls)
    source = FileSource([str(tmp_path)])
    assert read_all(source) == [*table(0, 3).to_pylist(), {"id": None, "name": "z"}]
    assert source.schema.metadata is None and all(each.nullable for each in source.schema)


@pytest.mark.parametrize("end", [".parquet", ".arrow"])
def test_file_without_rows_gives_no_batch(tmp_path: Path, end: str) -> None:
    path = write(tmp_path / f"a{end}", table(0, 0))
    source = FileSource([str(path)])
    (only,) = source.units()
    assert only.rows == 0 and list(source.read(only, None, None, 10)) == []
    assert source.count(only, None) == 0 == source.count(only, parse_filter("id > 1"))
    write(tmp_path / f"b{end}", table(5, 2))
    assert ids(FileSource([str(tmp_path)])) == [5, 6]


def test_parquet_without_row_groups_gives_no_batch(tmp_path: Path) -> None:
    with pq.ParquetWriter(tmp_path / "a.parquet", table(0, 1).schema):
        pass
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 0
    source = FileSource([str(tmp_path)])
    assert [each.rows for each in source.units()] == [0] and ids(source) == []


@pytest.mark.parametrize("end", [".parquet", ".arrow"])
@pytest.mark.parametrize("content", [b"", b"PAR1", b"ARROW1\0\0nothing", b"\0" * 100])
def test_damaged_file_is_rejected_by_name(tmp_path: Path, end: str, content: bytes) -> None:
    write(tmp_path / f"a{end}", table(0, 3))
    (tmp_path / f"b{end}").write_bytes(content)
    with pytest.raises(SourceError, match=f"b{end}"):
        FileSource([str(tmp_path)])


def test_empty_csv_files_give_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    with pytest.raises(SourceError, match="no columns"):
        FileSource([str(tmp_path)])
    (tmp_path / "b.csv").write_text("id,name\n")
    write(tmp_path / "c.csv", table(0, 2))
    assert ids(FileSource([str(tmp_path)])) == [0, 1]


def test_types_of_csv_files_are_joined(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,name,x\n1,,\n")
    (tmp_path / "b.csv").write_text("name,id,x\nz,1.5,\n")
    source = FileSource([str(tmp_path)])
    assert source.schema.types == [pa.float64(), pa.string(), pa.string()]
    assert [row["id"] for row in read_all(source)] == [1.0, 1.5]


def test_given_types_of_csv_columns_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('zip,text\n01234,"two\nlines"\n')
    source = open_source([str(tmp_path / "a.csv")], types={"zip": pa.string()})
    assert read_all(source) == [{"zip": "01234", "text": "two\nlines"}]


def test_quoted_line_ends_of_csv_may_be_at_the_end_of_a_block(tmp_path: Path) -> None:
    text = "a\n" * 50_000
    (tmp_path / "a.csv").write_text("id,text\n" + f'1,"{text}"\n' * 100)
    rows = read_all(FileSource([str(tmp_path)]))
    assert len(rows) == 100 and {row["text"] for row in rows} == {text}


def test_other_columns_of_csv_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,name\n1,x\n")
    (tmp_path / "b.csv").write_text("id,nam\n1,x\n")
    with pytest.raises(SourceError, match=r"b\.csv: column 'name' is absent"):
        FileSource([str(tmp_path)])


def test_compressed_csv(tmp_path: Path) -> None:
    with pa.output_stream(tmp_path / "a.csv.gz", compression="gzip") as file:
        pa_csv.write_csv(table(0, 50), file)
    assert ids(FileSource([str(tmp_path)])) == list(range(50))


def hive_folder(root: Path, end: str = ".parquet") -> Path:
    for start, folder in enumerate(("y=2024/c=a%20b", "y=2024/c=ü", "y=-1/c=07")):
        write(root / folder / f"f{end}", table(start * 10, 2))
    write(root / "y=__HIVE_DEFAULT_PARTITION__" / "c=x" / f"f{end}", table(30, 2))
    return root


@pytest.mark.parametrize("end", [".parquet", ".csv", ".arrow"])
def test_hive_folders_are_columns(tmp_path: Path, end: str) -> None:
    source = FileSource([str(hive_folder(tmp_path, end))])
    assert source.schema.names == ["id", "name", "y", "c"]
    assert source.schema.field("y").type == pa.int64()
    values = {(row["id"], row["y"], row["c"]) for row in read_all(source)}
    assert values >= {(0, 2024, "a b"), (11, 2024, "ü"), (20, -1, "07"), (31, None, "x")}
    assert [row for row in read_all(source, columns=["c"], filter="y == -1")] == [
        {"c": "07"},
        {"c": "07"},
    ]
    assert ids(source, filter="y is null and id > 30") == [31]
    assert ids(source, filter="y == 2024 and c == 'ü'") == [10, 11]


def test_hive_values_equal_those_of_pyarrow(tmp_path: Path) -> None:
    """The writer encodes names and values; strings are strings on both sides."""
    data = pa.table({"id": [1, 2, 3], "k k": ["a/b", "c=d", "%"]})
    pads.write_dataset(
        data,
        tmp_path,
        format="parquet",
        partitioning=pads.partitioning(pa.schema([("k k", pa.string())]), flavor="hive"),
    )
    rows = read_all(FileSource([str(tmp_path)]))
    assert sorted(row["id"] for row in rows) == [1, 2, 3]
    assert {row["id"]: row["k k"] for row in rows} == {1: "a/b", 2: "c=d", 3: "%"}


def test_hive_column_that_is_in_the_files_is_read_from_them(tmp_path: Path) -> None:
    write(tmp_path / "id=99" / "a.parquet", table(0, 2))
    assert ids(FileSource([str(tmp_path)])) == [0, 1]


def test_files_below_other_hive_columns_are_rejected(tmp_path: Path) -> None:
    write(tmp_path / "x=1" / "a.parquet", table(0, 2))
    write(tmp_path / "z" / "b.parquet", table(0, 2))
    with pytest.raises(SourceError, match=r"b\.parquet.*none.*x"):
        FileSource([str(tmp_path)])


@pytest.mark.parametrize("end", [".parquet", ".csv", ".arrow"])
def test_columns_are_selected_in_the_given_order(tmp_path: Path, end: str) -> None:
    source = FileSource([str(write(tmp_path / f"a{end}", table(0, 3)))])
    (first, *_) = source.read(source.units()[0], ["name", "id"], None, 10)
    assert first.schema.names == ["name", "id"]
    assert read_all(source, columns=["name"], filter="id == 2") == [{"name": "n2"}]


@pytest.mark.parametrize("end", [".parquet", ".csv", ".arrow"])
def test_filter_changes_counts_and_not_the_batch_size(tmp_path: Path, end: str) -> None:
    path = write(tmp_path / f"a{end}", table(0, 1000), row_group_size=100)
    source = FileSource([str(path)])
    (only,) = source.units()
    parsed = parse_filter("name == 'n3' and id >= 300")
    expected = [number for number in range(300, 1000) if number % 7 == 3]
    assert source.count(only, parsed) == len(expected)
    batches = list(source.read(only, ["id"], parsed, 30))
    assert [batch.num_rows for batch in batches] == [30, 30, 30, 10]
    assert [number for batch in batches for number in batch["id"].to_pylist()] == expected
    assert list(source.read(only, ["id"], parse_filter("id < 0"), 30)) == []


def test_filter_leaves_row_groups_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "y=1" / "a.parquet", table(0, 1000), row_group_size=100)
    source = FileSource([str(path.parent.parent)])
    groups: list[list[int]] = []
    real = reading_module.read_groups

    def spy(
        file: Any, path: str, footer: Any, wanted: Sequence[int], *rest: Any, **options: Any
    ) -> Iterator[Any]:
        groups.append(list(wanted))
        return real(file, path, footer, wanted, *rest, **options)

    monkeypatch.setattr(reading_module, "read_groups", spy)
    assert ids(source, filter="id in [250, 930]") == [250, 930]
    assert ids(source, filter="y == 2") == []
    assert groups == [[2, 9], []]


@pytest.mark.parametrize(
    "filter",
    ["x != 5", "not (x == 5)", "not (x >= 5)", "x not in [5]", "not x in [5]", "x != 5 and i > 0"],
)
def test_statistics_that_do_not_count_nan_leave_no_row_out(tmp_path: Path, filter: str) -> None:
    data = pa.table({"x": [5.0, float("nan"), 5.0], "i": [1, 2, 3]})
    write(tmp_path / "a.parquet", data)
    write(tmp_path / "a.arrow", data)
    for end in ("parquet", "arrow"):
        rows = read_all(FileSource([str(tmp_path / f"a.{end}")]), filter=filter)
        assert [row["i"] for row in rows] == [2]


NUMBERS = st.one_of(st.none(), st.sampled_from([float("nan"), float("inf"), -1.0, -0.0, 0.0, 5.0]))
LEAVES = st.one_of(
    st.builds(
        "{} {} {}".format,
        st.sampled_from(["x", "y"]),
        st.sampled_from(["==", "!=", "<", "<=", ">", ">=", "in", "not in"]).map(str),
        st.sampled_from(["0", "5", "-1", "2.5", "1e400"]),
    ).map(lambda text: re.sub(r"in (\S+)$", r"in [\1]", text)),
    st.sampled_from(["x is null", "y is not null"]),
)
CONDITIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        inner.map("not ({})".format),
        st.builds("({}) and ({})".format, inner, inner),
        st.builds("({}) or ({})".format, inner, inner),
    ),
    max_leaves=4,
)


@settings(max_examples=up_to(150), deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=6), CONDITIONS)
def test_row_groups_that_are_left_out_have_no_row_of_the_filter(
    values: list[tuple[float | None, float | None]], filter: str
) -> None:
    columns = [pa.array([row[index] for row in values], pa.float64()) for index in range(2)]
    data = pa.table({"x": columns[0], "y": columns[1], "i": list(range(len(values)))})
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder, "a.parquet"), data, row_group_size=2)
        found = [row["i"] for row in read_all(FileSource([str(path)]), ["i"], filter)]
    expression = parse_filter(filter).expression(data.schema)
    assert found == data.filter(expression)["i"].to_pylist()


def test_limit_counts_rows_after_the_filter(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", table(0, 1000), row_group_size=50)
    source = FileSource([str(path)], unit_bytes=1)
    parsed = parse_filter("id >= 120")
    kept = limit_units(source.units(), 75, lambda each: source.count(each, parsed))
    assert ids(source, filter="id >= 120", units=kept, batch_rows=8) == list(range(120, 195))
    assert len(kept) == 4


def test_unknown_columns_are_rejected_before_reading(tmp_path: Path) -> None:
    source = FileSource([str(write(tmp_path / "a.parquet", table(0, 3)))])
    (only,) = source.units()
    with pytest.raises(SourceError, match="'name'"):
        source.read(only, ["nam"], None, 10)
    with pytest.raises(FilterError, match="zz"):
        source.read(only, None, parse_filter("zz > 1"), 10)


@pytest.mark.parametrize("end", [".parquet", ".csv", ".arrow"])
def test_two_columns_of_one_name(tmp_path: Path, end: str) -> None:
    """Other columns can be read; the twofold one cannot be named."""
    arrays = [pa.array([1, 2]), pa.array([3, 4]), pa.array([5, 6])]
    twofold = pa.Table.from_arrays(arrays, names=["a", "a", "b"])
    source = FileSource([str(write(tmp_path / f"x{end}", twofold))])
    (only,) = source.units()
    assert source.schema.names == ["a", "a", "b"]
    assert read_all(source, columns=["b"]) == [{"b": 5}, {"b": 6}]
    for columns in (["a"], None):
        with pytest.raises(SourceError, match="2 columns 'a'"):
            source.read(only, columns, None, 10)


def changes(path: Path, how: str) -> None:
    status = path.stat()
    if how == "gone":
        path.unlink()
    elif how == "larger":
        write(path, table(0, 5000))
    elif how == "time":
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    elif how == "replaced":
        other = path.with_name("other.parquet")
        shutil.copy(path, other)
        other.replace(path)


@pytest.mark.parametrize("how", ["gone", "larger", "time", "replaced"])
def test_file_that_changed_since_the_plan_is_rejected(tmp_path: Path, how: str) -> None:
    path = write(tmp_path / "a.parquet", table(0, 1000))
    source = FileSource([str(path)])
    changes(path, how)
    with pytest.raises(SourceChanged, match=r"a\.parquet"):
        ids(source)


@pytest.mark.parametrize("how", ["gone", "larger", "time"])
def test_file_that_changes_while_it_is_read_is_rejected(tmp_path: Path, how: str) -> None:
    path = write(tmp_path / "a.parquet", table(0, 1000), row_group_size=100)
    source = FileSource([str(path)])
    batches = source.read(source.units()[0], None, None, 100)
    next(batches)
    changes(path, how)
    with pytest.raises(SourceChanged, match=r"a\.parquet"):
        list(batches)


def test_file_that_changes_is_rejected_under_a_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", table(0, 1000), row_group_size=100)
    source = FileSource([str(path)])
    (only,) = source.units()
    cut = make_unit(0, {**only.locator, ROWS_MAX: 150}, rows=150, bytes=1)
    batches = source.read(cut, None, None, 100)
    assert next(batches).num_rows == 100
    changes(path, "time")
    with pytest.raises(SourceChanged):
        list(batches)


def test_snapshot_changes_with_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", table(0, 10))
    before = FileSource([str(path)])
    changes(path, "time")
    after = FileSource([str(path)])
    assert before.snapshot != after.snapshot
    assert before.units()[0].name != after.units()[0].name


@pytest.mark.long
def test_ten_thousand_files_open_each_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning opens no file twice, and joins the files into few units of bounded length."""
    from iskander.lake.sources import files as files_module

    first = write(tmp_path / "f00000.parquet", table(0, 2))
    for index in range(1, 10_000):
        os.link(first, tmp_path / f"f{index:05}.parquet")
    paths: list[str] = []
    real = files_module.open_file

    def spy(filesystem: Any, path: str) -> Any:
        paths.append(path)
        return real(filesystem, path)

    monkeypatch.setattr(files_module, "open_file", spy)
    source = FileSource([str(tmp_path)])
    assert len(paths) == len(set(paths)) == 10_000
    units = source.units()
    assert sum(each.rows or 0 for each in units) == 20_000
    assert max(len(each.locator["files"]) for each in units) <= reading_module.FILES_PER_UNIT
    assert len(units) == 20
    assert ids(source, units=units[:1]) == [0, 1] * 512


def stream_of(data: pa.Table, **options: Any) -> StreamSource:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, data.schema) as writer:
        writer.write_table(data, max_chunksize=30)
    return StreamSource(pa.BufferReader(sink.getvalue()))


def test_equal_streams_have_different_snapshots() -> None:
    """Two jobs that append to one output must not take each other for the same job."""
    first, second = stream_of(table(0, 3)), stream_of(table(0, 3))
    assert first.snapshot == first.snapshot != second.snapshot


def test_stream_is_one_unit_that_is_read_once() -> None:
    source = stream_of(table(0, 100).replace_schema_metadata({"x": "y"}))
    (only,) = source.units()
    assert only.rows is None and not source.is_resumable and source.schema.metadata is None
    batches = list(source.read(only, ["id"], parse_filter("name != 'n0'"), 50))
    assert [batch.num_rows for batch in batches] == [50, 35]
    with pytest.raises(Unsupported, match="once"):
        source.read(only, None, None, 10)
    with pytest.raises(Unsupported, match="counted"):
        source.count(only, None)
    source.close()


def test_stream_stops_at_the_limit() -> None:
    source = stream_of(table(0, 100))
    (only,) = limit_units(source.units(), 42, lambda each: source.count(each, None))
    assert ids(source, units=[only]) == list(range(42))


@pytest.mark.parametrize("cut", [0, 10, 200])
def test_damaged_stream_is_rejected(cut: int) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table(0, 1).schema) as writer:
        writer.write_table(table(0, 1000))
    content = sink.getvalue().to_pybytes()[: cut or 3]
    content = content if cut < 200 else sink.getvalue().to_pybytes()[:-3000]
    with pytest.raises(SourceError, match="standard input"):
        ids(StreamSource(pa.BufferReader(content)))


def test_table_or_stream_beside_files_is_rejected(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.parquet", table(0, 1)))
    for other in ("-", "iceberg://c/n.t", "delta://x"):
        with pytest.raises(SourceError, match=other):
            open_source([path, other])


NOT_UTF8 = b"a\xff".decode("utf-8", "surrogateescape")


@pytest.mark.parametrize("where", ["", "*.parquet", "**"])
@pytest.mark.parametrize("name", [f"{NOT_UTF8}.parquet", f"p={NOT_UTF8}/a.parquet"])
def test_file_name_that_is_not_utf8_is_rejected(tmp_path: Path, where: str, name: str) -> None:
    """Arrow cannot name such a file; without it the results would lack its rows."""
    file = write(tmp_path / "in" / "b.parquet", table(0, 3))
    (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
    shutil.copy(file, tmp_path / "in" / name)
    with pytest.raises(SourceError, match=r"file name `.*a\\xff.*` is not UTF-8"):
        open_source([str(tmp_path / "in" / where)])


def test_path_that_is_not_utf8_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / NOT_UTF8
    folder.mkdir()
    shutil.copy(write(tmp_path / "a.parquet", table(0, 3)), folder)
    for path in (str(folder), str(folder / "a.parquet"), f"{NOT_UTF8}.parquet", "s3://a/\ud800"):
        with pytest.raises(SourceError, match="is not UTF-8: paths must be"):
            open_source([path])
    with pytest.raises(SourceError, match="a%FF` is not UTF-8"):
        open_source(["file:///a%FF"])
    monkeypatch.chdir(folder)
    with pytest.raises(SourceError, match=r"the working folder .* is not UTF-8"):
        open_source(["a.parquet"])


def test_hive_value_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    """Regression test: `%FE` and `%FF` were one value, the replacement character."""
    for value in ("%FE", "%FF"):
        write(tmp_path / f"p={value}" / "a.parquet", table(0, 3))
    with pytest.raises(SourceError, match=r"`%F[EF]` is not UTF-8"):
        open_source([str(tmp_path)])
