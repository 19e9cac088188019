"""Pairs of versions: the copied part of the candidate's results."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from support.lanes import lane_of, request_of

from iskander.contract.column_types import ColumnType
from iskander.contract.processing.strings import string_ranges
from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.gateway.shadow.comparison import Tolerance
from iskander.gateway.shadow.pair import INTERNAL, ShadowPair
from iskander.gateway.shadow.queue import ShadowPart, ShadowRequest

ROWS = 8
STRINGS = Contract(
    (TensorSpec("x", "x", ColumnType("int64"), ()),),
    (TensorSpec("y", "y", ColumnType("utf8"), (), string_bytes=1 << 18),),
)


def strings(length: int) -> bytes:
    """Results of `ROWS` rows, with a string of one length in each."""
    layout = body_layout(STRINGS.outputs, ROWS)[0]
    ((begin, end),), size = string_ranges(STRINGS.outputs, ROWS, [ROWS * length], layout)
    body = bytearray(size)
    ends = (np.arange(ROWS + 1) * length).astype(np.int32).tobytes()
    body[layout[0] : layout[0] + len(ends)] = ends
    body[begin:end] = b"a" * (end - begin)
    return bytes(body)


@pytest.fixture
def pair() -> ShadowPair:
    lanes = [lane_of(key, contract=STRINGS) for key in (0, 1)]
    unused = cast(Any, None)
    made = ShadowPair(lanes[0], lanes[1], unused, Tolerance(0.0, 0.0), unused)
    assert made.match()
    return made


def part(pair: ShadowPair, results: bytes) -> ShadowPart:
    request = ShadowRequest(request_of(pair.served, ROWS), cast(Any, None), results, now_ns=0)
    return ShadowPart(request, 0, ROWS)


def test_only_the_strings_are_copied(pair: ShadowPair) -> None:
    """The space for the longest ones is two megabytes."""
    body = strings(3)
    space = bytes(pair.candidate.layout(ROWS).output_bytes - len(body))
    assert len(space) > 2_000_000
    pair.collect(part(pair, body), memoryview(body + space), now=0)

    assert pair.comparison is not None and not pair.comparison.is_due
    pair.compare(now=pair.compare_at_ns)
    assert (pair.comparison.rows, pair.comparison.disagreeing) == (ROWS, 0)


def test_damaged_strings_suspend_the_pair(pair: ShadowPair) -> None:
    """A worker wrote them; the batch must be finished, which releases its memory."""
    damaged = bytearray(strings(3))
    damaged[ROWS * 4 : ROWS * 4 + 4] = (-1).to_bytes(4, "little", signed=True)
    pair.collect(part(pair, strings(3)), memoryview(damaged), now=0)
    assert pair.pauses.reason == INTERNAL
    assert pair.comparison is not None and not pair.comparison.rows
