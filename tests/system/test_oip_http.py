"""What unmodified clients of the Open Inference Protocol get over HTTP: curl and tritonclient."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from onnx import TensorProto
from support import models
from support.processes import MIB, Gateway, eventually, running
from tritonclient.utils import InferenceServerException

ELEMENTS = {
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
ONE = {"groups": ["0"], "count": 1, "reattach_s": 5.0}
HTTP = {"address": "127.0.0.1:0"}
JSON_BYTES, MESSAGE_BYTES = MIB, 20 * MIB
LENGTH = "Inference-Header-Content-Length"
SLOW_UNITS = 1_000_000
"""Minutes, if nobody gave it up."""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("oip-http")
    served = [
        {"name": "two-tower", "path": str(models.TWO_TOWER), "intra_threads": 1},
        {"name": "wide", "path": str(models.WIDE), "intra_threads": 1},
        {"name": "ids", "path": str(models.row_ids(folder / "ids")), "intra_threads": 1},
        {"name": "ids", "version": 7, "path": str(models.row_ids(folder / "ids7"))},
        slow_model(folder),
    ]
    others = {"BYTES": ("", TensorProto.STRING), "BF16": ("", TensorProto.BFLOAT16)}
    for name, (_, element) in (ELEMENTS | others).items():
        path = models.identity(folder / name, element, ["rows", 2, 3])
        served.append({"name": f"same-{name}", "path": str(path), "max_batch_rows": 1000})
    with running(
        folder,
        served,
        workers=dict(ONE),
        http=HTTP | {"json_bytes": JSON_BYTES},
        limits={"rows": 300_000, "message_bytes": MESSAGE_BYTES},
    ) as ready:
        yield ready
        ready.wait_idle()


def slow_model(folder: Path) -> dict[str, Any]:
    """`slow`, of which a worker has one request that runs and one that is next."""
    path = str(models.slow(folder / "slow", 100))
    return {"name": "slow", "path": path, "intra_threads": 1, "max_batch_rows": 1}


def address_of(gateway: Gateway) -> str:
    address: str = gateway.stats()["http_address"]
    return address


@pytest.fixture(scope="module")
def address(gateway: Gateway) -> str:
    return address_of(gateway)


@pytest.fixture
def client(address: str) -> Iterator[triton.InferenceServerClient]:
    client = triton.InferenceServerClient(address)
    try:
        yield client
    finally:
        client.close()


def tensor(name: str, values: np.ndarray, datatype: str, **options: Any) -> triton.InferInput:
    given = triton.InferInput(name, list(values.shape), datatype)
    given.set_data_from_numpy(values, **options)
    return given


def ids(rows: int, **options: Any) -> triton.InferInput:
    return tensor("x", np.arange(rows, dtype=np.int64), "INT64", **options)


def send(
    address: str, model: str, body: bytes, headers: dict[str, str] | None = None, path: str = ""
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", path or f"/v2/models/{model}/infer", body, headers or {})
        response = connection.getresponse()
        named = {name.lower(): value for name, value in response.getheaders()}
        return response.status, named, response.read()


def post(
    address: str, model: str, body: Any, headers: dict[str, str] | None = None, path: str = ""
) -> tuple[int, dict[str, str], Any]:
    """The same of JSON, both ways."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, named, answer = send(address, model, raw, headers, path)
    return status, named, json.loads(answer or b"null")


def asking(values: list[Any], **rest: Any) -> dict[str, Any]:
    given = {"name": "x", "datatype": "INT64", "shape": [len(values)], "data": values}
    return {"inputs": [given], **rest}


# What clients are told.


