"""Metrics of shadow versions, for `/metrics`.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.foundation.measurement.log_scale import percentile
from iskander.gateway.shadow.comparison import Differences, EqualityComparison, FloatComparison
from iskander.gateway.shadow.pair import ShadowPair
from iskander.gateway.telemetry.metrics.exposition import Metric, Readings, Scope
from iskander.gateway.telemetry.status.shadow_reader import run_times

LABELS = ("model", "served", "candidate")
QUANTILES = (0.5, 0.95, 0.99, 1.0)


def _rows(pair: ShadowPair) -> Readings:
    return [((), pair.comparison.rows if pair.comparison is not None else 0)]


def _disagreeing(pair: ShadowPair) -> Readings:
    return [((), pair.comparison.disagreeing if pair.comparison is not None else 0)]


def _dropped(pair: ShadowPair) -> Readings:
    return [((reason,), rows) for reason, rows in sorted(pair.dropped.items())]


def _outputs(pair: ShadowPair) -> Sequence[FloatComparison | EqualityComparison]:
    return pair.comparison.outputs if pair.comparison is not None else ()


def _output_rows(pair: ShadowPair) -> Readings:
    return [((each.match.name,), each.disagreeing) for each in _outputs(pair)]


def _quantiles(output: FloatComparison, found: Differences) -> Readings:
    name, counts = output.match.name, found.sparse()
    return [
        ((name, f"{quantile:g}"), percentile(counts, 100 * quantile, found.highest))
        for quantile in QUANTILES
    ]


def _floats(pair: ShadowPair) -> list[FloatComparison]:
    return [each for each in _outputs(pair) if isinstance(each, FloatComparison)]


def _absolute(pair: ShadowPair) -> Readings:
    return [reading for each in _floats(pair) for reading in _quantiles(each, each.absolute)]


def _relative(pair: ShadowPair) -> Readings:
    return [reading for each in _floats(pair) for reading in _quantiles(each, each.relative)]


def _run_seconds(pair: ShadowPair) -> Readings:
    _, served_ns, candidate_ns = run_times(pair)
    times = {pair.served.model.version: served_ns, pair.candidate.model.version: candidate_ns}
    return [((version,), ns / NS_PER_S) for version, ns in times.items() if ns is not None]


def _is_comparing(pair: ShadowPair) -> Readings:
    return [((), pair.state(now_ns())[0] == "comparing")]


SHADOW_METRICS: tuple[Metric[ShadowPair], ...] = (
    Metric("iskander_shadow_comparing", "gauge", "", (), "Whether requests of the served version "
           "are compared; 0 if the pair is paused, suspended, not comparable or not ready.",
           _is_comparing),
    Metric("iskander_shadow_rows_total", "counter", "rows", (), "Compared rows.", _rows),
    Metric("iskander_shadow_disagreeing_rows_total", "counter", "rows", (), "Compared rows of "
           "which any output differs; floats beyond the tolerance.", _disagreeing),
    Metric("iskander_shadow_dropped_rows_total", "counter", "rows", ("reason",), "Rows of selected "
           "requests that were not compared.", _dropped),
    Metric("iskander_shadow_output_disagreeing_rows_total", "counter", "rows", ("output",),
           "Compared rows of which this output differs.", _output_rows),
    Metric("iskander_shadow_absolute_difference", "gauge", "", ("output", "quantile"),
           "Absolute difference of floats since the start, by quantile; 1 is the highest.",
           _absolute),
    Metric("iskander_shadow_relative_difference", "gauge", "", ("output", "quantile"), "The same, "
           "divided by the larger absolute value of the two.", _relative),
    Metric("iskander_shadow_run_seconds", "gauge", "seconds", ("version",), "Run time of a batch "
           "with the mean rows of the served version, by the cost model of each version.",
           _run_seconds),
)  # fmt: skip

SHADOW_SCOPE: Scope = ("shadow version", LABELS, SHADOW_METRICS)
