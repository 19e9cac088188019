"""Validation of string columns and tensors: UTF-8, offsets and total size.

Runs on: gateway loop.
"""

from __future__ import annotations

import pyarrow as pa

from iskander.arrow.ipc import error_text
from iskander.config.schema import LimitsConfig
from iskander.errors import ContractError, LimitExceeded, MalformedInput


def require_string_bytes(count: int, limits: LimitsConfig) -> None:
    """Reject a batch with too many bytes of strings, passed-through columns included."""
    if count > limits.string_bytes:
        limit = f"limit {limits.string_bytes} (`limits.string_bytes`)"
        problem = f"the batch has {count} string bytes, {limit}"
        raise LimitExceeded(problem, wanted=limits.string_bytes)


def require_strings(
    what: str, count: int, offsets: bytes | memoryview, joined: bytes | memoryview
) -> None:
    """Validate `count` strings of the column or tensor `what`: int32 offsets, joined bytes.

    Raises:
        MalformedInput: The offsets decrease or are out of bounds.
        ContractError: A string is not UTF-8.
    """
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(joined)]
    try:
        pa.Array.from_buffers(pa.utf8(), count, buffers).validate(full=True)
    except pa.ArrowInvalid as error:
        text = error_text(error)
        try:
            pa.Array.from_buffers(pa.binary(), count, buffers).validate(full=True)
        except pa.ArrowInvalid:
            raise MalformedInput(f"{what}: {text}") from None
        raise ContractError(f"{what}: {text}; model strings must be UTF-8") from None


def string_error(
    count: int, offsets: bytes | memoryview, joined: bytes | memoryview, *, is_text: bool
) -> str:
    """Return why strings are invalid.

    Empty if their offsets are valid and, for text, their UTF-8.
    """
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(joined)]
    kind = pa.utf8() if is_text else pa.binary()
    try:
        pa.Array.from_buffers(kind, count, buffers).validate(full=True)
    except pa.ArrowInvalid as error:
        return error_text(error)
    return ""
