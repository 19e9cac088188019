"""Column types on a real server; results are compared with NumPy."""

from __future__ import annotations

import datetime as dt
import http.client
import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from onnx import TensorProto, helper
from support import models
from support.processes import BIN, Gateway, running

from iskander.client import Client
from iskander.errors import ContractError, ExecutionFailed, IskanderError, Superseded

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
OUTPUT = """
[[outputs]]
tensor = "y"
column = "y"
"""


def info(name: str, element: int, *shape: Any) -> Any:
    return helper.make_tensor_value_info(name, element, ["rows", *shape])


def manifest(folder: Path, text: str, kind: str, passthrough: str = "none") -> Path:
    (folder / "manifest.toml").write_text(
        f'format = 1\npassthrough = "{passthrough}"\n{text}{OUTPUT}type = "{kind}"\n'
    )
    return folder


def tabular(folder: Path) -> Path:
    """`y` is the sum of the packed columns, times 1, 10, 100 and 1000."""
    weights = helper.make_tensor("w", FLOAT, [4, 1], [1.0, 10.0, 100.0, 1000.0])
    models.save(
        folder,
        [
            helper.make_node("MatMul", ["x", "w"], ["p"]),
            helper.make_node("Squeeze", ["p", "a"], ["y"]),
        ],
        [info("x", FLOAT, 4)],
        [info("y", FLOAT)],
        [weights, helper.make_tensor("a", INT64, [1], [1])],
    )  # fmt: skip
    text = """
[[inputs]]
tensor = "x"
columns = ["age", "user.rate", "is_new", "clicks"]
cast = true
fill = 0.0
"""
    return manifest(folder, text, "float32", "all")


def masked_sum(folder: Path) -> Path:
    """`y` is the sum of a row's valid elements, plus 1000 times its length."""
    models.save(
        folder,
        [
            helper.make_node("Mul", ["x", "m"], ["kept"]),
            helper.make_node("ReduceSum", ["kept", "a"], ["sum"], keepdims=0),
            helper.make_node("Cast", ["n"], ["length"], to=FLOAT),
            helper.make_node("Mul", ["length", "thousand"], ["large"]),
            helper.make_node("Add", ["sum", "large"], ["y"]),
        ],
        [info("x", FLOAT, "length"), info("m", FLOAT, "length"), info("n", INT64)],
        [info("y", FLOAT)],
        [
            helper.make_tensor("a", INT64, [1], [1]),
            helper.make_tensor("thousand", FLOAT, [], [1000.0]),
        ],
    )
    text = """
[[inputs]]
tensor = "x"
column = "values"
cast = true
type = "list<int32>"
max_length = 5
padding = 7.5
truncate = "tail"
nulls = "mask"
mask = "m"
lengths = "n"
"""
    return manifest(folder, text, "float32")


def moments(folder: Path) -> Path:
    """`y` is the time in hours plus the price in hundredths."""
    models.save(
        folder,
        [helper.make_node("Add", ["t", "p"], ["y"])],
        [info("t", TensorProto.DOUBLE), info("p", TensorProto.DOUBLE)],
        [info("y", TensorProto.DOUBLE)],
    )
    text = """
[[inputs]]
tensor = "t"
column = "at"
type = "timestamp"
unit = "h"
nulls = "nan"
[[inputs]]
tensor = "p"
column = "price"
type = "decimal128(10, 2)"
as = "unscaled"
"""
    return manifest(folder, text, "float64")


