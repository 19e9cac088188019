"""Types of text: columns of CSV files and hive folders keep their values, or are errors."""

from __future__ import annotations

import math
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_examples import up_to

from iskander.errors import SourceError
from iskander.lake.sources import reading as reading_module
from iskander.lake.sources.files import FileSource

F32 = pa.float32()


def csv(folder: Path, *columns: str, name: str = "a.csv") -> Path:
    """Write a file whose columns are `name,value,value,...`."""
    rows = zip(*(column.split(",") for column in columns), strict=True)
    path = folder / name
    path.write_text("".join(",".join(row) + "\n" for row in rows))
    return path


def opened(path: Path, **types: pa.DataType) -> tuple[pa.Schema, dict[str, list[Any]]]:
    source = FileSource([str(path)], types=types)
    batches = [batch for each in source.units() for batch in source.read(each, None, None, 1000)]
    return source.schema, pa.Table.from_batches(batches, source.schema).to_pydict()


@pytest.mark.parametrize(
    ("texts", "kind", "values"),
    [
        ("1,-20,", pa.int64(), [1, -20, None]),
        ("9007199254740993,1", pa.int64(), [2**53 + 1, 1]),
        ("9223372036854775808,1", pa.string(), None),
        ("9007199254740993,1.5", pa.string(), None),
        ("01,1", pa.string(), None),
        ("+1,1", pa.string(), None),
        ("-0,1", pa.float64(), [0.0, 1.0]),
        (" 1,1", pa.string(), None),
        ("0x10,1", pa.string(), None),
        ("007.5,1", pa.string(), None),
        ("1,x", pa.string(), None),
        ("1,NA", pa.string(), None),
        ("5.123456789012345,2.5", pa.float64(), [5.123456789012345, 2.5]),
        ("20.10,3.50", pa.float64(), [20.1, 3.5]),
        ("1.1,1.10", pa.string(), None),
        ("1.0,1.25,1e-05,1E5", pa.float64(), [1.0, 1.25, 1e-5, 1e5]),
        ("12345678901234567.89,1.55", pa.string(), None),
        ("1e400,1", pa.string(), None),
        ("NaN,inf,1.5", pa.float64(), None),
        ("true,false,", pa.bool_(), [True, False, None]),
        ("True,False", pa.bool_(), [True, False]),
        ("true,1", pa.string(), None),
        ("2024-01-05,", pa.date32(), None),
        ("2024-01-05,2024-01-05 10:00:00", pa.string(), None),
        ("2024-01-05 10:00:00,2024-01-05T11:00:00", pa.timestamp("s"), None),
        ("2024-01-05T10:00:00Z,2024-01-05T10:00:01Z", pa.timestamp("s", "UTC"), None),
        ("2024-01-05T10:00:00+02:00,2024-01-05T10:00:01Z", pa.string(), None),
        ("2024-01-05 10:00:00.5,2024-01-05 10:00:01", pa.timestamp("ns"), None),
        ("12:30:00,", pa.time32("s"), None),
        ("12:30,13:40", pa.string(), None),
        (",", pa.string(), ["", ""]),
    ],
)
def test_column_that_no_model_reads_keeps_its_values(
    tmp_path: Path, texts: str, kind: pa.DataType, values: list[Any] | None
) -> None:
    schema, found = opened(csv(tmp_path, f"c,{texts}", "r" + ",1" * (texts.count(",") + 1)))
    assert schema.field("c").type == kind
    if pa.types.is_string(kind):
        assert found["c"] == texts.split(",")
    elif values is not None:
        assert found["c"] == values


@pytest.mark.parametrize("late", ["01", "x", "9223372036854775808"])
def test_one_value_at_the_end_makes_the_whole_column_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """Types come from all rows of all files, and not from the first block."""
    monkeypatch.setattr(reading_module, "CSV_BLOCK_BYTES", 600)
    rows = 1000
    (tmp_path / "a.csv").write_text("id\n" + "12345\n" * (rows + 10) + late + "\n")
    (tmp_path / "b.csv").write_text("id\n7\n")
    schema, found = opened(tmp_path)
    assert schema.field("id").type == pa.string()
    assert found["id"][-2:] == [late, "7"] and found["id"][0] == "12345"
    assert sum(each.rows or 0 for each in FileSource([str(tmp_path)]).units()) == rows + 12


