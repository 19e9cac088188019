"""Progress of a job: a bar on a terminal, plain lines, or JSON lines; always on stderr.

Runs in: the operator's tool; `advance` may be called from several threads.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

from iskander.errors import ConfigError
from iskander.foundation import clock

KINDS: Final = ("auto", "bar", "plain", "json", "none")
LINE_S: Final = 5.0
"""Interval of plain and JSON lines."""


class Progress(Protocol):
    """Receiver of a job's progress."""

    def start(self, rows: int | None, units: int, *, rows_done: int, units_done: int) -> None:
        """Begin a job with `rows` rows, or None if their number is unknown."""

    def advance(self, rows: int) -> None:
        """Count scored rows."""

    def finish_unit(self) -> None:
        """Count a finished unit."""

    def close(self) -> None:
        """Write the last state; safe to repeat."""


class NoProgress:
    """No output."""

    def start(self, rows: int | None, units: int, *, rows_done: int, units_done: int) -> None:
        """Ignore."""

    def advance(self, rows: int) -> None:
        """Ignore."""

    def finish_unit(self) -> None:
        """Ignore."""

    def close(self) -> None:
        """Ignore."""


class LineProgress:
    """One line every `LINE_S` seconds, and one at the end.

    Args:
        write: Writes a text.
        is_json: Write JSON objects.
        now_ns: Clock.
    """

    def __init__(
        self,
        write: Callable[[str], Any],
        *,
        is_json: bool = False,
        now_ns: Callable[[], int] = clock.now_ns,
    ) -> None:
        self._write = write
        self._is_json = is_json
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._total: int | None = None
        self._units = self._units_done = 0
        self._rows = self._rows_before = 0
        self._started_ns = self._written_ns = 0
        self._is_open = False

    def start(self, rows: int | None, units: int, *, rows_done: int, units_done: int) -> None:
        """Begin."""
        with self._lock:
            self._total, self._units, self._units_done = rows, units, units_done
            self._rows = self._rows_before = rows_done
            self._started_ns = self._written_ns = self._now_ns()
            self._is_open = True

    def advance(self, rows: int) -> None:
        """Count scored rows; write a line if `LINE_S` seconds have passed."""
        with self._lock:
            self._rows += rows
            now_ns = self._now_ns()
            if now_ns - self._written_ns >= LINE_S * clock.NS_PER_S:
                self._written_ns = now_ns
                self._write(self._line(now_ns) + "\n")

    def finish_unit(self) -> None:
        """Count a unit."""
        with self._lock:
            self._units_done += 1

    def close(self) -> None:
        """Write the last line."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._write(self._line(self._now_ns()) + "\n")

    def _line(self, now_ns: int) -> str:
        seconds = (now_ns - self._started_ns) / clock.NS_PER_S
        rate = (self._rows - self._rows_before) / seconds if seconds > 0 else 0.0
        share = self._rows / self._total if self._total else None
        left_s = None
        if self._total is not None and rate > 0:
            left_s = max(self._total - self._rows, 0) / rate
        if self._is_json:
            values = {
                "rows": self._rows,
                "rows_total": self._total,
                "units": self._units_done,
                "units_total": self._units,
                "rows_per_s": round(rate, 1),
                "seconds": round(seconds, 3),
                "left_s": None if left_s is None else round(left_s, 1),
            }
            return json.dumps(values)
        text = f"iskander: {self._rows:,} rows"
        if share is not None:
            text += f" ({min(share, 1.0):.0%})"
        text += f", {self._units_done}/{self._units} units, {rate:,.0f} rows/s"
        return text if left_s is None else f"{text}, {left_s:,.0f} s left"


class BarProgress:
    """A progress bar of the library `rich`.

    Args:
        stderr: Terminal.
    """

    def __init__(self, stderr: Any) -> None:  # noqa: ANN401
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.completed:,.0f} rows"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=Console(file=stderr),
            transient=False,
        )
        self._lock = threading.Lock()
        self._task: Any = None
        self._units = self._units_done = 0

    def start(self, rows: int | None, units: int, *, rows_done: int, units_done: int) -> None:
        """Show the bar."""
        self._units, self._units_done = units, units_done
        self._task = self._bar.add_task(self._text(), total=rows, completed=rows_done, rate="")
        self._bar.start()

    def advance(self, rows: int) -> None:
        """Move the bar."""
        self._bar.advance(self._task, rows)
        speed = self._bar.tasks[0].speed
        self._bar.update(self._task, rate=f"{speed:,.0f} rows/s" if speed else "")

    def finish_unit(self) -> None:
        """Count a unit."""
        with self._lock:
            self._units_done += 1
            self._bar.update(self._task, description=self._text())

    def close(self) -> None:
        """Leave the last state on the terminal."""
        self._bar.stop()

    def _text(self) -> str:
        return f"{self._units_done}/{self._units} units"


def open_progress(kind: str) -> Progress:
    """Return the progress output of a kind.

    Args:
        kind: One of `KINDS`; `auto` is a bar on a terminal if `rich` is installed, else lines.

    Raises:
        ConfigError: The kind is unknown, or `bar` without `rich`.
    """
    if kind not in KINDS:
        raise ConfigError(f"progress is {kind!r}; expected {', '.join(KINDS)}")
    if kind == "none":
        return NoProgress()
    if kind == "bar" or (kind == "auto" and sys.stderr.isatty()):
        try:
            return BarProgress(sys.stderr)
        except ImportError as error:
            if kind == "bar":
                raise ConfigError("progress `bar` needs the extra `score` (rich)") from error
    return LineProgress(_write_line, is_json=kind == "json")


def _write_line(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
