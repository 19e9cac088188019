"""Handler of the root logger: log lines on stderr, with limited repeats.

The gateway sets the format for the processes that it starts in the environment, since all of them
share its stderr.

Source: systemd.exec(5) (JOURNAL_STREAM).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import TextIO

from iskander.foundation.logs import gateway, workers
from iskander.foundation.logs.formats import JournalFormat, JsonFormat, TextFormat
from iskander.foundation.logs.repeats import WINDOW_S, Repeats

FORMAT_VARIABLE = "ISKANDER_LOG_FORMAT"
TEXT, JSON = "text", "json"
JOURNAL_VARIABLE = "JOURNAL_STREAM"


class StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes lines; a timer writes the summaries of withheld ones if no other line follows."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._repeats = Repeats()
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or count it as a repeat."""
        for summary in self._repeats.due(record.created):
            super().emit(summary)
        if self._repeats.admit(record):
            super().emit(record)
        elif self._timer is None:
            self._set_timer()

    def close(self) -> None:
        """Write the summaries that are left."""
        with self.lock:  # type: ignore[union-attr]
            if self._timer is not None:
                self._timer.cancel()
            for summary in self._repeats.end():
                super().emit(summary)
        super().close()

    def _set_timer(self) -> None:
        self._timer = threading.Timer(WINDOW_S, self._on_timer)
        self._timer.name, self._timer.daemon = "isk-log-repeats", True
        self._timer.start()

    def _on_timer(self) -> None:
        with self.lock:  # type: ignore[union-attr]
            self._timer = None
            for summary in self._repeats.end():
                super().emit(summary)


def set_up(
    log_format: str, *, process: int | None = None, tag: str = "", has_model_code: bool = False
) -> StderrHandler:
    """Log to stderr.

    Args:
        log_format: `json`, else text.
        process: Index of a process of several.
        tag: Follows the level in text.
        has_model_code: Code of models runs in this process.

    Returns:
        The only handler of the root logger.
    """
    handler, is_journal = StderrHandler(), is_journal_stream(sys.stderr)
    is_json = log_format == JSON
    inner = JsonFormat(process) if is_json else TextFormat(tag, is_timed=not is_journal)
    inner.is_chained = not has_model_code
    handler.setFormatter(JournalFormat(inner) if is_journal else inner)
    logging.getLogger().handlers[:] = [handler]
    return handler


def set_up_child(*, has_model_code: bool = False) -> None:
    """Log in the format of the gateway that started this process, also an uncaught exception."""
    log_format = os.environ.get(FORMAT_VARIABLE, TEXT)
    set_up(log_format, tag=str(os.getpid()), has_model_code=has_model_code)
    logging.getLogger().setLevel(logging.INFO)
    log_uncaught()


def log_uncaught() -> None:
    """Log an uncaught exception of this auxiliary process of the gateway."""
    sys.excepthook = lambda _, error, __: gateway.auxiliary_process_crashed(error=error)


def set_up_worker() -> None:
    """Log the lines of a worker, also for an uncaught exception."""
    set_up_child(has_model_code=True)
    sys.excepthook = lambda _, error, __: workers.worker_crashed(error=error)


def is_journal_stream(stream: TextIO) -> bool:
    """Return whether a stream is the one that systemd connected to the journal."""
    expected = os.environ.get(JOURNAL_VARIABLE)
    if not expected:
        return False
    try:
        status = os.fstat(stream.fileno())
    except OSError:
        return False
    return expected == f"{status.st_dev}:{status.st_ino}"
