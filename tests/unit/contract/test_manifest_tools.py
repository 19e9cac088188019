"""Manifests from signatures and samples, and comparison of samples with contracts."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from iskander.cli.startup.sample import Sample, explain, manifest_for, read_sample
from iskander.contract.compile import compile_contract
from iskander.contract.formats.manifest_schema import TABLES, keys_of, manifest_schema
from iskander.contract.formats.mlflow import manifest_of_signature
from iskander.contract.formats.render import render_entries
from iskander.contract.graph import Graph, GraphTensor
from iskander.contract.manifest import InputColumn, Manifest
from iskander.contract.outputs import OutputColumn
from iskander.errors import ManifestError

GRAPH = Graph(
    (GraphTensor("user", "tensor(int64)", ("n",)), GraphTensor("x", "tensor(float)", ("n", 2))),
    (GraphTensor("y", "tensor(float)", ("n",)),),
)
PACKED = Graph(
    (GraphTensor("features", "tensor(float)", (None, 3)),),
    (GraphTensor("y", "tensor(float)", (None,)),),
)


def sample(**columns: Any) -> Sample:
    return Sample("s.parquet", pa.record_batch(columns))


@pytest.mark.parametrize("table", TABLES)
def test_every_manifest_key_has_a_type_and_a_sentence(table: str) -> None:
    keys = list(keys_of(TABLES[table]))

    assert keys and all(key.type and key.sentence.endswith(".") for key in keys), keys


@pytest.mark.long
def test_json_schema_matches_the_manifest_decoder() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = manifest_schema()
    valid = {
        "format": 1,
        "inputs": [{"tensor": "x", "column": "x", "nulls": "nan", "as": "number"}],
        "outputs": [{"tensor": "y", "column": "y", "type": "float32", "post": [{"top_k": 2}]}],
        "sha256": {"model.onnx": "0" * 64},
        "warm_up": {"values": "random", "low": 1.0},
    }
    jsonschema.validate(valid, schema)
    for invalid in (
        valid | {"format": 2},
        valid | {"unknown": 1},
        valid | {"sha256": {"model.onnx": "abc"}},
        valid | {"inputs": [{"column": "x"}]},
        valid | {"warm_up": {"values": "twos"}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(invalid, schema)
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(invalid, Manifest)


def test_manifest_of_a_signature_can_be_rendered_and_read() -> None:
    inputs = [
        {"type": kind, "name": f"{kind} \u00e9", "required": True}
        for kind in ("boolean", "integer", "long", "float", "double", "string", "binary")
    ]
    outputs = [{"type": "tensor", "tensor-spec": {"dtype": "float16", "shape": [-1, 3, 2]}}]
    document = {
        "flavors": {},
        "signature": {"inputs": json.dumps(inputs), "outputs": json.dumps(outputs)},
    }

    manifest = manifest_of_signature(document)

    assert [entry.type for entry in manifest.inputs] == [
        "bool", "int32", "int64", "float32", "float64", "utf8", "binary",
    ]  # fmt: skip
    assert manifest.outputs == (
        OutputColumn("output", "fixed_size_list<fixed_size_list<float16>[2]>[3]", "output"),
    )
    assert msgspec.toml.decode(render_entries(manifest), type=Manifest) == manifest
    assert manifest_of_signature(document["signature"]) == manifest


def tensor(**spec: Any) -> list[dict[str, Any]]:
    return [{"name": "t", "type": "tensor", "tensor-spec": spec}]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "no signature"),
        ({"flavors": {}}, "no signature"),
        ({"inputs": "{", "outputs": "[]"}, "not JSON"),
        ({"inputs": "\ud800", "outputs": "[]"}, "not JSON"),
        ({"inputs": "[" * 5000, "outputs": "[]"}, "not JSON"),
        ({"inputs": [{"type": ["long"], "name": "a"}]}, "`a` is of the type"),
        ({"inputs": [1], "outputs": []}, "not a list of columns"),
        ({"inputs": [{"type": "long", "name": "a"}]}, "no outputs"),
        ({"inputs": [{"type": "datetime", "name": "when"}]}, "`when` is of the type `datetime`"),
        ({"inputs": [{"type": "array", "name": "a"}]}, "`a` is of the type `array`"),
        ({"inputs": tensor(dtype="complex64", shape=[-1])}, "`t` is of `complex64`"),
        ({"inputs": tensor(dtype="float32", shape=[4, 2])}, "first axis is no batch"),
        ({"inputs": tensor(dtype="float32", shape=[-1, -1])}, "only the first axis"),
        ({"inputs": tensor(dtype="float32")}, "first axis is no batch"),
    ],
)
def test_incomplete_signature_is_rejected(document: Any, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        manifest_of_signature(document)


def test_explain_reports_each_column_of_a_sample() -> None:
    manifest = Manifest(
        format=1,
        inputs=(
            InputColumn(tensor="user", column="user", type="int64"),
            InputColumn(tensor="x", columns=("a", "b.c"), type="float32"),
        ),
        outputs=(OutputColumn("y", "float32", "y"),),
        passthrough=("id",),
    )
    contract = compile_contract(manifest, GRAPH)
    valid = {
        "user": pa.array([1, 2]),
        "a": pa.array([1.0, 2.0], pa.float32()),
        "b": pa.array([{"c": 1.0}, {"c": 2.0}], pa.struct([("c", pa.float32())])),
        "id": ["x", "y"],
    }

    lines = explain(sample(**valid), contract)
    assert [(line.column, line.problem) for line in lines] == [
        ("user", ""),
        ("a", ""),
        ("b.c", ""),
        ("id", ""),
    ]
    invalid = valid | {
        "user": pa.array([1, None]),
        "a": pa.array([1.0, 2.0]),
        "when": [datetime.max] * 2,
    }
    del invalid["b"], invalid["id"]
    lines_by_column = {line.column: line for line in explain(sample(**invalid), contract)}
    assert lines_by_column["user"].problem.startswith("has 1 nulls, the first in row 1")
    assert lines_by_column["a"].problem == "wanted float32, got double"
    assert (lines_by_column["b.c"].found, lines_by_column["b.c"].problem) == (
        "-",
        "is missing: wanted float32",
    )
    assert lines_by_column["when"].problem == "neither an input nor passed through"
    assert (lines_by_column["id"].expected, lines_by_column["id"].found) == ("passed through", "-")


def test_manifest_for_a_sample_accepts_the_sample() -> None:
    """Columns match by name, or all numbers are packed into one input; others pass through."""
    named = sample(
        user=pa.array([1, 2], pa.int16()),
        x=pa.FixedSizeListArray.from_arrays(pa.array([1, 2, 3, 4], pa.float32()), 2),
        other=["a", "b"],
    )
    packed = sample(
        a=pa.array([1, 2]), label=["u", "v"], b=pa.array([1.5, None]), c=pa.array([True, False])
    )
    for each, graph in ((named, GRAPH), (packed, PACKED)):
        manifest = manifest_for(each, graph)
        contract = compile_contract(manifest, graph)
        assert manifest.passthrough == "all"
        assert not any(line.problem for line in explain(each, contract))
    assert manifest.inputs[0].columns == ("a", "b", "c")
    assert (manifest.inputs[0].type, manifest.inputs[0].nulls) == ("number", "nan")
    with pytest.raises(ManifestError, match="no column for the inputs user, x"):
        manifest_for(packed, GRAPH)


@pytest.mark.parametrize("kind", ["parquet", "file", "stream", "empty"])
def test_samples_are_read_from_parquet_and_arrow(tmp_path: Path, kind: str) -> None:
    table = pa.table(
        {"x": list(range(0 if kind == "empty" else 100_000))}, pa.schema([("x", "int64")])
    )
    file = tmp_path / ("s.parquet" if kind in ("parquet", "empty") else "s.arrow")
    if file.suffix == ".parquet":
        pq.write_table(table, file)
    else:
        new_writer = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with new_writer(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)
    actual = read_sample(file)

    assert actual.batch.schema == table.schema
    assert actual.batch.num_rows == {"parquet": 65_536, "empty": 0}.get(kind, 1000)
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(ManifestError, match="cannot be read as Parquet or Arrow"):
        read_sample(file)
