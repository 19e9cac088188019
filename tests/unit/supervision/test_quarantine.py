"""The rate of worker deaths that isolates a model, and which deaths count."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from iskander.supervision.quarantine import QUARANTINE_MAX_S, DeathRate
from iskander.supervision.worker import ProcessExit
from iskander.transport.machine_memory import oom_kills

WINDOW_NS = 100


def test_deaths_within_a_window_are_too_many_and_are_counted_once() -> None:
    rate = DeathRate(3, WINDOW_NS)
    assert [rate.note(at_ns) for at_ns in (0, 50, 100, 110, 120, 130)] == [
        False, False, True, False, False, True,
    ]  # fmt: skip


def test_deaths_that_are_far_between_are_never_too_many() -> None:
    rate = DeathRate(3, WINDOW_NS)
    assert not any(rate.note(51 * n) for n in range(100))


def test_after_a_quarantine_one_death_is_enough_until_a_window_was_free_of_them() -> None:
    rate = DeathRate(3, WINDOW_NS)
    assert [rate.note(at_ns) for at_ns in (0, 1, 2)] == [False, False, True]
    rate.begin_quarantine(60.0)
    rate.released_ns = 200
    assert rate.note(250)
    rate.begin_quarantine(60.0)
    rate.released_ns = 300
    assert not rate.note(300 + WINDOW_NS + 1)


def test_each_quarantine_is_twice_as_long_as_the_one_before_up_to_an_hour() -> None:
    rate = DeathRate(3, WINDOW_NS)
    assert [rate.begin_quarantine(60.0) for _ in range(3)] == [60.0, 120.0, 240.0]
    for _ in range(100):
        longest = rate.begin_quarantine(60.0)
    assert longest == QUARANTINE_MAX_S


@pytest.mark.parametrize(
    ("code", "was_killed", "was_hung", "was_out_of_memory", "is_own"),
    [
        (-signal.SIGSEGV, False, False, False, True),
        (1, False, False, False, True),
        (0, False, False, False, True),
        (None, False, False, False, True),
        (-signal.SIGKILL, False, False, False, False),
        (-signal.SIGKILL, False, False, True, True),
        (-signal.SIGKILL, True, False, True, False),
        (-signal.SIGKILL, True, True, False, True),
        (-signal.SIGTERM, False, False, False, False),
        (-signal.SIGINT, False, False, False, False),
    ],
)
def test_whose_doing_an_end_was(
    code: int | None, was_killed: bool, was_hung: bool, was_out_of_memory: bool, is_own: bool
) -> None:
    end = ProcessExit(code, was_killed)
    assert end.is_model_fault(was_hung=was_hung, was_out_of_memory=was_out_of_memory) == is_own


@pytest.mark.parametrize(
    ("text", "count"),
    [("nr_free_pages 1\noom_kill 7\n", 7), ("oom_kill", 0), ("oom_kill x", 0), ("", 0)],
)
def test_processes_ended_for_want_of_memory(tmp_path: Path, text: str, count: int) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text(text)
    assert oom_kills(counters) == count
    assert oom_kills(tmp_path / "missing") == 0