def words(folder: Path) -> Path:
    """`y` is the first word's index plus ten times the second's, which is one-hot encoded."""
    models.save(
        folder,
        [
            helper.make_node("ArgMax", ["hot"], ["second"], axis=1, keepdims=0),
            helper.make_node("Mul", ["second", "ten"], ["tens"]),
            helper.make_node("Add", ["first", "tens"], ["y"]),
        ],
        [info("first", INT64), info("hot", FLOAT, 4)],
        [info("y", INT64)],
        [helper.make_tensor("ten", INT64, [], [10])],
    )
    (folder / "words.txt").write_text("red\ngreen\nžlutá\n")
    text = """
[[inputs]]
tensor = "first"
column = "first"
vocabulary = "words.txt"
[[inputs]]
tensor = "hot"
column = "second"
vocabulary = "words.txt"
one_hot = true
unknown = 3
fill = "red"
"""
    return manifest(folder, text, "int64")


def lengths(folder: Path) -> Path:
    """`y` is the sum of a row, and `t` its padded length."""
    models.save(
        folder,
        [
            helper.make_node("ReduceSum", ["x", "a"], ["y"], keepdims=0),
            helper.make_node("Mul", ["x", "zero"], ["zeros"]),
            helper.make_node("Add", ["zeros", "one"], ["ones"]),
            helper.make_node("ReduceSum", ["ones", "a"], ["count"], keepdims=0),
            helper.make_node("Cast", ["count"], ["t"], to=TensorProto.STRING),
        ],
        [info("x", INT64, "length")],
        [info("y", INT64), info("t", TensorProto.STRING)],
        [
            helper.make_tensor("a", INT64, [1], [1]),
            helper.make_tensor("zero", INT64, [], [0]),
            helper.make_tensor("one", INT64, [], [1]),
        ],
    )
    text = """
[[inputs]]
tensor = "x"
column = "x"
buckets = [4, 16, 64]
[[outputs]]
tensor = "t"
column = "t"
type = "utf8"
"""
    # A load cannot decide, because `t` is the same for all generated rows.
    return manifest(folder, f"combine = true\n{text}", "int64", "all")


def picky(folder: Path) -> Path:
    """`y` is ten times the first element of a row; elements above 9 fail."""
    models.save(
        folder,
        [
            helper.make_node("Gather", ["x", "zero"], ["first"], axis=1),
            helper.make_node("Gather", ["tens", "first"], ["y"]),
        ],
        [info("x", INT64, "length")],
        [info("y", INT64)],
        [
            helper.make_tensor("zero", INT64, [], [0]),
            helper.make_tensor("tens", INT64, [10], [10 * n for n in range(10)]),
        ],
    )
    text = """
[[inputs]]
tensor = "x"
column = "x"
buckets = [4, 16, 64]
"""
    return manifest(folder, text, "int64")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("columns")
    paths = {
        "tabular": tabular(folder / "tabular"),
        "masked": masked_sum(folder / "masked"),
        "moments": moments(folder / "moments"),
        "words": words(folder / "words"),
        "lengths": lengths(folder / "lengths"),
        "picky": picky(folder / "picky"),
    }
    served = [
        {"name": name, "path": str(path), "intra_threads": 1, "max_batch_rows": 16}
        for name, path in paths.items()
    ]
    with running(
        folder, served, workers={"groups": ["0"]}, http={"address": "127.0.0.1:0"}
    ) as ready:
        yield ready
        stats = ready.wait_idle()
        assert stats["workers"][0]["starts"] == 1


@pytest.fixture
def client(gateway: Gateway) -> Iterator[Client]:
    with gateway.client() as client:
        yield client


def oip_infer(gateway: Gateway, model: str, request: Any) -> tuple[int, Any]:
    """Sends an Open Inference Protocol request over HTTP; returns the status and the body."""
    host, _, port = gateway.stats()["http_address"].rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    try:
        connection.request("POST", f"/v2/models/{model}/infer", json.dumps(request))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def score_columns(client: Client, model: str, **columns: Any) -> pa.RecordBatch:
    (result,) = client.stream(model, [pa.record_batch(columns)])
    result.validate(full=True)
    return result


