"""Figures of shadow versions: status document, merge of processes, metrics, and the command."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.lanes import cost_of, lane_of
from support.observed import observe

from iskander.cli.startup.compare import render
from iskander.contract.column_types import ColumnType
from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.foundation.clock import now_ns
from iskander.gateway.scheduling.input_arena import InputArena
from iskander.gateway.shadow.comparison import Body, Tolerance
from iskander.gateway.shadow.pair import ShadowPair
from iskander.gateway.shadow.queue import ShadowQueue, Usage
from iskander.gateway.telemetry.metrics.exposition import SCOPES, Collector
from iskander.gateway.telemetry.metrics.shadow_metrics import SHADOW_SCOPE
from iskander.gateway.telemetry.status.document import Status
from iskander.gateway.telemetry.status.events import EventLog
from iskander.gateway.telemetry.status.history import History
from iskander.gateway.telemetry.status.reader import StatusReader
from iskander.gateway.telemetry.status.shadow_reader import read_outputs, read_shadow
from iskander.gateway.telemetry.status.shadow_status import (
    OUTPUTS_MAX,
    PAIRS_MAX,
    SHADOWS_MAX,
    OutputStatus,
    ShadowStatus,
    merge_outputs,
    merge_shadows,
)

OUTPUTS = (
    TensorSpec("score", "score", ColumnType("float64"), ()),
    TensorSpec("label", "label", ColumnType("int64"), ()),
)


def pair_of(served: list[tuple[float, int]], candidate: list[tuple[float, int]]) -> ShadowPair:
    """A pair of versions that has compared these rows."""
    x = (TensorSpec("x", "x", ColumnType("int64"), ()),)
    lanes = [lane_of(0, contract=Contract(x, OUTPUTS)), lane_of(1, contract=Contract(x, OUTPUTS))]
    for lane, version in zip(lanes, "12", strict=True):
        lane.model = msgspec.structs.replace(lane.model, name="m", version=version)
    lanes[0].metrics.batch_rows.record(8)
    lanes[0].costs[0] = cost_of(1000, 100_000)
    arena = InputArena(1 << 16)
    queue = ShadowQueue(arena, Usage())
    pair = ShadowPair(*lanes, queue, Tolerance(1e-6, 1e-3), lambda *_: None)
    arena.close()
    pair.share = 0.5
    assert pair.match() and pair.comparison is not None
    pair.comparison.collect(len(served), *(Body(_body(v), len(v), 0) for v in (served, candidate)))
    pair.comparison.compare()
    return pair


def _body(rows: list[tuple[float, int]]) -> bytes:
    offsets, size = body_layout(OUTPUTS, len(rows))
    body = bytearray(size)
    scores, labels = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
    for offset, column in zip(offsets, (scores, labels), strict=True):
        body[offset : offset + column.nbytes] = column.tobytes()
    return bytes(body)


SERVED = [(1.0, 3), (2.0, 4), (4.0, 5), (0.0, 6)]
CANDIDATE = [(1.0, 3), (3.0, 7), (4.0, 7), (0.0, 6)]


def test_figures_of_a_pair() -> None:
    pair = pair_of(SERVED, CANDIDATE)
    pair.dropped["busy"] += 9
    shadow = read_shadow(pair)
    assert (shadow.key, shadow.share, shadow.rows) == (("m", "1", "2"), 0.5, 4)
    assert (shadow.disagreeing, shadow.disagreeing_percent) == (2, 50)
    assert (shadow.state, shadow.dropped) == ("waiting", {"busy": 9})
    assert (shadow.run_rows, shadow.served_run_ms) == (8, pytest.approx(0.108, rel=0.01))
    assert shadow.candidate_run_ms is None

    score, label = read_outputs(pair)
    assert score.key == ("m", "1", "2", "score")
    assert (score.kind, score.disagreeing, score.bias, score.values) == ("float", 1, 0.25, 4)
    assert score.absolute is not None and score.relative is not None
    assert (score.absolute.p50, score.absolute.highest) == (0, 1)
    assert score.relative.highest == pytest.approx(1 / 3, rel=1e-3)
    assert score.relative_max_percent == pytest.approx(100 / 3, rel=1e-3)
    assert (label.kind, label.disagreeing) == ("label", 2)
    assert label.pairs == {"4 > 7": 1, "5 > 7": 1}
    assert label.absolute is None and label.relative_p50_percent is None


def test_pair_without_a_comparison() -> None:
    pair = pair_of(SERVED, CANDIDATE)
    pair.comparison, pair.problem = None, "the inputs differ"
    shadow = read_shadow(pair)
    assert (shadow.state, shadow.reason, shadow.rows) == ("not comparable", "the inputs differ", 0)
    assert list(read_outputs(pair)) == []


def test_processes_are_merged_as_if_they_were_one() -> None:
    """Counts, percentiles and pairs are those of all rows."""
    one, two = pair_of(SERVED[:2], CANDIDATE[:2]), pair_of(SERVED[2:], CANDIDATE[2:])
    whole = pair_of(SERVED, CANDIDATE)
    (shadow,) = merge_shadows([read_shadow(one), read_shadow(two)])
    assert shadow == read_shadow(whole)
    merged = merge_outputs([*read_outputs(one), *read_outputs(two)])
    assert merged == sorted(read_outputs(whole), key=lambda output: output.key)


def test_merge_keeps_the_worst_state_and_the_most_frequent_pairs() -> None:
    def shadow(state: str, **fields: Any) -> ShadowStatus:
        names = {"name": "m", "served": "1", "candidate": "2"}
        return ShadowStatus(**names, state=state, **fields)

    (merged,) = merge_shadows([
        shadow("comparing", dropped={"busy": 1}, served_run_ms=1.0),
        shadow("suspended", reason="it failed", dropped={"busy": 2, "failed": 3}),
    ])  # fmt: skip
    assert (merged.state, merged.reason) == ("suspended", "it failed")
    assert merged.dropped == {"busy": 3, "failed": 3}
    assert (merged.served_run_ms, merged.disagreeing_percent) == (1.0, None)

    def output(first: int) -> OutputStatus:
        pairs = {f"a > {index}": 1 + index for index in range(first, first + PAIRS_MAX)}
        names = {"name": "m", "served": "1", "candidate": "2", "output": "y"}
        return OutputStatus(**names, kind="label", pairs=pairs)

    (merged_output,) = merge_outputs([output(0), output(5)])
    assert len(merged_output.pairs) == PAIRS_MAX
    assert merged_output.pairs["a > 9"] == 20


def test_status_document_has_the_figures() -> None:
    pair = pair_of(SERVED, CANDIDATE)
    sources = observe([], shadows=lambda: [pair])
    status = asyncio.run(StatusReader(sources, History(), EventLog()).read())
    document = msgspec.json.decode(msgspec.json.encode(status), type=Status)
    assert document.shadows == [read_shadow(pair)]
    assert document.shadow_outputs == list(read_outputs(pair))


def test_lists_are_bounded() -> None:
    pairs = [pair_of(SERVED, CANDIDATE) for _ in range(SHADOWS_MAX + 3)]
    sources = observe([], shadows=lambda: pairs)
    status = asyncio.run(StatusReader(sources, History(), EventLog()).read())
    assert (len(status.shadows), status.left_out["shadows"]) == (SHADOWS_MAX, 3)
    assert len(status.shadow_outputs) == OUTPUTS_MAX == 2 * SHADOWS_MAX


def test_metrics() -> None:
    pair = pair_of(SERVED, CANDIDATE)
    pair.dropped["busy"] += 9
    sources = observe([], shadows=lambda: [pair])
    page = asyncio.run(Collector(sources, (*SCOPES, SHADOW_SCOPE)).render(False)).decode()
    found = {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k in LABELS)): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("iskander_shadow_")
    }
    assert found["iskander_shadow_rows_total",] == 4
    assert found["iskander_shadow_disagreeing_rows_total",] == 2
    assert found["iskander_shadow_dropped_rows_total", "busy"] == 9
    assert found["iskander_shadow_output_disagreeing_rows_total", "label"] == 2
    assert found["iskander_shadow_absolute_difference", "score", "1"] == 1
    assert found["iskander_shadow_relative_difference", "score", "0.5"] == 0
    assert found["iskander_shadow_run_seconds", "1"] == pytest.approx(0.000108, rel=0.01)
    assert found["iskander_shadow_comparing",] == 0


LABELS = ("output", "quantile", "reason", "version")


def test_command_prints_no_escapes_of_a_model() -> None:
    """The reason may have the message of an error that the candidate raised."""
    pair = pair_of(SERVED, CANDIDATE)
    pair.pauses.on_failure("a shadow batch failed: \x1b]0;title\x07", now_ns())
    shadows = [read_shadow(pair)]
    assert "suspended: a shadow batch failed: ?]0;title?" in render(shadows, [])


def test_command_prints_the_figures() -> None:
    pair = pair_of(SERVED, CANDIDATE)
    pair.dropped["busy"] += 9
    shadows = [read_shadow(pair)]
    outputs = list(read_outputs(pair))
    assert (
        "\n".join(render(shadows, outputs))
        == """\
m: served version 1, shadow version 2, share 0.5
waiting: no worker runs the candidate
4 rows compared, 2 differ (50 %)
rows not compared: busy 9
run of 8 rows: 0.108 ms served, - ms shadow

output  differ  difference  p50    p95    p99  highest  bias  unmatched
score   25 %    absolute      0  0.983  0.997        1  0.25          0
                relative      0  0.333  0.333    0.333

output  differ  kind
label   50 %    label

label: served > shadow  rows
4 > 7                      1
5 > 7                      1"""
    )
