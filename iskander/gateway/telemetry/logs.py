"""Set-up of the gateway's log: format, level, and the levels of other libraries."""

from __future__ import annotations

import logging
import os
import sys

from iskander.config.schema import AdminConfig
from iskander.foundation.logs import gateway as log
from iskander.foundation.logs.stderr import FORMAT_VARIABLE, StderrHandler, set_up
from iskander.gateway.telemetry.status.events import LOGGERS


def set_up_logs(config: AdminConfig, process: int | None = None) -> None:
    """Log to stderr; `process` is the index of a process of several."""
    os.environ[FORMAT_VARIABLE] = config.log_format  # For the workers and other child processes.
    tag = "" if process is None else str(process)
    set_up(config.log_format, process=process, tag=tag)
    set_log_level(config)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    sys.excepthook = lambda _, error, __: log.gateway_crashed(error=error)


def set_log_level(config: AdminConfig) -> None:
    """Set the lowest level of the log."""
    level, root = logging.getLevelNamesMapping()[config.log_level.upper()], logging.getLogger()
    root.setLevel(level)
    for handler in root.handlers:
        if isinstance(handler, StderrHandler):
            handler.setLevel(level)
    for name in LOGGERS:
        # The page and the event stream have their records, also those that the log omits.
        logging.getLogger(name).setLevel(min(level, logging.INFO))


def are_logs_set_up() -> bool:
    """Return whether `set_up_logs` was called in this process."""
    return any(isinstance(each, StderrHandler) for each in logging.getLogger().handlers)
