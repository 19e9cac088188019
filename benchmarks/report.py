"""Writes `benchmarks/README.md` from results files: machine, versions, method, tables, targets.

python benchmarks/flight_latency.py --json latency.json
python benchmarks/batch_throughput.py --json throughput.json
python benchmarks/report.py latency.json throughput.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tables import render_results, render_table, render_targets
from workloads import FOLDER

OPENING = """# Benchmarks

<!-- Written by benchmarks/report.py from results files; change that and not this page. -->

What Iskander costs beside Arrow Flight itself: every case is run against a bare pyarrow Flight
server that sends each batch back (`echo`), on the same machine, in the same run. Read the ratios;
the absolute figures are this machine's, which clients and servers share.

    make bench
"""

METHOD = """## Method

- `direct` is ONNX Runtime without any server: I/O bindings used again and again, one intra-op
  thread, no spinning, a calling thread for each stream. `echo` is `echo_server.py`. `iskander` is
  `iskander-gateway` with the configuration under `configs/`: one worker, `intra_threads = 1`, all
  else at its default.
- Each server has processes of its own on 127.0.0.1. The load is one client process with a thread
  and a TCP connection for each stream, and the same code for every server. Four streams from one
  process cost less client CPU per request than a process for each.
- Closed loop of small batches: a stream sends its next batch when the last is answered. Closed loop
  of large ones: a thread writes and another reads, with a fixed number of batches in flight.
  Open loop: batches are sent at fixed times, evenly over the streams; a latency counts from the
  time when the batch should have been sent. `sent late` is the client's share of it, `dropped` are
  batches without an answer.
- Every figure is the median of {rounds} rounds of {seconds:g} s, each after {warm_up_seconds:g} s
  of warm-up that is not counted. In a round the systems take turns, and the one to begin changes.
  A ratio is taken within each round, and the median of those is held against its target.
- CPU is user and system time of the processes, from the kernel's accounting: of the echo server or
  the gateway, of the workers, of the client. It has steps of 10 ms, so it says nothing in a run
  with `--quick`.
- Before anything is measured, the scores of a batch are compared with the model's own.
- The wide model answers 256 bytes of a row with 4, and the echo server with 256: there a ratio
  above 1 means a smaller answer.
"""


def main() -> None:
    """Read results, write the page."""
    parser = argparse.ArgumentParser(description="Write the benchmarks' README from results.")
    parser.add_argument("results", type=Path, nargs="+", help="files written with --json")
    parser.add_argument("--output", type=Path, default=FOLDER / "README.md", metavar="PATH")
    arguments = parser.parse_args()
    runs = [json.loads(path.read_text("utf-8")) for path in arguments.results]
    arguments.output.write_text(render_page(runs), "utf-8")


def render_page(runs: list[dict[str, Any]]) -> str:
    """The whole page.

    Raises:
        SystemExit: The runs differ in machine, versions or effort, so that one page cannot
            speak for them; commits may differ, and all are named.
    """
    commits = list(dict.fromkeys(run["versions"].pop("commit") for run in runs))
    first = runs[0]
    for run in runs[1:]:
        differing = [key for key in ("machine", "versions", "effort") if run[key] != first[key]]
        if differing:
            raise SystemExit(f"the results differ in {', '.join(differing)}: run them again")
    targets = [target for run in runs for target in run["targets"]]
    parts = [
        OPENING,
        f"## Target ratios\n\n{render_targets(targets)}\n",
        *(render_results({**run, "targets": []}) + "\n" for run in runs),
        METHOD.format(**first["effort"]),
        f"## Machine and versions\n\n{_render_facts(first, commits)}\n",
    ]
    return "\n".join(parts)


def _render_facts(run: dict[str, Any], commits: list[str]) -> str:
    machine, versions = run["machine"], run["versions"]
    rows = [
        ["CPU", machine["cpu"]],
        ["cores", str(machine["cores"])],
        ["memory", f"{machine['memory_gib']} GiB"],
        ["system", machine["system"]],
        *([name, text] for name, text in versions.items()),
        ["commit", ", ".join(commits)],
    ]
    return render_table(["what", "value"], rows)


if __name__ == "__main__":
    main()
