"""The Open Inference Protocol over gRPC, by unmodified clients: results, terms, errors, streams.

The clients run in a process of their own, `support/oip_client.py`; Flight's results, which theirs
are held against, are asked for here.
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
ROOM: dict[str, Any] = {
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
LEVELS_MOST = 10
UNREAD = {"requests": 40, "bytes_each": 4 * MIB}
WINDOW_LEAST, WINDOW_MOST = 4, 8
"""Requests of 4 MiB, with their results or without, in `limits.window_bytes`."""


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
    with running(folder, served(folder), **ROOM) as ready:
        yield ready
        ready.wait_idle()


@pytest.fixture(scope="module")
def reference() -> Iterator[ReferenceClient]:
    reference = ReferenceClient(SCRIPT)
    yield reference
    reference.close()


@pytest.fixture
def filler() -> Iterator[ReferenceClient]:
    """Another process of clients, to be under way beside the first."""
    reference = ReferenceClient(SCRIPT)
    yield reference
    reference.close()


def tensor(datatype: str, array: np.ndarray[Any, Any]) -> list[Any]:
    return [datatype, list(array.shape), array.tobytes().hex()]


def values_of(datatype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Every bit pattern is a value but of booleans and floats, whose NaNs would be none."""
    random = np.random.default_rng(len(shape))
    dtype = np.dtype(DATATYPES[datatype][0])
    if datatype == "BOOL":
        return random.random(shape) < 0.5
    if dtype.kind == "f":
        return random.normal(size=shape).astype(dtype)
    limits = np.iinfo(dtype)
    return random.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def test_the_server_and_its_models_describe_themselves(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    """Metadata have the axis of the rows and the configuration has not, as perf_analyzer wants."""
    found = reference.run("described", address=gateway.address)

    assert found["live"] and found["ready"] and found["model_ready"] == [True, True]
    assert (found["server"]["name"], found["server"]["version"]) == ("iskander", __version__)
    assert "statistics" in found["server"]["extensions"]
    assert found["metadata"] == {
        "name": "two-tower",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [
            {"name": "user_id", "datatype": "INT64", "shape": ["-1"]},
            {"name": "item_id", "datatype": "INT64", "shape": ["-1"]},
        ],
        "outputs": [{"name": "score", "datatype": "FP32", "shape": ["-1"]}],
    }
    assert found["versions"] == ["1", "10"]
    assert found["wide"] == [{"name": "features", "datatype": "FP32", "shape": ["-1", "64"]}]
    config = found["config"]
    assert config["max_batch_size"] > 0
    (features,) = config["input"]
    assert (features["name"], features["data_type"], features["dims"]) == (
        "features", "TYPE_FP32", ["64"],
    )  # fmt: skip
    assert config["dynamic_batching"]["priority_levels"] == str(LEVELS_MOST)
    assert {"name": "ids", "version": "10", "state": "READY"} in found["index"]
    assert found["memory"] == [{}, {}]


def test_what_is_managed_elsewhere_is_refused_by_name(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    found = reference.run("managed", address=gateway.address)
    assert {name: status for name, (status, _) in found.items()} == {
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
    assert "configuration" in found["unload"][1]
    assert "available: " in found["load unknown"][1]


def test_a_repositorys_calls_take_both_layouts_in_use(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    loaded, unknown, unloaded = reference.run("other_layout", address=gateway.address)
    answer = oip_pb2.RepositoryModelLoadResponse.FromString(bytes.fromhex(loaded))
    assert (answer.model_name, answer.is_loaded) == ("ids", True)
    assert unknown[0] == "NOT_FOUND" and unknown[2]["iskander-code"] == "model_not_found"
    assert unloaded[0] == "UNIMPLEMENTED"


def test_reflection_tells_every_service_and_messages_as_clients_have_them(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    found = reference.run("reflected", address=gateway.address)
    services = {
        "arrow.flight.protocol.FlightService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "inference.GRPCInferenceService",
    }
    assert set(found["services"]) == set(found["v1"]) == services
    assert found["unknown"] == [5, 5] and found["consistent"] == [True, True]
    assert "DoExchange" in found["flight"]
    assert found["wrong"] == []


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_comes_back_as_it_went(
    gateway: Gateway, reference: ReferenceClient, datatype: str
) -> None:
    """Raw, of two ranks; and as typed contents where the datatype has any."""
    for model, shape in ((f"same-{datatype}", (9,)), (f"cube-{datatype}", (5, 2, 3))):
        sent = {"x": tensor(datatype, values_of(datatype, shape))}
        wanted = {"y": sent["x"]}
        found = reference.run("infer", address=gateway.address, model=model, tensors=sent)
        assert found["outputs"] == wanted
        if datatype != "FP16":
            found = reference.run("typed", address=gateway.address, model=model, tensors=sent)
            assert found["outputs"] == wanted and found["id"] == "typed"


def test_strings_and_bfloat16_come_back_as_they_went(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    strings = ["", "naïve", "a" * 200, "\0"]
    found = reference.run("texts", address=gateway.address, strings=strings)
    assert found["raw"] == found["typed"] == strings
    assert found["halves"] == [0.5, -2.0, 1.0]
    assert found["metadata"] == [{"name": "x", "datatype": "BYTES", "shape": ["-1"]}]
    assert found["config"][0]["data_type"] == "TYPE_STRING"


@pytest.mark.parametrize("rows", [1, 128, 4096])
def test_results_equal_flights_bit_for_bit(
    gateway: Gateway, reference: ReferenceClient, rows: int
) -> None:
    random = np.random.default_rng(rows)
    users, items = random.integers(0, 1000, rows), random.integers(0, 200_000, rows)
    features = random.normal(size=(rows, 64)).astype(np.float32)
    with gateway.client() as client:
        scored = client.score("two-tower", pa.record_batch({"user_id": users, "item_id": items}))
        column = pa.FixedSizeListArray.from_arrays(features.reshape(-1), 64)
        wide = client.score("wide", pa.record_batch({"features": column}))

    asked = {"user_id": tensor("INT64", users), "item_id": tensor("INT64", items)}
    found = reference.run("infer", address=gateway.address, model="two-tower", tensors=asked)
    assert found["outputs"] == {"score": tensor("FP32", scored["score"].to_numpy())}
    asked = {"features": tensor("FP32", features)}
    found = reference.run("infer", address=gateway.address, model="wide", tensors=asked)
    assert found["outputs"] == {"score": tensor("FP32", wide["score"].to_numpy())}


def test_no_rows_give_no_rows(gateway: Gateway, reference: ReferenceClient) -> None:
    asked = {"x": tensor("INT64", np.zeros(0, np.int64))}
    found = reference.run("infer", address=gateway.address, model="ids", tensors=asked)
    assert found["outputs"] == {"y": ["INT64", [0], ""]}


@pytest.mark.parametrize("way", ["infer", "typed"])
@pytest.mark.parametrize("datatype", ["FP32", "INT64", "BOOL"])
def test_a_tensor_of_megabytes_comes_back_as_it_went(
    gateway: Gateway, reference: ReferenceClient, datatype: str, way: str
) -> None:
    """Typed whole numbers so many that a thread reads them, too."""
    dtype = {"FP32": np.float32, "INT64": np.int64, "BOOL": np.bool_}[datatype]
    values = np.random.default_rng(1).integers(0, 1 << 30, MIB) % 1009
    sent = {"x": tensor(datatype, values.astype(dtype))}
    found = reference.run(way, address=gateway.address, model=f"same-{datatype}", tensors=sent)
    assert found["outputs"] == {"y": sent["x"]}


def test_ids_versions_and_wanted_outputs(gateway: Gateway, reference: ReferenceClient) -> None:
    def ask(**options: Any) -> Any:
        asked = {"x": tensor("INT64", np.arange(3))}
        return reference.run(
            "infer", address=gateway.address, model="ids", tensors=asked, **options
        )

    assert ask(request_id="naïve")["id"] == "naïve"
    assert ask()["model"] == "ids/10"
    assert ask(model_version="1")["model"] == "ids/1"
    assert ask(outputs=["y"])["order"] == ["y"]
    assert ask(model_version="7")["refused"][0] == "NOT_FOUND"
    status, text = ask(outputs=["z"])["refused"]
    assert status == "INVALID_ARGUMENT" and "`z` is not an output" in text


def test_compressed_messages_are_understood(gateway: Gateway, reference: ReferenceClient) -> None:
    assert reference.run("compressed", address=gateway.address) == [True, True]


def test_callbacks_each_get_their_own(gateway: Gateway, reference: ReferenceClient) -> None:
    assert reference.run("callbacks", address=gateway.address, requests=200) == []


def test_asyncio_clients_requests_and_streams(gateway: Gateway, reference: ReferenceClient) -> None:
    found = reference.run("by_asyncio", address=gateway.address, requests=20)
    assert found["unary"] == [[3 * number + 1, 22] for number in range(20)]
    told = found["streamed"].pop(3)
    assert "there is no model `nope`" in told
    assert found["streamed"] == [[3 * number + 1] for number in range(20) if number != 3]


def test_a_stream_keeps_its_order_and_goes_on_after_errors(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    found = reference.run("streamed", address=gateway.address, requests=50, wants_final=True)
    assert len(found) == 50
    for number, told in enumerate(found):
        if number % 5 == 3:
            assert told[0] == "error" and "`nope`" in told[1]
        else:
            values = range(number, number + number % 4) if number % 4 else [number]
            assert told == [str(number), [3 * value + 1 for value in values], True]
    assert not any(
        told[2] for told in reference.run("streamed", address=gateway.address, requests=3)
    )


def test_a_streams_errors_say_whose_they_are(gateway: Gateway, reference: ReferenceClient) -> None:
    first, second, third = reference.run("stream_errors", address=gateway.address)
    assert "`nope`" in first["errorMessage"]
    answer = first["inferResponse"]
    assert answer["id"] == "first"
    assert answer["parameters"]["iskander-code"] == {"stringParam": "model_not_found"}
    assert answer["parameters"]["iskander-retryable"] == {"boolParam": False}
    assert "errorMessage" not in second and second["inferResponse"]["id"] == "second"
    assert "id" not in third["inferResponse"]


def test_a_stream_may_ask_for_a_status(gateway: Gateway, reference: ReferenceClient) -> None:
    values, (status, text) = reference.run("stream_status", address=gateway.address)
    assert values == [4] and status == "NOT_FOUND" and "`nope`" in text


def test_a_message_that_is_none_does_not_end_a_stream(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    first, second = reference.run("stream_broken", address=gateway.address)
    assert first == ["the message is not a ModelInferRequest", ""]
    assert second == ["", "next"]


def test_a_client_that_does_not_read_is_held_back_and_nobody_else(
    gateway: Gateway, reference: ReferenceClient, filler: ReferenceClient
) -> None:
    """No more is taken than the window and what the client's transport has read; then all of it."""
    before = lane(gateway, "broad/1")["requests"]

    def taken() -> int:
        count: int = lane(gateway, "broad/1")["requests"] - before
        return count

    assert filler.run("stream_unread", address=gateway.address, **UNREAD) == "under way"
    eventually(lambda: taken() >= WINDOW_LEAST, what="a full window")
    for _ in range(20):
        asked = {"x": tensor("INT64", np.arange(3))}
        found = reference.run("infer", address=gateway.address, model="ids", tensors=asked)
        assert found["outputs"] == {"y": tensor("INT64", 3 * np.arange(3) + 1)}
    assert taken() <= 2 * WINDOW_MOST
    filler.tell("read")
    found = filler.facts()
    assert found["told"] == [str(number) for number in range(UNREAD["requests"])]
    assert found["end"][0] == "OK" and taken() == UNREAD["requests"]


def test_the_servers_messages_and_its_clients_share_a_process(reference: ReferenceClient) -> None:
    assert reference.run("side_by_side") == [True, True]


def test_statistics_count_what_was_done(gateway: Gateway, reference: ReferenceClient) -> None:
    """Those of one version; of all where no model is named."""

    def version_1() -> dict[str, Any]:
        found = reference.run("statistics", address=gateway.address, model="ids", version="1")
        (only,) = found
        return only

    def count(statistics: dict[str, Any], *path: str) -> int:
        value: Any = statistics
        for name in path:
            value = value.get(name, {})
        return int(value or 0)

    before = version_1()
    asked = {"x": tensor("INT64", np.arange(5))}
    ids = {"address": gateway.address, "model": "ids", "tensors": asked, "model_version": "1"}
    reference.run("infer", **ids)
    after = version_1()

    for path, more in {
        ("inference_count",): 5,
        ("execution_count",): 1,
        ("inference_stats", "success", "count"): 1,
        ("inference_stats", "queue", "count"): 1,
        ("inference_stats", "compute_infer", "count"): 1,
        ("inference_stats", "fail", "count"): 0,
    }.items():
        assert count(after, *path) - count(before, *path) == more, path
    assert count(after, "inference_stats", "compute_infer", "ns") > 0
    assert count(after, "last_inference") > 1_500_000_000_000
    listed = reference.run("statistics", address=gateway.address, model="")
    assert len(listed) == 8 + 2 * len(DATATYPES)


def test_a_client_that_leaves_gives_its_request_up(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    assert reference.run("cancelled", address=gateway.address) == "under way"
    eventually(lambda: lane(gateway, "slow/1")["requests"], what="a request of the slow model")
    reference.tell("give up")
    assert reference.facts()[0] == "CANCELLED"
    gateway.wait_idle()
    assert lane(gateway, "slow/1")["withdrawn"] == 1


def test_a_stream_that_is_given_up_leaves_nothing_behind(
    gateway: Gateway, reference: ReferenceClient
) -> None:
    before = lane(gateway, "ids/10")
    with suspended(gateway.worker_pids()[0]):
        ask = {"address": gateway.address, "requests": 5}
        assert reference.run("stream_cancelled", **ask) == "under way"
        eventually(
            lambda: lane(gateway, "ids/10")["requests"] == before["requests"] + 5,
            what="five requests",
        )
        reference.tell("give up")
        assert reference.facts() == "CANCELLED"
        eventually(
            lambda: lane(gateway, "ids/10")["withdrawn"] == before["withdrawn"] + 5,
            what="five requests given up",
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
def test_of_several_deadlines_the_soonest_counts(
    gateway: Gateway, reference: ReferenceClient, options: dict[str, Any]
) -> None:
    """No worker runs meanwhile: the deadline passes where the request waits."""
    asked = {"x": tensor("INT64", np.arange(3))}
    fill = {"address": gateway.address, "model": "ids", "tensors": asked}
    with suspended(gateway.worker_pids()[0]):
        for _ in range(2):  # What a worker has is not given up for a deadline of the request.
            reference.run("infer", **fill, client_timeout=0.1)
        found = reference.run("infer", **fill, **options)
    assert found["refused"][0] in ("DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
    gateway.wait_idle()


def send_one_by_one(gateway: Gateway, reference: ReferenceClient, priorities: list[int]) -> None:
    """Begin requests of `ids`, each when the one before it is in the lane."""
    reference.begin("in_what_order", address=gateway.address, priorities=priorities)
    for count in range(1, len(priorities) + 1):
        assert reference.facts() == "sent"
        eventually(
            lambda count=count: lane(gateway, "ids/1")["requests"] == count, what="a request"
        )
        reference.tell("next")


def test_urgent_requests_go_first(tmp_path: Path, reference: ReferenceClient) -> None:
    """The first two a worker has; all others wait.

    Each takes milliseconds: answers that reach the client together come to its callbacks as they
    like.
    """
    path = models.looping(tmp_path / "ids", turns=500, turns_row=0)
    model = {"name": "ids", "path": str(path), "intra_threads": 1, "max_batch_rows": 1}
    priorities = [0, 0, 9, 10, 1, 2, 0, 1, 255]
    with running(
        tmp_path, [model | {"lane": {"policy": "priority_tiered"}}], workers=ROOM["workers"]
    ) as gateway:
        with suspended(gateway.worker_pids()[0]):
            send_one_by_one(gateway, reference, priorities)
        order = reference.facts()
    assert [error for _, error in order if error] == []
    assert [priorities[number] for number, _ in order[2:]] == [1, 1, 2, 0, 9, 10, 255]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"parameters": {"iskander_deadline_ms": "soon"}}, "deadline_ms"),
        ({"parameters": {"iskander_haste": 1}}, "haste"),
        ({"headers": {"iskander-priority": "11"}}, "priority"),
        ({"timeout": -1}, "`timeout`"),
    ],
)
def test_terms_that_are_none_are_refused(
    gateway: Gateway, reference: ReferenceClient, options: dict[str, Any], says: str
) -> None:
    asked = {"x": tensor("INT64", np.arange(3))}
    found = reference.run("infer", address=gateway.address, model="ids", tensors=asked, **options)
    assert found["refused"][0] == "INVALID_ARGUMENT" and says in found["refused"][1]


def test_a_sequence_is_refused_by_name(gateway: Gateway, reference: ReferenceClient) -> None:
    asked = {"x": tensor("INT64", np.arange(3))}
    found = reference.run(
        "infer", address=gateway.address, model="ids", tensors=asked, sequence_id=4
    )
    assert found["refused"][0] == "UNIMPLEMENTED" and "sequence_id" in found["refused"][1]


def request_of(**changes: Any) -> oip_pb2.ModelInferRequest:
    """A good request of `ids`, but for what is changed; `raw` are its raw contents."""
    raw = changes.pop("raw", [np.arange(3).tobytes()])
    tensor = {"name": "x", "datatype": "INT64", "shape": [3]} | changes.pop("x", {})
    values = {"model_name": "ids", "inputs": [tensor], "raw_input_contents": raw}
    return oip_pb2.ModelInferRequest(**(values | changes))


GOOD = request_of().SerializeToString()
BAD: dict[str, tuple[bytes, str]] = {
    "cut short": (GOOD[:-3], "malformed"),
    "cut in a length": (GOOD + b"\x3a", "malformed"),
    "an absurd length": (GOOD + b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "malformed"),
    "an endless number": (GOOD + b"\x08" + b"\xff" * 20, "malformed"),
    "a group": (GOOD + b"\x0b\x0c", "malformed"),
    "no protobuf": (b"\xde\xad\xbe\xef" * 100, "malformed"),
    "an id that is no text": (GOOD + b"\x1a\x02\xff\xfe", "malformed"),
    "a name that is no text": (b"\x0a\x02\xff\xfe" + GOOD[5:], "malformed"),
    "nothing": (b"", "model_not_found"),
    "too few bytes": (request_of(raw=[bytes(23)]).SerializeToString(), "malformed"),
    "too many bytes": (request_of(raw=[bytes(25)]).SerializeToString(), "malformed"),
    "no bytes": (request_of(raw=[]).SerializeToString(), "malformed"),
    "two raw contents": (request_of(raw=[bytes(24), bytes(24)]).SerializeToString(), "malformed"),
    "raw and typed": (
        request_of(x={"contents": {"int64_contents": [1, 2, 3]}}).SerializeToString(),
        "malformed",
    ),
    "typed in another's field": (
        request_of(x={"contents": {"int_contents": [1, 2, 3]}}, raw=[]).SerializeToString(),
        "malformed",
    ),
    "typed and too few": (
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
    "absurd rows": (request_of(x={"shape": [1 << 62]}).SerializeToString(), "limit"),
    "a negative shape": (request_of(x={"shape": [3, -1]}).SerializeToString(), "contract"),
    "an absurd shape": (request_of(x={"shape": [1 << 31] * 40}).SerializeToString(), "limit"),
    "no shape": (request_of(x={"shape": []}).SerializeToString(), "contract"),
    "unknown datatype": (request_of(x={"datatype": "FP4"}).SerializeToString(), "contract"),
    "another datatype": (request_of(x={"datatype": "FP64"}).SerializeToString(), "contract"),
    "strings by the million where none are": (
        request_of(
            x={"datatype": "BYTES", "shape": [4 * MIB]}, raw=[bytes(16 * MIB - 1024)]
        ).SerializeToString(),
        "contract",
    ),
    "more strings than there are bytes": (
        request_of(
            model_name="words", x={"datatype": "BYTES", "shape": [1 << 20]}, raw=[bytes(64)]
        ).SerializeToString(),
        "malformed",
    ),
    "a string that is no text": (
        request_of(
            model_name="words", x={"datatype": "BYTES", "shape": [1]}, raw=[b"\1\0\0\0\xff"]
        ).SerializeToString(),
        "contract",
    ),
    "unknown input": (request_of(x={"name": "w"}).SerializeToString(), "contract"),
    "unknown model": (request_of(model_name="nope").SerializeToString(), "model_not_found"),
    "unknown version": (request_of(model_version="77").SerializeToString(), "model_not_found"),
    "an endless name": (
        request_of(model_name="n" * 100_000).SerializeToString(),
        "model_not_found",
    ),
    "an output twice": (
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
    "classes": (
        request_of(
            outputs=[{"name": "y", "parameters": {"classification": {"int64_param": 3}}}]
        ).SerializeToString(),
        "unsupported",
    ),
    "a priority that is none": (
        request_of(parameters={"priority": {"string_param": "high"}}).SerializeToString(),
        "malformed",
    ),
    "more bytes than a batch may have": (
        request_of(x={"shape": [17 * MIB // 8]}, raw=[bytes(17 * MIB)]).SerializeToString(),
        "limit",
    ),
    "more bytes than a message may have": (
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


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_refused_by_name_and_the_next_is_served(
    gateway: Gateway, reference: ReferenceClient, name: str
) -> None:
    message, code = BAD[name]
    bad, good = reference.run(
        "raw_call", address=gateway.address, messages=[message.hex(), GOOD.hex()]
    )
    assert (bad[0], bad[2]["iskander-code"]) == (STATUSES[code], code), bad
    assert bad[2]["iskander-fault"] == "client" and bad[2]["iskander-retryable"] == "false"
    assert good == ["OK"]


@pytest.mark.parametrize("method", ["ModelReady", "ModelConfig", "RepositoryIndex", "ServerLive"])
def test_bad_questions_are_refused_by_name(
    gateway: Gateway, reference: ReferenceClient, method: str
) -> None:
    (bad,) = reference.run("raw_call", address=gateway.address, messages=["0aff"], method=method)
    assert (bad[0], bad[2]["iskander-code"]) == ("INVALID_ARGUMENT", "malformed")


def test_a_full_queue_is_resource_exhausted(
    tmp_path: Path, reference: ReferenceClient, filler: ReferenceClient
) -> None:
    """Here the protocol has words that Flight's clients misread; and what to do is in trailers."""
    path = models.row_ids(tmp_path / "ids")
    model = {"name": "ids", "path": str(path), "intra_threads": 1, "max_batch_rows": 1}
    with running(
        tmp_path, [model | {"lane": {"queue_requests": 1}}], workers=ROOM["workers"]
    ) as gateway:
        with suspended(gateway.worker_pids()[0]):
            send_one_by_one(gateway, filler, [0, 0, 0])
            one = request_of(x={"shape": [1]}, raw=[bytes(8)]).SerializeToString()
            (refused,) = reference.run("raw_call", address=gateway.address, messages=[one.hex()])
        assert (refused[0], refused[2]["iskander-code"]) == ("RESOURCE_EXHAUSTED", "queue_full")
        assert refused[2]["iskander-retryable"] == "true"
        assert int(refused[2]["iskander-retry-after-ms"]) > 0
        assert len(filler.facts()) == 3
        gateway.wait_idle()


def test_a_deadline_that_passes_here_is_deadline_exceeded(
    tmp_path: Path, reference: ReferenceClient, filler: ReferenceClient
) -> None:
    path = models.row_ids(tmp_path / "ids")
    model = {"name": "ids", "path": str(path), "intra_threads": 1, "max_batch_rows": 1}
    with running(tmp_path, [model], workers=ROOM["workers"]) as gateway:
        with suspended(gateway.worker_pids()[0]):
            send_one_by_one(gateway, filler, [0, 0])
            soon = {"timeout": oip_pb2.InferParameter(int64_param=300_000)}
            one = request_of(x={"shape": [1]}, raw=[bytes(8)], parameters=soon)
            messages = [one.SerializeToString().hex()]
            (late,) = reference.run("raw_call", address=gateway.address, messages=messages)
        assert (late[0], late[2]["iskander-code"]) == ("DEADLINE_EXCEEDED", "deadline_exceeded")
        assert late[2]["iskander-retryable"] == "false"
        assert len(filler.facts()) == 2
        gateway.wait_idle()


def test_a_model_without_a_worker_is_unavailable(
    tmp_path: Path, reference: ReferenceClient
) -> None:
    path = models.row_ids(tmp_path / "ids")
    workers = ROOM["workers"] | {"spawn": False}
    with running(tmp_path, [{"name": "ids", "path": str(path)}], workers=workers) as gateway:
        asked = {"address": gateway.address, "messages": [GOOD.hex()]}
        (refused,) = reference.run("raw_call", **asked)
        told = reference.run("readiness", address=gateway.address, model="ids")
        assert told == [True, False, False, "UNAVAILABLE"]
    assert (refused[0], refused[2]["iskander-code"]) == ("UNAVAILABLE", "not_ready")
    assert (refused[2]["iskander-fault"], refused[2]["iskander-retryable"]) == ("operator", "true")


def test_a_server_that_stops_answers_what_it_has_taken(
    tmp_path: Path, reference: ReferenceClient
) -> None:
    path = models.row_ids(tmp_path / "ids")
    model = {"name": "ids", "path": str(path), "intra_threads": 1}
    with running(tmp_path, [model], workers=ROOM["workers"]) as gateway:
        with suspended(gateway.worker_pids()[0]):
            assert reference.run("draining", address=gateway.address) == "under way"
            eventually(lambda: lane(gateway, "ids/1")["requests"] == 2, what="both requests")
            gateway.signal(signal.SIGTERM)
            eventually(lambda: "draining 0 streams, 2 calls" in gateway.text(), what="the drain")
        found = reference.facts()
        gateway.wait()
    assert found["unary"] == "alone" and found["streamed"] == ["in stream"]
    status, _, trailers = found["end"]
    assert (status, trailers["iskander-code"]) == ("UNAVAILABLE", "draining")


def test_a_server_that_stops_waits_until_its_answers_are_read(
    tmp_path: Path, reference: ReferenceClient
) -> None:
    """Also those that were computed long ago."""
    path = models.identity(tmp_path / "broad", TensorProto.FLOAT, ["rows", 64])
    model = {"name": "broad", "path": str(path), "intra_threads": 1}
    room = {"arena": ROOM["arena"], "workers": ROOM["workers"]}
    with running(tmp_path, [model], **room) as gateway:
        assert reference.run("stream_unread", address=gateway.address, **UNREAD) == "under way"
        eventually(lambda: lane(gateway, "broad/1")["requests"] >= WINDOW_LEAST, what="requests")
        gateway.signal(signal.SIGTERM)
        waiting = "draining: 0 streams, 1 calls, 0 requests in queues, 0 batches in flight"
        eventually(lambda: waiting in gateway.text(), what="a drain that waits for its client")
        reference.tell("read")
        found = reference.facts()
        gateway.wait()
    told = found["told"]
    assert WINDOW_LEAST <= len(told) <= 2 * WINDOW_MOST
    # What had come and was not let in yet is refused by name, behind all that was.
    answered = [text for text in told if "the server is stopping" not in text]
    assert len(answered) >= WINDOW_LEAST
    assert told[: len(answered)] == [str(number) for number in range(len(answered))]
    status, _, trailers = found["end"]
    assert (status, trailers["iskander-code"]) == ("UNAVAILABLE", "draining")
