"""Description of a model from the server's answer; calls and texts of a model."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from iskander.client.matching import Matching
from iskander.client.model import Model, read_description
from iskander.errors import Fault, ProtocolError

CONTRACT: dict[str, Any] = {
    "name": "churn",
    "version": "3",
    "ready": True,
    "backend": "onnx",
    "max_batch_rows": 1024,
    "rows_fixed": None,
    "inputs": [
        {"tensor": "age", "column": "user.age", "type": "number", "cast": True},
        {"tensor": "x", "columns": ["a", "b"], "type": "float32"},
        {"tensor": "again", "column": "a", "type": "float64"},
    ],
    "outputs": [{"column": "score", "type": "float32", "tensor": "y"}],
    "passthrough": ["id", "day"],
    "columns": "passthrough_first",
    "ranked_within": ["query", ""],
    "limits": {"rows": 100, "bytes": 1000, "string_bytes": 500},
    "versions": ["2", "3"],
    "aliases": {"stable": "2"},
}
INPUTS = pa.schema(
    [("user", pa.struct([("age", pa.int64())])), ("a", pa.float32()), ("b", pa.float32())]
)
OUTPUTS = pa.schema([("score", pa.float32())])


def results(**changes: Any) -> list[bytes]:
    schemas = [schema.serialize().to_pybytes() for schema in (INPUTS, OUTPUTS)]
    return [json.dumps(CONTRACT | changes).encode(), *schemas]


class Recorder:
    """A client that records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def score(self, model: str, data: Any, **options: Any) -> Any:
        self.calls.append((model, data, options))
        return "scored"

    def stream(self, model: str, batches: Any, **options: Any) -> Any:
        self.calls.append((model, batches, options))
        return "streamed"

    def outcomes(self, model: str, batches: Any, **options: Any) -> Any:
        self.calls.append((model, batches, options))
        return "outcomes"


def model_of(**changes: Any) -> Model:
    return Model(Recorder(), read_description(results(**changes)))


def test_description_has_the_contract() -> None:
    found = read_description(results())
    assert (found.name, found.version, found.ready, found.backend) == ("churn", "3", True, "onnx")
    assert found.max_batch_rows == 1024
    assert found.limits == {"rows": 100, "bytes": 1000, "string_bytes": 500}
    assert (found.versions, found.aliases) == (("2", "3"), {"stable": "2"})
    assert (found.input_schema, found.output_schema) == (INPUTS, OUTPUTS)
    assert found.passthrough == ("id", "day")
    assert found.ranked_within == ("query", "")
    assert found.metadata == CONTRACT


def test_input_types_have_each_column_once() -> None:
    found = read_description(results()).input_types
    assert found == {"user.age": "number", "a": "float32", "b": "float32"}


@pytest.mark.parametrize("passthrough", ["all", "none"])
def test_passthrough_of_all_or_none_is_a_word(passthrough: str) -> None:
    assert read_description(results(passthrough=passthrough)).passthrough == passthrough


def test_description_is_a_key_by_identity() -> None:
    first, second = read_description(results()), read_description(results())
    assert first != second
    assert len({first: 1, second: 2}) == 2


def test_matching_works_with_a_description() -> None:
    schema = pa.schema([("a", pa.float32()), ("b", pa.float64()), ("age", pa.int8())])
    found = read_description(results(ranked_within=[]))
    sent = Matching(found, schema, columns={"user.age": "age"}).schema
    assert sent == pa.schema([("a", pa.float32()), ("b", pa.float32()), ("user.age", pa.int8())])


@pytest.mark.parametrize("missing", sorted(CONTRACT.keys() - {"rows_fixed", "outputs", "columns"}))
def test_contract_without_a_key_is_a_protocol_error(missing: str) -> None:
    contract = {key: value for key, value in CONTRACT.items() if key != missing}
    with pytest.raises(ProtocolError, match=f"KeyError '{missing}'.*another version") as raised:
        read_description([json.dumps(contract).encode(), *results()[1:]])
    assert raised.value.fault == Fault.SERVER


@pytest.mark.parametrize(
    "bodies",
    [[], [b"{}"], [b"no json", *results()[1:]], [*results()[:2], b"no schema"], [b"[]"] * 3],
)
def test_results_that_are_no_contract_are_a_protocol_error(bodies: list[bytes]) -> None:
    with pytest.raises(ProtocolError, match="contract cannot be read"):
        read_description(bodies)


def test_properties_are_those_of_the_description() -> None:
    model = model_of()
    assert model.name == "churn"
    assert (model.input_schema, model.output_schema) == (INPUTS, OUTPUTS)
    assert (model.versions, model.aliases) == (("2", "3"), {"stable": "2"})
    assert model.metadata == CONTRACT


@pytest.mark.parametrize("version", [None, "stable"])
def test_calls_have_the_name_and_version_of_the_model(version: str | None) -> None:
    client = Recorder()
    model = Model(client, read_description(results()), version=version)
    assert model.score("data") == "scored"
    assert model.score("data", columns={"a": "b"}, timeout_s=2.0, terms={"client": "c"}) == "scored"
    assert model.stream("batches", terms={"client": "c"}, timeout_s=3.0) == "streamed"
    assert model.outcomes("batches", resume=False) == "outcomes"
    nothing = {"version": version, "columns": None, "timeout_s": None, "terms": None}
    given = {"version": version, "columns": {"a": "b"}, "timeout_s": 2.0, "terms": {"client": "c"}}
    streamed = {"version": version, "terms": {"client": "c"}, "timeout_s": 3.0, "resume": True}
    outcomes = {"version": version, "terms": None, "timeout_s": None, "resume": False}
    assert client.calls == [
        ("churn", "data", nothing),
        ("churn", "data", given),
        ("churn", "batches", streamed),
        ("churn", "batches", outcomes),
    ]


def test_repr_has_a_line_for_each_column() -> None:
    assert repr(model_of()).splitlines() == [
        "Model churn, version 3 (onnx, ready; versions 2, 3, stable = 2)",
        "  input  user.age: number",
        "  input  a: float32",
        "  input  b: float32",
        "  output score: float",
        "  output id, day: as sent",
    ]


@pytest.mark.parametrize(
    ("passthrough", "last"),
    [("all", "  output all other columns: as sent"), ("none", "  output score: float")],
)
def test_repr_has_the_passthrough(passthrough: str, last: str) -> None:
    assert repr(model_of(passthrough=passthrough)).splitlines()[-1] == last


def test_repr_says_not_ready() -> None:
    assert "not ready" in repr(model_of(ready=False, aliases={}))


def test_html_is_a_table_with_escaped_text() -> None:
    entry = {"tensor": "x", "column": "<script>alert('x')</script>", "type": "list<int64>"}
    html = model_of(name="a&b", inputs=[entry])._repr_html_()
    assert html.startswith("<table><caption>Model a&amp;b,")
    assert "<script>" not in html
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;" in html
    assert "<td>list&lt;int64&gt;</td>" in html
    assert html.count("<tr>") == 4
