"""Rates on a GPU: `python -m benchmarks.gpu [--seconds 8] [--rounds 2] [--out FILE]`.

A model of ResNet-50's size in float32 and float16 at 32 images a batch, and the two-tower of the
quickstart at 128 and 8192 pairs. Each is measured in alternating rounds:

    direct        `InferenceSession.run` in one thread, and in four
    on device     one thread on buffers that are on the device, without copies: an upper bound
    iskander      a server with one worker on the card, and four clients in processes of their own
    with graphs   the same with CUDA graphs

The table shows the median of the rounds, and the rate in relation to the best direct one; of the
first round, the megabytes that the worker copied for a batch, and the cores that each kind of
process used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.resnet import IMAGE, make_resnet
from iskander.client import Client
from iskander.scoring.server import prepared_server

ROOT = Path(__file__).resolve().parents[2]
TWO_TOWER = ROOT / "configs" / "models" / "movielens-two-tower" / "1"
CLIENTS = 4
ROWS = {
    "resnet50-float32": 32,
    "resnet50-float16": 32,
    "two-tower": 128,
    "two-tower-large": 8192,
}
WARM_S = 3.0
MIB = 1 << 20

CONFIG = """
[arena]
input_bytes = {input_bytes}
output_bytes = {output_bytes}
[limits]
bytes = {limit}
message_bytes = {message}
window_bytes = {window}
[loading]
sandbox = false
"""
MODEL = """
[[models]]
name = "{name}"
path = "{path}"
execution_providers = ["{provider}"]
{options}
max_batch_rows = {rows}
lane = {{pad_to = [{rows}]}}
"""
MANIFEST = """
format = 1
[[inputs]]
column = "images"
type = "fixed_shape_tensor<{element}>[3, 224, 224]"
tensor = "images"
[[outputs]]
tensor = "scores"
column = "scores"
type = "fixed_size_list<{element}>[1000]"
"""


def write_models(folder: Path) -> dict[str, Path]:
    """Write the models; return their folders."""
    folders = {"two-tower": TWO_TOWER, "two-tower-large": TWO_TOWER}
    for element in ("float32", "float16"):
        target = folder / f"resnet50-{element}" / "1"
        target.mkdir(parents=True)
        (target / "model.onnx").write_bytes(make_resnet(element).SerializeToString())
        (target / "manifest.toml").write_text(MANIFEST.format(element=element))
        folders[f"resnet50-{element}"] = target
    return folders


def run_direct(folder: Path, rows: int, threads: int, arguments: argparse.Namespace) -> float:
    """Rows/s of ONNX Runtime by itself."""
    command = [sys.executable, "-m", "benchmarks.gpu.direct", str(folder / "model.onnx")]
    command += [arguments.provider, str(threads), str(arguments.seconds), str(rows)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return float(json.loads(done.stdout))


def run_server(
    name: str, folder: Path, rows: int, graphs: bool, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Rows/s and latencies of four clients of a server."""
    row_bytes = 4 * math.prod(IMAGE) if name.startswith("resnet") else 16
    limit = max(row_bytes * rows + MIB, 32 * MIB)
    text = CONFIG.format(
        input_bytes=16 * limit,
        output_bytes=64 * MIB,
        limit=limit,
        message=limit + MIB,
        window=4 * limit,
    )
    options = "provider_options = {cuda = {enable_cuda_graph = true}}" if graphs else ""
    text += MODEL.format(
        name=name, path=folder, provider=arguments.provider, rows=rows, options=options
    )
    with tempfile.TemporaryDirectory(prefix="isk-gpu-") as own:
        config = Path(own) / "iskander.toml"
        config.write_text(text)
        with prepared_server(config=str(config)) as server:
            server.start()
            begin = time.monotonic() + WARM_S
            end = begin + arguments.seconds
            command = [sys.executable, "-m", "benchmarks.gpu.client", server.address, name]
            command += [str(rows), str(begin), str(end)]
            clients = [
                subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(CLIENTS)
            ]
            time.sleep(max(begin - time.monotonic(), 0))
            before = _cpu_times([client.pid for client in clients])
            time.sleep(max(end - time.monotonic(), 0))
            after = _cpu_times([client.pid for client in clients])
            answers = [json.loads(client.communicate()[0]) for client in clients]
            with Client(server.address) as client:
                (worker,) = client.stats()["workers"]
    copied = {way: count / worker["batches"] for way, count in worker["copied_bytes"].items()}
    cores = {
        name: round((after[name] - before.get(name, 0.0)) / arguments.seconds, 2) for name in after
    }
    return {
        "rate": sum(each["rows"] for each in answers) / arguments.seconds,
        "copied_mb": [round(copied.get(way, 0) / 1e6, 3) for way in ("in", "out")],
        "cores": cores,
        "p50_ms": statistics.median(each["p50_ms"] for each in answers),
        "p99_ms": max(each["p99_ms"] for each in answers),
    }


def _cpu_times(clients: list[int]) -> dict[str, float]:
    """CPU seconds of the clients together, and of the server's processes by name."""
    times: dict[str, float] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            name = "clients" if process.pid in clients else process.name()
            used = process.cpu_times()
            times[name] = times.get(name, 0.0) + used.user + used.system
    return times


def measure(
    name: str, folder: Path, arguments: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """All ways for one model, in alternating rounds."""
    rows = ROWS[name]
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(arguments.rounds):
        for way, threads in (("direct, 1 thread", 1), ("direct, 4 threads", 4), ("on device", 0)):
            if threads or arguments.provider == "cuda":
                rate = run_direct(folder, rows, threads, arguments)
                found.setdefault(way, []).append({"rate": rate})
        for way, graphs in (("iskander", False), ("iskander, graphs", True)):
            if not graphs or arguments.provider == "cuda":
                result = run_server(name, folder, rows, graphs, arguments)
                found.setdefault(way, []).append(result)
    return found


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--provider", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--models", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print("| model | way | rows/s | of direct | p50 ms | p99 ms | MB in, out | cores |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="isk-gpu-models-") as folder:
        for name, path in write_models(Path(folder)).items():
            if name not in arguments.models:
                continue
            found = measure(name, path, arguments)
            rates = {way: statistics.median(r["rate"] for r in runs) for way, runs in found.items()}
            best = max(rates["direct, 1 thread"], rates["direct, 4 threads"])
            for way, runs in found.items():
                keys = ("p50_ms", "p99_ms", "copied_mb", "cores")
                more = " | ".join(str(runs[0].get(key, "")) for key in keys)
                print(
                    f"| {name} | {way} | {rates[way]:,.0f} | {rates[way] / best:.2f} | {more} |",
                    flush=True,
                )
            if arguments.out is not None:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                with arguments.out.open("a") as out:
                    out.write(json.dumps({"model": name, "rows": ROWS[name], "runs": found}) + "\n")


if __name__ == "__main__":
    main()