@pytest.mark.parametrize(
    ("texts", "wanted", "kind", "values"),
    [
        ("16777217,3", F32, pa.int64(), [16777217, 3]),
        ("1,2.5,", F32, pa.float64(), [1.0, 2.5, None]),
        ("5.123456789012345,1", F32, pa.float64(), [5.123456789012345, 1.0]),
        ("NA,null,1", F32, pa.int64(), [None, None, 1]),
        (" 1, 2.5", F32, pa.float64(), [1.0, 2.5]),
        ("inf,1", F32, pa.float64(), [float("inf"), 1.0]),
        ("true,false", F32, pa.bool_(), [True, False]),
        ("30.5,1", pa.int32(), pa.float64(), [30.5, 1.0]),
        ("18446744073709551615,1", pa.uint64(), pa.uint64(), [2**64 - 1, 1]),
        ("0,1", pa.bool_(), pa.int64(), [0, 1]),
        ("01,1", pa.string(), pa.string(), ["01", "1"]),
        ("2024-01-05,", pa.timestamp("us"), pa.date32(), None),
        ("1.5,2", pa.decimal128(5, 2), pa.decimal128(5, 2), None),
        (",", F32, F32, [None, None]),
    ],
)
def test_column_of_a_model_has_the_values_of_the_file(
    tmp_path: Path, texts: str, wanted: pa.DataType, kind: pa.DataType, values: list[Any] | None
) -> None:
    path = csv(tmp_path, f"c,{texts}", "r" + ",1" * (texts.count(",") + 1))
    schema, found = opened(path, c=wanted)
    assert schema.field("c").type == kind
    assert values is None or found["c"] == values


@pytest.mark.parametrize(
    ("texts", "wanted", "row", "bad"),
    [
        ("1,abc", F32, 1, "abc"),
        ("1,2.5,true", F32, 2, "true"),
        ("true,maybe", F32, 1, "maybe"),
        ("1.5,16777217", F32, 1, "16777217"),
        ("16777217,1.5", F32, 0, "16777217"),
        ("9007199254740993,1.5", pa.float64(), 0, "9007199254740993"),
        ("0x10,1", F32, 0, "0x10"),
        ("1e400,1", F32, 0, "1e400"),
        ("2024-01-05,soon", pa.timestamp("us"), 1, "soon"),
    ],
)
def test_text_that_is_no_value_of_the_type_is_an_error(
    tmp_path: Path, texts: str, wanted: pa.DataType, row: int, bad: str
) -> None:
    path = csv(tmp_path, f"c,{texts}", "r" + ",1" * (texts.count(",") + 1))
    with pytest.raises(SourceError, match=rf"a\.csv: column 'c': row {row} has '{bad}'") as caught:
        opened(path, c=wanted)
    assert "not a valid" not in caught.value.message
    name = {"float": "float32", "double": "float64"}.get(str(wanted), str(wanted))
    assert name in caught.value.message


def test_types_of_a_model_column_that_have_nothing_in_common(tmp_path: Path) -> None:
    csv(tmp_path, "c,1")
    csv(tmp_path, "c,true", name="b.csv")
    with pytest.raises(SourceError, match=r"b\.csv: column 'c' has bool.*int64 in .*a\.csv"):
        opened(tmp_path, c=F32)


def test_integer_of_one_file_that_the_decimals_of_another_cannot_have(tmp_path: Path) -> None:
    csv(tmp_path, "c,1,9007199254740993", "d,1,16777217")
    csv(tmp_path, "c,1.5", "d,1.5", name="b.csv")
    schema, found = opened(tmp_path)
    assert schema.types == [pa.string(), pa.float64()]
    assert found == {"c": ["1", "9007199254740993", "1.5"], "d": [1.0, 16777217.0, 1.5]}
    with pytest.raises(SourceError, match=r"b\.csv: column 'd' has float64, but int64 in .*a\.csv"):
        opened(tmp_path, d=F32)


def test_bytes_that_are_no_text_stay_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"c,d\n\xff,1\n")
    schema, found = opened(tmp_path)
    assert schema.field("c").type == pa.binary() and found["c"] == [b"\xff"]
    with pytest.raises(SourceError, match=r"column 'c': row 0 has .*wanted string"):
        opened(tmp_path, c=pa.string())


def hive(folder: Path, *values: str, end: str = "parquet") -> Path:
    for index, value in enumerate(values):
        path = folder / f"k={value}" / f"f.{end}"
        path.parent.mkdir()
        if end == "csv":
            path.write_text(f"i\n{index}\n")
        else:
            pq.write_table(pa.table({"i": [index]}), path)
    return folder


