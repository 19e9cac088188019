"""Screen of `iskander top`: keys change its state, and a snapshot becomes lines of text.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from iskander.cli.tables import MIB, format_duration, format_number, printable
from iskander.cli.top.snapshot import ModelRow, Snapshot, WorkerRow

View = Literal["models", "workers"]
Style = Literal["", "head", "bad", "faint"]
Row = ModelRow | WorkerRow

FILTER_MAX = 60
REST_MIN = 12
"""Least width of the column without one; columns are omitted for it."""
HEADER_LINES = 4
"""Lines above the rows: two about the server, one for the filter, the head of the table."""

_KEYS: dict[bytes, str] = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b": "escape",
    b"\t": "tab",
    b"\r": "enter",
    b"\n": "enter",
    b"\x7f": "backspace",
    b"\x08": "backspace",
}


def read_keys(data: bytes) -> list[str]:
    """Split the bytes of a terminal into keys: names of special keys, and single characters."""
    keys = []
    while data:
        sequence = next((each for each in _KEYS if data.startswith(each)), None)
        if sequence == b"\x1b" and data[1:2] in (b"[", b"O"):
            # An unknown special key; it ends with a letter or `~`.
            end = next((i for i, c in enumerate(data[2:], 3) if 64 <= c <= 126), len(data))
            data = data[end:]
            continue
        if sequence is not None:
            keys.append(_KEYS[sequence])
            data = data[len(sequence) :]
            continue
        character = data[:1].decode("ascii", "replace")
        if character.isprintable() and character.isascii():
            keys.append(character)
        data = data[1:]
    return keys


class Column(NamedTuple):
    """A column: its field, and its width; 0 for the rest of the line.

    `key` sorts by the column.
    """

    head: str
    field: str
    width: int
    key: str = ""


COLUMNS: dict[View, tuple[Column, ...]] = {
    "models": (
        Column("model", "name", 0, "n"),
        Column("state", "state", 11),
        Column("req/s", "requests_per_s", 7, "r"),
        Column("rows/s", "rows_per_s", 7, "o"),
        Column("queue", "queued", 6, "u"),
        Column("p50 ms", "p50_ms", 6, "m"),
        Column("p95 ms", "p95_ms", 6, "p"),
        Column("p99 ms", "p99_ms", 6, "t"),
        Column("rej/s", "rejected_per_s", 6, "e"),
    ),
    "workers": (
        Column("worker", "name", 6, "n"),
        Column("state", "state", 11),
        Column("group", "group", 5),
        Column("cpus", "cpus", 8),
        Column("batch/s", "batches_per_s", 7, "b"),
        Column("run", "in_flight", 3, "u"),
        Column("MiB", "resident_bytes", 7, "m"),
        Column("starts", "starts", 6, "s"),
        Column("GPU", "gpu", 4),
        Column("GPU %", "gpu_percent", 5, "g"),
        Column("GPU MiB", "gpu_bytes", 7, "v"),
        Column("last event", "last", 0),
    ),
}
_PROBLEMS = ("not ready", "quarantined", "crash loop", "hung", "absent", "out of service")
_LEFT = ("name", "state", "cpus", "last")
_FIRST_SORT: dict[View, str] = {"models": "requests_per_s", "workers": "name"}
HELP = (
    "tab        models or workers",
    "/          filter by name; enter keeps the filter, escape removes it",
    "space      pause",
    "up, down   scroll; also j, k, page up, page down",
    "q          quit",
    "A key sorts by its column, a second time in reverse:",
)


@dataclass
class Screen:
    """State of the screen.

    Attributes:
        first: Index of the first row on the screen.
        is_typing: Keys go to the filter.
    """

    view: View = "models"
    sort: str = _FIRST_SORT["models"]
    is_reversed: bool = False
    text: str = ""
    first: int = 0
    is_typing: bool = False
    is_paused: bool = False
    has_help: bool = False
    is_over: bool = False

    def press(self, key: str, page: int = 10) -> None:
        """Apply a key; `page` is the number of rows of the screen."""
        if self.is_typing:
            self._type(key)
            return
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page}
        by_key = {column.key: column.field for column in COLUMNS[self.view] if column.key}
        if key == "q":
            self.is_over = True
        elif key == "tab":
            self.view = "workers" if self.view == "models" else "models"
            self.sort, self.is_reversed, self.first = _FIRST_SORT[self.view], False, 0
        elif key == "/":
            self.is_typing = True
        elif key == "escape":
            self.text, self.has_help, self.first = "", False, 0
        elif key in ("?", "h"):
            self.has_help = not self.has_help
        elif key == " ":
            self.is_paused = not self.is_paused
        elif key in steps:
            self.first = max(self.first + steps[key], 0)
        elif key in by_key:
            self.is_reversed = by_key[key] == self.sort and not self.is_reversed
            self.sort = by_key[key]

    def _type(self, key: str) -> None:
        """Edit the filter."""
        if key in ("enter", "escape"):
            self.is_typing = False
            self.text = "" if key == "escape" else self.text
        elif key == "backspace":
            self.text = self.text[:-1]
        elif len(key) == 1 and len(self.text) < FILTER_MAX:
            self.text += key
        self.first = 0

    def rows(self, snapshot: Snapshot) -> list[Row]:
        """Filter and sort the rows: names ascending, numbers descending, unknown ones last."""
        rows: Sequence[Row] = snapshot.models if self.view == "models" else snapshot.workers
        if self.view == "models":
            rows = [row for row in rows if self.text.lower() in row.name.lower()]
        if self.sort == "name":
            key = str if self.view == "models" else int
            return sorted(rows, key=lambda row: key(row.name), reverse=self.is_reversed)
        known = [row for row in rows if getattr(row, self.sort) is not None]
        unknown = [row for row in rows if getattr(row, self.sort) is None]
        ordered = sorted(
            known, key=lambda row: getattr(row, self.sort), reverse=not self.is_reversed
        )
        return [*ordered, *unknown]

    def draw(
        self, snapshot: Snapshot, width: int, height: int, note: str = ""
    ) -> list[tuple[str, Style]]:
        """Return exactly `height` lines of at most `width` characters, each with its style.

        `note` is an error of the connection.
        """
        lines = [*_server_lines(snapshot, note), (self._filter_line(), "")]
        if self.has_help:
            sorts = [f"{each.key}          {each.head}" for each in COLUMNS[self.view] if each.key]
            lines += [(text, "") for text in (*HELP, *sorts)]
        else:
            lines += self._table(snapshot, width, max(height - HEADER_LINES - 1, 1))
        lines = lines[: height - 1]
        lines += [("", "")] * (height - 1 - len(lines))
        foot = "tab: view  /: filter  space: pause  ?: help  q: quit"
        return [(text[:width].rstrip(), style) for text, style in [*lines, (foot, "faint")]]

    def _filter_line(self) -> str:
        cursor = "_" if self.is_typing else ""
        paused = "  PAUSED" if self.is_paused else ""
        text = f"  filter: {self.text}{cursor}" if self.text or self.is_typing else ""
        return f"{self.view}{paused}{text}"

    def _table(self, snapshot: Snapshot, width: int, height: int) -> list[tuple[str, Style]]:
        """The head and the rows; the last line counts the rows that do not fit."""
        columns, widths = fit_columns(self.view, width)
        rows = self.rows(snapshot)
        space = height if len(rows) <= height else height - 1
        self.first = max(min(self.first, len(rows) - space), 0)
        shown = rows[self.first : self.first + space]
        marks = [_mark(self, column) for column in columns]
        lines: list[tuple[str, Style]] = [(_line(columns, widths, marks), "head")]
        for row in shown:
            cells = [render_cell(column.field, getattr(row, column.field)) for column in columns]
            style: Style = "bad" if row.state in _PROBLEMS else ""
            lines.append((_line(columns, widths, cells), style))
        if len(rows) > len(shown):
            lines.append((f"{len(rows) - len(shown)} more", "faint"))
        return lines


def fit_columns(view: View, width: int) -> tuple[list[Column], list[int]]:
    """Return the columns of a view for a screen, and their widths: the first ones that fit."""
    columns = list(COLUMNS[view])
    while True:
        rest = width - sum(column.width for column in columns) - len(columns) + 1
        fixed = [column for column in columns if column.width]
        if rest >= REST_MIN or len(fixed) == 1:
            return columns, [column.width or max(rest, 1) for column in columns]
        columns.remove(fixed[-1])


def _server_lines(snapshot: Snapshot, note: str) -> list[tuple[str, Style]]:
    state = "ready" if snapshot.ready else "not ready"
    leased, capacity = snapshot.input_leased_bytes / MIB, snapshot.input_capacity_bytes / MIB
    server = (
        f"iskander {snapshot.version}, process {snapshot.process}, {state}, "
        f"up {format_duration(snapshot.uptime_s)}, {snapshot.streams} streams, "
        f"{snapshot.calls} calls, input {leased:.0f}/{capacity:.0f} MiB"
    )
    problem = note or (snapshot.reasons[0] if snapshot.reasons else "")
    more = f" ({len(snapshot.reasons) - 1} more)" if len(snapshot.reasons) > 1 and not note else ""
    return [(server, ""), (printable(problem + more), "bad")]


def _mark(screen: Screen, column: Column) -> str:
    """Head of a column; a `*` marks the sorted one."""
    return f"{column.head}*" if column.field == screen.sort else column.head


def _line(columns: Sequence[Column], widths: Sequence[int], cells: Sequence[str]) -> str:
    parts = []
    for column, width, cell in zip(columns, widths, cells, strict=True):
        text = _fit(cell, width) if column.field == "name" else cell[:width]
        parts.append(text.ljust(width) if column.field in _LEFT else text.rjust(width))
    return " ".join(parts)


def render_cell(field: str, value: object) -> str:
    """Format a value of a row; `-` is unknown."""
    if value is None:
        return "-"
    if field in ("resident_bytes", "gpu_bytes") and isinstance(value, int):
        return format_number(value / MIB)
    if field == "cpus" and isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, float):
        return format_number(value)
    return printable(str(value))


def _fit(text: str, width: int) -> str:
    """Shorten a name in the middle, because it ends with a version."""
    if len(text) <= width or width < 12:
        return text[:width]
    tail = min(8, width // 3)
    return f"{text[: width - tail - 2]}..{text[-tail:]}"
