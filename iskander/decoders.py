"""Thread-safe preparation of msgspec types.

msgspec analyzes a type at its first decoding and publishes partial results: two threads that decode
a type for the first time crash the process. Types are therefore analyzed at import.

Source: msgspec 0.22, where this was found: a segmentation fault in `convert`.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

KindT = TypeVar("KindT", bound=msgspec.Struct)


def thread_safe(kind: type[KindT]) -> type[KindT]:
    """Decorate a type: analyze it, and the types in it, at its definition."""
    msgspec.json.Decoder(kind)
    return kind
