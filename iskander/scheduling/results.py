"""Results out of a worker's arena, into memory that is their caller's.

A copy, since a caller may be slow to take them and the worker needs its room back.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Generator
from operator import itemgetter
from typing import TypeAlias

import numpy as np

from iskander.contract.rows import Rows
from iskander.memory.chunked_copy import PIECE_BYTES, WHOLE_BYTES, copied
from iskander.scheduling.request import Request
from iskander.scheduling.worker_slot import BatchPart

Taking: TypeAlias = Generator[None, None, bytes | memoryview | None]


def copy_small_results(part: BatchPart, arena: memoryview) -> bytes | None:
    """Copy small, complete results of a request; None where `copy_results` has to do it."""
    request, offset = part.request, part.output_offset
    if part.rows < request.rows:
        return None
    output = arena[offset : offset + request.layout.output_bytes]
    outputs = request.lane.layouts.outputs
    if outputs.has_strings:
        output = output[: outputs.string_ranges(output, part.rows)[1]]
    return output.tobytes() if output.nbytes <= WHOLE_BYTES else None


def copy_results(part: BatchPart, arena: memoryview) -> Taking:
    """Copy what a batch computed of a request, with pauses in a large copy.

    Args:
        part: Rows of a request, and where their results are.
        arena: Of the worker that computed them.

    Returns:
        The request's results; None while rows of it are missing that other batches compute.
    """
    request, first, rows, offset = part.request, part.first, part.rows, part.output_offset
    outputs = request.lane.layouts.outputs
    if rows < request.rows:
        collected = _joined if outputs.has_strings else _collected
        return (yield from collected(request, first, rows, arena[offset:]))
    size = request.layout.output_bytes
    output = arena[offset : offset + size]
    if outputs.has_strings:
        size = outputs.string_ranges(output, rows)[1]
        output = output[:size]
    results = np.empty(size, np.uint8).data
    yield from copied(results, output)
    return results


def _collected(request: Request, first: int, rows: int, output: memoryview) -> Taking:
    """Add some rows' results to those of their request."""
    lane = request.lane
    size = request.layout.output_bytes
    if request.results is None:
        # The system zeroes it page by page, when the copies get there.
        request.results = np.zeros(size, np.uint8).data
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


def _joined(request: Request, first: int, rows: int, output: memoryview) -> Taking:
    """Keep some rows' results, since strings have their places only when all of them are there."""
    outputs = request.lane.layouts.outputs
    size = outputs.string_ranges(output, rows)[1]
    kept = np.empty(size, np.uint8).data
    yield from copied(kept, output[:size])
    if request.results is None:
        request.results = []
    assert isinstance(request.results, list)
    request.results.append((first, rows, kept))
    if not _is_complete(request):
        return None
    parts = sorted(request.results, key=itemgetter(0))
    return (yield from outputs.join([(count, Rows(body, count, 0)) for _, count, body in parts]))


def _is_complete(request: Request) -> bool:
    """Whether these are the last rows; their batch is still counted as running."""
    return not request.todo and request.running <= 1
