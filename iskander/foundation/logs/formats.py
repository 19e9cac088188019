"""Formats of log lines: text for people, and JSON with the declared fields.

Pure. One line is one event; control characters in values are escaped. Only a traceback in text has
further lines, which are indented.

Source: sd-daemon(3) (priorities), RFC 3339 (times).
"""

from __future__ import annotations

import logging
import traceback
from datetime import datetime
from typing import Any

import msgspec

LIBRARY_MESSAGE = "library_message"
"""Event of the lines of other libraries."""
TRACEBACK_MAX = 16_000
FRAMES_MAX = 20
RESERVED = (
    "time", "level", "logger", "event", "message", "pid", "process", "repeated", "exception",
)  # fmt: skip
"""Keys of JSON lines that are no field of an event; the last three only if they apply."""
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
_ESCAPES |= {9: "\\t", 10: "\\n", 13: "\\r", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class _Format(logging.Formatter):
    """Formats tracebacks.

    Attributes:
        is_chained: Also with the causes of an exception. Exceptions of a model's code may have
            any number of them.
    """

    is_chained = True

    def formatException(self, ei: Any) -> str:  # noqa: ANN401
        """Return the traceback of at most `TRACEBACK_MAX` characters: its begin and its end."""
        lines = traceback.format_exception(ei[1], limit=-FRAMES_MAX, chain=self.is_chained)
        text = "".join(lines).rstrip("\n")
        if len(text) <= TRACEBACK_MAX:
            return text
        half = TRACEBACK_MAX // 2
        return f"{text[:half]}\n...\n{text[-half:]}"


class TextFormat(_Format):
    """Time, first letter of the level, logger, text.

    Args:
        tag: Follows the level; such as the number of the process.
        is_timed: The time and the level are in the line; the journal has both anyway.
    """

    def __init__(self, tag: str = "", *, is_timed: bool = True) -> None:
        start = "%(asctime)s %(levelname).1s" if is_timed else ""
        super().__init__(f"{start}{tag and f' [{tag}]'} %(name)s: %(message)s".strip(), "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line, without the traceback."""
        record.message = record.message.translate(_ESCAPES)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: ANN401
        return "\n".join(f"    {line}" for line in super().formatException(ei).splitlines())


class JsonFormat(_Format):
    """One JSON object a line, with the fields of the event beside the reserved keys."""

    def __init__(self, process: int | None = None) -> None:
        super().__init__()
        self._own: dict[str, object] = {} if process is None else {"process": process}

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        event = getattr(record, "log_event", None)
        time = datetime.fromtimestamp(record.created).astimezone()
        line: dict[str, object] = {
            "time": time.isoformat("T", "milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": LIBRARY_MESSAGE if event is None else event.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        line |= self._own | getattr(record, "log_fields", {})
        if (times := getattr(record, "repeated", 0)) > 0:
            line["repeated"] = times
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class JournalFormat(logging.Formatter):
    """Lines of another format with the priority that the journal reads."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record, each with its priority."""
        prefix = f"<{priority(record.levelno)}>"
        return "\n".join(prefix + line for line in self._inner.format(record).split("\n"))


def priority(level: int) -> int:
    """Return the priority of syslog(3) of a level."""
    limits = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
    return next((number for least, number in limits if level >= least), 7)
