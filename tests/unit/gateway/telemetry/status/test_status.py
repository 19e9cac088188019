"""Status document: content, bounds, and the merge of several processes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from support.observed import MIB, make_lane, make_model, make_worker, observe

from iskander.config.models import LaneConfig
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.gateway.repository.models import Failure
from iskander.gateway.scheduling.lanes.lane import Lane, Quarantine
from iskander.gateway.supervision.lifecycle import State
from iskander.gateway.telemetry.metrics.sources import MetricSources
from iskander.gateway.telemetry.status import history_sampler
from iskander.gateway.telemetry.status.document import (
    CODES_MAX,
    MEMORY_MAX,
    MODELS_MAX,
    PLOTS_MAX,
    REASONS_MAX,
    WORKERS_MAX,
    ModelStatus,
    ProcessStatus,
    Status,
    listed,
    plotted,
)
from iskander.gateway.telemetry.status.events import TEXT_MAX, Event, EventLog
from iskander.gateway.telemetry.status.history import INTERVAL_NS, SAMPLES, History, tick_at
from iskander.gateway.telemetry.status.history_sampler import HistorySampler
from iskander.gateway.telemetry.status.merge import merge
from iskander.gateway.telemetry.status.reader import StatusReader
from iskander.interprocess.memory.arena import Arena


def read(sources: MetricSources, history: History | None = None) -> Status:
    reader = StatusReader(sources, history or History(), EventLog())
    return asyncio.run(reader.read())


def model(name: str = "m", **fields: Any) -> ModelStatus:
    return ModelStatus(**{"name": name, "version": "1", "state": "serving", **fields})


def document(**fields: Any) -> Status:
    values: dict[str, Any] = {
        "version": "1",
        "build": "compiled",
        "started_ms": 5,
        "uptime_s": 9.0,
        "ready": True,
        "interval_s": 2,
        "left_out": {},
    }
    lists = ("reasons", "processes", "models", "workers", "memory", "events")
    return Status(**{**values, **{name: [] for name in lists}, **fields})


# -- One process


def test_models_have_a_state_and_its_reason() -> None:
    quarantined = make_lane("bad")
    quarantined.quarantine = Quarantine("its batches ended 3 workers", 1000)
    isolated = make_lane("odd")
    isolated.is_isolated = True
    loading = Lane(make_model("new", "2"), LaneConfig())
    loading.is_served = False
    sources = observe([make_lane("ok"), quarantined, isolated, make_lane("idle", is_ready=False)])
    sources.models.by_key[9] = loading
    sources.models.failures["broken", "4"] = Failure("no such operator", is_required=True)

    status = read(sources)

    found = {each.name: each for each in status.models}
    assert {name: each.state for name, each in found.items()} == {
        "ok": "serving",
        "bad": "quarantined",
        "odd": "serving",
        "idle": "not ready",
        "new": "loading",
        "broken": "failed",
    }
    assert found["broken"].reason == "no such operator"
    assert "its batches ended 3 workers" in found["bad"].reason
    assert found["odd"].isolated
    assert not status.ready
    assert any("broken/4" in reason for reason in status.reasons)


def test_model_has_queue_batches_and_codes() -> None:
    lane = make_lane(refused__queue_full=3, failed__execution_failed=1, requests=7)
    lane.metrics.batch_rows.record(10)
    lane.metrics.batch_rows.record(20)

    (status,) = read(observe([lane])).models

    assert (status.batches, status.batch_rows) == (2, 15)
    assert (status.refusals, status.failures) == ({"queue_full": 3}, {"execution_failed": 1})
    assert (status.queue_requests, status.oldest_s) == (0, 0)


def test_latest_sample_and_series_are_in_the_document() -> None:
    lane = make_lane()
    sampler = HistorySampler([lane])
    lane.counts["requests"] += 8
    asyncio.run(sampler.sample())

    (status,) = read(observe([lane]), sampler.history).models

    assert status.requests_per_s == pytest.approx(4)
    assert status.total_p50_ms is None
    assert {len(values) for values in status.series.values()} == {SAMPLES}
    assert b'"total_p50_ms":null' in msgspec.json.encode(status)


def test_workers_and_memory() -> None:
    worker = make_worker(3)
    worker.output_arena.lease(MIB // 2)
    worker.exit_counts["crash"] = 2
    worker.notices.append("no huge pages")
    absent = make_worker(4, State.ABSENT)
    absent.incarnation = absent.pid = 0
    sources = observe([make_lane()], [worker, absent], regions={"a": MIB, "b": MIB})

    status = read(sources)

    first, second = status.workers
    assert (first.index, first.cpus, first.state, first.ends) == (3, (3,), "ready", {"crash": 2})
    assert (first.incarnation, first.starts, first.notices) == (10, 1, ("no huge pages",))
    assert first.resident_bytes > MIB
    assert (second.state, second.resident_bytes, second.heartbeat_s) == ("absent", 0, None)
    memory = {each.name: each for each in status.memory}
    assert memory["shared-memory regions"].used_bytes == 2 * MIB
    assert memory["shared-memory regions"].count == 2
    assert memory["output arena of worker 3"].used_bytes == MIB // 2
    assert memory["input arena"].limit_bytes == 4 * MIB
    assert "output arena of worker 4" not in memory


def test_every_list_is_bounded() -> None:
    lanes = [make_lane(f"m{index}", is_ready=False) for index in range(MODELS_MAX + 20)]
    for number in range(CODES_MAX + 5):
        lanes[0].counts[f"refused.code{number}"] = number + 1
    workers = [make_worker(index) for index in range(WORKERS_MAX + 10)]

    status = read(observe(lanes, workers))

    assert len(status.models) == MODELS_MAX
    assert len(status.workers) == WORKERS_MAX
    assert len(status.memory) == MEMORY_MAX
    assert len(status.reasons) == REASONS_MAX
    assert status.left_out == {
        "models": 20,
        "workers": 10,
        "reasons": MODELS_MAX + 20 - REASONS_MAX,
        "memory": WORKERS_MAX + 10 + 3 - MEMORY_MAX,
        "drift": 0,
        "shadows": 0,
        "shadow_outputs": 0,
    }
    assert len(status.models[0].refusals) == CODES_MAX
    assert f"code{CODES_MAX + 4}" in status.models[0].refusals


def test_long_reasons_are_shortened() -> None:
    sources = observe([])
    sources.models.failures["broken", "4"] = Failure("x\n" * 10_000, is_required=True)

    status = read(sources)

    assert (len(status.models[0].reason), len(status.reasons[0])) == (TEXT_MAX, TEXT_MAX)


def test_problems_are_listed_before_busy_models_and_in_order() -> None:
    models = [model(f"m{index}", requests_per_s=float(index)) for index in range(MODELS_MAX + 2)]
    models[0] = model("m0", state="failed")

    shown = [each.name for each in listed(models)]

    assert shown == ["m0", *(f"m{index}" for index in range(3, MODELS_MAX + 2))]


def test_plots_are_those_of_the_busiest_models() -> None:
    models = [model(f"m{index}", requests_per_s=float(index)) for index in range(PLOTS_MAX + 3)]
    models.append(model("unknown", requests_per_s=None))

    assert plotted(models) == {(f"m{index}", "1") for index in range(3, PLOTS_MAX + 3)}


def test_reader_yields_between_steps() -> None:
    """No step of a reader or a sampler takes long, however many models there are."""
    lanes = [make_lane(f"m{index}") for index in range(64)]
    sampler = HistorySampler(lanes)
    turns = 0

    async def run() -> None:
        nonlocal turns
        task = asyncio.gather(
            StatusReader(observe(lanes), sampler.history, EventLog()).read(), sampler.sample()
        )
        while not task.done():
            turns += 1
            await asyncio.sleep(0)

    asyncio.run(run())

    assert turns >= len(lanes) / history_sampler.LANES_PER_STEP


def test_document_discloses_no_client() -> None:
    lane = make_lane()
    for number in range(20):
        lane.arrivals.observe("robot-7", number * NS_PER_S, NS_PER_S)

    assert len(lane.arrivals)
    assert b"robot" not in msgspec.json.encode(read(observe([lane])))


# -- Several processes


def merged(*documents: Status | None, **own: Any) -> Status:
    known = [
        ProcessStatus(process=index, state="ready" if each else "no answer", starts=index + 1)
        for index, each in enumerate(documents)
    ]
    return merge(document(**own), known, documents)


def test_merge_sums_rates_and_takes_the_highest_percentile() -> None:
    series = [{"requests_per_s": [None, 2.0], "total_p99_ms": [1.0, 5.0]}]
    series.append({"requests_per_s": [1.0, 3.0], "total_p99_ms": [None, 4.0]})
    models = [
        model(
            requests_per_s=2.0,
            rows_per_s=None,
            total_p99_ms=5.0,
            queue_requests=3,
            oldest_s=1.0,
            batches=10,
            batch_rows=10.0,
            workers=2,
            refusals={"queue_full": 1},
            series=series[0],
        ),
        model(
            requests_per_s=3.0,
            rows_per_s=None,
            total_p99_ms=4.0,
            queue_requests=4,
            oldest_s=2.0,
            batches=30,
            batch_rows=20.0,
            workers=1,
            refusals={"queue_full": 2, "not_ready": 1},
            series=series[1],
        ),
    ]

    (result,) = merged(*(document(models=[each]) for each in models)).models

    assert (result.requests_per_s, result.rows_per_s, result.total_p99_ms) == (5, None, 5)
    assert (result.queue_requests, result.oldest_s, result.workers) == (7, 2, 1)
    assert (result.batches, result.batch_rows) == (40, 17.5)
    assert result.refusals == {"queue_full": 3, "not_ready": 1}
    assert result.series == {"requests_per_s": [1, 5], "total_p99_ms": [1, 5]}


def test_merge_shows_the_worst_state_with_its_reason() -> None:
    (result,) = merged(
        document(models=[model()]), document(models=[model(state="quarantined", reason="why")])
    ).models

    assert (result.state, result.reason) == ("quarantined", "why")


def test_merge_lists_processes_without_an_answer() -> None:
    answered = document(processes=[ProcessStatus(process=0, state="ready", streams=4)])

    first, second = merged(answered, None, ready=False, reasons=["x"]).processes

    assert (first.process, first.streams, first.starts) == (0, 4, 1)
    assert (second.process, second.state, second.starts) == (1, "no answer", 2)


def test_merge_without_any_answer() -> None:
    result = merged(None, None, ready=False, reasons=["no process is ready"])

    assert (result.ready, result.reasons) == (False, ["no process is ready"])
    assert (result.models, result.workers) == ([], [])
    assert len(result.processes) == 2


def test_merge_orders_events_and_names_their_process() -> None:
    def event(at_s: float) -> Event:
        return Event(at_s=at_s, level="info", text=f"at {at_s:g}")

    result = merged(
        document(events=[event(3), event(1)]), document(events=[event(2)]), events=[event(4)]
    )

    assert [(each.at_s, each.process) for each in result.events] == [
        (4, None),
        (3, 0),
        (2, 1),
        (1, 0),
    ]


def test_merge_is_bounded() -> None:
    many = [model(f"m{index}", series={"requests_per_s": [1.0]}) for index in range(MODELS_MAX + 5)]
    events = [Event(at_s=float(number), level="info", text="x") for number in range(500)]

    result = merged(document(models=many, events=events), document(models=many, events=events))

    assert len(result.models) == MODELS_MAX
    assert result.left_out["models"] == 5
    assert sum(bool(each.series) for each in result.models) == PLOTS_MAX
    assert len(result.events) == 100


def test_document_survives_its_encoding() -> None:
    lane = make_lane()
    history = History()
    history.sample(lane, tick_at(now_ns()) - 1, now_ns() - INTERVAL_NS)
    status = read(observe([lane], input_arena=Arena(MIB)), history)

    assert msgspec.json.decode(msgspec.json.encode(status), type=Status) == status
