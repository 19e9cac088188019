"""Results out of a worker's arena, into memory that is their caller's.

A copy, since a caller may be slow to take them and the worker needs its room back.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias

import numpy as np

from iskander.contract.rows import Rows
from iskander.gateway.lanes.request import Request
from iskander.gateway.supervision.workers import Part
from iskander.memory.pieces import PIECE_BYTES, WHOLE_BYTES, copied

Taking: TypeAlias = Generator[None, None, bytes | memoryview | None]


def taken(part: Part, arena: memoryview) -> Taking:
    """Copy what a batch computed of a request, with pauses in a large copy.

    Args:
        part: Rows of a request, and where their results are.
        arena: Of the worker that computed them.

    Returns:
        The request's results; None while rows of it are missing that other batches compute.
    """
    request, first, rows, offset = part
    if rows < request.rows:
        return (yield from _collected(request, first, rows, arena[offset:]))
    size = request.layout.output_bytes
    output = arena[offset : offset + size]
    if size <= WHOLE_BYTES:
        return bytes(output)
    results = np.empty(size, np.uint8).data
    yield from copied(results, output)
    return results


def _collected(request: Request, first: int, rows: int, output: memoryview) -> Taking:
    """Add some rows' results to those of their request."""
    lane = request.lane
    size = request.layout.output_bytes
    if request.results is None:
        request.results = bytearray(size)
    results = memoryview(request.results)
    step = max(rows * PIECE_BYTES // max(lane.layout(rows).output_bytes, 1), 1)
    for at in range(0, rows, step):
        count = min(step, rows - at)
        source, target = Rows(output, rows, at), Rows(results, request.rows, first + at)
        lane.layouts.outputs.copy(count, source, target)
        if at + count < rows:
            yield
    # This batch has been computed, but is still counted as running.
    return None if request.todo or request.running > 1 else results