def test_server_and_models_are_told_as_over_grpc(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("ids")
    assert client.is_model_ready("ids", "1")
    assert not client.is_model_ready("ids", "2")
    assert not client.is_model_ready("nobody")
    server = client.get_server_metadata()
    assert server["name"] == "iskander"
    assert "binary_tensor_data" in server["extensions"]
    told = client.get_model_metadata("wide")
    assert told["inputs"] == [{"name": "features", "datatype": "FP32", "shape": [-1, 64]}]
    assert sorted(client.get_model_metadata("ids")["versions"]) == ["1", "7"]
    assert client.get_model_metadata("ids", "7")["inputs"][0]["name"] == "x"
    config = client.get_model_config("wide")
    assert client.get_model_config("wide", "1") == config
    assert config["input"][0]["dims"] == [64]
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    assert config["max_batch_size"] > 0
    for unknown in (client.get_model_metadata, client.get_model_config):
        with pytest.raises(InferenceServerException, match="has no version `2`") as error:
            unknown("ids", "2")
        assert error.value.status() == "404"


def test_statistics_count_what_was_asked(client: triton.InferenceServerClient) -> None:
    (before,) = client.get_inference_statistics("ids", "1")["model_stats"]

    client.infer("ids", [ids(5)], model_version="1")

    def is_counted() -> bool:
        (after,) = client.get_inference_statistics("ids", "1")["model_stats"]
        return bool(after["inference_count"] == before["inference_count"] + 5)

    eventually(is_counted, what="five more rows")
    every = client.get_inference_statistics()["model_stats"]
    assert {"ids", "wide", "slow"} <= {each["name"] for each in every}


def test_the_repository_is_what_is_configured(
    client: triton.InferenceServerClient, address: str
) -> None:
    index = client.get_model_repository_index()
    assert {"name": "wide", "version": "1", "state": "READY", "reason": ""} in index
    assert post(address, "", {"ready": True}, path="/v2/repository/index")[2] == index
    client.load_model("ids")
    for refused in (
        lambda: client.load_model("nobody"),
        lambda: client.load_model("ids", config="{}"),
        lambda: client.unload_model("ids"),
    ):
        with pytest.raises(InferenceServerException):
            refused()


def test_what_is_not_offered_says_so(client: triton.InferenceServerClient) -> None:
    assert client.get_system_shared_memory_status() == []
    assert client.get_cuda_shared_memory_status() == []
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    for refused in (
        lambda: client.register_system_shared_memory("a", "/a", 8),
        client.get_trace_settings,
        lambda: client.update_trace_settings(settings={"trace_level": "OFF"}),
        client.get_log_settings,
    ):
        with pytest.raises(InferenceServerException) as error:
            refused()
        assert error.value.status() == "501"


# Inference.


@pytest.mark.parametrize("is_binary", [True, False])
@pytest.mark.parametrize("datatype", ELEMENTS)
def test_every_datatype_equals_flight_bit_for_bit(
    gateway: Gateway, client: triton.InferenceServerClient, datatype: str, is_binary: bool
) -> None:
    name, _ = ELEMENTS[datatype]
    values = np.random.default_rng(3).integers(0, 2 if name == "bool" else 100, (5, 2, 3))
    values = values.astype(name)
    if name.startswith("float"):
        values = values / np.array(7, name)
    given = [tensor("x", values, datatype, binary_data=is_binary)] if datatype != "FP16" else None
    wanted = [triton.InferRequestedOutput("y", binary_data=is_binary)]
    if not is_binary and datatype == "FP16":
        with pytest.raises(InferenceServerException, match=r"FP16.*binary"):
            client.infer("same-FP16", [tensor("x", values, "FP16")], outputs=wanted)
        return

    answer = client.infer(
        f"same-{datatype}", given or [tensor("x", values, datatype)], outputs=wanted
    )

    result = answer.as_numpy("y")
    assert (result.dtype, result.shape) == (values.dtype, values.shape)
    assert result.tobytes() == values.tobytes()
    flat = pa.array(values.reshape(-1))
    nested = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(flat, 3), 2)
    with gateway.client() as flight:
        scored = flight.score(f"same-{datatype}", pa.record_batch({"x": nested}))
    assert scored["y"].combine_chunks().flatten().flatten() == pa.array(result.reshape(-1))


