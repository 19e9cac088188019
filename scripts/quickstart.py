"""Quickstart: starts a server, scores ratings over Arrow Flight, prints them and stops it.

`score` contains the client code: plain pyarrow.flight, which reads while it writes. Exit code 0
only if every step worked and no process or socket remains.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import flight

from iskander.foundation.build_info import BUILD

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "quickstart.toml"
SAMPLE = ROOT / "configs" / "models" / "movielens-two-tower" / "sample.parquet"
MODEL = "movielens-two-tower"
BATCH_ROWS = 128
READY_WITHIN_S = 60.0
STOP_WITHIN_S = 30.0
SHOWN_ROWS = 8
ROUND_TRIPS = 500


def main() -> None:
    """Run all steps; exit 1 with the reason of a failure."""
    address = tomllib.loads(CONFIG.read_text())["server"]["address"]
    with tempfile.TemporaryDirectory(prefix="iskander-") as folder:
        command = [str(Path(sys.executable).parent / "iskander-gateway"), "--config", str(CONFIG)]
        print(f"starts: iskander-gateway --config {CONFIG.relative_to(ROOT)}")
        started = time.perf_counter()
        environment = dict(os.environ, ISKANDER_SERVER__RUNTIME_DIRECTORY=folder)
        environment["ISKANDER_ADMIN__LOG_LEVEL"] = "warning"
        gateway = subprocess.Popen(command, env=environment)
        try:
            client = flight.connect(f"grpc://{address}")
            wait_until_ready(client, gateway)
            ready_s = time.perf_counter() - started
            print(f"ready on {address} after {ready_s:.1f} s, {BUILD} build\n")
            workers = descendants(gateway.pid)
            ratings = pq.read_table(SAMPLE)
            ids = ratings.select(["user_id", "item_id"]).combine_chunks()
            batches = ids.to_batches(BATCH_ROWS)
            started = time.perf_counter()
            results = score(client, batches)
            elapsed_ms = (time.perf_counter() - started) * 1e3
            show(ratings, pa.Table.from_batches(results))
            print(f"\n{len(ids):,} rows in {len(batches)} batches, streamed: {elapsed_ms:.1f} ms")
            trips = round_trips_ms(client, batches[0])
            median, worst = trips[len(trips) // 2], trips[len(trips) * 99 // 100]
            print(
                f"{BATCH_ROWS} rows at a time, round trip: "
                f"median {median:.2f} ms, 99th percentile {worst:.2f} ms\n"
            )
            client.close()
        finally:
            gateway.send_signal(signal.SIGTERM)
            try:
                code = gateway.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                gateway.kill()
                code = gateway.wait()
        remaining = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
        remaining += [path.name for path in Path(folder).iterdir() if path.is_socket()]
        if code or remaining:
            sys.exit(f"exit code {code}; left behind: {remaining or 'nothing'}")
        print(f"stopped: exit code {code}, nothing left behind")


def descendants(pid: int) -> list[int]:
    """Return the processes that a process and its children have started."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for each in lists for child in each.read_text().split()]
    return children + [below for child in children for below in descendants(child)]


def wait_until_ready(client: flight.FlightClient, gateway: subprocess.Popen[bytes]) -> None:
    """Poll `health` until it is ready, while the gateway runs."""
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline and gateway.poll() is None:
        try:
            options = flight.FlightCallOptions(timeout=1.0)
            (result,) = client.do_action(flight.Action("health", b""), options)
            if b'"ready":true' in result.body.to_pybytes():
                return
        except flight.FlightError:
            pass
        time.sleep(0.05)
    sys.exit("the server did not become ready; see its log lines above")


def score(client: flight.FlightClient, batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Stream the batches: a thread writes, this one reads. Results are in the same order."""
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_path(MODEL))

    def write() -> None:
        writer.begin(batches[0].schema)
        for batch in batches:
            writer.write_batch(batch)
        writer.done_writing()

    thread = threading.Thread(target=write)
    thread.start()
    results = [chunk.data for chunk in reader]
    thread.join()
    writer.close()
    return results


def round_trips_ms(client: flight.FlightClient, batch: pa.RecordBatch) -> list[float]:
    """Latencies of batches on one stream, each sent after the last result."""
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_path(MODEL))
    writer.begin(batch.schema)
    elapsed = []
    for _ in range(ROUND_TRIPS):
        started = time.perf_counter()
        writer.write_batch(batch)
        reader.read_chunk()
        elapsed.append((time.perf_counter() - started) * 1e3)
    writer.done_writing()
    writer.close()
    return sorted(elapsed)


def show(ratings: pa.Table, predictions: pa.Table) -> None:
    """Print some predictions next to the users' ratings."""
    assert predictions.select(["user_id", "item_id"]) == ratings.select(["user_id", "item_id"])
    print(f"{'user':>5}  {'film':<44} {'rated':>5}  {'predicted':>9}")
    for row in range(0, len(ratings), len(ratings) // SHOWN_ROWS):
        rated, scored = ratings.slice(row, 1).to_pylist()[0], predictions["score"][row].as_py()
        user, title, rating = rated["user_id"], rated["title"][:44], rated["rating"]
        print(f"{user:>5}  {title:<44} {rating:>5.1f}  {scored:>9.2f}")


if __name__ == "__main__":
    main()
