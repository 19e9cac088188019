"""Manifests made of signatures and samples, and samples held against contracts column by column."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from iskander.cli.sample import Sample, explain, manifest_for, read_sample
from iskander.contract.compile import compile_contract
from iskander.contract.graph import Graph, GraphTensor
from iskander.contract.manifest import InputColumn, Manifest
from iskander.contract.manifest_schema import TABLES, keys_of, manifest_schema
from iskander.contract.mlflow import manifest_of_signature
from iskander.contract.outputs import OutputColumn
from iskander.contract.render import render_entries
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
def test_every_key_of_a_manifest_has_a_type_and_a_sentence(table: str) -> None:
    keys = list(keys_of(TABLES[table]))

    assert keys and all(key.type and key.sentence.endswith(".") for key in keys), keys


def test_the_schema_knows_what_a_manifest_may_say() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = manifest_schema()
    good = {
        "format": 1,
        "inputs": [{"tensor": "x", "column": "x", "nulls": "nan", "as": "number"}],
        "outputs": [{"tensor": "y", "column": "y", "type": "float32", "post": [{"top_k": 2}]}],
        "sha256": {"model.onnx": "0" * 64},
        "warm_up": {"values": "random", "low": 1.0},
    }
    jsonschema.validate(good, schema)
    for bad in (
        good | {"format": 2},
        good | {"unknown": 1},
        good | {"sha256": {"model.onnx": "abc"}},
        good | {"inputs": [{"column": "x"}]},
        good | {"warm_up": {"values": "twos"}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(bad, Manifest)


def test_a_signature_of_columns_is_a_manifest_that_can_be_read_again() -> None:
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
    ("document", "words"),
    [
        ([], "no signature"),
        ({"flavors": {}}, "no signature"),
        ({"inputs": "{", "outputs": "[]"}, "not JSON"),
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
def test_a_signature_that_says_too_little_is_refused(document: Any, words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        manifest_of_signature(document)


def test_a_sample_is_explained_column_by_column() -> None:
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
    good = {
        "user": pa.array([1, 2]),
        "a": pa.array([1.0, 2.0], pa.float32()),
        "b": pa.array([{"c": 1.0}, {"c": 2.0}], pa.struct([("c", pa.float32())])),
        "id": ["x", "y"],
    }

    lines = explain(sample(**good), contract)
    assert [(line.column, line.problem) for line in lines] == [
        ("user", ""),
        ("a", ""),
        ("b.c", ""),
        ("id", ""),
    ]
    bad = good | {
        "user": pa.array([1, None]),
        "a": pa.array([1.0, 2.0]),
        "when": [datetime.max] * 2,
    }
    del bad["b"], bad["id"]
    found = {line.column: line for line in explain(sample(**bad), contract)}
    assert found["user"].problem.startswith("has 1 nulls, the first in row 1")
    assert found["a"].problem == "wanted float32, got double"
    assert (found["b.c"].found, found["b.c"].problem) == ("-", "is missing: wanted float32")
    assert found["when"].problem == "neither an input nor passed through"
    assert (found["id"].expected, found["id"].found) == ("passed through", "-")


def test_a_manifest_for_a_sample_takes_it() -> None:
    """By the columns' names, or all numbers packed; what is left passes, nulls become NaN."""
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
        make = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with make(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)
    found = read_sample(file)

    assert found.batch.schema == table.schema
    assert found.batch.num_rows == {"parquet": 65_536, "empty": 0}.get(kind, 1000)
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(ManifestError, match="cannot be read as Parquet or Arrow"):
        read_sample(file)