@pytest.mark.parametrize("is_binary", [True, False])
def test_strings_equal_flight(
    gateway: Gateway, client: triton.InferenceServerClient, is_binary: bool
) -> None:
    texts = ["", "a", "ä", "\0", "long " * 50, '"quoted"']
    values = np.array([text.encode() for text in texts], np.object_).reshape(1, 2, 3)
    given = tensor("x", values, "BYTES", binary_data=is_binary)
    wanted = [triton.InferRequestedOutput("y", binary_data=is_binary)]

    result = client.infer("same-BYTES", [given], outputs=wanted).as_numpy("y")

    assert result.shape == (1, 2, 3)
    flat = [each if isinstance(each, str) else each.decode() for each in result.reshape(-1)]
    nested = pa.FixedSizeListArray.from_arrays(
        pa.FixedSizeListArray.from_arrays(pa.array(texts), 3), 2
    )
    with gateway.client() as flight:
        scored = flight.score("same-BYTES", pa.record_batch({"x": nested}))
    assert scored["y"].combine_chunks().flatten().flatten().to_pylist() == flat == texts


def test_half_of_a_float_comes_back_as_it_went(address: str) -> None:
    """As the bytes of one tensor, since clients differ in what they take for it."""
    body = np.array([0x3FC0, 0xC000, 0, 0x7F80, 0x4380, 1], np.uint16).tobytes()

    status, headers, answer = send(address, "same-BF16", body, {LENGTH: "0"})

    length = int(headers[LENGTH.lower()])
    assert (status, answer[length:]) == (200, body)
    assert json.loads(answer[:length])["outputs"][0]["datatype"] == "BF16"


@pytest.mark.parametrize("is_binary", [True, False])
def test_a_model_computes_the_same_as_over_flight(
    gateway: Gateway, client: triton.InferenceServerClient, is_binary: bool
) -> None:
    random = np.random.default_rng(1)
    users, items = random.integers(0, 1000, 500), random.integers(0, 100_000, 500)
    given = [
        tensor("item_id", items, "INT64", binary_data=is_binary),
        tensor("user_id", users, "INT64", binary_data=is_binary),
    ]
    wanted = [triton.InferRequestedOutput("score", binary_data=is_binary)]

    answer = client.infer("two-tower", given, outputs=wanted, request_id="a ä")

    assert answer.get_response()["id"] == "a ä"
    with gateway.client() as flight:
        batch = pa.record_batch({"user_id": users, "item_id": items})
        scored = flight.score("two-tower", batch)
    assert answer.as_numpy("score").tobytes() == scored["score"].to_numpy().tobytes()


@pytest.mark.parametrize("coding", [None, "gzip", "deflate"])
def test_large_requests_plain_and_compressed(
    client: triton.InferenceServerClient, coding: str | None
) -> None:
    answer = client.infer(
        "ids",
        [ids(250_000)],
        request_compression_algorithm=coding,
        response_compression_algorithm=coding,
    )

    assert answer.as_numpy("y").tolist() == list(range(1, 750_001, 3))


def test_the_version_that_is_asked_for_answers(client: triton.InferenceServerClient) -> None:
    for said, answered in (("", "7"), ("1", "1"), ("7", "7")):
        response = client.infer("ids", [ids(3)], model_version=said).get_response()
        assert response["model_version"] == answered


def test_no_rows_give_no_rows(client: triton.InferenceServerClient) -> None:
    assert client.infer("ids", [ids(0)]).as_numpy("y").shape == (0,)


def test_the_asynchronous_client_is_served(address: str) -> None:
    async def ask() -> list[Any]:
        async with triton_aio.InferenceServerClient(address) as client:
            assert await client.is_server_ready()
            assert (await client.get_model_metadata("ids"))["name"] == "ids"
            answers = [client.infer("ids", [ids(rows)]) for rows in range(1, 20)]
            answers.append(
                client.infer(
                    "ids",
                    [ids(20)],
                    request_compression_algorithm="gzip",
                    response_compression_algorithm="gzip",
                )
            )
            return [answer.as_numpy("y").tolist() for answer in await asyncio.gather(*answers)]

    assert asyncio.run(ask()) == [list(range(1, 3 * rows, 3)) for rows in range(1, 21)]


def test_terms_are_taken_from_headers_and_parameters(
    gateway: Gateway, client: triton.InferenceServerClient
) -> None:
    client.infer("ids", [ids(1)], priority=2, timeout=5_000_000, headers={"iskander-client": "a"})
    client.infer("ids", [ids(1)], parameters={"iskander_client": "a", "iskander_ttl_ms": 1000})

    known = gateway.stats()["lanes"]["ids/7"]
    assert [each["client"] for each in known["cadence"]] == ["a"]
    for wrong in ({"iskander_ttl_ms": -1}, {"iskander_speed": 1}):
        with pytest.raises(InferenceServerException, match="parameters"):
            client.infer("ids", [ids(1)], parameters=wrong)
    with pytest.raises(InferenceServerException, match="sequence"):
        client.infer("ids", [ids(1)], sequence_id=3)


