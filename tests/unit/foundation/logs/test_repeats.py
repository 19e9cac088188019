"""Limit of repeated lines."""

from __future__ import annotations

import logging
import sys
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from iskander.foundation.logs import workers
from iskander.foundation.logs.repeats import FIRST, SUBJECTS_MAX, WINDOW_S, Repeats, subject_of


def record(worker: int, at_s: float, text: str = "text", **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("iskander.supervisor", logging.ERROR, "", 0, text, None, None)
    made.created = at_s
    made.__dict__["log_event"] = workers.worker_ended
    made.__dict__["log_fields"] = {"worker": worker, "running": text}
    made.__dict__.update(more)
    return made


def write(repeats: Repeats, *records: logging.LogRecord) -> list[str]:
    lines = []
    for each in records:
        lines += [summary.getMessage() for summary in repeats.due(each.created)]
        if repeats.admit(each):
            lines.append(each.getMessage())
    return lines


def test_first_lines_pass_and_then_one_has_the_number_of_the_others() -> None:
    repeats = Repeats()
    lines = write(repeats, *(record(1, 100 + 0.1 * n, f"line {n}") for n in range(FIRST + 7)))

    assert lines == [f"line {n}" for n in range(FIRST)]
    (later, now) = write(repeats, record(2, 100 + WINDOW_S, "other"))
    assert later == f"line {FIRST + 6} (repeated 7 times in 2 s)" and now == "other"
    assert write(repeats, record(1, 101 + WINDOW_S, "again")) == ["again"]


def test_subjects_are_counted_apart() -> None:
    repeats = Repeats()
    lines = write(repeats, *(record(n % 3, 100.0) for n in range(3 * FIRST)))
    assert len(lines) == 3 * FIRST


def test_few_lines_have_no_summary() -> None:
    repeats = Repeats()
    write(repeats, *(record(1, 100.0) for _ in range(FIRST)))
    assert list(repeats.end()) == []


def test_table_is_bounded_and_loses_no_count() -> None:
    repeats = Repeats()
    write(repeats, *(record(0, 100.0) for _ in range(FIRST + 5)))
    lines = write(repeats, *(record(n, 100.0, f"first of {n}") for n in range(1, SUBJECTS_MAX + 9)))

    assert len(repeats._counts) <= SUBJECTS_MAX
    assert lines.count("text (repeated 5 times in 1 s)") == 1


def test_summary_keeps_no_traceback() -> None:
    repeats = Repeats()
    try:
        raise ValueError("its frames hold memory")
    except ValueError:
        held = sys.exc_info()
    write(repeats, *(record(1, 100.0, exc_info=held) for _ in range(FIRST + 1)))

    (summary,) = repeats.end()
    assert summary.exc_info is None and summary.__dict__["repeated"] == 1


def test_clock_that_was_set_back_ends_the_counts() -> None:
    repeats = Repeats()
    write(repeats, *(record(1, 1000.0) for _ in range(FIRST + 3)))
    assert write(repeats, record(1, 10.0, "later")) == ["text (repeated 3 times in 1 s)", "later"]


def test_lines_of_libraries_are_limited_by_their_format() -> None:
    first = logging.LogRecord("asyncio", logging.ERROR, "", 0, "slow %s", ("a",), None)
    second = logging.LogRecord("asyncio", logging.ERROR, "", 0, "slow %s", ("b",), None)
    assert subject_of(first) == subject_of(second)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 8)), max_size=200))
def test_every_line_is_written_or_counted(steps: list[tuple[int, float]]) -> None:
    repeats, now, written, counted = Repeats(), 0.0, 0, 0
    for worker, pause_s in steps:
        now += pause_s
        each = record(worker, now)
        counted += sum(summary.__dict__["repeated"] for summary in repeats.due(now))
        written += repeats.admit(each)
    counted += sum(summary.__dict__["repeated"] for summary in repeats.end())
    assert written + counted == len(steps)
