"""Endurance run of a server: `python -m benchmarks.endurance --minutes 120 --out FOLDER`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.endurance.report import draw, judge, render
from benchmarks.endurance.session import Plan, Session
from benchmarks.runner import log_progress

RECORDS = "records.jsonl"
SUMMARY = "summary.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, judge, and write records, summary and plots.

    Returns:
        0, or 1 if a limit is broken.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endurance", description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--processes", type=int, default=1, help="of the gateway")
    parser.add_argument("--seed", type=int, default=0, help="of the disturbances")
    parser.add_argument("--leak", action="store_true",
                        help="a client keeps shared-memory regions: limits must break")  # fmt: skip
    parser.add_argument("--no-plots", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("build/endurance"), metavar="FOLDER")
    options = parser.parse_args(arguments)
    plan = Plan(options.minutes, options.processes, options.leak, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / RECORDS
    with path.open("w", encoding="utf-8") as out:
        records = Session(plan, out).run()
        findings = judge(records)
        for finding in findings:
            out.write(
                json.dumps({"kind": "verdict", **asdict(finding), "word": finding.word}) + "\n"
            )
    summary = render(records, findings)
    (options.out / SUMMARY).write_text(summary + "\n", "utf-8")
    print(summary)
    if not options.no_plots:
        draw(records, options.out)
    broken = [finding for finding in findings if finding.word == "broken"]
    for finding in broken:
        log_progress(f"broken: {finding.subject}: {finding.metric}")
    return int(bool(broken))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
