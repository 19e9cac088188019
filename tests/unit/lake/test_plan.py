"""Jobs and plans: validation, fingerprints, names of units, limits, and the JSON form."""

from __future__ import annotations

import json
import re
from typing import Any

import pyarrow as pa
import pytest

from iskander.errors import ConfigError
from iskander.lake.errors import JobConflict
from iskander.lake.job import Job
from iskander.lake.plan import (
    JobPlan,
    Unit,
    canonical,
    decode_plan,
    encode_plan,
    fingerprint,
    limit_units,
    make_unit,
    model_digest,
    total_rows,
)

PARTS: dict[str, Any] = {
    "model": "churn",
    "version": "3",
    "digest": "d",
    "contract": {"inputs": ["a"]},
    "output_columns": ["id", "p"],
    "options": {"filter": None},
    "snapshot": {"kind": "files", "sha256": "0"},
}


def a_job(**options: Any) -> Job:
    return Job(**{"model": "churn", "inputs": ("in.parquet",), "output": "out", **options})


def units(*rows: int | None) -> list[Unit]:
    return [make_unit(i, {"file": f"{i}"}, rows=each, bytes=100) for i, each in enumerate(rows)]


def a_plan(*rows: int | None) -> JobPlan:
    return JobPlan(
        units=tuple(units(*rows)),
        fingerprint="f" * 64,
        model="churn",
        version="3",
        digest="d",
        snapshot={"kind": "files"},
        schema=pa.schema([("Größe a", pa.dictionary(pa.int8(), pa.string()))]),
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model": ""}, "model"),
        ({"inputs": ()}, "input"),
        ({"inputs": ("a", "")}, "input"),
        ({"output": ""}, "output"),
        ({"limit": 0}, "limit"),
        ({"batch_rows": 0}, "batch_rows"),
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": 257}, "concurrency"),
        ({"unit_bytes": 0}, "unit_bytes"),
        ({"file_bytes": 0}, "file_bytes"),
        ({"on_error": "ignore"}, "on_error"),
        ({"on_error": "quarantine="}, "on_error"),
        ({"overwrite": "yes"}, "overwrite"),
        ({"resume": True, "restart": True}, "restart"),
        ({"inputs": ("-", "a")}, "standard input"),
        ({"inputs": ("-",), "resume": True}, "stream"),
        ({"output": "-", "resume": True}, "stream"),
    ],
)
def test_invalid_option_is_rejected_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        a_job(**options)


def test_quarantine_folder_is_read_from_on_error() -> None:
    assert a_job(on_error="quarantine=bad rows").quarantine == "bad rows"
    assert a_job().quarantine is None


@pytest.mark.parametrize(
    ("output", "folder"),
    [("data/out", "data/_iskander/out"), ("out.parquet", "_iskander/out.parquet")],
)
def test_state_folder_is_beside_a_local_output(output: str, folder: str) -> None:
    assert a_job(output=output).state_folder == folder


def test_state_folders_of_other_outputs_are_distinct() -> None:
    folders = {a_job(output=each).state_folder for each in ("s3://a/b", "s3://a-b", "-")}
    assert len(folders) == 3
    assert a_job(state="here").state_folder == "here"


def test_concurrency_and_the_way_of_a_run_are_not_in_the_fingerprint() -> None:
    other = a_job(concurrency=2, resume=True, overwrite="append", state="x")
    assert other.fingerprint_options() == a_job().fingerprint_options()


@pytest.mark.parametrize(
    "options",
    [
        {"columns": {"a": "b"}},
        {"keep": ("a",)},
        {"keep": ()},
        {"filter": "a > 1"},
        {"limit": 5},
        {"batch_rows": 7},
        {"on_error": "null"},
        {"sort_by": ("a",)},
        {"partition_by": ("a",)},
        {"compression": "zstd"},
        {"output": "elsewhere"},
    ],
)
def test_options_that_change_results_are_in_the_fingerprint(options: dict[str, Any]) -> None:
    assert a_job(**options).fingerprint_options() != a_job().fingerprint_options()


