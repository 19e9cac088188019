"""The Open Inference Protocol over HTTP, with unmodified clients: curl and tritonclient."""

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
"""Work of minutes for a request that is not cancelled."""


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
    """Returns the model `slow`, with one request of one row in each batch."""
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
    infer_input = triton.InferInput(name, list(values.shape), datatype)
    infer_input.set_data_from_numpy(values, **options)
    return infer_input


def ids(rows: int, **options: Any) -> triton.InferInput:
    return tensor("x", np.arange(rows, dtype=np.int64), "INT64", **options)


def send(
    address: str, model: str, body: bytes, headers: dict[str, str] | None = None, path: str = ""
) -> tuple[int, dict[str, str], bytes]:
    """Sends a POST request; returns status, headers and body of the response."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", path or f"/v2/models/{model}/infer", body, headers or {})
        response = connection.getresponse()
        response_headers = {name.lower(): value for name, value in response.getheaders()}
        return response.status, response_headers, response.read()


def post(
    address: str, model: str, body: Any, headers: dict[str, str] | None = None, path: str = ""
) -> tuple[int, dict[str, str], Any]:
    """Sends JSON; returns status, headers and the decoded JSON response."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, response_headers, response = send(address, model, raw, headers, path)
    return status, response_headers, json.loads(response or b"null")


def request_of(values: list[Any], **rest: Any) -> dict[str, Any]:
    x = {"name": "x", "datatype": "INT64", "shape": [len(values)], "data": values}
    return {"inputs": [x], **rest}


# Metadata and statistics.


