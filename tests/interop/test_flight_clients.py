"""Flight clients in Python, C++, Go and JavaScript, with batches of real models.

Each client sends the batches of an Arrow IPC stream and writes the results as a second one. Python
and C++ use Arrow's own client; the C++ one is built with the headers and libraries in pyarrow's
wheel. Debian has no Arrow for Go, and Arrow for JavaScript has no Flight: these two implement
Flight over grpc-go and grpc-js. The Go client passes the bytes of IPC messages through; the
JavaScript one reads and writes the results with apache-arrow.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from onnx import TensorProto
from support import models
from support.processes import MIB, Gateway, running
from support.toolchains import INTEROP, ROOT, built_cpp, built_go, installed_npm, tool

WIDTH = 256
CLIENT_WITHIN_S = 60.0
NOT_FOUND = {
    "python": "Flight returned not found error",
    "cpp": "Flight returned not found error",
    "go": "code = NotFound",
    "js": "NOT_FOUND",
}
"""Text of the status in each client."""
OLD_GO = (
    "grpc-go before 1.59 returns INTERNAL if grpc-status-details-bin is not a "
    "google.rpc.Status; Flight sends JSON"
)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("flight")
    all_types = models.row_ids(folder / "everything")
    (all_types / "manifest.toml").write_text(models.MANIFEST_ALL)
    paths = {
        "two-tower": models.TWO_TOWER,
        "everything": all_types,
        "same": models.identity(folder / "same", TensorProto.FLOAT, ["rows", WIDTH]),
    }
    served = [
        {"name": n, "path": str(p), "intra_threads": 1, "max_batch_rows": 8192}
        for n, p in paths.items()
    ]
    with running(folder, served, workers={"groups": ["0"], "reattach_s": 5.0}) as ready:
        yield ready
        ready.wait_idle()


def python_client() -> tuple[list[str], dict[str, str]]:
    return [sys.executable, str(INTEROP / "clients" / "flight_python.py")], {}


def cpp_client() -> tuple[list[str], dict[str, str]]:
    path, environment = built_cpp("flight_cpp")
    return [str(path)], environment


def go_client() -> tuple[list[str], dict[str, str]]:
    return [str(built_go("flight_go"))], {}


def js_client() -> tuple[list[str], dict[str, str]]:
    script = installed_npm("flight_js", ROOT / "scripts" / "protos" / "flight.proto")
    return [tool("node", "apt-get install nodejs"), str(script)], {}


CLIENTS: dict[str, Callable[[], tuple[list[str], dict[str, str]]]] = {
    "python": python_client,
    "cpp": cpp_client,
    "go": go_client,
    "js": js_client,
}


class Client:
    """One client's command."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self._command = command
        self._environment = os.environ | environment

    def run(self, *arguments: str) -> tuple[int, str]:
        """Returns its exit code and output."""
        result = subprocess.run(
            [*self._command, *arguments],
            env=self._environment,
            timeout=CLIENT_WITHIN_S,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        return result.returncode, result.stdout


@pytest.fixture(scope="module", params=CLIENTS)
def client(request: pytest.FixtureRequest) -> Client:
    return Client(request.param, *CLIENTS[request.param]())


def two_tower() -> tuple[list[pa.RecordBatch], pa.Table]:
    """User and item numbers, including unknown ones."""
    batches, expected = [], []
    random = np.random.default_rng(7)
    for rows in (1, 128, 8192, 3):
        users, items = random.integers(-5, 1000, rows), random.integers(-5, 200_000, rows)
        sent = {"user_id": users, "item_id": items}
        (scores,) = models.in_process(models.TWO_TOWER, sent)
        batches.append(pa.record_batch(sent))
        expected.append(pa.record_batch({**sent, "score": scores}))
    return batches, pa.Table.from_batches(expected)


def all_types() -> tuple[list[pa.RecordBatch], pa.Table]:
    """Passthrough columns of many types, and a result column."""
    batches, expected = [], []
    kinds = pa.array(["drama", "comedy", "horror"])
    for start, rows in ((0, 5), (5, 1000), (1005, 1)):
        ids = np.arange(start, start + rows)
        sent = {
            "x": pa.array(ids),
            "title": pa.array([f"Größe {i}" if i % 3 else None for i in ids], pa.string()),
            "kind": pa.DictionaryArray.from_arrays(pa.array(ids % 3, pa.int8()), kinds),
            "genres": pa.array([["a"] * (i % 4) for i in ids.tolist()]),
            "seen": pa.array(ids, pa.timestamp("ms")),
        }
        batches.append(pa.record_batch(sent))
        del sent["x"]
        expected.append(pa.record_batch({**sent, "y": pa.array(3 * ids + 1)}))
    return batches, pa.Table.from_batches(expected)


def identity_batches() -> tuple[list[pa.RecordBatch], pa.Table]:
    """Batches of 4 MiB, as large as the windows."""
    batches, expected = [], []
    for number in range(3):
        values = np.random.default_rng(number).normal(size=4 * MIB // 4).astype(np.float32)
        column = pa.FixedSizeListArray.from_arrays(values, WIDTH)
        batches.append(pa.record_batch({"x": column}))
        expected.append(pa.record_batch({"y": column}))
    return batches, pa.Table.from_batches(expected)


WORKLOADS = {"two-tower": two_tower, "everything": all_types, "same": identity_batches}


def write(path: Path, batches: list[pa.RecordBatch]) -> Path:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batches[0].schema) as out:
        for batch in batches:
            out.write_batch(batch)
    return path


@pytest.mark.parametrize("model", WORKLOADS)
def test_batches(gateway: Gateway, client: Client, model: str, tmp_path: Path) -> None:
    batches, expected = WORKLOADS[model]()
    source, target = write(tmp_path / "sent", batches), tmp_path / "received"
    code, output = client.run(gateway.address, model, str(source), str(target))
    assert code == 0, output
    with pa.OSFile(str(target)) as file:
        received = pa.ipc.open_stream(file).read_all()
    received.validate(full=True)
    assert received.column_names == expected.column_names
    for name in expected.column_names:
        assert received[name].type == expected[name].type
        assert received[name].combine_chunks().equals(expected[name].combine_chunks()), name
    # The printed schema has the model's results only, without passthrough columns.
    schema = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(output)))
    for field in schema:
        assert received.schema.field(field.name).type == field.type


def test_unknown_model_is_an_error_with_its_name(
    gateway: Gateway, client: Client, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if client.name == "go":
        request.applymarker(pytest.mark.xfail(reason=OLD_GO))
    source = write(tmp_path / "sent", two_tower()[0])
    code, output = client.run(gateway.address, "unknown", str(source), str(tmp_path / "received"))
    assert code == 1
    assert NOT_FOUND[client.name] in output and "unknown" in output
