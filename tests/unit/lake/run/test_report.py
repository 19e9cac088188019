"""Report of a job: text, JSON, and percentiles of a bounded sample."""

from __future__ import annotations

import json
from typing import Any

import pytest

from iskander.lake.run.report import Counters, Latencies, Report


def report(**changes: Any) -> Report:
    values: dict[str, Any] = {
        "model": "m", "version": "2", "digest": "d", "output": "out", "state": "done", "units": 4,
        "units_resumed": 0, "rows_in": 3000, "rows_out": 2990, "quarantined": 10, "rejected": 10,
        "bytes_out": 5, "seconds": 2.0, "read_s": 0.1, "score_s": 1.0, "write_s": 0.2,
        "batch_p50_ms": 1.25, "batch_p95_ms": 9.0,
    }  # fmt: skip
    return Report(**(values | changes))


def test_text_has_rows_rate_and_percentiles() -> None:
    text = "\n".join(report().lines())
    assert "3,000 in, 2,990 out, 10 quarantined" in text
    assert "1,500 rows/s" in text
    assert "p50 1.2 ms, p95 9.0 ms" in text
    assert "earlier run" not in text


def test_text_without_batches_or_time_has_neither() -> None:
    text = "\n".join(report(batch_p50_ms=None, batch_p95_ms=None, seconds=0.0).lines())
    assert "p50" not in text
    assert "0 rows/s" in text


def test_text_of_a_resumed_job_has_the_earlier_units() -> None:
    assert "4, 3 from an earlier run" in "\n".join(report(units_resumed=3).lines())


def test_json_has_every_field() -> None:
    values = json.loads(json.dumps(report().to_json()))
    assert values["quarantined"] == 10
    assert set(values) == set(Report.__dataclass_fields__)


@pytest.mark.parametrize(("percent", "expected"), [(50, 50.0), (95, 95.0), (100, 100.0)])
def test_percentiles_are_values_of_the_sample(percent: float, expected: float) -> None:
    latencies = Latencies()
    for value in range(100, 0, -1):
        latencies.add(float(value))
    assert latencies.percentile(percent) == expected


def test_percentile_of_nothing_is_none() -> None:
    assert Latencies().percentile(50) is None


def test_sample_is_bounded_and_even() -> None:
    latencies = Latencies(count_max=16)
    for value in range(1, 10_001):
        latencies.add(float(value))
    assert len(latencies._values) < 16
    median = latencies.percentile(50)
    assert median is not None and 3500 < median < 6500


def test_counters_add_by_name() -> None:
    counters = Counters()
    counters.add(rows_in=3, read_s=0.5)
    counters.add(rows_in=4)
    counters.add_latency(7.0)
    assert (counters.rows_in, counters.read_s, counters.percentile(95)) == (7, 0.5, 7.0)
