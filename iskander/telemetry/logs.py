"""Logging to stderr, as text or JSON."""

from __future__ import annotations

import logging
import sys

import msgspec

from iskander.config.schema import AdminConfig
from iskander.telemetry.events import LOGGERS


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: int | None) -> None:
        super().__init__()
        self._own: dict[str, object] = {} if process is None else {"process": process}

    def format(self, record: logging.LogRecord) -> str:
        line = self._own | {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def set_up_logs(config: AdminConfig, process: int | None = None) -> None:
    """Log to stderr; `process` is the index of a process of several."""
    handler = logging.StreamHandler(sys.stderr)
    if config.log_format == "json":
        handler.setFormatter(_JsonFormatter(process))
    else:
        number = "" if process is None else f" [{process}]"
        line = f"%(asctime)s %(levelname).1s{number} %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(line, "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    level = logging.getLevelNamesMapping()[config.log_level.upper()]
    handler.setLevel(level)
    root.setLevel(level)
    for name in LOGGERS:
        # The page shows their records, also those that the log omits.
        logging.getLogger(name).setLevel(min(level, logging.INFO))
    logging.getLogger("asyncio").setLevel(logging.WARNING)
