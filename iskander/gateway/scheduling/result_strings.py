"""Validation of the strings in a worker's results, after they were copied out of its arena.

Clients of Arrow read strings at their offsets without a check, so a taken-over worker could make
them read other memory. The copy is checked: the worker can still change the arena.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from iskander.arrow.utf8 import string_error
from iskander.contract.dtypes import OFFSET_BYTES
from iskander.contract.processing.rows import RowCopier
from iskander.errors import ExecutionFailed
from iskander.interprocess.memory.chunked_copy import PIECE_BYTES

_INVALID: Final = "the worker returned invalid strings"


def require_result_strings(outputs: RowCopier, body: memoryview, rows: int) -> Iterator[None]:
    """Validate the offsets and the UTF-8 of a body; yields after each piece of a large one.

    Raises:
        ExecutionFailed: They are invalid.
    """
    layout = outputs.layout(rows)[0]
    ranges = iter(outputs.string_ranges(body, rows)[0])
    for spec, offset in zip(outputs.specs, layout, strict=True):
        if not spec.is_string:
            continue
        begin, end = next(ranges)
        count = rows * spec.elements
        step = max(count * PIECE_BYTES // max(end - begin, count * OFFSET_BYTES, 1), 1)
        for first in range(0, count, step):
            strings = min(step, count - first)
            start = offset + first * OFFSET_BYTES
            ends = body[start : start + (strings + 1) * OFFSET_BYTES]
            is_text = spec.type.dtype_name == "utf8"
            problem = string_error(strings, ends, body[begin:end], is_text=is_text)
            if problem:
                raise ExecutionFailed(f"{_INVALID} in `{spec.column}`: {problem}")
            if first + strings < count:
                yield