def test_server_and_model_metadata(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("ids")
    assert client.is_model_ready("ids", "1")
    assert not client.is_model_ready("ids", "2")
    assert not client.is_model_ready("unknown")
    server = client.get_server_metadata()
    assert server["name"] == "iskander"
    assert "binary_tensor_data" in server["extensions"]
    wide = client.get_model_metadata("wide")
    assert wide["inputs"] == [{"name": "features", "datatype": "FP32", "shape": [-1, 64]}]
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


def test_statistics_count_rows(client: triton.InferenceServerClient) -> None:
    (before,) = client.get_inference_statistics("ids", "1")["model_stats"]

    client.infer("ids", [ids(5)], model_version="1")

    def is_counted() -> bool:
        (after,) = client.get_inference_statistics("ids", "1")["model_stats"]
        return bool(after["inference_count"] == before["inference_count"] + 5)

    eventually(is_counted, what="five more rows")
    statistics = client.get_inference_statistics()["model_stats"]
    assert {"ids", "wide", "slow"} <= {each["name"] for each in statistics}


def test_repository_index_lists_configured_models(
    client: triton.InferenceServerClient, address: str
) -> None:
    index = client.get_model_repository_index()
    assert {"name": "wide", "version": "1", "state": "READY", "reason": ""} in index
    assert post(address, "", {"ready": True}, path="/v2/repository/index")[2] == index
    client.load_model("ids")
    for rejected in (
        lambda: client.load_model("unknown"),
        lambda: client.load_model("ids", config="{}"),
        lambda: client.unload_model("ids"),
    ):
        with pytest.raises(InferenceServerException):
            rejected()


def test_unsupported_extensions_get_status_501(client: triton.InferenceServerClient) -> None:
    assert client.get_system_shared_memory_status() == []
    assert client.get_cuda_shared_memory_status() == []
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    for rejected in (
        lambda: client.register_system_shared_memory("a", "/a", 8),
        client.get_trace_settings,
        lambda: client.update_trace_settings(settings={"trace_level": "OFF"}),
        client.get_log_settings,
    ):
        with pytest.raises(InferenceServerException) as error:
            rejected()
        assert error.value.status() == "501"


# Inference.


@pytest.mark.parametrize("is_binary", [True, False])
@pytest.mark.parametrize("datatype", ELEMENTS)
def test_all_datatypes_equal_flight_bit_for_bit(
    gateway: Gateway, client: triton.InferenceServerClient, datatype: str, is_binary: bool
) -> None:
    name, _ = ELEMENTS[datatype]
    values = np.random.default_rng(3).integers(0, 2 if name == "bool" else 100, (5, 2, 3))
    values = values.astype(name)
    if name.startswith("float"):
        values = values / np.array(7, name)
    inputs = [tensor("x", values, datatype, binary_data=is_binary)] if datatype != "FP16" else None
    outputs = [triton.InferRequestedOutput("y", binary_data=is_binary)]
    if not is_binary and datatype == "FP16":
        with pytest.raises(InferenceServerException, match=r"FP16.*binary"):
            client.infer("same-FP16", [tensor("x", values, "FP16")], outputs=outputs)
        return

    response = client.infer(
        f"same-{datatype}", inputs or [tensor("x", values, datatype)], outputs=outputs
    )

    result = response.as_numpy("y")
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
    texts_input = tensor("x", values, "BYTES", binary_data=is_binary)
    outputs = [triton.InferRequestedOutput("y", binary_data=is_binary)]

    result = client.infer("same-BYTES", [texts_input], outputs=outputs).as_numpy("y")

    assert result.shape == (1, 2, 3)
    flat = [each if isinstance(each, str) else each.decode() for each in result.reshape(-1)]
    nested = pa.FixedSizeListArray.from_arrays(
        pa.FixedSizeListArray.from_arrays(pa.array(texts), 3), 2
    )
    with gateway.client() as flight:
        scored = flight.score("same-BYTES", pa.record_batch({"x": nested}))
    assert scored["y"].combine_chunks().flatten().flatten().to_pylist() == flat == texts


def test_bfloat16_round_trips(address: str) -> None:
    """Sends raw bytes, because clients differ in their BF16 arrays."""
    body = np.array([0x3FC0, 0xC000, 0, 0x7F80, 0x4380, 1], np.uint16).tobytes()

    status, headers, response = send(address, "same-BF16", body, {LENGTH: "0"})

    length = int(headers[LENGTH.lower()])
    assert (status, response[length:]) == (200, body)
    assert json.loads(response[:length])["outputs"][0]["datatype"] == "BF16"


@pytest.mark.parametrize("is_binary", [True, False])
def test_model_results_equal_flight(
    gateway: Gateway, client: triton.InferenceServerClient, is_binary: bool
) -> None:
    random = np.random.default_rng(1)
    users, items = random.integers(0, 1000, 500), random.integers(0, 100_000, 500)
    inputs = [
        tensor("item_id", items, "INT64", binary_data=is_binary),
        tensor("user_id", users, "INT64", binary_data=is_binary),
    ]
    outputs = [triton.InferRequestedOutput("score", binary_data=is_binary)]

    response = client.infer("two-tower", inputs, outputs=outputs, request_id="a ä")

    assert response.get_response()["id"] == "a ä"
    with gateway.client() as flight:
        batch = pa.record_batch({"user_id": users, "item_id": items})
        scored = flight.score("two-tower", batch)
    assert response.as_numpy("score").tobytes() == scored["score"].to_numpy().tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_large_requests_with_and_without_compression(
    client: triton.InferenceServerClient, compression: str | None
) -> None:
    response = client.infer(
        "ids",
        [ids(250_000)],
        request_compression_algorithm=compression,
        response_compression_algorithm=compression,
    )

    assert response.as_numpy("y").tolist() == list(range(1, 750_001, 3))


def test_requested_version_or_the_highest_is_used(client: triton.InferenceServerClient) -> None:
    for requested, used in (("", "7"), ("1", "1"), ("7", "7")):
        response = client.infer("ids", [ids(3)], model_version=requested).get_response()
        assert response["model_version"] == used


def test_empty_batch_gives_an_empty_result(client: triton.InferenceServerClient) -> None:
    assert client.infer("ids", [ids(0)]).as_numpy("y").shape == (0,)


def test_async_client_is_served(address: str) -> None:
    async def infer_all() -> list[Any]:
        async with triton_aio.InferenceServerClient(address) as client:
            assert await client.is_server_ready()
            assert (await client.get_model_metadata("ids"))["name"] == "ids"
            results = [client.infer("ids", [ids(rows)]) for rows in range(1, 20)]
            results.append(
                client.infer(
                    "ids",
                    [ids(20)],
                    request_compression_algorithm="gzip",
                    response_compression_algorithm="gzip",
                )
            )
            return [result.as_numpy("y").tolist() for result in await asyncio.gather(*results)]

    assert asyncio.run(infer_all()) == [list(range(1, 3 * rows, 3)) for rows in range(1, 21)]


def test_terms_are_read_from_headers_and_parameters(
    gateway: Gateway, client: triton.InferenceServerClient
) -> None:
    client.infer("ids", [ids(1)], priority=2, timeout=5_000_000, headers={"iskander-client": "a"})
    client.infer("ids", [ids(1)], parameters={"iskander_client": "a", "iskander_ttl_ms": 1000})

    stats = gateway.stats()["lanes"]["ids/7"]
    assert [each["client"] for each in stats["cadence"]] == ["a"]
    for invalid in ({"iskander_ttl_ms": -1}, {"iskander_speed": 1}):
        with pytest.raises(InferenceServerException, match="parameters"):
            client.infer("ids", [ids(1)], parameters=invalid)
    with pytest.raises(InferenceServerException, match="sequence"):
        client.infer("ids", [ids(1)], sequence_id=3)


def test_parameter_overrides_the_header(address: str) -> None:
    """Also a parameter with another name; with the header alone, the request is too late."""
    late = {"iskander-deadline-ms": "0"}
    assert post(address, "ids", request_of([1]), late)[0] == 504
    assert post(address, "ids", request_of([1], parameters={"timeout": 30_000_000}), late)[0] == 200


def test_optional_fields_can_be_null(address: str) -> None:
    body = request_of([2], id=None, outputs=None, parameters=None)
    body["inputs"][0]["parameters"] = None

    status, _, response = post(address, "ids", body)

    assert (status, response["outputs"][0]["data"]) == (200, [7])
    assert post(address, "", {"ready": None}, path="/v2/repository/index")[0] == 200


def test_absolute_request_url_and_half_closed_connection_are_accepted(address: str) -> None:
    host, _, port = address.rpartition(":")
    body = json.dumps(request_of([1])).encode()
    head = f"POST http://{address}/v2/models/ids/infer HTTP/1.1\r\nhost: localhost\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        client.shutdown(socket.SHUT_WR)
        response = b"".join(iter(lambda: client.recv(4096), b""))

    assert response.startswith(b"HTTP/1.1 200 ")
    assert json.loads(response.partition(b"\r\n\r\n")[2])["model_name"] == "ids"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/models/ids/infer", request_of([1])),
        ("/v2/repository/models/ids/load", {}),
        ("/v2/repository/models/ids/unload", {}),
        ("/v2/repository/index", {}),
    ],
)
def test_web_pages_of_other_sites_are_rejected(address: str, path: str, body: Any) -> None:
    """A page can send this text without a preflight, and a rebound name reaches loopback."""
    page = {"origin": "http://evil.example", "content-type": "text/plain"}
    status, _, answer = post(address, "", body, page, path)
    assert (status, answer["code"], answer["fault"]) == (403, "cross_site", "client")
    assert "`access.allowed_origins`" in answer["error"]
    rebound = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
    status, _, answer = post(address, "", body, rebound, path)
    assert (status, answer["code"]) == (421, "cross_site")
    assert "`access.allowed_hosts`" in answer["error"]
    own = {"origin": f"http://{address}", "sec-fetch-site": "same-origin"}
    status, _, answer = post(address, "", request_of([1]), own, "/v2/models/ids/infer")
    assert (status, answer["model_name"]) == (200, "ids")


