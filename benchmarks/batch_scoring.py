"""Rows/s of `iskander score` next to a hand-written loop and Ray Data over the same file.

    python -m benchmarks.batch_scoring [--rows 10000000] [--rounds 5] [--ray PYTHON]

All score the same Parquet file with the same model on the same cores and write Parquet, each in
processes of its own, in alternating rounds. The loop reads batches of 65,536 rows with
`pyarrow.dataset`, runs ONNX Runtime with its default threads and writes with one `ParquetWriter`.
Ray Data runs ONNX Runtime in one actor with `map_batches`; PYTHON is the interpreter of an
environment with `ray[data]` and `onnxruntime`.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "configs" / "models" / "movielens-two-tower" / "1"
BATCH_ROWS = 65_536
GROUP_ROWS = 1 << 20
USERS, ITEMS = 610, 9724
LOOP = """
import sys
import numpy as np, onnxruntime as ort, pyarrow as pa, pyarrow.dataset as ds, pyarrow.parquet as pq
source, model, target, rows = sys.argv[1:]
session = ort.InferenceSession(model)
names = [each.name for each in session.get_inputs()]
writer = None
for batch in ds.dataset(source).scanner(batch_size=int(rows)).to_batches():
    feeds = {name: batch.column(name).to_numpy() for name in names}
    for each, values in zip(session.get_outputs(), session.run(None, feeds)):
        batch = batch.append_column(each.name, pa.array(np.asarray(values).reshape(-1)))
    writer = writer or pq.ParquetWriter(target, batch.schema)
    writer.write_batch(batch)
writer.close()
"""
RAY = """
import os, sys
import numpy as np, onnxruntime as ort, ray
source, model, target, rows = sys.argv[1:]
class Scorer:
    def __init__(self):
        self.session = ort.InferenceSession(model)
    def __call__(self, batch):
        feeds = {each.name: batch[each.name] for each in self.session.get_inputs()}
        for each, values in zip(self.session.get_outputs(), self.session.run(None, feeds)):
            batch[each.name] = np.asarray(values).reshape(-1)
        return batch
ray.init(num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
data = ray.data.read_parquet(source)
actor = ray.data.ActorPoolStrategy(size=1)
data.map_batches(Scorer, batch_size=int(rows), compute=actor).write_parquet(target)
"""


def main() -> None:
    """Run the rounds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ray", type=Path, metavar="PYTHON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="isk-scoring-") as name:
        folder = Path(name)
        write_ratings(folder / "ratings.parquet", arguments.rows)
        given = [folder / "ratings.parquet", MODEL / "model.onnx"]
        loop = [sys.executable, "-c", LOOP, *given, folder / "out", BATCH_ROWS]
        command = Path(sys.executable).parent / "iskander"
        score = [command, "score", MODEL, folder / "ratings.parquet", "--progress", "none"]
        ways = {
            "loop": (loop, folder / "out"),
            "iskander score": ([*score, "-o", folder / "scored"], folder / "scored"),
        }
        if arguments.ray:
            ray = [arguments.ray, "-c", RAY, *given, folder / "ray", BATCH_ROWS]
            ways["ray data"] = ray, folder / "ray"
        measured: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
        for _ in range(arguments.rounds):
            for way, (words, output) in ways.items():
                measured[way].append(run([str(word) for word in words]))
                shutil.rmtree(output) if output.is_dir() else output.unlink()
    for way, runs in measured.items():
        seconds = statistics.median(each for each, _ in runs)
        peak = max(each for _, each in runs) / 2**20
        print(f"{way:<15} {arguments.rows / seconds:>12,.0f} rows/s  {peak:>7,.0f} MiB")
    scored = measured.pop("iskander score")
    for way, runs in measured.items():
        ratios = sorted(other / own for (other, _), (own, _) in zip(runs, scored, strict=True))
        listed = ", ".join(f"{each:.2f}" for each in ratios)
        print(f"times as fast as {way}: median {statistics.median(ratios):.2f} of {listed}")


def write_ratings(file: Path, rows: int) -> None:
    """Write random users and items as Parquet."""
    random = np.random.default_rng(7)
    kinds = pa.schema({"user_id": pa.int64(), "item_id": pa.int64(), "timestamp": pa.int64()})
    with pq.ParquetWriter(file, kinds) as writer:
        for first in range(0, rows, GROUP_ROWS):
            count = min(GROUP_ROWS, rows - first)
            columns = [random.integers(1, USERS, count), random.integers(1, ITEMS, count)]
            columns.append(np.arange(first, first + count))
            writer.write_batch(pa.record_batch(columns, schema=kinds))


def run(command: list[str]) -> tuple[float, int]:
    """Run a command; return its seconds and the peak of the PSS of its processes."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = [0]
    watcher = threading.Thread(target=_watch, args=(process, peak), daemon=True)
    watcher.start()
    code = process.wait()
    seconds = time.perf_counter() - begun
    watcher.join()
    if code:
        raise SystemExit(f"{command[0]} ended with {code}")
    return seconds, peak[0]


def _watch(process: subprocess.Popen[bytes], peak: list[int]) -> None:
    while process.poll() is None:
        total = 0
        try:
            root = psutil.Process(process.pid)
            for each in (root, *root.children(recursive=True)):
                total += each.memory_full_info().pss
        except psutil.Error:
            pass
        peak[0] = max(peak[0], total)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
