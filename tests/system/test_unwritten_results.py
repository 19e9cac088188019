"""Outputs that the runtime does not write: over each protocol, no caller gets earlier results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from onnx import TensorProto, helper
from support import models
from support.processes import Gateway, running

ROWS = 4
Infer = Callable[[Gateway, str, np.ndarray], dict[str, np.ndarray]]


def passed_through(folder: Path) -> Path:
    """The input `x` as an output, and `y = -x`."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows"])
    return models.save(folder, [helper.make_node("Neg", ["x"], ["y"])], [x], [x, y])


def filler(folder: Path) -> Path:
    """`x` and `z`, both written: results that fill the output arena."""
    x = helper.make_tensor_value_info("a", TensorProto.FLOAT, ["rows"])
    names = ("x", "y")
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows"]) for name in names]
    nodes = [helper.make_node("Add", ["a", "a"], [name]) for name in names]
    return models.save(folder, nodes, [x], outputs)


@pytest.fixture(scope="module", params=[True, False], ids=["sandbox", "worker"])
def gateway(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """The proof is made in the sandboxed load, or in the worker."""
    folder = tmp_path_factory.mktemp("unwritten")
    served = [
        {"name": "passed", "path": str(passed_through(folder / "passed")), "intra_threads": 1},
        {"name": "filler", "path": str(filler(folder / "filler")), "intra_threads": 1},
    ]
    loading = {"sandbox": request.param, "cache": str(folder / "cache")}
    if request.param:
        (folder / "cache").mkdir(mode=0o700)
    with running(
        folder,
        served,
        workers={"groups": ["0"], "count": 1},
        http={"address": "127.0.0.1:0"},
        loading=loading,
    ) as ready:
        yield ready
        ready.wait_idle()


def by_flight(gateway: Gateway, model: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """One batch by Arrow Flight."""
    column = "a" if model == "filler" else "x"
    batch = pa.record_batch({column: pa.array(x)})
    with gateway.client() as client:
        (result,) = client.stream(model, [batch])
    return {name: result.column(name).to_numpy() for name in ("x", "y")}


def _by_triton(kind: Any, address: str, model: str, x: np.ndarray) -> dict[str, np.ndarray]:
    client = kind.InferenceServerClient(address)
    column = "a" if model == "filler" else "x"
    tensor = kind.InferInput(column, list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    result = client.infer(model, [tensor])
    client.close()
    return {name: result.as_numpy(name) for name in ("x", "y")}


def by_grpc(gateway: Gateway, model: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """One call of Triton's gRPC client."""
    return _by_triton(triton_grpc, gateway.address, model, x)


def by_http(gateway: Gateway, model: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """One call of Triton's HTTP client."""
    return _by_triton(triton_http, gateway.stats()["http_address"], model, x)


@pytest.mark.parametrize("infer", [by_flight, by_grpc, by_http])
def test_output_that_is_an_input(gateway: Gateway, infer: Infer) -> None:
    """Other results fill the output arena before each call."""
    for turn in range(5):
        secret = np.full(ROWS, 111.0 * (turn + 1), np.float32)
        infer(gateway, "filler", secret)
        x = np.arange(ROWS, dtype=np.float32) + turn
        found = infer(gateway, "passed", x)
        assert found["x"].tolist() == x.tolist()
        assert found["y"].tolist() == (-x).tolist()
