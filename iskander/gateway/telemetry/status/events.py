"""Recent changes of state: the last log records of some loggers, with their time.

The log is the source, because it has the changes of workers, models, quarantines, drains and
reloads in one order; the history of a worker slot has only its own.

Runs on: gateway loop, and the parent's loop.
"""

from __future__ import annotations

import logging
from collections import deque

import msgspec

from iskander.foundation.decoders import thread_safe

EVENTS_MAX = 100
TEXT_MAX = 300
"""Characters of an event or a reason; load errors of models can be long."""
LOGGERS = (
    "iskander.processes",
    "iskander.repository",
    "iskander.server",
    "iskander.supervisor",
)
"""Loggers that report changes of state. The others report single calls, or files of tokens."""


@thread_safe
class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A change of state.

    Attributes:
        at_s: Unix time.
        process: Gateway process, of several.
    """

    at_s: float
    level: str
    text: str
    process: int | None = None


class EventLog(logging.Handler):
    """The last records of `LOGGERS` between `start` and `stop`."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.events: deque[Event] = deque(maxlen=EVENTS_MAX)

    def start(self) -> None:
        """Receive records."""
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self)

    def stop(self) -> None:
        """Receive no more records."""
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Add a record as an event, without its traceback."""
        text = shorten(record.getMessage())
        self.events.append(
            Event(at_s=round(record.created, 3), level=record.levelname.lower(), text=text)
        )


def shorten(text: str) -> str:
    """Return a text on one line, with at most `TEXT_MAX` characters."""
    line = " ".join(text[: 4 * TEXT_MAX].split())
    return line if len(line) <= TEXT_MAX else f"{line[: TEXT_MAX - 3]}..."
