"""Drift as metrics, and in the status documents of one and of several processes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse
from support.observed import observe
from support.statuses import HOSTILE, status

from iskander.gateway.observation.drift_report import (
    ColumnDrift,
    DriftReport,
    ModelDrift,
    SideSummary,
)
from iskander.gateway.telemetry.metrics.drift_metrics import DRIFT_METRICS, DRIFT_SCOPE
from iskander.gateway.telemetry.metrics.exposition import Collector
from iskander.gateway.telemetry.page.renderer import PageRenderer
from iskander.gateway.telemetry.status.document import ProcessStatus
from iskander.gateway.telemetry.status.drift_status import DRIFT_MAX, DriftReader, list_columns
from iskander.gateway.telemetry.status.merge import merge

NUMBERS = SideSummary(count=600, missing=0.25, mean=3.5, deviation=1.0, quantiles=(1.0, 3.0, 5.0))
LABELS = SideSummary(count=500, labels={"a": 0.75, "b": 0.25})


def column(name: str = "x", severity: float = 2.0, **more: Any) -> ColumnDrift:
    values: dict[str, Any] = {
        "side": "input",
        "column": name,
        "state": "drifting",
        "exceeded": ("psi",),
        "severity": severity,
        "measures": {"psi": 0.4, "ks": 0.1},
        "recent": NUMBERS,
        "reference": msgspec.structs.replace(NUMBERS, mean=1.5),
    }
    return ColumnDrift(**values | more)


def model(*columns: ColumnDrift, **more: Any) -> ModelDrift:
    values: dict[str, Any] = {
        "model": "m",
        "version": "1",
        "reference": "live",
        "reference_rows": 1000,
        "rows": 700,
        "states": {"input": {"drifting": 1, "steady": 2, "unjudged": 0}},
        "columns": columns,
    }
    return ModelDrift(**values | more)


def scrape(report: DriftReport) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The samples of a report, by name and labels other than the model's."""
    collector = Collector(observe([], drift=lambda: report), (DRIFT_SCOPE,))
    found = {}
    for family in parse(asyncio.run(collector.render(False)).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("model"), labels.pop("version")) == ("m", "1")
            found[sample.name, frozenset(labels.items())] = sample.value
    return found


def labels(**values: str) -> frozenset[tuple[str, str]]:
    return frozenset(values.items())


def test_metrics_of_a_model_and_its_columns() -> None:
    found = scrape(DriftReport((model(column(), column("s", 0.5, recent=LABELS, reference=None)),)))

    assert found["iskander_drift_columns", labels(side="input", state="drifting")] == 1
    assert found["iskander_drift_columns", labels(side="input", state="steady")] == 2
    assert found["iskander_drift_recent_rows", labels()] == 700
    assert found["iskander_drift_reference_rows", labels()] == 1000
    x = {"side": "input", "column": "x"}
    assert found["iskander_drift_severity", labels(**x)] == 2
    assert found["iskander_drift_psi", labels(**x)] == 0.4
    assert ("iskander_drift_new_labels_ratio", labels(**x)) not in found
    assert found["iskander_drift_mean", labels(**x, of="recent")] == 3.5
    assert found["iskander_drift_mean", labels(**x, of="reference")] == 1.5
    assert found["iskander_drift_quantile", labels(**x, of="recent", quantile="0.9")] == 5
    s = {"side": "input", "column": "s"}
    assert found["iskander_drift_values", labels(**s, of="recent")] == 500
    assert ("iskander_drift_mean", labels(**s, of="recent")) not in found
    assert ("iskander_drift_values", labels(**s, of="reference")) not in found


def test_no_reference_has_no_rows() -> None:
    for origin in ("", "recording"):
        found = scrape(DriftReport((model(reference=origin),)))
        assert found["iskander_drift_reference_rows", labels()] == 0


def test_series_of_a_column_are_as_many_as_documented() -> None:
    measures = dict.fromkeys(("psi", "ks", "missing", "out_of_range", "new_labels"), 0.1)
    of_model = len(scrape(DriftReport((model(),))))
    full = scrape(DriftReport((model(column(measures=measures)),)))
    assert len(full) - of_model == 18
    assert len({metric.name for metric in DRIFT_METRICS}) == len(DRIFT_METRICS)


def test_last_report_is_read_once(caplog: pytest.LogCaptureFixture) -> None:
    reports: dict[str, Any] = {}
    reader = DriftReader(lambda: reports)
    assert reader.read() == DriftReport()
    reports["drift"] = msgspec.to_builtins(DriftReport((model(column()),)))
    found = reader.read()
    assert found.models[0].columns == (column(),)
    assert reader.read() is found
    reports["drift"] = {"models": [1]}
    assert reader.read() == DriftReport(), "an invalid one"
    assert "invalid message of the observer process" in caplog.text
    del reports["drift"]
    assert reader.read() == DriftReport()


def test_columns_of_all_processes_are_merged_worst_first() -> None:
    one = DriftReport((model(column("a", 1.0), column("b", 3.0)),))
    other = DriftReport((model(column("a", 2.0)),))
    documents = [
        status(drift=list_columns(report, index), left_out={"drift": index})
        for index, report in enumerate((one, other))
    ]
    known = [ProcessStatus(process=index, state="ready") for index in range(2)]
    merged = merge(status(), known, documents)
    listed = [(each.column, each.process, each.severity) for each in merged.drift]
    assert listed == [("b", 0, 3.0), ("a", 1, 2.0), ("a", 0, 1.0)]
    assert merged.left_out["drift"] == 1

    many = DriftReport((model(*(column(str(index)) for index in range(DRIFT_MAX))),))
    documents = [status(drift=list_columns(many, index)) for index in range(2)]
    merged = merge(status(), known, documents)
    assert len(merged.drift) == DRIFT_MAX and merged.left_out["drift"] == DRIFT_MAX


def test_page_shows_columns_and_escapes_their_names() -> None:
    columns = [column(name, recent=LABELS) for name in HOSTILE]
    listed = list_columns(DriftReport((model(*columns),)), 0)
    assert listed[0].recent == "a 75%" and listed[0].reference == "1.5"
    page = asyncio.run(PageRenderer().render(status(drift=listed))).decode()
    assert "a 75%" in page and "drifting" in page
    for name in HOSTILE[:3]:
        assert name not in page
