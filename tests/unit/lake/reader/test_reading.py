"""Reads of parts: frames, terms of the calls, and the size of messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from iskander.errors import QueueFull, SourceChanged, SourceError
from iskander.gateway.sources.messages import BATCH_BYTES, Kind, Planned, PlanRequest, ReadRequest
from iskander.lake.reader.planning import plan
from iskander.lake.reader.reading import read

ROWS = 20_000
CONTRACT = {
    "name": "m",
    "version": "3",
    "ready": True,
    "backend": "onnx",
    "max_batch_rows": 1024,
    "inputs": [{"tensor": "x", "column": "x", "type": "int64"}],
    "outputs": [{"column": "y", "type": "int64", "tensor": "y"}],
    "passthrough": "none",
    "columns": "results",
    "ranked_within": [],
    "limits": {"rows": 5000, "bytes": 1 << 20, "string_bytes": 1 << 20},
    "versions": ["3"],
    "aliases": {},
}


class Doubling:
    """A client of a model that doubles `x`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[dict[str, Any]] = []
        self._error = error

    def stream(self, model: str, batches: Any, **options: Any) -> Iterator[pa.RecordBatch]:
        self.calls.append({"model": model, **options})
        if self._error is not None:
            raise self._error
        for batch in batches:
            yield pa.record_batch({"y": [2 * x for x in batch.column("x").to_pylist()]})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    wide = pa.array(["a" * 500] * ROWS)
    pq.write_table(pa.table({"x": range(ROWS), "wide": wide}), tmp_path / "f.parquet")
    return tmp_path / "f.parquet"


def contract() -> list[bytes]:
    schemas = [pa.schema([(name, pa.int64())]).serialize().to_pybytes() for name in "xy"]
    return [json.dumps(CONTRACT).encode(), *schemas]


def planned(file: Path, **fields: Any) -> Planned:
    values: dict[str, Any] = {"filters": [], "parts_max": 1, **fields}
    return plan(PlanRequest(source="s", root=str(file), contract=contract(), **values))


def request_of(file: Path, **fields: Any) -> ReadRequest:
    (part,) = planned(file, **fields).parts
    return ReadRequest(
        source="s",
        root=str(file),
        contract=contract(),
        part=part,
        address="unix:/none",
        token=None,
        read="id",
    )


def frames(request: ReadRequest, client: Doubling) -> list[tuple[Kind, int, bytes, bytes]]:
    sent: list[tuple[Kind, int, bytes, bytes]] = []

    def send(kind: Kind, rows: int, metadata: memoryview, body: memoryview) -> None:
        sent.append((kind, rows, bytes(metadata), bytes(body)))

    read(request, client, send)  # type: ignore[arg-type]
    return sent


def test_part_is_sent_as_messages_of_limited_size(file: Path) -> None:
    client = Doubling()
    found = frames(request_of(file, filters=["x >= 100"]), client)
    assert [kind for kind, *_ in found] == [Kind.SCHEMA] + [Kind.BATCH] * (len(found) - 1)
    assert sum(rows for _, rows, _, _ in found) == ROWS - 100
    assert max(len(body) for *_, body in found) < 1.1 * BATCH_BYTES
    pieces = []
    for _, _, metadata, body in found:
        pieces += [b"\xff" * 4, len(metadata).to_bytes(4, "little"), metadata, body]
    table = pa.ipc.open_stream(b"".join(pieces)).read_all()
    assert table.schema.names == ["x", "wide", "y"]
    assert table["y"].to_pylist() == [2 * x for x in range(100, ROWS)]


def test_model_is_called_with_the_lowest_priority_and_the_pinned_version(file: Path) -> None:
    client = Doubling()
    frames(request_of(file), client)
    (call,) = client.calls
    assert (call["model"], call["version"]) == ("m", "3")
    terms = call["terms"]
    assert (terms["priority"], terms["read"], terms["client"]) == (9, "id", "source-s")


def test_error_of_the_model_is_the_error_of_the_read(file: Path) -> None:
    with pytest.raises(QueueFull):
        frames(request_of(file), Doubling(QueueFull("full")))


def test_changed_file_is_an_error(file: Path) -> None:
    request = request_of(file)
    pq.write_table(pa.table({"x": range(9), "wide": ["b"] * 9}), file)
    with pytest.raises(SourceChanged, match=r"s/f\.parquet: the file changed"):
        frames(request, Doubling())


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A folder with a Delta table `t`."""
    root = tmp_path / "root"
    (root / "t" / "_delta_log").mkdir(parents=True)
    (root / "t" / "old").mkdir()
    for name in ("f.parquet", "old/g.parquet"):
        pq.write_table(pa.table({"x": [1], "wide": ["a"]}), root / "t" / name)
    return root


@pytest.mark.parametrize("path", [None, "t", "t/f.parquet", "t/*.parquet", "*/old/g.parquet"])
def test_files_of_a_table_are_not_read_unless_the_source_permits_it(
    table: Path, path: str | None
) -> None:
    """They have the rows of removed files, too."""
    with pytest.raises(SourceError, match=r"^s/t/\S+: belongs to the Delta table s/t,") as caught:
        planned(table, path=path)
    assert "`plain_files` of the source" in caught.value.message
    assert planned(table, path=path, plain_files=True).rows in (1, 2)


@pytest.mark.parametrize("root", ["t", "t/old", "t/old/g.parquet"])
def test_source_inside_of_a_table_is_not_read_and_no_path_is_shown(table: Path, root: str) -> None:
    with pytest.raises(
        SourceError, match=r"^s/.* belongs to the Delta table (s,|that contains source `s`)"
    ) as caught:
        planned(table / root)
    assert str(table) not in str(caught.value.to_wire())


def test_link_to_a_file_of_a_table_is_not_read(table: Path) -> None:
    (table / "linked").mkdir()
    (table / "linked" / "a.parquet").symlink_to("../t/f.parquet")
    with pytest.raises(SourceError, match=r"^s/linked/a.parquet: belongs to the Delta table s/t,"):
        planned(table, path="linked")


def test_plan_knows_its_rows_unless_they_are_filtered(file: Path) -> None:
    assert planned(file).rows == ROWS
    assert planned(file, filters=["x > 1"]).rows == -1
    schema = pa.ipc.read_schema(pa.py_buffer(planned(file, columns=("y",)).schema))
    assert schema == pa.schema([("y", pa.int64())])
