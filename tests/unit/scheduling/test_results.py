"""Copies of results from an output arena: small ones at once, large ones in pieces."""

from __future__ import annotations

import numpy as np
import pytest
from support.lanes import lane_of, request_of

from iskander.contract.column_types import ColumnType
from iskander.contract.strings import string_ranges
from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.memory.chunked_copy import WHOLE_BYTES
from iskander.scheduling.results import copy_results, copy_small_results
from iskander.scheduling.worker_slot import BatchPart

ROWS = 4096
STRINGS = Contract(
    inputs=(TensorSpec("x", "x", ColumnType("int64"), ()),),
    outputs=(TensorSpec("y", "y", ColumnType("utf8"), (), string_bytes=2048),),
)


def string_results(length: int) -> tuple[BatchPart, memoryview, bytes]:
    """A part with all rows of a request, an arena with a string per row, and the result bytes."""
    lane = lane_of(rows_max=ROWS, contract=STRINGS)
    request = request_of(lane, ROWS)
    offsets = (np.arange(ROWS + 1) * length).astype(np.int32)
    layout = body_layout(STRINGS.outputs, ROWS)[0]
    ((begin, end),), size = string_ranges(STRINGS.outputs, ROWS, [ROWS * length], layout)
    body = bytearray(size)
    body[layout[0] : layout[0] + offsets.nbytes] = offsets.tobytes()
    body[begin:end] = (np.arange(end - begin) % 128).astype(np.uint8).tobytes()
    arena = bytearray(64 + max(request.layout.output_bytes, size))
    arena[64 : 64 + size] = body
    return BatchPart(request, 0, ROWS, 64), memoryview(arena), bytes(body)


def test_short_strings_are_copied_at_once_regardless_of_their_limit() -> None:
    part, arena, body = string_results(3)
    assert part.request.layout.output_bytes > WHOLE_BYTES > len(body)
    assert copy_small_results(part, arena) == body


def test_long_strings_are_copied_in_pieces() -> None:
    part, arena, body = string_results(WHOLE_BYTES // ROWS + 1)
    assert copy_small_results(part, arena) is None
    steps, pauses = copy_results(part, arena), 0
    with pytest.raises(StopIteration) as done:
        while True:
            next(steps)
            pauses += 1
    assert pauses > 1 and bytes(done.value.value) == body


def test_partial_results_of_a_request_are_not_copied_at_once() -> None:
    part, arena, _ = string_results(3)
    part.rows = ROWS - 1
    assert copy_small_results(part, arena) is None