def test_a_parameter_goes_before_its_header(address: str) -> None:
    """Also one under another name; the header alone is refused."""
    late = {"iskander-deadline-ms": "0"}
    assert post(address, "ids", asking([1]), late)[0] == 504
    assert post(address, "ids", asking([1], parameters={"timeout": 30_000_000}), late)[0] == 200


def test_what_a_client_leaves_open_may_be_null(address: str) -> None:
    body = asking([2], id=None, outputs=None, parameters=None)
    body["inputs"][0]["parameters"] = None

    status, _, answer = post(address, "ids", body)

    assert (status, answer["outputs"][0]["data"]) == (200, [7])
    assert post(address, "", {"ready": None}, path="/v2/repository/index")[0] == 200


def test_a_client_may_name_the_server_and_close_its_half_of_the_connection(address: str) -> None:
    host, _, port = address.rpartition(":")
    body = json.dumps(asking([1])).encode()
    head = f"POST http://{address}/v2/models/ids/infer HTTP/1.1\r\nhost: a\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        client.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: client.recv(4096), b""))

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["model_name"] == "ids"


@contextlib.contextmanager
def occupied(
    gateway: Gateway, address: str, requests: int, *, waiting: int = 0, client: str = ""
) -> Iterator[None]:
    """The worker has as many requests that take minutes; their clients leave in the end.

    Args:
        gateway: Under test.
        address: Of its HTTP port.
        requests: That the worker has.
        waiting: That are in the queue beside them.
        client: Whose all of them are; empty: nobody says so.
    """
    host, _, port = address.rpartition(":")
    body = json.dumps(asking([SLOW_UNITS])).encode()
    named = f"iskander-client: {client}\r\n" if client else ""
    head = f"POST /v2/models/slow/infer HTTP/1.1\r\nhost: a\r\n{named}content-length: {len(body)}"

    def held() -> list[int]:
        stats = gateway.stats()
        return [stats["workers"][0]["in_flight"], stats["lanes"]["slow/1"]["queued"]]

    with contextlib.ExitStack() as clients:
        for count in range(1, requests + waiting + 1):
            left = clients.enter_context(socket.create_connection((host, int(port))))
            left.sendall(head.encode() + b"\r\n\r\n" + body)
            # One after the other: a queue may have room for one.
            wanted = [min(count, requests), max(count - requests, 0)]
            eventually(lambda wanted=wanted: held() == wanted, what="the requests")
        yield


def test_a_request_that_did_not_run_in_time_is_over(
    client: triton.InferenceServerClient, gateway: Gateway, address: str
) -> None:
    with (
        occupied(gateway, address, requests=2),
        pytest.raises(InferenceServerException, match="deadline passed") as error,
    ):
        client.infer("slow", [ids(1)], timeout=200_000)

    assert error.value.status() == "504"


def test_a_client_that_leaves_gives_its_request_up(gateway: Gateway, address: str) -> None:
    (pid,) = gateway.worker_pids()
    with occupied(gateway, address, requests=1):
        pass

    gateway.wait_idle()
    assert gateway.worker_pids() == [pid]


# curl.


def curl(*arguments: str) -> bytes:
    found = shutil.which("curl")
    if found is None:
        pytest.skip("curl is not installed")
    command = [found, "-sS", "--max-time", "30", *arguments]
    return subprocess.run(command, capture_output=True, check=True, timeout=60).stdout


def test_curl_is_answered(address: str) -> None:
    url = f"http://{address}/v2"
    assert curl(f"{url}/health/ready", "-w", "%{http_code}") == b'{"ready":true}200'
    assert json.loads(curl(f"{url}/health/live")) == {"live": True}
    assert json.loads(curl(f"{url}/models/ids/ready")) == {"name": "ids", "ready": True}
    answer = json.loads(curl(f"{url}/models/ids/infer", "-d", json.dumps(asking([1, 2], id="a"))))
    assert answer == {
        "model_name": "ids",
        "model_version": "7",
        "id": "a",
        "outputs": [{"name": "y", "datatype": "INT64", "shape": [2], "data": [4, 7]}],
    }


