"""Log events with a topic as events of the stream.

Runs on: any thread that logs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from iskander.foundation.logs.catalog import level_name
from iskander.foundation.logs.event import EVENTS
from iskander.gateway.event_stream.messages import Change


class ChangeHandler(logging.Handler):
    """Passes changes of workers, models and the gateway on, between `start` and `stop`."""

    def __init__(self, add: Callable[[str, Change], None], process: int | None = None) -> None:
        super().__init__(logging.INFO)
        self._add, self._process = add, process
        self._loggers = {logging.getLogger(e.logger_name) for e in EVENTS.values() if e.topic}

    def start(self) -> None:
        """Receive log records."""
        for logger in self._loggers:
            logger.addHandler(self)

    def stop(self) -> None:
        """Receive no more log records."""
        for logger in self._loggers:
            logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a record on if it is an event with a topic."""
        event = getattr(record, "log_event", None)
        if event is not None and event.topic:
            fields = record.__dict__["log_fields"]
            change = Change(
                at_s=record.created,
                process=self._process,
                event=event.name,
                level=level_name(event),
                text=record.getMessage(),
                fields=fields,
            )
            self._add(event.topic, change)
