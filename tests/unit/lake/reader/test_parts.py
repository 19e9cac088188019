"""Parts of sources: joining of row groups, and their encoding."""

from __future__ import annotations

from typing import Any

import pytest

from iskander.errors import LimitExceeded, ProtocolError
from iskander.lake.plan import Unit, make_unit
from iskander.lake.reader.parts import FILES_MAX, Part, decode_part, encode_part, join_units

MIB = 1 << 20


def group(index: int, path: str, number: int, *, rows: int | None = 10, size: int = MIB) -> Unit:
    files = [{"filesystem": 0, "path": path, "bytes": 5, "groups": [number, number + 1]}]
    return make_unit(index, {"files": files}, rows=rows, bytes=size)


def groups(files: int, each: int, **values: Any) -> list[Unit]:
    pairs = [(f"f{file}", number) for file in range(files) for number in range(each)]
    return [group(index, *pair, **values) for index, pair in enumerate(pairs)]


def ranges(units: list[Unit]) -> list[list[tuple[str, int, int]]]:
    return [[(each["path"], *each["groups"]) for each in unit.locator["files"]] for unit in units]


def test_row_groups_are_joined_to_the_rows_of_a_part() -> None:
    found = join_units(groups(2, 3), unit_rows=20, parts_max=100)
    assert ranges(found) == [
        [("f0", 0, 2)],
        [("f0", 2, 3), ("f1", 0, 1)],
        [("f1", 1, 3)],
    ]
    assert [each.rows for each in found] == [20, 20, 20]


def test_row_group_with_more_rows_is_a_part() -> None:
    assert len(join_units(groups(1, 3), unit_rows=1, parts_max=100)) == 3


def test_parts_have_a_share_of_the_bytes_by_default() -> None:
    """4 MiB each at least: 12 groups of 1 MiB are three parts."""
    assert ranges(join_units(groups(1, 12), unit_rows=None, parts_max=100)) == [
        [("f0", 0, 4)],
        [("f0", 4, 8)],
        [("f0", 8, 12)],
    ]


@pytest.mark.parametrize("unit_rows", [None, 10])
def test_parts_grow_to_respect_their_number(unit_rows: int | None) -> None:
    units = groups(4, 50)
    found = join_units(units, unit_rows=unit_rows, parts_max=3)
    assert len(found) <= 3
    assert sum(each.rows or 0 for each in found) == 2000
    assert [each.index for each in found] == list(range(len(found)))


def test_files_of_unknown_rows_are_parts_of_their_own_with_unit_rows() -> None:
    units = groups(3, 1, rows=None)
    found = join_units(units, unit_rows=100, parts_max=100)
    assert len(found) == 3 and found[0].rows is None


def test_too_many_files_are_an_error() -> None:
    units = groups(2 * FILES_MAX + 1, 1, size=1)
    assert len(join_units(units, unit_rows=None, parts_max=3)) == 3
    with pytest.raises(LimitExceeded, match="limit 2 endpoints"):
        join_units(units, unit_rows=None, parts_max=2)


def test_source_without_rows_is_one_part() -> None:
    empty = make_unit(0, {"files": []}, rows=0, bytes=0)
    assert ranges(join_units([empty], unit_rows=None, parts_max=1)) == [[]]


def test_part_is_encoded_and_decoded() -> None:
    files = groups(1, 2)[0].locator["files"]
    part = Part("parquet", b"schema", files, 10, MIB, ("id",), ("id", "y"), "id > 3")
    assert decode_part(encode_part(part)) == part
    assert part.unit.locator == {"files": files}


@pytest.mark.parametrize("encoded", [b"", b"no zlib", encode_part.__name__.encode()])
def test_part_of_another_version_is_an_error(encoded: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_part(encoded)
