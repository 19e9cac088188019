"""Metrics: declared as Prometheus wants them, read where counted, on a page that parses."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from support.observed import MIB, make_lane, make_worker, observe

from iskander import __version__
from iskander.contract.backend_manifest import STEPS_MAX
from iskander.memory.arena import Arena
from iskander.memory.backing import Backing
from iskander.scheduling.batcher import Reason
from iskander.scheduling.cost import CostModel
from iskander.supervision.lifecycle import State
from iskander.telemetry import metrics
from iskander.telemetry.metric_sources import MetricSources
from iskander.telemetry.metrics import SCOPES, Collector

DECLARED = [metric for _, _, declared in SCOPES for metric in declared]

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def page(observed: MetricSources, *, is_openmetrics: bool = False) -> str:
    return asyncio.run(Collector(observed).render(is_openmetrics)).decode()


def scrape(observed: MetricSources, *, is_openmetrics: bool = False) -> Samples:
    """Every sample, by its name and its labels."""
    parse = parse_openmetrics if is_openmetrics else parse_text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(page(observed, is_openmetrics=is_openmetrics))
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return f"iskander_{name}", tuple(sorted(labels.items()))


def of_m(name: str, **labels: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Of the lane that `make_lane` makes."""
    return key(name, model="m", version="1", **labels)


