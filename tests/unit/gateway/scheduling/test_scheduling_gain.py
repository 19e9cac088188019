"""Scheduling gain on a simulated fleet: fewer missed deadlines at the same load.

The simulation runs the scheduling code of the server in virtual time (`benchmarks/scheduling`), so
the counts are the same on every machine.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.scheduling import simulation
from benchmarks.scheduling.fleet import fleet
from iskander.config.models import LaneConfig
from iskander.foundation.clock import NS_PER_MS, NS_PER_S

ROBOTS, SECONDS, SEED = 14, 4.0, 1
BASE_NS, ROW_NS, ROWS_MAX = 6 * NS_PER_MS, NS_PER_MS // 5, 16
WARM_UP_NS = NS_PER_S


@pytest.fixture(scope="module")
def worlds() -> dict[str, Any]:
    """The same trace with three schedulers; run times have no noise."""
    trace = fleet(ROBOTS, SECONDS, SEED)
    unnamed = simulation.unnamed(trace)
    cases = {
        "fifo": ("fifo", unnamed),
        "deadline_aware": ("deadline_aware", unnamed),
        "held": ("deadline_aware", trace),
    }
    simulated = {}
    for name, (policy, arrivals) in cases.items():
        model = simulation.Model(BASE_NS, ROW_NS, ROWS_MAX, LaneConfig(policy=policy))
        simulated[name] = simulation.World([model], arrivals, seed=SEED).run(noise=0.0)
    return simulated


def missed(world: Any) -> int:
    return sum(outcome.is_missed for outcome in after_warm_up(world))


def after_warm_up(world: Any) -> list[Any]:
    return [o for o in world.outcomes if o.arrival.at_ns >= world.began_ns + WARM_UP_NS]


@pytest.mark.long
def test_deadline_aware_misses_fewer_deadlines_than_fifo(worlds: dict[str, Any]) -> None:
    assert missed(worlds["deadline_aware"]) < missed(worlds["fifo"])
    assert missed(worlds["held"]) < missed(worlds["fifo"])


def test_holds_for_named_clients_miss_fewer_deadlines_still(worlds: dict[str, Any]) -> None:
    """Batches are held for named clients only; nothing else differs."""
    assert sum(lane.holds for lane in worlds["deadline_aware"].lanes.values()) == 0
    assert sum(lane.holds for lane in worlds["held"].lanes.values()) > 0
    assert missed(worlds["held"]) < missed(worlds["deadline_aware"])


def test_no_held_request_misses_its_deadline(worlds: dict[str, Any]) -> None:
    held = [outcome for outcome in after_warm_up(worlds["held"]) if outcome.was_held]
    assert held
    assert [outcome for outcome in held if outcome.is_missed] == []


def test_every_request_is_answered_once(worlds: dict[str, Any]) -> None:
    for world in worlds.values():
        assert all(outcome.answers == 1 for outcome in world.outcomes)


def test_equal_seeds_give_equal_runs() -> None:
    model = simulation.Model(BASE_NS, ROW_NS, ROWS_MAX, LaneConfig())
    runs = [simulation.World([model], fleet(4, 1.0, SEED), seed=SEED).run() for _ in range(2)]
    assert runs[0].process.batches == runs[1].process.batches
    assert [o.ended_ns for o in runs[0].outcomes] == [o.ended_ns for o in runs[1].outcomes]
