"""Benchmark cases, their suites, and the goals."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.load import Load
from benchmarks.workloads import EMBEDDING, POLICY, TWO_TOWER, WIDE, Workload

CLIENTS = (1, 4, 16)
OPEN_CLIENTS = 16
RATES_PER_S = (500, 1000, 3000)
OPEN_SECONDS, SUSTAINED_SECONDS = 30.0, 90.0
BARE = ("direct", "echo", "iskander")
PEERS = ("triton", "mosec", "mlserver", "inferential")
OTHERWISE = ("echo-default", "iskander-default", "iskander-oip-default", "triton-polled")
WIDE_PEERS = ("triton", "triton-serialized", "triton-shared", "mosec")
EVERYTHING = (*BARE, *PEERS)
SERVERS = ("echo", "iskander", *PEERS)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A load on several systems.

    Attributes:
        name: Name in tables and goals.
        systems: In the order of the first round.
        seconds: Measured time of each system and round; None for the run's setting.
    """

    name: str
    load: Load
    systems: tuple[str, ...]
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A bound on a figure of Iskander, or on its ratio to another system in the same round.

    Attributes:
        case: Name of the case.
        metric: Name of the figure.
        baseline: The other system; empty for the figure itself.
        system: Iskander's variant.
        bound: Lower or upper bound, by `sense`.
    """

    case: str
    metric: str
    baseline: str = ""
    system: str = "iskander"
    sense: Literal["least", "most"] = "least"
    bound: float


def closed(workload: Workload, rows: int, clients: int, systems: tuple[str, ...]) -> Case:
    """A closed loop: every client sends its next batch after the last response."""
    name = f"{_LABELS[workload.model]}, {_rows(rows)}, {clients} client{'s' * (clients > 1)}"
    return Case(
        name=name, load=Load(workload=workload, rows=rows, clients=clients), systems=systems
    )


def opened(per_s: int, seconds: float, systems: tuple[str, ...]) -> Case:
    """Poisson arrivals of 128 rows for the two-tower model."""
    load = Load(
        workload=TWO_TOWER, rows=128, clients=OPEN_CLIENTS, arrivals_per_s=per_s, pattern="poisson"
    )
    name = f"two-tower, 128 rows, {per_s:,} arrivals/s for {seconds:.0f} s"
    return Case(name=name, load=load, systems=systems, seconds=seconds)


def _rows(rows: int) -> str:
    return f"{rows:,} row{'s' * (rows > 1)}"


_LABELS = {
    TWO_TOWER.model: "two-tower",
    WIDE.model: "wide",
    EMBEDDING.model: "embedding",
    POLICY.model: "policy of 20 ms",
}


def _goal_cases() -> list[Case]:
    peers = ("triton", "mosec")
    wide = ("echo", "iskander", "iskander-shared", *WIDE_PEERS)
    return [
        closed(TWO_TOWER, 128, 4, (*BARE, "iskander-oip", *peers, *OTHERWISE)),
        opened(1000, OPEN_SECONDS, ("echo", "iskander", "iskander-busy", *peers)),
        closed(TWO_TOWER, 1, 4, ("echo", "iskander", *peers)),
        closed(TWO_TOWER, 1024, 4, (*BARE, *peers)),
        closed(WIDE, 8_192, 4, wide),
        closed(WIDE, 65_536, 4, wide),
        closed(EMBEDDING, 1024, 4, ("echo", "iskander", *peers)),
        closed(POLICY, 1, 8, ("iskander-inferential", "inferential")),
    ]


def _matrix() -> list[Case]:
    shapes = [(TWO_TOWER, rows) for rows in (1, 128, 1024)]
    shapes += [(WIDE, rows) for rows in (1, 128, 8_192, 65_536)]
    shapes += [(EMBEDDING, 1024)]
    systems = (*EVERYTHING[:4], "triton-serialized", *EVERYTHING[4:])
    return [closed(*shape, clients, systems) for shape in shapes for clients in CLIENTS]


SUITES: dict[str, list[Case]] = {
    "goals": _goal_cases(),
    "small": [
        closed(TWO_TOWER, 128, 1, BARE),
        closed(TWO_TOWER, 128, 4, (*BARE, "iskander-oip", *OTHERWISE[:2])),
        closed(POLICY, 1, 8, ("iskander-inferential", "inferential")),
        *(opened(rate, OPEN_SECONDS, ("echo", "iskander")) for rate in RATES_PER_S[:2]),
    ],
    "large": [closed(WIDE, rows, 4, ("echo", "iskander")) for rows in (8_192, 65_536)],
    "matrix": _matrix(),
    "open": [opened(rate, OPEN_SECONDS, SERVERS) for rate in RATES_PER_S],
    "sustained": [
        opened(rate, SUSTAINED_SECONDS, ("echo", "iskander", "triton", "mosec"))
        for rate in RATES_PER_S
    ],
}
"""By name: the goals; Iskander next to bare Flight and bare ONNX Runtime; every shape and system;
open loops; and long open loops.
"""

_SMALL, _ONE_ROW = "two-tower, 128 rows, 4 clients", "two-tower, 1 row, 4 clients"
_LARGE, _EMBEDDING = "two-tower, 1,024 rows, 4 clients", "embedding, 1,024 rows, 4 clients"
_POLICY = "policy of 20 ms, 1 row, 8 clients"
_OPEN = "two-tower, 128 rows, 1,000 arrivals/s for 30 s"
_WIDE = tuple(f"wide, {rows} rows, 4 clients" for rows in ("8,192", "65,536"))


def _goal(case: str, metric: str, baseline: str, bound: float, system: str = "iskander") -> Goal:
    sense: Literal["least", "most"] = "least" if metric.endswith("_per_s") else "most"
    return Goal(
        case=case, metric=metric, baseline=baseline, system=system, sense=sense, bound=bound
    )


GOALS = [
    _goal(_SMALL, "requests_per_s", "echo", 0.33),
    _goal(_SMALL, "front_cpu_us", "echo", 3.0),
    _goal(_SMALL, "requests_per_s", "triton", 1.7),
    _goal(_SMALL, "requests_per_s", "mosec", 1.3),
    _goal(_SMALL, "p99_us", "triton", 0.6),
    _goal(_SMALL, "p99_us", "mosec", 0.9),
    _goal(_SMALL, "server_cpu_us", "mosec", 0.9),
    _goal(_OPEN, "p50_us", "triton", 0.6),
    _goal(_OPEN, "p50_us", "mosec", 0.9),
    _goal(_OPEN, "p99_us", "triton", 0.4),
    _goal(_OPEN, "p99_us", "mosec", 0.7),
    _goal(_OPEN, "drops", "", 0.0),
    _goal(_OPEN, "p50_us", "mosec", 0.9, "iskander-busy"),
    _goal(_OPEN, "p99_us", "mosec", 0.7, "iskander-busy"),
    _goal(_ONE_ROW, "requests_per_s", "triton", 1.6),
    _goal(_ONE_ROW, "requests_per_s", "mosec", 1.2),
    _goal(_LARGE, "requests_per_s", "triton", 1.8),
    _goal(_LARGE, "requests_per_s", "mosec", 1.6),
    _goal(_LARGE, "requests_per_s", "direct", 0.6),
    *(
        _goal(case, "rows_per_s", baseline, bound, system)
        for case in _WIDE
        for system in ("iskander", "iskander-shared")
        for baseline, bound in (
            ("echo", 0.9),
            ("triton", 4.0),
            ("triton-serialized", 2.0),
            ("mosec", 2.5),
        )
    ),
    _goal(_EMBEDDING, "rows_per_s", "triton", 2.0),
    _goal(_EMBEDDING, "rows_per_s", "mosec", 2.0),
    *(
        _goal(_SMALL, metric, baseline, bound, system)
        for system, baseline in (
            ("iskander-oip", "triton"),
            ("iskander-oip", "triton-polled"),
            ("iskander-oip-default", "triton"),
        )
        for metric, bound in (("requests_per_s", 1.5), ("p50_us", 0.7))
    ),
    _goal(_POLICY, "p50_us", "inferential", 0.5, "iskander-inferential"),
]


def with_processes(case: Case, processes: int) -> Case:
    """The same case with `processes` client processes, at most one for each client."""
    load = replace(case.load, processes=min(processes, case.load.clients))
    return replace(case, load=load)
