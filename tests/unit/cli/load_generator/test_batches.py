"""Generated batches for each type of a column, and batches of real rows."""

from __future__ import annotations

import pyarrow as pa
import pytest

from iskander.cli.load_generator.batches import BATCHES, cut, generate
from iskander.errors import ConfigError

TYPES = [
    pa.bool_(),
    *(pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64()),
    *(pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.decimal128(10, 2)),
    *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(5)),
    *(pa.date32(), pa.date64(), pa.time32("s"), pa.time64("us"), pa.timestamp("ns", "UTC")),
    pa.duration("ms"),
    pa.list_(pa.float32(), 4),
    pa.list_(pa.list_(pa.int64(), 2), 3),
    pa.list_(pa.string()),
    pa.large_list(pa.int32()),
    pa.struct([pa.field("a", pa.int32()), pa.field("b", pa.list_(pa.float64()))]),
    pa.dictionary(pa.int32(), pa.string()),
]


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_each_type(kind: pa.DataType) -> None:
    schema = pa.schema([pa.field("x", kind, nullable=False)])
    batches = generate(schema, 7, string_bytes=3, list_length=5, seed=1)
    assert len(batches) == BATCHES
    for batch in batches:
        batch.validate(full=True)
        assert batch.schema == schema and batch.num_rows == 7 and not batch["x"].null_count
    assert not batches[0].equals(batches[1])


def test_texts_have_the_given_length() -> None:
    schema = pa.schema([("x", pa.string())])
    for length in (0, 16):
        batch = generate(schema, 5, string_bytes=length, list_length=1, seed=1)[0]
        assert {len(text) for text in batch["x"].to_pylist()} == {length}


def test_lists_have_up_to_the_given_length() -> None:
    schema = pa.schema([("x", pa.list_(pa.int64()))])
    batch = generate(schema, 200, string_bytes=1, list_length=3, seed=1)[0]
    assert {len(each) for each in batch["x"].to_pylist()} == {1, 2, 3}


def test_unknown_type_is_named() -> None:
    schema = pa.schema([("x", pa.month_day_nano_interval())])
    with pytest.raises(ConfigError, match=r"column `x`.*month_day_nano_interval.*use --data FILE"):
        generate(schema, 1, string_bytes=1, list_length=1, seed=1)


def test_real_rows_are_cut_and_repeated() -> None:
    rows = pa.record_batch({"x": [1, 2, 3, 4, 5], "other": list("abcde")})
    batches = cut(rows, 2, ["x"])
    assert [batch["x"].to_pylist() for batch in batches] == [[1, 2], [3, 4], [5, 1]]
    assert batches[0].schema.names == ["x"]
    assert cut(rows, 12, ["x"])[0]["x"].to_pylist() == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
    with pytest.raises(ConfigError, match="has no rows"):
        cut(rows.slice(0, 0), 2, ["x"])
