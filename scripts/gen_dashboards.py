"""Generates the Grafana dashboards from the metrics; `--check` lists stale ones.

A panel's query, unit and description follow from the kind, unit and help text of its metrics. The
JSON is written directly: Grafana's own builders have a release for each Grafana, and these
dashboards use three kinds of panels.

Source: Grafana, "Dashboard JSON model", schema version 39.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iskander.gateway.telemetry.metrics.drift_metrics import DRIFT_METRICS, DRIFT_SCOPE
from iskander.gateway.telemetry.metrics.exposition import LANE_METRICS, SCOPES, Metric

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "configs" / "grafana"

METRICS = {metric.name: metric for _, _, declared in (*SCOPES, DRIFT_SCOPE) for metric in declared}
PER_MODEL = {metric.name for metric in (*LANE_METRICS, *DRIFT_METRICS)} | {
    metric.name for metric in METRICS.values() if "model" in metric.labels
}
BLANKS = str.maketrans("_:", "  ")
UNITS = {"seconds": "s", "bytes": "bytes"}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, COLUMNS, HEIGHT = 24, 3, 8
DEFAULTS: dict[str, dict[str, Any]] = {"timeseries": {"min": 0}, "stat": {}, "state-timeline": {}}
OPTIONS = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value_and_name"},
    "state-timeline": {"mergeValues": True, "showValue": "never"},
}
"""Grafana's settings of each kind of panel."""


@dataclass(frozen=True)
class Panel:
    """A panel of one query for each metric.

    Attributes:
        names: Metrics, or recording rules.
        by: Labels that distinguish its lines, beside the instance.
        how: Aggregation over the other labels: several gateway processes have the same workers, but
            different requests.
        percentiles: Of a histogram.
        kind: Grafana's panel type.
        unit: Grafana's unit; by default that of the first metric.
        where: Further label matchers.
    """

    title: str
    names: tuple[str, ...]
    by: tuple[str, ...] = ()
    how: str = "sum"
    percentiles: tuple[int, ...] = (50, 99)
    kind: str = "timeseries"
    unit: str = ""
    where: str = ""


def stat(
    title: str, name: str, how: str = "min", *, by: tuple[str, ...] = (), unit: str = ""
) -> Panel:
    """Return a panel with the present value of each instance."""
    return Panel(title, (name,), by, how, kind="stat", unit=unit)


M, W, G = ("model", "version"), ("worker",), ("gpu",)

