"""The Open Inference Protocol over gRPC, with unmodified clients.

The clients run in a separate process, `support/oip_client.py`. The tests compare their results
with those of Flight requests from this process.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from onnx import TensorProto
from support import models
from support.processes import MIB, Gateway, eventually, running, suspended
from support.reference_client import ReferenceClient

from iskander import __version__
from iskander._generated import oip_pb2

SCRIPT = str(Path(models.__file__).with_name("oip_client.py"))
SECTIONS: dict[str, Any] = {
    "workers": {"groups": ["0"], "reattach_s": 5.0},
    "limits": {"rows": 4 * MIB},
    "arena": {"input_bytes": 48 * MIB, "output_bytes": 32 * MIB},
}
DATATYPES = {
    "BOOL": ("bool", TensorProto.BOOL),
    "INT8": ("int8", TensorProto.INT8),
    "INT16": ("int16", TensorProto.INT16),
    "INT32": ("int32", TensorProto.INT32),
    "INT64": ("int64", TensorProto.INT64),
    "UINT8": ("uint8", TensorProto.UINT8),
    "UINT16": ("uint16", TensorProto.UINT16),
    "UINT32": ("uint32", TensorProto.UINT32),
    "UINT64": ("uint64", TensorProto.UINT64),
    "FP16": ("float16", TensorProto.FLOAT16),
    "FP32": ("float32", TensorProto.FLOAT),
    "FP64": ("float64", TensorProto.DOUBLE),
}
PRIORITY_LEVELS = 10
UNREAD = {"requests": 40, "bytes_each": 4 * MIB}
WINDOW_MIN, WINDOW_MAX = 4, 8
"""Requests of 4 MiB that fit `limits.window_bytes`, with and without their results."""


def served(folder: Path) -> list[dict[str, Any]]:
    paths = {
        "two-tower": models.TWO_TOWER,
        "wide": models.WIDE,
        "ids": models.row_ids(folder / "ids"),
        "slow": models.slow(folder / "slow", 1),
        "words": models.identity(folder / "words", TensorProto.STRING, ["rows"]),
        "halves": models.identity(folder / "halves", TensorProto.BFLOAT16, ["rows"]),
        "broad": models.identity(folder / "broad", TensorProto.FLOAT, ["rows", 64]),
    }
    for name, (_, element) in DATATYPES.items():
        paths[f"same-{name}"] = models.identity(folder / name, element, ["rows"])
        paths[f"cube-{name}"] = models.identity(folder / f"{name}-3d", element, ["rows", 2, 3])
    listed = [{"name": n, "path": str(p), "intra_threads": 1} for n, p in paths.items()]
    return [*listed, {"name": "ids", "version": 10, "path": str(paths["ids"]), "intra_threads": 1}]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("oip")
    with running(folder, served(folder), **SECTIONS) as ready:
        yield ready
        ready.wait_idle()


@pytest.fixture(scope="module")
def reference() -> Iterator[ReferenceClient]:
    reference = ReferenceClient(SCRIPT)
    yield reference
    reference.close()


@pytest.fixture
def filler() -> Iterator[ReferenceClient]:
    """Another client process, which runs at the same time as `reference`."""
    reference = ReferenceClient(SCRIPT)
    yield reference
    reference.close()


def tensor(datatype: str, array: np.ndarray[Any, Any]) -> list[Any]:
    return [datatype, list(array.shape), array.tobytes().hex()]


def values_of(datatype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Returns random values; integers cover their full range, and floats have no NaN."""
    random = np.random.default_rng(len(shape))
    dtype = np.dtype(DATATYPES[datatype][0])
    if datatype == "BOOL":
        return random.random(shape) < 0.5
    if dtype.kind == "f":
        return random.normal(size=shape).astype(dtype)
    limits = np.iinfo(dtype)
    return random.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def test_server_and_model_metadata(gateway: Gateway, reference: ReferenceClient) -> None:
    """perf_analyzer requires the row axis in the metadata and not in the configuration."""
    result = reference.run("described", address=gateway.address)

    assert result["live"] and result["ready"] and result["model_ready"] == [True, True]
    assert (result["server"]["name"], result["server"]["version"]) == ("iskander", __version__)
    assert "statistics" in result["server"]["extensions"]
    assert result["metadata"] == {
        "name": "two-tower",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [
            {"name": "user_id", "datatype": "INT64", "shape": ["-1"]},
            {"name": "item_id", "datatype": "INT64", "shape": ["-1"]},
        ],
        "outputs": [{"name": "score", "datatype": "FP32", "shape": ["-1"]}],
    }
    assert result["versions"] == ["1", "10"]
    assert result["wide"] == [{"name": "features", "datatype": "FP32", "shape": ["-1", "64"]}]
    config = result["config"]
    assert config["max_batch_size"] > 0
    (features,) = config["input"]
    assert (features["name"], features["data_type"], features["dims"]) == (
        "features", "TYPE_FP32", ["64"],
    )  # fmt: skip
    assert config["dynamic_batching"]["priority_levels"] == str(PRIORITY_LEVELS)
    assert {"name": "ids", "version": "10", "state": "READY"} in result["index"]
    assert result["memory"] == [{}, {}]


