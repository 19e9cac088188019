"""Types that may be decoded by any thread.

msgspec learns what a type is when it is first decoded, and lets other threads see what it has
learned so far: two threads that decode a type for the first time end the process. What is known
before a second thread is there cannot be half known.

Source: msgspec 0.22, where this was found: a segmentation fault in `convert`.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

KindT = TypeVar("KindT", bound=msgspec.Struct)


def thread_safe(kind: type[KindT]) -> type[KindT]:
    """Have msgspec learn a type, and those in it, where it is defined; a decorator."""
    msgspec.json.Decoder(kind)
    return kind
