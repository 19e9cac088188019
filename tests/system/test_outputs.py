"""Post-processing, assembled columns, ranks, maps and lists, over Flight and OIP."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pytest
from onnx import TensorProto, helper
from support import models
from support.processes import BIN, Gateway, running
from support.reference_client import ReferenceClient

from iskander.client import Client
from iskander.errors import ContractError, ExecutionFailed

SCRIPT = str(Path(models.__file__).with_name("outputs_client.py"))
FLOAT, INT64, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING

BEGIN = """
format = 1
passthrough = "all"
[[inputs]]
column = "x"
type = "fixed_size_list<float32>[3]"
tensor = "x"
"""
STEPS = (
    'columns = "outputs_first"\n'
    + BEGIN
    + """
[[outputs]]
column = "top"
type = "fixed_size_list<struct<label: utf8, score: float32>>[2]"
tensor = "y"
post = ["softmax", {top_k = 2}]
labels = "labels.txt"
[[outputs]]
column = "label"
type = "utf8"
tensor = "y"
post = ["argmax"]
labels = "labels.txt"
[[outputs]]
column = "raw"
type = "list<float32>"
tensor = "y"
[[outputs]]
column = "unit"
type = "fixed_size_list<float32>[3]"
tensor = "y"
post = ["l2"]
[[outputs]]
column = "is_high"
type = "bool"
tensor = "y"
post = ["sigmoid", {select = 1}, {threshold = 0.75}]
[[outputs]]
column = "small"
type = "fixed_size_list<int8>[3]"
tensor = "y"
post = [{quantize = {scale = 0.5, zero_point = 1}}]
"""
)
PLAIN = (
    'columns = "outputs_first"\n'
    + BEGIN
    + """