def test_curl_sends_one_tensor_as_it_is(address: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(np.arange(4).tobytes())

    head, _, answer = curl(
        f"http://{address}/v2/models/ids/infer", "-i", "-H", f"{LENGTH}: 0",
        "--data-binary", f"@{tmp_path / 'x'}",
    ).partition(b"\r\n\r\n")  # fmt: skip

    assert f"{LENGTH}: ".lower().encode() in head.lower()
    assert np.frombuffer(answer[-32:], np.int64).tolist() == [1, 4, 7, 10]


def test_numbers_that_are_not_finite_are_text(address: str) -> None:
    values = ["NaN", "Infinity", "-Infinity", 1.5, -0.0, 7]
    given = {"name": "x", "datatype": "FP32", "shape": [1, 2, 3], "data": values}

    status, _, answer = post(address, "same-FP32", {"inputs": [given]})

    assert (status, answer["outputs"][0]["data"]) == (200, values)


# What is refused.

BINARY = {"name": "x", "datatype": "INT64", "shape": [2], "parameters": {"binary_data_size": 16}}
BINARY_HEAD = json.dumps({"inputs": [BINARY]}).encode()
HOSTILE: dict[str, tuple[int, str, Any, dict[str, str]]] = {
    "truncated JSON": (400, "truncated", json.dumps(asking([1])).encode()[:-2], {}),
    "no JSON": (400, "malformed", b"\x00\xff" * 100, {}),
    "deep JSON": (400, "cannot be read", b'{"more":' + b"[" * 500_000, {}),
    "another model": (404, "no model", (asking([1]), "nobody"), {}),
    "a shape beyond all": (400, "elements", {"inputs": [
        {"name": "x", "datatype": "INT64", "shape": [2**62, 2**62, 2**62], "data": [1]}
    ]}, {}),
    "rows beyond all": (413, "limit 300000 (`limits.rows`)", {"inputs": [
        {**BINARY, "shape": [2**62], "parameters": {"binary_data_size": 0}}
    ]}, {}),
    "a huge number": (400, "INT64", asking([10**50]), {}),
    "a fraction": (400, "1.5 is not INT64", asking([1.5]), {}),
    "a boolean": (400, "true is not INT64", asking([True]), {}),
    "another type": (400, "wanted INT64", {"inputs": [
        {"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}
    ]}, {}),
    "another input": (400, "is missing", {"inputs": [
        {"name": "z", "datatype": "INT64", "shape": [1], "data": [1]}
    ]}, {}),
    "no input": (400, "is missing", {"inputs": []}, {}),
    "another output": (400, "not an output", asking([1], outputs=[{"name": "z"}]), {}),
    "too few bytes": (400, "body ends", BINARY_HEAD + b"1234", {LENGTH: str(len(BINARY_HEAD))}),
    "too many bytes": (400, " follow ", BINARY_HEAD + bytes(17), {LENGTH: str(len(BINARY_HEAD))}),
    "bytes that are too few for the shape": (400, "16 bytes", json.dumps({"inputs": [
        {**BINARY, "parameters": {"binary_data_size": 0}}
    ]}).encode(), {}),
    "JSON beyond the body": (400, "but the body has", BINARY_HEAD, {LENGTH: "99999"}),
    "a length of letters": (400, "not a number of bytes", BINARY_HEAD, {LENGTH: "many"}),
    "a length below zero": (400, "not a number of bytes", BINARY_HEAD, {LENGTH: "-1"}),
    "a length of many digits": (400, "not a number of bytes", BINARY_HEAD, {LENGTH: "9" * 100}),
    "half a row": (400, "8 bytes a row", b"1234567", {LENGTH: "0"}),
    "JSON that is too long": (413, "too large", b" " * (JSON_BYTES + 1), {}),
    "JSON that is too long before its tensors": (
        413, "JSON too large", b" " * (JSON_BYTES + 9), {LENGTH: str(JSON_BYTES + 9)}
    ),
    "a body that is too long": (413, "too large", bytes(MESSAGE_BYTES + 1), {LENGTH: "0"}),
    "a body of no gzip": (400, "not valid gzip", b"nonsense", {"Content-Encoding": "gzip"}),
    "a coding that is not known": (501, "br", b"nonsense", {"Content-Encoding": "br"}),
    "a timeout beyond all": (400, "timeout", asking([1], parameters={"timeout": 10**300}), {}),
    "a priority of text": (400, "priority", asking([1], parameters={"priority": "high"}), {}),
    "a header that is none": (400, "priority", asking([1]), {"iskander-priority": "high"}),
}  # fmt: skip


@pytest.fixture
def others_are_served(client: triton.InferenceServerClient) -> Iterator[None]:
    """Another client's connection is open the whole time, and is answered before and after."""
    assert client.infer("ids", [ids(2)]).as_numpy("y").tolist() == [1, 4]
    yield
    assert client.infer("ids", [ids(2)]).as_numpy("y").tolist() == [1, 4]


@pytest.mark.usefixtures("others_are_served")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_input_is_refused_by_name(gateway: Gateway, address: str, name: str) -> None:
    status, words, body, headers = HOSTILE[name]
    body, model = body if isinstance(body, tuple) else (body, "ids")

    got, _, answer = post(address, model, body, headers)

    assert got == status, answer
    assert words in answer["error"]
    assert (answer["fault"], answer["retryable"]) == ("client", False)
    assert "Traceback" not in gateway.text()


def test_results_that_are_too_long_for_json_are_refused_before_they_are_computed(
    client: triton.InferenceServerClient, gateway: Gateway
) -> None:
    rows = JSON_BYTES // 8 + 1
    before = gateway.stats()["lanes"]["ids/7"]["batches"]
    wanted = [triton.InferRequestedOutput("y", binary_data=False)]

    with pytest.raises(InferenceServerException, match="request binary data") as error:
        client.infer("ids", [ids(rows)], outputs=wanted)

    assert error.value.status() == "413"
    assert gateway.stats()["lanes"]["ids/7"]["batches"] == before


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/ids/infer", 405),
        ("PUT", "/v2/models/ids/infer", 405),
        ("POST", "/v2/health/live", 405),
        ("GET", "/", 404),
        ("GET", "/v2/", 404),
        ("GET", "/v1/models/ids", 404),
        ("GET", "/v2/models/ids/versions/2", 404),
        ("GET", "/v2/models/%2e%2e%2f", 404),
        ("GET", "/metrics", 404),
    ],
)
def test_a_path_that_is_not_there_is_answered_in_json(
    address: str, method: str, path: str, status: int
) -> None:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path)
        response = connection.getresponse()
        assert response.status == status
        assert json.loads(response.read())["error"]
        assert status != 405 or response.getheader("allow")


