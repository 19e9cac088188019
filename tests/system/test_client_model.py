"""The action `contract` of a real server, and tables matched and cut for its models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from onnx import TensorProto
from pyarrow import flight
from support import models
from support.processes import Gateway, running
from support.repositories import Folder

from iskander.client import Client
from iskander.client.matching import Matching
from iskander.client.model import Model, ModelDescription, read_description
from iskander.client.slicing import cut_and_join
from iskander.client.tables import open_source
from iskander.errors import ContractError, LimitExceeded

ROWS_MAX = 1000
WIDE_ROWS = 100
"""Rows of `wide` whose results fit in `limits.result_bytes`."""
RESULT_BYTES = WIDE_ROWS * 256 * 8
RANKED = """
format = 1
[[inputs]]
column = "x"
type = "float32"
tensor = "x"
[[outputs]]
column = "y"
type = "float32"
tensor = "y"
[[outputs]]
column = "place"
type = "int32"
rank = {of = "y", within = "query"}
"""
CONVERTED = """
format = 1
passthrough = ["id"]
[[inputs]]
tensor = "x"
columns = ["user.age", "clicks"]
cast = true
[[outputs]]
column = "y"
type = "fixed_size_list<float32>[2]"
tensor = "y"
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("client-model")
    floats, texts = TensorProto.FLOAT, TensorProto.STRING

    def with_manifest(path: Path, text: str) -> Path:
        (path / "manifest.toml").write_text(text)
        return path

    all_ids = with_manifest(models.row_ids(folder / "ids-all"), models.MANIFEST_ALL)
    paths = {
        "ids": models.row_ids(folder / "ids"),
        "ids-all": all_ids,
        "floats": models.identity(folder / "floats", floats, ["rows"]),
        "vector": models.identity(folder / "vector", floats, ["rows", 4]),
        "text": models.identity(folder / "text", texts, ["rows"]),
        "wide": models.identity(folder / "wide", TensorProto.DOUBLE, ["rows", 256]),
        "ranked": with_manifest(models.identity(folder / "ranked", floats, ["rows"]), RANKED),
        "converted": with_manifest(
            models.identity(folder / "converted", floats, ["rows", 2]), CONVERTED
        ),
    }
    served: list[dict[str, Any]] = [
        {"name": name, "path": str(path), "intra_threads": 1, "max_batch_rows": 64}
        for name, path in paths.items()
    ]
    for version in (2, 10):
        served.append({**served[0], "version": version})
    repository = Folder(folder / "models")
    for version, factor in ((1, 3), (2, 5)):
        repository.put("m", version, factor)
    repository.write_settings("m", "max_batch_rows = 64\naliases = {stable = 1, next = 2}")
    limits = {"rows": ROWS_MAX, "string_bytes": 4096, "result_bytes": RESULT_BYTES}
    with running(
        folder,
        served,
        workers={"groups": ["0"]},
        limits=limits,
        repository={"path": str(repository.root)},
    ) as ready:
        yield ready
        ready.wait_idle()


class TableClient:
    """Scores tables: matched, cut to the server's limits, streamed, restored."""

    def __init__(self, client: Client, gateway: Gateway) -> None:
        self._client = client
        self._gateway = gateway
        self.sent: list[int] = []

    def model(self, name: str, version: str | None = None) -> Model:
        return Model(self, self.describe(name, version), version=version)

    def describe(self, name: str, version: str | None = None) -> ModelDescription:
        return read_description(contract_of(self._gateway, name, version))

    def score(
        self,
        model: str,
        data: Any,
        *,
        version: str | None,
        columns: Mapping[str, str] | None,
        timeout_s: float | None,
        terms: Mapping[str, Any] | None,
    ) -> Any:
        source = open_source(data)
        described = self.describe(model, version)
        matching = Matching(described, source.schema, columns=columns)
        limits = described.limits
        parts = list(
            cut_and_join(
                map(matching.apply, source.batches),
                rows_max=limits["rows"],
                bytes_max=limits["bytes"],
                string_bytes_max=limits["string_bytes"],
                rows_min=0,
            )
        )
        self.sent = [part.num_rows for part in parts]
        results = list(self.stream(model, parts, version=version, terms=terms, timeout_s=timeout_s))
        return source.restore(results[0].schema, iter(results))

    def stream(self, model: str, batches: Any, **options: Any) -> Any:
        return self._client.stream(model, batches, **options)

    def outcomes(self, model: str, batches: Any, **options: Any) -> Any:
        return self._client.outcomes(model, batches, **options)


def contract_of(gateway: Gateway, name: str, version: str | None = None) -> list[bytes]:
    body = json.dumps({"model": name, "version": version}).encode()
    with flight.connect(f"grpc://{gateway.address}") as client:
        return [r.body.to_pybytes() for r in client.do_action(flight.Action("contract", body))]


@pytest.fixture
def client(gateway: Gateway) -> Iterator[TableClient]:
    with gateway.client() as client:
        yield TableClient(client, gateway)


def test_contract_has_limits_versions_and_aliases(gateway: Gateway) -> None:
    described = json.loads(contract_of(gateway, "ids")[0])
    assert described["limits"] == {"rows": ROWS_MAX, "bytes": 16 << 20, "string_bytes": 4096}
    assert described["versions"] == ["1", "2", "10"]
    assert described["aliases"] == {}
    assert described["ranked_within"] == []
    assert re.fullmatch("[0-9a-f]{64}", described["files_sha256"])


def test_model_has_aliases_and_is_called_by_one(client: TableClient) -> None:
    model = client.model("m", "stable")
    assert model.versions == ("1", "2")
    assert model.aliases == {"stable": "1", "next": "2"}
    assert model.description.version == "1"
    batch = pa.record_batch({"x": [2]})
    assert model.score(batch)["y"].to_pylist() == [6]
    assert client.model("m").score(batch)["y"].to_pylist() == [10]


