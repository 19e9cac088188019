"""The function for `mapInArrow` without Spark: schema, errors and scored batches."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from iskander.client import ModelDescription
from iskander.errors import ConfigError, ContractError
from iskander.lake.rows import ErrorBudget, TooManyErrors
from iskander.spark import Scorer, scorer

FIELDS = {"id": "string", "x": "long", "other": "variant"}


@dataclass
class Struct:
    """`StructType` as far as it is used."""

    json: list[dict[str, Any]]

    @property
    def fields(self) -> list[Any]:
        return [SimpleNamespace(name=each["name"]) for each in self.json]

    def jsonValue(self) -> dict[str, Any]:
        return {"type": "struct", "fields": self.json}

    @classmethod
    def fromJson(cls, value: dict[str, Any]) -> Struct:
        return cls(value["fields"])


def struct(**types: str) -> Struct:
    return Struct(
        [
            {"name": name, "type": kind, "nullable": False, "metadata": {"a": 1}}
            for name, kind in types.items()
        ]
    )


def described(**other: Any) -> ModelDescription:
    values: dict[str, Any] = {
        "name": "m", "version": "3", "ready": True, "backend": "onnx", "max_batch_rows": 100,
        "limits": {"rows": 100, "bytes": 1000, "string_bytes": 1000}, "versions": ("3",),
        "aliases": {}, "input_schema": pa.schema({"x": pa.int64()}),
        "output_schema": pa.schema({"y": pa.uint32()}), "input_types": {"x": "int64"},
        "passthrough": "none", "ranked_within": (), "metadata": {},
    }  # fmt: skip
    return ModelDescription(**{**values, **other})


class FakeClient:
    def __init__(self) -> None:
        self.description = described()
        self.calls: list[dict[str, Any]] = []

    def model(self, name: str, *, version: str | None) -> Any:
        return SimpleNamespace(description=self.description)

    def score(self, model: str, data: pa.Table, **options: Any) -> pa.Table:
        self.calls.append({"model": model, "columns": data.column_names, **options})
        values = [3 * x + 1 for x in data[options["columns"].get("x", "x")].to_pylist()]
        return pa.table({"y": pa.array(values, pa.uint32())})


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClient]:
    fake = FakeClient()
    monkeypatch.setattr(
        "iskander.spark.scoring.Client", lambda *_, **__: contextlib.nullcontext(fake)
    )
    monkeypatch.setattr("iskander.engines.addresses.Client", lambda *_, **__: fake)
    yield fake


def names(schema: Struct) -> list[str]:
    return [each["name"] for each in schema.json]


def test_schema_has_the_kept_columns_as_they_are_and_the_results(client: FakeClient) -> None:
    given = struct(**FIELDS)
    schema = scorer("m", "a:1").schema(given)
    assert schema.json[:-1] == given.json
    assert schema.json[-1] == {"name": "y", "type": "long", "nullable": True, "metadata": {}}
    assert names(scorer("m", "a:1", keep=["x", "id"]).schema(given)) == ["x", "id", "y"]


def test_batches_are_scored_with_the_pinned_version(client: FakeClient) -> None:
    function = scorer("m", "a:1", columns={"x": "id"}, keep=["k"], batch_rows=2)
    batches = [pa.record_batch({"id": ids, "k": ids}) for ids in ([0, 1, 2], [], [3])]
    found = list(function(iter(batches)))
    assert [each.to_pydict() for each in found] == [
        {"k": [0, 1], "y": [1, 4]}, {"k": [2], "y": [7]}, {"k": [3], "y": [10]},
    ]  # fmt: skip
    assert {each.schema.field("y").type for each in found} == {pa.int64()}
    for call in client.calls:
        assert (call["model"], call["version"], call["columns"]) == ("m", "3", {"x": "id"})


def test_each_task_has_a_limit_of_rejected_rows(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker process runs the tasks of a streaming query for as long as it lives."""

    def reject(*_: Any, **__: Any) -> pa.Table:
        raise ContractError("wrong")

    monkeypatch.setattr(client, "score", reject)
    monkeypatch.setattr("iskander.engines.scorer.ErrorBudget", partial(ErrorBudget, 3))
    function = scorer("m", "a:1", on_error="null")
    batch = pa.record_batch({"x": [0, 1]})
    for _ in range(3):
        (found,) = function([batch])
        assert found["y"].to_pylist() == [None, None]
    with pytest.raises(TooManyErrors, match="the server rejected 4 rows; limit 3"):
        list(function([batch, batch]))


def test_copy_of_another_process(client: FakeClient) -> None:
    copy: Scorer = pickle.loads(pickle.dumps(scorer("m", "a:1", token="secret")))  # noqa: S301
    assert [each["y"].to_pylist() for each in copy([pa.record_batch({"x": [1]})])] == [[4]]
    assert repr(copy) == "Scorer('m', version='3')"


def test_errors_of_columns(client: FakeClient) -> None:
    function = scorer("m", "a:1")
    with pytest.raises(ContractError, match=r"column `x` is missing.*nearest is `x_`"):
        function.schema(struct(x_="long", id="string"))
    with pytest.raises(ContractError, match="column `x`: wanted int64, got string"):
        function.schema(struct(x="string"))
    with pytest.raises(ContractError, match="`x` has the Spark type variant, which is not"):
        function.schema(struct(x="variant"))
    with pytest.raises(ContractError, match="column `y` is in the dataset and a result of model"):
        function.schema(struct(x="long", y="long"))
    with pytest.raises(ContractError, match="a result of model `m`"):
        scorer("m", "a:1", keep=["y"])
    with pytest.raises(ConfigError, match=r"`keep` has `idd`.*did you mean `id`"):
        scorer("m", "a:1", keep=["idd"]).schema(struct(**FIELDS))
    with pytest.raises(ConfigError, match="`schema` is of the type Schema; expected a StructType"):
        function.schema(pa.schema({"x": pa.int64()}))
    with pytest.raises(ConfigError, match="`frame` is of the type list; expected a DataFrame"):
        function.apply([])


def test_errors_of_options(client: FakeClient) -> None:
    invalid: Any
    for invalid, text in (
        ({"batch_rows": 0}, "`batch_rows` is 0; the minimum is 1"),
        ({"on_error": "skip"}, "`on_error` is 'skip'; expected `fail` or `null`"),
        ({"wait_s": -1}, "wait_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
    ):
        with pytest.raises(ConfigError, match=text):
            scorer("m", "a:1", **invalid)


def test_models_that_spark_cannot_use(client: FakeClient) -> None:
    client.description = described(ranked_within=("g",))
    with pytest.raises(ContractError, match="model `m` ranks the rows of a batch"):
        scorer("m", "a:1")
    client.description = described(is_whole=True, whole_reason="its rows are dependent: row 3")
    with pytest.raises(ContractError, match=r"row 3; Spark cuts.*applyInArrow"):
        scorer("m", "a:1")
    client.description = described(output_schema=pa.schema({"y": pa.time64("us")}))
    with pytest.raises(ContractError, match="result `y` has the type time64"):
        scorer("m", "a:1")
