"""Metrics: naming conventions, values, and the rendered page."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from support.lanes import CONTRACT, put
from support.observed import MIB, make_lane, make_worker, observe

from iskander import __version__
from iskander.contract.backend_manifest import STEPS_MAX
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.foundation.file_watcher import ReloadStatus
from iskander.gateway.repository.models import Failure
from iskander.gateway.scheduling.lanes.batcher import Reason
from iskander.gateway.scheduling.lanes.cost import CostModel
from iskander.gateway.supervision.gpus.device import Gpu
from iskander.gateway.supervision.gpus.health import STATES, GpuState
from iskander.gateway.supervision.gpus.readings import GpuReading
from iskander.gateway.supervision.lifecycle import State
from iskander.gateway.telemetry.metrics import exposition as metrics
from iskander.gateway.telemetry.metrics.exposition import SCOPES, Collector
from iskander.gateway.telemetry.metrics.sources import MetricSources
from iskander.interprocess.memory.arena import Arena
from iskander.interprocess.memory.backing import Backing
from iskander.interprocess.memory.heartbeat import HEARTBEAT_BYTES, write_heartbeat
from iskander.interprocess.memory.segment import Segment

DECLARED = [metric for _, _, declared in SCOPES for metric in declared]

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def page(observed: MetricSources, *, is_openmetrics: bool = False) -> str:
    return asyncio.run(Collector(observed).render(is_openmetrics)).decode()


def scrape(observed: MetricSources, *, is_openmetrics: bool = False) -> Samples:
    """Returns all samples by name and labels."""
    parse = parse_openmetrics if is_openmetrics else parse_text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(page(observed, is_openmetrics=is_openmetrics))
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return f"iskander_{name}", tuple(sorted(labels.items()))


def lane_key(name: str, **labels: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Returns the key of a sample of `make_lane()`."""
    return key(name, model="m", version="1", **labels)


def make_gpu(**fields: Any) -> GpuState:
    """A card with a value for each field of a reading."""
    state = GpuState(Gpu(3, "GPU-a", "0000:17:00.0"))
    values: dict[str, Any] = {
        "utilization": 0.5,
        "memory_used_bytes": 1,
        "memory_total_bytes": 2,
        "temperature_c": 40,
        "power_w": 70.0,
        "ecc_corrected": 1,
        "ecc_uncorrected": 0,
        "pcie_generation": 5,
        "pcie_width": 16,
        "pcie_replays": 0,
    }
    state.update(GpuReading("GPU-a", **(values | fields)), 1)
    return state


def test_state_and_errors_of_a_gpu() -> None:
    gpus = [make_gpu(throttles=("power cap",), xids={"79": 1, "7": 2, "8": 1}, power_w=None)]
    samples = scrape(observe([], [], gpus=gpus))
    labels = {"gpu": "3", "uuid": "GPU-a"}
    states = {s: samples[key("gpu_state", state=s, **labels)] for s in STATES}
    assert states == {state: float(state == "throttled") for state in STATES}
    assert samples[key("gpu_throttled", reason="power cap", **labels)] == 1
    assert samples[key("gpu_throttled", reason="hardware thermal", **labels)] == 0
    counts = {
        x: samples[key("gpu_xid_errors_total", xid=x, **labels)] for x in ("79", "13", "other")
    }
    assert counts == {"79": 1, "13": 0, "other": 3}
    assert key("gpu_power_watts", **labels) not in samples
    unread = scrape(observe([], [], gpus=[GpuState(gpus[0].gpu)]))
    assert unread[key("gpu_state", state="unknown", **labels)] == 1
    assert key("gpu_reading_age_seconds", **labels) not in unread


