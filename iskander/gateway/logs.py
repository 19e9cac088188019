"""Log lines on stderr: for people, or as JSON for machines."""

from __future__ import annotations

import logging
import sys

import msgspec

from iskander.config import AdminConfig
from iskander.memory.backing import Backing


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def set_up_logs(config: AdminConfig) -> None:
    """Send this process's log lines to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    if config.log_format == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S")
        )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.log_level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def log_backing(log: logging.Logger, name: str, backing: Backing) -> None:
    """Say what memory an arena is, and what was refused."""
    log.info("%s: %s", name, backing)
    for complaint in backing.complaints:
        log.warning("%s: %s", name, complaint)