[[outputs]]
column = "label"
type = "utf8"
tensor = "y"
post = ["argmax"]
labels = "labels.txt"
[[outputs]]
column = "softmax"
type = "fixed_size_list<float32>[3]"
tensor = "y"
post = ["softmax"]
"""
)
RANKED = """
format = 1
passthrough = ["id", "query"]
columns = ["id", "place", "score", "query"]
[[inputs]]
column = "x"
type = "float32"
tensor = "x"
[[outputs]]
column = "place"
type = "int32"
rank = {of = "score", within = "query"}
[[outputs]]
column = "score"
type = "float32"
tensor = "y"
"""
MAPS = """
format = 1
[[inputs]]
column = "x"
type = "fixed_size_list<float32>[3]"
tensor = "x"
[[outputs]]
column = "chosen"
type = "fixed_size_list<float32>[2]"
tensor = "numbered"
keys = [9, 3]
[[outputs]]
column = "result"
type = "struct<best: utf8, all: fixed_size_list<float32>[3]>"
[outputs.fields]
best = {tensor = "named", keys = ["no", "yes", "perhaps"], post = ["argmax"], labels = "labels.txt"}
all = {tensor = "parts", sequence = "rows"}
"""
LISTS = """
format = 1
passthrough = "all"
[[inputs]]
column = "x"
type = "fixed_size_list<float32>[3]"
tensor = "x"
[[inputs]]
column = "n"
type = "int64"
tensor = "n"
[[outputs]]
column = "first"
type = "list<float32>"
tensor = "y"
lengths = "m"
"""
STRUCT = """
format = 1
[[inputs]]
column = "x"
type = "fixed_size_list<float32>[3]"
tensor = "x"
[[inputs]]
column = "n"
type = "int64"
tensor = "n"
[[outputs]]
column = "both"
type = "struct<row: list<float32>, count: int64>"
fields = {row = {tensor = "y"}, count = {tensor = "m"}}
"""
MISSING = MAPS.replace("[9, 3]", "[9, 4]")


def maps(folder: Path) -> Path:
    """Saves a model that returns maps with keys of both types, and a sequence of rows."""
    nodes = [
        helper.make_node(
            "ZipMap", ["x"], ["numbered"], domain="ai.onnx.ml", classlabels_int64s=[3, 7, 9]
        ),
        helper.make_node(
            "ZipMap",
            ["x"],
            ["named"],
            domain="ai.onnx.ml",
            classlabels_strings=["yes", "no", "perhaps"],
        ),
        helper.make_node("SplitToSequence", ["x"], ["parts"], axis=0, keepdims=0),
    ]

    def sequence(name: str, item: Any) -> Any:
        return helper.make_value_info(name, helper.make_sequence_type_proto(item))

    number = helper.make_tensor_type_proto(FLOAT, [])
    outputs = [
        sequence("numbered", helper.make_map_type_proto(INT64, number)),
        sequence("named", helper.make_map_type_proto(STRING, number)),
        sequence("parts", helper.make_tensor_type_proto(FLOAT, None)),
    ]
    inputs = [helper.make_tensor_value_info("x", FLOAT, ["rows", 3])]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    folder.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), folder / "model.onnx")
    return folder


def lists(folder: Path) -> Path:
    """Saves a model that returns its two inputs: three numbers, and the length of the list."""
    row, count = ["rows", 3], ["rows"]
    return models.save(
        folder,
        [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Identity", ["n"], ["m"])],
        [
            helper.make_tensor_value_info("x", FLOAT, row),
            helper.make_tensor_value_info("n", INT64, count),
        ],
        [
            helper.make_tensor_value_info("y", FLOAT, row),
            helper.make_tensor_value_info("m", INT64, count),
        ],
    )


def with_files(folder: Path, manifest: str) -> Path:
    (folder / "manifest.toml").write_text(manifest)
    (folder / "labels.txt").write_text("cat\ndog\nünï\n")
    return folder


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("outputs")
    three = ["rows", 3]
    together = {"linger_us": 10_000_000, "refuse_late": False}
    paths: dict[str, tuple[Path, dict[str, Any]]] = {
        "steps": (with_files(models.identity(folder / "steps", FLOAT, three), STEPS), {}),
        "plain": (with_files(models.identity(folder / "plain", FLOAT, three), PLAIN), {}),
        "split": (
            with_files(models.identity(folder / "split", FLOAT, three), STEPS),
            {"max_batch_rows": 7},
        ),
        "together": (
            with_files(models.identity(folder / "together", FLOAT, three), STEPS),
            {"max_batch_rows": 12, "lane": together},
        ),
        "ranked": (
            with_files(models.identity(folder / "ranked", FLOAT, ["rows"]), RANKED),
            {"max_batch_rows": 512},
        ),
        "lists": (with_files(lists(folder / "lists"), LISTS), {"max_batch_rows": 4}),
        "struct": (with_files(lists(folder / "struct"), STRUCT), {}),
        "maps": (with_files(maps(folder / "maps"), MAPS), {}),
        "missing": (with_files(maps(folder / "missing"), MISSING), {}),
    }
    served = [
        {"name": name, "path": str(path), "intra_threads": 1, "max_batch_rows": 4096} | more
        for name, (path, more) in paths.items()
    ]
    with running(folder, served, workers={"groups": ["0"], "reattach_s": 5.0}) as ready:
        yield ready
        stats = ready.wait_idle()
        assert stats["workers"][0]["starts"] == 1


@pytest.fixture
def client(gateway: Gateway) -> Iterator[Client]:
    with gateway.client() as client:
        yield client


@pytest.fixture(scope="module")
def reference() -> Iterator[ReferenceClient]:
    reference = ReferenceClient(SCRIPT)
    yield reference
    reference.close()


def rows_of(count: int, first: int = 0) -> np.ndarray:
    """Returns rows of three numbers that depend on the row's index."""
    index = 1 + np.arange(first, first + count, dtype=np.float32)[:, None]
    return np.float32(np.sin(index * [[1, 2, 3]]) + index / 64)


def batch_of(rows: np.ndarray, first: int = 0) -> pa.RecordBatch:
    values = pa.array(rows.reshape(-1))
    ids = pa.array(range(first, first + len(rows)), pa.int64())
    return pa.record_batch({"id": ids, "x": pa.FixedSizeListArray.from_arrays(values, 3)})


LABELS = ["cat", "dog", "ünï"]


def softmax(rows: np.ndarray) -> np.ndarray:
    raised = np.exp(rows.astype(np.float64))
    return np.asarray(raised / raised.sum(axis=1, keepdims=True))


