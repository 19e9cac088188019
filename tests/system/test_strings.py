"""Strings and bfloat16 through a running server: inputs, batching, splitting and results."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from onnx import TensorProto, helper
from support import models, raw
from support.processes import Gateway, running

from iskander._generated import oip_pb2
from iskander.arrow.types import BFloat16
from iskander.client import Client
from iskander.errors import ContractError, ExecutionFailed, LimitExceeded

STRING_BYTES_MAX = 4096
RESULT_BYTES = 64
TEXTS = ["", "a", "žluťoučký", "🦎🌍👩‍🚀", "x\0y", "line\nline", "", "z" * RESULT_BYTES]

BINARY = """
format = 1
[[inputs]]
column = "x"
type = "binary"
tensor = "x"
[[outputs]]
tensor = "y"
column = "y"
type = "binary"
"""
PASSTHROUGH = BINARY.replace("format = 1", 'format = 1\npassthrough = "all"').replace(
    "binary", "utf8"
)


COMBINED = """
format = 1
combine = true
inputs = [
    {tensor = "a", column = "a"}, {tensor = "flag", column = "flag"},
    {tensor = "b", column = "b"}, {tensor = "n", column = "n"},
]
outputs = [
    {tensor = "first", column = "first", type = "fixed_size_list<utf8>[2]"},
    {tensor = "next", column = "next", type = "int64"},
    {tensor = "second", column = "second", type = "utf8"},
    {tensor = "unflag", column = "unflag", type = "bool"},
]
"""


def mixed(folder: Path, rows: Any = "rows") -> Path:
    """A model of two strings, a boolean and a number, with its outputs in another order."""
    string, integer, boolean = TensorProto.STRING, TensorProto.INT64, TensorProto.BOOL
    return models.save(
        folder,
        [
            helper.make_node("Identity", ["b"], ["first"]),
            helper.make_node("Add", ["n", "one"], ["next"]),
            helper.make_node("Identity", ["a"], ["second"]),
            helper.make_node("Not", ["flag"], ["unflag"]),
        ],
        [
            helper.make_tensor_value_info("a", string, [rows]),
            helper.make_tensor_value_info("flag", boolean, [rows]),
            helper.make_tensor_value_info("b", string, [rows, 2]),
            helper.make_tensor_value_info("n", integer, [rows]),
        ],
        [
            helper.make_tensor_value_info("first", string, [rows, 2]),
            helper.make_tensor_value_info("next", integer, [rows]),
            helper.make_tensor_value_info("second", string, [rows]),
            helper.make_tensor_value_info("unflag", boolean, [rows]),
        ],
        [helper.make_tensor("one", integer, [], [1])],
    )


def cast(folder: Path, source: int, target: int) -> Path:
    return models.save(
        folder,
        [helper.make_node("Cast", ["x"], ["y"], to=target)],
        [helper.make_tensor_value_info("x", source, ["rows"])],
        [helper.make_tensor_value_info("y", target, ["rows"])],
    )


def string_and_bfloat16(folder: Path) -> Path:
    """A model that returns a string as it is, and a bfloat16 as float32."""
    string, half, single = TensorProto.STRING, TensorProto.BFLOAT16, TensorProto.FLOAT
    return models.save(
        folder,
        [
            helper.make_node("Identity", ["s"], ["t"]),
            helper.make_node("Cast", ["x"], ["y"], to=single),
        ],
        [
            helper.make_tensor_value_info("s", string, ["rows"]),
            helper.make_tensor_value_info("x", half, ["rows"]),
        ],
        [
            helper.make_tensor_value_info("y", single, ["rows"]),
            helper.make_tensor_value_info("t", string, ["rows"]),
        ],
    )


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("strings")
    string, bfloat16 = TensorProto.STRING, TensorProto.BFLOAT16
    binary = models.identity(folder / "binary", string, ["rows", 1])
    (binary / "manifest.toml").write_text(BINARY)
    passthrough = models.identity(folder / "passing", string, ["rows"])
    (passthrough / "manifest.toml").write_text(PASSTHROUGH)
    together = {"linger_us": 10_000_000, "refuse_late": False}
    # A load cannot decide for so few rows.
    fixed = mixed(folder / "fixed", 4)
    (fixed / "manifest.toml").write_text(COMBINED)
    paths: dict[str, tuple[Path, dict[str, Any]]] = {
        "echo": (models.identity(folder / "echo", string, ["rows"]), {}),
        "binary": (binary, {}),
        "passing": (passthrough, {}),
        "mixed": (mixed(folder / "mixed"), {"max_batch_rows": 50}),
        "together": (mixed(folder / "together"), {"max_batch_rows": 12, "lane": together}),
        "fixed": (fixed, {}),
        "number": (cast(folder / "number", string, TensorProto.INT64), {}),
        "text": (cast(folder / "text", TensorProto.INT64, string), {}),
        "half": (models.identity(folder / "half", bfloat16, ["rows", 2]), {"max_batch_rows": 5}),
        "halved": (string_and_bfloat16(folder / "halved"), {"max_batch_rows": 3}),
        "widened": (cast(folder / "widened", bfloat16, TensorProto.FLOAT), {}),
    }
    served = [
        {"name": name, "path": str(path), "intra_threads": 1, "result_string_bytes": RESULT_BYTES}
        | {"max_batch_rows": 4096}
        | more
        for name, (path, more) in paths.items()
    ]
    workers = {"groups": ["0"], "reattach_s": 5.0}
    limits = {"string_bytes": STRING_BYTES_MAX}
    with running(folder, served, workers=workers, limits=limits) as ready:
        yield ready
        stats = ready.wait_idle()
        assert stats["workers"][0]["starts"] == 1


@pytest.fixture
def client(gateway: Gateway) -> Iterator[Client]:
    with gateway.client() as client:
        yield client


def batch_of(rows: int, first: int = 0) -> pa.RecordBatch:
    """A batch for `mixed`: values identify their rows, and some strings are empty."""
    numbers = range(first, first + rows)
    pairs = [f"{n}é" if n % 3 else "" for n in numbers for _ in (0, 1)]
    return pa.record_batch(
        {
            "n": pa.array(numbers, pa.int64()),
            "b": pa.FixedSizeListArray.from_arrays(pa.array(pairs, pa.utf8()), 2),
            "a": pa.array([f"🦎{n}" * (n % 4) for n in numbers], pa.utf8()),
            "flag": pa.array([n % 5 == 0 for n in numbers], pa.bool_()),
        }
    )


def require_computed(sent: pa.RecordBatch, result: pa.RecordBatch) -> None:
    result.validate(full=True)
    assert result.schema.names == ["first", "next", "second", "unflag"]
    assert result["first"].to_pylist() == sent["b"].to_pylist()
    assert result["next"].to_pylist() == [n + 1 for n in sent["n"].to_pylist()]
    assert result["second"].to_pylist() == sent["a"].to_pylist()
    assert result["unflag"].to_pylist() == [not flag for flag in sent["flag"].to_pylist()]


@pytest.mark.parametrize(
    "kind",
    [
        pa.utf8(),
        pa.large_utf8(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["echo", "binary"])
def test_every_string_type_is_accepted(client: Client, model: str, kind: pa.DataType) -> None:
    """Results have the type of the manifest."""
    sent = pa.array(TEXTS).cast(pa.binary()).cast(kind)

    (result,) = client.stream(model, [pa.record_batch({"x": sent})])

    result.validate(full=True)
    assert result["y"].type == (pa.utf8() if model == "echo" else pa.binary())
    assert result["y"].cast(pa.binary()).to_pylist() == [text.encode() for text in TEXTS]


def test_dictionaries_and_slices(client: Client) -> None:
    encoded = pa.array(["b", "a", "b", "b"]).dictionary_encode()
    views = pa.DictionaryArray.from_arrays(
        pa.array([1, 0, 1, 1], pa.int8()), pa.array(["a", "b"], pa.string_view())
    )
    sliced = pa.array(["no", "yes", "maybe", "no"])[1:3]

    (first,) = client.stream("echo", [pa.record_batch({"x": encoded})])
    (same,) = client.stream("echo", [pa.record_batch({"x": views})])
    (second,) = client.stream("echo", [pa.record_batch({"x": sliced})])

    assert first["y"].to_pylist() == same["y"].to_pylist() == ["b", "a", "b", "b"]
    assert second["y"].to_pylist() == ["yes", "maybe"]


def test_dictionary_of_lists_of_strings(client: Client) -> None:
    sent = batch_of(4)
    indices = pa.array([3, 3, 0, 1], pa.int8())
    encoded = pa.DictionaryArray.from_arrays(indices, sent["b"])
    encoded = sent.set_column(sent.schema.get_field_index("b"), "b", encoded)
    plain = sent.set_column(sent.schema.get_field_index("b"), "b", sent["b"].take(indices))

    (result,) = client.stream("mixed", [encoded])

    require_computed(plain, result)


@pytest.mark.parametrize("rows", [0, 1, 7, 50])
def test_strings_and_numbers_in_one_batch(client: Client, rows: int) -> None:
    sent = batch_of(rows)

    (result,) = client.stream("mixed", [sent])

    require_computed(sent, result)


def test_large_request_is_split_into_several_batches(gateway: Gateway, client: Client) -> None:
    """Slices of 50 rows are reassembled in order; several requests are in flight."""
    before = gateway.stats()["lanes"]["mixed/1"].get("batches", 0)
    sent = [batch_of(rows, first) for rows, first in ((151, 0), (99, 1000), (50, 3), (120, 7))]

    result = list(client.stream("mixed", sent))

    for batch, outcome in zip(sent, result, strict=True):
        require_computed(batch, outcome)
    assert gateway.stats()["lanes"]["mixed/1"]["batches"] - before >= 8


def test_requests_of_several_clients_run_together(gateway: Gateway) -> None:
    before = gateway.stats()["lanes"]["together/1"].get("batches", 0)
    sent = [batch_of(3, 100 * index) for index in range(4)]

    result = score_concurrently(gateway, "together", sent)

    for batch, outcome in zip(sent, result, strict=True):
        require_computed(batch, outcome)
    assert gateway.stats()["lanes"]["together/1"]["batches"] == before + 1


def test_too_long_result_of_one_client_does_not_affect_others(gateway: Gateway) -> None:
    """All requests are in one batch."""
    sent = [batch_of(3, 100 * index) for index in range(4)]
    long = pa.array(["short", "x" * (RESULT_BYTES + 1), ""])
    sent[2] = sent[2].set_column(sent[2].schema.get_field_index("a"), "a", long)

    result = score_concurrently(gateway, "together", sent)

    error = result.pop(2)
    assert isinstance(error, ExecutionFailed)
    assert "`second` has a string of 65 bytes, limit 64 (result_string_bytes" in error.message
    for batch, outcome in zip([sent[0], sent[1], sent[3]], result, strict=True):
        require_computed(batch, outcome)


def test_fixed_batch_is_padded_with_strings(client: Client) -> None:
    sent = batch_of(3)

    (result,) = client.stream("fixed", [sent])

    require_computed(sent, result)


def test_model_reads_and_writes_strings(client: Client) -> None:
    (numbers,) = client.stream("number", [pa.record_batch({"x": ["12", "-7"]})])
    (texts,) = client.stream("text", [pa.record_batch({"x": [12, -7]})])

    assert numbers["y"].to_pylist() == [12, -7]
    assert texts["y"].to_pylist() == ["12", "-7"]
    with pytest.raises(ExecutionFailed):
        list(client.stream("number", [pa.record_batch({"x": ["no number"]})]))


@pytest.mark.parametrize("other", [pa.utf8(), pa.list_(pa.utf8()), pa.list_(pa.utf8(), 2)], ids=str)
@pytest.mark.parametrize("rows", [0, 3])
def test_passthrough_columns_with_string_inputs(
    client: Client, other: pa.DataType, rows: int
) -> None:
    """Includes a type that only pyarrow decodes."""
    values = {pa.utf8(): ["p", None, ""]}.get(other, [["p", "q"], None, ["", "r"]])
    sent = pa.record_batch(
        {"k": pa.array(values, other), "x": ["é", "", "zz"], "n": [1.5, 2.5, None]}
    )[:rows]

    (result,) = client.stream("passing", [sent])

    result.validate(full=True)
    assert result.schema.names == ["k", "n", "y"]
    assert result["k"].to_pylist() == values[:rows]
    assert result["n"].to_pylist() == [1.5, 2.5, None][:rows]
    assert result["y"].to_pylist() == ["é", "", "zz"][:rows]


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_strings(gateway: Gateway, compression: str) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    batch = pa.record_batch({"x": ["again and " * 6] * 20})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    messages = list(pa.ipc.MessageReader.open_stream(sink.getvalue()))
    packed = raw.field(2, bytes(messages[1].metadata)) + raw.field(1000, bytes(messages[1].body))

    with raw.RawClient(gateway.address) as client:
        response = client.exchange([raw.descriptor("echo") + raw.schema_data(batch.schema), packed])

    (result,), _ = raw.read_batches(response["frames"])
    assert result["y"].to_pylist() == batch["x"].to_pylist()


@pytest.mark.parametrize("kind", [pa.utf8(), pa.binary(), pa.large_binary()], ids=str)
def test_invalid_utf8_is_a_contract_error(client: Client, kind: pa.DataType) -> None:
    good, bad = b"fine", b"\xff\xfe"
    offsets = np.array([0, 4, 6], np.int64 if kind == pa.large_binary() else np.int32)
    buffers = [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(good + bad)]
    batch = pa.record_batch({"x": pa.Array.from_buffers(kind, 2, buffers)})

    with pytest.raises(ContractError, match=r"column `x`: Invalid UTF8 .* must be UTF-8"):
        list(client.stream("echo", [batch]))


def test_batches_with_equal_headers_have_separate_strings(client: Client) -> None:
    """A cached header must not determine the strings of results."""
    numbers = [[1, 2], [333333, -4], [5, 66], [0, 0]]

    result = list(client.stream("text", [pa.record_batch({"x": each}) for each in numbers]))

    assert [each["y"].to_pylist() for each in result] == [list(map(str, each)) for each in numbers]


def test_nulls_are_rejected(client: Client) -> None:
    with pytest.raises(ContractError, match="1 nulls"):
        list(client.stream("echo", [pa.record_batch({"x": ["a", None]})]))


def test_string_bytes_above_the_limit_are_rejected(client: Client) -> None:
    """At and above the limit, for plain columns and decoded dictionaries."""
    at_limit, above_limit = ["y" * 32] * 128, ["y" * 32] * 129
    others = [
        pa.array(above_limit).dictionary_encode(),
        pa.array(above_limit).cast(pa.large_utf8()),
    ]

    (result,) = client.stream("echo", [pa.record_batch({"x": at_limit})])
    assert result["y"].to_pylist() == at_limit
    for column in (pa.array(above_limit), *others):
        with pytest.raises(LimitExceeded, match=f"4128 string bytes, limit {STRING_BYTES_MAX}"):
            list(client.stream("echo", [pa.record_batch({"x": column})]))


@pytest.mark.parametrize("kind", ["views", "dictionary", "dictionary of views"])
def test_repeated_strings_that_expand_to_gigabytes_are_rejected(client: Client, kind: str) -> None:
    """Every row is the same string; the limit is checked before the expansion."""
    rows, length = 600_000, 4_000
    # A view has 16 bytes: length, prefix, buffer index and offset.
    view = np.array([length, int.from_bytes(b"yyyy", "little"), 0, 0], np.int32).tobytes()
    buffers = [None, pa.py_buffer(view * rows), pa.py_buffer(b"y" * length)]
    column = pa.Array.from_buffers(pa.string_view(), rows, buffers)
    if kind != "views":
        values = column[:1] if kind == "dictionary of views" else pa.array(["y" * length])
        column = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int8), values)

    with pytest.raises(LimitExceeded, match=f"{rows * length} string bytes, limit"):
        list(client.stream("echo", [pa.record_batch({"x": column})]))


def test_other_types_are_not_accepted_as_strings(client: Client) -> None:
    with pytest.raises(ContractError, match="column `x`: wanted utf8, got int64"):
        list(client.stream("echo", [pa.record_batch({"x": [1, 2]})]))


@pytest.mark.parametrize(
    "offsets",
    [(0, 3, 2), (-1, 1, 2), (0, 1, 100), (0, 2**31 - 1, 3), (5, 1, 3), (0, -1, 2)],
    ids=str,
)
def test_invalid_offsets_are_rejected(gateway: Gateway, offsets: tuple[int, ...]) -> None:
    """Offsets that decrease, or are outside of the bytes.

    The header equals the previous ones, so the check must read each body.
    """
    batch = pa.record_batch({"x": ["a", "b"]})
    _, body = raw.split(batch.serialize().to_pybytes())
    forged = np.array(offsets, np.int32).tobytes() + body[12:]

    good, bad = raw.batch_data(batch), raw.batch_data(batch, body=forged)
    with raw.RawClient(gateway.address) as client:
        head = raw.descriptor("echo") + raw.schema_data(batch.schema)
        response = client.exchange([head, good, good, bad, good])

    assert response["code"] == "INVALID_ARGUMENT"
    assert "malformed" in str(response["trailers"])
    (first, second), _ = raw.read_batches(response["frames"])
    assert first["y"].to_pylist() == second["y"].to_pylist() == ["a", "b"]


def test_offsets_that_begin_above_zero(gateway: Gateway) -> None:
    """Other implementations of Arrow send slices this way."""
    batch = pa.record_batch({"x": ["abcd", "ef"]})
    _, body = raw.split(batch.serialize().to_pybytes())
    cut = np.array([1, 3, 6], np.int32).tobytes() + body[12:]

    with raw.RawClient(gateway.address) as client:
        head = raw.descriptor("echo") + raw.schema_data(batch.schema)
        response = client.exchange([head, raw.batch_data(batch, body=cut)])

    (result,), _ = raw.read_batches(response["frames"])
    assert result["y"].to_pylist() == ["bc", "def"]


@pytest.mark.parametrize("form", ["raw", "typed"])
def test_strings_of_the_open_inference_protocol(gateway: Gateway, form: str) -> None:
    """On the wire, a length of four bytes precedes each string."""
    a, b = ["🦎", "", "x"], ["p", "", "é", "q", "r", "s"]
    request = oip_pb2.ModelInferRequest(model_name="mixed")
    tensors = (("b", [3, 2], b), ("a", [3], a))
    for name, shape, strings in tensors:
        tensor = request.inputs.add(name=name, shape=shape, datatype="BYTES")
        if form == "typed":
            tensor.contents.bytes_contents.extend(text.encode() for text in strings)
        else:
            request.raw_input_contents.append(wire_strings(strings))
    flag = request.inputs.add(name="flag", shape=[3], datatype="BOOL")
    number = request.inputs.add(name="n", shape=[3], datatype="INT64")
    if form == "typed":
        flag.contents.bool_contents.extend([True, False, True])
        number.contents.int64_contents.extend([5, 6, 7])
    else:
        numbers = np.array([5, 6, 7], np.int64).tobytes()
        request.raw_input_contents.extend([b"\1\0\1", numbers])

    with raw.RawClient(gateway.address) as client:
        reply = client.call(
            "/inference.GRPCInferenceService/ModelInfer", [request.SerializeToString()]
        )

    response = oip_pb2.ModelInferResponse.FromString(reply["frames"][0])
    assert [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in response.outputs] == [
        ("first", "BYTES", [3, 2]),
        ("next", "INT64", [3]),
        ("second", "BYTES", [3]),
        ("unflag", "BOOL", [3]),
    ]
    first, following, second, unflag = response.raw_output_contents
    assert (first, second) == (wire_strings(b), wire_strings(a))
    assert np.frombuffer(following, np.int64).tolist() == [6, 7, 8]
    assert unflag == b"\0\1\0"


def wire_strings(strings: list[str]) -> bytes:
    return b"".join(len(text.encode()).to_bytes(4, "little") + text.encode() for text in strings)


BFLOAT16_METADATA = {
    b"ARROW:extension:name": b"iskander.bfloat16",
    b"ARROW:extension:metadata": b"",
}


def bfloat16_of(values: list[float]) -> np.ndarray:
    """bfloat16 is the upper half of a float32."""
    return (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def test_bfloat16_is_declared_in_field_metadata(gateway: Gateway) -> None:
    """Any Arrow implementation can set the metadata; results have it too."""
    values = bfloat16_of([1.5, -2.0, 0.0, float("inf"), 3.0, 1e30] * 4)
    named = pa.list_(pa.field("item", pa.uint16(), metadata=BFLOAT16_METADATA), 2)
    column = pa.FixedSizeListArray.from_arrays(pa.array(values), type=pa.list_(pa.uint16(), 2))
    batch = pa.record_batch([column], ["x"])
    schema = pa.schema([pa.field("x", named)])

    with raw.RawClient(gateway.address) as client:
        head = raw.descriptor("half") + raw.schema_data(schema)
        response = client.exchange([head, raw.batch_data(batch)])

    (result,), _ = raw.read_batches(response["frames"])
    flat = result["y"].flatten()
    storage = flat.storage if isinstance(flat, pa.ExtensionArray) else flat
    assert storage.to_pylist() == values.tolist()


def test_model_reads_bfloat16(client: Client) -> None:
    values = [1.5, -2.0, 0.0, 3.0]
    column = pa.ExtensionArray.from_storage(BFloat16(), pa.array(bfloat16_of(values)))

    (result,) = client.stream("widened", [pa.record_batch({"x": column})])
    (both,) = client.stream("halved", [pa.record_batch({"x": column, "s": ["a", "", "é", "b"]})])

    assert result["y"].to_pylist() == both["y"].to_pylist() == values
    assert both["t"].to_pylist() == ["a", "", "é", "b"]


def test_plain_integers_are_not_accepted_as_bfloat16(client: Client) -> None:
    with pytest.raises(ContractError, match="column `x`: wanted bfloat16, got uint16"):
        list(client.stream("widened", [pa.record_batch({"x": pa.array([1], pa.uint16())})]))


def test_discovery_lists_string_and_bfloat16_types(client: Client) -> None:
    described = {model["name"]: model for model in client.models()}

    assert described["echo"]["outputs"] == [{"column": "y", "type": "utf8", "tensor": "y"}]
    assert described["binary"]["inputs"][0]["type"] == "binary"
    assert described["mixed"]["inputs"][2]["type"] == "fixed_size_list<utf8>[2]"
    assert described["half"]["outputs"][0]["type"] == "fixed_size_list<bfloat16>[2]"


def score_concurrently(gateway: Gateway, model: str, batches: list[pa.RecordBatch]) -> list[Any]:
    """Sends each batch from its own client, all at once; returns the outcomes."""
    outcomes: list[Any] = [None] * len(batches)

    def score(index: int) -> None:
        with gateway.client() as client:
            (outcomes[index],) = client.outcomes(model, [batches[index]])

    threads = [threading.Thread(target=score, args=(index,)) for index in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
