"""Copies of results from an output arena: small ones at once, large ones in pieces."""

from __future__ import annotations

import numpy as np
import pytest
from support.lanes import lane_of, request_of

from iskander.contract.column_types import ColumnType
from iskander.contract.processing.strings import string_ranges
from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.gateway.scheduling.results import copy_results, copy_small_results
from iskander.gateway.scheduling.worker_slot import BatchPart
from iskander.interprocess.memory.chunked_copy import WHOLE_BYTES

ROWS = 4096
STRINGS = Contract(
    inputs=(TensorSpec("x", "x", ColumnType("int64"), ()),),
    outputs=(TensorSpec("y", "y", ColumnType("utf8"), (), string_bytes=2048),),
)

NUMBERS = Contract(
    inputs=STRINGS.inputs,
    outputs=(
        TensorSpec("b", "b", ColumnType("bool"), ()),
        TensorSpec("v", "v", ColumnType("float64", (5,)), (5,)),
    ),
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


@pytest.mark.parametrize("length", [3, WHOLE_BYTES // ROWS + 1])
def test_padding_of_strings_has_nothing_of_earlier_results(length: int) -> None:
    """The memory around the values is zero in the copy, whatever the arena had there."""
    part, arena, body = string_results(length)
    layout = body_layout(STRINGS.outputs, ROWS)[0]
    ((begin, end),), _ = string_ranges(STRINGS.outputs, ROWS, [ROWS * length], layout)
    offsets_end = layout[0] + 4 * (ROWS + 1)
    arena[64 + offsets_end : 64 + begin] = b"\xaa" * (begin - offsets_end)
    arena[64 + end : 64 + len(body)] = b"\xaa" * (len(body) - end)
    assert begin > offsets_end

    assert copied(part, arena) == body


@pytest.mark.parametrize("rows", [1, 13, ROWS - 1])
def test_padding_of_numbers_has_nothing_of_earlier_results(rows: int) -> None:
    lane = lane_of(rows_max=ROWS, contract=NUMBERS)
    request = request_of(lane, rows)
    offsets, size = body_layout(NUMBERS.outputs, rows)
    arena = bytearray(b"\xaa" * (64 + size))
    expected = bytearray(size)
    values = np.arange(rows * 5, dtype=np.float64).tobytes()
    bits = np.packbits(np.ones(rows, bool), bitorder="little").tobytes()
    for body in (memoryview(arena)[64:], memoryview(expected)):
        body[offsets[0] : offsets[0] + len(bits)] = bits
        body[offsets[1] : offsets[1] + len(values)] = values
    arena[64 + offsets[0] + len(bits) - 1] |= 0xFF << (rows % 8 or 8) & 0xFF

    assert copied(BatchPart(request, 0, rows, 64), memoryview(arena)) == expected


def copied(part: BatchPart, arena: memoryview) -> bytes:
    """Copy all results of a request, in pieces if they are large."""
    small = copy_small_results(part, arena)
    if small is not None:
        return small
    steps = copy_results(part, arena)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return bytes(done.value)


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
