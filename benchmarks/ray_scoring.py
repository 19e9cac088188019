"""Overhead of `iskander score --engine ray`, and rows/s of `iskander.ray` on several nodes.

    python -m benchmarks.ray_scoring [--rounds 4] [--millions 60] [--rows 1200000] [--ms 100]

Run it with the interpreter of an environment with `ray[data]` and this checkout. All clusters are
on this machine, in a network namespace of its own, with one server per node.

Overhead: each round scores the same files with the quickstart's model and `iskander score`, once
without Ray and once on a new cluster of one node, in alternating order, with the same number of
concurrent units on the same cores. A unit is a file of a million rows. The journal of the job gives
the time at which each unit is finished: the steady rate is that from the end of the first quarter
of the units to the last but one, and the start is the time before the first one, less a unit's own.
The start with Ray has the start of the server, of its actor, and of the processes of tasks, but not
that of the cluster.

Nodes: each round runs clusters of one, two and three nodes, in which Ray Data scores rows with a
model that sleeps for a fixed time per row, like an accelerator, so that the nodes do not share it
as they share the cores. A short job comes first, to start the processes. The model returns the
times of its batches: rows/s are those from the begin of the first batch to the end of the last one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
TWO_TOWER = ROOT / "configs" / "models" / "movielens-two-tower" / "1"
ENGINES = ("here", "ray")
UNIT_ROWS = 1_000_000
NODES = (1, 2, 3)
BATCH_ROWS = 4096
FILE_ROWS = 4 * BATCH_ROWS
"""Rows of a file of the sleeping model, and of a block of Ray."""
POLL_S = 0.02
JOB_S = 300.0
"""Maximum time of a job with its cluster."""
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


class Run(NamedTuple):
    """One job: rows/s in its steady part, seconds before it, and seconds of the whole job."""

    rate: float
    start_s: float
    whole_s: float


def main() -> None:
    """Run the rounds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--millions", type=int, default=60, help="rows of a job of the overhead")
    parser.add_argument("--rows", type=int, default=1_200_000, help="rows of a job on nodes")
    parser.add_argument("--ms", type=float, default=100.0, help=f"sleep for {BATCH_ROWS} rows")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside is not None:
        print(json.dumps(run_job(arguments.inside, arguments)))
        return
    with tempfile.TemporaryDirectory(prefix="isk-ray-") as name:
        write_ratings(Path(name, "ratings"), arguments.millions)
        write_model(Path(name), arguments.ms / 1000 / BATCH_ROWS)
        write_rows(Path(name, "rows"), arguments.rows)
        write_rows(Path(name, "few"), FILE_ROWS * 4)
        measure(Path(name), arguments)


def measure(folder: Path, arguments: argparse.Namespace) -> None:
    """Run all rounds, and print the table."""
    cpus = len(os.sched_getaffinity(0))
    rows = arguments.millions * UNIT_ROWS
    print(f"{cpus} cpus, medians of {arguments.rounds} rounds; rates of the rounds in brackets")
    runs: dict[str, list[Run]] = {name: [] for name in (*ENGINES, *map(str, NODES))}
    for index in range(arguments.rounds):
        for name in (*ENGINES[:: -1 if index % 2 else 1], *map(str, NODES)):
            runs[name].append(run_apart(folder, name))
    print(f"{rows:,} rows of movielens-two-tower, {cpus} units at a time")
    for engine in ENGINES:
        print_line(f"iskander score, {engine}", runs[engine])
    print(f"  with Ray, part of the rate without: {ratio(runs['ray'], runs['here'])}")
    print(f"{arguments.rows:,} rows, {arguments.ms:g} ms for {BATCH_ROWS}")
    print(f"  the model alone: {BATCH_ROWS / arguments.ms * 1000:,.0f} rows/s on each node")
    for nodes in NODES:
        print_line(f"iskander.ray.score, {nodes} nodes", runs[str(nodes)])
    for nodes in NODES[1:]:
        print(f"  {nodes} nodes, multiple of one: {ratio(runs[str(nodes)], runs['1'])}")


def run_apart(folder: Path, job: str) -> Run:
    """Run a job in a process and a network namespace of its own, where Ray uses the loopback."""
    unshare = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-rn"]
    words = [sys.executable, "-W", "ignore", "-m", "benchmarks.ray_scoring", *sys.argv[1:]]
    words += ["--inside", str(folder), "--job", job]
    result = subprocess.run(
        [*unshare, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *words],
        check=True,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=JOB_S,
        env={**os.environ, "RAY_DATA_DISABLE_PROGRESS_BARS": "1"},
    )
    return Run(*json.loads(result.stdout.strip().splitlines()[-1]))


def run_job(folder: Path, arguments: argparse.Namespace) -> Run:
    """Run the job of this process: a command, or a dataset on a number of nodes."""
    cpus, rows = len(os.sched_getaffinity(0)), arguments.millions * UNIT_ROWS
    if arguments.job == "here":
        return run_command(folder, rows, cpus, None)
    if arguments.job == "ray":
        with cluster(1, cpus) as address:
            return run_command(folder, rows, cpus, address)
    with cluster(int(arguments.job), 1) as address:
        return run_dataset(folder, arguments.rows, address)


