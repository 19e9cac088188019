"""Thread-safe preparation of msgspec types, and the exceptions of its decoders.

msgspec analyzes a type at its first decoding and publishes partial results: two threads that decode
a type for the first time crash the process. Types are therefore analyzed at import.

Source: msgspec 0.22, where this was found: a segmentation fault in `convert`.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

KindT = TypeVar("KindT", bound=msgspec.Struct)

DECODE_ERRORS: Final = (ValueError, RecursionError)
"""Exceptions for bytes from outside: other types, no UTF-8, numbers that are too long, nesting."""


def thread_safe(kind: type[KindT]) -> type[KindT]:
    """Decorate a type: analyze it, and the types in it, at its definition."""
    msgspec.json.Decoder(kind)
    return kind
