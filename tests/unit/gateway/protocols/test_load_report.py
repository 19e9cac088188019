"""Load reports: values of a period, encoding, and periods without requests."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from support.input_arena import in_loop, turns
from support.observed import make_lane

from iskander._generated import orca_pb2
from iskander.foundation.clock import NS_PER_S
from iskander.gateway.protocols import load_report
from iskander.gateway.protocols.load_report import Load, LoadReports, encode

BUSY = Load(completed=100, total_ns=50 * NS_PER_S, waits=100, wait_ns=40 * NS_PER_S, errors=4)


def report_of(raw: bytes) -> Any:
    return orca_pb2.OrcaLoadReport.FromString(raw)


def test_report_of_a_period() -> None:
    """100 requests of half a second in 10 s: 5 are in the server on average, for 2 workers."""
    report = report_of(encode(Load(), BUSY, 10.0, 2))
    assert (report.rps_fractional, report.eps) == (10.0, 0.4)
    assert report.application_utilization == 2.5
    assert dict(report.named_metrics) == {"iskander.queue_wait_seconds": 0.4}


def test_report_covers_the_time_since_the_last_one() -> None:
    after = Load(*(value + more for value, more in zip(BUSY, (10, NS_PER_S, 0, 0, 0), strict=True)))
    report = report_of(encode(BUSY, after, 1.0, 1))
    assert (report.rps_fractional, report.application_utilization) == (10.0, 1.0)
    assert (report.eps, dict(report.named_metrics)) == (0.0, {})


@pytest.mark.parametrize("after", [BUSY, Load()], ids=["no request", "a model was unloaded"])
def test_period_without_requests_has_no_report(after: Load) -> None:
    assert encode(BUSY, after, 1.0, 1) == b""


def test_weight_falls_with_the_queue_wait() -> None:
    """The weight of `weighted_round_robin` at equal rates: the shorter wait has the larger one."""
    brief = report_of(encode(Load(), BUSY._replace(total_ns=10 * NS_PER_S), 10.0, 1))
    long = report_of(encode(Load(), BUSY, 10.0, 1))
    weights = [each.rps_fractional / each.application_utilization for each in (brief, long)]
    assert weights == [10.0, 2.0]


@in_loop
async def test_reports_of_lanes_are_header_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_report, "PERIOD_S", 0.0)
    lanes = [make_lane(), make_lane()]
    sent: list[bytes] = []
    reports = LoadReports(lanes, sent.append)  # type: ignore[arg-type]
    reports.start()
    await turns()
    assert sent == []
    for lane in lanes:
        lane.metrics.total_ns.record(NS_PER_S)
        lane.metrics.wait_ns.record(NS_PER_S // 4)
        lane.counts["refused.overloaded"] += 1
        lane.counts["requests"] += 5
    await turns()
    reports.stop()
    (field,) = sent
    name, value = field[2 : 2 + field[1]], field[3 + field[1] :]
    # The length before the value has a byte, or two from 127.
    assert name == b"endpoint-load-metrics-bin" and len(value) < 127
    report = report_of(base64.b64decode(value + b"=="))
    assert dict(report.named_metrics) == {"iskander.queue_wait_seconds": 0.25}
    assert report.eps == report.rps_fractional > 0