@contextlib.contextmanager
def occupied(
    gateway: Gateway, address: str, requests: int, *, waiting: int = 0, client: str = ""
) -> Iterator[None]:
    """Sends requests that run for minutes; disconnects their clients at the end.

    Args:
        gateway: The gateway under test.
        address: Address of its HTTP port.
        requests: Number of requests in the worker.
        waiting: Number of requests in the queue.
        client: Name of the client of all requests, or empty.
    """
    host, _, port = address.rpartition(":")
    body = json.dumps(request_of([SLOW_UNITS])).encode()
    named = f"iskander-client: {client}\r\n" if client else ""
    head = f"POST /v2/models/slow/infer HTTP/1.1\r\nhost: localhost\r\n{named}"
    head += f"content-length: {len(body)}"

    def counts() -> list[int]:
        stats = gateway.stats()
        return [stats["workers"][0]["in_flight"], stats["lanes"]["slow/1"]["queued"]]

    with contextlib.ExitStack() as clients:
        for count in range(1, requests + waiting + 1):
            connection = clients.enter_context(socket.create_connection((host, int(port))))
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
            # One by one, because a queue may have space for one.
            expected = [min(count, requests), max(count - requests, 0)]
            eventually(lambda expected=expected: counts() == expected, what="the requests")
        yield