def test_columns_of_mixed_types_form_one_tensor(client: Client) -> None:
    """Integers, a struct field, booleans and a dictionary, with nulls, in several batches."""
    rows = 50
    age = [None if n % 7 == 0 else n for n in range(rows)]
    rate = [None if n % 5 == 0 else {"rate": n / 4} for n in range(rows)]
    new = [n % 2 == 0 for n in range(rows)]
    clicks = [n % 3 for n in range(rows)]

    result = score_columns(
        client,
        "tabular",
        age=pa.array(age, pa.int16()),
        id=pa.array([f"r{n}" for n in range(rows)]),
        user=pa.array(rate, pa.struct([("rate", pa.float64())])),
        is_new=pa.array(new),
        clicks=pa.array(clicks, pa.int64()).dictionary_encode(),
    )

    expected = [
        (a or 0) + 10 * (r or {"rate": 0})["rate"] + 100 * n + 1000 * c
        for a, r, n, c in zip(age, rate, new, clicks, strict=True)
    ]
    np.testing.assert_allclose(result["y"].to_numpy(), np.array(expected, np.float32))
    assert result["id"].to_pylist() == [f"r{n}" for n in range(rows)]


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list, pa.list_view], ids=lambda k: k.__name__)
def test_ragged_rows_with_mask_and_lengths(client: Client, kind: Any) -> None:
    rows = [list(range(n % 8)) for n in range(20)]
    rows[3] = [None, 4]
    result = score_columns(client, "masked", values=pa.array(rows, kind(pa.int32())))
    expected = [sum(v or 0 for v in row[-5:]) + 1000 * min(len(row), 5) for row in rows]
    assert result["y"].to_pylist() == expected


def test_timestamps_and_decimals(client: Client) -> None:
    start = dt.datetime(2024, 5, 1, tzinfo=dt.UTC)
    at = [start, None, start + dt.timedelta(minutes=90)]
    price = [Decimal("1.25"), Decimal("0.00"), Decimal("-3.10")]
    result = score_columns(
        client,
        "moments",
        at=pa.array(at, pa.timestamp("ms", "Europe/Prague")),
        price=pa.array(price, pa.decimal128(10, 2)),
    )
    hours = start.timestamp() / 3600
    np.testing.assert_allclose(
        result["y"].to_numpy(), [hours + 125, float("nan"), hours + 1.5 - 310]
    )


def test_rows_of_all_lengths_keep_their_order(client: Client) -> None:
    """Each row is padded to its own bucket, in batches with one bucket and with several."""
    rng = np.random.default_rng(3)
    batches = []
    for most in (4, 64, 1, 30, 64, 17):
        rows = [list(range(n)) for n in rng.integers(0, most + 1, 40).tolist()]
        names = pa.array([f"r{n}" for n in range(40)])
        batches.append(pa.record_batch({"x": pa.array(rows, pa.list_(pa.int64())), "id": names}))
    batches.append(batches[0].slice(0, 0))

    results = list(client.stream("lengths", batches))

    assert len(results) == len(batches)
    for sent, result in zip(batches, results, strict=True):
        result.validate(full=True)
        rows = sent["x"].to_pylist()
        assert result["y"].to_pylist() == [sum(row) for row in rows]
        padded = [next(size for size in (4, 16, 64) if size >= len(row)) for row in rows]
        assert result["t"].to_pylist() == [str(size) for size in padded]
        assert result["id"].to_pylist() == sent["id"].to_pylist()
    with pytest.raises(ContractError, match="row 1 has 65 elements, limit 64"):
        score_columns(client, "lengths", x=pa.array([[1], [2] * 65]))


def test_large_split_batch_is_assembled_in_a_thread(client: Client) -> None:
    rows = [[n] * (n % 60) for n in range(18_000)]
    result = score_columns(client, "lengths", x=pa.array(rows, pa.list_(pa.int64())))
    assert result["y"].to_pylist() == [n * (n % 60) for n in range(18_000)]


