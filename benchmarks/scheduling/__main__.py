"""Missed deadlines of each policy by load, and the gain of held batches.

Simulated (`simulation`): the server's own scheduling code in virtual time, so the figures are the
same on every machine. Three scenarios, each with the same trace for every policy:

    fleet   about 20 robots, 50 requests of one row a second each, due in 10 to 30 ms
    mixed   the fleet, and a client that sends batches of 64 rows without a deadline
    two     two models on one worker, each with its own fleet

At a load of 1 the worker can just run all rows in full batches. The ablation is the fleet with and
without client names: clients without a name have no rhythm, and no batch is held for them.

    python -m benchmarks.scheduling --json build/scheduling.json
    python -m benchmarks.scheduling --plots benchmarks/images --page benchmarks/scheduling/README.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.scheduling.fleet import fleet, merged, with_bulk
from benchmarks.scheduling.simulation import Arrival, Model, World, unnamed
from benchmarks.tables import render_table
from iskander.config.models import LaneConfig
from iskander.foundation.clock import NS_PER_MS, NS_PER_S
from iskander.gateway.scheduling.lanes.policies import POLICIES

SECONDS, WARM_UP_S, SEEDS = 6.0, 1.0, (1, 2)
LOADS = (0.3, 0.5, 0.7, 0.9, 1.1, 1.3, 1.5)
TABLE_LOADS = (0.5, 0.9, 1.3)
LOAD_IN_FULL = 0.5
ROWS_MAX = 16
BASE_MS, ROW_MS = 5.0, 0.2
LOAD_OF_ROBOT = 50 * (BASE_MS / ROWS_MAX + ROW_MS) / 1000
ABLATION = ((10, 6.0), (14, 6.0), (20, 3.0), (20, 4.0), (20, 5.0), (20, 6.0), (20, 8.0))
"""Robots, and milliseconds of a batch; a row costs a thirtieth of that."""
ABLATION_SEEDS = (1, 2, 3, 4)
PAGE_BEGIN = "<!-- figures: python -m benchmarks.scheduling -->"
PAGE_END = "<!-- end of figures -->"

Figures = dict[str, float]


class Scenario(NamedTuple):
    """A simulated run of one policy at one load.

    Attributes:
        models: In the order of their keys.
        trace: Requests and their arrival times.
    """

    models: tuple[Model, ...]
    trace: list[Arrival]


def make_fleet(policy: str, load: float, seed: int, seconds: float) -> Scenario:
    """A fleet of robots on one model."""
    model = _model(policy, BASE_MS, ROW_MS)
    return Scenario((model,), fleet(_robots(load), seconds, seed))


def make_mixed(policy: str, load: float, seed: int, seconds: float) -> Scenario:
    """The fleet, and a client with large batches."""
    models, trace = make_fleet(policy, load, seed, seconds)
    return Scenario(models, with_bulk(trace, seconds, seed))


def make_two(policy: str, load: float, seed: int, seconds: float) -> Scenario:
    """Two models of half the cost, with a fleet for each."""
    model = _model(policy, BASE_MS / 2, ROW_MS / 2)
    traces = [fleet(_robots(load), seconds, seed, model=key) for key in (0, 1)]
    return Scenario((model, model), merged(*traces))


SCENARIOS: dict[str, Callable[[str, float, int, float], Scenario]] = {
    "fleet": make_fleet,
    "mixed": make_mixed,
    "two": make_two,
}
COLUMNS = {
    "missed": "missed %",
    "late": "late %",
    "refused": "rejected %",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "goodput_per_s": "in time/s",
    "lowest_wait_p99_ms": "lowest priority: wait p99 ms",
    "batch_rows": "rows a batch",
}


def main() -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(description="Simulate the scheduling policies.")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures to this file")
    parser.add_argument(
        "--plots", type=Path, metavar="FOLDER", help="write scheduling-*.svg to this folder"
    )
    parser.add_argument("--page", type=Path, metavar="PATH", help="replace the tables of this page")
    parser.add_argument("--processes", type=int, default=2, help="simulation processes")
    parser.add_argument("--quick", action="store_true", help="run each only for a moment")
    arguments = parser.parse_args()
    seconds, seeds = (2.0, SEEDS[:1]) if arguments.quick else (SECONDS, SEEDS)
    with ProcessPoolExecutor(arguments.processes) as executor:
        cells = [
            (name, policy, load) for name in SCENARIOS for policy in POLICIES for load in LOADS
        ]
        swept = executor.map(partial(sweep_cell, seeds=seeds, seconds=seconds), cells)
        ablation_seeds = seeds if arguments.quick else ABLATION_SEEDS
        ablated = executor.map(partial(ablate, seeds=ablation_seeds, seconds=seconds), ABLATION)
        sweep: dict[str, Any] = {name: {policy: {} for policy in POLICIES} for name in SCENARIOS}
        for (name, policy, load), figures in zip(cells, swept, strict=True):
            sweep[name][policy][str(load)] = figures
        ablation = list(ablated)
    results = {"sweep": sweep, "ablation": ablation}
    print(render(results))
    if arguments.page is not None:
        before, _, rest = arguments.page.read_text("utf-8").partition(PAGE_BEGIN)
        _, _, after = rest.partition(PAGE_END)
        page = f"{before}{PAGE_BEGIN}\n{render_for_page(results)}\n\n{PAGE_END}{after}"
        arguments.page.write_text(page, "utf-8")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    if arguments.plots is not None:
        from benchmarks.scheduling.plots import draw  # matplotlib is in the extra `bench` only.

        draw(results, arguments.plots)


def sweep_cell(
    cell: tuple[str, str, float], *, seeds: Sequence[int], seconds: float
) -> dict[str, float]:
    """The figures of one policy at one load."""
    name, policy, load = cell
    return sum_up(
        [_run(SCENARIOS[name](policy, load, seed, seconds), seed) for seed in seeds],
        seconds,
    )


def ablate(
    case: tuple[int, float], *, seeds: Sequence[int], seconds: float
) -> dict[str, float | dict[str, Figures]]:
    """The same fleet with fifo and deadline_aware, with and without client names."""
    robots, base_ms = case
    figures: dict[str, Figures] = {}
    for policy in ("fifo", "deadline_aware"):
        for rhythm in ("unnamed", "named"):
            worlds = []
            for seed in seeds:
                trace = fleet(robots, seconds, seed)
                trace = unnamed(trace) if rhythm == "unnamed" else trace
                model = _model(policy, base_ms, base_ms / 30)
                worlds.append(_run(Scenario((model,), trace), seed))
            figures[f"{policy}, {rhythm}"] = sum_up(worlds, seconds)
    return {"robots": robots, "base_ms": base_ms, "figures": figures}


def sum_up(worlds: Sequence[World], seconds: float) -> Figures:
    """Figures of the clients after the warm-up, over several runs."""
    outcomes = [
        outcome
        for world in worlds
        for outcome in world.outcomes
        if outcome.arrival.at_ns >= world.began_ns + WARM_UP_S * NS_PER_S
    ]
    due = [outcome for outcome in outcomes if outcome.is_due]
    missed = sum(outcome.is_missed for outcome in due)
    rejected = sum(bool(outcome.error) for outcome in due)
    served = [outcome for outcome in outcomes if not outcome.error]
    latencies_ns = sorted(outcome.latency_ns for outcome in served)
    lowest = max(outcome.arrival.terms.priority for outcome in outcomes)
    waits_ns = sorted(
        outcome.wait_ns for outcome in served if outcome.arrival.terms.priority == lowest
    )
    batches = [batch for world in worlds for batch in world.process.batches]
    return {
        "requests": len(outcomes),
        "missed": 100 * missed / len(due),
        "late": 100 * (missed - rejected) / len(due),
        "refused": 100 * rejected / len(due),
        "p50_ms": percentile(latencies_ns, 50) / NS_PER_MS,
        "p99_ms": percentile(latencies_ns, 99) / NS_PER_MS,
        "goodput_per_s": (len(due) - missed) / (seconds - WARM_UP_S) / len(worlds),
        "lowest_wait_p99_ms": percentile(waits_ns, 99) / NS_PER_MS,
        "batch_rows": sum(rows for _, _, rows in batches) / len(batches),
        "busy": sum(world.process.busy_ns for world in worlds) / (seconds * NS_PER_S * len(worlds)),
        "holds": sum(lane.holds for world in worlds for lane in world.lanes.values()),
        "missed_after_hold": sum(outcome.is_missed and outcome.was_held for outcome in due),
    }


def percentile(ascending: Sequence[int], percent: int) -> int:
    """The given percentile; 0 without values."""
    return ascending[(len(ascending) - 1) * percent // 100] if ascending else 0


def render(results: dict[str, Any]) -> str:
    """All tables."""
    parts = [
        _render_load(policies, f"{name}, load {load}", load)
        for name, policies in results["sweep"].items()
        for load in TABLE_LOADS
    ]
    return "\n\n".join([*parts, _render_ablation(results["ablation"])])


def render_for_page(results: dict[str, Any]) -> str:
    """The tables of README.md: missed deadlines, one load in full, held batches."""
    sweep = results["sweep"]
    headings = [f"{name}, {load}" for name in sweep for load in TABLE_LOADS]
    rows = [
        [
            policy,
            *(
                _figure(sweep[name][policy][str(load)]["missed"])
                for name in sweep
                for load in TABLE_LOADS
            ),
        ]
        for policy in POLICIES
    ]
    parts = [
        "Missed deadlines in percent, by scenario and load:",
        render_table(["policy", *headings], rows),
        f"The fleet at a load of {LOAD_IN_FULL}, with the wait of the lowest priority:",
        _render_load(sweep["fleet"], "fleet", LOAD_IN_FULL),
        f"The mixed scenario at a load of {LOAD_IN_FULL}; the lowest priority is the client with "
        "large batches:",
        _render_load(sweep["mixed"], "mixed", LOAD_IN_FULL),
        "With and without client names:",
        _render_ablation(results["ablation"]),
    ]
    return "\n\n".join(parts)


def _render_load(policies: dict[str, Any], title: str, load: float) -> str:
    rows = [
        [policy, *(_figure(figures[str(load)][key]) for key in COLUMNS)]
        for policy, figures in policies.items()
    ]
    return render_table([title, *COLUMNS.values()], rows)


def _render_ablation(cases: list[dict[str, Any]]) -> str:
    headings = list(cases[0]["figures"])
    rows = []
    for case in cases:
        figures = case["figures"]
        with_holds = figures["deadline_aware, named"]
        rows.append(
            [
                f"{case['robots']} robots, {case['base_ms']:g} ms",
                *(_figure(figures[heading]["missed"]) for heading in headings),
                f"{with_holds['holds']:,}",
                f"{with_holds['missed_after_hold']:,}",
            ]
        )
    return render_table(["missed %", *headings, "batches held", "missed after a hold"], rows)


def _run(scenario: Scenario, seed: int) -> World:
    return World(scenario.models, scenario.trace, seed=seed).run()


def _model(policy: str, base_ms: float, row_ms: float) -> Model:
    lane = LaneConfig(policy=policy)
    return Model(int(base_ms * NS_PER_MS), int(row_ms * NS_PER_MS), ROWS_MAX, lane)


def _robots(load: float) -> int:
    return max(round(load / LOAD_OF_ROBOT), 1)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


if __name__ == "__main__":
    main()