def test_request_after_its_deadline_gets_status_504(
    client: triton.InferenceServerClient, gateway: Gateway, address: str
) -> None:
    with (
        occupied(gateway, address, requests=2),
        pytest.raises(InferenceServerException, match="deadline passed") as error,
    ):
        client.infer("slow", [ids(1)], timeout=200_000)

    assert error.value.status() == "504"


@pytest.mark.slow
def test_disconnect_cancels_the_running_request(gateway: Gateway, address: str) -> None:
    (pid,) = gateway.worker_pids()
    with occupied(gateway, address, requests=1):
        pass

    gateway.wait_idle()
    assert gateway.worker_pids() == [pid]


# curl.


def curl(*arguments: str) -> bytes:
    path = shutil.which("curl")
    if path is None:
        pytest.skip("curl is not installed")
    command = [path, "-sS", "--max-time", "30", *arguments]
    return subprocess.run(command, capture_output=True, check=True, timeout=60).stdout


def test_curl_requests(address: str) -> None:
    url = f"http://{address}/v2"
    assert curl(f"{url}/health/ready", "-w", "%{http_code}") == b'{"ready":true}200'
    assert json.loads(curl(f"{url}/health/live")) == {"live": True}
    assert json.loads(curl(f"{url}/models/ids/ready")) == {"name": "ids", "ready": True}
    response = json.loads(
        curl(f"{url}/models/ids/infer", "-d", json.dumps(request_of([1, 2], id="a")))
    )
    assert response == {
        "model_name": "ids",
        "model_version": "7",
        "id": "a",
        "outputs": [{"name": "y", "datatype": "INT64", "shape": [2], "data": [4, 7]}],
    }


