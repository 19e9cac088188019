"""Results taken out of an arena: all at once where they are small, in pieces where they are not."""

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
WORDS = Contract(
    inputs=(TensorSpec("x", "x", ColumnType("int64"), ()),),
    outputs=(TensorSpec("y", "y", ColumnType("utf8"), (), string_bytes=2048),),
)


def words(length: int) -> tuple[BatchPart, memoryview, bytes]:
    """A part with all rows of a request, an arena with a word for each, and the results' bytes."""
    lane = lane_of(rows_max=ROWS, contract=WORDS)
    request = request_of(lane, ROWS)
    offsets = (np.arange(ROWS + 1) * length).astype(np.int32)
    layout = body_layout(WORDS.outputs, ROWS)[0]
    ((begin, end),), size = string_ranges(WORDS.outputs, ROWS, [ROWS * length], layout)
    body = bytearray(size)
    body[layout[0] : layout[0] + offsets.nbytes] = offsets.tobytes()
    body[begin:end] = np.arange(end - begin, dtype=np.uint8).tobytes()
    arena = bytearray(64 + max(request.layout.output_bytes, size))
    arena[64 : 64 + size] = body
    return BatchPart(request, 0, ROWS, 64), memoryview(arena), bytes(body)


def test_short_strings_are_taken_at_once_however_long_they_might_have_been() -> None:
    part, arena, body = words(3)
    assert part.request.layout.output_bytes > WHOLE_BYTES > len(body)
    assert copy_small_results(part, arena) == body


def test_long_ones_are_left_to_be_taken_in_pieces() -> None:
    part, arena, body = words(WHOLE_BYTES // ROWS + 1)
    assert copy_small_results(part, arena) is None
    taking, pauses = copy_results(part, arena), 0
    with pytest.raises(StopIteration) as done:
        while True:
            next(taking)
            pauses += 1
    assert pauses > 1 and bytes(done.value.value) == body


def test_some_rows_of_a_request_are_never_taken_alone() -> None:
    part, arena, _ = words(3)
    part.rows = ROWS - 1
    assert copy_small_results(part, arena) is None