def print_line(name: str, runs: list[Run]) -> None:
    """Print the medians of the rounds, and each round's rate."""
    rate, start_s, whole_s = (statistics.median(each) for each in zip(*runs, strict=True))
    listed = ", ".join(f"{each.rate:,.0f}" for each in runs)
    text = f"{rate:>11,.0f} rows/s, start {start_s:5.1f} s, whole {whole_s:6.1f} s"
    print(f"  {name:<27} {text} ({listed})", flush=True)


def ratio(runs: list[Run], others: list[Run]) -> str:
    """Return the median of the ratios of each round, and their range."""
    found = [each.rate / other.rate for each, other in zip(runs, others, strict=True)]
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def write_ratings(folder: Path, files: int) -> None:
    """Write files of pairs for the quickstart's model."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for index in range(files):
        pairs = {"user_id": random.integers(1, 672, UNIT_ROWS)}
        pairs["item_id"] = random.integers(1, 9001, UNIT_ROWS)
        pq.write_table(pa.table(pairs), folder / f"{index:03}.parquet")


def write_model(folder: Path, seconds: float) -> None:
    """Write the sleeping model and a configuration with one worker."""
    target = folder / "sleeper"
    target.mkdir()
    (target / "model.py").write_text(MODEL.format(seconds=seconds))
    (target / "manifest.toml").write_text(MANIFEST)
    table = {"name": "sleeper", "path": str(target), "backend": "python", "workers": 1}
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    (folder / "iskander.toml").write_text("\n".join(["[[models]]", *lines]) + "\n")


def write_rows(folder: Path, rows: int) -> None:
    """Write files for the sleeping model."""
    folder.mkdir()
    for first in range(0, rows, FILE_ROWS):
        table = pa.table({"x": range(first, min(first + FILE_ROWS, rows))})
        pq.write_table(table, folder / f"{first:09}.parquet")


@contextlib.contextmanager
def cluster(nodes: int, cpus: int) -> Iterator[str]:
    """Run a cluster in the block; yield its address."""
    from ray.cluster_utils import Cluster

    started = Cluster(
        initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False}
    )
    try:
        for _ in range(nodes - 1):
            started.add_node(num_cpus=cpus)
        yield started.address
    finally:
        started.shutdown()


def run_command(folder: Path, rows: int, cpus: int, address: str | None) -> Run:
    """Score the ratings with the command, without Ray or on a cluster."""
    words = ["score", TWO_TOWER, folder / "ratings", "-o", folder / "out", "--progress", "none"]
    words += ["--concurrency", max(cpus, 2), "--state", folder / "state"]
    if address is not None:
        words += ["--engine", "ray", "--ray-address", address]
    command = [str(word) for word in (Path(sys.executable).parent / "iskander", *words)]
    journal = folder / "state" / "journal.jsonl"
    started = time.perf_counter()
    ended: list[float] = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            time.sleep(POLL_S)
            # The commit deletes it.
            with contextlib.suppress(FileNotFoundError):
                new = journal.read_bytes().count(b"\n") - len(ended)
                ended += [time.perf_counter() - started] * new
    whole_s = time.perf_counter() - started
    assert process.returncode == 0
    assert sum(pq.read_metadata(each).num_rows for each in (folder / "out").glob("*.parquet")) == (
        rows
    )
    shutil.rmtree(folder / "out")
    first, last = len(ended) // 4, len(ended) - 2
    rate = UNIT_ROWS * (last - first) / (ended[last] - ended[first])
    return Run(rate, ended[0] - UNIT_ROWS * max(cpus, 2) / rate, whole_s)


def run_dataset(folder: Path, rows: int, address: str) -> Run:
    """Score rows with the sleeping model on a cluster."""
    import ray

    from iskander.ray import Fleet

    ray.init(address=address, log_to_driver=False)
    try:
        started = time.perf_counter()
        config = folder / "iskander.toml"
        with Fleet(config=config, allow_unprotected_network=True) as fleet:
            score_rows(ray, fleet, folder / "few")
            begun = time.perf_counter()
            table = score_rows(ray, fleet, folder / "rows")
            whole_s = time.perf_counter() - begun
    finally:
        ray.shutdown()
    assert table.num_rows == rows
    assert pc.all(pc.equal(table["y"], pc.add(pc.multiply(table["x"], 3), 1))).as_py()
    first, last = pc.min(table["begun"]).as_py(), pc.max(table["ended"]).as_py()
    return Run(float(rows / (last - first) * 1e9), begun - started, whole_s)


def score_rows(ray: Any, fleet: Any, folder: Path) -> pa.Table:  # noqa: ANN401
    """Score the rows of a folder; return them with their results."""
    from iskander.ray import score

    data = ray.data.read_parquet(str(folder))
    scored = score(data, "sleeper", fleet, batch_rows=BATCH_ROWS, block_rows=FILE_ROWS)
    return pa.concat_tables(list(scored.iter_batches(batch_format="pyarrow", batch_size=None)))


if __name__ == "__main__":
    main()
