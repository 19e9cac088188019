"""Search for the row with which a run fails, and for its column.

A search follows the failure of a batch that has rows of one request only. It runs halves of the
batch again: about log2(rows) runs with at most `rows + 1` rows in total. All searches of a worker
together use at most one part in `SHARE` of its time, so that failing requests cannot multiply its
load. A search runs only rows that the caller has sent, because other values could end the process.

Runs on: worker main.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

from iskander.contract.dtypes import OFFSET_BYTES
from iskander.contract.processing.strings import string_lengths, string_ranges
from iskander.contract.tensors import TensorSpec, body_layout
from iskander.errors import ExecutionFailed, IskanderError
from iskander.foundation.clock import NS_PER_MS, now_ns
from iskander.interprocess.control.messages import Execute, Slice
from iskander_worker.backends import Run
from iskander_worker.executor import Executor
from iskander_worker.warm_up import is_out_of_memory

SHARE: Final = 20
"""Searches use at most one part in `SHARE` of a worker's time."""
SAVED_NS: Final = 100 * NS_PER_MS
"""Limit of the unused time that is saved for later searches."""
TEXT_BYTES_MAX: Final = 65_536
"""Limit of the string bytes of a row and column that are read to find the column."""

# Errors of ONNX Runtime for a string that is no number name a C or C++ function that parses it.
_NO_NUMBER = re.compile(
    r"\bsto(?:i|l|ll|ul|ull|f|d|ld)\b|\bstrto\w+|string to|parse", re.IGNORECASE
)


class Finding(NamedTuple):
    """What a search found.

    Attributes:
        is_input: The values of the row are the cause, because the model has run other rows.
        row: First row of the request that fails alone; None if none was found.
        column: Column of the values that are the cause; empty if it is unknown.
    """

    is_input: bool = False
    row: int | None = None
    column: str = ""


class FailingRows:
    """Searches of one worker, and the time that is left for them.

    Attributes:
        ran: Keys of the models that have run a batch with success.
    """

    def __init__(self) -> None:
        self.ran: set[int] = set()
        self._unused_ns = SAVED_NS
        self._last_search_ns = now_ns()

    def find(self, executor: Executor, message: Execute, run: Run, error: IskanderError) -> Finding:
        """Search the row with which a batch fails.

        The finding is empty if a value cannot be the cause, or no time is left for the search.
        """
        if type(error) is not ExecutionFailed or error.is_shape or is_out_of_memory(error.message):
            return Finding()
        session = executor.sessions.get(message.model)
        if session is None or session.relation.is_whole or len(message.slices) != 1:
            return Finding()
        began_ns = now_ns()
        self._unused_ns = min(
            self._unused_ns + (began_ns - self._last_search_ns) // SHARE, SAVED_NS
        )
        limit_ns = began_ns + self._unused_ns
        part = message.slices[0]

        def fails(first: int, rows: int) -> bool | None:
            """Whether these rows fail; None: no time is left, or the run was aborted."""
            if now_ns() >= limit_ns or run.is_aborted:
                return None
            run.heartbeat()
            cut = Slice(
                part.input_offset, part.request_rows, part.first + first, rows, part.output_offset
            )
            is_fixed = session.contract.rows_fixed is not None
            count = message.rows if is_fixed else rows
            try:
                executor.try_rows(msgspec.structs.replace(message, rows=count, slices=(cut,)), run)
            except ExecutionFailed:
                return True
            return False

        found, has_others = first_failing(part.rows, fails)
        ended_ns = now_ns()
        self._unused_ns -= ended_ns - began_ns
        self._last_search_ns = ended_ns
        if found is None:
            return Finding()
        specs = session.bucket(message.bucket).inputs.specs
        body = executor.input_body(part.input_offset)
        row = part.first + found
        column = column_of(specs, body, part.request_rows, row, error.message)
        return Finding(has_others or message.model in self.ran, row, column)


def first_failing(rows: int, fails: Callable[[int, int], bool | None]) -> tuple[int | None, bool]:
    """Return the first row that fails alone, and whether other rows run.

    The caller knows that all rows together fail. `fails(first, count)` runs some of them; None ends
    the search.
    """
    # `is_proven`: one row is left, and it has failed alone.
    first, has_others, is_proven = 0, False, rows == 1
    while rows > 1:
        half = rows // 2
        outcome = fails(first, half)
        if outcome is None:
            return None, has_others
        if outcome:
            rows, is_proven = half, half == 1
        else:
            first, rows, has_others, is_proven = first + half, rows - half, True, False
    # Each half may run where both together fail, for example by the memory that they need.
    if is_proven or fails(first, 1):
        return first, has_others
    return None, has_others


def column_of(
    specs: tuple[TensorSpec, ...], body: memoryview, rows: int, row: int, text: str
) -> str:
    """Return the column whose values are the cause; empty if several columns can be.

    A single input column is the cause. If the error is about a string that is no number, the cause
    is the only column of strings, or the only column with such a string in this row.
    """
    if len(specs) == 1:
        return specs[0].column
    strings = [spec for spec in specs if spec.is_string]
    if not strings or not _NO_NUMBER.search(text):
        return ""
    if len(strings) == 1:
        return strings[0].column
    layout = body_layout(specs, rows)[0]
    ranges, _ = string_ranges(specs, rows, string_lengths(specs, rows, body, layout), layout)
    offsets = [at for spec, at in zip(specs, layout, strict=True) if spec.is_string]
    suspects = set()
    for spec, offset, (begin, _) in zip(strings, offsets, ranges, strict=True):
        count = spec.elements
        at = offset + row * count * OFFSET_BYTES
        ends = struct.unpack_from(f"<{count + 1}i", body, at)
        is_long = ends[-1] - ends[0] > TEXT_BYTES_MAX
        texts = () if is_long else pairwise(ends)
        if is_long or not all(_is_number(body[begin + i : begin + j]) for i, j in texts):
            suspects.add(spec.column)
    return suspects.pop() if len(suspects) == 1 else ""


def _is_number(text: memoryview) -> bool:
    try:
        float(bytes(text))
    except ValueError:
        return False
    return True
