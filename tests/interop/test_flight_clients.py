"""Flight clients in Python, C++, Go and JavaScript, with batches of real models.

Each sends the batches of one Arrow IPC stream and writes the results as another. Python and C++ use
Arrow's own client; the C++ one is built with the headers and libraries in pyarrow's wheel. Debian
has no Arrow for Go, and Arrow for JavaScript has no Flight: these two speak Flight over grpc-go and
grpc-js. The Go client sends and writes the bytes of IPC messages as they are; the JavaScript one
reads and writes the results with apache-arrow.
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
"""How a client names the status."""
OLD_GO = (
    "grpc-go before 1.59 makes INTERNAL of an error whose grpc-status-details-bin is no "
    "google.rpc.Status; Flight's is JSON"
)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("flight")
    everything = models.row_ids(folder / "everything")
    (everything / "manifest.toml").write_text(models.MANIFEST_ALL)
    paths = {
        "two-tower": models.TWO_TOWER,
        "everything": everything,
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

    def run(self, *words: str) -> tuple[int, str]:
        """Its exit code and what it printed."""
        done = subprocess.run(
            [*self._command, *words],
            env=self._environment,
            timeout=CLIENT_WITHIN_S,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout


@pytest.fixture(scope="module", params=CLIENTS)
def client(request: pytest.FixtureRequest) -> Client:
    return Client(request.param, *CLIENTS[request.param]())


def two_tower() -> tuple[list[pa.RecordBatch], pa.Table]:
    """User and item numbers, with some that nobody has."""
    batches, wanted = [], []
    random = np.random.default_rng(7)
    for rows in (1, 128, 8192, 3):
        users, items = random.integers(-5, 1000, rows), random.integers(-5, 200_000, rows)
        sent = {"user_id": users, "item_id": items}
        (scores,) = models.in_process(models.TWO_TOWER, sent)
        batches.append(pa.record_batch(sent))
        wanted.append(pa.record_batch({**sent, "score": scores}))
    return batches, pa.Table.from_batches(wanted)


def everything() -> tuple[list[pa.RecordBatch], pa.Table]:
    """Columns of many types that come back as they went, beside the result."""
    batches, wanted = [], []
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
        wanted.append(pa.record_batch({**sent, "y": pa.array(3 * ids + 1)}))
    return batches, pa.Table.from_batches(wanted)


def same() -> tuple[list[pa.RecordBatch], pa.Table]:
    """Batches of 4 MiB, as large as the windows."""
    batches, wanted = [], []
    for number in range(3):
        values = np.random.default_rng(number).normal(size=4 * MIB // 4).astype(np.float32)
        column = pa.FixedSizeListArray.from_arrays(values, WIDTH)
        batches.append(pa.record_batch({"x": column}))
        wanted.append(pa.record_batch({"y": column}))
    return batches, pa.Table.from_batches(wanted)


WORKLOADS = {"two-tower": two_tower, "everything": everything, "same": same}


def write(path: Path, batches: list[pa.RecordBatch]) -> Path:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batches[0].schema) as out:
        for batch in batches:
            out.write_batch(batch)
    return path


@pytest.mark.parametrize("model", WORKLOADS)
def test_batches(gateway: Gateway, client: Client, model: str, tmp_path: Path) -> None:
    batches, wanted = WORKLOADS[model]()
    source, target = write(tmp_path / "sent", batches), tmp_path / "received"
    code, said = client.run(gateway.address, model, str(source), str(target))
    assert code == 0, said
    with pa.OSFile(str(target)) as file:
        received = pa.ipc.open_stream(file).read_all()
    received.validate(full=True)
    assert received.column_names == wanted.column_names
    for name in wanted.column_names:
        assert received[name].type == wanted[name].type
        assert received[name].combine_chunks().equals(wanted[name].combine_chunks()), name
    # Schema of the model's results; columns that are passed through are the caller's.
    schema = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(said)))
    for field in schema:
        assert received.schema.field(field.name).type == field.type


def test_an_unknown_model_is_refused_by_name(
    gateway: Gateway, client: Client, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if client.name == "go":
        request.applymarker(pytest.mark.xfail(reason=OLD_GO))
    source = write(tmp_path / "sent", two_tower()[0])
    code, said = client.run(gateway.address, "nobody", str(source), str(tmp_path / "received"))
    assert code == 1
    assert NOT_FOUND[client.name] in said and "nobody" in said