def test_curl_sends_one_raw_tensor(address: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(np.arange(4).tobytes())

    head, _, response = curl(
        f"http://{address}/v2/models/ids/infer", "-i", "-H", f"{LENGTH}: 0",
        "--data-binary", f"@{tmp_path / 'x'}",
    ).partition(b"\r\n\r\n")  # fmt: skip

    assert f"{LENGTH}: ".lower().encode() in head.lower()
    assert np.frombuffer(response[-32:], np.int64).tolist() == [1, 4, 7, 10]


def test_non_finite_numbers_are_json_strings(address: str) -> None:
    values = ["NaN", "Infinity", "-Infinity", 1.5, -0.0, 7]
    x = {"name": "x", "datatype": "FP32", "shape": [1, 2, 3], "data": values}

    status, _, response = post(address, "same-FP32", {"inputs": [x]})

    assert (status, response["outputs"][0]["data"]) == (200, values)


# Invalid requests.

BINARY = {"name": "x", "datatype": "INT64", "shape": [2], "parameters": {"binary_data_size": 16}}
BINARY_HEAD = json.dumps({"inputs": [BINARY]}).encode()
INVALID: dict[str, tuple[int, str, Any, dict[str, str]]] = {
    "truncated JSON": (400, "truncated", json.dumps(request_of([1])).encode()[:-2], {}),
    "not JSON": (400, "malformed", b"\x00\xff" * 100, {}),
    "deeply nested JSON": (400, "cannot be read", b'{"more":' + b"[" * 500_000, {}),
    "unknown model": (404, "no model", (request_of([1]), "unknown"), {}),
    "huge shape": (400, "elements", {"inputs": [
        {"name": "x", "datatype": "INT64", "shape": [2**62, 2**62, 2**62], "data": [1]}
    ]}, {}),
    "huge number of rows": (413, "limit 300000 (`limits.rows`)", {"inputs": [
        {**BINARY, "shape": [2**62], "parameters": {"binary_data_size": 0}}
    ]}, {}),
    "huge number": (400, "INT64", request_of([10**50]), {}),
    "fraction": (400, "1.5 is not INT64", request_of([1.5]), {}),
    "boolean": (400, "true is not INT64", request_of([True]), {}),
    "wrong datatype": (400, "wanted INT64", {"inputs": [
        {"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}
    ]}, {}),
    "unknown input": (400, "is missing", {"inputs": [
        {"name": "z", "datatype": "INT64", "shape": [1], "data": [1]}
    ]}, {}),
    "no input": (400, "is missing", {"inputs": []}, {}),
    "unknown output": (400, "not an output", request_of([1], outputs=[{"name": "z"}]), {}),
    "too few bytes": (400, "body ends", BINARY_HEAD + b"1234", {LENGTH: str(len(BINARY_HEAD))}),
    "too many bytes": (400, " follow ", BINARY_HEAD + bytes(17), {LENGTH: str(len(BINARY_HEAD))}),
    "fewer bytes than the shape": (400, "16 bytes", json.dumps({"inputs": [
        {**BINARY, "parameters": {"binary_data_size": 0}}
    ]}).encode(), {}),
    "JSON length above the body": (400, "but the body has", BINARY_HEAD, {LENGTH: "99999"}),
    "length of letters": (400, "not a number of bytes", BINARY_HEAD, {LENGTH: "many"}),
    "negative length": (400, "not a number of bytes", BINARY_HEAD, {LENGTH: "-1"}),
    "length of 100 digits": (400, "not a number of bytes", BINARY_HEAD, {LENGTH: "9" * 100}),
    "incomplete row": (400, "8 bytes a row", b"1234567", {LENGTH: "0"}),
    "too large JSON": (413, "too large", b" " * (JSON_BYTES + 1), {}),
    "too large JSON before binary tensors": (
        413, "JSON too large", b" " * (JSON_BYTES + 9), {LENGTH: str(JSON_BYTES + 9)}
    ),
    "too large body": (413, "too large", bytes(MESSAGE_BYTES + 1), {LENGTH: "0"}),
    "invalid gzip": (400, "not valid gzip", b"nonsense", {"Content-Encoding": "gzip"}),
    "unknown content coding": (501, "br", b"nonsense", {"Content-Encoding": "br"}),
    "huge timeout": (400, "timeout", request_of([1], parameters={"timeout": 10**300}), {}),
    "invalid parameter": (400, "priority", request_of([1], parameters={"priority": "high"}), {}),
    "invalid header": (400, "priority", request_of([1]), {"iskander-priority": "high"}),
}  # fmt: skip


@pytest.fixture
def others_are_served(client: triton.InferenceServerClient) -> Iterator[None]:
    """Checks that another open connection is served before and after the test."""
    assert client.infer("ids", [ids(2)]).as_numpy("y").tolist() == [1, 4]
    yield
    assert client.infer("ids", [ids(2)]).as_numpy("y").tolist() == [1, 4]


@pytest.mark.usefixtures("others_are_served")
@pytest.mark.parametrize("name", INVALID)
def test_invalid_request_gets_its_status_and_error(
    gateway: Gateway, address: str, name: str
) -> None:
    status, text, body, headers = INVALID[name]
    body, model = body if isinstance(body, tuple) else (body, "ids")

    actual, _, response = post(address, model, body, headers)

    assert actual == status, response
    assert text in response["error"]
    assert (response["fault"], response["retryable"]) == ("client", False)
    assert "Traceback" not in gateway.text()


def test_too_large_json_results_are_rejected_before_they_are_computed(
    client: triton.InferenceServerClient, gateway: Gateway
) -> None:
    rows = JSON_BYTES // 8 + 1
    before = gateway.stats()["lanes"]["ids/7"]["batches"]
    outputs = [triton.InferRequestedOutput("y", binary_data=False)]

    with pytest.raises(InferenceServerException, match="request binary data") as error:
        client.infer("ids", [ids(rows)], outputs=outputs)

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
def test_unknown_path_or_method_gets_a_json_error(
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


def test_too_large_content_length_is_rejected_before_the_body(address: str) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        head = "POST /v2/models/ids/infer HTTP/1.1\r\nhost: localhost\r\n"
        client.sendall(f"{head}{LENGTH}: 0\r\ncontent-length: 99999999999\r\n\r\n".encode())
        response = client.recv(4096)

    assert response.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "head",
    [
        "garbage",
        "POST /v2/models/ids/infer HTTP/1.1",  # Without a host.
        "POST /v2/models/ids/infer HTTP/1.1\r\nhost: localhost\r\n"
        "content-length: 1\r\ncontent-length: 2",
        # A proxy that uses the other header would read the rest as a request (smuggling).
        "POST /v2 HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked",
    ],
    ids=["garbage", "no host", "two lengths", "length and chunks"],
)
def test_invalid_http_gets_a_json_error_and_is_disconnected(address: str, head: str) -> None:
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(f"{head}\r\n\r\n0\r\n\r\n".encode())
        response = b"".join(iter(lambda: client.recv(4096), b""))

    assert response.startswith(b"HTTP/1.1 400 ") and b"content-type: application/json" in response
    body = response.partition(b"\r\n\r\n")[2]
    error = json.loads(body[body.index(b"{") : body.index(b"}") + 1])
    assert (error["code"], error["fault"], error["retryable"]) == ("malformed", "client", False)


# Overload, drain, and the listener.


def test_overload_error_has_a_retry_delay(tmp_path: Path) -> None:
    with running(
        tmp_path, [slow_model(tmp_path)], workers=dict(ONE), http=dict(HTTP), limits={"streams": 1}
    ) as gateway:
        address = address_of(gateway)
        with occupied(gateway, address, requests=1):
            status, headers, response = post(address, "slow", request_of([1]))
    assert (status, response["code"], response["retryable"]) == (503, "overloaded", True)
    assert int(headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("lanes", "status", "code"),
    [
        ({"client_requests": 3}, 429, "client_over_share"),
        ({"queue_requests": 1}, 503, "queue_full"),
    ],
)
@pytest.mark.slow
def test_full_queue_and_full_share_errors_have_a_retry_delay(
    tmp_path: Path, lanes: dict[str, int], status: int, code: str
) -> None:
    with running(
        tmp_path, [slow_model(tmp_path)], workers=dict(ONE), http=dict(HTTP), lanes=lanes
    ) as gateway:
        address = address_of(gateway)
        with occupied(gateway, address, requests=2, waiting=1, client="robot"):
            actual, headers, error = post(
                address, "slow", request_of([1]), headers={"iskander-client": "robot"}
            )
    assert (actual, error["code"]) == (status, code)
    assert error["retryable"] is True
    assert int(headers["retry-after"]) >= 1


def test_connections_above_the_limit_are_rejected_by_name(tmp_path: Path) -> None:
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    with running(tmp_path, served, workers=dict(ONE), http=HTTP | {"connections": 1}) as gateway:
        address = address_of(gateway)
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))) as busy:
            busy.sendall(b"POST /v2/models/ids/infer HTTP/1.1\r\nhost: localhost\r\n")
            busy.sendall(b"content-length: 9\r\nexpect: 100-continue\r\n\r\n")
            assert b"100" in busy.recv(100)
            eventually(
                lambda: post(address, "ids", request_of([1]))[2].get("code") == "overloaded",
                what="a rejection",
            )
        eventually(lambda: post(address, "ids", request_of([1]))[0] == 200, what="a response")


