"""Decision which requests are traced, and the limit of spans per second.

Pure. Source: OpenTelemetry's ParentBased and TraceIdRatioBased samplers.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from iskander.errors import Fault, IskanderError
from iskander.foundation.clock import NS_PER_S

ID_BITS: Final = 64
"""The ratio applies to the low 64 bits of a trace id."""
RESERVE: Final = 4
"""Head-sampled requests leave one part in `RESERVE` of the spans to failed and slow ones."""


class Reason(StrEnum):
    """Reason for a trace; `NONE`: there is none."""

    NONE = ""
    HEAD = "head"
    ERROR = "error"
    SLOW = "slow"


def is_failure(error: IskanderError | None) -> bool:
    """Whether a request always has a trace: it failed, and not by a fault of its caller."""
    return error is not None and error.fault is not Fault.CLIENT


def trace_reason(
    error: IskanderError | None, duration_ns: int, slow_ns: int, is_head_sampled: bool
) -> Reason:
    """Return the reason to trace an ended request; `slow_ns` is 0 without that rule."""
    if is_head_sampled:
        return Reason.HEAD
    if is_failure(error):
        return Reason.ERROR
    if slow_ns and duration_ns > slow_ns:
        return Reason.SLOW
    return Reason.NONE


class SpanLimit:
    """Token bucket of spans; it holds those of one second."""

    def __init__(self, spans_per_s: int, now_ns: int) -> None:
        self._rate = self._left = float(spans_per_s)
        self._updated_ns = now_ns

    def set_rate(self, spans_per_s: int) -> None:
        """Change the limit; a higher one fills with time."""
        self._rate = float(spans_per_s)

    def take(self, spans: int, now_ns: int, *, is_head_sampled: bool) -> bool:
        """Take the spans of a request; return False if the limit is reached."""
        elapsed_s = (now_ns - self._updated_ns) / NS_PER_S
        self._updated_ns = now_ns
        self._left = min(self._left + elapsed_s * self._rate, self._rate)
        reserve = self._rate / RESERVE if is_head_sampled else 0.0
        if self._left - spans < reserve:
            return False
        self._left -= spans
        return True
