"""Counters of the prediction log, which its threads change and its report reads.

Runs on: the observer process, several threads.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, Final

BUFFER_FULL, WRITE_FAILED = "buffer_full", "write_failed"
SPOOL_FULL, UNKNOWN_COLUMN = "spool_full", "unknown_column"
DROPS: Final = (BUFFER_FULL, WRITE_FAILED, SPOOL_FULL, UNKNOWN_COLUMN)


class Counts:
    """What became of the samples.

    Attributes:
        spooled_bytes: Bytes of complete files that wait for their upload.
    """

    def __init__(self) -> None:
        self.spooled_bytes = 0
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._failure = ""

    def on_delivered(self, samples: int, size: int) -> None:
        """Count a file that readers can see; it ends a failure."""
        with self._lock:
            self._counts.update(logged=samples, files=1, bytes=size)
            self._failure = ""

    def on_dropped(self, reason: str, samples: int = 1) -> None:
        """Count samples that are in no file."""
        with self._lock:
            self._counts[reason] += samples

    def on_failure(self, text: str) -> None:
        """Keep an error until the next delivery."""
        with self._lock:
            self._failure = text[:500]

    def report(self) -> dict[str, Any]:
        """Return the report of `sample.Consumer`."""
        with self._lock:
            counts = dict(self._counts)
        return {
            "counts": counts,
            "failure": self._failure,
            "spooled_bytes": self.spooled_bytes,
        }
