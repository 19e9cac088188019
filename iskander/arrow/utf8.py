"""Whether the strings of a column or tensor can be given to a model.

Runs on: gateway loop.
"""

from __future__ import annotations

import pyarrow as pa

from iskander.config.schema import LimitsConfig
from iskander.errors import ContractError, LimitExceeded, MalformedInput


def require_string_bytes(count: int, limits: LimitsConfig) -> None:
    """Refuse a batch of too many bytes of strings, whether they go to the model or pass beside it.

    Raises:
        LimitExceeded: Says how many may be.
    """
    if count > limits.string_bytes:
        raise LimitExceeded(
            f"a batch's strings may have {limits.string_bytes} bytes, got {count}",
            wanted=limits.string_bytes,
        )


def require_strings(
    what: str, count: int, offsets: bytes | memoryview, joined: bytes | memoryview
) -> None:
    """Refuse strings that are not what their offsets say, or no UTF-8, as a graph's strings are.

    Args:
        what: The column or tensor, for the error.
        count: How many strings.
        offsets: One more than strings, int32.
        joined: The bytes that they are offsets in.

    Raises:
        MalformedInput: The offsets go backwards, or beyond the bytes.
        ContractError: A string is not UTF-8.
    """
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(joined)]
    try:
        pa.Array.from_buffers(pa.utf8(), count, buffers).validate(full=True)
    except pa.ArrowInvalid as error:
        text = str(error).split("\n", 1)[0]
        try:
            pa.Array.from_buffers(pa.binary(), count, buffers).validate(full=True)
        except pa.ArrowInvalid:
            raise MalformedInput(f"{what}: {text}") from None
        raise ContractError(f"{what}: {text}, and the strings of a model are UTF-8") from None
