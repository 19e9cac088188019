"""Limit of repeated log lines.

The first lines of a subject pass; one line replaces the others, with their number.

Pure. The table has a bound: a new subject ends the oldest one's count.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from copy import copy

FIRST = 10
"""Lines of a subject that pass within `WINDOW_S`."""
WINDOW_S = 10.0
SUBJECTS_MAX = 512


class _Count:
    """Lines of one subject since the first of them."""

    __slots__ = ("began_s", "last", "lines")

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.lines = 0
        self.last: logging.LogRecord | None = None

    def summary(self) -> logging.LogRecord | None:
        """Return the record that replaces the withheld ones; None without any."""
        if self.last is None:
            return None
        times, seconds = self.lines - FIRST, self.last.created - self.began_s
        text = self.last.getMessage()
        self.last.msg = f"{text} (repeated {times} times in {max(seconds, 1):.0f} s)"
        self.last.args = None
        self.last.repeated = times
        return self.last


class Repeats:
    """Counts of the recent subjects, in the order of their first lines."""

    def __init__(self) -> None:
        self._counts: OrderedDict[Hashable, _Count] = OrderedDict()

    def admit(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged now; call `due` before."""
        count = self._counts.setdefault(subject_of(record), _Count(record.created))
        count.lines += 1
        if count.lines <= FIRST:
            return True
        # The traceback is dropped: its frames hold memory.
        count.last = copy(record)
        count.last.exc_info = count.last.exc_text = None
        return False

    def due(self, now_s: float, room: int = 1) -> Iterator[logging.LogRecord]:
        """End the counts whose window is over, and enough for `room` new ones; yield summaries."""
        while self._counts:
            oldest = next(iter(self._counts.values()))
            is_over = now_s - oldest.began_s >= WINDOW_S or now_s < oldest.began_s
            if not is_over and len(self._counts) + room <= SUBJECTS_MAX:
                return
            self._counts.popitem(last=False)
            if (summary := oldest.summary()) is not None:
                yield summary

    def end(self) -> Iterator[logging.LogRecord]:
        """End all counts; yield summaries."""
        return self.due(float("inf"))


def subject_of(record: logging.LogRecord) -> Hashable:
    """Return the event and its subject, or for another library's line its logger and format."""
    event = getattr(record, "log_event", None)
    if event is None:
        return record.name, record.levelno, str(record.msg)[:200]
    fields = record.__dict__["log_fields"]
    return event.name, *(fields[key] for key in event.subject)
