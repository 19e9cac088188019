"""Stats of the gateway, and the tables of `iskander stats`."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from support.observed import MIB, make_lane, make_worker, observe

from iskander.cli.tables import COLUMNS_MAX, render_stats, render_table
from iskander.gateway.repository.models import Failure
from iskander.gateway.scheduling.lanes.arrivals import SAMPLES_LEAST
from iskander.gateway.scheduling.lanes.cost import CostModel
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.supervision.lifecycle import Event, State
from iskander.gateway.supervision.worker import SlotPlan, Worker
from iskander.gateway.telemetry.metrics.sources import MetricSources
from iskander.gateway.telemetry.status.stats import Stats
from iskander.gateway.telemetry.status.stats_reader import CADENCES_MAX, read_stats
from iskander.interprocess.memory.arena import Arena
from iskander.interprocess.memory.backing import Backing

NS_PER_MS = 1_000_000


def collect(observed: MetricSources) -> dict[str, Any]:
    """Returns the stats after a JSON round trip, as a client receives them."""
    response: dict[str, Any] = msgspec.json.decode(
        msgspec.json.encode(asyncio.run(read_stats(observed)))
    )
    return response


def render(observed: MetricSources) -> list[str]:
    """Returns the lines of `iskander stats`."""
    return render_stats(msgspec.convert(collect(observed), Stats))


def lane_of(lane: Lane) -> dict[str, Any]:
    result: dict[str, Any] = collect(observe([lane]))["lanes"][lane.title]
    return result


def test_gateway_stats() -> None:
    arena = Arena(2 * MIB)
    arena.lease(1)
    response = collect(
        observe([], streams={1, 2}, counts=Counter(late_messages=3), input_arena=arena)
    )

    assert (response["pid"], response["streams"], response["late_messages"]) == (os.getpid(), 2, 3)
    assert (response["ready"], response["reasons"]) == (True, [])
    assert response["input_arena"] == {
        "capacity_bytes": 2 * MIB,
        "leased_bytes": 4096,
        "leases": 1,
        "huge_bytes": 0,
        "locked": False,
        "notices": [],
    }


def test_models_without_a_lane_are_listed() -> None:
    sources = observe([make_lane("ok"), make_lane("idle", is_ready=False)])
    sources.models.failures["broken", "4"] = Failure("no such operator", is_required=True)

    response = collect(sources)

    assert [(each["name"], each["state"], each["lane"]) for each in response["models"]] == [
        ("ok", "READY", "ok/1"),
        ("idle", "UNAVAILABLE", "idle/1"),
        ("broken", "UNAVAILABLE", ""),
    ]
    assert response["models"][2]["reason"] == "no such operator"
    assert list(response["lanes"]) == ["ok/1", "idle/1"]


def test_stats_without_times_have_all_other_values() -> None:
    """The page reads these."""
    lane = make_lane(requests=7, refused__queue_full=2)
    lane.metrics.wait_ns.record(NS_PER_MS)
    lane.metrics.steps_ns["normalize"] = lane.metrics.wait_ns

    (full,) = asyncio.run(read_stats(observe([lane]))).lanes.values()
    (rest,) = asyncio.run(read_stats(observe([lane]), has_times=False)).lanes.values()

    assert full.latency_ms["wait"].count == full.steps_ms["normalize"].count == 1
    assert rest == replace(full, latency_ms={}, latency_counts={}, steps_ms={})


def test_response_of_an_earlier_version_is_read() -> None:
    """Its workers have no heartbeat, CPU time and size of the output arena."""
    response = collect(observe([make_lane()]))
    for name in ("process", "receive", "models", "gpus"):
        del response[name]
    for name in ("heartbeat_s", "cpu_s", "output_capacity_bytes", "output_leases"):
        del response["workers"][0][name]

    stats = msgspec.convert(response, Stats)

    assert (stats.process, stats.models, stats.workers[0].heartbeat_s) == (0, [], None)


def test_reader_of_stats_yields_after_each_lane() -> None:
    lanes = [make_lane(f"m{index}") for index in range(64)]
    turns = 0

    async def run() -> None:
        nonlocal turns
        task = asyncio.ensure_future(read_stats(observe(lanes)))
        while not task.done():
            turns += 1
            await asyncio.sleep(0)

    asyncio.run(run())

    assert turns >= len(lanes)


def test_arena_backing_and_notices() -> None:
    worker = make_worker(3)
    worker.backing = Backing(4 * MIB, 2 * MIB, is_locked=True, node=1)
    worker.notices.extend(["no policy", "not pinned"])
    backing = Backing(8 * MIB, 6 * MIB, is_locked=True, notices=("too few",))

    response = collect(observe([], [worker], input_backing=backing))

    arena, (result,) = response["input_arena"], response["workers"]
    assert (arena["huge_bytes"], arena["locked"], arena["notices"]) == (6 * MIB, True, ["too few"])
    assert (result["output_huge_bytes"], result["output_locked"]) == (2 * MIB, True)
    assert (result["output_node"], result["notices"]) == (1, ["no policy", "not pinned"])
    assert render_stats(msgspec.convert(response, Stats))[-3:] == [
        "input arena: too few",
        "worker 3: no policy",
        "worker 3: not pinned",
    ]


def test_worker_placement() -> None:
    worker = Worker(SlotPlan(0, 1, (4, 5, 12, 13), 1, cores=2, domains=(2,)))

    (response,) = collect(observe([], [worker]))["workers"]

    assert (response["group"], response["cpus"], response["node"]) == (1, [4, 5, 12, 13], 1)
    assert (response["cores"], response["domains"]) == (2, [2])


def test_readiness_and_reasons() -> None:
    response = collect(observe([make_lane("a"), make_lane("b", is_ready=False)]))

    assert response["ready"] is False
    assert [reason.partition(":")[0] for reason in response["reasons"]] == ["model `b/1`"]
    assert [response["lanes"][title]["ready"] for title in ("a/1", "b/1")] == [True, False]


def test_lane_counts_are_grouped() -> None:
    lane = lane_of(
        make_lane(
            requests=9,
            refused__queue_full=2,
            refused__deadline_unreachable=1,
            failed__poisoned=4,
            closed__idle=7,
            deadline__hit=5,
        )
    )

    assert (lane["requests"], lane["batches"]) == (9, 0)
    assert lane["refused"] == {"queue_full": 2, "deadline_unreachable": 1}
    assert lane["failed"] == {"poisoned": 4}
    assert lane["closed"] == {"idle": 7}
    assert lane["deadlines"] == {"hit": 5, "missed": 0}


def test_latencies_are_in_milliseconds() -> None:
    lane = make_lane()
    for value in range(1, 101):
        lane.metrics.wait_ns.record(value * NS_PER_MS)
        lane.metrics.run_ns.record(5 * NS_PER_MS)

    result = lane_of(lane)

    wait = result["latency_ms"]["wait"]
    assert (wait["count"], wait["mean"], wait["max"]) == (100, 50.5, 100)
    assert wait["p50"] == pytest.approx(50, abs=1)
    assert wait["p99"] == pytest.approx(99, abs=1)
    assert result["latency_ms"]["run"]["p99"] == 5
    assert result["latency_ms"]["total"]["count"] == 0
    assert result["run_ms"] == 500


def test_batch_sizes_are_counted_by_upper_bound() -> None:
    lane = make_lane()
    for rows in (1, 100, 128, 129, 1 << 21):
        lane.metrics.batch_rows.record(rows)

    rows = lane_of(lane)["batch_rows"]

    assert rows["up_to"] == {"1": 1, "128": 2, "256": 1, "more": 1}
    assert (rows["count"], rows["min"], rows["max"]) == (5, 1, 1 << 21)


def test_cost_model_of_each_worker() -> None:
    lane = make_lane()
    lane.costs[0] = CostModel()
    lane.costs[2] = cost = CostModel()
    for rows in (100, 200, 300, 400):
        cost.observe(rows, 1_000_000 + rows * 2000)

    costs = lane_of(lane)["cost"]

    assert costs["0"] == {"row_us": 0, "base_us": 0, "samples": 0}
    assert costs["2"]["row_us"] == pytest.approx(2, rel=0.01)
    assert costs["2"]["base_us"] == pytest.approx(1000, rel=0.01)
    assert costs["2"]["samples"] == 4


def test_only_clients_with_the_most_samples_are_listed() -> None:
    lane = make_lane()
    for index in range(50):
        for turn in range(SAMPLES_LEAST + 1 + index):
            lane.arrivals.observe(f"client-{index}", turn * 20 * NS_PER_MS, 0)

    result = lane_of(lane)

    assert result["cadence_clients"] == 50
    assert len(result["cadence"]) == CADENCES_MAX
    assert result["cadence"][0] == {"client": "client-49", "period_ms": 20, "samples": 53}


def test_worker_stats_and_history() -> None:
    worker = make_worker(1, State.LOOPING)
    worker.exit_counts["crash"] = 5
    worker.batches = 12

    (response,) = collect(observe([], [worker]))["workers"]

    assert (response["index"], response["state"], response["batches"]) == (1, "crash loop", 12)
    assert (response["incarnation"], response["pid"], response["starts"]) == (8, os.getpid(), 1)
    assert (response["in_flight"], response["credits"], response["ends"]) == (0, 2, {"crash": 5})
    assert response["resident_bytes"] > MIB
    assert response["history"][0].endswith(" ms ago: attached, loading")


def busy_lane(name: str) -> Lane:
    """A lane with the largest values that the table must fit."""
    lane = make_lane(
        name,
        "20240131",
        requests=123_456_789_012,
        refused__queue_full=98_765_432,
        refused__deadline_unreachable=12,
        failed__poisoned=99_999,
        deadline__hit=123_456_789_012,
        deadline__missed=99_999_999,
        closed__full=1_234_567_890,
    )
    for histogram in (lane.metrics.wait_ns, lane.metrics.run_ns, lane.metrics.total_ns):
        histogram.record(86_400_000 * NS_PER_MS)
    lane.metrics.batch_rows.record(1 << 20)
    lane.costs[0] = cost = CostModel()
    cost.observe(1 << 20, 86_400_000 * NS_PER_MS)
    return lane


def test_table_of_a_busy_server_fits_100_columns() -> None:
    worker = make_worker(999, State.LOOPING)
    worker.batches = 123_456_789_012
    worker.starts = 123_456
    worker.pid = 4_194_304
    worker.history.append((0, Event.LOAD_FAILED, State.LOOPING))
    lanes = [busy_lane("two-tower-ranker-with-a-long-name"), busy_lane("ids")]

    lines = render(observe(lanes, [worker]))

    assert max(map(len, lines)) <= COLUMNS_MAX
    assert any(line.startswith("two-tower-..20240131") for line in lines)


def test_counts_have_at_most_five_digits() -> None:
    """Larger counts have a unit letter."""
    shown = [
        render(observe([make_lane("ids", requests=count)]))[4].split()[5]
        for count in (0, 99_999, 100_000, 99_999_999, 100_000_000, 123_456_789_012_345)
    ]

    assert shown == ["0", "99999", "100k", "99999k", "100M", "123T"]


def test_table_shows_readiness_rejections_and_history() -> None:
    lane = make_lane("ids", requests=12, refused__queue_full=3, closed__idle=4)
    text = "\n".join(render(observe([lane, make_lane("b", is_ready=False)])))

    assert "not ready: model `b/1`: its workers have not attached yet" in text
    assert "ids/1: rejected: queue_full 3" in text
    assert "ids/1: batches closed: idle 4" in text
    assert "attached, loading" in text


def test_table_of_an_idle_server() -> None:
    lines = render(observe([make_lane("ids")]))

    assert lines[1] == "ready"
    assert [line for line in lines if line.startswith("ids/1")][1].split() == (
        ["ids/1", "0", "0", "-", "-", "-", "-", "-"]
    )


def test_table_aligns_text_left_and_numbers_right() -> None:
    assert render_table(("a", "n"), [("long", "1"), ("b", "234")], numbers_from=1) == [
        "a       n",
        "long    1",
        "b     234",
    ]
    assert render_table(("a", "n"), [("long", "1")]) == ["a     n", "long  1"]
