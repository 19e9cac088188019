"""Events of log lines, by their texts alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from iskander.foundation.logs.catalog import EVENTS
from iskander.foundation.logs.event import ERROR, Event
from iskander.foundation.logs.formats import LIBRARY_MESSAGE, JournalFormat, JsonFormat, TextFormat
from iskander.foundation.logs.recognition import recognize

VALUES: dict[type, Any] = {int: 4711, float: 2.5, str: "a: `b`, was c"}
JOURNAL = JournalFormat(TextFormat("7561", is_timed=False))


def record_of(event: Event[Any]) -> logging.LogRecord:
    fields = {name: VALUES[kind] for name, kind in event.fields.items()}
    failure = {ERROR: ValueError("of a model")} if event.has_traceback else {}
    text = event.text(**fields, **failure)
    record = logging.LogRecord(event.logger_name, event.level, "", 0, text, None, None)
    record.__dict__["log_event"] = event
    return record


@pytest.mark.parametrize("name", EVENTS)
def test_text_line_has_one_event(name: str) -> None:
    record = record_of(EVENTS[name])
    assert recognize(TextFormat().format(record)) == [EVENTS[name]]
    assert recognize(TextFormat("1").format(record)) == [EVENTS[name]]
    assert recognize(JsonFormat(1).format(record)) == [EVENTS[name]]
    assert EVENTS[name] in recognize(JOURNAL.format(record))  # Without its level.


def test_line_of_journalctl() -> None:
    prefix = "Nov 26 13:16:42 host iskander-gateway[7]: [7561] "
    line = "iskander.supervisor: worker 3 has ended, idle"
    assert recognize(prefix + line) == [EVENTS["worker_ended"]]


def test_summary_of_repeats_has_the_event_of_its_lines() -> None:
    line = "13:20:10 E iskander.gateway: reload failed (repeated 4711 times in 10 s)"
    assert recognize(line) == [EVENTS["reload_failed"]]


@pytest.mark.parametrize("name", EVENTS)
def test_long_line_takes_linear_time(name: str) -> None:
    """With backtracking, a text with four fields would take centuries."""
    event = EVENTS[name]
    text = record_of(event).getMessage()
    line = f"iskander.none: {event.logger_name}: " + text[:-1] * 2000
    assert recognize(line) == []
    recognize(line.removeprefix("iskander.none: "))


@pytest.mark.parametrize(
    "line",
    [
        "",
        "iskander.a." * 20_000,
        '{"a":' * 5000,
        '{"event":["worker_ended"]}',
        "    ValueError: broken",
        "13:20:10 E iskander.supervisor: no such text",
        "13:20:10 I iskander.supervisor: worker 3 has ended, idle",
        "13:20:10 E uvicorn.error: worker 3 has ended, idle",
        '{"event":"' + LIBRARY_MESSAGE + '"}',
        '{"event":{}} [',
    ],
)
def test_other_lines_have_none(line: str) -> None:
    assert recognize(line) == []
