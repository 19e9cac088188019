"""Plans of reads: conditions, columns and types of the answer."""

from __future__ import annotations

import pyarrow as pa
import pytest

from iskander.errors import FilterError, LimitExceeded, PermissionDenied, SourceError, Unsupported
from iskander.gateway.sources.messages import PlanRequest
from iskander.lake.filters import parse_filter
from iskander.lake.reader.planning import answer_schema, join_conditions, kept_columns

SCHEMA = pa.schema([("id", pa.int64()), ("day", pa.string()), ("y", pa.float32())])


def request(**fields: tuple[str, ...]) -> PlanRequest:
    return PlanRequest(source="s", root="/", contract=[], filters=[], parts_max=1, **fields)


def test_no_condition_is_empty_and_one_is_kept_as_it_is() -> None:
    assert join_conditions([]) == ""
    assert join_conditions(["a  > 1 # all"]) == "a  > 1 # all"


@pytest.mark.parametrize("own", ["x > 1", "x > 1 or x < 0", "x > 1 # or so", " x > 1"])
def test_both_conditions_apply(own: str) -> None:
    table = pa.table({"x": [-1, 2, 3], "t": ["a", "b", "a"]})
    text = join_conditions(["t == 'a' # those", own])
    rows = table.filter(parse_filter(text).expression(table.schema))
    assert (
        rows["x"].to_pylist()
        == table.filter(parse_filter(own).expression(table.schema))
        .filter(parse_filter("t == 'a'").expression(table.schema))["x"]
        .to_pylist()
    )


@pytest.mark.parametrize("own", ["x > 1) or (x < 1", "1 == 1", "x > 1) #", "__import__('os')", ""])
def test_condition_that_is_not_valid_by_itself_is_rejected(own: str) -> None:
    with pytest.raises(FilterError):
        join_conditions(["t == 'a'", own])


def test_long_conditions_are_rejected() -> None:
    long = "x in [" + ",".join("1" * 9 for _ in range(500)) + "]"
    with pytest.raises(LimitExceeded, match="limit 8192"):
        join_conditions([long, long])


def test_columns_of_the_answer_select_kept_ones() -> None:
    assert kept_columns(request(), SCHEMA, []) == ("id", "day", "y")
    assert kept_columns(request(keep=("day",)), SCHEMA, []) == ("day",)
    assert kept_columns(request(columns=("score", "id")), SCHEMA, ["score"]) == ("id",)
    assert kept_columns(request(permitted=("id",)), SCHEMA, []) == ("id",)


def test_result_replaces_a_column_of_its_name_unless_that_is_kept_by_name() -> None:
    assert kept_columns(request(columns=("id", "y")), SCHEMA, ["y"]) == ("id",)
    assert kept_columns(request(columns=("id", "y"), keep=("id", "y")), SCHEMA, ["y"]) == (
        "id",
        "y",
    )


def test_columns_that_are_not_permitted_or_missing_are_rejected() -> None:
    with pytest.raises(PermissionDenied, match="does not return column 'day'; it returns id"):
        kept_columns(request(permitted=("id",), keep=("day",)), SCHEMA, [])
    with pytest.raises(SourceError, match="no column 'dya'; the nearest name is 'day'"):
        kept_columns(request(keep=("dya",)), SCHEMA, [])


def test_answer_has_values_instead_of_dictionaries() -> None:
    kind = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema([("a", kind), ("b", pa.string_view()), ("c", pa.list_(pa.int8()))])
    expected = pa.schema([("c", pa.list_(pa.int8())), ("a", pa.string())])
    assert answer_schema(schema, ("c", "a")) == expected
    with pytest.raises(Unsupported, match="column 'd' has dictionaries"):
        answer_schema(pa.schema([("d", pa.list_(kind))]), None)
