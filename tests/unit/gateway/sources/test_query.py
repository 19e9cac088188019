"""Queries of sources: keys, types and paths."""

from __future__ import annotations

import json
from typing import Any

import pytest

from iskander.errors import MalformedInput
from iskander.gateway.sources.query import SourceQuery, read_query


def test_all_keys_are_read() -> None:
    fields: dict[str, Any] = {
        "source": "clicks",
        "model": "churn",
        "columns": ["id", "y"],
        "keep": ["id"],
        "filter": "id > 3",
        "path": "2026/*.parquet",
        "unit_rows": 1000,
    }
    expected = SourceQuery(**{**fields, "columns": ("id", "y"), "keep": ("id",)})
    assert read_query(json.dumps(fields).encode()) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"source": ""},
        {"source": "a", "other": 1},
        {"source": "a", "columns": []},
        {"source": "a", "columns": "x"},
        {"source": "a", "unit_rows": 0},
        {"source": "a", "filter": "x" * 8193},
        {"source": "a" * 129},
    ],
)
def test_invalid_query_is_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(MalformedInput, match="not a query of a source"):
        read_query(json.dumps(fields).encode())


@pytest.mark.parametrize("command", [b"", b"{", b"SELECT 1", b'{"source": "\xff"}', b"[" * 100_000])
def test_text_that_is_no_json_is_rejected(command: bytes) -> None:
    with pytest.raises(MalformedInput, match="not a query of a source"):
        read_query(command)


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "..", "../x", "a/../../x", "a/..", "a\0b", "//x"]
)
def test_path_out_of_the_folder_is_rejected(path: str) -> None:
    with pytest.raises(MalformedInput, match="below the source's folder"):
        read_query(json.dumps({"source": "a", "path": path}).encode())


def test_number_of_listings_of_a_path_is_limited() -> None:
    """Each `**` visits each folder once for each place of the others."""
    with pytest.raises(MalformedInput, match=r"3 segments `\*\*`, limit 2"):
        read_query(json.dumps({"source": "a", "path": "**/**/a*/**"}).encode())


@pytest.mark.parametrize(
    "path", ["a", "**/a/**", "a/b.parquet", "*/x", "a..b/c", "...", "day=1/**"]
)
def test_path_below_the_folder_is_read(path: str) -> None:
    assert read_query(json.dumps({"source": "a", "path": path}).encode()).path == path
