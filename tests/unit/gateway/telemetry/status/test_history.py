"""History of models: samples, gaps, restarts of counters, and bounds."""

from __future__ import annotations

import asyncio

import pytest
from support.observed import make_lane

from iskander.foundation.clock import NS_PER_MS
from iskander.gateway.telemetry.status import history_sampler
from iskander.gateway.telemetry.status.history import (
    INTERVAL_NS,
    INTERVAL_S,
    MODELS_MAX,
    SAMPLES,
    SERIES,
    History,
    ModelHistory,
    complete_tick,
    tick_at,
)
from iskander.gateway.telemetry.status.history_sampler import HistorySampler


def test_sample_is_the_difference_of_two_readings() -> None:
    lane = make_lane(requests=1000, rows=5000)
    history = ModelHistory(0)
    history.sample(lane, 1, INTERVAL_NS)
    lane.counts["requests"] += 10
    lane.counts["rows"] += 70
    for _ in range(10):
        lane.metrics.total_ns.record(2 * NS_PER_MS)

    history.sample(lane, 2, 2 * INTERVAL_NS)

    assert history.latest("requests_per_s") == 10 / INTERVAL_S
    assert history.latest("rows_per_s") == 70 / INTERVAL_S
    # In the bucket of 1.5 to 2 ms.
    assert history.latest("total_p50_ms") == pytest.approx(1.75)
    assert history.latest("total_p99_ms") == pytest.approx(1.995)
    assert history.latest("wait_p50_ms") is None, "no request has waited"


def test_rate_uses_the_elapsed_time_of_a_late_timer() -> None:
    lane, history = make_lane(), ModelHistory(0)
    history.sample(lane, 1, INTERVAL_NS)
    lane.counts["requests"] += 10

    history.sample(lane, 3, 3 * INTERVAL_NS)

    assert history.latest("requests_per_s") == 10 / INTERVAL_S / 2


def test_series_ends_at_the_tick_and_has_gaps() -> None:
    lane, history = make_lane(), ModelHistory(0)
    for tick in (1, 2, 5):
        lane.counts["requests"] += INTERVAL_S * tick
        history.sample(lane, tick, tick * INTERVAL_NS)

    values = history.series(7)["requests_per_s"]

    assert len(values) == SAMPLES
    assert values[-7:] == [1, 2, None, None, pytest.approx(5 / 3, abs=0.001), None, None]
    assert set(values[:-7]) == {None}


def test_series_is_a_ring() -> None:
    lane, history = make_lane(), ModelHistory(0)
    for tick in range(1, SAMPLES + 11):
        lane.counts["requests"] += INTERVAL_S * tick
        history.sample(lane, tick, tick * INTERVAL_NS)

    assert history.series(SAMPLES + 10)["requests_per_s"] == list(range(11, SAMPLES + 11))
    assert history.series(10 * SAMPLES)["requests_per_s"] == [None] * SAMPLES


def test_long_gap_leaves_no_old_sample() -> None:
    lane, history = make_lane(), ModelHistory(0)
    for tick in range(1, SAMPLES):
        history.sample(lane, tick, tick * INTERVAL_NS)

    history.sample(lane, 5 * SAMPLES, 5 * SAMPLES * INTERVAL_NS)

    assert history.series(5 * SAMPLES)["requests_per_s"] == [None] * (SAMPLES - 1) + [0]


def test_lane_with_new_counters_counts_from_zero() -> None:
    """An unloaded and loaded model is a new lane without the counters of the old one."""
    history = ModelHistory(0)
    history.sample(make_lane(requests=1000), 1, INTERVAL_NS)

    history.sample(make_lane(requests=4), 2, 2 * INTERVAL_NS)

    assert history.latest("requests_per_s") == 4 / INTERVAL_S


def test_number_of_models_is_bounded_and_removed_models_make_space() -> None:
    history = History()
    lanes = [make_lane(f"m{index}") for index in range(MODELS_MAX + 2)]
    for lane in lanes:
        history.sample(lane, 1, INTERVAL_NS)
    assert len(history.models) == MODELS_MAX
    assert ("m0", "1") in history.models

    history.keep({(lane.model.name, lane.model.version) for lane in lanes[1:]})
    history.sample(lanes[-1], 2, 2 * INTERVAL_NS)

    assert ("m0", "1") not in history.models
    assert (f"m{MODELS_MAX + 1}", "1") in history.models


def test_memory_of_a_model_is_fixed() -> None:
    lane, history = make_lane(), ModelHistory(0)
    before = {name: len(values) for name, values in history._values.items()}
    for tick in range(1, 3 * SAMPLES):
        history.sample(lane, tick, tick * INTERVAL_NS)
    assert {name: len(values) for name, values in history._values.items()} == before
    assert set(before) == set(SERIES)


def test_tick_of_an_early_or_late_timer_is_the_same() -> None:
    due_ns = 7 * INTERVAL_NS
    assert tick_at(due_ns - NS_PER_MS) == tick_at(due_ns) == tick_at(due_ns + 5 * NS_PER_MS) == 7
    assert complete_tick(due_ns + NS_PER_MS) == 6, "its timer may be late"
    assert complete_tick(due_ns + INTERVAL_NS // 2) == 7


def test_sampler_samples_all_lanes_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_sampler, "INTERVAL_NS", NS_PER_MS)
    monkeypatch.setattr(history_sampler, "tick_at", lambda now: now // NS_PER_MS)
    lanes = [make_lane(f"m{index}") for index in range(20)]

    async def run() -> None:
        sampler = HistorySampler(lanes)
        sampler.start()
        while len(sampler.history.models) < len(lanes):
            await asyncio.sleep(0.001)
        lanes.pop()
        while len(sampler.history.models) > len(lanes):
            await asyncio.sleep(0.001)
        sampler.stop()
        await asyncio.sleep(0.01)
        assert all(
            not task.get_coro().__qualname__.endswith("_run") for task in asyncio.all_tasks()
        )

    asyncio.run(asyncio.wait_for(run(), 10))
