"""Attacks on the gateway, and on gRPC's C core: `python -m benchmarks.hostile`."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.hostile.attacks import attacks_of, rows
from benchmarks.hostile.measure import CORE, Effort, measure
from benchmarks.hostile.report import missed, render
from benchmarks.runner import log_progress

SYSTEMS = ("iskander", "interpreted", CORE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the selected rows, and print their table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__)
    parser.add_argument("--only", default="", metavar="REGEX", help="of row names")
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=["iskander", CORE])
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="before, during and after an attack, each"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="run each only for a moment")
    parser.add_argument("--receive-bytes", type=int, default=Effort.receive_bytes,
                        help="receive budget; 0: the server has no such setting")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("build/hostile.jsonl"), metavar="PATH")
    options = parser.parse_args(arguments)
    seconds = 1.0 if options.short else options.seconds
    effort = Effort(seconds, options.receive_bytes, is_settled=not options.short)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    records = []
    with options.out.open("a") as out:
        for _ in range(options.rounds):
            for row in rows():
                if not re.search(options.only, row):
                    continue
                for system in options.systems:
                    if system == CORE and not all(each.is_flight for each in attacks_of(row)):
                        continue
                    record = measure(system, row, effort)
                    records.append(record)
                    out.write(json.dumps(record) + "\n")
                    out.flush()
                    during = record["during"]
                    log_progress(f"{row}, {system}: p99 {record['before']['p99']:.1f} before, "
                        f"{during['p99']:.1f} during, longest {during['longest']:.1f} ms, "
                        f"opened {during['opened']:.0f}, probes {during['probes']:.0f} ms, "
                        f"{record['left_bytes'] >> 20} of {record['peak_bytes'] >> 20} MiB left, "
                        f"{len(during['errors'])} errors, missed: {missed([record], [])}, "
                        f"{[(e['statuses'], e['message']) for e in record['attackers']]}"
                        f"{during['errors'][:1]}")  # fmt: skip
    print(render(records))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
