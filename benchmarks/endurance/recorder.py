"""Outcomes of the requests of one client process, and the gate that pauses them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

from benchmarks.endurance.latencies import Latencies

FAULTS_MAX = 20
"""Recorded texts of wrong answers and unexpected errors; all are counted."""


class Recorder:
    """Counts requests by their kind; closes the gate, and waits until no request is open.

    Attributes:
        is_over: Set when the process must end.
    """

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self._changed = threading.Condition()
        self._is_closed = True
        self._open: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._latencies: dict[str, Latencies] = {}
        self._faults: list[str] = []

    def begin(self, kind: str) -> int:
        """Count a sent request, once the gate is open; returns the time in nanoseconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_closed or self.is_over.is_set())
            self._open[kind] += 1
            self._counts[f"{kind}: sent"] += 1
        return time.monotonic_ns()

    def answered(self, kind: str, begun_ns: int, fault: str) -> None:
        """Count an answer, which is right if `fault` is empty."""
        with self._changed:
            self._end(kind, 1, "wrong" if fault else "right")
            self._latencies.setdefault(kind, Latencies()).record(
                (time.monotonic_ns() - begun_ns) / 1000
            )
            if fault:
                self._add_fault(f"{kind}: wrong answer: {fault}")

    def failed(
        self, kind: str, code: str, *, expected: frozenset[str], text: str, count: int = 1
    ) -> None:
        """Count requests that ended with an error."""
        is_expected = code in expected
        with self._changed:
            self._end(kind, count, f"{'error' if is_expected else 'unexpected'} {code}")
            if not is_expected:
                self._add_fault(f"{kind}: unexpected {code}: {text}")

    def left(self, kind: str, count: int = 1) -> None:
        """Count requests that the client abandoned."""
        with self._changed:
            self._end(kind, count, "left")

    def accuse(self, kind: str, text: str) -> None:
        """Record a fault that belongs to no open request."""
        with self._changed:
            self._counts[f"{kind}: wrong"] += 1
            self._add_fault(f"{kind}: {text}")

    def resume(self) -> None:
        """Open the gate."""
        with self._changed:
            self._is_closed = False
            self._changed.notify_all()

    def stop(self) -> None:
        """End all waits."""
        self.is_over.set()
        with self._changed:
            self._changed.notify_all()

    def pause(self, within_s: float) -> dict[str, Any]:
        """Close the gate and wait for the open requests.

        Returns:
            What happened since the last pause: counts, latencies, faults, and the kinds with
            requests that are still open.
        """
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._open.total(), within_s)
            report = {
                "counts": dict(self._counts),
                "latencies": {kind: each.encode() for kind, each in self._latencies.items()},
                "faults": self._faults,
                "unanswered": {kind: count for kind, count in self._open.items() if count},
            }
            self._counts, self._latencies, self._faults = Counter(), {}, []
        return report

    def _end(self, kind: str, count: int, how: str) -> None:
        self._open[kind] -= count
        self._counts[f"{kind}: {how}"] += count
        self._changed.notify_all()

    def _add_fault(self, text: str) -> None:
        if len(self._faults) < FAULTS_MAX:
            self._faults.append(text[:500])
