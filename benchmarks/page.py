"""Writes `benchmarks/README.md` and its pictures from results files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks import plots, probes, ramp, reload
from benchmarks.cases import GOALS
from benchmarks.results import Results, judge
from benchmarks.tables import render_case, render_processes, render_table, render_verdicts
from benchmarks.workloads import FOLDER

OPENING = """# Benchmarks

<!-- Written by `python -m benchmarks report` from results files; change benchmarks/page.py. -->

Iskander beside the servers that people would otherwise choose, and beside bare Arrow Flight and
bare ONNX Runtime, on the same machine, in the same run. Read the ratios; the absolute figures are
this machine's, which clients and servers share.

    python -m benchmarks install            # the other servers, each in an environment of its own
    python -m benchmarks run goals --out build/goals.jsonl
    python -m benchmarks report build/goals.jsonl
"""

METHOD = """## Method

- `direct` is ONNX Runtime without any server: I/O bindings used again and again, in the client's
  process. `echo` is a bare pyarrow Flight server that sends each batch back. `iskander` is
  `iskander-gateway` with the configuration under `configs/`: one worker, all else at its default;
  `iskander-oip` is the same asked by tritonclient, `iskander-inferential` by Inferential's client;
  `iskander-shared` has large batches in memory that it lends, each written there anew, and
  `iskander-busy` has 2,000 us of `busy_poll_us` for gateway and worker.
  `triton` is `tritonserver` of the nvidia-pytriton wheel, its Python backend running the model;
  `triton-serialized` is the same server asked with requests that were serialized once, since
  tritonclient spends most of its time on that, and `triton-shared` with inputs in a region of
  shared memory that tritonclient registers, each written there anew. `mosec` has one Python worker
  and no batching, which made closed loops slower; `mlserver` a custom runtime in its own process;
  `inferential` its local dispatcher. All of them run the same model file in the same version of
  ONNX Runtime with one intra-op thread that does not spin. Start scripts are in `servers/`.
- Clients are what users of each system take: pyarrow, tritonclient over gRPC, the `inferential`
  package, and for mosec, which leaves the format to its users, raw tensor bytes over the standard
  library's HTTP client with its connection kept open. A client is a process of its own with one
  connection. In open loops 16 connections are spread over 4 processes.
- The clients of `echo`, `iskander`, its variants and `iskander-oip` run without gRPC's event engine
  (`GRPC_EXPERIMENTS=-event_engine_client`): the thread that waits for an answer then reads the
  socket by itself, where gRPC by default hands a batch over four times between threads. With
  `-default` they are as they come. Triton's are as they come, which suits Triton better;
  `triton-polled` is without the event engine.
- Closed loop: a client sends its next batch when the last is answered. Open loop: batches are due
  at Poisson times, whichever connection is free takes the next, and a latency counts from the time
  at which the batch was due. `sent late` is how long it waited for a free connection or for the
  client; `dropped` are batches without an answer.
- Before anything is measured, every system's answers are compared with the model's own.
- Every figure is the median of {rounds} rounds of {seconds} s (open loops have their time in
  their name), each after {warm_up_seconds:g} s of warm-up that is not counted. In a round the
  systems take turns, and the one to begin changes. A ratio is taken within each round, and the
  median of those is held against its goal.
- CPU is user and system time of the processes per request, from the kernel's accounting: of the
  process that clients talk to (front), of all processes of the server, of the clients.
- Reloads: eight streams stay open at 400 batches/s in all. In every other window the model's folder
  is replaced by a copy, which is tried out and loaded by a call, and again a quarter of a second
  after it is served.
- The policy model's 20 ms are the same for one observation and for eight that came together.
- The wide model answers 256 bytes of a row with 4, and the echo server with 256: there a ratio to
  the echo above 1 means a smaller answer. The embedding model answers 8 bytes with 8 kB.
"""


def write_page(results: Results, path: Path, *, images: Path | None) -> None:
    """The page, and a picture of each open loop and of the first closed one."""
    parts = [OPENING]
    verdicts = judge(results, GOALS)
    if verdicts:
        parts.append(f"## Goals\n\n{render_verdicts(verdicts)}\n")
    probed = probes.render(results)
    if probed:
        parts.append(f"## Start and idle streams\n\n{probed}\n")
    ramped = ramp.render(results)
    if ramped:
        parts.append(f"## The greatest load that is sustained\n\n{ramped}\n")
    reloaded = reload.render(results)
    if reloaded:
        parts.append(f"## Reloads\n\n{reloaded}\n")
    parts.append("## Cases\n")
    for case in results.cases:
        parts.append(f"{render_case(results, case)}\n")
        processes = render_processes(results, case)
        if processes:
            parts.append(f"CPU µs of a request by process:\n\n{processes}\n")
        if images is not None:
            image = images / f"{_slug(case)}.png"
            plots.draw(results, case, image)
            parts.append(f"![latencies]({os.path.relpath(image, path.parent)})\n")
    parts.append(
        METHOD.format(
            **results.run["effort"] | {"seconds": _seconds(results), "rounds": results.rounds}
        )
    )
    parts.append(f"## Machine and versions\n\n{_render_facts(results.run)}\n")
    path.write_text("\n".join(parts), "utf-8")


def _seconds(results: Results) -> str:
    """How long the rounds of closed loops were, which suites may differ in."""
    closed = {each["seconds"] for each in results.measurements if not each["arrivals_per_s"]}
    return " or ".join(f"{seconds:g}" for seconds in sorted(closed)) or "no"


def _slug(case: str) -> str:
    words = case.replace(",", "").replace("/", " ").split()
    return "-".join(words)


def _render_facts(run: dict[str, Any]) -> str:
    machine = run["machine"]
    rows = [
        ["CPU", machine["cpu"]],
        ["cores", str(machine["cores"])],
        ["memory", f"{machine['memory_gib']} GiB"],
        ["system", machine["system"]],
        *([name, text] for name, text in run["versions"].items()),
    ]
    return render_table(["what", "value"], rows)


README = FOLDER / "README.md"
IMAGES = FOLDER / "images"
