"""ONNX Runtime without a server, in a process of its own.

    python -m benchmarks.gpu.direct MODEL_FILE PROVIDER THREADS SECONDS ROWS

With one thread or several, each calls `InferenceSession.run` with NumPy arrays: the usual program.
With `0` threads, one thread computes on buffers that are on the device already and copies nothing:
an upper bound. Prints the rate in rows/s.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort

Call = Callable[[], object]
PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}
WARM_S = 1.0
SPAN = 600
"""Integers are ids of users and items, from 1 to this."""


def inputs_of(session: ort.InferenceSession, rows: int) -> dict[str, np.ndarray]:
    """Random inputs for a batch."""
    random = np.random.default_rng(1)
    feeds = {}
    for each in session.get_inputs():
        shape = (rows, *each.shape[1:])
        if each.type == "tensor(int64)":
            feeds[each.name] = random.integers(1, SPAN, shape)
        else:
            dtype = np.float16 if each.type == "tensor(float16)" else np.float32
            feeds[each.name] = random.random(shape, np.float32).astype(dtype)
    return feeds


def open_session(file: str, provider: str, options: dict[str, str]) -> ort.InferenceSession:
    """Open a model on a provider."""
    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    if provider == "cuda":
        ort.preload_dlls(directory="")
    return ort.InferenceSession(
        file, settings, providers=[PROVIDERS[provider]], provider_options=[options]
    )


def bound_calls(session: ort.InferenceSession, feeds: dict[str, np.ndarray]) -> Call:
    """A call that computes between buffers on the device."""
    io = session.io_binding()
    for name, array in feeds.items():
        io.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array, "cuda", 0))
    for each in session.get_outputs():
        io.bind_output(each.name, "cuda", 0)
    return functools.partial(session.run_with_iobinding, io)


def main() -> None:
    """Measure, and print the rate."""
    file, provider, threads, seconds, rows = sys.argv[1:6]
    options = json.loads(sys.argv[6]) if len(sys.argv) > 6 else {}
    session = open_session(file, provider, options)
    feeds = inputs_of(session, int(rows))
    if int(threads):
        call: Call = functools.partial(session.run, None, feeds)
    else:
        call = bound_calls(session, feeds)
    call()
    counts = [0] * max(int(threads), 1)
    begin = time.perf_counter() + WARM_S
    end = begin + float(seconds)

    def work(number: int) -> None:
        while (now := time.perf_counter()) < end:
            call()
            counts[number] += now >= begin

    workers = [threading.Thread(target=work, args=(number,)) for number in range(len(counts))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(json.dumps(sum(counts) * int(rows) / float(seconds)))


if __name__ == "__main__":
    assert Path(sys.argv[1]).is_file()
    main()