def test_a_body_that_is_announced_too_large_is_refused_before_it_is_sent(address: str) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        head = "POST /v2/models/ids/infer HTTP/1.1\r\nhost: a\r\n"
        client.sendall(f"{head}{LENGTH}: 0\r\ncontent-length: 99999999999\r\n\r\n".encode())
        answer = client.recv(4096)

    assert answer.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "head",
    [
        "garbage",
        "POST /v2/models/ids/infer HTTP/1.1",  # Without a host.
        "POST /v2/models/ids/infer HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2",
        # A proxy on the way may go by the other one, and take what is behind it for a request.
        "POST /v2 HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked",
    ],
    ids=["garbage", "no host", "two lengths", "a length and chunks"],
)
def test_what_is_no_request_is_told_so_in_json_and_sent_away(address: str, head: str) -> None:
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(f"{head}\r\n\r\n0\r\n\r\n".encode())
        answer = b"".join(iter(lambda: client.recv(4096), b""))

    assert answer.startswith(b"HTTP/1.1 400 ") and b"content-type: application/json" in answer
    body = answer.partition(b"\r\n\r\n")[2]
    told = json.loads(body[body.index(b"{") : body.index(b"}") + 1])
    assert (told["code"], told["fault"], told["retryable"]) == ("malformed", "client", False)


# What a server does with all that.