def test_unsupported_management_calls_are_rejected_by_name(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    result = reference.run("managed", address=gateway.address)
    assert {name: status for name, (status, _) in result.items()} == {
        "load unknown": "NOT_FOUND",
        "load with a config": "UNIMPLEMENTED",
        "unload": "UNIMPLEMENTED",
        "unload unknown": "NOT_FOUND",
        "register": "UNIMPLEMENTED",
        "register cuda": "UNIMPLEMENTED",
        "unregister one": "UNIMPLEMENTED",
        "trace": "UNIMPLEMENTED",
        "log": "UNIMPLEMENTED",
        "ready unknown": "NOT_FOUND",
        "ready version": "NOT_FOUND",
        "metadata unknown": "NOT_FOUND",
        "config unknown": "NOT_FOUND",
        "statistics unknown": "NOT_FOUND",
    }
    assert "configuration" in result["unload"][1]
    assert "available: " in result["load unknown"][1]


def test_repository_calls_accept_both_message_layouts(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    loaded, unknown, unloaded = reference.run("other_layout", address=gateway.address)
    response = oip_pb2.RepositoryModelLoadResponse.FromString(bytes.fromhex(loaded))
    assert (response.model_name, response.is_loaded) == ("ids", True)
    assert unknown[0] == "NOT_FOUND" and unknown[2]["iskander-code"] == "model_not_found"
    assert unloaded[0] == "UNIMPLEMENTED"


def test_reflection_lists_all_services_and_matching_messages(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    result = reference.run("reflected", address=gateway.address)
    services = {
        "arrow.flight.protocol.FlightService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "inference.GRPCInferenceService",
    }
    assert set(result["services"]) == set(result["v1"]) == services
    assert result["unknown"] == [5, 5] and result["consistent"] == [True, True]
    assert "DoExchange" in result["flight"]
    assert result["wrong"] == []


@pytest.mark.parametrize("datatype", DATATYPES)
def test_all_datatypes_round_trip(
    gateway: Gateway, reference: ReferenceClient, datatype: str
) -> None:
    """Raw contents of rank 1 and 3, and typed contents if the datatype has them."""
    for model, shape in ((f"same-{datatype}", (9,)), (f"cube-{datatype}", (5, 2, 3))):
        sent = {"x": tensor(datatype, values_of(datatype, shape))}
        expected = {"y": sent["x"]}
        result = reference.run("infer", address=gateway.address, model=model, tensors=sent)
        assert result["outputs"] == expected
        if datatype != "FP16":
            result = reference.run("typed", address=gateway.address, model=model, tensors=sent)
            assert result["outputs"] == expected and result["id"] == "typed"


def test_strings_and_bfloat16_round_trip(gateway: Gateway, reference: ReferenceClient) -> None:
    strings = ["", "naïve", "a" * 200, "\0"]
    result = reference.run("texts", address=gateway.address, strings=strings)
    assert result["raw"] == result["typed"] == strings
    assert result["halves"] == [0.5, -2.0, 1.0]
    assert result["metadata"] == [{"name": "x", "datatype": "BYTES", "shape": ["-1"]}]
    assert result["config"][0]["data_type"] == "TYPE_STRING"


@pytest.mark.parametrize("rows", [1, 128, 4096])
def test_results_equal_flight_bit_for_bit(
    gateway: Gateway, reference: ReferenceClient, rows: int
) -> None:
    random = np.random.default_rng(rows)
    users, items = random.integers(0, 1000, rows), random.integers(0, 200_000, rows)
    features = random.normal(size=(rows, 64)).astype(np.float32)
    with gateway.client() as client:
        scored = client.score("two-tower", pa.record_batch({"user_id": users, "item_id": items}))
        column = pa.FixedSizeListArray.from_arrays(features.reshape(-1), 64)
        wide = client.score("wide", pa.record_batch({"features": column}))

    tensors = {"user_id": tensor("INT64", users), "item_id": tensor("INT64", items)}
    result = reference.run("infer", address=gateway.address, model="two-tower", tensors=tensors)
    assert result["outputs"] == {"score": tensor("FP32", scored["score"].to_numpy())}
    tensors = {"features": tensor("FP32", features)}
    result = reference.run("infer", address=gateway.address, model="wide", tensors=tensors)
    assert result["outputs"] == {"score": tensor("FP32", wide["score"].to_numpy())}


def test_empty_batch_gives_an_empty_result(gateway: Gateway, reference: ReferenceClient) -> None:
    tensors = {"x": tensor("INT64", np.zeros(0, np.int64))}
    result = reference.run("infer", address=gateway.address, model="ids", tensors=tensors)
    assert result["outputs"] == {"y": ["INT64", [0], ""]}


@pytest.mark.parametrize("method", ["infer", "typed"])
@pytest.mark.parametrize("datatype", ["FP32", "INT64", "BOOL"])
def test_large_tensors_round_trip(
    gateway: Gateway, reference: ReferenceClient, datatype: str, method: str
) -> None:
    """A thread decodes typed integers of this size."""
    dtype = {"FP32": np.float32, "INT64": np.int64, "BOOL": np.bool_}[datatype]
    values = np.random.default_rng(1).integers(0, 1 << 30, MIB) % 1009
    sent = {"x": tensor(datatype, values.astype(dtype))}
    result = reference.run(method, address=gateway.address, model=f"same-{datatype}", tensors=sent)
    assert result["outputs"] == {"y": sent["x"]}


def test_ids_versions_and_requested_outputs(gateway: Gateway, reference: ReferenceClient) -> None:
    def infer(**options: Any) -> Any:
        tensors = {"x": tensor("INT64", np.arange(3))}
        return reference.run(
            "infer", address=gateway.address, model="ids", tensors=tensors, **options
        )

    assert infer(request_id="naïve")["id"] == "naïve"
    assert infer()["model"] == "ids/10"
    assert infer(model_version="1")["model"] == "ids/1"
    assert infer(outputs=["y"])["order"] == ["y"]
    assert infer(model_version="7")["refused"][0] == "NOT_FOUND"
    status, text = infer(outputs=["z"])["refused"]
    assert status == "INVALID_ARGUMENT" and "`z` is not an output" in text


def test_compressed_messages_are_accepted(gateway: Gateway, reference: ReferenceClient) -> None:
    assert reference.run("compressed", address=gateway.address) == [True, True]


def test_callbacks_get_their_own_results(gateway: Gateway, reference: ReferenceClient) -> None:
    assert reference.run("callbacks", address=gateway.address, requests=200) == []


def test_asyncio_client_requests_and_streams(gateway: Gateway, reference: ReferenceClient) -> None:
    result = reference.run("by_asyncio", address=gateway.address, requests=20)
    assert result["unary"] == [[3 * number + 1, 22] for number in range(20)]
    error = result["streamed"].pop(3)
    assert "there is no model `nope`" in error
    assert result["streamed"] == [[3 * number + 1] for number in range(20) if number != 3]


def test_stream_keeps_its_order_and_continues_after_errors(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    result = reference.run("streamed", address=gateway.address, requests=50, wants_final=True)
    assert len(result) == 50
    for number, response in enumerate(result):
        if number % 5 == 3:
            assert response[0] == "error" and "`nope`" in response[1]
        else:
            values = range(number, number + number % 4) if number % 4 else [number]
            assert response == [str(number), [3 * value + 1 for value in values], True]
    assert not any(
        response[2] for response in reference.run("streamed", address=gateway.address, requests=3)
    )


def test_stream_errors_have_the_request_id(gateway: Gateway, reference: ReferenceClient) -> None:
    first, second, third = reference.run("stream_errors", address=gateway.address)
    assert "`nope`" in first["errorMessage"]
    response = first["inferResponse"]
    assert response["id"] == "first"
    assert response["parameters"]["iskander-code"] == {"stringParam": "model_not_found"}
    assert response["parameters"]["iskander-retryable"] == {"boolParam": False}
    assert "errorMessage" not in second and second["inferResponse"]["id"] == "second"
    assert "id" not in third["inferResponse"]


def test_stream_can_request_grpc_status_errors(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    values, (status, text) = reference.run("stream_status", address=gateway.address)
    assert values == [4] and status == "NOT_FOUND" and "`nope`" in text


def test_invalid_message_does_not_end_a_stream(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    first, second = reference.run("stream_broken", address=gateway.address)
    assert first == ["the message is not a ModelInferRequest", ""]
    assert second == ["", "next"]


def test_backpressure_stops_only_the_client_that_does_not_read(
    gateway: Gateway, reference: ReferenceClient, filler: ReferenceClient
) -> None:
    """The server admits the window and what the client's transport buffers; later, the rest."""
    before = lane(gateway, "broad/1")["requests"]

    def admitted() -> int:
        count: int = lane(gateway, "broad/1")["requests"] - before
        return count

    assert filler.run("stream_unread", address=gateway.address, **UNREAD) == "under way"
    eventually(lambda: admitted() >= WINDOW_MIN, what="a full window")
    for _ in range(20):
        tensors = {"x": tensor("INT64", np.arange(3))}
        result = reference.run("infer", address=gateway.address, model="ids", tensors=tensors)
        assert result["outputs"] == {"y": tensor("INT64", 3 * np.arange(3) + 1)}
    assert admitted() <= 2 * WINDOW_MAX
    filler.send("read")
    result = filler.result()
    assert result["told"] == [str(number) for number in range(UNREAD["requests"])]
    assert result["end"][0] == "OK" and admitted() == UNREAD["requests"]


def test_server_and_client_messages_can_be_imported_in_one_process(
    reference: ReferenceClient,
) -> None:
    assert reference.run("side_by_side") == [True, True]


def test_statistics_count_requests_and_batches(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    """Statistics cover one version, or all models if the request names none."""

    def version_1() -> dict[str, Any]:
        result = reference.run("statistics", address=gateway.address, model="ids", version="1")
        (statistics,) = result
        return statistics

    def count(statistics: dict[str, Any], *path: str) -> int:
        value: Any = statistics
        for name in path:
            value = value.get(name, {})
        return int(value or 0)

    before = version_1()
    tensors = {"x": tensor("INT64", np.arange(5))}
    ids = {"address": gateway.address, "model": "ids", "tensors": tensors, "model_version": "1"}
    reference.run("infer", **ids)
    after = version_1()

    for path, added in {
        ("inference_count",): 5,
        ("execution_count",): 1,
        ("inference_stats", "success", "count"): 1,
        ("inference_stats", "queue", "count"): 1,
        ("inference_stats", "compute_infer", "count"): 1,
        ("inference_stats", "fail", "count"): 0,
    }.items():
        assert count(after, *path) - count(before, *path) == added, path
    assert count(after, "inference_stats", "compute_infer", "ns") > 0
    assert count(after, "last_inference") > 1_500_000_000_000
    listed = reference.run("statistics", address=gateway.address, model="")
    assert len(listed) == 8 + 2 * len(DATATYPES)


def test_cancelled_call_withdraws_its_request(gateway: Gateway, reference: ReferenceClient) -> None:
    assert reference.run("cancelled", address=gateway.address) == "under way"
    eventually(lambda: lane(gateway, "slow/1")["requests"], what="a request of the slow model")
    reference.send("give up")
    assert reference.result()[0] == "CANCELLED"
    gateway.wait_idle()
    assert lane(gateway, "slow/1")["withdrawn"] == 1


def test_cancelled_stream_withdraws_its_requests(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    before = lane(gateway, "ids/10")
    with suspended(gateway.worker_pids()[0]):
        options = {"address": gateway.address, "requests": 5}
        assert reference.run("stream_cancelled", **options) == "under way"
        eventually(
            lambda: lane(gateway, "ids/10")["requests"] == before["requests"] + 5,
            what="five requests",
        )
        reference.send("give up")
        assert reference.result() == "CANCELLED"
        eventually(
            lambda: lane(gateway, "ids/10")["withdrawn"] == before["withdrawn"] + 5,
            what="five withdrawn requests",
        )
    assert gateway.wait_idle()["calls"] == 0


def lane(gateway: Gateway, title: str) -> Any:
    return {"requests": 0, "withdrawn": 0} | gateway.stats()["lanes"][title]


@pytest.mark.parametrize(
    "options",
    [
        {"client_timeout": 0.3},
        {"timeout": 300_000},
        {"timeout": 300_000, "client_timeout": 15},
        {"timeout": 15_000_000, "client_timeout": 0.3},
        {"parameters": {"iskander_deadline_ms": 300}},
        {"parameters": {"iskander-deadline-ms": "300"}, "timeout": 15_000_000},
        {"headers": {"iskander-deadline-ms": "300"}},
        {"headers": {"iskander-deadline-ms": "15000"}, "timeout": 300_000},
    ],
)
def test_earliest_of_several_deadlines_applies(
    gateway: Gateway, reference: ReferenceClient, options: dict[str, Any]
) -> None:
    """The worker is suspended, so the deadline passes in the queue."""
    tensors = {"x": tensor("INT64", np.arange(3))}
    request = {"address": gateway.address, "model": "ids", "tensors": tensors}
    with suspended(gateway.worker_pids()[0]):
        for _ in range(2):  # Uses the worker's credits; a batch in flight ignores the deadline.
            reference.run("infer", **request, client_timeout=0.1)
        result = reference.run("infer", **request, **options)
    assert result["refused"][0] in ("DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
    gateway.wait_idle()


def send_one_by_one(gateway: Gateway, reference: ReferenceClient, priorities: list[int]) -> None:
    """Sends requests of `ids`, each after the lane has admitted the one before."""
    reference.begin("in_what_order", address=gateway.address, priorities=priorities)
    for count in range(1, len(priorities) + 1):
        assert reference.result() == "sent"
        eventually(
            lambda count=count: lane(gateway, "ids/1")["requests"] == count, what="a request"
        )
        reference.send("next")


@pytest.mark.slow
def test_urgent_requests_run_first(tmp_path: Path, reference: ReferenceClient) -> None:
    """The first two requests use the worker's credits, and all others queue.

    Each runs for tens of milliseconds, because the client calls its callbacks in any order for
    responses that arrive together.
    """
    path = models.looping(tmp_path / "ids", turns=3000, turns_row=0)
    model = {"name": "ids", "path": str(path), "intra_threads": 1, "max_batch_rows": 1}
    priorities = [0, 0, 9, 10, 1, 2, 0, 1, 255]
    with running(
        tmp_path, [model | {"lane": {"policy": "priority_tiered"}}], workers=SECTIONS["workers"]
    ) as gateway:
        with suspended(gateway.worker_pids()[0]):
            send_one_by_one(gateway, reference, priorities)
        order = reference.result()
    assert [error for _, error in order if error] == []
    assert [priorities[number] for number, _ in order[2:]] == [1, 1, 2, 0, 9, 10, 255]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"parameters": {"iskander_deadline_ms": "soon"}}, "deadline_ms"),
        ({"parameters": {"iskander_haste": 1}}, "haste"),
        ({"headers": {"iskander-priority": "11"}}, "priority"),
        ({"timeout": -1}, "`timeout`"),
    ],
)
def test_invalid_terms_are_rejected(
    gateway: Gateway, reference: ReferenceClient, options: dict[str, Any], text: str
) -> None:
    tensors = {"x": tensor("INT64", np.arange(3))}
    result = reference.run(
        "infer", address=gateway.address, model="ids", tensors=tensors, **options
    )
    assert result["refused"][0] == "INVALID_ARGUMENT" and text in result["refused"][1]


def test_sequence_is_rejected_by_name(gateway: Gateway, reference: ReferenceClient) -> None:
    tensors = {"x": tensor("INT64", np.arange(3))}
    result = reference.run(
        "infer", address=gateway.address, model="ids", tensors=tensors, sequence_id=4
    )
    assert result["refused"][0] == "UNIMPLEMENTED" and "sequence_id" in result["refused"][1]


def request_of(**changes: Any) -> oip_pb2.ModelInferRequest:
    """Returns a valid request of `ids` with `changes`; `raw` replaces its raw contents."""
    raw = changes.pop("raw", [np.arange(3).tobytes()])
    tensor = {"name": "x", "datatype": "INT64", "shape": [3]} | changes.pop("x", {})
    values = {"model_name": "ids", "inputs": [tensor], "raw_input_contents": raw}
    return oip_pb2.ModelInferRequest(**(values | changes))


GOOD = request_of().SerializeToString()
INVALID: dict[str, tuple[bytes, str]] = {
    "cut short": (GOOD[:-3], "malformed"),
    "cut in a length": (GOOD + b"\x3a", "malformed"),
    "huge length": (GOOD + b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "malformed"),
    "endless varint": (GOOD + b"\x08" + b"\xff" * 20, "malformed"),
    "group": (GOOD + b"\x0b\x0c", "malformed"),
    "invalid protobuf": (b"\xde\xad\xbe\xef" * 100, "malformed"),
    "id that is not UTF-8": (GOOD + b"\x1a\x02\xff\xfe", "malformed"),
    "name that is not UTF-8": (b"\x0a\x02\xff\xfe" + GOOD[5:], "malformed"),
    "empty message": (b"", "model_not_found"),
    "too few bytes": (request_of(raw=[bytes(23)]).SerializeToString(), "malformed"),
    "too many bytes": (request_of(raw=[bytes(25)]).SerializeToString(), "malformed"),
    "no bytes": (request_of(raw=[]).SerializeToString(), "malformed"),
    "two raw contents": (request_of(raw=[bytes(24), bytes(24)]).SerializeToString(), "malformed"),
    "raw and typed contents": (
        request_of(x={"contents": {"int64_contents": [1, 2, 3]}}).SerializeToString(),
        "malformed",
    ),
    "typed contents in the wrong field": (
        request_of(x={"contents": {"int_contents": [1, 2, 3]}}, raw=[]).SerializeToString(),
        "malformed",
    ),
    "too few typed contents": (
        request_of(x={"contents": {"int64_contents": [1, 2]}}, raw=[]).SerializeToString(),
        "malformed",
    ),
    "typed FP16": (
        request_of(
            x={"datatype": "FP16", "contents": {"fp32_contents": [1, 2, 3]}}, raw=[]
        ).SerializeToString(),
        "malformed",
    ),
    "negative rows": (request_of(x={"shape": [-3]}).SerializeToString(), "malformed"),
    "huge number of rows": (request_of(x={"shape": [1 << 62]}).SerializeToString(), "limit"),
    "negative shape": (request_of(x={"shape": [3, -1]}).SerializeToString(), "contract"),
    "huge shape": (request_of(x={"shape": [1 << 31] * 40}).SerializeToString(), "limit"),
    "no shape": (request_of(x={"shape": []}).SerializeToString(), "contract"),
    "unknown datatype": (request_of(x={"datatype": "FP4"}).SerializeToString(), "contract"),
    "wrong datatype": (request_of(x={"datatype": "FP64"}).SerializeToString(), "contract"),
    "millions of strings for a numeric input": (
        request_of(
            x={"datatype": "BYTES", "shape": [4 * MIB]}, raw=[bytes(16 * MIB - 1024)]
        ).SerializeToString(),
        "contract",
    ),
    "more strings than bytes": (
        request_of(
            model_name="words", x={"datatype": "BYTES", "shape": [1 << 20]}, raw=[bytes(64)]
        ).SerializeToString(),
        "malformed",
    ),
    "string that is not UTF-8": (
        request_of(
            model_name="words", x={"datatype": "BYTES", "shape": [1]}, raw=[b"\1\0\0\0\xff"]
        ).SerializeToString(),
        "contract",
    ),
    "unknown input": (request_of(x={"name": "w"}).SerializeToString(), "contract"),
    "unknown model": (request_of(model_name="nope").SerializeToString(), "model_not_found"),
    "unknown version": (request_of(model_version="77").SerializeToString(), "model_not_found"),
    "long name": (
        request_of(model_name="n" * 100_000).SerializeToString(),
        "model_not_found",
    ),
    "duplicate output": (
        request_of(outputs=[{"name": "y"}, {"name": "y"}]).SerializeToString(),
        "contract",
    ),
    "shared memory": (
        request_of(
            x={"parameters": {"shared_memory_region": {"string_param": "r"}}}, raw=[]
        ).SerializeToString(),
        "unsupported",
    ),
    "results in shared memory": (
        request_of(
            outputs=[{"name": "y", "parameters": {"shared_memory_region": {"string_param": "r"}}}]
        ).SerializeToString(),
        "unsupported",
    ),
    "classification": (
        request_of(
            outputs=[{"name": "y", "parameters": {"classification": {"int64_param": 3}}}]
        ).SerializeToString(),
        "unsupported",
    ),
    "invalid priority": (
        request_of(parameters={"priority": {"string_param": "high"}}).SerializeToString(),
        "malformed",
    ),
    "batch above the limit": (
        request_of(x={"shape": [17 * MIB // 8]}, raw=[bytes(17 * MIB)]).SerializeToString(),
        "limit",
    ),
    "message above the limit": (
        request_of(raw=[bytes(22 * MIB)]).SerializeToString(),
        "limit",
    ),
}
STATUSES = {
    "malformed": "INVALID_ARGUMENT",
    "contract": "INVALID_ARGUMENT",
    "limit": "INVALID_ARGUMENT",
    "model_not_found": "NOT_FOUND",
    "unsupported": "UNIMPLEMENTED",
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_request_gets_its_error_code_and_the_next_is_served(
    gateway: Gateway, reference: ReferenceClient, name: str
) -> None:
    message, code = INVALID[name]
    bad, good = reference.run(
        "raw_call", address=gateway.address, messages=[message.hex(), GOOD.hex()]
    )
    assert (bad[0], bad[2]["iskander-code"]) == (STATUSES[code], code), bad
    assert bad[2]["iskander-fault"] == "client" and bad[2]["iskander-retryable"] == "false"
    assert good == ["OK"]


@pytest.mark.parametrize("method", ["ModelReady", "ModelConfig", "RepositoryIndex", "ServerLive"])
def test_invalid_message_of_other_methods_is_rejected(
    gateway: Gateway, reference: ReferenceClient, method: str
) -> None:
    (bad,) = reference.run("raw_call", address=gateway.address, messages=["0aff"], method=method)
    assert (bad[0], bad[2]["iskander-code"]) == ("INVALID_ARGUMENT", "malformed")


def test_full_queue_is_resource_exhausted(
    tmp_path: Path, reference: ReferenceClient, filler: ReferenceClient
) -> None:
    """Flight sends UNAVAILABLE instead. The trailers have the retry delay."""
    path = models.row_ids(tmp_path / "ids")
    model = {"name": "ids", "path": str(path), "intra_threads": 1, "max_batch_rows": 1}
    with running(
        tmp_path, [model | {"lane": {"queue_requests": 1}}], workers=SECTIONS["workers"]
    ) as gateway:
        with suspended(gateway.worker_pids()[0]):
            send_one_by_one(gateway, filler, [0, 0, 0])
            one = request_of(x={"shape": [1]}, raw=[bytes(8)]).SerializeToString()
            (rejected,) = reference.run("raw_call", address=gateway.address, messages=[one.hex()])
        assert (rejected[0], rejected[2]["iskander-code"]) == ("RESOURCE_EXHAUSTED", "queue_full")
        assert rejected[2]["iskander-retryable"] == "true"
        assert int(rejected[2]["iskander-retry-after-ms"]) > 0
        assert len(filler.result()) == 3
        gateway.wait_idle()


def test_passed_deadline_is_deadline_exceeded(
    tmp_path: Path, reference: ReferenceClient, filler: ReferenceClient
) -> None:
    path = models.row_ids(tmp_path / "ids")
    model = {"name": "ids", "path": str(path), "intra_threads": 1, "max_batch_rows": 1}
    with running(tmp_path, [model], workers=SECTIONS["workers"]) as gateway:
        with suspended(gateway.worker_pids()[0]):
            send_one_by_one(gateway, filler, [0, 0])
            soon = {"timeout": oip_pb2.InferParameter(int64_param=300_000)}
            one = request_of(x={"shape": [1]}, raw=[bytes(8)], parameters=soon)
            messages = [one.SerializeToString().hex()]
            (late,) = reference.run("raw_call", address=gateway.address, messages=messages)
        assert (late[0], late[2]["iskander-code"]) == ("DEADLINE_EXCEEDED", "deadline_exceeded")
        assert late[2]["iskander-retryable"] == "false"
        assert len(filler.result()) == 2
        gateway.wait_idle()


def test_model_without_a_worker_is_unavailable(tmp_path: Path, reference: ReferenceClient) -> None:
    path = models.row_ids(tmp_path / "ids")
    workers = SECTIONS["workers"] | {"spawn": False}
    with running(tmp_path, [{"name": "ids", "path": str(path)}], workers=workers) as gateway:
        call = {"address": gateway.address, "messages": [GOOD.hex()]}
        (rejected,) = reference.run("raw_call", **call)
        readiness = reference.run("readiness", address=gateway.address, model="ids")
        assert readiness == [True, False, False, "UNAVAILABLE"]
    assert (rejected[0], rejected[2]["iskander-code"]) == ("UNAVAILABLE", "not_ready")
    assert (rejected[2]["iskander-fault"], rejected[2]["iskander-retryable"]) == (
        "operator",
        "true",
    )


def test_drain_answers_admitted_requests(tmp_path: Path, reference: ReferenceClient) -> None:
    path = models.row_ids(tmp_path / "ids")
    model = {"name": "ids", "path": str(path), "intra_threads": 1}
    with running(tmp_path, [model], workers=SECTIONS["workers"]) as gateway:
        with suspended(gateway.worker_pids()[0]):
            assert reference.run("draining", address=gateway.address) == "under way"
            eventually(lambda: lane(gateway, "ids/1")["requests"] == 2, what="both requests")
            gateway.signal(signal.SIGTERM)
            eventually(lambda: "draining 0 streams, 2 calls" in gateway.text(), what="the drain")
        result = reference.result()
        gateway.wait()
    assert result["unary"] == "alone" and result["streamed"] == ["in stream"]
    status, _, trailers = result["end"]
    assert (status, trailers["iskander-code"]) == ("UNAVAILABLE", "draining")


@pytest.mark.slow
def test_drain_waits_until_computed_results_are_read(
    tmp_path: Path, reference: ReferenceClient
) -> None:
    path = models.identity(tmp_path / "broad", TensorProto.FLOAT, ["rows", 64])
    model = {"name": "broad", "path": str(path), "intra_threads": 1}
    sections = {"arena": SECTIONS["arena"], "workers": SECTIONS["workers"]}
    with running(tmp_path, [model], **sections) as gateway:
        assert reference.run("stream_unread", address=gateway.address, **UNREAD) == "under way"
        eventually(lambda: lane(gateway, "broad/1")["requests"] >= WINDOW_MIN, what="requests")
        gateway.signal(signal.SIGTERM)
        waiting = "draining: 0 streams, 1 calls, 0 requests in queues, 0 batches in flight"
        eventually(
            lambda: waiting in gateway.text(), what="a drain that waits for the client to read"
        )
        reference.send("read")
        result = reference.result()
        gateway.wait()
    responses = result["told"]
    assert WINDOW_MIN <= len(responses) <= 2 * WINDOW_MAX
    # Requests that were received but not admitted are rejected after all admitted ones.
    answered = [text for text in responses if "the server is stopping" not in text]
    assert len(answered) >= WINDOW_MIN
    assert responses[: len(answered)] == [str(number) for number in range(len(answered))]
    status, _, trailers = result["end"]
    assert (status, trailers["iskander-code"]) == ("UNAVAILABLE", "draining")