def require_steps(scored: pa.Table | pa.RecordBatch, rows: np.ndarray, first: int = 0) -> None:
    """Checks each column of `STEPS` against formulas in float64."""
    actual = scored.to_pydict()
    names = ["top", "label", "raw", "unit", "is_high", "small", "id"]
    assert scored.schema.names == names
    assert actual["id"] == list(range(first, first + len(rows)))
    shares, order = softmax(rows), np.argsort(-rows, axis=1, kind="stable")
    unit = rows / np.sqrt(np.square(rows.astype(np.float64)).sum(axis=1, keepdims=True))
    for index, row in enumerate(rows):
        assert [each["label"] for each in actual["top"][index]] == [
            LABELS[i] for i in order[index][:2]
        ]
        scores = [each["score"] for each in actual["top"][index]]
        assert scores == pytest.approx(shares[index][order[index][:2]], rel=1e-5)
        assert actual["label"][index] == LABELS[row.argmax()]
        assert actual["raw"][index] == row.tolist()
        assert actual["unit"][index] == pytest.approx(unit[index], rel=1e-5)
        assert actual["is_high"][index] == (1 / (1 + np.exp(-np.float64(row[1]))) >= 0.75)
        assert actual["small"][index] == [round(each / 0.5) + 1 for each in row.tolist()]


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
def test_steps_over_flight(client: Client, rows: int) -> None:
    values = rows_of(rows)
    scored = client.score("steps", batch_of(values))
    kinds = {field.name: str(field.type) for field in scored.schema}
    assert kinds["top"].startswith("fixed_size_list<")
    assert pa.types.is_struct(scored.schema.field("top").type.value_type)
    assert pa.types.is_list(scored.schema.field("raw").type)
    scored.validate(full=True)
    require_steps(scored, values)


