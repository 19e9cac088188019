"""Rates on a GPU: `python -m benchmarks.gpu [--seconds 8] [--rounds 2] [--out FILE]`.

A model of ResNet-50's size in float32 and float16 at 32 images a batch, and the two-tower of the
quickstart at 128 and 8192 pairs. Each is measured in alternating rounds:

    direct        `InferenceSession.run` in one thread, and in four
    on device     one thread on buffers that are on the device, without copies: an upper bound
    iskander      a server with one worker on the card, and four clients in processes of their own
    with graphs   the same with CUDA graphs
    triton        Triton's Python backend in one process and in two, and four clients over gRPC

The table shows the median of the rounds, and the rate in relation to the best direct one; of the
first round, the megabytes that the worker copied for a batch, and the cores that each kind of
process used.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.models import ROOT, ROWS, write_models
from benchmarks.gpu.servers import TRITON, require_gpu, run_iskander, run_triton

Way = Callable[[], dict[str, Any]]
TRITON_INSTANCES = (1, 2)


def run_direct(
    folder: Path, provider: str, seconds: float, threads: int, rows: int
) -> dict[str, Any]:
    """Measure ONNX Runtime by itself."""
    command = [sys.executable, "-m", "benchmarks.gpu.direct", str(folder / "model.onnx")]
    command += [provider, str(threads), str(seconds), str(rows)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return {"rate": float(json.loads(done.stdout))}


def ways(name: str, folder: Path, provider: str, seconds: float) -> Iterator[tuple[str, Way]]:
    """The measurements of a model, by name."""
    is_cuda = provider == "cuda"
    direct = partial(run_direct, folder, provider, seconds, rows=ROWS[name])
    yield "direct, 1 thread", partial(direct, threads=1)
    yield "direct, 4 threads", partial(direct, threads=4)
    if is_cuda:
        yield "on device", partial(direct, threads=0)
    iskander = partial(run_iskander, name, folder, provider, seconds)
    yield "iskander", partial(iskander, has_graphs=False)
    if is_cuda:
        yield "iskander, graphs", partial(iskander, has_graphs=True)
    if TRITON.exists():
        for count in TRITON_INSTANCES:
            way = partial(run_triton, name, folder, provider, seconds, instances=count)
            yield f"triton, {count} instance{'s' * (count > 1)}", way


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--provider", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--models", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.provider == "cuda":
        require_gpu()
    if not TRITON.exists():
        text = (
            "Triton is not measured: it is not installed (python -m benchmarks install triton-gpu)"
        )
        print(text, file=sys.stderr)
    print("| model | way | rows/s | of direct | p50 ms | p99 ms | MB in, out | cores |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="isk-gpu-models-") as folder:
        for name, path in write_models(Path(folder)).items():
            if name not in arguments.models:
                continue
            found: dict[str, list[dict[str, Any]]] = {}
            for _ in range(arguments.rounds):
                for way, measure in ways(name, path, arguments.provider, arguments.seconds):
                    found.setdefault(way, []).append(measure())
            for line in render(name, found):
                print(line, flush=True)
            if arguments.out is not None:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                with arguments.out.open("a") as out:
                    out.write(json.dumps({"model": name, "rows": ROWS[name], "runs": found}) + "\n")


def render(name: str, found: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Return the rows of a model in the table."""
    rates = {way: statistics.median(each["rate"] for each in runs) for way, runs in found.items()}
    best = max(rate for way, rate in rates.items() if way.startswith("direct"))
    for way, runs in found.items():
        keys = ("p50_ms", "p99_ms", "copied_mb", "cores")
        more = " | ".join(str(runs[0].get(key, "")) for key in keys)
        yield f"| {name} | {way} | {rates[way]:,.0f} | {rates[way] / best:.2f} | {more} |"


if __name__ == "__main__":
    main()
