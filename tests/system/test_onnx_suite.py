"""ONNX's backend suite over gRPC, HTTP and Flight, compared with ONNX Runtime in process."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

import pytest
from onnx_suite import table
from onnx_suite.cases import KINDS, Case, suite
from onnx_suite.comparison import Verdict, judge

WORDS = (
    "test_abs", "test_and2d", "test_cast_FLOAT_to_FLOAT16", "test_cast_FLOAT_to_BFLOAT16",
    "test_cumsum_2d_axis_0", "test_dropout_default", "test_identity", "test_lstm_defaults",
    "test_mod_uint8", "test_nonzero_example", "test_reversesequence_time",
    "test_reduce_mean_default", "test_scan9_sum", "test_shape_clip_start", "test_softmax_axis_0",
    "test_string_concat", "test_top_k", "test_unique_not_sorted_without_axis", "test_add_bcast",
    "test_PReLU_2d", "test_operator_maxpool",
)  # fmt: skip
"""Names of a short selection: each kind of type, verdict and relation of rows."""
SHARE = 4
"""`make test-onnx` runs all cases, the slow test every fourth."""
RIGHT_MIN, TOGETHER_MIN = 150, 1000
MODELS_EACH = 100


def verdicts_of(cases: Iterable[Case]) -> list[Verdict]:
    iterator, verdicts = iter(cases), list[Verdict]()
    while chunk := list(itertools.islice(iterator, MODELS_EACH)):
        judge(chunk, verdicts.append)
    return verdicts


@pytest.mark.slow
def test_selection() -> None:
    """Results alone and at once, and reasons of refused models."""
    verdicts = verdicts_of(suite(("node", "pytorch-converted", "pytorch-operator"), WORDS))
    assert [vars(each) for each in verdicts if each.is_bad] == []
    rows = Counter(table.row_of(each) for each in verdicts)
    assert table.summarize(verdicts, ("", "")).is_good, rows
    assert rows[table.RIGHT] >= 15
    assert len(rows) >= 4


@pytest.mark.slow
def test_a_quarter_of_the_suite() -> None:
    verdicts = verdicts_of(itertools.islice(suite(KINDS[:-1]), 0, None, SHARE))
    assert [vars(each) for each in verdicts if each.is_bad] == []
    summary = table.summarize(verdicts, ("", ""))
    assert summary.is_good, summary.counts
    right = sum(count for (row, _), count in summary.counts.items() if row == table.RIGHT)
    assert right >= RIGHT_MIN
    assert summary.together >= TOGETHER_MIN
