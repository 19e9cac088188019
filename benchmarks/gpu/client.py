"""A client of the benchmark, in a process of its own.

    python -m benchmarks.gpu.client flight|triton ADDRESS MODEL ROWS

Prints a line after the first answered batch, and reads the times BEGIN and END (of the monotonic
clock). Sends one batch after another until END; prints the rows that were answered between the two
times, and the latencies' median and 99th percentile in ms.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.gpu.direct import SPAN
from benchmarks.gpu.resnet import IMAGE
from benchmarks.sessions import GRPC_OPTIONS
from iskander.client import Client

TRITON_TYPES = {"int64": "INT64", "float32": "FP32", "float16": "FP16"}


def arrays_of(model: str, rows: int) -> dict[str, np.ndarray]:
    """Random images, or random users and items."""
    random = np.random.default_rng(1)
    if not model.startswith("resnet"):
        return {name: random.integers(1, SPAN, rows) for name in ("user_id", "item_id")}
    dtype = np.float16 if model.endswith("16") else np.float32
    return {"images": random.random((rows, *IMAGE), np.float32).astype(dtype)}


@contextlib.contextmanager
def flight(address: str, model: str, arrays: dict[str, np.ndarray]) -> Iterator[Callable[[], int]]:
    """A call that scores a batch over Arrow Flight, and returns the number of result rows."""
    columns: dict[str, Any] = {
        name: array if array.ndim == 1 else pa.FixedShapeTensorArray.from_numpy_ndarray(array)
        for name, array in arrays.items()
    }
    batch = pa.record_batch(columns)
    with Client(address) as client:
        yield lambda: client.score(model, batch).num_rows


@contextlib.contextmanager
def triton(address: str, model: str, arrays: dict[str, np.ndarray]) -> Iterator[Callable[[], int]]:
    """The same over gRPC with Triton's own client, which serializes the arrays for each call."""
    from tritonclient import grpc

    # Triton has no tensors without a second axis.
    shaped = {
        name: array.reshape(len(array), *(array.shape[1:] or (1,)))
        for name, array in arrays.items()
    }

    with grpc.InferenceServerClient(address, channel_args=GRPC_OPTIONS) as client:

        def call() -> int:
            inputs = []
            for name, array in shaped.items():
                tensor = grpc.InferInput(name, array.shape, TRITON_TYPES[str(array.dtype)])
                inputs.append(tensor.set_data_from_numpy(array))
            (output,) = client.infer(model, inputs).get_response().outputs
            return int(output.shape[0])

        yield call


KINDS = {"flight": flight, "triton": triton}


def main() -> None:
    """Call until the end, and print the counts."""
    kind, address, model = sys.argv[1:4]
    rows = int(sys.argv[4])
    latencies = []
    with KINDS[kind](address, model, arrays_of(model, rows)) as call:
        assert call() == rows
        print("ready", flush=True)
        begin, end = map(float, sys.stdin.readline().split())
        while (sent := time.monotonic()) < end:
            assert call() == rows
            answered = time.monotonic()
            if begin <= answered < end:
                latencies.append(answered - sent)
    assert latencies, "no batch was answered between BEGIN and END"
    found = [round(float(q) * 1000, 3) for q in np.percentile(latencies, [50, 99])]
    print(json.dumps({"rows": len(latencies) * rows, "p50_ms": found[0], "p99_ms": found[1]}))


if __name__ == "__main__":
    main()
