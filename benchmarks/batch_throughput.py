"""Large batches: the wide model, 64 float32 a row, with 8,192 and 65,536 rows on four streams.

Closed loop: each stream keeps `WINDOW` batches in flight, the same for both systems. The echo
server sends the 256 bytes of each row back; Iskander answers with 4. So a ratio above one says that
the answer is smaller, not that nothing was computed.
"""

from __future__ import annotations

from harness import Case, Target, make_parser, read_effort, run_benchmark, write_results
from load import Load
from workloads import WIDE

ROWS = (8_192, 65_536)
STREAMS = 4
WINDOW = 4
"""Batches of a stream in flight; 2 and 8 gave the same rows/s within the noise, for both."""


def main() -> None:
    """Measure and report."""
    arguments = make_parser("Throughput of large batches over Arrow Flight.", 5.0).parse_args()
    cases = [
        Case(
            name=f"{rows:,} rows, closed loop, 4 streams of {WINDOW} in flight",
            load=Load(workload=WIDE, rows=rows, streams=STREAMS, window=WINDOW),
            systems=("echo", "iskander"),
        )
        for rows in ROWS
    ]
    results = run_benchmark(
        "Large batches: wide, 64 float32 a row",
        WIDE,
        cases=cases,
        targets=[
            Target(case=case.name, metric="rows_per_s", bound=0.7, is_minimum=True)
            for case in cases
        ],
        effort=read_effort(arguments),
    )
    write_results(results, arguments.json)


if __name__ == "__main__":
    main()
