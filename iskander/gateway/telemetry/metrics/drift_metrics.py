"""Metrics of drift: columns by state, and the figures of the columns with the most drift.

The number of series is bounded by that of the columns in a report.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from iskander.gateway.observation.drift_report import (
    QUANTILES,
    STATES,
    ColumnDrift,
    ModelDrift,
    SideSummary,
)
from iskander.gateway.telemetry.metrics.exposition import LANE_LABELS, Metric, Readings, Scope

COLUMN_LABELS = ("side", "column")
SUMMARY_LABELS = (*COLUMN_LABELS, "of")


def _states(model: ModelDrift) -> Readings:
    return [
        ((side, state), counts.get(state, 0))
        for side, counts in model.states.items()
        for state in STATES
    ]


def _reference_rows(model: ModelDrift) -> Readings:
    return [((), 0 if model.reference in ("", "recording") else model.reference_rows)]


def _of_columns(read: Callable[[ColumnDrift], float | None]) -> Callable[[ModelDrift], Readings]:
    def readings(model: ModelDrift) -> Readings:
        for column in model.columns:
            value = read(column)
            if value is not None:
                yield (column.side, column.column), value

    return readings


def _measure(name: str, text: str, key: str) -> Metric[ModelDrift]:
    read = _of_columns(lambda column: column.measures.get(key))
    return Metric(name, "gauge", "", COLUMN_LABELS, text, read)


def _summaries(model: ModelDrift) -> Iterator[tuple[tuple[str, str, str], SideSummary]]:
    for column in model.columns:
        for of, summary in (("recent", column.recent), ("reference", column.reference)):
            if summary is not None:
                yield (column.side, column.column, of), summary


def _means(model: ModelDrift) -> Readings:
    return [(key, each.mean) for key, each in _summaries(model) if each.mean is not None]


def _quantiles(model: ModelDrift) -> Readings:
    for key, summary in _summaries(model):
        for quantile, value in zip(QUANTILES, summary.quantiles, strict=False):
            yield (*key, f"{quantile:g}"), value


DRIFT_METRICS: tuple[Metric[ModelDrift], ...] = (
    Metric("iskander_drift_columns", "gauge", "columns", ("side", "state"), "Columns of inputs and "
           "outputs by state: drifting, steady, or unjudged (no reference, or too few values).",
           _states),
    Metric("iskander_drift_recent_rows", "gauge", "rows", (), "Rows of the sampled requests in the "
           "last `drift.window_s`.", lambda model: [((), model.rows)]),
    Metric("iskander_drift_reference_rows", "gauge", "rows", (), "Rows of the reference; 0 without "
           "one.", _reference_rows),
    Metric("iskander_drift_left_out_columns", "gauge", "columns", (), "Columns that are not "
           "summarized (`drift.columns`).", lambda model: [((), model.left_out)]),
    Metric("iskander_drift_severity", "gauge", "", COLUMN_LABELS, "Greatest measure of a column in "
           "units of its limit; above 1 the column drifts. This and the following only for the "
           "columns with the most drift (`drift.columns_listed`).",
           _of_columns(lambda column: column.severity)),
    _measure("iskander_drift_psi", "Population stability index against the reference.", "psi"),
    _measure("iskander_drift_ks", "Kolmogorov-Smirnov distance from the reference.", "ks"),
    _measure("iskander_drift_missing_difference", "Difference of the shares of null, NaN and "
             "infinite values.", "missing"),
    _measure("iskander_drift_out_of_range_ratio", "Share of numbers outside the range of the "
             "reference.", "out_of_range"),
    _measure("iskander_drift_new_labels_ratio", "Share of labels that the reference does not have.",
             "new_labels"),
    Metric("iskander_drift_values", "gauge", "values", SUMMARY_LABELS, "Summarized values: recent "
           "or of the reference.",
           lambda model: [(key, each.count) for key, each in _summaries(model)]),
    Metric("iskander_drift_missing_ratio", "gauge", "", SUMMARY_LABELS, "Share of null, NaN and "
           "infinite values.",
           lambda model: [(key, each.missing) for key, each in _summaries(model)]),
    Metric("iskander_drift_mean", "gauge", "", SUMMARY_LABELS, "Mean of numbers.", _means),
    Metric("iskander_drift_quantile", "gauge", "", (*SUMMARY_LABELS, "quantile"), "Quantiles of "
           "numbers.", _quantiles),
)  # fmt: skip

DRIFT_SCOPE: Scope = ("drift", LANE_LABELS, DRIFT_METRICS)