def test_failed_portion_fails_only_its_batch(client: Client) -> None:
    """The model fails on a short or a long row; the other batches get results."""

    def batch(*rows: list[int]) -> pa.RecordBatch:
        return pa.record_batch({"x": pa.array(rows, pa.list_(pa.int64()))})

    batches = [
        batch([1], [2] * 9),
        batch([99], [2] * 9, [3] * 30),
        batch([1], [2] * 9, [99] * 30),
        batch([1], [2] * 3),
        batch([1], [2] * 65),
        batch([4] * 9, [5]),
    ]
    outcomes = list(client.outcomes("picky", batches))
    kinds = [type(each) for each in outcomes]
    assert kinds[1:3] == [ExecutionFailed] * 2 and kinds[4] is ContractError
    results = [each["y"].to_pylist() for each in outcomes if isinstance(each, pa.RecordBatch)]
    assert results == [[10, 20], [10, 20], [40, 50]]


def test_portions_of_one_batch_do_not_supersede_each_other(client: Client) -> None:
    """With `newest_wins`, consecutive batches get results, too."""
    rows = pa.array([[1], [2] * 9, [3] * 30, [4] * 2], pa.list_(pa.int64()))
    batch = pa.record_batch({"x": rows})
    terms = {"client": "camera", "newest_wins": True}
    for _ in range(3):
        (result,) = client.stream("lengths", [batch], terms=terms)
        assert result["y"].to_pylist() == [1, 18, 90, 8]
    outcomes = list(client.outcomes("lengths", [batch] * 20, terms=terms))
    assert isinstance(outcomes[-1], pa.RecordBatch)
    for each in outcomes:
        if isinstance(each, pa.RecordBatch):
            assert each["y"].to_pylist() == [1, 18, 90, 8]
        else:
            assert isinstance(each, Superseded)


def test_clients_that_share_batches_get_their_own_rows(gateway: Gateway) -> None:
    """Streams with short and with long rows run at the same time."""

    def score_rows(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        with gateway.client() as client:
            rows = [
                [[seed] * n for n in rng.integers(0, 65 if seed % 2 else 5, 7).tolist()]
                for _ in range(20)
            ]
            sent = [pa.record_batch({"x": pa.array(each, pa.list_(pa.int64()))}) for each in rows]
            results = [each["y"].to_pylist() for each in client.stream("lengths", sent)]
            return results == [[sum(row) for row in each] for each in rows]

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(score_rows, range(1, 7)))


def test_tensor_protocols_accept_only_bucket_lengths(gateway: Gateway, client: Client) -> None:
    """Clients of tensor protocols pad their rows themselves."""
    rows = [[1] * 16, [2] * 16]
    request = {"inputs": [{"name": "x", "datatype": "INT64", "shape": [2, 16], "data": rows}]}
    status, response = oip_infer(gateway, "lengths", request)
    assert status == 200
    assert {each["name"]: each["data"] for each in response["outputs"]}["y"] == [16, 32]
    request["inputs"][0] |= {"shape": [2, 5], "data": [[1] * 5, [2] * 5]}
    status, response = oip_infer(gateway, "lengths", request)
    assert status == 400 and "got INT64 [2, 5]" in response["error"]


def test_words_are_mapped_to_indices_and_unknown_words_rejected(client: Client) -> None:
    result = score_columns(
        client,
        "words",
        first=pa.array(["žlutá", "red", "green"]).dictionary_encode(),
        second=pa.array(["green", "mauve", None], pa.large_utf8()),
    )
    assert result["y"].to_pylist() == [12, 30, 1]
    with pytest.raises(ContractError, match="has `blue`, which is not in the vocabulary"):
        score_columns(
            client, "words", first=pa.array(["red", "blue"]), second=pa.array(["red", "red"])
        )


