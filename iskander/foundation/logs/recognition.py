"""Recognition of the event of a log line, by its name in JSON and else by its text.

The text of an event is a function of its fields. Applied to placeholders, it shows the parts that
all texts of the event have.

Pure.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from typing import Any

from iskander.foundation.logs.catalog import EVENTS
from iskander.foundation.logs.event import ERROR, Event

MARK = "\N{BLACK SQUARE}"
"""Printed by all placeholders."""
LINE = re.compile(r"(?:\b([DIWEC]) (?:\[\w+\] )?)?(?<![\w.])(iskander(?:\.\w+)+): (.*)")
"""Text line: level if it is timed, logger, text. Its begin may be that of another program."""
REPEATED = re.compile(r" \(repeated \d+ times in \d+ s\)\Z")


class _Number(int):
    """Placeholder of a number."""

    def __format__(self, spec: str) -> str:
        return MARK


class _Failure(Exception):
    """Placeholder of an exception."""

    def __repr__(self) -> str:
        return MARK


_Failure.__name__ = MARK
_PLACEHOLDERS = {int: _Number(), float: _Number(), str: MARK}


def recognize(line: str) -> list[Event[Any]]:
    """Return the event of a line; several if their texts do not differ, none if it has no event."""
    if (start := line.find("{")) >= 0 and (event := _named(line[start:])) is not None:
        return [event]
    match = LINE.search(line)
    if match is None:
        return []
    letter, logger, text = match.groups()
    text = REPEATED.sub("", text)
    found: dict[int, list[Event[Any]]] = {}
    for event in EVENTS.values():
        is_source = event.logger_name == logger
        if is_source and (not letter or logging.getLevelName(event.level)[0] == letter):
            parts = _constant_parts(event)
            if _has_parts(text, parts):
                found.setdefault(sum(map(len, parts)), []).append(event)
    return found[max(found)] if found else []


def _named(text: str) -> Event[Any] | None:
    """Return the event of a JSON line."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = line.get("event") if isinstance(line, dict) else None
    return EVENTS.get(name) if isinstance(name, str) else None


def _has_parts(text: str, parts: list[str]) -> bool:
    """Whether a text has these parts in their order, the first at its begin, the last at its end.

    In linear time: the leftmost place of a part leaves the most space for those after it.
    """
    first, *between, last = parts if len(parts) > 1 else (parts[0], "")
    end = len(text) - len(last)
    at = len(first)
    if at > end or not text.startswith(first) or not text.endswith(last):
        return False
    for part in between:
        found = text.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return len(parts) > 1 or text == first


@functools.cache
def _constant_parts(event: Event[Any]) -> list[str]:
    """Return the parts of an event's text around its fields."""
    fields = {key: _PLACEHOLDERS[kind] for key, kind in event.fields.items()}
    failure = {ERROR: _Failure(MARK)} if event.has_traceback else {}
    return event.text(**fields, **failure).split(MARK)
