"""A client of the benchmark, in a process of its own.

    python -m benchmarks.gpu.client ADDRESS MODEL ROWS BEGIN END

Sends one batch after another from before the time BEGIN to END (of the monotonic clock); prints
the rows that were answered between them, and the latencies' median and 99th percentile in ms.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import pyarrow as pa

from benchmarks.gpu.direct import SPAN
from benchmarks.gpu.resnet import IMAGE
from iskander.client import Client


def batch_of(model: str, rows: int) -> pa.RecordBatch:
    """Random images, or random users and items."""
    random = np.random.default_rng(1)
    if not model.startswith("resnet"):
        ids = {name: random.integers(1, SPAN, rows) for name in ("user_id", "item_id")}
        return pa.record_batch(ids)
    dtype = np.float16 if model.endswith("16") else np.float32
    images = random.random((rows, *IMAGE), np.float32).astype(dtype)
    return pa.record_batch({"images": pa.FixedShapeTensorArray.from_numpy_ndarray(images)})


def main() -> None:
    """Call until the end, and print the counts."""
    address, model = sys.argv[1:3]
    rows, begin, end = int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5])
    batch = batch_of(model, rows)
    latencies = []
    with Client(address) as client:
        while (sent := time.monotonic()) < end:
            assert client.score(model, batch).num_rows == rows
            answered = time.monotonic()
            if begin <= answered < end:
                latencies.append(answered - sent)
    assert latencies, "no batch was answered between BEGIN and END"
    found = [round(float(q) * 1000, 3) for q in np.percentile(latencies, [50, 99])]
    print(json.dumps({"rows": len(latencies) * rows, "p50_ms": found[0], "p99_ms": found[1]}))


if __name__ == "__main__":
    main()