def test_fingerprint_depends_on_each_part() -> None:
    base = fingerprint(**PARTS)
    assert len(base) == 64 and base == fingerprint(**PARTS)
    for name, value in PARTS.items():
        changed = {**value, "x": "y"} if isinstance(value, dict) else [*value, "x"]
        if isinstance(value, str):
            changed = value + "x"
        assert fingerprint(**{**PARTS, name: changed}) != base, name


def test_fingerprint_ignores_the_order_of_keys() -> None:
    swapped = dict(reversed(PARTS["snapshot"].items()))
    assert fingerprint(**{**PARTS, "snapshot": swapped}) == fingerprint(**PARTS)


def test_model_digest_depends_on_values_and_not_on_their_order() -> None:
    assert model_digest({"a": 1, "b": 2}) == model_digest({"b": 2, "a": 1})
    assert model_digest({"a": 1}) != model_digest({"a": 2})


def test_unit_name_has_index_and_hash_of_the_locator() -> None:
    first, same, other = (
        make_unit(12, {"f": "ü"}, rows=1, bytes=1),
        *(make_unit(12, {"f": name}, rows=None, bytes=9) for name in ("ü", "u")),
    )
    assert first.name == same.name != other.name
    assert re.fullmatch(r"part-00012-[0-9a-f]{8}", first.name)


def test_total_rows_is_unknown_if_one_unit_is() -> None:
    assert total_rows(units(1, 2)) == 3
    assert total_rows(units(1, None)) is None
    assert a_plan(4, 5).rows == 9 and a_plan(4, 5).bytes == 200


def test_limit_cuts_the_unit_that_contains_the_last_row() -> None:
    counted: list[int] = []

    def count(each: Unit) -> int:
        counted.append(each.index)
        return 10

    kept = limit_units(units(10, 10, 10, 10), 15, count)
    assert [(each.index, each.rows_max) for each in kept] == [(0, None), (1, 5)]
    assert [each.rows for each in kept] == [10, 5] and counted == [0, 1]
    assert [each.rows_max for each in limit_units(units(10, 10), 20, count)] == [None, 10]
    assert [each.rows_max for each in limit_units(units(10, 10), 99, count)] == [None, 89]
    assert limit_units(units(10, 10), None, count) == units(10, 10)


def test_limit_does_not_count_a_single_unit() -> None:
    def count(each: Unit) -> int:
        raise AssertionError(each)

    (only,) = limit_units(units(None), 3, count)
    assert only.rows_max == 3 and only.rows is None


def test_limit_counts_rows_after_the_filter() -> None:
    """A unit whose rows the filter removes stays in the plan, and takes nothing of the limit."""
    kept = limit_units(units(10, 10, 10), 4, lambda each: (0, 4, 9)[each.index])
    assert [(each.index, each.rows_max) for each in kept] == [(0, None), (1, 4)]


def with_changed(**values: Any) -> bytes:
    return canonical(json.loads(encode_plan(a_plan(1))) | values)


def test_plan_round_trips_through_json() -> None:
    plan = a_plan(1, None, 3)
    assert decode_plan(encode_plan(plan)) == plan
    assert encode_plan(plan) == encode_plan(decode_plan(encode_plan(plan)))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"{}",
        b"[]",
        b'{"format": 99}',
        encode_plan(a_plan(1))[:-20],
        b"[" * 5000,
        with_changed(schema="/////wD/"),
        with_changed(units=[[-1, {}, 1, 1]]),
        with_changed(units=[[0, {}, "1", 1]]),
        with_changed(values=["threads"]),
    ],
)
def test_damaged_plan_is_rejected(text: bytes) -> None:
    with pytest.raises(JobConflict, match="restart"):
        decode_plan(text)
