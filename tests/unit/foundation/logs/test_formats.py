"""Formats of lines: text, JSON, priorities of the journal."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import pytest

from iskander.foundation.logs import workers
from iskander.foundation.logs.formats import (
    LIBRARY_MESSAGE,
    TRACEBACK_MAX,
    JournalFormat,
    JsonFormat,
    TextFormat,
    priority,
)

FAKE = "x\n13:00:00 E iskander.server: forged\x1b[31m\u2028"


def logged(caplog: pytest.LogCaptureFixture, running: str = "with 1 batch") -> logging.LogRecord:
    workers.worker_ended(worker=3, running=running)
    return caplog.records[-1]


def failed(error: BaseException) -> logging.LogRecord:
    try:
        raise error
    except BaseException as raised:
        return logging.LogRecord(
            "iskander.worker", logging.ERROR, "", 0, "failed", None, (type(raised), raised, None)
        )


def test_text(caplog: pytest.LogCaptureFixture) -> None:
    line = TextFormat().format(logged(caplog))
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d E iskander\.supervisor: worker 3 has ended, with 1 batch", line
    )
    tagged = TextFormat("2").format(logged(caplog))
    assert " E [2] iskander.supervisor: " in tagged


def test_text_of_a_value_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    line = TextFormat().format(logged(caplog, FAKE))
    assert line.isprintable() and r"\n13:00:00 E" in line and r"\x1b" in line


def test_traceback_in_text_is_indented() -> None:
    first, *others = TextFormat().format(failed(ValueError("a\nb"))).splitlines()
    assert first.endswith("iskander.worker: failed")
    assert others[-2:] == ["    ValueError: a", "    b"]
    assert all(line.startswith("    ") for line in others)


@pytest.mark.parametrize("form", [TextFormat(), JsonFormat()])
def test_traceback_has_a_maximum_length(form: logging.Formatter) -> None:
    error = ValueError("x" * 1_000_000 + "the end")
    line = form.format(failed(error))
    assert len(line) < TRACEBACK_MAX + 500 and "the end" in line


def test_causes_of_exceptions_of_model_code_are_omitted() -> None:
    error = ValueError("last")
    error.__cause__ = KeyError("first")
    form = TextFormat()
    assert "first" in form.format(failed(error))
    form.is_chained = False
    assert "first" not in form.format(failed(error))


def test_json(caplog: pytest.LogCaptureFixture) -> None:
    line: dict[str, Any] = json.loads(JsonFormat(1).format(logged(caplog, FAKE)))

    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", line.pop("time"))
    assert line.pop("pid") > 0
    assert line == {
        "level": "error",
        "logger": "iskander.supervisor",
        "event": "worker_ended",
        "message": f"worker 3 has ended, {FAKE}",
        "process": 1,
        "worker": 3,
        "running": FAKE,
    }


def test_json_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    assert len(JsonFormat().format(logged(caplog, FAKE)).split("\n")) == 1
    assert "\n" not in JsonFormat().format(failed(ValueError("a\nb")))


def test_line_of_a_library_has_its_own_event() -> None:
    record = logging.LogRecord("asyncio", logging.WARNING, "", 0, "slow %d", (3,), None)
    line = json.loads(JsonFormat().format(record))
    assert (line["event"], line["message"], line["logger"]) == (
        LIBRARY_MESSAGE,
        "slow 3",
        "asyncio",
    )


def test_journal_lines_have_their_priority(caplog: pytest.LogCaptureFixture) -> None:
    line = JournalFormat(TextFormat(is_timed=False)).format(logged(caplog))
    assert line == "<3>iskander.supervisor: worker 3 has ended, with 1 batch"
    lines = JournalFormat(TextFormat()).format(failed(ValueError("no"))).splitlines()
    assert len(lines) > 1 and all(each.startswith("<3>") for each in lines)
    assert JournalFormat(JsonFormat()).format(logged(caplog)).startswith('<3>{"time"')


def test_priorities_are_those_of_syslog() -> None:
    levels = (logging.CRITICAL, logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)
    assert [priority(level) for level in levels] == [2, 3, 4, 6, 7]