OVERVIEW = (
    Panel("Alerts", ("ALERTS",), ("alertname",), "count", kind="stat",
          where='alertname=~"Iskander.*",alertstate="firing"'),
    stat("Ready", "iskander_ready"),
    stat("Started", "iskander_start_time_seconds", "max", unit="dateTimeFromNow"),
    Panel("Requests", ("iskander_requests_ended_total",), (*M, "outcome")),
    Panel("Rejected requests", ("iskander_refusals_total",), (*M, "code")),
    Panel("Failed requests", ("iskander_failures_total",), (*M, "code")),
    Panel("Latency", ("iskander_request_seconds",), M),
    Panel("Wait for a worker", ("iskander_wait_seconds",), M, percentiles=(95,)),
    Panel("Queued requests", ("iskander_queue_requests",), M),
    Panel("Ended calls", ("iskander_calls_ended_total",), ("protocol", "code")),
    Panel("Open streams and calls", ("iskander_streams", "iskander_open_calls",
                                     "iskander_inferential_clients")),
    Panel("Calls without a sufficient token", ("iskander_access_refusals_total",), ("code",)),
    Panel("Connections", ("iskander_connections", "iskander_connections_limit")),
    Panel("Connections that the server ended", ("iskander_connections_ended_total",), ("reason",)),
    Panel("File descriptors", ("iskander_descriptors", "iskander_descriptors_limit"),
          ("process",), "max"),
    Panel("Event loop lag", ("iskander_loop_lag_seconds",), ("process",)),
    Panel("CPU of the gateway", ("iskander_cpu_seconds_total",), ("process",), unit="percentunit"),
    Panel("Memory for received bytes", ("iskander_receive_used_bytes",
                                        "iskander_receive_limit_bytes")),
    stat("Certificate expires", "iskander_tls_expiry_timestamp_seconds", unit="dateTimeFromNow"),
    stat("Valid files", "iskander_reload_valid", by=("file",)),
    stat("Build", "iskander_build_info", "max", by=("version", "python", "build")),
)  # fmt: skip
MODEL = (
    stat("Ready", "iskander_model_ready", by=M),
    stat("Workers", "iskander_model_workers", by=M),
    Panel("Isolated, in quarantine, or not loaded",
          ("iskander_model_isolated", "iskander_model_quarantined", "iskander_model_load_failed"),
          M, "max"),
    Panel("Requests", ("iskander_requests_total", "iskander_requests_retried_total"), M),
    Panel("Rows", ("iskander_rows_total",), M),
    Panel("Batches by the reason for closing", ("iskander_batches_closed_total",),
          (*M, "reason")),
    Panel("Latency", ("iskander_request_seconds",), M, percentiles=(50, 95, 99)),
    Panel("Wait for a worker", ("iskander_wait_seconds",), M, percentiles=(50, 95, 99)),
    Panel("Run time of batches", ("iskander_run_seconds",), M, percentiles=(50, 95, 99)),
    Panel("Latency budget burned", ("model:iskander_latency_burn:rate5m",
                                    "model:iskander_latency_burn:rate1h"), M, "max"),
    Panel("Rows of batches", ("iskander_batch_rows",), M),
    Panel("Run time of pipeline steps", ("iskander_step_seconds",), (*M, "step")),
    Panel("Age of the oldest queued request", ("iskander_queue_oldest_seconds",), M, "max"),
    Panel("Queued requests", ("iskander_queue_requests",), M),
    Panel("Queued bytes", ("iskander_queue_bytes",), M),
    Panel("Rejected requests", ("iskander_refusals_total",), (*M, "code")),
    Panel("Failed requests", ("iskander_failures_total",), (*M, "code")),
    Panel("Deadlines", ("iskander_deadlines_total",), (*M, "result")),
    Panel("Cost of a batch", ("iskander_cost_base_seconds",), (*M, "worker"), "max"),
    Panel("Cost of a row", ("iskander_cost_row_seconds",), (*M, "worker"), "max"),
    Panel("Worker deaths during its batches", ("iskander_worker_deaths_total",), M),
    Panel("Drifting columns", ("iskander_drift_columns",), (*M, "side"), "max",
          where='state="drifting"'),
    Panel("Drift of columns, in units of the limit", ("iskander_drift_severity",),
          (*M, "side", "column"), "max"),
)  # fmt: skip
WORKERS = (
    Panel("State", ("iskander_worker_state",), (*W, "state"), "max", kind="state-timeline"),
    Panel("Exits", ("iskander_worker_ends_total",), (*W, "how")),
    Panel("Crash loop", ("iskander_worker_looping",), W, "max"),
    Panel("Age of the heartbeat", ("iskander_worker_heartbeat_age_seconds",), W, "min"),
    Panel("Batches", ("iskander_worker_batches_total",), W),
    Panel("Batches in flight", ("iskander_worker_batches_in_flight",), W),
    Panel("CPU of workers", ("iskander_worker_cpu_seconds_total",), W, "max", unit="percentunit"),
    Panel("Memory of workers", ("iskander_worker_resident_bytes",), W, "max"),
    Panel("Memory of the gateway", ("iskander_resident_bytes", "iskander_memory_limit_bytes"),
          ("process",), "max"),
    Panel("Input arena", ("iskander_input_leased_bytes", "iskander_input_capacity_bytes"),
          ("process",)),
    Panel("Output arenas", ("iskander_worker_output_leased_bytes",
                            "iskander_worker_output_capacity_bytes"), W),
    Panel("Shared memory of clients", ("iskander_shared_bytes",)),
    Panel("Huge pages", ("iskander_input_huge_bytes",)),
    Panel("Locked memory", ("iskander_input_locked_bytes",)),
    Panel("Resources that the system refused", ("iskander_worker_notices",), W, "max"),
    Panel("State of GPUs", ("iskander_gpu_state",), (*G, "state"), "max", kind="state-timeline"),
    Panel("Load of GPUs", ("iskander_gpu_utilization_ratio",), G, "max", unit="percentunit"),
    Panel("Memory of GPUs", ("iskander_gpu_memory_used_bytes", "iskander_gpu_memory_total_bytes"),
          G, "max"),
    Panel("Temperature of GPUs", ("iskander_gpu_temperature_celsius",), G, "max", unit="celsius"),
    Panel("Power of GPUs", ("iskander_gpu_power_watts",), G, "max", unit="watt"),
    Panel("Lowered clocks of GPUs", ("iskander_gpu_throttled",), (*G, "reason"), "max"),
    Panel("Memory errors of GPUs", ("iskander_gpu_ecc_errors_total",), (*G, "kind"), "max"),
    Panel("Xid errors of GPUs", ("iskander_gpu_xid_errors_total",), (*G, "xid"), "max"),
    Panel("Repeated transfers on PCIe", ("iskander_gpu_pcie_replays_total",), G, "max"),
)  # fmt: skip