@pytest.mark.parametrize("metric", DECLARED, ids=lambda metric: metric.name)
def test_metric_name_follows_prometheus_conventions(metric: metrics.Metric[Any]) -> None:
    """A prefix, the base unit last, `_total` for counters only, and a help sentence."""
    assert re.fullmatch(r"iskander(_[a-z]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    if metric.unit in metrics.BASE_UNITS:
        assert metric.name.removesuffix("_total").endswith(f"_{metric.unit}")
    assert not re.search(r"_(ns|us|ms|mib)\b", metric.name)
    assert re.fullmatch(r"[A-Z1].*\.", metric.sentence)


def test_no_metric_is_declared_twice() -> None:
    assert [name for name, count in Counter(m.name for m in DECLARED).items() if count > 1] == []


@pytest.mark.parametrize("is_openmetrics", [False, True])
def test_page_has_every_metric_with_its_declared_labels(is_openmetrics: bool) -> None:
    lane = make_lane(refused__queue_full=1, failed__poisoned=1)
    lane.costs[0] = CostModel()
    lane.metrics.on_stepped((("embed", 1000),))
    worker = make_worker()
    worker.copied_bytes["in"] = 1
    worker.beat = Segment.create("iskander-test-beat", HEARTBEAT_BYTES)
    write_heartbeat(worker.beat.view, now_ns(), 0)
    observed = observe(
        [lane],
        [worker],
        calls_ended={("flight", "OK"): 1},
        reloads={"tokens": ReloadStatus()},
        expiry_s=lambda: 1.0,
        grants=lambda: [("scoring", 5, {"rows": 9})],
        gpus=[make_gpu(throttles=("power cap",), xids={"79": 1, "7": 2})],
    )

    rendered: dict[str, set[str]] = {}
    for name, labels in scrape(observed, is_openmetrics=is_openmetrics):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        rendered.setdefault(base, set()).update(label for label, _ in labels if label != "le")

    worker.beat.close()
    assert rendered == {
        metric.name: {*scope_labels, *metric.labels}
        for _, scope_labels, declared in SCOPES
        for metric in declared
    }


def test_lane_counters() -> None:
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

    assert samples[lane_key("requests_total")] == 10
    assert samples[lane_key("rows_total")] == 1280
    assert samples[lane_key("batches_total")] == 4
    assert samples[lane_key("requests_ended_total", outcome="completed")] == 7
    assert samples[lane_key("requests_ended_total", outcome="withdrawn")] == 2
    assert samples[lane_key("requests_retried_total")] == 1
    assert samples[lane_key("refusals_total", code="queue_full")] == 3
    assert samples[lane_key("failures_total", code="poisoned")] == 1
    assert samples[lane_key("deadlines_total", result="hit")] == 5
    assert samples[lane_key("deadlines_total", result="missed")] == 2
    assert samples[lane_key("batches_closed_total", reason="full")] == 3


def test_known_label_values_start_at_zero() -> None:
    """Otherwise a rate misses the first occurrence."""
    samples = scrape(observe([make_lane()]))

    reasons = ("full", "idle", "linger", "deadline", "shape", "alone")
    assert {f"closed.{reason}" for reason in reasons} == set(Reason)
    for reason in reasons:
        assert samples[lane_key("batches_closed_total", reason=reason)] == 0
    assert samples[lane_key("deadlines_total", result="missed")] == 0
    assert samples[lane_key("refusals_total", code="queue_full")] == 0
    assert samples[lane_key("failures_total", code="execution_failed")] == 0
    assert samples[key("connections_ended_total", reason="too_many_connections")] == 0
    assert samples[key("worker_ends_total", worker="0", how="crash")] == 0


def test_rendering_does_not_change_the_counts() -> None:
    lane = make_lane()

    page(observe([lane]))

    assert lane.counts == {}


def test_histogram_is_cumulative_and_in_seconds() -> None:
    lane = make_lane()
    for value_ns in (50_000, 60_000, 2_000_000, 20_000_000_000):
        lane.metrics.wait_ns.record(value_ns)

    samples = scrape(observe([lane]))

    assert samples[lane_key("wait_seconds_bucket", le="5e-05")] == 1
    assert samples[lane_key("wait_seconds_bucket", le="7.5e-05")] == 2
    assert samples[lane_key("wait_seconds_bucket", le="0.0015")] == 2
    assert samples[lane_key("wait_seconds_bucket", le="0.002")] == 3
    assert samples[lane_key("wait_seconds_bucket", le="10.0")] == 3
    assert samples[lane_key("wait_seconds_bucket", le="+Inf")] == 4
    assert samples[lane_key("wait_seconds_count")] == 4
    assert samples[lane_key("wait_seconds_sum")] == pytest.approx(20.00211)


def test_batch_size_histogram_is_in_rows() -> None:
    lane = make_lane()
    lane.metrics.batch_rows.record(128)

    samples = scrape(observe([lane]))

    assert samples[lane_key("batch_rows_bucket", le="64.0")] == 0
    assert samples[lane_key("batch_rows_bucket", le="128.0")] == 1
    assert samples[lane_key("batch_rows_sum")] == 128


def test_cost_model_is_in_seconds_for_each_worker() -> None:
    lane = make_lane()
    cost = lane.costs[3] = CostModel()
    for rows in (100, 200, 300, 400):
        cost.observe(rows, 1_000_000 + rows * 2000)

    samples = scrape(observe([lane]))

    assert samples[lane_key("cost_row_seconds", worker="3")] == pytest.approx(cost.row_ns / 1e9)
    assert samples[lane_key("cost_base_seconds", worker="3")] == pytest.approx(cost.base_ns / 1e9)


def test_worker_has_exactly_one_state() -> None:
    samples = scrape(observe([], [make_worker(0), make_worker(1, State.LOOPING)]))

    for index, state in ((0, State.READY), (1, State.LOOPING)):
        states = {s: samples[key("worker_state", worker=str(index), state=s.value)] for s in State}
        assert [s for s, value in states.items() if value == 1] == [state]
        assert sum(states.values()) == 1


def test_worker_gauges_and_counters() -> None:
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


def test_arena_backing() -> None:
    """Huge pages and locking are independent."""
    worker = make_worker(2)
    worker.backing = Backing(4 * MIB, is_locked=True)
    worker.notices.extend(["no huge pages", "not pinned"])

    samples = scrape(observe([], [worker], input_backing=Backing(8 * MIB, huge_bytes=6 * MIB)))

    assert samples[key("input_huge_bytes")] == 6 * MIB
    assert samples[key("input_locked_bytes")] == 0
    assert samples[key("worker_output_huge_bytes", worker="2")] == 0
    assert samples[key("worker_output_locked_bytes", worker="2")] == 4 * MIB
    assert samples[key("worker_notices", worker="2")] == 2


def test_slot_without_a_process_has_no_usage() -> None:
    worker = make_worker()
    worker.pid = 0

    samples = scrape(observe([], [worker]))

    assert samples[key("worker_resident_bytes", worker="0")] == 0
    assert samples[key("worker_cpu_seconds_total", worker="0")] == 0


def test_gateway_metrics() -> None:
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
    assert samples[key("start_time_seconds")] == pytest.approx(time.time(), abs=60)
    assert 2 < samples[key("descriptors")] <= samples[key("descriptors_limit")]
    assert samples[key("memory_limit_bytes")] > 64 * MIB
    assert [dict(labels)["version"] for name, labels in samples if "build" in name] == [__version__]


def test_values_of_connections_calls_and_reloads() -> None:
    reloads = {"tokens": ReloadStatus(), "tls": ReloadStatus()}
    reloads["tls"].record(is_valid=False)

    samples = scrape(
        observe(
            [],
            connections=lambda: 7,
            connections_max=lambda: 100,
            calls_ended=Counter({("flight", "OK"): 3, ("http", "404"): 2}),
            reloads=reloads,
            expiry_s=lambda: 1.9e9,
        )
    )

    assert samples[key("connections")] == 7
    assert samples[key("connections_limit")] == 100
    assert samples[key("calls_ended_total", protocol="flight", code="OK")] == 3
    assert samples[key("calls_ended_total", protocol="http", code="404")] == 2
    assert samples[key("reload_valid", file="tokens")] == 1
    assert samples[key("reload_valid", file="tls")] == 0
    age_s = time.time() - samples[key("reload_valid_timestamp_seconds", file="tokens")]
    assert -5 < age_s < 60
    assert samples[key("tls_expiry_timestamp_seconds")] == 1.9e9


def test_expiry_is_missing_without_tls() -> None:
    assert key("tls_expiry_timestamp_seconds") not in scrape(observe([]))


def test_failed_loads_of_served_and_of_new_versions() -> None:
    observed = observe([make_lane("a"), make_lane("b")])
    observed.models.failures = {
        ("b", "1"): Failure("broken", is_required=False),
        ("c", "2"): Failure("broken", is_required=True),
    }

    samples = scrape(observed)

    assert samples[key("model_load_failed", model="a", version="1")] == 0
    assert samples[key("model_load_failed", model="b", version="1")] == 1
    assert samples[key("model_load_failed", model="c", version="2")] == 1


def test_age_of_the_oldest_queued_request() -> None:
    lane = make_lane()
    assert scrape(observe([lane]))[lane_key("queue_oldest_seconds")] == 0

    lane.set_contract(CONTRACT)
    put(lane, now_ns=now_ns() - 90 * NS_PER_S, priority=1)
    put(lane, now_ns=now_ns() - 30 * NS_PER_S, priority=0)

    age_s = scrape(observe([lane]))[lane_key("queue_oldest_seconds")]
    assert age_s == pytest.approx(90, abs=20)


def test_readiness_of_each_model_and_of_the_gateway() -> None:
    observed = observe([make_lane("a"), make_lane("b", is_ready=False)])

    samples = scrape(observed)

    assert samples[key("model_ready", model="a", version="1")] == 1
    assert samples[key("model_ready", model="b", version="1")] == 0
    assert samples[key("ready")] == 0
    assert scrape(observe([make_lane()], is_stopping=True))[key("ready")] == 0


@pytest.mark.parametrize("is_openmetrics", [False, True])
def test_page_rendered_in_many_turns_equals_one_rendered_at_once(
    is_openmetrics: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = [make_lane(f"m{index}") for index in range(40)]
    observed = observe(lanes, [make_worker(index) for index in range(5)])
    in_turns = page(observed, is_openmetrics=is_openmetrics).splitlines()
    monkeypatch.setattr(metrics, "SOURCES_PER_STEP", dict.fromkeys(metrics.SOURCES_PER_STEP, 1000))
    at_once = page(observed, is_openmetrics=is_openmetrics).splitlines()

    def steady(lines: list[str]) -> list[str]:
        return [line for line in lines if not re.match("iskander_(.*resident|.*cpu)", line)]

    assert steady(in_turns) == steady(at_once)
    assert (in_turns[-1] == "# EOF") == is_openmetrics
    assert len([line for line in in_turns if line.startswith("# TYPE")]) == len(DECLARED)


def test_rendering_yields_to_the_event_loop() -> None:
    """Fifty lanes have thousands of samples; a turn renders at most those of two histograms."""
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


def test_labels_are_escaped() -> None:
    name = 'a"b\\c\nd'

    assert scrape(observe([make_lane(name)]))[key("rows_total", model=name, version="1")] == 0


def test_pipeline_steps_are_separate_and_bounded() -> None:
    lane = make_lane()
    lane.metrics.on_stepped((("embed", 1000), ("rank", 2000)))
    lane.metrics.on_stepped((("embed", 3000),))
    lane.metrics.on_stepped(tuple((f"s{at}", 1) for at in range(100)))
    assert lane.metrics.steps_ns["embed"].sum == 4000
    assert len(lane.metrics.steps_ns["rank"]) == 1
    assert len(lane.metrics.steps_ns) == STEPS_MAX
