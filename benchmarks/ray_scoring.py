"""Rows/s of `iskander.ray.score` on one to three nodes, next to `iskander score`.

    python -m benchmarks.ray_scoring [--rows 1600000] [--rounds 3] [--ms 100]

Run it with the interpreter of an environment with `ray[data]` and this checkout. It starts clusters
of one, two and three nodes on this machine, in a network namespace of its own, each with one server
per node. The model sleeps for a fixed time per row, like an accelerator, so that the nodes do not
share it as they share the cores. `iskander score` runs the same model with one private server.
The model returns the times of its batches: rows/s are those from the begin of the first batch to
the end of the last one. The whole job, with the start of Ray's actors, is the second figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

NODES = (1, 2, 3)
BATCH_ROWS = 4096
FILE_ROWS = 4 * BATCH_ROWS
"""Rows of a file, and of a block of Ray."""
MANIFEST = """
format = 1
[[inputs]]
column = "x"
type = "int64"
tensor = "x"
[[outputs]]
tensor = "y"
column = "y"
type = "int64"
[[outputs]]
tensor = "begun"
column = "begun"
type = "int64"
[[outputs]]
tensor = "ended"
column = "ended"
type = "int64"
"""
MODEL = """
import time
import pyarrow as pa
import pyarrow.compute as pc

class Model:
    def load(self, context):
        pass

    def predict(self, batch):
        begun = time.time_ns()
        time.sleep({seconds} * batch.num_rows)
        times = {{"begun": begun, "ended": time.time_ns()}}
        y = pc.add(pc.multiply(batch.column("x"), 3), 1)
        columns = {{name: pa.array([each] * batch.num_rows) for name, each in times.items()}}
        return pa.record_batch({{"y": y, **columns}})
"""


def main() -> None:
    """Run the rounds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_600_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ms", type=float, default=100.0, help=f"of {BATCH_ROWS} rows")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--nodes", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside is not None:
        print(json.dumps(run_cluster(arguments)))
        return
    with tempfile.TemporaryDirectory(prefix="isk-ray-") as name:
        folder = Path(name)
        write_model(folder, arguments.ms / 1000 / BATCH_ROWS)
        write_rows(folder / "in", arguments.rows)
        alone = [run_command(folder, arguments.rows) for _ in range(arguments.rounds)]
        print(f"the model alone: {BATCH_ROWS / arguments.ms * 1000:,.0f} rows/s on each node")
        print_line("iskander score", alone)
        rates = {}
        for nodes in NODES:
            measured = run_inside(folder, nodes, arguments.rows, arguments.rounds)
            print_line(f"ray, {nodes} nodes", measured)
            rates[nodes] = statistics.median(rate for rate, _ in measured)
    own = statistics.median(rate for rate, _ in alone)
    print(f"1 node, rows/s of iskander score: {rates[1] / own:.2f}")
    for nodes in NODES[1:]:
        print(f"{nodes} nodes, rows/s of one: {rates[nodes] / rates[1]:.2f}")


def print_line(name: str, measured: list[list[float]]) -> None:
    """Print the medians of the rounds, and each round's rate."""
    rate, seconds = (statistics.median(values) for values in zip(*measured, strict=True))
    listed = ", ".join(f"{each:,.0f}" for each, _ in measured)
    print(f"{name:<16} {rate:>10,.0f} rows/s of {listed}; {seconds:6.1f} s in all", flush=True)


def write_model(folder: Path, seconds: float) -> None:
    """Write the model and a configuration with one worker."""
    target = folder / "sleeper"
    target.mkdir()
    (target / "model.py").write_text(MODEL.format(seconds=seconds))
    (target / "manifest.toml").write_text(MANIFEST)
    table = {"name": "sleeper", "path": str(target), "backend": "python", "workers": 1}
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    (folder / "iskander.toml").write_text("\n".join(["[[models]]", *lines]) + "\n")


def write_rows(folder: Path, rows: int) -> None:
    """Write Parquet files."""
    folder.mkdir()
    for first in range(0, rows, FILE_ROWS):
        table = pa.table({"x": range(first, min(first + FILE_ROWS, rows))})
        pq.write_table(table, folder / f"{first:09}.parquet")


def run_command(folder: Path, rows: int) -> list[float]:
    """Score with `iskander score`; return rows/s and the seconds of the job."""
    words = ["score", "sleeper", folder / "in", "--config", folder / "iskander.toml"]
    words += ["-o", folder / "out", "--overwrite", "replace", "--progress", "none"]
    words += ["--batch-rows", BATCH_ROWS]
    command = [Path(sys.executable).parent / "iskander", *words]
    started = time.perf_counter()
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - started
    return [rate_of(pq.read_table(folder / "out"), rows), seconds]


def rate_of(table: pa.Table, rows: int) -> float:
    """Check the results; return the rows/s between the first and the last batch."""
    assert table.num_rows == rows
    assert pc.all(pc.equal(table["y"], pc.add(pc.multiply(table["x"], 3), 1))).as_py()
    begun, ended = pc.min(table["begun"]).as_py(), pc.max(table["ended"]).as_py()
    return float(rows / (ended - begun) * 1e9)


def run_inside(folder: Path, nodes: int, rows: int, rounds: int) -> list[list[float]]:
    """Run a cluster in a network namespace; return rows/s and seconds of its rounds."""
    unshare = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-rn"]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.ray_scoring"]
    command += ["--inside", str(folder), "--nodes", str(nodes), "--rows", str(rows)]
    command += ["--rounds", str(rounds)]
    result = subprocess.run(
        [*unshare, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "RAY_DATA_DISABLE_PROGRESS_BARS": "1"},
    )
    measured: list[list[float]] = json.loads(result.stdout.strip().splitlines()[-1])
    return measured


def run_cluster(arguments: argparse.Namespace) -> list[list[float]]:
    """Start a cluster and a fleet; return the rounds after the first, which warms."""
    import ray
    from ray.cluster_utils import Cluster

    from iskander.ray import Fleet

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    for _ in range(arguments.nodes - 1):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        with Fleet(config=arguments.inside / "iskander.toml") as fleet:
            rounds = range(arguments.rounds + 1)
            return [run_job(ray, fleet, arguments.inside, arguments.rows) for _ in rounds][1:]
    finally:
        ray.shutdown()
        cluster.shutdown()


def run_job(ray: Any, fleet: Any, folder: Path, rows: int) -> list[float]:  # noqa: ANN401
    """Score all rows; return rows/s and the seconds of the job."""
    from iskander.ray import score

    started = time.perf_counter()
    data = ray.data.read_parquet(str(folder / "in"))
    scored = score(data, "sleeper", fleet, batch_rows=BATCH_ROWS, block_rows=FILE_ROWS)
    tables = list(scored.iter_batches(batch_format="pyarrow", batch_size=None))
    seconds = time.perf_counter() - started
    return [rate_of(pa.concat_tables(tables), rows), seconds]


if __name__ == "__main__":
    main()