def test_contract_of_a_version_is_of_that_version(client: TableClient) -> None:
    assert client.model("ids").description.version == "10"
    assert client.model("ids", "2").description.version == "2"


def test_row_limit_counts_the_bytes_of_results(client: TableClient) -> None:
    described = client.describe("wide")
    assert described.limits["rows"] == WIDE_ROWS
    values = pa.array(np.arange(256.0 * 3 * WIDE_ROWS))
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(values, 256)})
    assert client.model("wide").score(table)["y"].combine_chunks() == table["x"].combine_chunks()
    assert client.sent == [WIDE_ROWS] * 3
    too_many = table.slice(0, WIDE_ROWS + 1).combine_chunks().to_batches()
    with pytest.raises(LimitExceeded, match="result_bytes"):
        list(client.stream("wide", too_many))


def test_model_has_the_contract(client: TableClient) -> None:
    model = client.model("converted")
    assert repr(model).splitlines() == [
        "Model converted, version 1 (onnx, ready; versions 1)",
        "  input  user.age: number",
        "  input  clicks: number",
        "  output y: fixed_size_list<item: float>[2]",
        "  output id: as sent",
    ]
    assert model.input_schema.names == ["user", "clicks"]
    assert model.metadata["max_batch_rows"] == 64


def test_table_above_the_row_limit_is_scored_in_order(client: TableClient) -> None:
    table = pa.table({"x": np.arange(2500, dtype=np.int32)})
    scored = client.model("ids").score(table)
    assert scored["y"].to_pylist() == [3 * x + 1 for x in range(2500)]
    assert max(client.sent) <= ROWS_MAX
    with pytest.raises(LimitExceeded, match=r"`limits\.rows`"):
        list(client.stream("ids", table.cast(pa.schema([("x", pa.int64())])).to_batches()))


@pytest.mark.parametrize(
    "kind", [pa.utf8(), pa.string_view(), pa.dictionary(pa.int16(), pa.utf8())]
)
def test_text_above_the_string_limit_is_scored_in_order(
    client: TableClient, kind: pa.DataType
) -> None:
    texts = [f"text number {number}, longer than a view holds" for number in range(500)]
    scored = client.model("text").score(pa.table({"x": pa.array(texts, kind)}))
    assert scored["y"].to_pylist() == texts
    assert len(client.sent) > 1


def test_columns_are_cast_renamed_and_left_out(client: TableClient) -> None:
    batch = pa.record_batch({"value": [0.5, 2.0], "unused": ["a", "b"]})
    scored = client.model("floats").score(batch, columns={"x": "value"})
    assert isinstance(scored, pa.RecordBatch)
    assert scored.to_pydict() == {"y": [0.5, 2.0]}
    lists = pa.record_batch({"x": pa.array([[1.0, 2.0, 3.0, 4.0]])})
    assert client.model("vector").score(lists)["y"].to_pylist() == [[1.0, 2.0, 3.0, 4.0]]


def test_columns_that_need_no_cast_are_converted_by_the_server(client: TableClient) -> None:
    user = pa.array([{"age": 3, "name": "x"}])
    batch = pa.record_batch({"id": ["k"], "user": user, "clicks": [0.1], "unused": [1]})
    scored = client.model("converted").score(batch)
    assert scored["id"].to_pylist() == ["k"]
    assert scored["y"].to_pylist() == [[3.0, float(np.float32(0.1))]]
    fields = pa.record_batch({"age": [3], "clicks": pa.nulls(1)})
    with pytest.raises(ContractError, match="nulls"):
        client.model("converted").score(fields, columns={"user.age": "age"})


def test_error_in_a_cut_table_names_the_place_of_its_batch(gateway: Gateway) -> None:
    """The server names a row of the batch, and the table is cut into batches."""
    rows, first = 5 * ROWS_MAX, 3 * ROWS_MAX
    clicks = pa.array([None if row == first + 7 else 0.5 for row in range(rows)], pa.float64())
    table = pa.table({"user.age": pa.array([3] * rows), "clicks": clicks})
    with Client(gateway.address) as client, pytest.raises(ContractError, match="row 7;") as caught:
        client.score("converted", table)
    assert f"Its batch begins in row {first:,} of the table" in caught.value.message
    assert caught.value.fields["first_row"] == first
    assert caught.value.model == "converted"


def test_all_columns_are_passed_through(client: TableClient) -> None:
    batch = pa.record_batch({"key": ["a"], "x": pa.array([1], pa.int8())})
    assert client.model("ids-all").score(batch).to_pydict() == {"key": ["a"], "y": [4]}


def test_group_column_of_a_rank_is_sent(client: TableClient) -> None:
    model = client.model("ranked")
    assert model.description.ranked_within == ("query",)
    batch = pa.record_batch({"x": [1.0, 3.0, 2.0], "query": ["a", "a", "b"], "unused": [1, 2, 3]})
    assert model.score(batch)["place"].to_pylist() == [2, 1, 1]


def test_empty_table_gives_an_empty_table_with_the_result_schema(client: TableClient) -> None:
    scored = client.model("ids").score(pa.table({"x": pa.array([], pa.int32())}))
    assert scored.num_rows == 0
    assert scored.schema == client.model("ids").output_schema


def test_lossy_value_is_an_error_before_anything_is_sent(client: TableClient) -> None:
    with pytest.raises(ContractError, match=r"row 1 has 0\.1, which float32 cannot") as raised:
        client.model("floats").score(pa.record_batch({"x": [0.5, 0.1]}))
    assert raised.value.fields["model"] == "floats"
