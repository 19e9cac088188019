"""Metrics under Triton's names."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse
from support.lanes import CONTRACT, put
from support.observed import make_lane, observe

from iskander.errors import IskanderError
from iskander.foundation.clock import NS_PER_MS
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.telemetry.metrics.exposition import SCOPES, Collector
from iskander.gateway.telemetry.metrics.triton_metrics import (
    FAILURE_REASONS,
    TRITON_SCOPE,
    failure_reason,
)


def scrape(lane: Lane) -> dict[str, float]:
    """Returns the samples of a lane; a reason follows the name."""
    collector = Collector(observe([lane]), (*SCOPES, TRITON_SCOPE))
    found = {}
    for family in parse(asyncio.run(collector.render(False)).decode()):
        for sample in family.samples:
            if sample.name.startswith("nv_"):
                labels = dict(sample.labels)
                assert (labels.pop("model"), labels.pop("version")) == ("m", "1")
                found[" ".join([sample.name, *labels.values()])] = sample.value
    return found


def test_values_of_completed_requests() -> None:
    """Two requests in one batch of 30 ms: each of them spent 30 ms in the model."""
    lane = make_lane(batches=1)
    lane.set_contract(CONTRACT)
    lane.metrics.on_sent(12, [5 * NS_PER_MS, 6 * NS_PER_MS], 0, 0)
    requests = [put(lane, rows) for rows in (4, 8)]
    for request in requests:
        lane.queue.remove(request)
        lane.on_completed(request, 30 * NS_PER_MS, 50 * NS_PER_MS)
    put(lane)

    found = scrape(lane)

    assert found["nv_inference_request_success"] == 2
    assert found["nv_inference_count"] == 12
    assert found["nv_inference_exec_count"] == 1
    assert found["nv_inference_request_duration_us"] == 100_000
    assert found["nv_inference_queue_duration_us"] == 11_000
    assert found["nv_inference_compute_infer_duration_us"] == 60_000
    assert found["nv_inference_pending_request_count"] == 1


def test_failures_by_reason() -> None:
    lane = make_lane(
        withdrawn=1,
        failed__cancelled=2,
        refused__queue_full=4,
        refused__not_ready=8,
        failed__poisoned=16,
        failed__execution_failed=32,
        deadline__missed=64,
    )

    failures = {
        name.partition(" ")[2]: value
        for name, value in scrape(lane).items()
        if name.startswith("nv_inference_request_failure")
    }

    assert failures == {"CANCELED": 3, "REJECTED": 4, "OTHER": 8, "BACKEND": 48}


@pytest.mark.parametrize("how", ["refused", "failed"])
def test_every_error_has_a_reason(how: str) -> None:
    for code in IskanderError._by_code:
        assert failure_reason(f"{how}.{code}") in FAILURE_REASONS


def test_other_counters_are_no_failures() -> None:
    for key in ("requests", "completed", "retried", "closed.full", "deadline.missed"):
        assert failure_reason(key) == ""


def test_names_of_triton_are_off_by_default() -> None:
    assert b"nv_" not in asyncio.run(Collector(observe([make_lane()])).render(False))
