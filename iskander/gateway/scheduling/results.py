"""Copies results out of a worker's output arena into memory that the caller owns.

Results are copied because a caller may read slowly, and the worker needs its arena again.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from operator import itemgetter
from typing import TypeAlias

import numpy as np

from iskander.contract.processing.rows import Rows
from iskander.gateway.scheduling.request import Request
from iskander.gateway.scheduling.result_strings import require_result_strings
from iskander.gateway.scheduling.worker_slot import BatchPart
from iskander.interprocess.memory.chunked_copy import PIECE_BYTES, WHOLE_BYTES, copy_in_pieces

Copying: TypeAlias = Generator[None, None, bytes | memoryview | None]


def copy_small_results(part: BatchPart, arena: memoryview) -> bytes | None:
    """Copy a request's results if small and complete, else return None."""
    request, offset = part.request, part.output_offset
    if part.rows < request.rows:
        return None
    output = arena[offset : offset + request.layout.output_bytes]
    outputs = request.lane.layouts.outputs
    if outputs.has_strings:
        output = output[: outputs.string_ranges(output, part.rows)[1]]
    if output.nbytes > WHOLE_BYTES:
        return None
    outputs.clear_padding(output, part.rows)
    results = output.tobytes()
    if outputs.has_strings:
        deque(require_result_strings(outputs, memoryview(results), part.rows), maxlen=0)
    return results


def copy_results(part: BatchPart, arena: memoryview) -> Copying:
    """Copy the results of one request of a batch, with pauses during a large copy.

    Returns None while other batches compute its other rows.
    """
    request, first, rows, offset = part.request, part.first, part.rows, part.output_offset
    outputs = request.lane.layouts.outputs
    if rows < request.rows:
        collect = _collect_strings if outputs.has_strings else _collect
        return (yield from collect(request, first, rows, arena[offset:]))
    size = request.layout.output_bytes
    output = arena[offset : offset + size]
    if outputs.has_strings:
        size = outputs.string_ranges(output, rows)[1]
    outputs.clear_padding(output, rows)
    copy = yield from _copy(output[:size])
    if outputs.has_strings:
        yield from require_result_strings(outputs, copy, rows)
    return copy


def _copy(output: memoryview) -> Generator[None, None, memoryview]:
    copy = np.empty(output.nbytes, np.uint8).data
    yield from copy_in_pieces(copy, output)
    return copy


def _collect(request: Request, first: int, rows: int, output: memoryview) -> Copying:
    """Copy the results of some rows of a request into its result body."""
    lane = request.lane
    if request.results is None:
        # The kernel zeroes the pages one by one, on the first write.
        request.results = np.zeros(request.layout.output_bytes, np.uint8).data
    results = request.results
    assert isinstance(results, memoryview)
    step = max(rows * PIECE_BYTES // max(lane.layout(rows).output_bytes, 1), 1)
    for at in range(0, rows, step):
        count = min(step, rows - at)
        source, target = Rows(output, rows, at), Rows(results, request.rows, first + at)
        lane.layouts.outputs.copy(count, source, target)
        if at + count < rows:
            yield
    return results if _is_complete(request) else None


def _collect_strings(request: Request, first: int, rows: int, output: memoryview) -> Copying:
    """Copy the results of some rows of a request; after the last rows, join all of them."""
    outputs = request.lane.layouts.outputs
    body = yield from _copy(output[: outputs.string_ranges(output, rows)[1]])
    yield from require_result_strings(outputs, body, rows)
    if request.results is None:
        request.results = []
    assert isinstance(request.results, list)
    request.results.append((first, rows, body))
    if not _is_complete(request):
        return None
    parts = sorted(request.results, key=itemgetter(0))
    return (yield from outputs.join([(count, Rows(each, count, 0)) for _, count, each in parts]))


def _is_complete(request: Request) -> bool:
    """Whether the copied part is the last; it still counts as running."""
    return not request.todo and request.running <= 1