DASHBOARDS = {
    "overview": ("Iskander: overview", OVERVIEW),
    "model": ("Iskander: models", MODEL),
    "workers": ("Iskander: workers and memory", WORKERS),
}


def pages() -> dict[str, str]:
    """Text of each file, by its name."""
    return {
        f"{name}.json": json.dumps(_dashboard(name, title, panels), indent=1) + "\n"
        for name, (title, panels) in DASHBOARDS.items()
    }


def _dashboard(name: str, title: str, panels: tuple[Panel, ...]) -> dict[str, Any]:
    return {
        "uid": f"iskander-{name}",
        "title": title,
        "description": "Generated by scripts/gen_dashboards.py; change the script instead.",
        "tags": ["iskander"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [
            {"type": "dashboards", "title": "Iskander", "tags": ["iskander"], "asDropdown": True,
             "includeVars": True, "keepTime": True}
        ],
        "templating": {"list": _variables()},
        "panels": [_panel(index, panel) for index, panel in enumerate(panels)],
    }  # fmt: skip


def _variables() -> list[dict[str, Any]]:
    """The data source, and the labels that select what is shown."""
    source = {"name": "datasource", "label": "Data source", "type": "datasource"}
    return [
        source | {"query": "prometheus", "current": {}},
        _variable("job", "iskander_ready", is_multi=False),
        _variable("instance", 'iskander_ready{job="$job"}'),
        _variable("model", 'iskander_model_ready{job="$job",instance=~"$instance"}'),
    ]


def _variable(name: str, series: str, *, is_multi: bool = True) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": f"label_values({series}, {name})", "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": is_multi,
        "includeAll": is_multi,
        "current": {},
    }


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    width = WIDTH // COLUMNS
    row, column = divmod(index, COLUMNS)
    queries = [query for name in panel.names for query in _queries(panel, name)]
    sentences = [METRICS[name].sentence for name in panel.names if name in METRICS]
    return {
        "id": index + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": " ".join(dict.fromkeys(sentences)),
        "datasource": DATASOURCE,
        "gridPos": {"x": width * column, "y": HEIGHT * row, "w": width, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": panel.unit or _unit(panel.names[0])} | DEFAULTS[panel.kind],
            "overrides": [],
        },
        "options": OPTIONS[panel.kind],
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": DATASOURCE, "expr": expression,
             "legendFormat": legend}
            for at, (expression, legend) in enumerate(queries)
        ],
    }  # fmt: skip


def _queries(panel: Panel, name: str) -> list[tuple[str, str]]:
    """Queries of a metric with their legends."""
    metric = METRICS.get(name)
    legend = " ".join(f"{{{{{label}}}}}" for label in ("instance", *panel.by))
    if len(panel.names) > 1:
        legend += f" {_short(name)}"
    if metric is not None and metric.kind == "histogram":
        by = ", ".join(("instance", *panel.by, "le"))
        buckets = f"sum by ({by}) (rate({_selector(panel, f'{name}_bucket')}[$__rate_interval]))"
        return [
            (f"histogram_quantile({percent / 100:g}, {buckets})", f"{legend} p{percent}")
            for percent in panel.percentiles
        ]
    value = _selector(panel, name)
    if metric is not None and metric.kind == "counter":
        value = f"rate({value}[$__rate_interval])"
    if _is_time(panel, metric):
        value = f"{value} * 1000"  # Grafana counts in milliseconds.
    by = ", ".join(("instance", *panel.by))
    return [(f"{panel.how} by ({by}) ({value})", legend)]


def _selector(panel: Panel, name: str) -> str:
    matchers = ['job="$job"', 'instance=~"$instance"']
    base = name.removesuffix("_bucket")
    if base in PER_MODEL or base.startswith("model:"):
        matchers.append('model=~"$model"')
    if panel.where:
        matchers.append(panel.where)
    return f"{name}{{{','.join(matchers)}}}"


def _is_time(panel: Panel, metric: Metric[Any] | None) -> bool:
    return metric is not None and panel.unit.startswith("dateTime")


def _unit(name: str) -> str:
    metric = METRICS.get(name)
    if metric is None:
        return "short"
    if metric.kind == "counter":
        return "cps"
    return UNITS.get(metric.unit, "short")


def _short(name: str) -> str:
    return name.rpartition("iskander_")[2].removesuffix("_total").translate(BLANKS)


def main() -> None:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description="Write the Grafana dashboards.")
    parser.add_argument("--check", action="store_true", help="only compare with the existing files")
    is_check = parser.parse_args().check
    stale = []
    for name, text in pages().items():
        path = FOLDER / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not is_check:
                path.write_text(text)
    if is_check and stale:
        sys.exit(f"stale files in configs/grafana: {', '.join(stale)}; run `make docs`")


if __name__ == "__main__":
    main()
