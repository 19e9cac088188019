"""Small batches: the two-tower model with 128 rows, one stream and four, and at fixed arrivals.

Closed loop: each stream sends its next batch when the last one has been answered. Open loop:
batches are sent at fixed times whatever is unanswered, and a latency counts from the intended time.
`direct` is ONNX Runtime in the client's own process, with bindings used again and again and a
thread for each stream; `echo` is a bare Flight server that sends every batch back.
"""

from __future__ import annotations

from harness import Case, Target, make_parser, read_effort, run_benchmark, write_results
from load import Load
from workloads import TWO_TOWER

ROWS = 128
STREAMS = 4
ARRIVALS_PER_S = (500, 1000)
CLOSED = "128 rows, closed loop, 4 streams"


def main() -> None:
    """Measure and report."""
    parser = make_parser("Latency of small batches over Arrow Flight.", seconds=5.0)
    parser.add_argument(
        "--arrivals",
        type=int,
        nargs="*",
        default=ARRIVALS_PER_S,
        metavar="PER_SECOND",
        help="arrivals of the open loops, over 4 streams",
    )
    arguments = parser.parse_args()
    results = run_benchmark(
        "Small batches: two-tower, 128 rows",
        TWO_TOWER,
        cases=_cases(arguments.arrivals),
        targets=[
            Target(case=CLOSED, metric="requests_per_s", bound=0.33, is_minimum=True),
            Target(case=CLOSED, metric="front_cpu_us", bound=3.0, is_minimum=False),
        ],
        effort=read_effort(arguments),
    )
    write_results(results, arguments.json)


def _cases(arrivals_per_s: list[int]) -> list[Case]:
    everything = ("direct", "echo", "iskander")
    one = Load(workload=TWO_TOWER, rows=ROWS)
    four = Load(workload=TWO_TOWER, rows=ROWS, streams=STREAMS)
    cases = [
        Case(name="128 rows, closed loop, 1 stream", load=one, systems=everything),
        Case(name=CLOSED, load=four, systems=everything),
    ]
    for total in arrivals_per_s:
        load = Load(workload=TWO_TOWER, rows=ROWS, streams=STREAMS, arrivals_per_s=total / STREAMS)
        name = f"128 rows, open loop, {total:,} arrivals/s over 4 streams"
        cases.append(Case(name=name, load=load, systems=("echo", "iskander")))
    return cases


if __name__ == "__main__":
    main()
