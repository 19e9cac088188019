"""Renders `benchmarks/README.md` and its plots from results files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks import plots, probes, ramp, reload
from benchmarks.cases import GOALS
from benchmarks.results import Results, check_goals
from benchmarks.tables import render_case, render_processes, render_table, render_verdicts
from benchmarks.workloads import FOLDER

OPENING = """# Benchmarks

<!-- Written by `python -m benchmarks report` from results files; change benchmarks/page.py. -->

Iskander compared with other model servers, with bare Arrow Flight and with bare ONNX Runtime, on
the same machine, in the same run. Compare the ratios: the absolute figures depend on this
machine, which clients and servers share.

    python -m benchmarks install            # the other servers, each in its own environment
    python -m benchmarks run goals --out build/goals.jsonl
    python -m benchmarks report build/goals.jsonl
"""

NO_GAIN = """## No gain

Tried and not used: SCHED_BATCH; Python 3.12; a longer collection of requests before an idle
worker is woken; large messages read directly into their buffer; huge pages for the
interpreter's heap; shorter scheduler slices; gateway and worker on one core, or each on its
own; two processes of either on two cores; response headers that refer to the client's HPACK
table; a thread of the class SCHED_IDLE that keeps a core awake (a p99 of 20 ms and more). A
Python built with profile-guided optimization gave a few percent.

The [goals](#goals) that are missed are limited by two cores, which clients, gateway, worker and
model share: for 1,024 rows of the two-tower model, model, client and a bare Flight echo alone
use the time of the goal, and for wide batches client and model do.
"""

METHOD = """## Method

- `direct` is ONNX Runtime without a server: reused I/O bindings in the client's process. `echo`
  is a bare pyarrow Flight server that returns each batch. `iskander` is `iskander-gateway` with
  the configuration in `configs/`: one worker, all other settings at their defaults.
  `iskander-oip` is the same server with tritonclient as its client, `iskander-inferential` with
  Inferential's client. `iskander-shared` has large batches in shared-memory regions of the
  server, written again for each request. `iskander-busy` has 2,000 us of `busy_poll_us` for
  gateway and worker. `triton` is `tritonserver` of the nvidia-pytriton wheel with its Python
  backend. The requests of `triton-serialized` are serialized once, because serialization is
  most of tritonclient's time. The inputs of `triton-shared` are in a shared-memory region that
  tritonclient registers, written again for each request. `mosec` has one Python worker and no
  batching, which made closed loops slower. `mlserver` has a custom runtime in its own process,
  `inferential` its local dispatcher. All servers run the same model file in the same version of
  ONNX Runtime with one intra-op thread that does not spin. Start scripts are in `servers/`.
- Clients are the usual client libraries: pyarrow, tritonclient over gRPC, the `inferential`
  package. mosec leaves the format to its users, so its client sends raw tensor bytes over a
  persistent connection of the standard library's HTTP client. Each client is a process with one
  connection. In open loops, 4 processes share 16 connections.
- The clients of `echo`, `iskander`, its variants and `iskander-oip` run without gRPC's event
  engine (`GRPC_EXPERIMENTS=-event_engine_client`): the waiting thread then reads the socket
  itself, whereas by default gRPC passes a batch between threads four times. `-default` clients
  keep the default. Triton's clients keep the default, which is faster for Triton;
  `triton-polled` is without the event engine.
- Closed loop: a client sends its next batch after the last response. Open loop: batches are due
  at Poisson times, any idle connection sends the next one, and a latency counts from the due
  time. `sent late` is the delay until a connection was idle and the client ready; `dropped` are
  batches without a response.
- Before the measurements, the outputs of every system are compared with the model's own.
- Every figure is the median of {rounds} rounds of {seconds} s (names of open loops contain
  theirs), each after {warm_up_seconds:g} s of warm-up that does not count. In a round the
  systems run in turn, and each round starts with another system. A ratio is taken within each
  round; the median of the ratios is compared with the goal.
- CPU is user and system time of the processes per request, from the kernel's accounting: of the
  process that accepts the clients' connections (front), of all processes of the server, of the
  clients.
- Reloads: eight streams stay open at 400 batches/s in total. In every other window a copy
  replaces the model's folder, and a call loads it, sandboxed load included; the next reload
  starts a quarter of a second after the last one is served.
- The policy model's 20 ms are the same for one observation and for eight in one batch.
- The wide model returns 4 bytes for 256 bytes of a row, the echo server 256: there a ratio to
  the echo above 1 is due to the smaller response. The embedding model returns 8 kB for 8 bytes.
"""


def write_page(results: Results, path: Path, *, images: Path | None) -> None:
    """Write the page, and a plot for each case."""
    parts = [OPENING]
    verdicts = check_goals(results, GOALS)
    if verdicts:
        parts.append(f"## Goals\n\n{render_verdicts(verdicts)}\n")
    probe_table = probes.render(results)
    if probe_table:
        parts.append(f"## Start and idle streams\n\n{probe_table}\n")
    ramp_table = ramp.render(results)
    if ramp_table:
        parts.append(f"## Sustained load\n\n{ramp_table}\n")
    reload_table = reload.render(results)
    if reload_table:
        parts.append(f"## Reloads\n\n{reload_table}\n")
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
    parts.append(NO_GAIN)
    parts.append(
        METHOD.format(
            **results.run["effort"] | {"seconds": _seconds(results), "rounds": results.rounds}
        )
    )
    parts.append(f"## Machine and versions\n\n{_render_facts(results.run)}\n")
    path.write_text("\n".join(parts), "utf-8")


def _seconds(results: Results) -> str:
    """Durations of the closed-loop rounds; suites may differ."""
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