def test_steps_over_the_open_inference_protocol(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    """Lists and structs are returned as their named tensors."""
    rows = rows_of(5)
    address = gateway.address
    inputs = {"x": ["float32", rows.tolist()]}
    tensors = reference.run("infer", address=address, model="steps", inputs=inputs)
    assert reference.run("outputs", address=address, model="steps") == [
        ["top.label", "BYTES", [-1, 2]],
        ["top.score", "FP32", [-1, 2]],
        ["label", "BYTES", [-1]],
        ["y", "FP32", [-1, 3]],
        ["unit", "FP32", [-1, 3]],
        ["is_high", "BOOL", [-1]],
        ["small", "INT8", [-1, 3]],
    ]
    with gateway.client() as client:
        scored = client.score("steps", batch_of(rows)).to_pydict()
    top = scored.pop("top")
    for part in ("label", "score"):
        assert tensors[f"top.{part}"][1] == [[each[part] for each in row] for row in top]
    for column, tensor in (("label", "label"), ("raw", "y"), ("unit", "unit")):
        assert tensors[tensor][1] == scored[column]
    assert tensors["is_high"][1] == scored["is_high"]
    assert tensors["small"][1] == scored["small"]


def test_columns_of_one_tensor_come_before_passthrough_columns(client: Client) -> None:
    """The gateway sends the worker's bytes unchanged; the manifest sets the order."""
    rows = rows_of(9)
    scored = client.score("plain", batch_of(rows))
    assert scored.schema.names == ["label", "softmax", "id"]
    assert scored["label"].to_pylist() == [LABELS[row.argmax()] for row in rows]
    assert scored["id"].to_pylist() == list(range(9))
    actual = np.array(scored["softmax"].to_pylist())
    np.testing.assert_allclose(actual, softmax(rows), rtol=1e-5)


def test_split_request_gets_its_rows_in_order(client: Client) -> None:
    rows = rows_of(40)
    require_steps(client.score("split", batch_of(rows)), rows)


def test_requests_in_one_batch_get_their_own_rows(gateway: Gateway, client: Client) -> None:
    """The lane lingers, so that each run has rows of several requests."""
    before = gateway.stats()
    sizes = [5, 1, 4, 2, 7, 5, 3, 9, 12, 1, 1, 10]
    firsts = np.cumsum([0, *sizes[:-1]]).tolist()
    batches = [batch_of(rows_of(n, at), at) for n, at in zip(sizes, firsts, strict=True)]
    for scored, n, at in zip(client.stream("together", batches), sizes, firsts, strict=True):
        require_steps(scored, rows_of(n, at), at)

    def runs(stats: dict[str, Any]) -> int:
        return int(stats["lanes"]["together/1"].get("batches", 0))

    assert runs(gateway.stats()) - runs(before) < len(sizes)


def test_empty_batch_gives_an_empty_result(client: Client) -> None:
    for model in ("steps", "plain"):
        empty = client.score(model, batch_of(rows_of(0)))
        full = client.score(model, batch_of(rows_of(1)))
        assert (empty.num_rows, empty.schema) == (0, full.schema)


def ranked(scores: list[float], queries: list[Any], **more: Any) -> pa.RecordBatch:
    ids = pa.array(range(len(scores)), pa.int64())
    columns = {"id": ids, "query": pa.array(queries), "x": pa.array(scores, pa.float32())}
    return pa.record_batch(columns | more)


def test_ranks_within_a_group(gateway: Gateway, client: Client, reference: ReferenceClient) -> None:
    """Ranks cover the rows of a whole request; a tensor protocol returns only the scores."""
    scores = [0.5, 0.25, 0.5, 0.75, float("nan"), 0.5, 1.0, 0.0, 0.125]
    queries = ["a", "b", "a", "a", "a", None, "b", None, "c"]
    scored = client.score("ranked", ranked(scores, queries))
    assert scored.schema.names == ["id", "place", "score", "query"]
    assert scored.schema.field("place").type == pa.int32()
    assert scored["place"].to_pylist() == [2, 2, 3, 1, 4, 1, 1, 2, 1]
    assert scored["query"].to_pylist() == queries
    assert scored["score"].to_pylist()[:3] == scores[:3]
    expected = [["y", "FP32", [-1]]]
    assert reference.run("outputs", address=gateway.address, model="ranked") == expected


def test_requests_are_ranked_separately(client: Client) -> None:
    batches = [ranked([1.0, 2.0, 3.0], ["a", "a", name]) for name in "aba"]
    answers = [batch["place"].to_pylist() for batch in client.stream("ranked", batches)]
    assert answers == [[3, 2, 1], [2, 1, 1], [3, 2, 1]]


def test_large_requests_are_ranked_whole_and_in_order(gateway: Gateway, client: Client) -> None:
    """Large requests run in several batches, and a thread assembles them."""
    rows = 6000
    random = np.random.default_rng(7)
    scores = [random.permutation(rows).astype(np.float32) for _ in range(3)]
    batches = [ranked(each.tolist(), ["a"] * rows) for each in scores]
    batches.insert(1, ranked([1.0, 2.0], ["a", "a"]))
    answers = client.stream("ranked", batches)
    with gateway.client() as other:
        assert other.score("ranked", ranked([3.0], ["b"]))["place"].to_pylist() == [1]
    places = [scored["place"].to_numpy() for scored in answers]
    assert places.pop(1).tolist() == [2, 1]
    for each, place in zip(scores, places, strict=True):
        np.testing.assert_array_equal(place, rows - each)


def test_missing_or_invalid_group_column_is_a_contract_error(client: Client) -> None:
    with pytest.raises(ContractError, match="`query` is missing: rows are ranked within it"):
        client.score("ranked", ranked([1.0], ["a"]).drop_columns(["query"]))
    with pytest.raises(ContractError, match="cannot be a group key"):
        client.score("ranked", ranked([1.0], [["a"]]))
    assert client.score("ranked", ranked([], pa.array([], pa.utf8()))).num_rows == 0


def test_maps_and_sequences(gateway: Gateway, client: Client, reference: ReferenceClient) -> None:
    rows = rows_of(6)
    scored = client.score("maps", batch_of(rows).select(["x"])).to_pydict()
    assert scored["chosen"] == rows[:, [2, 0]].tolist()
    assert [each["all"] for each in scored["result"]] == rows.tolist()
    best = [LABELS[row[[1, 0, 2]].argmax()] for row in rows]
    assert [each["best"] for each in scored["result"]] == best
    inputs = {"x": ["float32", rows.tolist()]}
    tensors = reference.run("infer", address=gateway.address, model="maps", inputs=inputs)
    assert tensors["result.best"] == ["BYTES", best]
    assert tensors["result.all"] == ["FP32", rows.tolist()]
    assert tensors["chosen"] == ["FP32", rows[:, [2, 0]].tolist()]


def test_lists_with_lengths_from_a_tensor(
    gateway: Gateway, client: Client, reference: ReferenceClient
) -> None:
    """The request is split; a tensor protocol returns all entries and the lengths."""
    rows, lengths = rows_of(11), [index % 4 for index in range(11)]
    batch = batch_of(rows).append_column("n", pa.array(lengths, pa.int64()))
    scored = client.score("lists", batch)
    assert scored.schema.names == ["id", "first"]
    expected = [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]
    assert scored["first"].to_pylist() == expected
    inputs = {"x": ["float32", rows.tolist()], "n": ["int64", lengths]}
    tensors = reference.run("infer", address=gateway.address, model="lists", inputs=inputs)
    assert tensors == {"first": ["FP32", rows.tolist()], "first.length": ["INT32", lengths]}


def test_struct_of_graph_outputs(
    gateway: Gateway, client: Client, reference: ReferenceClient
) -> None:
    rows, counts = rows_of(4), [3, 1, 4, 1]
    batch = batch_of(rows).append_column("n", pa.array(counts, pa.int64())).drop_columns(["id"])
    expected = [{"row": r.tolist(), "count": n} for r, n in zip(rows, counts, strict=True)]
    assert client.score("struct", batch)["both"].to_pylist() == expected
    inputs = {"x": ["float32", rows.tolist()], "n": ["int64", counts]}
    tensors = reference.run("infer", address=gateway.address, model="struct", inputs=inputs)
    assert tensors == {"both.row": ["FP32", rows.tolist()], "both.count": ["INT64", counts]}


def test_invalid_length_fails_only_its_own_request(client: Client) -> None:
    batch = batch_of(rows_of(2)).append_column("n", pa.array([1, 4], pa.int64()))
    with pytest.raises(ExecutionFailed, match="has no length of 0 to 3"):
        client.score("lists", batch)
    batch = batch_of(rows_of(2)).append_column("n", pa.array([1, 3], pa.int64()))
    assert client.score("lists", batch).num_rows == 2


def test_missing_map_key_fails_the_run(client: Client) -> None:
    with pytest.raises(ExecutionFailed, match="a map without the key 4"):
        client.score("missing", batch_of(rows_of(1)).select(["x"]))


def test_assembled_columns_are_described(gateway: Gateway, client: Client) -> None:
    (steps,) = (model for model in client.models() if model["name"] == "steps")
    described = {each["column"]: each for each in steps["outputs"]}
    assert list(described) == ["top", "label", "raw", "unit", "is_high", "small"]
    assert described["top"]["tensors"] == ["top.label", "top.score"]
    assert described["top"]["made"] == "y, softmax, top_k 2, labels labels.txt"
    assert described["unit"]["made"] == "y, l2"
    assert steps["columns"] == "outputs_first"
    folder = gateway.folder / "steps"
    output = subprocess.run(
        [BIN / "iskander", "manifest", folder], capture_output=True, text=True, check=True
    ).stdout
    assert 'post = ["softmax", { top_k = 2 }]' in output
    assert 'columns = "outputs_first"' in output


def test_changed_labels_are_reloaded_by_a_reattached_worker(tmp_path: Path) -> None:
    """A reattached worker keeps a loaded model only if its files are unchanged."""
    folder = with_files(models.identity(tmp_path / "m", FLOAT, ["rows", 3]), PLAIN)
    model = {"name": "m", "path": str(folder), "intra_threads": 1}
    gateway = Gateway(tmp_path, [model], workers={"groups": ["0"], "reattach_s": 60.0}).start()
    try:
        (pid,) = gateway.worker_pids()
        gateway.signal(signal.SIGKILL)
        gateway.wait()
        (folder / "labels.txt").write_text("one\ntwo\nthree\n")
        gateway.start()
        with gateway.client() as client:
            scored = client.score("m", batch_of(np.float32([[0, 1, 0]])))
        assert scored["label"].to_pylist() == ["two"]
        assert gateway.worker_pids() == [pid]
        gateway.stop()
    finally:
        gateway.end()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("{top_k = 2}", "{top_k = 4}"), "at least 4 in the last axis"),
        (
            ('labels = "labels.txt"', 'labels = "none.txt"'),
            "`none.txt` beside the model",
        ),
        (('labels = "labels.txt"', 'labels = "short.txt"'), "1 lines and there are 3 classes"),
    ],
)
def test_invalid_post_processing_is_a_load_error(
    tmp_path: Path, change: tuple[str, str], text: str
) -> None:
    folder = with_files(models.identity(tmp_path / "m", FLOAT, ["rows", 3]), STEPS.replace(*change))
    (folder / "short.txt").write_text("cat\n")
    config = tmp_path / "iskander.toml"
    config.write_text(f'[[models]]\nname = "m"\npath = "{folder}"\n')
    checked = subprocess.run(
        [BIN / "iskander", "check", config], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 78
    assert text in checked.stderr