def test_unknown_word_fails_only_its_sender(gateway: Gateway) -> None:
    """Streams share batches; half of the streams send an unknown word."""

    def score_word(index: int) -> bool:
        word = f"blue{index}" if index % 2 else "green"
        batch = pa.record_batch({"first": pa.array([word]), "second": pa.array(["red"])})
        with gateway.client() as client:
            outcomes = list(client.outcomes("words", [batch] * 20))
        if word == "green":
            return [each["y"].to_pylist() for each in outcomes] == [[1]] * 20
        return all(isinstance(each, ContractError) and word in str(each) for each in outcomes)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(score_word, range(6)))


def manifest_of(model: Path) -> str:
    """Returns the output of `iskander manifest`."""
    command = [BIN / "iskander", "manifest", model]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


INVALID_COLUMNS: dict[str, tuple[str, dict[str, Any], str]] = {
    "null type": ("moments", {"at": pa.nulls(1)}, "no values"),
    "another decimal scale": (
        "moments",
        {"price": pa.array([Decimal("1.250")])},
        "wanted decimal128",
    ),
    "null": ("moments", {"price": pa.array([None], pa.decimal128(10, 2))}, "first in row 0"),
    "missing field": ("tabular", {"user": pa.array([{"r": 1.0}])}, "`user.rate`"),
    "number out of range": ("tabular", {"clicks": pa.array([1e300])}, "row 0 has 1e\\+300"),
}


@pytest.mark.parametrize("case", INVALID_COLUMNS)
def test_invalid_column_ends_only_its_stream(client: Client, case: str) -> None:
    valid: dict[str, dict[str, Any]] = {
        "moments": {
            "at": pa.array([0], pa.timestamp("s")),
            "price": pa.array([Decimal("1.00")], pa.decimal128(10, 2)),
        },
        "tabular": {
            "age": pa.array([1]), "user": pa.array([{"rate": 1.0}]), "is_new": pa.array([True]),
            "clicks": pa.array([1]),
        },
    }  # fmt: skip
    model, invalid, words = INVALID_COLUMNS[case]
    with pytest.raises(IskanderError, match=words):
        score_columns(client, model, **(valid[model] | invalid))
    assert score_columns(client, model, **valid[model]).num_rows == 1


def test_large_batch_keeps_its_order(client: Client) -> None:
    """Batches above 4 MiB are converted in a thread."""
    rng = np.random.default_rng(5)
    columns = {
        "age": rng.integers(0, 99, 200_000),
        "is_new": rng.integers(0, 2, 200_000) > 0,
        "clicks": rng.integers(0, 3, 200_000),
    }
    user = pa.StructArray.from_arrays([pa.array(rng.random(200_000))], ["rate"])
    arrays = {name: pa.array(data) for name, data in columns.items()}
    large = pa.record_batch(arrays | {"user": user})
    batches = [large.slice(0, 10), large, large.slice(10, 5)]
    results = list(client.stream("tabular", batches))
    assert [batch.num_rows for batch in results] == [10, 200_000, 5]
    expected = columns["age"] + 10 * user.field(0).to_numpy() + 100.0 * columns["is_new"]
    expected = (expected + 1000 * columns["clicks"]).astype(np.float32)
    np.testing.assert_allclose(results[1]["y"].to_numpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(results[2]["y"].to_numpy(), expected[10:15], rtol=1e-5)


def test_model_description_contains_the_column_mapping(client: Client, gateway: Gateway) -> None:
    described = {model["name"]: model for model in client.models()}
    (table,) = described["tabular"]["inputs"]
    assert table["columns"] == ["age", "user.rate", "is_new", "clicks"] and table["fill"] == 0.0
    (values,) = described["masked"]["inputs"]
    assert (values["max_length"], values["mask"], values["truncate"]) == (5, "m", "tail")
    folder = gateway.folder
    printed = manifest_of(folder / "masked")
    assert 'type = "list<int32>"' in printed and 'lengths = "n"' in printed
    (folder / "masked" / "manifest.toml").write_text(printed)
    assert manifest_of(folder / "masked") == printed
    assert json.loads(json.dumps(described))