@pytest.mark.parametrize("metric", DECLARED, ids=lambda metric: metric.name)
def test_a_metric_is_named_as_prometheus_wants_it(metric: metrics.Metric[Any]) -> None:
    """Prefix, base unit last, `_total` for counters only; a sentence for people."""
    assert re.fullmatch(r"iskander(_[a-z]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    if metric.unit in metrics.BASE_UNITS:
        assert metric.name.removesuffix("_total").endswith(f"_{metric.unit}")
    assert not re.search(r"_(ns|us|ms|mib)\b", metric.name)
    assert re.fullmatch(r"[A-Z1].*\.", metric.sentence)


def test_no_metric_is_declared_twice() -> None:
    assert [name for name, count in Counter(m.name for m in DECLARED).items() if count > 1] == []


@pytest.mark.parametrize("is_openmetrics", [False, True])
def test_every_metric_is_on_the_page_with_the_labels_that_it_declares(is_openmetrics: bool) -> None:
    lane = make_lane(refused__queue_full=1, failed__poisoned=1)
    lane.costs[0] = CostModel()
    lane.metrics.on_stepped((("embed", 1000),))

    found: dict[str, set[str]] = {}
    for name, labels in scrape(observe([lane]), is_openmetrics=is_openmetrics):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        found.setdefault(base, set()).update(label for label, _ in labels if label != "le")

    assert found == {
        metric.name: {*scope_labels, *metric.labels}
        for _, scope_labels, declared in SCOPES
        for metric in declared
    }


def test_counts_of_a_lane_are_read_where_they_are_counted() -> None:
    lane = make_lane(
        requests=10,
        rows=1280,
        batches=4,
        completed=7,
        withdrawn=2,
        retried=1,
        refused__queue_full=3,
        failed__poisoned=1,
        deadline__hit=5,
        deadline__missed=2,
        closed__full=3,
    )

    samples = scrape(observe([lane]))

    assert samples[of_m("requests_total")] == 10
    assert samples[of_m("rows_total")] == 1280
    assert samples[of_m("batches_total")] == 4
    assert samples[of_m("requests_ended_total", outcome="completed")] == 7
    assert samples[of_m("requests_ended_total", outcome="withdrawn")] == 2
    assert samples[of_m("requests_retried_total")] == 1
    assert samples[of_m("refusals_total", code="queue_full")] == 3
    assert samples[of_m("failures_total", code="poisoned")] == 1
    assert samples[of_m("deadlines_total", result="hit")] == 5
    assert samples[of_m("deadlines_total", result="missed")] == 2
    assert samples[of_m("batches_closed_total", reason="full")] == 3


def test_what_is_known_beforehand_is_there_at_zero() -> None:
    """So that a rate over its first occurrence is right."""
    samples = scrape(observe([make_lane()]))

    reasons = ("full", "idle", "linger", "deadline", "shape", "alone")
    assert {f"closed.{reason}" for reason in reasons} == set(Reason)
    for reason in reasons:
        assert samples[of_m("batches_closed_total", reason=reason)] == 0
    assert samples[of_m("deadlines_total", result="missed")] == 0
    assert samples[key("worker_ends_total", worker="0", how="crash")] == 0


def test_reading_counts_leaves_no_trace_in_them() -> None:
    lane = make_lane()

    page(observe([lane]))

    assert lane.counts == {}


def test_a_histogram_is_in_seconds_and_counts_up_to_each_bound() -> None:
    lane = make_lane()
    for value_ns in (50_000, 60_000, 2_000_000, 20_000_000_000):
        lane.metrics.wait_ns.record(value_ns)

    samples = scrape(observe([lane]))

    assert samples[of_m("wait_seconds_bucket", le="5e-05")] == 1
    assert samples[of_m("wait_seconds_bucket", le="7.5e-05")] == 2
    assert samples[of_m("wait_seconds_bucket", le="0.0015")] == 2
    assert samples[of_m("wait_seconds_bucket", le="0.002")] == 3
    assert samples[of_m("wait_seconds_bucket", le="10.0")] == 3
    assert samples[of_m("wait_seconds_bucket", le="+Inf")] == 4
    assert samples[of_m("wait_seconds_count")] == 4
    assert samples[of_m("wait_seconds_sum")] == pytest.approx(20.00211)


def test_the_rows_of_batches_are_rows() -> None:
    lane = make_lane()
    lane.metrics.batch_rows.record(128)

    samples = scrape(observe([lane]))

    assert samples[of_m("batch_rows_bucket", le="64.0")] == 0
    assert samples[of_m("batch_rows_bucket", le="128.0")] == 1
    assert samples[of_m("batch_rows_sum")] == 128


def test_a_learned_cost_is_in_seconds_for_each_worker() -> None:
    lane = make_lane()
    cost = lane.costs[3] = CostModel()
    for rows in (100, 200, 300, 400):
        cost.observe(rows, 1_000_000 + rows * 2000)

    samples = scrape(observe([lane]))

    assert samples[of_m("cost_row_seconds", worker="3")] == pytest.approx(cost.row_ns / 1e9)
    assert samples[of_m("cost_base_seconds", worker="3")] == pytest.approx(cost.base_ns / 1e9)


def test_a_worker_is_in_one_state() -> None:
    samples = scrape(observe([], [make_worker(0), make_worker(1, State.LOOPING)]))

    for index, state in ((0, State.READY), (1, State.LOOPING)):
        states = {s: samples[key("worker_state", worker=str(index), state=s.value)] for s in State}
        assert [s for s, value in states.items() if value == 1] == [state]
        assert sum(states.values()) == 1


def test_what_a_worker_has_and_did() -> None:
    worker = make_worker(2)
    worker.output_arena.lease(4096)
    worker.batches = 9
    worker.credits = 1
    worker.exit_counts["hang"] = 3

    samples = scrape(observe([], [worker]))

    assert samples[key("worker_incarnation", worker="2")] == 9
    assert samples[key("worker_batches_total", worker="2")] == 9
    assert samples[key("worker_credits", worker="2")] == 1
    assert samples[key("worker_starts_total", worker="2")] == 1
    assert samples[key("worker_ends_total", worker="2", how="hang")] == 3
    assert samples[key("worker_output_leased_bytes", worker="2")] == 4096
    assert samples[key("worker_output_capacity_bytes", worker="2")] == MIB
    assert samples[key("worker_resident_bytes", worker="2")] > MIB
    assert samples[key("worker_cpu_seconds_total", worker="2")] > 0


def test_what_memory_the_arenas_are() -> None:
    """Of both kinds, apart: huge pages and a lock are two things."""
    worker = make_worker(2)
    worker.backing = Backing(4 * MIB, is_locked=True)
    worker.notices.extend(["no huge pages", "not pinned"])

    samples = scrape(observe([], [worker], input_backing=Backing(8 * MIB, huge_bytes=6 * MIB)))

    assert samples[key("input_huge_bytes")] == 6 * MIB
    assert samples[key("input_locked_bytes")] == 0
    assert samples[key("worker_output_huge_bytes", worker="2")] == 0
    assert samples[key("worker_output_locked_bytes", worker="2")] == 4 * MIB
    assert samples[key("worker_notices", worker="2")] == 2


def test_a_place_without_a_process_has_no_memory() -> None:
    worker = make_worker()
    worker.pid = 0

    samples = scrape(observe([], [worker]))

    assert samples[key("worker_resident_bytes", worker="0")] == 0
    assert samples[key("worker_cpu_seconds_total", worker="0")] == 0


def test_the_gateway_itself() -> None:
    arena = Arena(2 * MIB)
    arena.lease(8192)
    observed = observe(
        [], input_arena=arena, streams={1, 2, 3}, counts=Counter(late_messages=4), started_ns=0
    )
    observed.loop_lag_ns.record(1)

    samples = scrape(observed)

    assert samples[key("ready")] == 1
    assert samples[key("streams")] == 3
    assert samples[key("late_messages_total")] == 4
    assert samples[key("input_capacity_bytes")] == 2 * MIB
    assert samples[key("input_leased_bytes")] == 8192
    assert samples[key("resident_bytes")] > MIB
    assert samples[key("cpu_seconds_total")] > 0
    assert samples[key("loop_lag_seconds_count")] == 1
    assert samples[key("uptime_seconds")] > 0
    assert [dict(labels)["version"] for name, labels in samples if "build" in name] == [__version__]


def test_readiness_is_of_each_model_and_of_all() -> None:
    observed = observe([make_lane("a"), make_lane("b", is_ready=False)])

    samples = scrape(observed)

    assert samples[key("model_ready", model="a", version="1")] == 1
    assert samples[key("model_ready", model="b", version="1")] == 0
    assert samples[key("ready")] == 0
    assert scrape(observe([make_lane()], is_stopping=True))[key("ready")] == 0


@pytest.mark.parametrize("is_openmetrics", [False, True])
def test_a_page_made_in_many_turns_is_one_page(
    is_openmetrics: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each metric is named once, its samples follow it, and the end is at the end."""
    lanes = [make_lane(f"m{index}") for index in range(40)]
    observed = observe(lanes, [make_worker(index) for index in range(5)])
    in_turns = page(observed, is_openmetrics=is_openmetrics).splitlines()
    monkeypatch.setattr(metrics, "SOURCES_PER_STEP", dict.fromkeys(metrics.SOURCES_PER_STEP, 1000))
    at_once = page(observed, is_openmetrics=is_openmetrics).splitlines()

    def steady(lines: list[str]) -> list[str]:
        return [line for line in lines if not re.match("iskander_(uptime|.*resident|.*cpu)", line)]

    assert steady(in_turns) == steady(at_once)
    assert (in_turns[-1] == "# EOF") == is_openmetrics
    assert len([line for line in in_turns if line.startswith("# TYPE")]) == len(DECLARED)


def test_others_have_their_turn_while_a_page_is_made() -> None:
    """Fifty lanes are thousands of samples; no turn writes more than those of two histograms."""
    observed = observe([make_lane(f"m{index}") for index in range(50)])
    longest = 0

    async def count_turns() -> int:
        turns = 0
        task = asyncio.create_task(Collector(observed).render(False))
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    lines = page(observed).count("\n")
    longest = lines / asyncio.run(count_turns())
    assert longest < 72


def test_a_label_may_hold_what_a_model_may_be_called() -> None:
    """And more: nothing in a name ends a line or a quote."""
    name = 'a"b\\c\nd'

    assert scrape(observe([make_lane(name)]))[key("rows_total", model=name, version="1")] == 0


def test_steps_of_a_model_are_told_apart_and_bounded() -> None:
    lane = make_lane()
    lane.metrics.on_stepped((("embed", 1000), ("rank", 2000)))
    lane.metrics.on_stepped((("embed", 3000),))
    lane.metrics.on_stepped(tuple((f"s{at}", 1) for at in range(100)))
    assert lane.metrics.steps_ns["embed"].sum == 4000
    assert len(lane.metrics.steps_ns["rank"]) == 1
    assert len(lane.metrics.steps_ns) == STEPS_MAX