@pytest.mark.parametrize("end", ["parquet", "csv"])
@pytest.mark.parametrize(
    ("values", "wanted", "kind"),
    [
        (("01", "1"), None, pa.string()),
        (("-0", "1"), None, pa.string()),
        (("1", "20"), None, pa.int64()),
        (("1.5", "2"), None, pa.string()),
        (("01", "7"), pa.string(), pa.string()),
        (("1", "7"), pa.string(), pa.string()),
        (("1.5", "2"), F32, pa.float64()),
        (("1", "2"), F32, pa.int64()),
        (("2024-01-05", "2024-01-06"), pa.date32(), pa.date32()),
    ],
)
def test_values_of_hive_folders(
    tmp_path: Path, end: str, values: tuple[str, ...], wanted: pa.DataType | None, kind: pa.DataType
) -> None:
    types = {} if wanted is None else {"k": wanted}
    schema, found = opened(hive(tmp_path, *values, end=end), **types)
    assert schema.field("k").type == kind
    assert found["k"] == pa.array(values).cast(kind).to_pylist()


def test_hive_value_that_is_no_value_of_the_type_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        SourceError, match=r"k=x/f\.parquet: .* 'k': its folder has 'x'; wanted float32"
    ):
        opened(hive(tmp_path, "1", "x"), k=F32)


def instant(text: str) -> str:
    """A timestamp without other spellings of the same one."""
    plain = text.replace("T", " ").removesuffix("Z")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


TEXTS = st.one_of(
    st.text("0123456789.-+eE", max_size=20),
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(repr),
    st.decimals(allow_nan=False, allow_infinity=False, places=3).map(str),
    st.sampled_from(
        ["", "NA", "null", "true", "False", "TRUE", "nan", "inf", "1e400", "007", "0x1"]
    ),
    st.datetimes().map(str),
    st.dates().map(str),
    st.times().map(str),
    st.sampled_from(["2024-01-05T10:00:00Z", "2024-01-05T10:00:00+01:00", "12:30", " 1", "1 "]),
)


@settings(max_examples=up_to(300))
@given(
    st.lists(TEXTS, min_size=1, max_size=6)
    | TEXTS.flatmap(lambda text: st.lists(st.sampled_from([text, "", "1"]), min_size=1, max_size=6))
)
def test_any_column_that_no_model_reads_gives_its_texts(texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        half = len(texts) // 2
        for number, part in enumerate((texts[:half], texts[half:])):
            if part:
                lines = "".join(f'"{text}",1\n' for text in part)
                (folder / f"{number}.csv").write_text("c,r\n" + lines)
        schema, found = opened(folder)
    kind, values = schema.field("c").type, found["c"]
    if pa.types.is_string(kind):
        assert values == texts
        return
    pairs = [(text, value) for text, value in zip(texts, values, strict=True) if text]
    assert all(value is None for text, value in zip(texts, values, strict=True) if not text)
    for text, value in pairs:
        if pa.types.is_boolean(kind):
            assert text.lower() == str(value).lower()
        elif pa.types.is_floating(kind):
            exact = Decimal(text)
            is_same = exact.is_nan() if math.isnan(value) else exact == Decimal(repr(value))
            assert is_same, (text, value)
        elif pa.types.is_integer(kind) or pa.types.is_date(kind) or pa.types.is_time(kind):
            assert str(value) == text
        else:
            shown = pa.scalar(value, kind).cast(pa.string()).as_py()
            assert instant(shown) == instant(text)


ZEROS = "0" * 5000


@pytest.mark.parametrize("text", [f"{ZEROS}99999", f"-{ZEROS}99999", f"1.{ZEROS}1", "1" * 5000])
def test_long_numbers_are_read_or_an_error(text: str, tmp_path: Path) -> None:
    """Python converts no more than 4,300 digits."""
    path = csv(tmp_path, f"x,{text}")
    try:
        _, values = opened(path, x=F32)
    except SourceError as error:
        assert "float32" in error.message and text == "1" * 5000
    else:
        assert values["x"] == [float(text)]


@pytest.mark.parametrize(
    "text", [f"1.5e{'9' * 30}", f"1.5e-{'9' * 30}", f"1.{ZEROS}1", f"{ZEROS}7"]
)
def test_long_numbers_that_no_model_reads_stay_text(text: str, tmp_path: Path) -> None:
    """A decimal has no exponent of so many digits."""
    path = csv(tmp_path, "x,1", f"k,{text}")
    _, values = opened(path, x=F32)
    assert values["k"] == [text]