def test_overload_says_when_to_come_back(tmp_path: Path) -> None:
    with running(
        tmp_path, [slow_model(tmp_path)], workers=dict(ONE), http=dict(HTTP), limits={"streams": 1}
    ) as gateway:
        address = address_of(gateway)
        with occupied(gateway, address, requests=1):
            status, headers, answer = post(address, "slow", asking([1]))
    assert (status, answer["code"], answer["retryable"]) == (503, "overloaded", True)
    assert int(headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("lanes", "status", "code"),
    [
        ({"client_requests": 3}, 429, "client_over_share"),
        ({"queue_requests": 1}, 503, "queue_full"),
    ],
)
def test_whose_share_or_queue_is_full_is_told_when_to_come_back(
    tmp_path: Path, lanes: dict[str, int], status: int, code: str
) -> None:
    with running(
        tmp_path, [slow_model(tmp_path)], workers=dict(ONE), http=dict(HTTP), lanes=lanes
    ) as gateway:
        address = address_of(gateway)
        with occupied(gateway, address, requests=2, waiting=1, client="robot"):
            said, headers, told = post(
                address, "slow", asking([1]), headers={"iskander-client": "robot"}
            )
    assert (said, told["code"]) == (status, code)
    assert told["retryable"] is True
    assert int(headers["retry-after"]) >= 1


def test_connections_beyond_the_limit_are_refused_by_name(tmp_path: Path) -> None:
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    with running(tmp_path, served, workers=dict(ONE), http=HTTP | {"connections": 1}) as gateway:
        address = address_of(gateway)
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))) as busy:
            busy.sendall(b"POST /v2/models/ids/infer HTTP/1.1\r\nhost: a\r\n")
            busy.sendall(b"content-length: 9\r\nexpect: 100-continue\r\n\r\n")
            assert b"100" in busy.recv(100)
            eventually(
                lambda: post(address, "ids", asking([1]))[2].get("code") == "overloaded",
                what="a refusal",
            )
        eventually(lambda: post(address, "ids", asking([1]))[0] == 200, what="an answer")


def test_a_drain_answers_what_was_accepted_and_takes_no_more(tmp_path: Path) -> None:
    answers = []
    with running(tmp_path, [slow_model(tmp_path)], workers=dict(ONE), http=dict(HTTP)) as gateway:
        address = address_of(gateway)
        client = triton.InferenceServerClient(address)
        assert client.is_server_ready()
        asked = threading.Thread(
            target=lambda: answers.append(post(address, "slow", asking([4000])))
        )
        asked.start()
        eventually(lambda: gateway.stats()["input_arena"]["leases"], what="the request")

        gateway.signal(signal.SIGTERM)

        eventually(lambda: not client.is_server_ready(), what="that it is not ready")
        assert client.is_server_live()
        with pytest.raises(InferenceServerException, match="stopping") as error:
            client.infer("slow", [ids(1)])
        client.close()
        asked.join()
        assert gateway.wait() == 0
    assert error.value.status() == "503"
    assert [(status, answer["outputs"][0]["data"]) for status, _, answer in answers] == [
        (200, [4000])
    ]


def test_several_processes_share_the_port(tmp_path: Path) -> None:
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    with running(
        tmp_path,
        served,
        workers=dict(ONE),
        server={"processes": 2},
        http=dict(HTTP),
    ) as gateway:
        address = address_of(gateway)
        seen = set()

        def has_seen_both() -> bool:
            assert post(address, "ids", asking([5]))[2]["outputs"][0]["data"] == [16]
            stats = gateway.stats()
            seen.update([stats["process"]] if stats["lanes"]["ids/1"].get("requests") else [])
            return len(seen) == 2

        eventually(has_seen_both, what="an answer of each process")


def test_a_port_in_use_is_refused_by_name(tmp_path: Path) -> None:
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        gateway = Gateway(tmp_path, served, workers=dict(ONE), http={"address": address})
        try:
            gateway.start(is_ready=False)
            assert gateway.wait() == 78
        finally:
            gateway.end()
    assert f"http.address {address}: cannot listen there" in gateway.text()
    assert "Traceback" not in gateway.text()


def test_without_an_address_there_is_no_port(tmp_path: Path) -> None:
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    with running(tmp_path, served, workers=dict(ONE)) as gateway:
        assert gateway.stats()["http_address"] == ""
