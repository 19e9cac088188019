"""Copies and kernels of a worker on a GPU, from a trace of the driver (CUPTI).

    python -m benchmarks.gpu.trace [--seconds 3] [--models NAME ...]

The worker runs inside PyTorch's profiler. The report has the copies by kind of memory and size, the
time of copies and kernels for a batch, and the share of the copies' time in which kernels ran.

Source: the trace format of PyTorch's profiler, events of the categories `gpu_memcpy` and `kernel`
with times in microseconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.clients import run_clients
from benchmarks.gpu.models import ROWS, config_of, write_models
from benchmarks.gpu.servers import GRAPHS, require_gpu
from iskander.client import Client
from iskander.lake.run.server import prepared_server

Span = tuple[float, float]
WRITE_S = 120.0
"""Time to write a trace of some seconds."""


class Copies(NamedTuple):
    """Copies of one kind and size; a kind is such as `HtoD (Pinned -> Device)`."""

    kind: str
    length_bytes: int
    count: int


class Summary(NamedTuple):
    """What a trace shows; times in microseconds.

    Attributes:
        copies: Those with the most bytes first.
        copy_us: Time in which a copy of the host's memory ran, while batches ran.
        kernel_us: Time in which a kernel ran.
        overlap_us: Time in which both ran.
    """

    copies: list[Copies]
    copy_us: float
    kernel_us: float
    overlap_us: float

    @property
    def overlap(self) -> float:
        """Share of the copies' time in which kernels ran."""
        return self.overlap_us / self.copy_us if self.copy_us else 0.0


def summarize(events: Iterable[dict[str, Any]]) -> Summary:
    """Sum up the copies, and the spans while batches ran: from the first to the last usual copy.

    The usual copies are those of the kind and size that were made most often. Copies before them
    are the weights of the load.
    """
    copies: dict[tuple[str, int], list[Span]] = defaultdict(list)
    kernels: list[Span] = []
    for event in events:
        span = (event.get("ts", 0.0), event.get("ts", 0.0) + event.get("dur", 0.0))
        if event.get("cat") == "kernel":
            kernels.append(span)
        elif event.get("cat") == "gpu_memcpy":
            kind = event["name"].removeprefix("Memcpy ")
            copies[kind, int(event["args"]["bytes"])].append(span)
    counted = [Copies(kind, length, len(spans)) for (kind, length), spans in copies.items()]
    counted.sort(key=lambda each: (-each.length_bytes * each.count, each.kind))
    hosts = [each for each in counted if not each.kind.startswith("DtoD")]
    if not hosts:
        return Summary(counted, 0.0, 0.0, 0.0)
    usual = max(hosts, key=lambda each: (each.count, each.length_bytes))
    spans = copies[usual.kind, usual.length_bytes]
    begin, end = min(start for start, _ in spans), max(stop for _, stop in spans)
    copied = union(
        span for each in hosts for span in copies[each.kind, each.length_bytes] if span[0] >= begin
    )
    computed = union(span for span in kernels if begin <= span[0] <= end)
    both = list(intersection(copied, computed))
    return Summary(counted, *(sum(b - a for a, b in spans) for spans in (copied, computed, both)))


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the time that any of the spans covers, as spans in order that do not touch."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def intersection(first: Sequence[Span], second: Sequence[Span]) -> Iterator[Span]:
    """Yield the time that both unions cover."""
    at = 0
    for begin, end in first:
        while at < len(second) and second[at][1] <= begin:
            at += 1
        for start, stop in second[at:]:
            if start >= end:
                break
            yield max(begin, start), min(end, stop)


def render(summary: Summary, batches: int) -> Iterator[str]:
    """Return the summary as lines of text."""
    yield f"{batches} batches by the worker's own count"
    for each in summary.copies[:10]:
        yield f"{each.count:8,} copies of {each.length_bytes / 1e6:10,.3f} MB: {each.kind}"
    if len(summary.copies) > 10:
        rest = summary.copies[10:]
        total = sum(each.count * each.length_bytes for each in rest) / 1e6
        yield f"{sum(each.count for each in rest):8,} other copies, {total:,.3f} MB in all"
    times = [each / 1000 / max(batches, 1) for each in (summary.copy_us, summary.kernel_us)]
    yield f"copies {times[0]:.3f} ms a batch, kernels {times[1]:.3f} ms a batch"
    yield f"kernels ran for {summary.overlap:.0%} of the copies' time"


def record(
    name: str, folder: Path, seconds: float, more: str = "", provider: str = "cuda"
) -> tuple[Summary, int]:
    """Run a server whose worker is traced; return the summary and the number of batches."""
    with tempfile.TemporaryDirectory(prefix="isk-gpu-trace-") as own:
        trace, interpreter = Path(own) / "trace.json", Path(own) / "python"
        worker = Path(__file__).with_name("traced_worker.py")
        command = f'exec "{sys.executable}" -P "{worker}" "{trace}" "$@"'
        interpreter.write_text(f"#!/bin/sh\n{command}\n")
        interpreter.chmod(0o755)
        config = Path(own) / "iskander.toml"
        config.write_text(
            config_of(name, folder, provider, more=f'python = "{interpreter}"\n{more}')
        )
        with prepared_server(config=str(config)) as server:
            server.start()
            run_clients("flight", server.address, name, seconds)
            with Client(server.address) as client:
                (worker_stats,) = client.stats()["workers"]
            trace.with_suffix(".stop").touch()
            deadline_s = time.monotonic() + WRITE_S
            while not trace.exists():
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"no trace within {WRITE_S:g} s: {server.log_tail()}")
                time.sleep(0.1)
        return summarize(json.loads(trace.read_text())["traceEvents"]), worker_stats["batches"]


def main() -> None:
    """Trace each model, without and with CUDA graphs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0)
    models = ["resnet50-float32"]
    parser.add_argument("--models", nargs="*", default=models, choices=list(ROWS))
    arguments = parser.parse_args()
    require_gpu()
    with tempfile.TemporaryDirectory(prefix="isk-gpu-models-") as folder:
        folders = write_models(Path(folder))
        for name in arguments.models:
            for title, more in ((name, ""), (f"{name}, graphs", GRAPHS)):
                print(f"{title}:")
                for line in render(*record(name, folders[name], arguments.seconds, more)):
                    print(f"    {line}", flush=True)


if __name__ == "__main__":
    main()