def test_drain_answers_admitted_requests_and_rejects_new_ones(tmp_path: Path) -> None:
    responses = []
    with running(tmp_path, [slow_model(tmp_path)], workers=dict(ONE), http=dict(HTTP)) as gateway:
        address = address_of(gateway)
        client = triton.InferenceServerClient(address)
        assert client.is_server_ready()
        thread = threading.Thread(
            target=lambda: responses.append(post(address, "slow", request_of([4000])))
        )
        thread.start()
        eventually(lambda: gateway.stats()["input_arena"]["leases"], what="the request")

        gateway.signal(signal.SIGTERM)

        eventually(lambda: not client.is_server_ready(), what="a server that is not ready")
        assert client.is_server_live()
        with pytest.raises(InferenceServerException, match="stopping") as error:
            client.infer("slow", [ids(1)])
        client.close()
        thread.join()
        assert gateway.wait() == 0
    assert error.value.status() == "503"
    assert [(status, response["outputs"][0]["data"]) for status, _, response in responses] == [
        (200, [4000])
    ]


@pytest.mark.slow
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
        processes = set()

        def have_both_answered() -> bool:
            assert post(address, "ids", request_of([5]))[2]["outputs"][0]["data"] == [16]
            stats = gateway.stats()
            processes.update([stats["process"]] if stats["lanes"]["ids/1"].get("requests") else [])
            return len(processes) == 2

        eventually(have_both_answered, what="a response of each process")


def test_port_in_use_is_a_startup_error(tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_gateway_does_not_listen_without_an_address(tmp_path: Path) -> None:
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    with running(tmp_path, served, workers=dict(ONE)) as gateway:
        assert gateway.stats()["http_address"] == ""
